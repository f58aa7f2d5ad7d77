#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""DRAM bytes of every kernel of a layer's forward and backward pass, over those of every array moved once.

Gathered rows are counted once per token, as if L2 held them until their last expert, and once per slot, as if it held
none: the first is what could be, the second what a kernel may cost.

Profiles the first call of each pass in bench_libraries with Nsight Compute, caches flushed before every kernel, and
writes a results file.
Needs the right to read counters: run as root, or see ncu's ERR_NVGPUCTRPERM.

  tools/dram_bytes.py --config 7B-n256 --config TR-b --device H200 --out bench/results/archive/h200/FILE.json
"""

import argparse
import csv
import datetime
import itertools
import json
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent.resolve()
CONFIGS = ROOT / "cli" / "bench_configs.hpp"
METRICS = {
    "dram__bytes_read.sum": "dram_read",
    "dram__bytes_write.sum": "dram_write",
    "gpu__time_duration.sum": "ns",
}
LIMIT = 1.15  # of the bytes per slot: a kernel that moves more has lost data that L2 should have kept
SCORE_GROUP = 128  # columns of h behind one partial sum of ds
LAUNCHES = 32  # bench_libraries begins with a forward and a backward call of 8 kernels each; others follow
# The names of kernels begin with their op's; both weight gradients of the experts are one kernel.
OPS = (
    "router_logits route metadata up_projection_fwd down_projection_fwd aggregate down_projection_dgrad router_dlogits"
    " projection_wgrad up_projection_dgrad router_wgrad"
).split()


class Shape(NamedTuple):
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int


class Kernel(NamedTuple):
    name: str
    dram_read: float
    dram_write: float
    ns: float


def shape_of(config: str, configs: str) -> Shape:
    """The shape that `tessera bench` has by this name; the formulas below are those of gated layers without biases."""
    found = re.search(rf'{{"{re.escape(config)}", bench_shape\(([\d, ]+)\)}}', configs)
    if not found:
        sys.exit(f"--config {config}: no swiglu layer of this name in {CONFIGS.relative_to(ROOT)}")
    return Shape(*(int(value) for value in found[1].split(",")))


def bytes_once(op: str, backward: bool, shape: Shape, gathered_rows: int) -> int:
    """Every array once, but `gathered_rows` of what is gathered; bf16 gradients; 0 for what has no formula."""
    t, d, n, e, k = shape
    r = t * k
    g = gathered_rows
    partials = 4 * r * -(-n // SCORE_GROUP)
    forward_ops = {
        "router_logits": 2 * t * d + 2 * e * d + 4 * t * e,
        "route": 4 * t * e + 8 * r,
        "metadata": 4 * r + 12 * r + 4 * e,
        "up_projection_fwd": 2 * g * d + 4 * e * n * d + 6 * r * n,
        "down_projection_fwd": 2 * r * n + 2 * e * n * d + 2 * r * d,
        "aggregate": 2 * r * d + 8 * r + 2 * t * d,
    }
    backward_ops = {
        "down_projection_dgrad": 2 * g * d + 2 * e * n * d + 10 * r * n + 4 * r + partials,
        "router_dlogits": partials + 20 * r + 2 * t * e,
        "projection_wgrad": 4 * g * d + 6 * r * n + 6 * e * n * d,
        "up_projection_dgrad": 4 * r * n + 4 * e * n * d + 4 * r + 2 * e * d + 2 * r * d,
        "aggregate": 2 * r * d + 4 * r + 2 * t * d,
        "router_wgrad": 2 * t * e + 2 * t * d + 2 * e * d,
    }
    return (backward_ops if backward else forward_ops).get(op, 0)


def op_of(kernel: str) -> str:
    """`void tessera::cuda::metadata_rank<..>(..)`, or as ncu's base names `void metadata_rank` -> metadata."""
    named = re.sub(r"(<unnamed>|\(anonymous namespace\))::", "", kernel)
    name = re.split(r"[<(]", named, maxsplit=1)[0].split("::")[-1].split()[-1]
    return max((op for op in OPS if name.startswith(op)), key=len, default=name)


def parse(output: str) -> list[Kernel]:
    """The kernels in `ncu --csv --page raw --print-units base`: other lines, a header, units, a line per launch."""
    table = list(csv.reader(line for line in output.splitlines() if line.startswith('"')))
    if len(table) < 3:
        return []
    kernels = []
    for line in table[2:]:
        cell = dict(zip(table[0], line))
        counts = {field: float(cell[metric].replace(",", "")) for metric, field in METRICS.items()}
        kernels.append(Kernel(name=cell["Kernel Name"], **counts))
    return kernels


def first_calls(kernels: list[Kernel]) -> list[tuple[bool, Kernel]]:
    """(backward, kernel) of the first forward and backward call, found by the kernels that they begin with."""
    first = ("router_logits", "down_projection_dgrad")
    starts = [(i, first.index(op)) for i, op in enumerate(map(op_of, (k.name for k in kernels))) if op in first]
    forward = next((i for i, which in starts if which == 0), None)
    backward = next((i for i, which in starts if which == 1), None)
    if forward is None or backward is None or starts[-1][0] <= backward:
        found = " ".join(op_of(k.name) for k in kernels)
        sys.exit(f"{len(kernels)} kernels do not hold a whole forward and a whole backward call: {found}")

    def end(begin: int) -> int:
        return next((i for i, _ in starts if i > begin))

    return [(False, k) for k in kernels[forward : end(forward)]] + [
        (True, k) for k in kernels[backward : end(backward)]
    ]


def rows_of(config: str, shape: Shape, kernels: list[tuple[bool, Kernel]]) -> list[dict]:
    """A row per op and pass; ops of several launches are added up."""
    rows: dict[tuple[bool, str], dict] = {}
    for backward, kernel in kernels:
        op = op_of(kernel.name)
        row = rows.setdefault(
            (backward, op),
            {"config": config, "shape": list(shape), "dtype": "bf16", "routing": "random", "pass": op,
             "backward": backward, "impl": "tessera", "us": 0.0, "dram_read": 0, "dram_write": 0,
             "bytes": bytes_once(op, backward, shape, shape.tokens),
             "bytes_per_slot": bytes_once(op, backward, shape, shape.tokens * shape.top_k)},
        )  # fmt: skip
        row["us"] = round(row["us"] + kernel.ns * 1e-3, 3)
        row["dram_read"] += int(kernel.dram_read)
        row["dram_write"] += int(kernel.dram_write)
    for row in rows.values():
        if row["bytes"]:
            moved = row["dram_read"] + row["dram_write"]
            row["ratio"] = round(moved / row["bytes"], 3)
            row["ratio_per_slot"] = round(moved / row["bytes_per_slot"], 3)
    return list(rows.values())


def profile(ncu: str, bench: str, library: str, shape: Shape) -> list[Kernel]:
    dimensions = zip(("--tokens", "--hidden", "--intermediate", "--experts", "--top-k"), map(str, shape))
    command = [
        ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base",
        "--metrics", ",".join(METRICS), "--kernel-name-base", "demangled",
        "--kernel-name", "regex:tessera::cuda", "--launch-count", str(LAUNCHES), "--kill", "on",
        bench, "--library", f"layer={library}", "--rounds", "1", *itertools.chain(*dimensions),
    ]  # fmt: skip
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        sys.exit(f"--ncu {ncu}: not found; Nsight Compute comes with the CUDA toolkit, or give its path")
    kernels = parse(run.stdout)
    if not kernels:
        sys.exit(f"{shape}: ncu gave no kernels (exit {run.returncode})\n{run.stderr[-2000:]}{run.stdout[-2000:]}")
    return kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", default=str(ROOT / "build-cuda" / "bin" / "bench_libraries"), metavar="PROGRAM")
    parser.add_argument("--library", default=str(ROOT / "build-cuda" / "lib" / "libtessera.so"), metavar="FILE")
    parser.add_argument("--ncu", default="ncu")
    parser.add_argument("--config", action="append", required=True, metavar="NAME", help="one of `tessera bench`")
    parser.add_argument("--device", required=True, metavar="NAME", help="the GPU, for the results file")
    parser.add_argument("--commit", default="", help="what was built, for the results file")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE")
    args = parser.parse_args()
    configs = CONFIGS.read_text(encoding="utf-8")
    shapes = {config: shape_of(config, configs) for config in args.config}
    rows = []
    for config, shape in shapes.items():
        new = rows_of(config, shape, first_calls(profile(args.ncu, args.bench, args.library, shape)))
        for row in new:
            side = "backward" if row["backward"] else "forward"
            mb = (row["dram_read"] + row["dram_write"]) / 1e6
            note = ""
            if "ratio" in row:
                over = f", over {LIMIT}" if row["ratio_per_slot"] > LIMIT else ""
                note = f"{row['ratio']:6.2f} {row['ratio_per_slot']:6.2f}{over}"
            print(f"{config:10} {side:8} {row['pass']:22} {row['us']:9.1f} us {mb:9.1f} MB {note}", flush=True)
        rows += new
    document = {
        "command": "tools/dram_bytes.py " + " ".join(f"--config {config}" for config in args.config),
        "commit": args.commit,
        "device": args.device,
        "date": datetime.date.today().isoformat(),
        "protocol": "first call of each pass, one kernel at a time, caches flushed before each; bytes: every array"
        " once, gathered rows once per token, bytes_per_slot: once per slot; what is left in L2 at the end of a kernel"
        " is not written to DRAM",
        "rows": rows,
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Held-out loss and load of the small language model, by router and token rounding.

usage: routers.py PROGRAM [--steps N] [--seeds 1,2] [--tile M] [--out FILE] [--picture FILE.svg] [--text PATH ...]

Every run is `tessera train` with the same text and sizes; runs of one seed see the same batches. Held-out text is
judged without rounding, and after expert choice with tokens choosing. The picture needs gnuplot.
"""

import argparse
import datetime
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile

OWN_P = ["--normalize-scores"]
ROUTINGS = {
    "topk-softmax": [],
    "topk-softmax, no balancing": ["--balance", "0"],
    "softmax-topk": ["--router", "softmax-topk"],
    "sigmoid-bias": ["--router", "sigmoid-bias", *OWN_P],
    "sigmoid-bias, loss instead": ["--router", "sigmoid-bias", *OWN_P, "--bias-rate", "0"],
    "group-limited": ["--router", "group-limited", *OWN_P],
    "sqrtsoftplus": ["--router", "sqrtsoftplus", *OWN_P],
    "expert-choice": ["--router", "expert-choice"],
    **{f"topk-softmax, {rule}": ["--round", rule]
       for rule in ("nr-f", "sr-f", "nr-s", "balance-f", "up", "down")},
}


def train(program: str, flags: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run([program, "train", "--json", "--out", f"{folder}/run", *flags],
                             stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout)


def row_of(name: str, flags: list[str], seed: int, summary: dict) -> dict:
    keys = ("router", "round", "step", "held_out_bits_per_byte", "bigram_bits_per_byte", "expert_balance",
            "expert_variation", "idle_experts", "balance_loss", "bias_rate")
    return {"routing": name, "flags": " ".join(flags), "seed": seed, **{key: summary[key] for key in keys}}


def mean(rows: list[dict], name: str, key: str) -> float:
    return statistics.fmean(row[key] for row in rows if row["routing"] == name)


def table(rows: list[dict]) -> str:
    text = "| routing | held-out bits/byte | largest over mean load | idle experts |\n|---|---|---|---|\n"
    for name in ROUTINGS:
        values = [f"{row['held_out_bits_per_byte']:.3f}" for row in rows if row["routing"] == name]
        text += (f"| {name} | {', '.join(values)} | {mean(rows, name, 'expert_balance'):.2f} | "
                 f"{mean(rows, name, 'idle_experts'):.1f} |\n")
    return text


def draw(rows: list[dict], picture: pathlib.Path):
    """A dot for each run, a line of the picture for each routing, the best on top."""
    names = sorted(ROUTINGS, key=lambda name: -mean(rows, name, "held_out_bits_per_byte"))
    dots = "".join(f"{row['held_out_bits_per_byte']} {names.index(row['routing'])}\n" for row in rows)
    tics = ", ".join(f"'{name}' {i}" for i, name in enumerate(names))
    script = (f"set terminal svg size 760,{90 + 26 * len(names)} font 'sans-serif,13' background 'white'\n"
              f"set output '{picture}'\nset grid\nunset key\nset yrange [-0.7:{len(names) - 0.3}]\n"
              f"set ytics ({tics})\nset xlabel 'held-out bits per byte, a dot for each seed'\n"
              f"plot '-' using 1:2 with points pt 7 ps 0.8 lc rgb '#1f77b4'\n{dots}e\n")
    subprocess.run(["gnuplot"], input=script, text=True, check=True)
    lines = picture.read_text().splitlines()
    picture.write_text("".join(line.rstrip() + "\n" for line in lines))  # gnuplot leaves blanks at ends


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--tile", type=int, default=32)
    parser.add_argument("--text", nargs="+", default=["README.md", "docs", "include", "lm", "src"])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--picture", type=pathlib.Path)
    options = parser.parse_args()
    common = ["--steps", str(options.steps)]
    for path in options.text:
        common += ["--text", path]
    rows = []
    for name, flags in ROUTINGS.items():
        for seed in map(int, options.seeds.split(",")):
            print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
            rounding = ["--tile", str(options.tile)] if "--round" in flags else []
            summary = train(options.program, [*common, *flags, *rounding, "--seed", str(seed)])
            rows.append(row_of(name, flags, seed, summary))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    document = {"command": f"bench/lm/routers.py --steps {options.steps} --seeds {options.seeds} "
                           f"--tile {options.tile} --text {' '.join(options.text)}",
                "commit": commit, "device": platform.machine(), "date": str(datetime.date.today()),
                "protocol": "tessera train with its default sizes, one run per routing and seed; losses do not "
                            "depend on machine or threads",
                "rows": rows}
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    if options.picture:
        draw(rows, options.picture)
    print(table(rows))


if __name__ == "__main__":
    main()

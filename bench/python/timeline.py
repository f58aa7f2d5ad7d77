#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The kernels of a layer on the GPU's own clock: how long each takes among the others, and what lies between two.

usage: timeline.py [--config NAME,NAME] [--passes N] [--out FILE]

A kernel timed alone runs at another clock and begins on an idle device. Here the layer runs again and again, and the
times are those that CUPTI reports through torch's profiler: medians over the passes. `gap_us` is the time from the
end of the previous kernel to the start of this one, negative where they overlap; the first kernel's is the time since
the previous pass. Forward is profiled alone (h is saved) and with backward after it; of the decode
configurations inference alone.
"""

import argparse
import datetime
import json
import pathlib
import re
import statistics
import tempfile

import tessera
import torch
from layer import CONFIGS as LAYERS
from torch.profiler import ProfilerActivity, profile

CONFIGS = {**{name: LAYERS[name]
              for name in ("1.4B-n256", "7B-n256", "7B-n512", "7B-n1024", "Qwen3Next", "Qwen3-30B", "OLMoE")},
           **{f"decode-{tokens}": (tokens, 2048, 768, 128, 8) for tokens in (1, 16, 64)}}


def short_name(name: str) -> str:
    """The kernel without namespaces and template arguments."""
    name = name.removeprefix("void ").split("(")[0]
    return re.sub(r"<.*", "", name).split("::")[-1]


def events(run, passes: int) -> list[dict]:
    """Everything that ran on the GPU during `passes` calls of run, in order of its start."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(passes):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return sorted((e for e in trace if e.get("cat") in kinds), key=lambda e: e["ts"])


def timeline(run, passes: int) -> list[dict]:
    all_events = events(run, passes)
    count, left = divmod(len(all_events), passes)
    if left:
        raise SystemExit(f"{len(all_events)} kernels in {passes} passes: the passes differ")
    rows = []
    for place in range(count):
        here = range(place + count, len(all_events), count)  # but for the first pass
        names = {short_name(all_events[i]["name"]) for i in here}
        if len(names) != 1:
            raise SystemExit(f"place {place} holds {sorted(names)}: the passes differ")
        gaps = [all_events[i]["ts"] - all_events[i - 1]["ts"] - all_events[i - 1]["dur"] for i in here]
        rows.append({"place": place, "kernel": names.pop(), "us": statistics.median(all_events[i]["dur"] for i in here),
                     "gap_us": round(statistics.median(gaps), 3)})
    starts = [all_events[i]["ts"] for i in range(count, len(all_events), count)]
    period = statistics.median(b - a for a, b in zip(starts, starts[1:], strict=False))
    return rows + [{"place": count, "kernel": "pass", "us": round(period, 3), "gap_us": 0}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="7B-n256,7B-n512,1.4B-n256")
    parser.add_argument("--passes", type=int, default=60)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    rows = []
    for config in args.config.split(","):
        tokens, hidden, intermediate, experts, top_k = CONFIGS[config]
        torch.manual_seed(1)
        layer = tessera.MoE(hidden, intermediate, experts, top_k, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        d_o = torch.randn_like(x)
        inputs = (x, *layer.parameters())

        def both(layer=layer, x=x, d_o=d_o, inputs=inputs) -> None:
            torch.autograd.grad(layer(x), inputs, d_o)

        def forward(layer=layer, x=x) -> None:
            layer(x)

        decodes = config.startswith("decode")
        inference = torch.no_grad()(forward)
        for name, run in ((("inference", inference),) if decodes else
                          (("forward", forward), ("forward-backward", both))):
            for _ in range(300):  # until the clock has settled
                run()
            for row in timeline(run, args.passes):
                rows.append({"config": config, "pass": name, **row})
                numbers = f"{row['us']:9.2f} us, gap {row['gap_us']:7.2f}"
                print(f"{config:10} {name:17} {row['kernel']:40} {numbers}", flush=True)
    if args.out:
        head = {"command": "bench/python/timeline.py", "device": torch.cuda.get_device_name(),
                "date": datetime.date.today().isoformat(), "torch": torch.__version__}
        lines = ",\n".join(json.dumps(row) for row in rows)
        args.out.write_text(json.dumps(head)[:-1] + ', "rows": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()

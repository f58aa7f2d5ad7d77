#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of the experts on the CPU: Tessera against torch's grouped_mm, in one process.

usage: grouped_mm.py [--config cpu-small,cpu-mid] [--dtype fp32,bf16] [--seconds S] [--threads N] [--out FILE]

Both get the same tensors and a new random routing in every iteration, and take turns. torch-grouped-mm is the usual
layer: sort, gather, grouped_mm, silu(gate) * up, grouped_mm, weight, add per token. Each row is checked first: output
and gradients of both against fp64.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import time

import tessera
import torch
from torch.nn import functional

CONFIGS = {"cpu-small": (2048, 256, 128, 32, 4), "cpu-mid": (4096, 512, 256, 64, 8)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Largest relative error in the norm that passes the check: a few roundings, far from a wrong result.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


def grouped_mm(x, ids, scores, w_up, w_down):
    top_k = ids.shape[1]
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    token = order // top_k
    ends = torch.bincount(flat, minlength=w_up.shape[0]).cumsum(0).int()
    gate, up = functional.grouped_mm(x[token], w_up.mT, offs=ends).chunk(2, dim=-1)
    y = functional.grouped_mm(functional.silu(gate) * up, w_down.mT, offs=ends)
    y = y * scores.flatten()[order, None].to(y.dtype)
    return torch.zeros_like(x).index_add(0, token, y)


def one_by_one(x, ids, scores, w_up, w_down):
    """The layer in the tensors' own type, expert by expert: the reference in fp64."""
    o = torch.zeros_like(x)
    for e in range(w_up.shape[0]):
        token, k = torch.where(ids == e)
        gate, up = (x[token] @ w_up[e].mT).chunk(2, dim=-1)
        y = (functional.silu(gate) * up) @ w_down[e].mT
        o = o.index_add(0, token, scores[token, k, None] * y)
    return o


IMPLEMENTATIONS = {"tessera": tessera.routed_experts, "torch-grouped-mm": grouped_mm}


def routing(tokens: int, experts: int, top_k: int, generator):
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k, dim=-1).indices
    return ids, torch.rand(tokens, top_k, generator=generator) * 0.95 + 0.05


def passes(layer, leaves: list, ids, scores, d_o):
    """(ms forward, ms backward, output and gradients)."""
    scores = scores.detach().requires_grad_()
    inputs = (leaves[0], scores, *leaves[1:])
    start = time.perf_counter()
    o = layer(leaves[0], ids, scores, *leaves[1:])
    middle = time.perf_counter()
    gradients = torch.autograd.grad(o, inputs, d_o)
    end = time.perf_counter()
    return 1e3 * (middle - start), 1e3 * (end - middle), (o.detach(), *gradients)


def check(name: str, dtype: str, results, reference) -> None:
    for what, got, exact in zip(("o", "dx", "dscores", "dw_up", "dw_down"), results, reference, strict=True):
        error = ((got.double() - exact).norm() / exact.norm()).item()
        if not error <= TOLERANCE[dtype]:
            raise SystemExit(f"{name} {dtype}: {what} is off by {error:.2e}, more than {TOLERANCE[dtype]}")


def measure(config: str, dtype: str, seconds: float) -> list[dict]:
    tokens, hidden, intermediate, experts, top_k = CONFIGS[config]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return (torch.rand(shape, generator=generator) * 2 - 1) / (shape[-1] / 3) ** 0.5

    x = 3**0.5 * (torch.rand(tokens, hidden, generator=generator) * 2 - 1)
    w_up, w_down = draw(experts, 2 * intermediate, hidden), draw(experts, hidden, intermediate)
    exact = [t.to(DTYPES[dtype]) for t in (x, w_up, w_down)]
    d_o = (torch.rand(tokens, hidden, generator=generator) * 2 - 1).to(DTYPES[dtype])
    leaves = [t.clone().requires_grad_() for t in exact]
    ids, scores = routing(tokens, experts, top_k, generator)
    reference = passes(one_by_one, [t.double().requires_grad_() for t in exact], ids, scores.double(), d_o.double())[2]
    for name, layer in IMPLEMENTATIONS.items():
        check(name, dtype, passes(layer, leaves, ids, scores, d_o)[2], reference)
    times = {name: ([], []) for name in IMPLEMENTATIONS}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or len(times["tessera"][0]) < 15:
        ids, scores = routing(tokens, experts, top_k, generator)
        for name, layer in IMPLEMENTATIONS.items():
            forward, backward, _ = passes(layer, leaves, ids, scores, d_o)
            times[name][0].append(forward)
            times[name][1].append(backward)
    rows = []
    for name, (forward, backward) in times.items():
        both = [f + b for f, b in zip(forward, backward, strict=True)]
        samples = (("forward", forward, 6), ("backward", backward, 12), ("forward+backward", both, 18))
        for what, sample, factor in samples:
            deciles = statistics.quantiles(sample, n=10)
            ms = statistics.median(sample)
            rows.append({
                "config": config, "shape": list(CONFIGS[config]), "dtype": dtype, "gpus": 0, "routing": "random",
                "router": "given", "round": "none", "pass": what, "impl": name, "variant": "", "ms": round(ms, 3),
                "ms_p10": round(deciles[0], 3), "ms_p90": round(deciles[-1], 3), "samples": len(sample),
                "tflops": round(factor * tokens * top_k * intermediate * hidden / ms / 1e9, 4), "checked": True})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="cpu-small,cpu-mid")
    parser.add_argument("--dtype", default="fp32,bf16")
    parser.add_argument("--seconds", type=float, default=20, help="per configuration and type")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    load = [round(value, 1) for value in os.getloadavg()]
    rows = []
    for config in arguments.config.split(","):
        for dtype in arguments.dtype.split(","):
            rows += measure(config, dtype, arguments.seconds)
            ours, theirs = (next(r["ms"] for r in rows[-6:] if r["impl"] == name and r["pass"] == "forward+backward")
                            for name in IMPLEMENTATIONS)
            print(f"{config} {dtype}: tessera {ours:.2f} ms, torch-grouped-mm {theirs:.2f} ms, {theirs / ours:.2f}x")
    if arguments.out:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        cpu = next(line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
        result = {
            "command": f"bench/python/grouped_mm.py --config {arguments.config} --dtype {arguments.dtype} "
                       f"--seconds {arguments.seconds:g} --threads {arguments.threads} --out {arguments.out}",
            "commit": commit.stdout.strip(), "device": cpu, "driver": f"torch {torch.__version__}",
            "threads": arguments.threads, "load_average_before": load, "date": datetime.date.today().isoformat(),
            "protocol": "median; implementations take turns, new random routing in every iteration, data uniform",
            "rows": rows}
        with open(arguments.out, "w", encoding="utf-8") as file:
            file.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

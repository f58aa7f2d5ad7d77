#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of the whole layer, router included, on a GPU: Tessera against SonicMoE, in one process.

usage: layer.py [--config NAME,NAME] [--impl NAME,NAME] [--tokens T] [--zipf S] [--rounds N] [--out FILE]

All have the same x, weights and gradients, each the weights in the layout it likes best, and take turns; before a pass
is timed the GPU is kept busy until the host has called it. The router of every implementation finds in the first
columns of x numbers that no rounding makes equal, so that all choose the same experts: each as often, or, with
--zipf S, expert e with a weight of 1/(e+1)^S. Each is checked first: output
and gradients of all against fp64. cublas-bmm is what the layer's multiplications take as torch.bmm of experts with
equally many rows, without routing, gather, activation and sums.

sonicmoe needs sonic-moe and quack-kernels. Their first call tunes and compiles for minutes; --sonic-space whole lets it
try every configuration that it has, `clusters-2x1` those of clusters of two along m without swapped operands.
tessera-chunked makes y and dx rows of half the columns at a time, for a lower peak of memory: of the least multiple of
256 that is no fewer.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
import typing

import tessera
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CONFIGS = {"1.4B-n256": (40960, 768, 256, 128, 8), "7B-n256": (24576, 1536, 256, 128, 8),
           "7B-n512": (24576, 1536, 512, 64, 4), "7B-n1024": (24576, 1536, 1024, 32, 2),
           "30B-n256": (32768, 4096, 256, 256, 16), "30B-n1024": (32768, 4096, 1024, 64, 4),
           "120B-n512": (32768, 4096, 512, 256, 16), "Qwen3Next": (32768, 2048, 512, 512, 10),
           "Qwen3-30B": (32768, 2048, 768, 128, 8), "OLMoE": (32768, 2048, 1024, 64, 8)}
# Largest relative error in the norm that passes the check: a few roundings, far from a wrong result.
TOLERANCE = 2e-2
RESULTS = ("o", "dx", "dw_router", "dw_up", "dw_down")
BUSY_BYTES, BUSY_TIMES = 4 << 30, 6  # what the GPU writes while the host calls a pass: about seven milliseconds


def one_by_one(x, w_router, w_up, w_down, top_k: int):
    """The layer in the tensors' own type, expert by expert: the reference in fp64."""
    values, ids = functional.linear(x, w_router).topk(top_k, dim=-1)
    scores = values.softmax(-1)

    def expert(e: int, x, scores, up_rows, down_rows):
        token, k = torch.where(ids == e)
        gate, up = (x[token] @ up_rows.mT).chunk(2, dim=-1)
        y = (functional.silu(gate) * up) @ down_rows.mT
        return torch.zeros_like(x).index_add(0, token, scores[token, k, None] * y)

    o = torch.zeros_like(x)
    for e, (up_rows, down_rows) in enumerate(zip(w_up.unbind(), w_down.unbind(), strict=True)):
        o = o + checkpoint(expert, e, x, scores, up_rows, down_rows, use_reentrant=False)
    return o


class Tessera:
    """Weights: gate rows, then up rows."""

    def __init__(self, top_k: int):
        self.top_k = top_k

    def layout(self, w_up):
        return w_up

    concat = layout

    def __call__(self, x, w_router, w_up, w_down):
        return tessera.moe(x, w_router, w_up, w_down, top_k=self.top_k)


class Chunked(Tessera):
    """y and dx rows of half the columns at a time, or more: tiles of the GEMMs have 256 of them."""

    def __call__(self, x, w_router, w_up, w_down):
        return tessera.moe(x, w_router, w_up, w_down, top_k=self.top_k, column_chunk=-(-x.shape[1] // 512) * 256)


class SonicMoE:
    """Weights: a gate row, then its up row."""

    def __init__(self, top_k: int):
        from sonicmoe import moe_TC_softmax_topk_layer
        from sonicmoe.enums import ActivationType

        self.top_k, self.run, self.activation = top_k, moe_TC_softmax_topk_layer, ActivationType.SWIGLU

    def layout(self, w_up):
        return torch.stack(w_up.chunk(2, dim=1), dim=2).flatten(1, 2)

    def concat(self, w_up):
        return w_up.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)

    def __call__(self, x, w_router, w_up, w_down):
        stream = torch.cuda.current_stream().cuda_stream
        return self.run(x, w_router, w_up.permute(1, 2, 0), None, w_down.permute(1, 2, 0), None, self.top_k, stream,
                        self.activation)[0]


IMPLEMENTATIONS = {"tessera": Tessera, "tessera-chunked": Chunked, "sonicmoe": SonicMoE}


def restrict_sonic_space():
    import quack.gemm_config as space

    every = space._get_sm90_configs
    space._get_sm90_configs = lambda *args, **options: [
        c for c in every(*args, **options) if (c.cluster_m, c.cluster_n) == (2, 1) and not c.swap_ab]
    space._get_sm100_configs = space._get_sm120_configs = lambda *args, **options: []


class Gemms:
    """The layer's multiplications as torch.bmm of balanced experts."""

    def __init__(self, shape):
        tokens, d, n, experts, top_k = shape
        rows = tokens * top_k // experts

        def draw(*size):
            return torch.randn(size, device="cuda", dtype=torch.bfloat16)

        self.x, self.h, self.a = draw(experts, rows, d), draw(experts, rows, 2 * n), draw(experts, rows, n)
        self.w_up, self.w_down = draw(experts, 2 * n, d), draw(experts, d, n)
        self.out = [torch.empty_like(t) for t in (self.h, self.x, self.a, self.w_down, self.x, self.w_up)]

    def forward(self):
        torch.bmm(self.x, self.w_up.mT, out=self.out[0])
        torch.bmm(self.a, self.w_down.mT, out=self.out[1])

    def backward(self):
        torch.bmm(self.x, self.w_down, out=self.out[2])
        torch.bmm(self.x.mT, self.a, out=self.out[3])
        torch.bmm(self.h, self.w_up, out=self.out[4])
        torch.bmm(self.h.mT, self.x, out=self.out[5])


def problem(shape, zipf: float, generator):
    """x, w_router, w_up, w_down, d_o in bf16."""
    tokens, d, n, experts, _ = shape
    options = {"generator": generator, "device": "cuda"}

    def uniform(*size):
        return torch.rand(size, **options) * 2 - 1

    x = 3**0.5 * uniform(tokens, d)
    binades = torch.arange(128, 256, device="cuda") / 128
    distinct = torch.cat([sign * binades * scale for sign in (1, -1) for scale in (0.25, 0.5, 1)])
    numbers = distinct[torch.rand(tokens, len(distinct), **options).argsort(-1)[:, :experts]]
    gumbel = -torch.log(-torch.log(torch.rand(tokens, experts, **options).clamp(1e-6, 1 - 1e-6)))
    places = (gumbel - zipf * torch.arange(1, experts + 1, device="cuda").log()).argsort(-1, descending=True)
    x[:, :experts] = torch.empty_like(numbers).scatter_(1, places, numbers.sort(-1, descending=True).values)
    w_router = torch.eye(experts, d, device="cuda")
    w_up, w_down = uniform(experts, 2 * n, d) / (d / 3) ** 0.5, uniform(experts, d, n) / (n / 3) ** 0.5
    return [t.bfloat16() for t in (x, w_router, w_up, w_down, uniform(tokens, d))]


class Pass(typing.NamedTuple):
    """A forward and a backward pass."""

    marks: list  # before, between and behind them on the stream
    host: tuple[float, float]  # seconds of the calls
    saved: int  # bytes between them, besides output and inputs
    peak: int  # bytes at most in use
    results: tuple  # o and gradients


def passes(layer, leaves, d_o) -> Pass:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    begin = time.perf_counter()
    marks[0].record()
    o = layer(*leaves)
    marks[1].record()
    between = time.perf_counter()
    saved = torch.cuda.memory_allocated() - before - o.numel() * o.element_size()
    gradients = torch.autograd.grad(o, leaves, d_o)
    marks[2].record()
    host = between - begin, time.perf_counter() - between
    return Pass(marks, host, saved, torch.cuda.max_memory_allocated() - before, (o.detach(), *gradients))


def milliseconds(marks) -> list[float]:
    return [before.elapsed_time(after) for before, after in zip(marks, marks[1:], strict=False)]


def measure(config: str, shape, names: list[str], zipf: float, rounds: int) -> list[dict]:
    tokens, d, n, _, top_k = shape
    x, w_router, w_up, w_down, d_o = problem(shape, zipf, torch.Generator("cuda").manual_seed(0))
    exact = [t.double().requires_grad_() for t in (x, w_router, w_up, w_down)]
    reference = passes(lambda *leaves: one_by_one(*leaves, top_k), exact, d_o.double()).results
    del exact
    layers, leaves, facts = {}, {}, {}
    for name in names:
        layers[name] = layer = IMPLEMENTATIONS[name](top_k)
        leaves[name] = [t.clone().requires_grad_() for t in (x, w_router, layer.layout(w_up), w_down)]
        begin = time.monotonic()
        results = passes(layer, leaves[name], d_o).results
        torch.cuda.synchronize()
        first = time.monotonic() - begin
        results = [*results[:3], layer.concat(results[3]), results[4]]
        errors = {what: ((got.double() - exact).norm() / exact.norm()).item()
                  for what, got, exact in zip(RESULTS, results, reference, strict=True)}
        facts[name] = {"checked": max(errors.values()) <= TOLERANCE,
                       "errors": {what: float(f"{error:.2g}") for what, error in errors.items()},
                       "first_call_s": round(first, 1)}
        print(config, name, facts[name], flush=True)
    del reference, results
    gemms, busy = Gemms(shape), torch.empty(BUSY_BYTES, dtype=torch.uint8, device="cuda")
    times = {name: ([], []) for name in [*names, "cublas-bmm"]}
    hosts, memory = {name: ([], []) for name in names}, {}
    order = list(times)
    for i in range(rounds + 3):
        for name in order:
            for _ in range(BUSY_TIMES):
                busy.zero_()
            if name == "cublas-bmm":
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
                marks[0].record()
                gemms.forward()
                marks[1].record()
                gemms.backward()
                marks[2].record()
            else:
                run = passes(layers[name], leaves[name], d_o)
                marks, memory[name] = run.marks, (run.saved, run.peak)
                for sample, host in zip(hosts[name], run.host, strict=True):
                    sample.append(1e3 * host)
                del run
            torch.cuda.synchronize()
            if i >= 3:
                for sample, ms in zip(times[name], milliseconds(marks), strict=True):
                    sample.append(ms)
        order.append(order.pop(0))
    rows = []
    for name, samples in times.items():
        for i, (what, sample, factor) in enumerate(zip(("forward", "backward"), samples, (6, 12), strict=True)):
            deciles, ms = statistics.quantiles(sample, n=10), statistics.median(sample)
            rows.append({
                "config": config, "shape": list(shape), "dtype": "bf16", "gpus": 1,
                "routing": f"zipf-{zipf:g}" if zipf else "random",
                "router": "topk-softmax", "round": "none", "pass": what, "impl": name, "variant": "",
                "ms": round(ms, 4), "ms_p10": round(deciles[0], 4), "ms_p90": round(deciles[-1], 4),
                "samples": len(sample), "tflops": round(factor * tokens * top_k * n * d / ms / 1e9, 1),
                **(facts[name] if name in facts else {"checked": False})})
            if name in memory:
                rows[-1] |= {"host_ms": round(statistics.median(hosts[name][i]), 4), "saved_bytes": memory[name][0],
                             "transient_peak_bytes": memory[name][1]}
            print(f"{config:10} {what:8} {name:10} {ms:8.4f} ms {rows[-1]['tflops']:6.1f} TFLOP/s", flush=True)
    return rows


def versions(names: list[str]) -> dict:
    from importlib import metadata

    packages = {"sonicmoe": ("sonic-moe", "quack-kernels", "nvidia-cutlass-dsl")}
    return {package: metadata.version(package) for name in names for package in packages.get(name, ())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=",".join(CONFIGS), help="of " + ", ".join(CONFIGS))
    parser.add_argument("--impl", default="tessera,sonicmoe", help="of " + ", ".join(IMPLEMENTATIONS))
    parser.add_argument("--tokens", type=int, default=0, help="instead of the configuration's")
    parser.add_argument("--zipf", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sonic-space", choices=("whole", "clusters-2x1"), default="whole")
    parser.add_argument("--commit", default="", help="kept in the results file")
    parser.add_argument("--out", help="results file, written after each configuration")
    options = parser.parse_args()
    configs, names = options.config.split(","), options.impl.split(",")
    for value, known in [(c, CONFIGS) for c in configs] + [(i, IMPLEMENTATIONS) for i in names]:
        if value not in known:
            raise SystemExit(f"{value}: not one of {', '.join(known)}")
    if "sonicmoe" in names and options.sonic_space != "whole":
        restrict_sonic_space()
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                            text=True, check=True).stdout.split()[0]
    document = {
        "command": "bench/python/layer.py " + " ".join(sys.argv[1:]),
        "commit": options.commit, "device": f"1x {torch.cuda.get_device_name()}", "driver": driver,
        "torch": torch.__version__, "packages": versions(names), "date": datetime.date.today().isoformat(),
        "protocol": f"median of {options.rounds} rounds after 3, implementations in turns in one process, each pass "
                    "called while the GPU writes 26 GB; host_ms: median of a call on the host; checked: largest of the "
                    f"errors at most {TOLERANCE}, relative, in the norm, against fp64",
        "rows": []}
    for config in configs:
        shape = (options.tokens or CONFIGS[config][0], *CONFIGS[config][1:])
        document["rows"] += measure(config, shape, names, options.zipf, options.rounds)
        torch.cuda.empty_cache()
        if options.out:
            with open(options.out, "w", encoding="utf-8") as file:
                head = ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in document.items() if k != "rows")
                rows = ",\n  ".join(json.dumps(row) for row in document["rows"])
                file.write(f"{{{head},\n \"rows\": [\n  {rows}\n]}}\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of the experts: Tessera against torch's grouped_mm and transformers' experts, in one process.

usage: grouped_mm.py [--device cpu|cuda] [--config NAME,NAME] [--dtype fp32,bf16] [--impl NAME,NAME] [--seconds S]
                     [--threads N] [--cpu-time] [--out FILE]

All get the same tensors and a new random routing in every iteration, and take turns. torch-grouped-mm is the usual
layer: sort, gather, grouped_mm, silu(gate) * up, grouped_mm, weight, add per token. hf-eager and hf-grouped-mm are what
transformers runs for these values of experts_implementation. Each row is checked first: output and gradients of all
against fp64. On a GPU times are those of events on the stream, memory what torch's allocator handed out: saved between
the passes, besides output and inputs, and at most in use during both. With --cpu-time they are those that the process
ran, all threads together: other programs on the machine disturb them less. On the CPU page faults of both passes are
counted too.
"""

import argparse
import datetime
import json
import os
import resource
import statistics
import subprocess
import time

import tessera
import torch
from torch.nn import functional

CONFIGS = {"cpu-small": (2048, 256, 128, 32, 4), "cpu-mid": (4096, 512, 256, 64, 8),
           "OLMoE": (32768, 2048, 1024, 64, 8), "Qwen3-30B": (32768, 2048, 768, 128, 8),
           "7B-n256": (24576, 1536, 256, 128, 8)}
DEFAULTS = {"cpu": ("cpu-small,cpu-mid", "fp32,bf16", "tessera,torch-grouped-mm"),
            "cuda": ("OLMoE,Qwen3-30B", "bf16", "tessera,torch-grouped-mm,hf-grouped-mm,hf-eager")}
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
    for e, (up_rows, down_rows) in enumerate(zip(w_up.unbind(), w_down.unbind(), strict=True)):
        token, k = torch.where(ids == e)
        gate, up = (x[token] @ up_rows.mT).chunk(2, dim=-1)
        y = (functional.silu(gate) * up) @ down_rows.mT
        o = o.index_add(0, token, scores[token, k, None] * y)
    return o


def transformers_experts(name: str, config: str):
    """transformers' experts of Qwen3-MoE as a function: with the leaves of a call in place of its parameters."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    _, hidden, intermediate, experts, top_k = CONFIGS[config]
    settings = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=intermediate, num_experts=experts,
                              num_experts_per_tok=top_k)
    settings._experts_implementation = name
    with torch.device("meta"):
        module = modeling_qwen3_moe.Qwen3MoeExperts(settings)
    del module.gate_up_proj, module.down_proj

    def layer(x, ids, scores, w_up, w_down):
        module.gate_up_proj, module.down_proj = w_up, w_down
        return module(x, ids, scores.to(x.dtype))

    return layer


def implementation(name: str, config: str):
    kinds = {"tessera": tessera.routed_experts, "torch-grouped-mm": grouped_mm}
    return kinds.get(name) or transformers_experts(name.removeprefix("hf-").replace("-", "_"), config)


def routing(tokens: int, experts: int, top_k: int, generator):
    options = {"generator": generator, "device": generator.device}
    ids = torch.rand(tokens, experts, **options).topk(top_k, dim=-1).indices
    return ids, torch.rand(tokens, top_k, **options) * 0.95 + 0.05


class CpuClock:
    def __init__(self, cpu_time: bool = False):
        self.now = time.process_time if cpu_time else time.perf_counter

    def mark(self):
        return self.now()

    def milliseconds(self, marks: list) -> list[float]:
        return [1e3 * (after - before) for before, after in zip(marks, marks[1:], strict=False)]

    def allocated(self) -> tuple[int, int]:
        """Bytes in use now, and at most since the last question."""
        return 0, 0


class GpuClock(CpuClock):
    def mark(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, marks: list) -> list[float]:
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in zip(marks, marks[1:], strict=False)]

    def allocated(self) -> tuple[int, int]:
        now = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return now


def page_faults() -> int:
    """Of this process so far, without those that read a file."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def passes(layer, leaves: list, ids, scores, d_o, clock):
    """(ms forward, ms backward), (bytes saved, bytes at most) beyond what was there, output and gradients."""
    scores = scores.detach().requires_grad_()
    inputs = (leaves[0], scores, *leaves[1:])
    before, _ = clock.allocated()
    marks = [clock.mark()]
    o = layer(leaves[0], ids, scores, *leaves[1:])
    marks.append(clock.mark())
    between, _ = clock.allocated()
    gradients = torch.autograd.grad(o, inputs, d_o)
    marks.append(clock.mark())
    results = (o.detach(), *gradients)
    times = clock.milliseconds(marks)
    peak = clock.allocated()[1]
    return times, (between - before - o.numel() * o.element_size(), peak - before), results


def check(name: str, dtype: str, results, reference) -> None:
    for what, got, exact in zip(("o", "dx", "dscores", "dw_up", "dw_down"), results, reference, strict=True):
        error = ((got.double() - exact).norm() / exact.norm()).item()
        if not error <= TOLERANCE[dtype]:
            raise SystemExit(f"{name} {dtype}: {what} is off by {error:.2e}, more than {TOLERANCE[dtype]}")


def measure(config: str, dtype: str, names: list[str], device: str, seconds: float, cpu_time: bool) -> list[dict]:
    tokens, hidden, intermediate, experts, top_k = CONFIGS[config]
    generator = torch.Generator(device).manual_seed(0)
    clock = CpuClock(cpu_time) if device == "cpu" else GpuClock()

    def draw(*shape):
        return (torch.rand(shape, generator=generator, device=device) * 2 - 1) / (shape[-1] / 3) ** 0.5

    x = 3**0.5 * (torch.rand(tokens, hidden, generator=generator, device=device) * 2 - 1)
    w_up, w_down = draw(experts, 2 * intermediate, hidden), draw(experts, hidden, intermediate)
    exact = [t.to(DTYPES[dtype]) for t in (x, w_up, w_down)]
    d_o = (torch.rand(tokens, hidden, generator=generator, device=device) * 2 - 1).to(DTYPES[dtype])
    leaves = [t.clone().requires_grad_() for t in exact]
    ids, scores = routing(tokens, experts, top_k, generator)
    reference = passes(one_by_one, [t.double().requires_grad_() for t in exact], ids, scores.double(), d_o.double(),
                       clock)[2]
    layers = {name: implementation(name, config) for name in names}
    memory = {}
    for name, layer in layers.items():
        _, memory[name], results = passes(layer, leaves, ids, scores, d_o, clock)
        check(name, dtype, results, reference)
    del reference, results
    times, faults = {name: ([], []) for name in layers}, {name: [] for name in layers}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or len(times[names[0]][0]) < 15:
        ids, scores = routing(tokens, experts, top_k, generator)
        for name, layer in layers.items():
            before = page_faults()
            (forward, backward), memory[name], _ = passes(layer, leaves, ids, scores, d_o, clock)
            faults[name].append(page_faults() - before)
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
                "config": config, "shape": list(CONFIGS[config]), "dtype": dtype, "gpus": int(device != "cpu"),
                "routing": "random", "router": "given", "round": "none", "pass": what, "impl": name, "variant": "",
                "ms": round(ms, 3), "ms_p10": round(deciles[0], 3), "ms_p90": round(deciles[-1], 3),
                "samples": len(sample), "tflops": round(factor * tokens * top_k * intermediate * hidden / ms / 1e9, 4),
                "checked": True})
            if device != "cpu":
                rows[-1] |= {"saved_bytes": memory[name][0], "transient_peak_bytes": memory[name][1]}
        if device == "cpu":
            rows[-1]["page_faults"] = statistics.median(faults[name])
    return rows


def machine(device: str) -> dict:
    """What the numbers depend on, besides the code."""
    if device == "cpu":
        name = next(line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
        return {"device": name, "driver": f"torch {torch.__version__}", "threads": torch.get_num_threads()}
    query = "driver_version,clocks.sm,clocks.max.sm"
    answer = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"],
                            capture_output=True, text=True, check=True).stdout.split(", ")
    return {"device": torch.cuda.get_device_name(), "driver": f"{answer[0]}, torch {torch.__version__}",
            "clocks_mhz": [int(clock) for clock in answer[1:]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=DEFAULTS)
    parser.add_argument("--config")
    parser.add_argument("--dtype")
    parser.add_argument("--impl")
    parser.add_argument("--seconds", type=float, default=20, help="per configuration and type")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    if arguments.cpu_time and arguments.device != "cpu":
        parser.error("--cpu-time: the time of a GPU is not that of its host; leave it out")
    for option, default in zip(("config", "dtype", "impl"), DEFAULTS[arguments.device], strict=True):
        setattr(arguments, option, getattr(arguments, option) or default)
    names = arguments.impl.split(",")
    torch.set_num_threads(arguments.threads)
    load = [round(value, 1) for value in os.getloadavg()]
    rows = []
    for config in arguments.config.split(","):
        for dtype in arguments.dtype.split(","):
            rows += measure(config, dtype, names, arguments.device, arguments.seconds, arguments.cpu_time)
            ours, *others = ([row["ms"] for row in rows[-3 * len(names):] if row["impl"] == name] for name in names)
            for name, theirs in zip(names[1:], others, strict=True):
                print(f"{config} {dtype}: tessera {ours[2]:.2f} ms ({ours[0]:.2f} + {ours[1]:.2f}), {name} "
                      f"{theirs[2]:.2f} ms ({theirs[0]:.2f} + {theirs[1]:.2f}), {theirs[2] / ours[2]:.2f}x")
    if arguments.out:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        result = {
            "command": f"bench/python/grouped_mm.py --device {arguments.device} --config {arguments.config} "
                       f"--dtype {arguments.dtype} --impl {arguments.impl} --seconds {arguments.seconds:g} "
                       f"--threads {arguments.threads} {'--cpu-time ' if arguments.cpu_time else ''}"
                       f"--out {arguments.out}",
            "commit": commit.stdout.strip(), **machine(arguments.device), "load_average_before": load,
            "date": datetime.date.today().isoformat(),
            "protocol": f"median{' of the CPU time of all threads' if arguments.cpu_time else ''}; implementations take"
                        " turns, new random routing in every iteration, data uniform",
            "rows": rows}
        with open(arguments.out, "w", encoding="utf-8") as file:
            file.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

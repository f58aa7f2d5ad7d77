# SPDX-License-Identifier: Apache-2.0
"""What a training step is made of: kernels by kind, exposed communication and idle time, from torch's profiler."""

import json
import pathlib
import re
import sys
import tempfile
import time

import torch

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))

from train_transformer import Pace  # noqa: E402, F401

# The first kind whose pattern a kernel's name has.
KINDS = (
    ("nccl", r"nccl"),
    ("attention", r"flash|fmha|cudnn.*attention|cudnn_generated.*sdpa"),
    ("experts", r"tessera|scatter2scatter|^_group|[xX][tT][yY]|_moe_|_fused_(up|down)_proj|token_gather|"
                r"bitmatrix|col_partial_sum|_general_metadata|_token_offset|sonicmoe|quack|"
                r"GroupProblemShape|cutlass.*Sm90.*[Gg]rouped|prepare_grouped"),
    ("sharding copies", r"split_with_sizes|chunk_cat|CatArray|Memcpy|Memset|multi_tensor_apply.*Copy"),
    ("optimizer", r"[Ff]used_?[Aa]dam|FusedOptimizer|multi_tensor_apply|LpNorm|NormTwoOps|NormOneOps"),
    ("router", r"topk|gatherTopK|radix|[Ss]ort|scatter_add|bincount|searchsorted|softmax.*128"),
    ("dense gemm", r"nvjet|gemm|cutlass|cublas|splitK"),
    ("elementwise", r""),
)


def now() -> float:
    return time.monotonic()


def kind(name: str) -> str:
    return next(kind for kind, pattern in KINDS if re.search(pattern, name))


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[list[float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [tuple(span) for span in merged]


def _length(spans) -> float:
    return sum(end - start for start, end in spans)


def summarize(events: list[dict], steps: int) -> dict:
    """Milliseconds a step by kind, from the events of a Chrome trace: time in which a kernel of the kind runs. `nccl
    exposed` is where nothing else runs, `idle` where nothing runs; kinds overlap, so that they may add up to more than
    `all`."""
    kernels = [(event["name"], event["ts"], event["ts"] + event["dur"]) for event in events
               if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        return {}
    spans: dict[str, list] = {}
    for name, start, end in kernels:
        spans.setdefault(kind(name), []).append((start, end))
    everything = _union([(start, end) for _, start, end in kernels])
    others = _union([span for key, part in spans.items() if key != "nccl" for span in part])
    whole = everything[-1][1] - everything[0][0]
    result = {key: _length(_union(part)) for key, part in spans.items()}
    result |= {"nccl exposed": _length(everything) - _length(others), "idle": whole - _length(everything), "all": whole}
    return {key: round(value / 1e3 / steps, 3) for key, value in sorted(result.items())}


def profiled(step, steps: int = 3) -> dict:
    """`summarize` of step(i) on this rank after two steps that are not recorded, and its twenty longest kernels."""
    for i in range(2):
        step(i)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for i in range(2, 2 + steps):
            step(i)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    times: dict[str, float] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            times[event["name"]] = times.get(event["name"], 0) + event["dur"]
    longest = sorted(times, key=times.get, reverse=True)[:20]
    return {**summarize(events, steps), "kernels": [
        {"name": name[:240], "kind": kind(name), "ms": round(times[name] / 1e3 / steps, 3)} for name in longest]}


ALONE_UNTIMED, ALONE_TIMED = 3, 10


def alone(model, implementation, step, layers: set[int]) -> float:
    """Milliseconds of forward and backward of a layer's experts with nothing beside them, as the mean over `layers` of
    medians, on the rows, weights and routing that they have in step()."""
    calls, kept = 0, []

    def recording(*arguments):
        nonlocal calls
        if calls in layers:  # copies, as gathered weights are freed behind the layer
            kept.append([a.detach().clone() if isinstance(a, torch.Tensor) else a for a in arguments])
        calls += 1
        return implementation(*arguments)

    recording.routes = getattr(implementation, "routes", False)
    model.use(recording)
    step()
    model.use(implementation)
    medians = []
    for arguments in kept:
        leaves = [a.requires_grad_() for a in arguments if isinstance(a, torch.Tensor) and a.is_floating_point()]
        gradient = torch.randn_like(arguments[0])
        pace = Pace(arguments[0].device)
        for _ in range(ALONE_UNTIMED + ALONE_TIMED):
            o = implementation(*arguments)
            torch.autograd.grad(o[0] if recording.routes else o, leaves, gradient)
            pace.mark()
        medians.append(sorted(pace.milliseconds()[ALONE_UNTIMED:])[ALONE_TIMED // 2])
    return sum(medians) / len(medians)

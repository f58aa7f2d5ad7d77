#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Host time of a layer call in Python at T = 1: as it is, and with the library's functions replaced by a function
that does nothing, which leaves what Python, torch and the binding cost. CPU time of this thread, the best of 40 short
runs, all calls taking turns: what disturbs a machine lasts longer. Training is timed in a chain of 8 layers, as one
call of backward serves all layers of a model. On a GPU the calls' own time is that of their launches, and the CPU time
is that of all threads: torch runs backward in one of its own there, or, in the rows `one thread`, in the caller's
(torch.autograd.set_multithreading_enabled(False)). Beside them stands the same layer in torch's own operations, with
grouped_mm (examples/torch_experts.py).

Then the parts of the same calls by the wall clock, medians: Python before the library's function, in it, Python after
it, and, in backward, what torch's engine takes around it. On a GPU the device is idle when a call begins.

usage: host_time.py [--device cuda] [--out FILE]
"""

import argparse
import ctypes
import datetime
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

import tessera  # noqa: E402
import torch  # noqa: E402
import torch_experts  # noqa: E402
from tessera import library  # noqa: E402
from tessera.ops import autograd, prepared_calls  # noqa: E402

REPEATS, CALLS, SAMPLES, LAYERS = 40, 200, 1000, 8


def microseconds(calls: dict, device: str) -> dict:
    """Of a layer in each of the calls: name -> (call, its layers)."""
    clock, best = time.thread_time if device == "cpu" else time.process_time, dict.fromkeys(calls, float("inf"))
    for _ in range(REPEATS):
        for name, (call, layers) in calls.items():
            start = clock()
            for _ in range(CALLS // layers):
                call()
            best[name] = min(best[name], (clock() - start) / (CALLS // layers * layers))
            if device != "cpu":
                torch.cuda.synchronize()
    return {name: round(1e6 * time, 2) for name, time in best.items()}


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return torch.empty_like(tensors[0])

    @staticmethod
    def backward(ctx, _d_o):
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def pieces(device: str, made: list, moe, chain, d_o, clear) -> dict:
    """Medians of SAMPLES calls. made: the prepared calls that serve them; chain: forward through LAYERS layers."""
    now, marks = time.perf_counter_ns, []

    def marked(function):
        def call(*arguments):
            marks.append(now())
            result = function(*arguments)
            marks.append(now())
            return result
        return call

    def start() -> int:
        if device != "cpu":
            torch.cuda.synchronize()
        marks.clear()
        return now()

    def forward(call) -> tuple:
        begin = start()
        call()
        end = now()
        (entered, left) = marks
        return entered - begin, left - entered, end - left

    def backward() -> tuple:
        h = chain(LAYERS)()
        begin = start()
        h.backward(d_o)
        whole = now() - begin
        clear()
        first, entered, left, last = [sum(marks[i::4]) for i in range(4)]
        return entered - first, left - entered, last - left, whole - (last - first)

    functions, unmarked = [prepared.function for prepared in made], autograd.Layer.backward
    for prepared in made:
        prepared.function = marked(prepared.function)
    autograd.Layer.backward = staticmethod(marked(unmarked))
    passes = {"forward without gradient": (lambda: forward(moe), 1),
              "forward with gradient": (lambda: forward(chain(1)), 1), "backward": (backward, LAYERS)}
    names, cut = ("before_us", "library_us", "after_us", "engine_us"), {}
    for name, (sample, layers) in passes.items():
        medians = map(statistics.median, zip(*[sample() for _ in range(SAMPLES)], strict=True))
        cut[name] = {piece: round(1e-3 * time / layers, 2) for piece, time in zip(names, medians, strict=False)}
    for prepared, function in zip(made, functions, strict=True):
        prepared.function = function
    autograd.Layer.backward = staticmethod(unmarked)
    return cut


def measurements(device: str) -> tuple[dict, dict]:
    torch.manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape).to(device, torch.float32 if device == "cpu" else torch.bfloat16)

    x, w_router, w_up, w_down = draw(1, 16), draw(8, 16), draw(8, 32, 16), draw(8, 16, 16)
    leaf = x.clone().requires_grad_()
    layers = [[t.clone().requires_grad_() for t in (w_router, w_up, w_down)] for _ in range(LAYERS)]
    ids, scores, d_o = torch.tensor([[1, 3]], device=device), torch.rand(1, 2, device=device), draw(1, 16)

    def moe():
        tessera.moe(x, w_router, w_up, w_down, top_k=2)

    def routed():
        tessera.routed_experts(x, ids, scores, w_up, w_down)

    def grouped_mm():
        torch_experts.grouped_mm_experts(x, ids, scores, w_up, w_down)

    def chain(count):
        def forward():
            h = leaf
            for weights in layers[:count]:
                h = tessera.moe(h, *weights, top_k=2)
            return h
        return forward

    def clear():
        leaf.grad = None
        for weights in layers:
            for weight in weights:
                weight.grad = None

    def training():
        chain(LAYERS)().backward(d_o)
        clear()

    def one_thread(call):
        def run():
            with torch.autograd.set_multithreading_enabled(False):
                call()
        return run

    def floor():  # what torch itself costs: a function that makes the same gradients and computes nothing
        h = leaf
        for weights in layers:
            h = Nothing.apply(h, *weights)
        h.backward(d_o)
        clear()

    calls = {"moe": (moe, 1), "routed_experts": (routed, 1),
             "routed_experts in torch's operations": (grouped_mm, 1), "moe forward + backward": (training, LAYERS),
             "torch.autograd.Function forward + backward": (floor, LAYERS)}
    if device != "cpu":
        calls |= {"moe forward + backward, one thread": (one_thread(training), LAYERS),
                  "torch.autograd.Function forward + backward, one thread": (one_thread(floor), LAYERS)}
    made, ready = [], prepared_calls.PreparedCall.ready  # in every thread: backward has its own on a GPU
    prepared_calls.PreparedCall.ready = lambda call, *arguments: made.append(call) or ready(call, *arguments)
    for call, _ in calls.values():
        call()
    whole = microseconds(calls, device)
    cut = pieces(device, made, moe, chain, d_o, clear)
    nothing = ctypes.CDLL(library.load()._name).tessera_context_destroy  # of NULL: returns at once
    nothing.argtypes = [ctypes.c_void_p] * 4
    nothing.restype = None
    for prepared in made:
        prepared.function = lambda *_: nothing(None, None, None, None)
    host = microseconds(calls, device)
    return {name: {"call_us": whole[name], "host_us": host[name]} for name in calls}, cut


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    on_gpu = arguments.device != "cpu"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    rows, cut = measurements(arguments.device)
    for name, row in {**rows, **cut}.items():
        print(f"{name}: " + ", ".join(f"{piece.removesuffix('_us')} {time:.2f}" for piece, time in row.items()))
    result = {
        "command": "bench/python/host_time.py" + (f" --device {arguments.device}" if on_gpu else "")
                   + (f" --out {arguments.out}" if arguments.out else ""),
        "commit": commit.stdout.strip(), "host": cpu or platform.machine(),
        "device": torch.cuda.get_device_name() if on_gpu else cpu or platform.machine(),
        "date": datetime.date.today().isoformat(),
        "protocol": f"CPU time of {'all threads' if on_gpu else 'the thread'}, best of {REPEATS} times {CALLS} calls; "
                    f"T=1 d=16 n=16 E=8 K=2 {'bf16' if on_gpu else 'fp32'}",
        "python": platform.python_version(), "torch": torch.__version__, "rows": rows, "pieces": cut,
    }
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            file.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Host time of a layer call in Python at T = 1: as it is, and with the library's functions replaced by a function
that does nothing, which leaves what Python, torch and the binding cost. CPU time of this thread, best of 9. Training is
timed in a chain of 8 layers, as one call of backward serves all layers of a model.

usage: host_time.py [--out FILE]
"""

import argparse
import ctypes
import datetime
import json
import platform
import subprocess
import time

import tessera
import torch
from tessera import library, ops

REPEATS, CALLS, LAYERS = 9, 1000, 8


def microseconds(call, layers: int) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        start = time.thread_time()
        for _ in range(CALLS // layers):
            call()
        best = min(best, time.thread_time() - start)
    return round(1e6 * best / (CALLS // layers * layers), 2)


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return torch.empty_like(tensors[0])

    @staticmethod
    def backward(ctx, _d_o):
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def measurements() -> dict:
    torch.manual_seed(0)
    x, w_router = torch.randn(1, 16), torch.randn(8, 16)
    w_up, w_down = torch.randn(8, 32, 16), torch.randn(8, 16, 16)
    leaf = x.clone().requires_grad_()
    layers = [[t.clone().requires_grad_() for t in (w_router, w_up, w_down)] for _ in range(LAYERS)]
    ids, scores, d_o = torch.tensor([[1, 3]]), torch.rand(1, 2), torch.randn(1, 16)

    def moe():
        tessera.moe(x, w_router, w_up, w_down, top_k=2)

    def routed():
        tessera.routed_experts(x, ids, scores, w_up, w_down)

    def training():
        h = leaf
        for weights in layers:
            h = tessera.moe(h, *weights, top_k=2)
        h.backward(d_o)
        leaf.grad = None
        for weights in layers:
            for weight in weights:
                weight.grad = None

    def floor():  # what torch itself costs: a function that makes the same gradients and computes nothing
        h = leaf
        for weights in layers:
            h = Nothing.apply(h, *weights)
        h.backward(d_o)
        leaf.grad = None
        for weights in layers:
            for weight in weights:
                weight.grad = None

    calls = {"moe": (moe, 1), "routed_experts": (routed, 1), "moe forward + backward": (training, LAYERS),
             "torch.autograd.Function forward + backward": (floor, LAYERS)}
    for call, _ in calls.values():
        call()
    whole = {name: microseconds(*call) for name, call in calls.items()}
    nothing = ctypes.CDLL(library.load()._name).tessera_context_destroy  # of NULL: returns at once
    nothing.argtypes = [ctypes.c_void_p] * 4
    nothing.restype = None
    for plan in ops._here.plans.values():
        plan.function = lambda *_: nothing(None, None, None, None)
    host = {name: microseconds(*call) for name, call in calls.items()}
    return {name: {"call_us": whole[name], "host_us": host[name]} for name in calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    out = parser.parse_args().out
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    result = {
        "command": "bench/python/host_time.py" + (f" --out {out}" if out else ""), "commit": commit.stdout.strip(),
        "device": cpu or platform.machine(), "date": datetime.date.today().isoformat(),
        "protocol": f"thread CPU time, best of {REPEATS} times {CALLS} calls; T=1 d=16 n=16 E=8 K=2 fp32",
        "python": platform.python_version(), "torch": torch.__version__, "rows": measurements(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if out:
        with open(out, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()

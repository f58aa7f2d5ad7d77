#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the experts of one library with torch-grouped-mm on one layer of a configuration, and times the layer.

    check.py sonicmoe --config 7B-n256 --tokens 24576

A process for each library, so that a broken one leaves the others alone. Prints one line; exit status 0 if the results
agree, 1 if not, 3 if the library cannot run here.
"""

import argparse
import sys
import time

import experts
import model as models
import split
import torch

REPEATS = 20


def milliseconds(name: str, c: models.Configuration, tokens: int, device, dtype) -> tuple[float, float]:
    """Medians of forward and backward over calls that follow each other."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    x, do = normal(tokens, c.hidden).requires_grad_(), normal(tokens, c.hidden)
    w_router = normal(c.experts, c.hidden, scale=c.hidden**-0.5).requires_grad_()
    gate_up = normal(c.experts, 2 * c.intermediate, c.hidden, scale=c.hidden**-0.5).requires_grad_()
    down = normal(c.experts, c.hidden, c.intermediate, scale=c.intermediate**-0.5).requires_grad_()
    call = experts.load(name)
    if getattr(call, "routes", False):
        def forward():
            return call(x, w_router, gate_up, down, c.top_k)[0]
        inputs = (x, w_router, gate_up, down)
    else:
        ids, weights, _, _ = (t.detach() for t in models.route(x, w_router, c.top_k))
        weights.requires_grad_()

        def forward():
            return call(x, ids, weights, gate_up, down)
        inputs = (x, weights, gate_up, down)
    forwards, backwards = [], []
    for _ in range(REPEATS + 3):
        pace = split.Pace(device)
        o = forward()
        pace.mark()
        torch.autograd.grad(o, inputs, do)
        pace.mark()
        for times, value in zip((forwards, backwards), pace.milliseconds(), strict=True):
            times.append(value)
    return sorted(forwards[3:])[REPEATS // 2], sorted(backwards[3:])[REPEATS // 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experts", choices=experts.NAMES)
    parser.add_argument("--config", default="small", choices=models.CONFIGURATIONS)
    parser.add_argument("--tokens", type=int, default=4096)
    a = parser.parse_args()
    c = models.CONFIGURATIONS[a.config]
    on_gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda:0" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
    start = time.monotonic()
    try:
        apart = experts.errors(a.experts, c.hidden, c.intermediate, c.experts, c.top_k, a.tokens, device, dtype)
    except experts.Unavailable as error:
        print(f"{a.experts}: cannot run here: {error}")
        return 3
    first = time.monotonic() - start
    right = all(value <= experts.TOLERANCE for value in apart.values())
    forward, backward = milliseconds(a.experts, c, a.tokens, device, dtype)
    print(f"{a.experts} {experts.version(a.experts)} {experts.variant(a.experts)} {a.config} T {a.tokens}: "
          f"{'same' if right else 'DIFFERENT'}, " + " ".join(f"{key} {value:.1e}" for key, value in apart.items())
          + f"; first calls {first:.0f} s, forward {forward:.3f} ms, backward {backward:.3f} ms", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

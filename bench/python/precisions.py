#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times steps of a layer in bf16, in fp8, and in fp8 with codes of its weights handed in, in turns in one process.

    precisions.py --config Qwen3-30B,7B-n256 --rounds 24 --out FILE

Checked first: o and all gradients in fp8 are within FLOOR of those in bf16, in the norm, and codes that are handed in
give the bits of a call that quantises. A round runs all three in random order: one step that is not timed, so that each
has its own clock, then three between events. A step is forward and backward of x, the router and both weights. Printed
are medians in milliseconds, and the median over rounds of bf16's time over each.
"""

import argparse
import json
import pathlib
import random
import statistics
import sys

import tessera
import torch
from layer import CONFIGS as LAYERS
from layer import RESULTS

CONFIGS = {**LAYERS, "Qwen3-235B": (32768, 4096, 1536, 128, 8)}
STEPS = 3  # of a round
FLOOR = 0.1  # of the norm; dw_router, the largest, is off by 0.08


def times(config: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a step by kind, one for each round."""
    tokens, hidden, intermediate, experts, top_k = CONFIGS[config]

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale).requires_grad_()

    leaves = (normal(tokens, hidden), normal(experts, hidden, scale=hidden**-0.5),
              normal(experts, 2 * intermediate, hidden, scale=hidden**-0.5),
              normal(experts, hidden, intermediate, scale=intermediate**-0.5))
    do = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    codes = tessera.quantise_weights(*(w.detach() for w in leaves[2:]))
    kinds = {"native": {}, "fp8": {"precision": "fp8"}, "fp8, codes": {"precision": "fp8", "weight_codes": codes}}

    def step(kind: str) -> tuple:
        o = tessera.moe(*leaves, top_k=top_k, **kinds[kind])
        return o.detach(), *torch.autograd.grad(o, leaves, do)

    for name, want, have, same in zip(RESULTS, *map(step, kinds), strict=True):
        error = ((have.float() - want.float()).norm() / want.float().norm()).item()
        if not 0 < error <= FLOOR:
            raise SystemExit(f"{config}: {name} in fp8 is {error:.3f} from bf16's, more than {FLOOR}")
        if not torch.equal(have, same):
            raise SystemExit(f"{config}: {name} has other bits with codes handed in")
    del want, have, same
    for kind in kinds:
        for _ in range(6):
            step(kind)
    events = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in random.sample(list(kinds), len(kinds)):
            step(kind)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(STEPS):
                step(kind)
            end.record()
            events[kind].append((begin, end))
    torch.cuda.synchronize()
    return {kind: [begin.elapsed_time(end) / STEPS for begin, end in pairs] for kind, pairs in events.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="Qwen3-30B", help="of " + ", ".join(CONFIGS))
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    a = parser.parse_args()
    configs = a.config.split(",")
    if unknown := [config for config in configs if config not in CONFIGS]:
        parser.error(f"--config {unknown[0]}: unknown; choose from {', '.join(CONFIGS)}")
    if a.rounds < 1:
        parser.error(f"--rounds {a.rounds}: at least 1")
    if not torch.cuda.is_available():
        parser.error("needs a Hopper GPU, and torch sees none")
    random.seed(0)
    torch.manual_seed(0)
    found = {}
    for config in configs:
        ms = times(config, a.rounds)
        over = {kind: statistics.median(x / y for x, y in zip(ms["native"], mine, strict=True))
                for kind, mine in ms.items()}
        found[config] = {"ms": {kind: [round(x, 4) for x in mine] for kind, mine in ms.items()}, "native over": over}
        print(config, "; ".join(f"{kind} {statistics.median(mine):.3f} ms, {over[kind]:.3f}"
                                for kind, mine in ms.items()), flush=True)
    if a.out:
        a.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "configs": found}) + "\n",
                         encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

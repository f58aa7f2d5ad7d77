# SPDX-License-Identifier: Apache-2.0
"""Layers that round tokens in training, by name, as models of bench/end_to_end call them."""

import tessera
from model import BALANCE, Z

ROUTER, TILE = "softmax-topk", 128
PLAIN = "top-k"  # what all are compared with, and evaluated by
DRAWS = ("sr-f", "nr-s")
# nr-f with a tile as large as an expert's tokens is a control: it has to be found worse, else the test is too weak.
VARIANTS = {
    PLAIN: {},
    **{rule: {"rounding": rule, "tile": TILE} for rule in ("nr-f", "sr-f", "nr-s", "balance-f", "up", "down")},
    **{f"nr-f-tile-{tile}": {"rounding": "nr-f", "tile": tile} for tile in (256, 512, 1024)},
    "expert-choice": {},
}
CONTROLS = ("nr-f-tile-512", "nr-f-tile-1024")


class Layer:
    """Router, experts and auxiliary losses of every layer of a model, with a variant's options. `at_step` gets the
    step, which the variants that draw read; `rows` counts what rounding adds and drops."""

    routes = True

    def __init__(self, variant: str, layers: int, seed: int):
        self.variant, self.layers, self.seed = variant, layers, seed
        self.calls, self.step, self.added, self.dropped, self.chosen = 0, 0, 0, 0, 0

    def at_step(self, step: int) -> None:
        self.step = step

    def __call__(self, x, w_router, gate_up, down, top_k: int):
        options = {"router": ROUTER, **VARIANTS[self.variant]}
        if self.variant == "expert-choice":
            options["router"] = "expert-choice"
        if options.get("rounding") in DRAWS:
            options |= {"seed": self.seed, "step": self.step, "layer": self.calls % self.layers}
        self.calls += 1
        o, router = tessera.moe(x, w_router, gate_up, down, top_k=top_k, return_router=True, **options)
        # Experts that choose are balanced already.
        balance = 0.0 if self.variant == "expert-choice" else BALANCE
        auxiliary = tessera.losses.router_losses(router.logits, router.topk_counts, balance=balance, z=Z)
        if self.variant != "expert-choice":
            more = router.counts - router.topk_counts
            self.added = self.added + more.clamp(min=0).sum()
            self.dropped = self.dropped - more.clamp(max=0).sum()
            self.chosen = self.chosen + router.topk_counts.sum()
        return o, auxiliary, router.counts

    def rows(self) -> dict:
        """Shares of the rows that top-k chose which rounding added and dropped, over all calls."""
        chosen = max(int(self.chosen), 1)
        return {"added": int(self.added) / chosen, "dropped": int(self.dropped) / chosen}

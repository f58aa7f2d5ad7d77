# SPDX-License-Identifier: Apache-2.0
"""bench/end_to_end/optimizer.py: clipping and AdamW."""

import pathlib
import sys
import unittest
from unittest import mock

import torch

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench" / "end_to_end"))

import optimizer  # noqa: E402

BETAS = (0.9, 0.95)
UPDATES = {"torch's": None, "eager": optimizer.update,
           "compiled": torch.compile(optimizer.update, backend="aot_eager", dynamic=False, fullgraph=True)}


def drawn(*shape, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


class Clipping(unittest.TestCase):
    def test_updates_are_those_of_torch(self):
        """Of clip_grad_norm_ and AdamW, above the limit of the norm and below it, for large and small parameters."""
        for (kind, update), scale in ((item, scale) for item in UPDATES.items() for scale in (10.0, 1e-3)):
            with self.subTest(kind, scale=scale), mock.patch.object(optimizer, "LARGE", 50):
                ours, theirs = ([torch.nn.Parameter(drawn(*shape, seed=1)) for shape in ((6, 10), (4, 5), (5,))]
                                for _ in range(2))
                made = optimizer.AdamW([{"params": ours[:2], "weight_decay": 0.1, "lr": 0.1},
                                        {"params": ours[2:], "weight_decay": 0.0, "lr": 0.1}], BETAS, compiled=False)
                made.update = update
                wanted = torch.optim.AdamW([{"params": theirs[:2], "weight_decay": 0.1},
                                            {"params": theirs[2:], "weight_decay": 0.0}], betas=BETAS, lr=0.1)
                for step in range(3):
                    for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
                        p.grad, q.grad = (drawn(*p.shape, seed=9 * step + i, scale=scale) for _ in range(2))
                    before = [p.grad.clone() for p in ours]
                    norm = optimizer.clipped_step(made, ours)
                    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, optimizer.CLIP))
                    self.assertEqual(norm > optimizer.CLIP, scale > 1)
                    wanted.step()
                    if update is not None:  # nothing is written that nobody reads
                        self.assertTrue(torch.equal(ours[0].grad, before[0]))
                for p, q in zip(ours, theirs, strict=True):
                    torch.testing.assert_close(p, q)
                    for key in ("exp_avg", "exp_avg_sq", "step"):
                        torch.testing.assert_close(made.state[p][key], wanted.state[q][key])
                    self.assertGreater((p - drawn(*p.shape, seed=1)).abs().min(), 1e-3)

    def test_without_a_scale(self):
        p, q = (torch.nn.Parameter(drawn(6, 10, seed=1)) for _ in range(2))
        p.grad, q.grad = (drawn(6, 10, seed=2) for _ in range(2))
        made = optimizer.AdamW([{"params": [p], "lr": 0.1}], BETAS, compiled=False)
        made.update = optimizer.update
        with mock.patch.object(optimizer, "LARGE", 50):
            made.step()
        torch.optim.AdamW([q], betas=BETAS, lr=0.1).step()
        torch.testing.assert_close(p, q)


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: Apache-2.0
"""Losses of the router's logits against fp64 torch, the update of its selection bias, and their operators."""

import unittest

import tessera
import torch
from tessera.losses import router_losses

SCORES = {"softmax": lambda l: l.softmax(-1), "sigmoid": torch.sigmoid,
          "sqrtsoftplus": lambda l: torch.nn.functional.softplus(l).sqrt()}


def data(tokens=70, experts=24):
    generator = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(tokens, experts, generator=generator)
    return logits, torch.randint(0, 50, (experts,), generator=generator, dtype=torch.int32)


def reference(logits, counts, scores, balance, z):
    p = SCORES[scores](logits)
    p = p / p.sum(-1, keepdim=True)
    balanced = len(counts) * (counts / counts.sum() * p.mean(0)).sum()
    return balance * balanced + z * logits.logsumexp(-1).square().mean()


class Losses(unittest.TestCase):
    device = "cpu"

    def data(self, **sizes):
        return [tensor.to(self.device) for tensor in data(**sizes)]

    def both(self, logits, run):
        """A loss and its gradient."""
        leaf = logits.clone().requires_grad_()
        loss = run(leaf)
        return loss.detach(), *torch.autograd.grad(3 * loss, leaf)

    def test_against_torch(self):
        logits, counts = self.data()
        for scores in SCORES:
            for balance, z in ((0.7, 0.0), (0.0, 0.3), (0.7, 0.3)):
                got = self.both(logits, lambda leaf: router_losses(leaf, counts, scores=scores, balance=balance, z=z))
                wanted = self.both(logits.double(), lambda leaf: reference(leaf, counts, scores, balance, z))
                for a, b in zip(got, wanted, strict=True):
                    self.assertIs(a.dtype, torch.float32)
                    torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-8, msg=f"{scores} {balance} {z}")

    def test_public_functions(self):
        logits, counts = self.data()
        for wide in (counts, counts.long(), counts.float()):
            self.assertEqual(tessera.load_balancing_loss(logits, wide, scores="sigmoid"),
                             router_losses(logits, counts, scores="sigmoid", balance=1.0))
        self.assertEqual(tessera.z_loss(logits), router_losses(logits, z=1.0))
        apart = torch.cat([logits, torch.full_like(logits, float("nan"))], 1)[:, :24]
        for view in (apart, logits.mT.contiguous().mT):
            self.assertEqual(tessera.z_loss(view), tessera.z_loss(logits))
        self.assertEqual(tessera.z_loss(logits[:0]), 0)
        rounded = logits.bfloat16().requires_grad_()
        tessera.load_balancing_loss(rounded, counts).backward()
        self.assertIs(rounded.grad.dtype, torch.bfloat16)

    def test_counts_may_be_means_and_shares(self):
        logits, counts = self.data()
        tokens, counts = len(logits), counts.double()
        wanted = self.both(logits, lambda leaf: tessera.load_balancing_loss(leaf, counts.int()))
        self.assertGreater(float(wanted[0]), 0.5)
        moved = tessera.selection_bias_update(torch.zeros(24, device=self.device), counts.int(), rate=0.5)
        self.assertEqual(int(moved.count_nonzero()), 24)
        for divisor in (1, 3, tokens, 7.0 * tokens, 1e20):
            for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
                parts, tolerance = (counts / divisor).to(dtype), 0.01 if dtype.itemsize == 2 else 2e-6
                if not parts.double().isfinite().all() or parts.sum() == 0:
                    continue  # beyond the range of fp16
                got = self.both(logits, lambda leaf, parts=parts: tessera.load_balancing_loss(leaf, parts))
                for a, b in zip(got, wanted, strict=True):
                    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * 1e-2, msg=f"{divisor} {dtype}")
                bias = tessera.selection_bias_update(torch.zeros(24, device=self.device), parts, rate=0.5)
                self.assertTrue(torch.equal(bias, moved), f"{divisor} {dtype}")
        for dtype in (torch.uint8, torch.int16, torch.int8):
            self.assertEqual(tessera.load_balancing_loss(logits, counts.to(dtype)),
                             tessera.load_balancing_loss(logits, counts.int()))
        with self.assertRaisesRegex(ValueError, "topk_counts: dtype torch.complex64"):
            tessera.load_balancing_loss(logits, counts.to(torch.complex64))

    def test_operators(self):
        logits, counts = self.data()
        bias = torch.zeros(24, device=self.device)
        ops = torch.ops.tessera
        for wants in (False, True):
            torch.library.opcheck(ops.router_loss.default, (logits, counts, "sigmoid-bias", 0.5, 0.1, wants))
        torch.library.opcheck(ops.update_selection_bias.default, (bias, counts, 1e-3, True))

    def test_compile(self):
        logits, counts = self.data()

        def loss(leaf):
            return router_losses(leaf, counts, balance=0.5, z=0.1)

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for a, b in zip(self.both(logits, compiled), self.both(logits, loss), strict=True):
            self.assertTrue(torch.equal(a, b))

    def test_selection_bias_update(self):
        counts = torch.tensor([5, 2, 3, 2], device=self.device)  # mean 3
        for wide in (counts, counts.int(), counts.float()):
            for centered, wanted in ((False, [-0.5, 0.5, 0, 0.5]), (True, [-0.625, 0.375, -0.125, 0.375])):
                bias = torch.ones(4, device=self.device)
                self.assertIs(tessera.selection_bias_update(bias, wide, rate=0.5, centered=centered), bias)
                self.assertEqual((bias - 1).tolist(), wanted)
        tessera.selection_bias_update(bias, torch.zeros_like(counts), rate=0.5)
        self.assertEqual((bias - 1).tolist(), wanted)

    def test_what_is_refused(self):
        logits, counts = self.data()
        with self.assertRaisesRegex(ValueError, "scores='tanh': unknown; choose softmax, sigmoid, sqrtsoftplus"):
            tessera.load_balancing_loss(logits, counts, scores="tanh")
        with self.assertRaisesRegex(ValueError, r"logits: \(24,\); \[T,E\] are needed"):
            tessera.z_loss(logits[0])
        with self.assertRaisesRegex(ValueError, r"topk_counts: shape \[23\]"):
            tessera.load_balancing_loss(logits, counts[:23])
        with self.assertRaisesRegex(ValueError, "selection_bias: dtype"):
            tessera.selection_bias_update(torch.zeros(24, device=self.device, dtype=torch.bfloat16), counts)
        leaf = logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(tessera.z_loss(leaf), leaf, create_graph=True)
        with self.assertRaisesRegex(RuntimeError, "once_differentiable|does not require grad"):
            gradient.sum().backward()


class BadCounts(unittest.TestCase):
    """The CPU looks at them itself."""

    def test_are_refused(self):
        logits, counts = data()
        counts[3] = -2
        with self.assertRaisesRegex(ValueError, r"topk_counts\[3\]=-2"):
            tessera.load_balancing_loss(logits, counts)
        for bad, text in ((-0.5, "-0.5"), (float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "-inf")):
            for dtype in (torch.float64, torch.bfloat16):
                parts = counts.abs().to(dtype)
                parts[3] = bad
                for call in (lambda parts=parts: tessera.load_balancing_loss(logits, parts),
                             lambda parts=parts: tessera.selection_bias_update(torch.zeros(24), parts)):
                    with self.assertRaisesRegex(ValueError, rf"topk_counts\[3\]={text}: counts are finite"):
                        call()
        with self.assertRaisesRegex(ValueError, r"topk_counts\[3\]=-2"):
            tessera.selection_bias_update(torch.zeros(24), counts)


if __name__ == "__main__":
    unittest.main()

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


def sequence_reference(logits, topk_ids, scores, lengths, mask=None):
    """The loss per sequence, one after the other."""
    p = SCORES[scores](logits)
    p = p / p.sum(-1, keepdim=True)
    mask = torch.ones(len(logits), dtype=torch.bool, device=logits.device) if mask is None else mask
    losses = []
    for own_p, ids, real in zip(p.split(lengths), topk_ids.split(lengths), mask.split(lengths), strict=True):
        if real.any():
            f = torch.nn.functional.one_hot(ids[real].long(), logits.shape[1]).sum((0, 1)).to(p.dtype)
            losses.append(logits.shape[1] * (f / f.sum() * own_p[real].mean(0)).sum())
    return torch.stack(losses).mean()


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
        with self.assertRaisesRegex(ValueError, "counts: dtype torch.complex64"):
            tessera.load_balancing_loss(logits, counts.to(torch.complex64))

    def test_sequences_against_torch(self):
        logits, _ = self.data()
        lengths = [10, 0, 33, 1, 26]
        given = torch.tensor(lengths, device=self.device)
        ids = logits.topk(3, dim=-1).indices
        mask = torch.rand(70, generator=torch.Generator().manual_seed(3)).to(self.device) < 0.6
        mask[43] = False  # all of the sequence of length 1
        for scores in SCORES:
            for own in (None, mask):
                for dtype in (torch.int32, torch.int64):
                    got = self.both(logits, lambda leaf: tessera.sequence_balance_loss(
                        leaf, ids.to(dtype), lengths=given.to(dtype), scores=scores, mask=own))
                    wanted = self.both(logits.double(),
                                       lambda leaf: sequence_reference(leaf, ids, scores, lengths, own))
                    for a, b in zip(got, wanted, strict=True):
                        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-8, msg=f"{scores} {own}")
        self.assertGreater(float(got[0]), 0.5)
        # A row of [B,S] is a sequence; a sequence alone has the global loss of its own counts.
        square = tessera.sequence_balance_loss(logits.view(7, 10, 24), ids.view(7, 10, 3))
        self.assertEqual(square, tessera.sequence_balance_loss(
            logits, ids, lengths=torch.full((7,), 10, device=self.device)))
        counts = torch.bincount(ids.flatten(), minlength=24)
        torch.testing.assert_close(tessera.sequence_balance_loss(logits[None], ids[None]),
                                   tessera.load_balancing_loss(logits, counts), rtol=1e-6, atol=0)
        self.assertEqual(tessera.sequence_balance_loss(logits[:0], ids[:0], lengths=given[:0]), 0)

    def test_all_losses_at_once(self):
        logits, counts = self.data()
        ids, lengths = logits.topk(2, dim=-1).indices, torch.tensor([30, 40], device=self.device)
        got = self.both(logits, lambda leaf: router_losses(leaf, counts, balance=0.5, z=0.1, sequence_balance=0.7,
                                                           topk_ids=ids, lengths=lengths))
        wanted = self.both(logits.double(), lambda leaf: reference(leaf, counts, "softmax", 0.5, 0.1)
                           + 0.7 * sequence_reference(leaf, ids, "softmax", [30, 40]))
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-8)

    def test_padding_has_no_part(self):
        """Bit for bit what the real tokens alone give, whatever padding holds."""
        for tokens, experts in ((70, 24), (3000, 40), (5000, 1100)):
            logits, counts = self.data(tokens=tokens, experts=experts)
            ids = logits.topk(2, dim=-1).indices
            mask = torch.rand(tokens, generator=torch.Generator().manual_seed(3)).to(self.device) < 0.6
            lengths = torch.tensor([tokens // 2, tokens - tokens // 2 - 7, 7], device=self.device)
            real_lengths = torch.stack([part.sum() for part in mask.split(lengths.tolist())])
            padded = torch.where(mask.unsqueeze(-1), logits, float("nan"))
            for options in ({"balance": 0.5}, {"z": 0.3}, {"sequence_balance": 0.7},
                            {"balance": 0.5, "z": 0.3, "sequence_balance": 0.7}):
                def loss(leaf, own_ids, own_lengths, own_mask=None, options=options):
                    sequences = {"topk_ids": own_ids, "lengths": own_lengths} if "sequence_balance" in options else {}
                    return router_losses(leaf, counts, **options, **sequences, mask=own_mask)

                value, gradient = self.both(padded, lambda leaf: loss(leaf, ids, lengths, mask))
                wanted, real = self.both(logits[mask], lambda leaf: loss(leaf, ids[mask], real_lengths))
                self.assertGreater(float(wanted), 0)
                self.assertEqual(value, wanted, f"{tokens} {options}")
                self.assertTrue(torch.equal(gradient[mask], real))
                self.assertEqual(int(gradient[~mask].count_nonzero()), 0)
            nothing, gradient = self.both(padded, lambda leaf: loss(leaf, ids, lengths, torch.zeros_like(mask)))
            self.assertEqual((float(nothing), int(gradient.count_nonzero())), (0, 0))

    def test_operators(self):
        logits, counts = self.data()
        bias = torch.zeros(24, device=self.device)
        ops = torch.ops.tessera
        for wants in (False, True):
            torch.library.opcheck(ops.router_loss.default, (logits, counts, "sigmoid-bias", 0.5, 0.1, wants))
            offsets = torch.tensor([0, 30, 70], device=self.device)
            torch.library.opcheck(ops.router_loss.default, (
                logits, counts, "topk-softmax", 0.5, 0.1, wants, 0.3, logits.topk(2, dim=-1).indices, offsets,
                logits[:, 0] > 0))
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
        with self.assertRaisesRegex(ValueError, r"^counts: shape \[23\]"):
            tessera.load_balancing_loss(logits, counts[:23])
        ids, lengths = logits.topk(2, dim=-1).indices, torch.tensor([30, 40], device=self.device)
        for text, call in (
                (r"lengths: absent, logits: \[70, 24\]", lambda: tessera.sequence_balance_loss(logits, ids)),
                (r"topk_ids: \[69, 2\], logits: \[70, 24\]",
                 lambda: tessera.sequence_balance_loss(logits, ids[1:], lengths=lengths)),
                (r"lengths: shape \[2\], dtype torch.float32",
                 lambda: tessera.sequence_balance_loss(logits, ids, lengths=lengths.float())),
                ("topk_ids: rank 2, dtype 1; .*int32 or int64",
                 lambda: tessera.sequence_balance_loss(logits, ids.float(), lengths=lengths)),
                (r"mask: shape \[69\]", lambda: tessera.z_loss(logits, mask=logits[1:, 0] > 0)),
                ("sequence_balance=nan", lambda: router_losses(logits, sequence_balance=float("nan"), topk_ids=ids,
                                                               lengths=lengths))):
            with self.assertRaisesRegex(ValueError, text):
                call()
        with self.assertRaisesRegex(ValueError, "selection_bias: dtype"):
            tessera.selection_bias_update(torch.zeros(24, device=self.device, dtype=torch.bfloat16), counts)
        leaf = logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(tessera.z_loss(leaf), leaf, create_graph=True)
        with self.assertRaisesRegex(RuntimeError, "once_differentiable|does not require grad"):
            gradient.sum().backward()


class BadCounts(unittest.TestCase):
    """The CPU looks at them itself."""

    def test_lengths(self):
        logits, _ = data()
        ids = logits.topk(2, dim=-1).indices
        for lengths, text in (([30, 39], r"sequence_offsets\[2\]=69"), ([80, -10], r"sequence_offsets\[1\]=80"),
                              ([30, -5, 45], r"sequence_offsets\[2\]=25"), ([], "sequence_offsets: no sequence")):
            with self.assertRaisesRegex(ValueError, text):
                tessera.sequence_balance_loss(logits, ids, lengths=torch.tensor(lengths, dtype=torch.int64))

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

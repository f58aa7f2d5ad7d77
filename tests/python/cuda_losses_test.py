# SPDX-License-Identifier: Apache-2.0
"""Losses of the router's logits on a GPU: as on the CPU, with its bits, in graphs, and bad counts."""

import unittest

import gpu
import losses_test
import tessera
import torch
from tessera.losses import router_losses


class Losses(losses_test.Losses):
    device = "cuda"

    def test_bits_of_the_cpu(self):
        for tokens, experts in ((70, 24), (3000, 128), (40, 1100)):
            logits, counts = losses_test.data(tokens, experts)
            for scores in losses_test.SCORES:
                for f in (counts, counts / 3):
                    def loss(leaf, scores=scores, f=f):
                        return router_losses(leaf, f.to(leaf.device), scores=scores, balance=0.7, z=0.3)

                    for a, b in zip(self.both(logits.cuda(), loss), self.both(logits, loss), strict=True):
                        self.assertTrue(torch.equal(a.cpu(), b), f"{scores}, E {experts}, {f.dtype}")
                ids, lengths = logits.topk(2, dim=-1).indices, torch.tensor([tokens // 3, 0, tokens - tokens // 3])

                def sequences(leaf, scores=scores, ids=ids, lengths=lengths):
                    return router_losses(leaf, counts.to(leaf.device), scores=scores, balance=0.7, z=0.3,
                                         sequence_balance=0.6, topk_ids=ids.to(leaf.device),
                                         lengths=lengths.to(leaf.device), mask=leaf.detach()[:, 0] > -1)

                for a, b in zip(self.both(logits.cuda(), sequences), self.both(logits, sequences), strict=True):
                    self.assertTrue(torch.equal(a.cpu(), b), f"sequences, {scores}, E {experts}")

    def test_captured(self):
        logits, counts = self.data()
        leaf, bias = logits.clone().requires_grad_(), torch.zeros(24, device="cuda")
        ids, lengths = logits.topk(2, dim=-1).indices, torch.tensor([30, 40], device="cuda")
        mask = logits[:, 0] > -1

        def step():
            loss = router_losses(leaf, counts, balance=0.7, z=0.3, sequence_balance=0.5, topk_ids=ids, lengths=lengths,
                                 mask=mask)
            tessera.selection_bias_update(bias, counts)
            return loss.detach(), *torch.autograd.grad(loss, leaf)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        with torch.no_grad():
            leaf.copy_(logits.flip(0))
        counts.copy_(counts.flip(0))
        mask.copy_(mask.flip(0))
        lengths.copy_(lengths.flip(0))
        bias.zero_()
        graph.replay()
        got = [tensor.clone() for tensor in (*results, bias)]
        bias.zero_()
        for a, b in zip(got, (*step(), bias), strict=True):
            self.assertTrue(torch.equal(a, b))
        self.assertGreater(int(bias.count_nonzero()), 0)


class BadCounts(unittest.TestCase):
    def test_are_reported_once_and_count_as_none(self):
        logits, counts = [tensor.cuda() for tensor in losses_test.data()]
        torch.cuda.synchronize()
        tessera.check_device_values()
        counts[3] = -2
        bias = torch.zeros(24, device="cuda")
        for call in (lambda: tessera.load_balancing_loss(logits, counts),
                     lambda: tessera.selection_bias_update(bias, counts).sum()):
            self.assertEqual(float(call()), 0)
            with self.assertRaisesRegex(ValueError, r"topk_counts\[3\]: a count of -1 "):
                tessera.check_device_values()
            tessera.check_device_values()
        ids = logits.topk(2, dim=-1).indices
        # Of several offsets that break a rule one is reported.
        for lengths, reported in (([30, 39], r"\[2\]: an offset of 69 "),
                              ([80, -10], r"(\[1\]: an offset of 80 |\[2\]: an offset of 70 )"),
                              ([-4, 74], r"\[1\]: an offset of -1 ")):
            tessera.sequence_balance_loss(logits, ids, lengths=torch.tensor(lengths, device="cuda"))
            torch.cuda.synchronize()
            with self.assertRaisesRegex(ValueError, "sequence_offsets" + reported):
                tessera.check_device_values()
            tessera.check_device_values()
        for bad, reported in ((-0.25, -1), (float("nan"), -1), (float("inf"), 2147483646)):
            parts = counts.abs() / 3
            parts[3] = bad
            for call in (lambda parts=parts: tessera.load_balancing_loss(logits, parts),
                         lambda parts=parts: tessera.selection_bias_update(bias, parts).sum()):
                self.assertEqual(float(call()), 0)
                with self.assertRaisesRegex(ValueError, rf"topk_counts\[3\]: a count of {reported} "):
                    tessera.check_device_values()


if __name__ == "__main__":
    gpu.main()

# SPDX-License-Identifier: Apache-2.0
"""Passes of ExpertParallel with gradients or biases: a session compared with one GPU that has all tokens and experts.

torchrun --nproc-per-node 2 cuda_expert_parallel_training_test.py
"""

import contextlib
import os
import sys
import unittest
from unittest import mock

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import gpu
import tessera
import torch
import torch.distributed as dist
from tessera import expert_parallel_prepared as prepared
from tessera import expert_parallel_training as training
from torch.utils.checkpoint import checkpoint


def setUpModule():
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    unittest.addModuleCleanup(dist.destroy_process_group)


class OnGpus(unittest.TestCase):
    D, N, E, K, T = 512, 256, 16, 4, 300

    def setUp(self):
        """Rows of x come on the side stream, but for half of a test."""
        patch = mock.patch.object(training, "SIDE_STREAM_BYTES", 0)
        patch.start()
        self.addCleanup(patch.stop)

    def make(self, **options) -> tessera.ExpertParallel:
        return tessera.ExpertParallel(max_tokens=self.T, hidden=self.D, intermediate=self.N, experts=self.E,
                                      top_k=self.K, training=True, **options)

    def parts(self) -> tuple[slice, slice]:
        """This rank's tokens, of T on every rank, and its experts."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return (slice(rank * self.T, (rank + 1) * self.T),
                slice(rank * self.E // ranks, (rank + 1) * self.E // ranks))

    def inputs(self, tokens_of_ranks: list, halves: int = 2):
        """x, ids, scores, d_o of all ranks, and all weights and biases: alike on all ranks."""
        torch.manual_seed(7)
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        tokens = sum(tokens_of_ranks)
        x, d_o = (torch.randn(tokens, self.D, **options) for _ in range(2))
        scores, ids = torch.rand(tokens, self.E, device="cuda").topk(self.K)
        ids[::5, 2] = -1
        weights = [torch.randn(self.E, halves * self.N, self.D, **options) / 16,
                   torch.randn(self.E, self.D, self.N, **options) / 16,
                   torch.randn(self.E, halves * self.N, **options), torch.randn(self.E, self.D, **options)]
        return x, ids, scores, d_o, weights

    def compare(self, experts, tokens_of_ranks, activation, with_bias, ids=None):
        """With other ids than those of `inputs` where they are given."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        x, drawn, scores, d_o, weights = self.inputs(tokens_of_ranks, 1 if activation == "gelu" else 2)
        ids = drawn if ids is None else ids
        weights = weights[:4 if with_bias else 2]
        leaves = [t.clone().requires_grad_() for t in (x, scores, *weights)]
        biases = dict(zip(("b_up", "b_down"), leaves[4:]))
        wanted_o = tessera.routed_experts(leaves[0], ids, leaves[1], *leaves[2:4], activation=activation, **biases)
        wanted = torch.autograd.grad(wanted_o, leaves, d_o)
        first = sum(tokens_of_ranks[:rank])
        mine = slice(first, first + tokens_of_ranks[rank])
        own = slice(rank * self.E // ranks, (rank + 1) * self.E // ranks)
        parts = [mine, mine, *[own] * len(weights)]
        leaves = [t[part].clone().requires_grad_() for t, part in zip((x, scores, *weights), parts)]
        biases = dict(zip(("b_up", "b_down"), leaves[4:]))
        o = experts(leaves[0], ids[mine], leaves[1], *leaves[2:4], **biases)
        with torch.no_grad():
            same = experts(leaves[0], ids[mine], leaves[1], *leaves[2:4], **biases)
        got = torch.autograd.grad(o, leaves, d_o[mine])
        torch.cuda.synchronize()
        experts.check()
        what = f"{activation}, tokens {tokens_of_ranks}, bias {with_bias}"
        self.assertTrue(torch.equal(o, wanted_o[mine]), what)
        self.assertTrue(torch.equal(same, o), what)
        self.assertTrue(torch.equal(got[0], wanted[0][mine]), what)
        names = ("dscores", "dw_up", "dw_down", "db_up", "db_down")
        for name, a, b, part in zip(names, got[1:], wanted[1:], parts[1:]):
            b = b[part].float()
            if b.numel():  # sums have another order
                error = ((a.float() - b).norm() / b.norm()).item()
                self.assertLess(error, 2**-8, f"{name}, {what}")
                self.assertGreater(b.norm().item(), 0)
        return o, got

    def test_equals_one_gpu(self):
        ranks = dist.get_world_size()
        apart = 0
        for activation, with_bias, save in (("swiglu", False, "h"), ("gelu", False, "h"), ("swiglu", True, "h"),
                                            ("swiglu", False, "x"), ("gelu", True, "x"),
                                            ("clamped-swiglu", True, "h"), ("clamped-swiglu", True, "x")):
            training.SIDE_STREAM_BYTES, apart = apart, (1 << 30) - apart  # in turns
            experts = self.make(activation=activation, save=save)
            for tokens in ([300] * ranks, [17 + 20 * r for r in range(ranks)], [0, 40, 5, 9, 1, 2, 3, 4][:ranks],
                           [300] + [0] * (ranks - 1), [300] * ranks):
                if sum(tokens) > 8:  # few tokens have kernels of their own (decision 0022)
                    self.compare(experts, tokens, activation, with_bias)
            dist.barrier()
            experts.close()

    def test_skewed_routing(self):
        """Experts as often as Zipf's law has it: the first rank has most rows. Ranks have other numbers of tokens."""
        ranks = dist.get_world_size()
        share = 1 / torch.arange(1, self.E + 1, device="cuda", dtype=torch.float32)
        for save in ("h", "x"):
            experts = self.make(save=save)
            for tokens in ([self.T] * ranks, [0] + [self.T] * (ranks - 1), [41 + 9 * r for r in range(ranks)]):
                torch.manual_seed(5)  # alike on all ranks
                # Drawn without repetition, by the exponential race.
                race = torch.empty(sum(tokens), self.E, device="cuda").exponential_() / share
                skewed = race.topk(self.K, largest=False)[1]
                self.assertGreater((skewed < self.E // ranks).sum().item(), 1.25 / ranks * skewed.numel())
                self.compare(experts, tokens, "swiglu", False, skewed)
            dist.barrier()
            experts.close()

    def test_biases_without_training(self):
        """One launch, in a graph, too."""
        ranks = dist.get_world_size()
        mine, own = self.parts()
        x, ids, scores, _, (w_up, w_down, b_up, b_down) = self.inputs([self.T] * ranks)
        wanted = tessera.routed_experts(x, ids, scores, w_up, w_down, b_up=b_up, b_down=b_down,
                                        activation="clamped-swiglu")
        experts = tessera.ExpertParallel(max_tokens=self.T, hidden=self.D, intermediate=self.N, experts=self.E,
                                         top_k=self.K, activation="clamped-swiglu")
        tensors = (x[mine].clone(), ids[mine].int(), scores[mine], w_up[own], w_down[own])
        biases = {"b_up": b_up[own], "b_down": b_down[own]}
        o = experts(*tensors, **biases)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = experts(*tensors, **biases)
        graph.replay()
        torch.cuda.synchronize()
        experts.check()
        self.assertTrue(torch.equal(o, wanted[mine]) and torch.equal(again, o))
        self.assertFalse(torch.equal(o, experts(*tensors)))
        dist.barrier()
        experts.close()

    def test_repeats_and_inference_between(self):
        """The same bits every time, whatever comes between: a pass in one launch, a bound of rows."""
        ranks = dist.get_world_size()
        mine, own = self.parts()
        experts, bounded = self.make(), self.make(max_rows=self.T * self.K * ranks)
        x, ids, scores, _, weights = self.inputs([self.T] * ranks)
        seen = []
        for session in [experts] * 20 + [bounded] * 5:
            seen.append(self.compare(session, [self.T] * ranks, "swiglu", False))
            with torch.no_grad():
                o = session(x[mine], ids[mine], scores[mine], weights[0][own], weights[1][own])
            self.assertTrue(torch.equal(o, seen[0][0]))
        for o, gradients in seen[1:]:
            self.assertTrue(torch.equal(o, seen[0][0]))
            self.assertTrue(all(torch.equal(a, b) for a, b in zip(gradients, seen[0][1])))
        dist.barrier()
        experts.close()
        bounded.close()

    def test_autocast(self):
        """Weights and x in fp32, as mixed precision has them: computed in bf16, gradients in fp32."""
        ranks = dist.get_world_size()
        mine, own = self.parts()
        experts = self.make()
        x, ids, scores, d_o, weights = self.inputs([self.T] * ranks)
        narrow = [t.clone().requires_grad_() for t in (x[mine], weights[0][own], weights[1][own])]
        wide = [t.detach().float().requires_grad_() for t in narrow]
        results = []
        for leaves, enabled in ((narrow, False), (wide, True)):
            with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
                o = experts(leaves[0], ids[mine], scores[mine], *leaves[1:])
                with torch.no_grad():
                    self.assertTrue(torch.equal(experts(leaves[0], ids[mine], scores[mine], *leaves[1:]), o))
            results.append((o, *torch.autograd.grad(o, leaves, d_o[mine])))
        for a, b in zip(*results, strict=True):
            self.assertTrue(torch.equal(a, b.bfloat16()))
        self.assertTrue(all(t.dtype is torch.float32 for t in results[1][1:]))
        torch.cuda.synchronize()
        experts.check()
        dist.barrier()
        experts.close()

    def test_more_rows_than_before(self):
        """All ranks make a pass again, as the rows of one of them do not fit into what the layer had before."""
        ranks = dist.get_world_size()
        mine, own = self.parts()
        for save in ("h", "x"):
            experts = self.make(save=save)
            x, ids, scores, d_o, weights = self.inputs([self.T] * ranks)
            ups, downs = (w[own].clone().requires_grad_() for w in weights[:2])
            few = torch.where(torch.arange(len(ids), device="cuda")[:, None] % self.T < 20, ids, -1)
            to_last = torch.full_like(ids, self.E - 1)  # the last rank's rows alone are many
            for step, chosen in enumerate((few, few, ids, ids, few, to_last, to_last, ids)):
                leaves = [x[mine].clone().requires_grad_(), scores[mine].clone().requires_grad_(), ups, downs]
                o = experts(leaves[0], chosen[mine], *leaves[1:])
                got = torch.autograd.grad(o, leaves, d_o[mine])
                whole = [x.clone().requires_grad_(), scores.clone().requires_grad_()]
                wanted_o = tessera.routed_experts(whole[0], chosen, whole[1], *weights[:2])
                wanted = torch.autograd.grad(wanted_o, whole, d_o)
                self.assertTrue(torch.equal(o, wanted_o[mine]), f"o, save {save}, step {step}")
                self.assertTrue(torch.equal(got[0], wanted[0][mine]), f"dx, save {save}, step {step}")
                error = (got[1] - wanted[1][mine]).norm() / wanted[1][mine].norm()
                self.assertLess(error.item(), 2**-8)
            torch.cuda.synchronize()
            experts.check()
            tessera.check_device_values()
            dist.barrier()
            experts.close()

    def test_all_rows_on_one_rank(self):
        """As many as there may be, repeated choices of one expert, and none on the others."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine, own = self.parts()
        for save in ("h", "x"):
            experts = self.make(save=save)
            x, ids, scores, d_o, weights = self.inputs([self.T] * ranks)
            ids = torch.full_like(ids, self.E - 1)
            whole = [t.clone().requires_grad_() for t in (x, scores)]
            wanted_o = tessera.routed_experts(whole[0], ids, whole[1], *weights[:2])
            wanted = torch.autograd.grad(wanted_o, whole, d_o)
            leaves = [t.clone().requires_grad_() for t in (x[mine], scores[mine], weights[0][own], weights[1][own])]
            o = experts(leaves[0], ids[mine], *leaves[1:])
            got = torch.autograd.grad(o, leaves, d_o[mine])
            self.assertTrue(torch.equal(o, wanted_o[mine]), save)
            self.assertTrue(torch.equal(got[0], wanted[0][mine]), save)
            self.assertLess(((got[1] - wanted[1][mine]).norm() / wanted[1][mine].norm()).item(), 2**-8)
            self.assertEqual(bool(got[2].abs().max() == 0), rank + 1 < ranks)
            torch.cuda.synchronize()
            experts.check()
            dist.barrier()
            experts.close()

    def test_prepared_passes_have_the_bits_of_others(self):
        """Hooks on saved tensors take the way on which nothing is prepared."""
        ranks = dist.get_world_size()
        mine, own = self.parts()
        x, ids, scores, d_o, weights = self.inputs([self.T] * ranks)
        for save, max_rows, apart in (("h", None, 0), ("h", self.T * self.K * ranks, 1 << 30), ("x", None, 0)):
            training.SIDE_STREAM_BYTES = apart
            experts, results = self.make(save=save, max_rows=max_rows), []
            leaves = [t.clone().requires_grad_() for t in (x[mine], scores[mine], weights[0][own], weights[1][own])]
            for hooked in (False, True, False, False):
                with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone) if hooked else \
                        contextlib.nullcontext():
                    o = experts(leaves[0], ids[mine], *leaves[1:])
                results.append((o, *torch.autograd.grad(o, leaves, d_o[mine])))
            torch.cuda.synchronize()
            experts.check()
            for others in results[1:]:
                for a, b in zip(results[0], others, strict=True):
                    self.assertTrue(torch.equal(a, b), f"save {save}, max_rows {max_rows}, apart {apart}")
            dist.barrier()
            experts.close()

    def test_tokens_that_come_once(self):
        """Gradients have the bits of those of rows that come one by one. Ranks may differ in that, in whether rows of x
        come apart, and in whether rows of their own tokens are multiplied while the others come."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        large = 1 << 30
        ways = ((True, 0, False), (True, 0, True), (False, 0, False), (rank % 2 == 0, 0, True),
                (True, large * (rank % 2), True), (rank % 2 == 1, large, False), (True, 0, rank % 2 == 1))
        for activation, save, with_bias in (("swiglu", "h", False), ("swiglu", "x", False), ("gelu", "h", False),
                                            ("clamped-swiglu", "h", True)):
            seen = {}
            for once, apart, own_first in ways:  # prepared passes know them: each has a session of its own
                experts = self.make(activation=activation, save=save, max_rows=self.T * self.K * ranks)
                with mock.patch.object(training, "gathers_tokens", return_value=once), \
                        mock.patch.object(training, "SIDE_STREAM_BYTES", apart), \
                        mock.patch.object(prepared, "begins_with_own_rows", return_value=own_first):
                    for tokens in ([self.T] * ranks, [9 + 7 * r for r in range(ranks)], [0] + [self.T] * (ranks - 1)):
                        got = self.compare(experts, tokens, activation, with_bias)[1]
                        for a, b in zip(seen.setdefault(tuple(tokens), got), got, strict=True):
                            self.assertTrue(torch.equal(a, b), f"{activation}, save {save}, tokens {tokens}")
                dist.barrier()
                experts.close()

    def test_own_rows_first(self):
        """Enough rows of an expert that whole blocks are this rank's own; again and again, so that the peers' come at
        other times."""
        self.T = 1500
        ranks, seen = dist.get_world_size(), None
        experts = self.make(max_rows=self.T * self.K * ranks)
        with mock.patch.object(training, "gathers_tokens", return_value=True):
            for tokens in ([self.T] * ranks, [self.T - 700 * (r % 2) for r in range(ranks)]):
                for _ in range(20):
                    got = self.compare(experts, tokens, "swiglu", False)[1]
                    seen = got if seen is None else seen
                    for a, b in zip(seen, got, strict=True):
                        self.assertTrue(torch.equal(a, b), f"tokens {tokens}")
                seen = None
        dist.barrier()
        experts.close()

    def test_checkpointing(self):
        """Forward runs again in backward, with less memory than it had at first."""
        ranks = dist.get_world_size()
        mine, own = self.parts()
        x, ids, scores, d_o, weights = self.inputs([self.T] * ranks)
        few = torch.where(torch.arange(len(ids), device="cuda")[:, None] % self.T < 20, ids, -1)
        experts = self.make()
        leaves = [t.clone().requires_grad_() for t in (x[mine], scores[mine], weights[0][own], weights[1][own])]

        def run(chosen):
            return checkpoint(experts, leaves[0], chosen[mine], *leaves[1:], use_reentrant=False,
                              determinism_check="none")

        many_o, few_o = run(ids), run(few)
        torch.autograd.grad(few_o, leaves, d_o[mine])
        got = torch.autograd.grad(many_o, leaves, d_o[mine])
        plain = experts(leaves[0], ids[mine], *leaves[1:])
        for a, b in zip((many_o, *got), (plain, *torch.autograd.grad(plain, leaves, d_o[mine])), strict=True):
            self.assertLessEqual(((a - b).float().norm() / b.float().norm()).item(), 2**-8)
            self.assertGreater(b.float().norm().item(), 0)
        torch.cuda.synchronize()
        experts.check()
        dist.barrier()
        experts.close()

    def test_graphs(self):
        """Forward and backward in a graph, replayed on other tensors: with a bound of rows no host waits."""
        ranks = dist.get_world_size()
        mine, own = self.parts()
        for save in ("h", "x"):
            experts = self.make(max_rows=self.T * self.K * ranks, save=save)
            x, ids, scores, d_o, weights = self.inputs([self.T] * ranks)
            leaves = [t.clone().requires_grad_() for t in (x[mine], scores[mine], weights[0][own], weights[1][own])]
            ids, d_o = ids[mine].int().clone(), d_o[mine].clone()

            def step():
                o = experts(leaves[0], ids, *leaves[1:])
                return (o, *torch.autograd.grad(o, leaves, d_o))

            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                for _ in range(3):
                    step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = step()
            for _ in range(3):
                with torch.no_grad():
                    leaves[0].copy_(torch.randn_like(leaves[0]))
                    ids.copy_(torch.rand(self.T, self.E, device="cuda").topk(self.K)[1])
                graph.replay()
                replayed = [t.clone() for t in results]
                for a, b in zip(step(), replayed, strict=True):
                    self.assertTrue(torch.equal(a, b))
            differ = torch.zeros((), dtype=torch.int64, device="cuda")
            with torch.no_grad():
                for _ in range(1000):
                    for result in results:
                        result.zero_()
                    graph.replay()
                    for a, b in zip(results, replayed, strict=True):
                        differ += (a != b).sum()
            self.assertEqual(differ.item(), 0)
            self.assertTrue(all(t.any() for t in replayed))
            torch.cuda.synchronize()
            experts.check()
            del graph, results
            dist.barrier()
            experts.close()

    def test_too_many_rows(self):
        ranks = dist.get_world_size()
        mine, own = self.parts()
        x, ids, scores, _, weights = self.inputs([self.T] * ranks)
        for biases in ({}, {"b_up": weights[2][own], "b_down": weights[3][own]}):
            experts = self.make(max_rows=64)
            experts(x[mine].requires_grad_(), ids[mine], scores[mine], weights[0][own], weights[1][own], **biases)
            torch.cuda.synchronize()
            with self.assertRaisesRegex(RuntimeError, "memory for 64|had given up"):
                experts.check()
            dist.barrier()
            experts.abort()

    def test_a_captured_pass_needs_a_bound(self):
        ranks = dist.get_world_size()
        mine, own = self.parts()
        experts = self.make()
        x, ids, scores, _, weights = self.inputs([self.T] * ranks)
        tensors = (x[mine].requires_grad_(), ids[mine].int(), scores[mine], weights[0][own], weights[1][own])
        with self.assertRaisesRegex(RuntimeError, "max_rows"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            experts(*tensors)
        experts(*tensors).sum().backward()
        torch.cuda.synchronize()
        experts.check()
        dist.barrier()
        experts.close()

    def test_out_of_turn(self):
        experts = self.make()
        rows = torch.zeros(4, self.D, dtype=torch.bfloat16, device="cuda")
        tables = training.Tables(torch.zeros(self.E // dist.get_world_size() + 1, dtype=torch.int32, device="cuda"),
                                 torch.zeros(4, 4, dtype=torch.int32, device="cuda"), torch.zeros(4, device="cuda"))
        with self.assertRaisesRegex(ValueError, "combine: begin a pass with route"):
            training.combine(experts._session, rows, tables, torch.zeros_like(rows))
        dist.barrier()
        experts.close()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        print("skipped: a process of each rank is needed; torchrun --nproc-per-node N starts them, on N GPUs")
        sys.exit(77)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    gpu.main()

# SPDX-License-Identifier: Apache-2.0
"""Passes of ExpertParallel with gradients or biases, without GPUs: one rank, whose exchange one_rank.py makes.

Groups of GPUs: cuda_expert_parallel_training_test.py.
"""

import contextlib
import importlib.util
import pathlib
import unittest
from unittest import mock

import tessera
import torch
from cpu_session import make_desc, make_session
from one_rank import REAL, SHAPE, OneRank, Operations, RankCase, Unseen, cpu_session
from tessera import expert_parallel_library as structs
from tessera import expert_parallel_prepared as prepared
from tessera import expert_parallel_session as session_module
from tessera import expert_parallel_training as training
from tessera.ops import layer
from torch.utils.checkpoint import checkpoint


class OnCpu(RankCase):
    def test_gradients(self):
        for activation, with_bias in (("swiglu", False), ("gelu", False), ("swiglu", True), ("clamped-swiglu", True),
                                      ("clamped-swiglu", False)):
            with self.subTest(activation, bias=with_bias):
                self.assert_near(*self.run_both(activation, with_bias))
                self.assert_near(*self.run_both(activation, with_bias, save="x"))

    def test_rows_of_x_apart(self):
        with mock.patch.object(training, "SIDE_STREAM_BYTES", 0):
            self.assert_near(*self.run_both())
            self.assert_near(*self.run_both("clamped-swiglu", True))
            self.assert_near(*self.run_both("swiglu", True))
            self.assert_near(*self.run_both(save="x"))
            self.assert_near(*self.run_both(max_rows=900))

    def test_a_bound_of_rows(self):
        self.assert_near(*self.run_both(max_rows=900))
        self.assert_near(*self.run_both(max_rows=900, save="x"))

    def test_no_tokens(self):
        for save in ("h", "x"):
            (o, dx, dscores, dw_up, dw_down), _ = self.run_both(tokens=0, save=save)
            self.assertEqual((o.shape, dx.shape, dscores.shape), ((0, 64), (0, 64), (0, 3)))
            self.assertEqual((dw_up.abs().max(), dw_down.abs().max()), (0, 0))

    def test_more_rows_than_before(self):
        """Few rows, then as many as there are: the backward pass is made again."""
        ids, leaves = self.tensors("swiglu", False, 300)
        few = torch.where(torch.arange(300)[:, None] < 20, ids, -1)
        for save in ("h", "x"):
            once = ["forward", "dispatch", "combine", "rows"]
            session = cpu_session(save=save)
            fake, expected = OneRank(8), []
            for chosen, again in ((few, []), (few, []), (ids, ["route", "dispatch", "combine"]), (ids, []), (few, [])):
                self.step(fake, session, leaves, chosen)
                expected += once + again
            self.assertEqual(fake.calls, expected)
            fake.others_have_memory = [False]  # another rank makes its own again
            self.step(fake, session, leaves, few)
            self.assertEqual(fake.calls, [*expected, *once, "route", "dispatch", "combine"])

    def test_more_rows_than_before_unfused(self):
        """Few rows, then as many as there are: the pass is made again. The next one asks after what it enqueues."""
        ids, (*leaves, b_up, b_down) = self.tensors("swiglu", True, 300)
        few = torch.where(torch.arange(300)[:, None] < 20, ids, -1)
        for save in ("h", "x"):
            session = cpu_session(save=save)
            fake, expected = OneRank(8), []
            ask_first, ask_last = ["route", "rows", "dispatch", "combine"], ["route", "dispatch", "combine", "rows"]
            for chosen, calls in ((few, ask_first), (ids, ask_last + ask_first), (ids, ask_last)):
                self.step(fake, session, leaves, chosen, (b_up, b_down))
                expected += calls + ["dispatch", "combine"]
            self.assertEqual(fake.calls, expected)

    def test_passes_that_are_added(self):
        """As several hosts make them: gradients of weights of passes in one fp32 buffer, each added once, also
        where there were more rows than in the pass before, or another rank had no memory."""
        ids, leaves = self.tensors("clamped-swiglu", True, 300)
        few = torch.where(torch.arange(300)[:, None] < 20, ids, -1)
        x, scores, *weights = leaves
        names = dict(zip(("b_up", "b_down"), weights[2:], strict=True))
        for save, max_rows in (("h", None), ("x", None), ("h", 900)):
            session, fake = cpu_session("clamped-swiglu", max_rows, save), OneRank(8, "clamped-swiglu")
            buffers = tuple(torch.zeros(weight.shape) for weight in weights)
            wanted_sum = [torch.zeros(weight.shape) for weight in weights]
            asks, again = ([], []) if max_rows else (["rows"], ["forward"])
            for chosen, calls, others in ((few, ["forward", *asks], []), (ids, ["forward", *asks, *again], []),
                                          (few, ["forward", *asks, *again], [False])):
                fake.calls, fake.others_have_memory = [], list(others) * len(asks)
                with mock.patch.object(session_module, "load", return_value=fake):
                    o, saved = training.forward_saved(session, 0, x.detach(), chosen, scores.detach(), tuple(
                        weight.detach() for weight in weights))
                    self.assertEqual(fake.calls, calls)
                    d_o = torch.randn_like(o)
                    made = training.backward_saved(session, saved, d_o, tuple(w.detach() for w in weights), buffers)
                self.assertEqual(fake.calls, [*calls, "dispatch", "combine"])
                wanted_o = tessera.routed_experts(x, chosen, scores, *weights[:2], activation="clamped-swiglu", **names)
                dx, dscores, *wanted = torch.autograd.grad(wanted_o, leaves, d_o)
                wanted_sum = [a + b.float() for a, b in zip(wanted_sum, wanted, strict=True)]
                self.assert_near((o, *made), (wanted_o, dx, dscores))
                self.assert_near(buffers, wanted_sum)

    def test_layers_between_forward_and_backward(self):
        """Each knows the rows of its own pass, however many came after it."""
        ids, (x, scores, w_up, w_down) = self.tensors("swiglu", False, 60)
        session, fake = cpu_session(), OneRank(8)
        few = torch.where(torch.arange(60)[:, None] < 7, ids, -1)
        with mock.patch.object(session_module, "load", return_value=fake):
            results = [training.run(session, number, x, chosen, scores, w_up, w_down)
                       for number, chosen in enumerate((few, ids, few))]
            got = [torch.autograd.grad(o.sum(), (x, w_up)) for o in reversed(results)]
        self.assertEqual([session.rows_of_last_pass(number) for number in range(3)], [rows for rows, _ in fake.counted])
        for gradients, chosen in zip(got, (few, ids, few), strict=True):
            o = tessera.routed_experts(x, chosen, scores, w_up, w_down)
            self.assert_near(gradients, torch.autograd.grad(o.sum(), (x, w_up)))

    def test_another_rank_without_memory(self):
        """A rank that has asked before it dispatches rows makes the pass again with the others."""
        ids, (x, scores, w_up, w_down, *biases) = self.tensors("swiglu", True)
        fake = OneRank(SHAPE["experts"])
        fake.others_have_memory = [False]
        with mock.patch.object(session_module, "load", return_value=fake):
            o = training.run(cpu_session(), 0, x, ids, scores, w_up, w_down, *biases)
        self.assertEqual(fake.calls, ["route", "rows", "dispatch", "combine"] * 2)
        self.assert_near([o], [tessera.routed_experts(x, ids, scores, w_up, w_down, b_up=biases[0], b_down=biases[1])])

    def test_biases_without_gradients(self):
        """With clamped-swiglu one launch, which needs no training; else an unfused pass."""
        for activation, calls in (("clamped-swiglu", ["forward"]), ("gelu", ["route", "rows", "dispatch", "combine"])):
            ids, (x, scores, w_up, w_down, b_up, b_down) = self.tensors(activation, True)
            session = cpu_session(activation, training=len(calls) > 1)
            fake = OneRank(SHAPE["experts"], activation)
            self.assertEqual(session.fuses(w_up, w_down, b_up, b_down), len(calls) == 1)
            self.assertFalse(session.fuses(w_up, w_down.mT, b_up, b_down))
            with mock.patch.object(session_module, "load", return_value=fake), torch.no_grad():
                o = training.run(session, 0, x, ids, scores, w_up, w_down, b_up, b_down)
            self.assertEqual(fake.calls, calls)
            self.assert_near([o], [tessera.routed_experts(x, ids, scores, w_up, w_down, b_up=b_up, b_down=b_down,
                                                          activation=activation)])

    def test_weights_that_one_launch_does_not_take(self):
        """Strides that the layer of one GPU takes: forward is unfused."""
        ids, leaves = self.tensors("swiglu", False)
        leaves[3] = leaves[3].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        fake = OneRank(8)
        self.step(fake, cpu_session(), leaves, ids)
        self.assertEqual(fake.calls, ["route", "rows", *["dispatch", "combine"] * 2])

    def test_routing_tables_are_the_library_s(self):
        """Those that a forward pass of the same rows leaves, of any number of rows and of memory; each call has its
        own memory."""
        session, text = cpu_session(), "grouping=offsets"
        w_up, w_down = torch.zeros(8, 64, 64, dtype=torch.bfloat16), torch.zeros(8, 64, 32, dtype=torch.bfloat16)
        seen = []
        for offsets in ([0, 3, 3, 7, 9, 9, 12, 12, 13], [0] * 9, [0, 1, 2, 3, 4, 5, 6, 7, 256]):
            offsets, scores = torch.tensor(offsets, dtype=torch.int32), torch.rand(256)
            x = torch.zeros(256, 64, dtype=torch.bfloat16)
            inputs = (x, None, None, None, None, None, offsets, scores, w_up, None, w_down, None, None, None, None)
            wanted = layer.prepared_forward(inputs, text, 0, True).run([t for t in inputs if t is not None])[2]
            got = session.routing(offsets, scores)
            self.assertTrue(torch.equal(got, wanted))
            self.assertEqual(got[:9].tolist(), offsets.tolist())
            seen.append((got, wanted.clone()))
        self.assertEqual(len(session._calls), 1)
        self.assertTrue(all(torch.equal(got, wanted) for got, wanted in seen))

    def test_only_what_is_wanted(self):
        ids, (x, scores, w_up, w_down) = self.tensors("swiglu", False)
        fake = OneRank(SHAPE["experts"])
        with mock.patch.object(session_module, "load", return_value=fake):
            o = training.run(cpu_session(), 0, x.detach(), ids, scores.detach(), w_up, w_down.detach())
            o.sum().backward()
            self.assertTrue(w_up.grad is not None and x.grad is None and scores.grad is None and w_down.grad is None)
            with torch.no_grad():
                same = training.run(cpu_session(), 0, x, ids, scores, w_up, w_down)
        self.assert_near([same], [o.detach()])

    def test_twice_through_one_graph(self):
        ids, (x, scores, w_up, w_down) = self.tensors("swiglu", False)
        with mock.patch.object(session_module, "load", return_value=OneRank(SHAPE["experts"])):
            o = training.run(cpu_session(), 0, x, ids, scores, w_up, w_down)
            first = torch.autograd.grad(o.sum(), (x, w_up), retain_graph=True)
            again = torch.autograd.grad(o.sum(), (x, w_up))
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(first, again)))

    def test_a_step_is_calls_of_the_library_alone(self):
        """No operation of torch between them: results and scratch memory are made without its dispatcher."""
        for activation, with_bias, save in (("swiglu", False, "h"), ("swiglu", False, "x"),
                                            ("clamped-swiglu", True, "h")):
            ids, (x, scores, w_up, w_down, *biases) = self.tensors(activation, with_bias)
            session, d_o = cpu_session(activation, 900, save), torch.randn(x.shape).bfloat16()
            fake = OneRank(SHAPE["experts"], activation)
            with mock.patch.object(session_module, "load", return_value=Unseen(fake)):
                for _ in range(2):
                    with Operations() as forward:
                        o = training.run(session, 0, x, ids, scores, w_up, w_down, *biases)
                    with Operations() as backward:
                        torch.autograd.grad(o, (x, scores, w_up, w_down, *biases), d_o)
            self.assertEqual(fake.calls, ["forward", "dispatch", "combine"] * 2)
            self.assertEqual([name for name in forward.names if "detach" not in name], [])  # of saved parameters
            self.assertEqual([name for name in backward.names if "detach" not in name], [])

    def test_the_side_stream(self):
        """Rows of x come on it, and what follows waits until they have begun. Those of dx go on it: the library forks
        and joins it then, and also where tokens come once, of which those of the peers' d_o come on it, too."""
        ids, (x, scores, w_up, w_down) = self.tensors("swiglu", False)
        session, order = cpu_session(max_rows=900), []
        session.stream, session.side_stream = lambda: 1, lambda: 2
        windows = {name: torch.zeros(300, 64, dtype=torch.bfloat16) for name in ("input", "second_input")}
        session.place = windows.__getitem__

        class Side:
            begun = mock.Mock(cuda_event=99)
            fork = staticmethod(lambda: order.append("fork") or contextlib.nullcontext())

            def __getattr__(self, name):
                return lambda: order.append(name)

        class Streams(OneRank):
            def __getattr__(self, name):
                return lambda *a: order.append((name.removeprefix("tessera_"), a[-1])) or getattr(REAL, name)(*a)

        def noted(name, kind):
            def call(handle, address, stream):
                args = kind.from_address(address)
                second = "second_" if name == "dispatch" and not args.x.rank else ""
                order.append((second + name, stream, args.sms, args.begun))
                return getattr(OneRank, f"tessera_expert_parallel_{name}")(fake, handle, address, stream)

            return call

        session.side, fake = Side(), Streams(8)
        fake.tessera_expert_parallel_dispatch = noted("dispatch", structs.DispatchArgs)
        fake.tessera_expert_parallel_combine = noted("combine", structs.CombineArgs)
        wanted_o = tessera.routed_experts(x, ids, scores, w_up, w_down)
        d_o = torch.randn_like(wanted_o)
        wanted = torch.autograd.grad(wanted_o, (x, scores, w_up, w_down), d_o)
        begin, leads = ["begin"], ["wait_until_begun"]
        with mock.patch.object(training, "uses_side_stream", return_value=True), \
                mock.patch.object(session_module, "load", return_value=fake):
            apart = ["fork", ("dispatch", 1, 0, None), *begin]
            for size, once, own_first, first in (
                    (0, False, True, [*apart, ("second_dispatch", 2, 24, 99), *leads, "leave"]),
                    (0, True, False, [*apart, ("second_dispatch", 2, 8, 99), *leads, "leave"]),
                    (0, True, True, [("dispatch", 1, 0, None), ("second_dispatch", 2, 16, None)]),
                    (1 << 30, True, True, [("dispatch", 1, 0, None)])):
                session._calls.clear()  # which know whether rows of x come apart
                with mock.patch.object(training, "SIDE_STREAM_BYTES", size), \
                        mock.patch.object(training, "gathers_tokens", return_value=once), \
                        mock.patch.object(prepared, "begins_with_own_rows", return_value=own_first):
                    o = training.run(session, 0, x, ids, scores, w_up, w_down)
                    order.clear()
                    for window in windows.values():
                        window.zero_()
                    got = torch.autograd.grad(o, (x, scores, w_up, w_down), d_o)
                self.assertEqual([each for each in order if each[0] != "moe_saved"],
                                 [*first, ("combine", 2, 24, None)])
                self.assert_near(got, wanted)

    def test_a_captured_step_has_a_side_stream(self):
        """Rows of x come on it, however few they are: no host has to be in time."""
        session, needs, h = cpu_session(max_rows=900), (True,) * 5 + (False,) * 2, torch.empty(0, 1)
        for captures in (True, False):
            with mock.patch.object(training, "captures", return_value=captures):
                self.assertTrue(training.uses_side_stream(mock.Mock(is_cuda=True)))
                self.assertFalse(training.uses_side_stream(mock.Mock(is_cuda=False)))
                self.assertEqual(training._rows_of_x_apart(session, needs, mock.Mock(is_cuda=True), h), captures)
                self.assertFalse(training._rows_of_x_apart(session, needs, mock.Mock(is_cuda=False), h))
                self.assertFalse(training._rows_of_x_apart(session, needs, mock.Mock(is_cuda=True), torch.empty(0)))

    def test_tokens_that_come_once(self):
        """GEMMs that gather rows of x and d_o have the bits of those that read rows. What no row names is not read."""
        for activation, with_bias, save, apart in (("swiglu", False, "h", 0), ("swiglu", False, "x", 0),
                                                   ("clamped-swiglu", True, "h", 1 << 30),
                                                   ("gelu", False, "h", 1 << 30)):
            ids, (x, scores, *weights) = self.tensors(activation, with_bias, 290)
            ids[100:140] = -1
            d_o, results = torch.randn(x.shape).bfloat16(), []
            for once in (True, False):
                session, fake = cpu_session(activation, 900, save), OneRank(SHAPE["experts"], activation)
                with mock.patch.object(session_module, "load", return_value=fake), \
                        mock.patch.object(training, "SIDE_STREAM_BYTES", apart), \
                        mock.patch.object(training, "gathers_tokens", return_value=once):
                    o = training.run(session, 0, x, ids, scores, *weights)
                    results.append(torch.autograd.grad(o, (x, scores, *weights), d_o))
                self.assertEqual(fake.gathered, [once] * (2 if save == "h" and not apart else 1))
            for a, b in zip(*results, strict=True):
                self.assertTrue(torch.equal(a, b))
                self.assertGreater(a.abs().max(), 0)

    def test_where_tokens_come_once(self):
        """Where memory for those of all ranks is at most half of that for rows."""
        session = cpu_session(max_rows=900)
        self.assertTrue(prepared.gathers_tokens(session, 600))
        self.assertFalse(prepared.gathers_tokens(session, 599))
        session.desc.ranks = 4
        self.assertFalse(prepared.gathers_tokens(session, 900))

    def test_where_own_rows_come_first(self):
        """Where an expert has 256 of them on average."""
        desc = cpu_session(max_rows=900).desc
        tokens = -(-256 * desc.experts // desc.top_k)
        self.assertTrue(prepared.begins_with_own_rows(desc, tokens))
        self.assertFalse(prepared.begins_with_own_rows(desc, tokens - 1))

    def test_prepared_passes_of_other_tensors(self):
        """Each in turn in one session: other numbers of tokens, rows that lie apart, fewer gradients, biases."""
        torch.manual_seed(2)
        ids, (x, scores, *weights) = self.tensors("clamped-swiglu", True, 300)
        session, fake = cpu_session("clamped-swiglu", 900), OneRank(8, "clamped-swiglu")
        apart = torch.randn(300, 80).bfloat16()[:, :64]
        cases = [(x, 300, range(6)), (x, 40, range(6)), (apart, 300, (0, 1, 2, 3)), (x, 300, (3,)), (x, 300, (0,)),
                 (x, 7, (1, 2, 5)), (apart, 300, range(6))]
        for rows, tokens, wanted in (*cases, *cases[:2]):
            for count in (4, 6):
                leaves = [t.detach() for t in (rows[:tokens], scores[:tokens], *weights)][:count]
                kept = [leaves[i].requires_grad_() for i in wanted if i < count]
                names = dict(zip(("b_up", "b_down"), leaves[4:]))
                with mock.patch.object(session_module, "load", return_value=fake):
                    o = training.run(session, 0, leaves[0], ids[:tokens], *leaves[1:], *[None] * (6 - count))
                    d_o = torch.randn_like(o)
                    got = torch.autograd.grad(o, kept, d_o)
                wanted_o = tessera.routed_experts(leaves[0], ids[:tokens], *leaves[1:4], activation="clamped-swiglu",
                                                  **names)
                self.assert_near((o, *got), (wanted_o, *torch.autograd.grad(wanted_o, kept, d_o)))

    def test_saved_tensors_that_hooks_give_back(self):
        """As offloading does it: the same calls and bits."""
        ids, leaves = self.tensors("swiglu", False)
        results = []
        for hooked in (False, True):
            session, fake, (x, scores, w_up, w_down) = cpu_session(), OneRank(8), leaves
            with mock.patch.object(session_module, "load", return_value=fake):
                hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)
                with hooks if hooked else contextlib.nullcontext():
                    o = training.run(session, 0, x, ids, scores, w_up, w_down)
                results.append(((o, *torch.autograd.grad(o.float().square().sum(), leaves)), fake.calls))
        self.assertEqual(results[0][1], results[1][1])
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True)))

    def test_forward_runs_again_with_less_memory(self):
        """With activation checkpointing: another pass of the layer has had few rows in between."""
        ids, leaves = self.tensors("swiglu", False, 300)
        x, scores, w_up, w_down = leaves
        few = torch.where(torch.arange(300)[:, None] < 20, ids, -1)
        session, fake = cpu_session(), OneRank(8)
        with mock.patch.object(session_module, "load", return_value=fake):
            many_o, few_o = [checkpoint(training.run, session, 0, x, chosen, scores, w_up, w_down, use_reentrant=False,
                                        determinism_check="none")
                             for chosen in (ids, few)]
            torch.autograd.grad(few_o.sum(), leaves)
            got = torch.autograd.grad(many_o.sum(), leaves)
        self.assertEqual(fake.calls[-7:], ["forward", "dispatch", "combine", "rows", "route", "dispatch", "combine"])
        wanted_o = tessera.routed_experts(x, ids, scores, w_up, w_down)
        self.assert_near((many_o, *got), (wanted_o, *torch.autograd.grad(wanted_o.sum(), leaves)))

    def test_inside_what_is_compiled(self):
        """As docs/python.md has it: the call is the only graph break."""
        ids, leaves = self.tensors("swiglu", False)
        experts, fake = object.__new__(tessera.ExpertParallel), OneRank(8)
        experts._session = cpu_session(max_rows=900)
        call = torch.compiler.disable(experts)
        torch._dynamo.utils.counters.clear()

        def step(x, scores, w_up, w_down):
            return call(x * 2, ids, scores, w_up, w_down) * 3

        with mock.patch.object(session_module, "load", return_value=fake), \
                mock.patch.object(torch._C, "_cuda_getDevice", lambda: None, create=True):
            results = [(o, *torch.autograd.grad(o.float().square().sum(), leaves))
                       for o in (step(*leaves), torch.compile(step, backend="eager")(*leaves))]
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(*results, strict=True)))
        self.assertTrue(all(a.any() for a in results[0]))
        self.assertEqual(sum(torch._dynamo.utils.counters["graph_break"].values()), 1)

    def test_memory_for_rows(self):
        limit = 2 * 10**6
        self.assertEqual(training.memory_for(0, limit), 256)
        for rows in (0, 1, 255, 256, 257, 5000, 65537, 10**6):
            count = training.memory_for(rows, limit)
            self.assertTrue(rows <= count <= max(rows + 256, rows * 17 / 16), (rows, count))
            self.assertEqual(training.memory_for(rows, max(rows, 1)), max(rows, 1))  # the library takes no more
        self.assertLess(len({training.memory_for(rows, limit) for rows in range(60000, 68000)}), 6)


class Refusals(unittest.TestCase):
    def make(self, **options) -> tessera.ExpertParallel:
        experts = object.__new__(tessera.ExpertParallel)
        experts._session = make_session(make_desc(max_tokens=300, hidden=16, intermediate=4, experts=8, top_k=3,
                                                  **options))
        return experts

    def call(self, experts, needs_grad=True, **more):
        x = torch.zeros(5, 16, dtype=torch.bfloat16, requires_grad=needs_grad)
        tensors = {"topk_ids": torch.zeros(5, 3, dtype=torch.int32), "topk_weights": torch.zeros(5, 3),
                   "w_up": torch.zeros(8, 8, 16, dtype=torch.bfloat16),
                   "w_down": torch.zeros(8, 16, 4, dtype=torch.bfloat16)}
        return experts(**{"x": x, **tensors, **more})

    def test_says_what_to_do(self):
        bias = {"b_up": torch.zeros(8, 8, dtype=torch.bfloat16), "b_down": torch.zeros(8, 16, dtype=torch.bfloat16)}
        with self.assertRaisesRegex(RuntimeError, "training=True"):
            self.call(self.make())
        with self.assertRaisesRegex(RuntimeError, "training=True"):
            self.call(self.make(), False, **bias)
        with self.assertRaisesRegex(RuntimeError, "training=True"):  # gradients, though biases are its kernel's
            clamped = self.make(activation="clamped-swiglu")
            self.call(clamped, **bias)
        experts = self.make(training=1)
        with self.assertRaisesRegex(ValueError, "out: a pass with gradients"):
            self.call(experts, out=torch.zeros(5, 16, dtype=torch.bfloat16))
        with self.assertRaisesRegex(ValueError, "b_up, b_down: give both"):
            self.call(experts, b_up=bias["b_up"])
        with self.assertRaisesRegex(ValueError, "b_down: on meta"):
            self.call(experts, **{**bias, "b_down": bias["b_down"].to("meta")})

    def test_checks_of_tensors_that_follow_others(self):
        """Tensors like the last ones are not looked at again, but all others are."""
        experts, fake = self.make(training=1, activation="clamped-swiglu"), mock.Mock(return_value="o")
        bias = {"b_up": torch.zeros(8, 8, dtype=torch.bfloat16), "b_down": torch.zeros(8, 16, dtype=torch.bfloat16)}
        with mock.patch.multiple(training, run=fake, run_fused=fake), \
                mock.patch.object(torch._C, "_cuda_getDevice", lambda: None, create=True):
            for more in ({}, bias) * 2:
                self.assertEqual(self.call(experts, **more), "o")
                with self.assertRaisesRegex(ValueError, r"x: .* \[5, 24\]"):
                    self.call(experts, **{**more, "x": torch.zeros(5, 24, dtype=torch.bfloat16, requires_grad=True)})
                with self.assertRaisesRegex(ValueError, "out: a pass with gradients"):
                    self.call(experts, **more, out=torch.zeros(5, 16, dtype=torch.bfloat16))
                with self.assertRaisesRegex(ValueError, "b_up, b_down: give both"):
                    self.call(experts, b_down=bias["b_down"])
                with self.assertRaisesRegex(ValueError, "b_down: on meta"):
                    self.call(experts, **{**bias, "b_down": bias["b_down"].to("meta")})
                with self.assertRaisesRegex(ValueError, "topk_ids, topk_weights: .*int16"):
                    self.call(experts, **more, topk_ids=torch.zeros(5, 3, dtype=torch.int16))
        self.assertEqual(fake.call_count, 4)

    def test_tensors_that_one_launch_takes_as_they_are(self):
        """Each call looks at where weights begin, which is not the same for tensors that are alike otherwise."""
        experts, calls = self.make(training=1), []
        functions = {name: lambda *a, name=name: calls.append(name) for name in ("run", "run_fused")}
        w_up = torch.zeros(8 * 8 * 16 + 1, dtype=torch.bfloat16)
        off = w_up[1:].view(8, 8, 16).detach().requires_grad_()
        self.assertNotEqual(off.data_ptr() % 16, 0)
        on = w_up[:-1].view(8, 8, 16).detach().requires_grad_()
        with mock.patch.multiple(training, **functions), \
                mock.patch.object(torch._C, "_cuda_getDevice", lambda: None, create=True):
            for more in ({"w_up": on}, {"w_up": off}, {"w_up": on}, {"w_up": on, "topk_ids": torch.zeros(
                    5, 3, dtype=torch.int64)}, {"w_up": on, "x": torch.zeros(5, 24, dtype=torch.bfloat16)[:, :16]}):
                self.call(experts, **more)
        self.assertEqual(calls, ["run_fused", "run", "run_fused", "run", "run_fused"])

    def test_shapes_before_a_pass_begins(self):
        experts = self.make(training=1)
        for name, tensor, says in (
                ("x", torch.zeros(5, 24, dtype=torch.bfloat16, requires_grad=True), r"x: .* \[5, 24\]; bf16 \[5, 16\]"),
                ("x", torch.zeros(5, 16, requires_grad=True), "x: torch.float32"),
                ("x", torch.zeros(301, 16, dtype=torch.bfloat16, requires_grad=True), r"topk_ids: .*; \[301, 3\]"),
                ("topk_ids", torch.zeros(4, 3, dtype=torch.int32), r"topk_ids: \[4, 3\]"),
                ("topk_ids", torch.zeros(5, 3, dtype=torch.int16), "torch.int16"),
                ("topk_weights", torch.zeros(5, 2), r"topk_weights: \[5, 2\]"),
                ("w_up", torch.zeros(8, 4, 16, dtype=torch.bfloat16), r"w_up: .*; bf16 \[8, 8, 16\]"),
                ("w_down", torch.zeros(8, 16, 4), "w_down: torch.float32"),
                ("b_up", torch.zeros(8, 4, dtype=torch.bfloat16), r"b_up: .*; bf16 \[8, 8\]")):
            more = {name: tensor}
            if name == "b_up":
                more["b_down"] = torch.zeros(8, 16, dtype=torch.bfloat16)
            with self.subTest(name), self.assertRaisesRegex(ValueError, says):
                self.call(experts, **more)

    def test_bounds_of_rows(self):
        for training_, rows, says in ((0, 5, "training=True"), (1, 0, "max_rows=0"), (1, 901, "top_k = 900")):
            desc = make_desc(max_tokens=300, top_k=3, experts=8, training=training_)
            with self.assertRaisesRegex(ValueError, says):
                session_module.training_options(desc, rows)
        with self.assertRaisesRegex(ValueError, "save='none'"):
            session_module.training_options(desc, None, "none")


class Streams:
    """Streams of a GPU on which nothing runs: which steps each of them is behind, and the steps that were enqueued
    before all earlier ones had to have ended."""

    def __init__(self):
        self.steps, self.early, self.host, self.captures = 0, [], set(), False
        self.current = self.Stream(self)

    class Stream:
        def __init__(self, streams):
            self.behind, self.streams = set(), streams
            streams.all = [*getattr(streams, "all", ()), self]

        def wait_stream(self, other):
            self.behind |= other.behind

    def step(self):
        """A pass, or the replay of one: it has to be behind all before it."""
        if self.captures:
            return
        if self.current.behind | self.host != set(range(self.steps)):
            self.early.append(self.steps)
        self.current.behind.add(self.steps)
        self.steps += 1

    def synchronize(self):
        self.host = set().union(*[stream.behind for stream in self.all])

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def capture(self, graph):
        self.captures = True
        yield
        self.captures = False

    def cuda(self) -> mock.Mock:
        """In place of torch.cuda."""
        return mock.Mock(Stream=lambda: self.Stream(self), current_stream=lambda: self.current, stream=self.on,
                         graph=self.capture, CUDAGraph=lambda: mock.Mock(replay=self.step),
                         synchronize=self.synchronize)


class Bench(unittest.TestCase):
    def test_captured_steps_are_behind_those_before(self):
        """Ranks that make passes in different orders wait for each other in vain (bench/python)."""
        place = pathlib.Path(__file__).parents[2] / "bench" / "python" / "expert_parallel_host_time.py"
        spec = importlib.util.spec_from_file_location("host_time", place)
        host_time, streams = importlib.util.module_from_spec(spec), Streams()
        spec.loader.exec_module(host_time)
        with mock.patch.object(host_time.torch, "cuda", streams.cuda()), mock.patch.object(host_time, "dist"):
            for _ in range(4):
                streams.step()
            graph, _ = host_time.captured(streams.step)
            graph.replay()
        self.assertGreater(streams.steps, 6)
        self.assertEqual(streams.early, [])


if __name__ == "__main__":
    unittest.main()

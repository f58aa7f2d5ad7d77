# SPDX-License-Identifier: Apache-2.0
"""Forward and gradients of every entry against fp64 torch, and what torch asks of an operator."""

import functools
import math
import os
import pathlib
import re
import threading
import unittest

import eager
import tessera
import tessera.ops
import torch
import torch._dynamo.testing
from tessera import options
from torch.utils import checkpoint

ROUTERS = ("topk-softmax", "softmax-topk", "softmax-topk-renorm", "sigmoid-bias", "group-limited", "sqrtsoftplus")


def data(tokens=13, hidden=24, top_k=3, experts=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k]
    scores = torch.rand(tokens, top_k, generator=generator) * 0.95 + 0.05
    return x, ids, scores, torch.randn(tokens, hidden, generator=generator)


class Entries(unittest.TestCase):
    def compare(self, ours, theirs, inputs: dict, d_o, name: str):
        """ours and theirs: functions of a dict of tensors; all gradients are compared too."""
        mine, exact = eager.leaves(inputs), eager.doubled(inputs)
        o, reference = ours(mine), theirs(exact)
        relative = eager.RELATIVE[d_o.dtype]  # of the storage type: scores and their gradients are fp32
        eager.check_close(self, f"{name}: o", o, reference, relative)
        got = torch.autograd.grad(o, list(mine.values()), d_o)
        wanted = torch.autograd.grad(reference, list(exact.values()), d_o.double())
        for key, a, b in zip(mine, got, wanted, strict=True):
            eager.check_close(self, f"{name}: d{key}", a, b, relative)

    def test_layouts_and_activations(self):
        x, ids, scores, d_o = data()
        gated = eager.cases(activation=("swiglu", "geglu", "geglu-erf", "reglu", "clamped-swiglu"), bias=(False, True),
                            layout=("concat", "up-first", "interleaved", "blocked:4", "transposed",
                                    "transposed-up-first", "transposed-interleaved", "transposed-blocked:2"))
        plain = eager.cases(activation=("relu", "relu2", "silu", "gelu", "gelu-erf"), bias=(False, True),
                            layout=("concat", "transposed"))
        for case in gated + plain:
            with self.subTest(**case):
                w = eager.weights(**case)
                options = {key: case[key] for key in ("activation", "layout")}
                self.compare(
                    lambda t: tessera.routed_experts(t["x"], ids, t["scores"], **pick(t), **options),
                    lambda t: eager.experts(t["x"], ids, t["scores"], t, **options),
                    {"x": x, "scores": scores, **w}, d_o, str(case))

    def test_separate_weights(self):
        x, ids, scores, d_o = data()
        for bias in (False, True):
            self.compare(lambda t: tessera.routed_experts(t["x"], ids, t["scores"], **pick(t)),
                         lambda t: eager.experts(t["x"], ids, t["scores"], t),
                         {"x": x, "scores": scores, **eager.weights(separate=True, bias=bias)}, d_o, f"bias={bias}")

    def test_clamp_parameters(self):
        x, ids, scores, d_o = data()
        w = eager.weights(activation="clamped-swiglu")
        for alpha, limit, up_offset in ((1.0, 0.5, 0.0), (1.702, 0.25, 1.0), (1.0, math.inf, 0.0)):
            options = {"activation": "clamped-swiglu", "alpha": alpha, "limit": limit, "up_offset": up_offset}
            self.compare(lambda t, o=options: tessera.routed_experts(t["x"], ids, t["scores"], **pick(t), **o),
                         lambda t, o=options: eager.experts(t["x"], ids, t["scores"], t, **o),
                         {"x": x, "scores": scores, **w}, d_o, str(options))

    def test_routers(self):
        x, _, _, d_o = data(experts=8)
        inputs = {"x": x, "w_router": eager.weights(hidden=24)["w_up"][0, :8] * 3,
                  "b_router": torch.linspace(-1, 1, 8), **eager.weights(experts=8)}
        bias = torch.linspace(0.3, -0.3, 8)
        for router, normalize in [(r, n) for r in ROUTERS for n in (False, True) if not n or r in ROUTERS[3:]]:
            options = {"router": router, "top_k": 3, "route_scale": 2.5, "normalize_scores": normalize}
            if router == "group-limited":
                options |= {"groups": 4, "top_groups": 2}

            def layer(t, o=options, **more):
                return tessera.moe(t["x"], t["w_router"], t["w_up"], t["w_down"], b_router=t["b_router"],
                                   selection_bias=bias, **o, **more)

            with self.subTest(router=router, normalize=normalize), torch.no_grad():
                _, chosen = layer(inputs, return_router=True)
            with self.subTest(router=router, normalize=normalize):
                ids = chosen.topk_ids.long()

                def reference(t, ids=ids, o=options):
                    logits = t["x"] @ t["w_router"].mT + t["b_router"]
                    scores = eager.router_scores(logits, ids, o["router"], o["route_scale"], o["normalize_scores"])
                    return eager.experts(t["x"], ids, scores, t)

                self.compare(layer, reference, inputs, d_o, router)
                counts = torch.bincount(ids.flatten(), minlength=8)
                self.assertEqual(chosen.counts.tolist(), counts.tolist())
                # The router alone gives the same choice and, through the experts, the same gradients.
                topk_ids, topk_weights, logits = tessera.route(x, inputs["w_router"], b_router=inputs["b_router"],
                                                               selection_bias=bias, **options)
                self.assertTrue(torch.equal(topk_ids, chosen.topk_ids))
                self.assertTrue(torch.equal(topk_weights, chosen.topk_weights))
                self.assertTrue(torch.equal(logits, chosen.logits))

                def in_two(t, o=options):
                    ids, scores, _ = tessera.route(t["x"], t["w_router"], b_router=t["b_router"], selection_bias=bias,
                                                   **o)
                    return tessera.routed_experts(t["x"], ids, scores, t["w_up"], t["w_down"])

                self.compare(in_two, reference, inputs, d_o, f"{router} in two calls")

    def test_auxiliary_losses_reach_the_router(self):
        x, _, _, d_o = data()
        inputs = {"x": x, "w_router": torch.randn(5, 24, generator=torch.Generator().manual_seed(2)),
                  **eager.weights()}

        def ours(t):
            o, r = tessera.moe(t["x"], t["w_router"], t["w_up"], t["w_down"], top_k=3, return_router=True)
            loss = 0.5 * tessera.load_balancing_loss(r.logits, r.topk_counts) + 0.1 * tessera.z_loss(r.logits)
            return (o * d_o).sum() + loss

        with torch.no_grad():
            ids = tessera.route(x, inputs["w_router"], top_k=3)[0].long()

        def theirs(t):
            logits = t["x"] @ t["w_router"].mT
            o = eager.experts(t["x"], ids, eager.router_scores(logits, ids, "topk-softmax"), t)
            p = logits.softmax(-1)
            counts = torch.bincount(ids.flatten(), minlength=5)
            balance = 5 * (counts / 39 * p.mean(0)).sum()
            return (o * d_o).sum() + 0.5 * balance + 0.1 * logits.logsumexp(-1).square().mean()

        self.compare(ours, theirs, inputs, torch.ones(()), "with losses")

    def test_token_rounding_and_expert_choice(self):
        x, _, _, d_o = data(tokens=40, experts=5)
        inputs = {"x": x, "w_router": torch.randn(5, 24, generator=torch.Generator().manual_seed(2)) / 3,
                  **eager.weights()}
        choices = [{"rounding": rounding, "tile": 8, "seed": 3, "step": 11} for rounding in options.ROUNDINGS[1:]]
        for choice in (*choices, {"router": "expert-choice"}):
            def layer(t, choice=choice, **more):
                return tessera.moe(t["x"], t["w_router"], t["w_up"], t["w_down"],
                                   **{"top_k": 3, "router": "softmax-topk", **choice}, **more)

            with self.subTest(**choice):
                o, r = layer(inputs, return_router=True)
                offsets = r.token_offsets.tolist()
                ids = torch.full((40, 5), -1)
                for t in range(40):
                    ids[t, :offsets[t + 1] - offsets[t]] = r.topk_ids[offsets[t]:offsets[t + 1]].long()
                if "rounding" in choice:
                    self.assertEqual((r.counts % 8).tolist(), [0] * 5)
                    self.assertEqual(int(r.topk_counts.sum()), 120)
                else:
                    self.assertEqual(r.counts.tolist(), [24] * 5)

                def reference(t, ids=ids):
                    p = (t["x"] @ t["w_router"].mT).softmax(-1)
                    return eager.experts(t["x"], ids, p.gather(1, ids.clamp(min=0)), t)

                self.compare(layer, reference, inputs, d_o, str(choice))
                self.assertTrue(torch.equal(o, layer(inputs)))
        drawn = [tessera.moe(x, inputs["w_router"], inputs["w_up"], inputs["w_down"], top_k=3, rounding="sr-f", tile=8,
                             step=step) for step in range(8)]
        self.assertFalse(all(torch.equal(drawn[0], o) for o in drawn), "the step draws")

    def test_sentinels_empty_and_repeated_experts(self):
        x, ids, scores, d_o = data()
        ids = torch.where(ids == 0, -1, ids)
        ids = torch.where(ids == 1, 5, ids)
        ids[3] = 2  # one expert three times
        ids[4] = 7  # a token without experts
        scores[4] = float("nan")
        x, scores = x.requires_grad_(), scores.requires_grad_()
        w = eager.leaves(eager.weights())
        o = tessera.routed_experts(x, ids, scores, **w)
        dx, dscores, dw_up, _ = torch.autograd.grad(o, (x, scores, w["w_up"], w["w_down"]), d_o)
        self.assertEqual(o[4].abs().max(), 0)
        self.assertEqual(dx[4].abs().max(), 0)
        outside = (ids < 0) | (ids >= 5)
        self.assertEqual(dscores[outside].abs().max(), 0)
        self.assertEqual(dw_up[:2].abs().max(), 0)
        exact = {name: t.detach().double() for name, t in w.items()}
        eager.check_close(self, "o", o, eager.experts(x.double(), ids, scores.double(), exact))

    def test_no_tokens(self):
        w = eager.leaves(eager.weights())
        x = torch.empty(0, 24, requires_grad=True)
        ids, scores = torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2)
        o = tessera.routed_experts(x, ids, scores, **w)
        self.assertEqual(tuple(o.shape), (0, 24))
        o.sum().backward()
        self.assertEqual(w["w_up"].grad.abs().max(), 0)

    def test_grouped_experts(self):
        counts = [4, 0, 6, 1, 0]
        generator = torch.Generator().manual_seed(3)
        x, scores = torch.randn(11, 24, generator=generator), torch.rand(11, generator=generator)
        d_o = torch.randn(14, 24, generator=generator)
        ids = torch.repeat_interleave(torch.arange(5), torch.tensor(counts))[:, None]
        offsets = torch.tensor([0, 4, 4, 10, 11, 11])
        for grouping, given in (("offsets", offsets), ("ends", offsets[1:].int()), ("counts", torch.tensor(counts))):
            padded = torch.cat([x, torch.full((3, 24), float("nan"))]).requires_grad_()
            mine, exact = eager.leaves(eager.weights()), eager.doubled(eager.weights())
            row_scores = torch.cat([scores, torch.full((3,), float("nan"))]).requires_grad_()
            y = tessera.grouped_experts(padded, given, **mine, row_scores=row_scores, grouping=grouping)
            reference_x, reference_scores = x.double().requires_grad_(), scores.double()[:, None].requires_grad_()
            reference = eager.experts(reference_x, ids, reference_scores, exact)
            self.assertEqual(y[11:].abs().max(), 0)
            eager.check_close(self, "y", y[:11], reference)
            got = torch.autograd.grad(y, (padded, row_scores, *mine.values()), d_o)
            wanted = torch.autograd.grad(reference, (reference_x, reference_scores, *exact.values()), d_o[:11].double())
            self.assertEqual(got[0][11:].abs().max(), 0)
            got, wanted = (got[0][:11], got[1][:11], *got[2:]), (wanted[0], wanted[1][:, 0], *wanted[2:])
            for a, b in zip(got, wanted, strict=True):
                eager.check_close(self, "gradient", a, b)

    def test_grouped_gemm(self):
        offsets = torch.tensor([0, 4, 4, 10], dtype=torch.int32)
        generator = torch.Generator().manual_seed(4)
        for transpose in (False, True):
            inputs = {"a": torch.randn(10, 12, generator=generator),
                      "b": torch.randn(3, *((12, 8) if transpose else (8, 12)), generator=generator),
                      "bias": torch.randn(3, 8, generator=generator)}
            rows = torch.repeat_interleave(torch.arange(3), torch.tensor([4, 0, 6]))

            def reference(t, transpose=transpose, rows=rows):
                b = t["b"] if transpose else t["b"].mT
                return torch.einsum("rk,rkn->rn", t["a"], b[rows]) + t["bias"][rows]

            self.compare(lambda t, tr=transpose: tessera.grouped_gemm(t["a"], t["b"], offsets, bias=t["bias"],
                                                                      transpose_b=tr),
                         reference, inputs, torch.randn(10, 8, generator=generator), f"transpose={transpose}")

    def test_bf16_and_autocast(self):
        x, ids, scores, d_o = data(tokens=64)
        for case in ({}, {"activation": "clamped-swiglu", "layout": "transposed-interleaved", "bias": True}):
            w = eager.weights(**case)
            stored = {"x": x.bfloat16(), "scores": scores, **{name: t.bfloat16() for name, t in w.items()}}
            options = {name: value for name, value in case.items() if name != "bias"}

            def layer(t, options=options):
                return tessera.routed_experts(t["x"], ids, t["scores"], **pick(t), **options)

            try:
                layer(stored)
            except NotImplementedError as refusal:
                self.skipTest(f"this library stores no bf16 on the CPU: {refusal}")
            self.compare(layer, lambda t, o=options: eager.experts(t["x"], ids, t["scores"], t, **o), stored,
                         d_o.bfloat16(), str(case))
        t = eager.leaves({"x": x, "scores": scores, **eager.weights()})
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o = tessera.routed_experts(t["x"], ids, t["scores"], t["w_up"], t["w_down"])
        self.assertIs(o.dtype, torch.bfloat16)
        o.backward(d_o.bfloat16())
        self.assertEqual([v.grad.dtype for v in t.values()], [torch.float32] * 4)

    def test_recomputed_h_has_equal_bits(self):
        x, ids, scores, d_o = data()
        results = []
        for save in ("h", "x"):
            t = eager.leaves({"x": x, "scores": scores, **eager.weights()})
            o = tessera.routed_experts(t["x"], ids, t["scores"], **pick(t), save=save)
            results.append((o, *torch.autograd.grad(o, list(t.values()), d_o)))
        for a, b in zip(*results, strict=True):
            self.assertTrue(torch.equal(a, b))

    def test_gradcheck(self):
        """Finite differences of the fp32 layer; the tolerance is that of fp32 differences, far below the values."""
        x, ids, scores, _ = data(tokens=4, top_k=2)
        w = eager.weights(experts=5, intermediate=4)
        generator = torch.Generator().manual_seed(5)
        inputs = {"x": x, "scores": scores, **w}
        t = eager.leaves(inputs)
        d_o = torch.randn(4, 24, generator=generator)

        def loss(t):
            return (tessera.routed_experts(t["x"], ids, t["scores"], **pick(t)).double() * d_o).sum()

        loss(t).backward()
        for name, tensor in inputs.items():
            direction = torch.randn(tensor.shape, generator=generator)
            step = 1e-2
            with torch.no_grad():
                ends = [loss({**inputs, name: tensor + sign * step * direction}) for sign in (1, -1)]
            slope = ((ends[0] - ends[1]) / (2 * step)).item()
            expected = (t[name].grad.double() * direction).sum().item()
            self.assertLess(abs(slope - expected), 2e-3 * max(abs(expected), 1), name)


def pick(t: dict) -> dict:
    """The weights of the experts."""
    return {name: t[name] for name in tessera.ops.WEIGHTS if name in t}


class Operators(unittest.TestCase):
    """torch.compile, opcheck, checkpointing, modes, strides, threads."""

    def setUp(self):
        x, self.ids, scores, self.d_o = data()
        self.tensors = eager.leaves({"x": x, "scores": scores, **eager.weights()})
        self.w_router = torch.randn(5, 24, generator=torch.Generator().manual_seed(2), requires_grad=True)

    def routed(self, t, **options):
        return tessera.routed_experts(t["x"], self.ids, t["scores"], t["w_up"], t["w_down"], **options)

    def gradients(self, o):
        return torch.autograd.grad(o, list(self.tensors.values()), self.d_o)

    def test_opcheck(self):
        t, none = self.tensors, (None,) * 3
        weights = (t["w_up"], None, t["w_down"], None, None, None)
        arguments = (t["x"], self.ids, t["scores"], *none, None, None, *weights, "")
        torch.library.opcheck(torch.ops.tessera.moe_forward.default, arguments)
        router = (t["x"], None, None, self.w_router, None, None, None, None, *weights)
        torch.library.opcheck(torch.ops.tessera.moe_forward.default,
                              (*router, "router=topk-softmax top_k=2 logits=True"))
        constant = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
        torch.library.opcheck(torch.ops.tessera.moe_inference.default, constant)
        torch.library.opcheck(torch.ops.tessera.route.default, (t["x"], self.w_router, None, None,
                                                                "router=softmax-topk top_k=2"))
        offsets = torch.tensor([0, 3, 3, 7, 9, 13])
        torch.library.opcheck(torch.ops.tessera.grouped_gemm.default, (t["x"], t["w_up"], None, offsets, False))
        o, h, routing = torch.ops.tessera.moe_forward.default(*constant)
        saved = (self.d_o, constant[0], h, routing, None, None, *constant[8:14])
        torch.library.opcheck(torch.ops.tessera.moe_backward.default, (*saved, None, "", 0b1010011))
        buffers = [torch.zeros_like(w) if w is not None else None for w in constant[8:14]]
        torch.library.opcheck(torch.ops.tessera.moe_backward_accumulate.default, (*saved, None, *buffers, "", 0b11),
                               test_utils=("test_schema", "test_faketensor"))

    def test_routing_size_in_fake_kernels(self):
        x = self.tensors["x"].detach()
        texts = [f"router={router} top_k=2 groups=1 top_groups=1" for router in ROUTERS]
        texts += [f"router={router} top_k=2 tile=4 rounding={rounding}" for rounding in options.ROUNDINGS[1:]
                  for router in ("topk-softmax", "softmax-topk", "sigmoid-bias")]
        texts += ["router=expert-choice top_k=2", "router=expert-choice top_k=2 capacity=3"]
        for text in texts:
            with torch.no_grad():
                real = torch.ops.tessera.moe_forward.default
                arguments = (x, None, None, self.w_router, None, None, None, None, self.tensors["w_up"], None,
                             self.tensors["w_down"], None, None, None, text)
                with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
                    fake = [tuple(t.shape) for t in real(*arguments)]
                self.assertEqual(fake, [tuple(t.shape) for t in real(*arguments)], text)

    def test_compile_without_graph_breaks(self):
        def layer(t):
            o, r = tessera.moe(t["x"], self.w_router, t["w_up"], t["w_down"], top_k=2, return_router=True)
            return self.routed(t) + o + 0.1 * tessera.z_loss(r.logits)

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        o, expected = compiled(self.tensors), layer(self.tensors)
        torch.testing.assert_close(o, expected)
        for a, b in zip(self.gradients(o), self.gradients(expected), strict=True):
            torch.testing.assert_close(a, b)
        with torch.no_grad():
            torch.testing.assert_close(compiled(self.tensors), expected.detach())

    def test_compile_does_not_recompile_for_routing(self):
        count = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(lambda x, ids, s: tessera.routed_experts(x, ids, s, w_up, w_down), backend=count,
                                 dynamic=True, fullgraph=True)
        w_up, w_down = self.tensors["w_up"], self.tensors["w_down"]
        for tokens in range(2, 52):
            x, ids, scores, _ = data(tokens=tokens, seed=tokens)
            compiled(x, ids.contiguous(), scores)
        self.assertEqual(count.frame_count, 1)

    def test_selective_checkpointing(self):
        expected = self.routed(self.tensors)
        wanted = self.gradients(expected)
        for ops in ([], [torch.ops.tessera.moe_forward.default]):
            calls = []

            def layer(x, calls=calls):
                calls.append(1)
                return self.routed({**self.tensors, "x": x})

            context = functools.partial(checkpoint.create_selective_checkpoint_contexts, ops)
            o = checkpoint.checkpoint(layer, self.tensors["x"], use_reentrant=False, context_fn=context)
            for a, b in zip(self.gradients(o), wanted, strict=True):
                self.assertTrue(torch.equal(a, b))
            self.assertEqual(len(calls), 2)

    def test_checkpointing_saves_the_forward_op(self):
        runs = []
        original = tessera.ops._plan_forward
        self.addCleanup(setattr, tessera.ops, "_plan_forward", original)
        tessera.ops._plan_forward = lambda *a: runs.append(1) or original(*a)
        policy = functools.partial(checkpoint.create_selective_checkpoint_contexts,
                                   [torch.ops.tessera.moe_forward.default])
        o = checkpoint.checkpoint(lambda x: self.routed({**self.tensors, "x": x}).relu(), self.tensors["x"],
                                  use_reentrant=False, context_fn=policy)
        o.sum().backward()
        self.assertEqual(len(runs), 1)

    def test_strides(self):
        expected = self.routed(self.tensors)
        wanted = self.gradients(expected)
        wide = torch.zeros(13, 48)
        wide[:, ::2] = self.tensors["x"].detach()
        stacked = torch.zeros(5, 20, 24)
        stacked[:, 2:18] = self.tensors["w_up"].detach()
        turned = self.tensors["w_down"].detach().mT.contiguous().mT
        t = {"x": wide[:, ::2].requires_grad_(), "scores": self.tensors["scores"],
             "w_up": stacked[:, 2:18].requires_grad_(), "w_down": turned.requires_grad_()}
        o = self.routed(t)
        self.assertTrue(torch.equal(o, expected))
        got = torch.autograd.grad(o, list(t.values()), self.d_o.t().contiguous().t())
        for a, b in zip(got, wanted, strict=True):
            self.assertTrue(torch.equal(a, b))
        (dx,) = torch.autograd.grad(self.routed(self.tensors).sum(), self.tensors["x"])  # an expanded gradient
        self.assertTrue(torch.isfinite(dx).all())

    def test_saved_tensors_hooks_may_change_strides(self):
        """Offloading hands contiguous copies back: what was learnt of the first strides must not be used for them."""
        wide = torch.zeros(13, 48)
        wide[:, 12:36] = self.tensors["x"].detach()
        t = {**self.tensors, "x": wide[:, 12:36].requires_grad_()}
        wanted = torch.autograd.grad(self.routed(t), list(t.values()), self.d_o)
        with torch.autograd.graph.saved_tensors_hooks(lambda s: s.clone().contiguous(), lambda s: s):
            o = self.routed(t)
        for a, b in zip(torch.autograd.grad(o, list(t.values()), self.d_o), wanted, strict=True):
            self.assertTrue(torch.equal(a, b))

    def test_forked_child_runs_layers(self):
        expected = self.routed(self.tensors).detach()
        child = os.fork()
        if child == 0:
            try:
                equal = torch.equal(self.routed(self.tensors), expected)
                contexts = len(tessera.library._contexts)
            except BaseException:
                os._exit(2)
            os._exit(0 if equal and contexts == 1 else 1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)

    def test_leading_dimensions_and_types_of_ids_and_weights(self):
        expected = self.routed(self.tensors)
        t = self.tensors
        o = tessera.routed_experts(t["x"].view(1, 13, 24), self.ids.int().view(1, 13, 3), t["scores"].view(1, 13, 3),
                                   t["w_up"], t["w_down"])
        self.assertTrue(torch.equal(o[0], expected))
        scores = t["scores"].detach().bfloat16().requires_grad_()
        o = tessera.routed_experts(t["x"], self.ids, scores, t["w_up"], t["w_down"])
        o.sum().backward()
        self.assertIs(scores.grad.dtype, torch.bfloat16)

    def test_one_layer_used_twice(self):
        t = self.tensors
        o = self.routed({**t, "x": self.routed(t)})
        exact = eager.doubled({name: v.detach() for name, v in t.items()})
        inner = eager.experts(exact["x"], self.ids, exact["scores"], exact)
        reference = eager.experts(inner, self.ids, exact["scores"], exact)
        for name, a, b in zip(t, self.gradients(o), torch.autograd.grad(reference, list(exact.values()),
                                                                        self.d_o.double()), strict=True):
            eager.check_close(self, name, a, b, 1e-5)

    def test_frozen_weights_are_skipped(self):
        self.tensors["w_up"].requires_grad_(False)
        self.routed(self.tensors).sum().backward()
        self.assertIsNone(self.tensors["w_up"].grad)
        self.assertIsNotNone(self.tensors["w_down"].grad)

    def test_no_second_derivatives(self):
        o = self.routed(self.tensors)
        with self.assertRaisesRegex(NotImplementedError, "no second derivatives"):
            torch.autograd.grad(o.sum(), self.tensors["x"], create_graph=True)

    def test_threads_share_layers(self):
        expected = self.routed(self.tensors).detach()
        failures = []

        def work():
            for _ in range(20):
                if not torch.equal(self.routed(self.tensors), expected):
                    failures.append(1)

        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self.assertFalse(failures)

    def test_equal_bits_for_any_number_of_threads(self):
        expected = self.routed(self.tensors)
        wanted = self.gradients(expected)
        threads = torch.get_num_threads()
        self.addCleanup(torch.set_num_threads, threads)
        for count in (1, 3):
            torch.set_num_threads(count)
            o = self.routed(self.tensors)
            self.assertTrue(torch.equal(o, expected))
            for a, b in zip(self.gradients(o), wanted, strict=True):
                self.assertTrue(torch.equal(a, b))

    def test_autocast_casts_x_and_weights_but_not_scores(self):
        seen = []
        original = tessera.ops.moe_inference
        self.addCleanup(setattr, tessera.ops, "moe_inference", original)
        tessera.ops.moe_inference = lambda *a: seen.append([t.dtype for t in a[:14] if t is not None]) or a[0]
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            self.routed(self.tensors)
        self.assertEqual(seen, [[torch.bfloat16, torch.int64, torch.float32, torch.bfloat16, torch.bfloat16]])

    def test_plans_do_not_grow_without_bound(self):
        for tokens in range(tessera.ops.MAX_PLANS + 10):
            tessera.routed_experts(torch.ones(1, 24), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1),
                                   self.tensors["w_up"].detach(), self.tensors["w_down"].detach(),
                                   alpha=1 + tokens / 7, activation="clamped-swiglu")
        self.assertLessEqual(len(tessera.ops._here.plans), tessera.ops.MAX_PLANS)

    def test_main_grad_is_added_to(self):
        t = self.tensors
        offsets = torch.tensor([0, 3, 3, 7, 9, 13])
        plain = tessera.grouped_experts(t["x"], offsets, t["w_up"], t["w_down"])
        dx, dw_up, dw_down = torch.autograd.grad(plain, (t["x"], t["w_up"], t["w_down"]), self.d_o)
        main_up, main_down = torch.ones_like(t["w_up"]), torch.ones_like(t["w_down"])
        o = tessera.grouped_experts(t["x"], offsets, t["w_up"], t["w_down"],
                                    buffers=(main_up, None, main_down, None, None, None))
        o.backward(self.d_o)
        self.assertIsNone(t["w_up"].grad)
        self.assertTrue(torch.equal(t["x"].grad, dx))
        torch.testing.assert_close(main_up, 1 + dw_up)
        torch.testing.assert_close(main_down, 1 + dw_down)


class Names(unittest.TestCase):
    def test_names_are_those_of_the_library(self):
        """options.py repeats include/tessera/names.hpp and the order of the enums: they must not drift."""
        root = pathlib.Path(__file__).parents[2] / "include" / "tessera"
        names, shape = (root / "names.hpp").read_text(), (root / "shape.hpp").read_text()

        def table(kind: str, enum: str) -> dict:
            block = re.search(rf"k{kind}Names\[\] = {{(.*?)}};", names, re.DOTALL)[1]
            values = dict(re.findall(rf'{{"([a-z0-9-]+)", {enum}::(\w+)}}', block))
            enumerators = re.search(rf"enum class {enum} .*?{{(.*?)}};", shape, re.DOTALL)[1]
            numbers = dict(re.findall(r"(\w+) = (\d+)", enumerators))
            return {name: int(numbers[value]) for name, value in values.items()}

        self.assertEqual(table("Rounding", "Rounding"), {n: i for i, n in enumerate(options.ROUNDINGS)})
        self.assertEqual(table("Activation", "ActivationKind"), {n: i for i, n in enumerate(options.ACTIVATIONS)})
        routers = {n: i for i, n in enumerate(options.ROUTERS)}
        self.assertEqual(table("Router", "RouterKind"), routers)
        for name in re.findall(r'{"([a-z-]+)", {GateUpOrder', names):
            if name != "separate":
                options.layout_parts(name + ":8" if "blocked" in name else name)


class Refusals(unittest.TestCase):
    """One line each: rule, value, remedy."""

    def setUp(self):
        self.x, self.ids, self.scores, _ = data()
        self.w = eager.weights()

    def routed(self, **changes):
        arguments = {"x": self.x, "topk_ids": self.ids, "topk_weights": self.scores, **self.w, **changes}
        return tessera.routed_experts(**arguments)

    def test_bad_input(self):
        cases = {
            "activation='swish': unknown; choose one of swiglu": {"activation": "swish"},
            "layout='rows': unknown": {"layout": "rows"},
            "layout='blocked': unknown": {"layout": "blocked"},
            "layout='blocked:0': unknown": {"layout": "blocked:0"},
            "layout='transposed-concat': unknown": {"layout": "transposed-concat"},
            "x: shape|x: rank|hidden|w_up": {"x": self.x[:, :16]},
            "w_up: rank 2": {"w_up": self.w["w_up"][0]},
            "w_down: shape": {"w_down": self.w["w_down"].mT.contiguous()},
            "dtype": {"w_down": self.w["w_down"].double()},
            "topk_weights: shape": {"topk_weights": self.scores[:, :2]},
            "alpha=0": {"alpha": 0.0},
            "even number": {"w_up": self.w["w_up"][:, :15]},
        }
        for text, change in cases.items():
            with self.subTest(text), self.assertRaisesRegex(ValueError, text) as caught:
                self.routed(**change)
            self.assertNotIn("\n", str(caught.exception))

    def test_other_devices(self):
        with self.assertRaises(NotImplementedError):
            self.routed(x=self.x.to("meta").double(), topk_ids=self.ids, activation="relu")

    def test_types_that_are_not_served(self):
        w = {name: tensor.half() for name, tensor in self.w.items()}
        with self.assertRaisesRegex(NotImplementedError, "dtype"):
            self.routed(x=self.x.half(), **w)


if __name__ == "__main__":
    unittest.main()

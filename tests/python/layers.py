# SPDX-License-Identifier: Apache-2.0
"""Tests of every entry against fp64 torch, and of what torch asks of an operator, for any device and storage type:
classes of ops_test.py and cuda_test.py say which.
"""

import contextlib
import functools
import math
import threading

import eager
import tessera
import tessera.ops
import torch
import torch._dynamo.testing
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch, checkpoint

ROUTERS = ("topk-softmax", "softmax-topk", "softmax-topk-renorm", "sigmoid-bias", "group-limited", "sqrtsoftplus")


def data(tokens=13, hidden=24, top_k=3, experts=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k]
    scores = torch.rand(tokens, top_k, generator=generator) * 0.95 + 0.05
    return x, ids, scores, torch.randn(tokens, hidden, generator=generator)


class Layer:
    """Where the layers of a class of tests run, their storage type and sizes. cuda_test.py has others."""

    device, dtype, tokens, hidden, intermediate = "cpu", torch.float32, 13, 24, 8

    def stored(self, tensor):
        return tensor.to(self.device, self.dtype)

    def data(self, **sizes):
        x, ids, scores, d_o = data(**{"tokens": self.tokens, "hidden": self.hidden, **sizes})
        return self.stored(x), ids.to(self.device), scores.to(self.device), self.stored(d_o)

    def weights(self, **case):
        sizes = {"hidden": self.hidden, "intermediate": self.intermediate, **case}
        return {name: self.stored(tensor) for name, tensor in eager.weights(**sizes).items()}

    def w_router(self, experts):
        """Of unit logits."""
        drawn = torch.randn(experts, self.hidden, generator=torch.Generator().manual_seed(2))
        return self.stored(drawn / self.hidden**0.5)

    @property
    def relative(self):
        """Of the storage type, for all of a layer's tensors: scores and their gradients are fp32."""
        return eager.RELATIVE[self.dtype]


class Entries(Layer):
    def compare(self, ours, theirs, inputs: dict, d_o, name: str):
        """ours and theirs: functions of a dict of tensors; all gradients are compared too."""
        mine, exact = eager.leaves(inputs), eager.doubled(inputs)
        o, reference = ours(mine), theirs(exact)
        eager.check_close(self, f"{name}: o", o, reference, self.relative)
        got = torch.autograd.grad(o, list(mine.values()), d_o)
        wanted = torch.autograd.grad(reference, list(exact.values()), d_o.double())
        for key, a, b in zip(mine, got, wanted, strict=True):
            eager.check_close(self, f"{name}: d{key}", a, b, self.relative)

    def test_layouts_and_activations(self):
        x, ids, scores, d_o = self.data()
        gated = eager.cases(activation=("swiglu", "geglu", "geglu-erf", "reglu", "clamped-swiglu"), bias=(False, True),
                            layout=("concat", "up-first", "interleaved", "blocked:4", "transposed",
                                    "transposed-up-first", "transposed-interleaved", "transposed-blocked:2"))
        plain = eager.cases(activation=("relu", "relu2", "silu", "gelu", "gelu-erf"), bias=(False, True),
                            layout=("concat", "transposed"))
        for case in gated + plain:
            with self.subTest(**case):
                w = self.weights(**case)
                options = {key: case[key] for key in ("activation", "layout")}
                self.compare(
                    lambda t: tessera.routed_experts(t["x"], ids, t["scores"], **pick(t), **options),
                    lambda t: eager.experts(t["x"], ids, t["scores"], t, **options),
                    {"x": x, "scores": scores, **w}, d_o, str(case))

    def test_separate_weights(self):
        x, ids, scores, d_o = self.data()
        for bias in (False, True):
            self.compare(lambda t: tessera.routed_experts(t["x"], ids, t["scores"], **pick(t)),
                         lambda t: eager.experts(t["x"], ids, t["scores"], t),
                         {"x": x, "scores": scores, **self.weights(separate=True, bias=bias)}, d_o, f"bias={bias}")

    def test_clamp_parameters(self):
        x, ids, scores, d_o = self.data()
        w = self.weights(activation="clamped-swiglu")
        for alpha, limit, up_offset in ((1.0, 0.5, 0.0), (1.702, 0.25, 1.0), (1.0, math.inf, 0.0)):
            options = {"activation": "clamped-swiglu", "alpha": alpha, "limit": limit, "up_offset": up_offset}
            self.compare(lambda t, o=options: tessera.routed_experts(t["x"], ids, t["scores"], **pick(t), **o),
                         lambda t, o=options: eager.experts(t["x"], ids, t["scores"], t, stored=self.dtype, **o),
                         {"x": x, "scores": scores, **w}, d_o, str(options))

    def test_routers(self):
        x, _, _, d_o = self.data(experts=8)
        inputs = {"x": x, "w_router": self.w_router(8),
                  "b_router": self.stored(torch.linspace(-1, 1, 8)), **self.weights(experts=8)}
        bias = torch.linspace(0.3, -0.3, 8, device=self.device)
        for router, normalize in [(r, n) for r in ROUTERS for n in (False, True) if not n or r in ROUTERS[3:]]:
            options = {"router": router, "top_k": 3, "route_scale": 2.5, "normalize_scores": normalize}
            if router == "group-limited":
                options |= {"groups": 2, "top_groups": 1}  # left out, they would be 4 and 2

            def layer(t, o=options, **more):
                return tessera.moe(t["x"], t["w_router"], t["w_up"], t["w_down"], b_router=t["b_router"],
                                   selection_bias=bias, **o, **more)

            with self.subTest(router=router, normalize=normalize), torch.no_grad():
                _, chosen = layer(inputs, return_router=True)
            with self.subTest(router=router, normalize=normalize):
                ids = chosen.topk_ids.long()
                if router == "group-limited":  # all of a token's experts are of one half
                    self.assertTrue(torch.equal(ids // 4, (ids[..., :1] // 4).expand_as(ids)))

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
        x, _, _, d_o = self.data()
        inputs = {"x": x, "w_router": self.w_router(5), **self.weights()}

        def ours(t):
            o, r = tessera.moe(t["x"], t["w_router"], t["w_up"], t["w_down"], top_k=3, return_router=True)
            loss = 0.5 * tessera.load_balancing_loss(r.logits, r.topk_counts) + 0.1 * tessera.z_loss(r.logits)
            return (o.float() * d_o).sum() + loss

        with torch.no_grad():
            ids = tessera.route(x, inputs["w_router"], top_k=3)[0].long()

        def theirs(t):
            logits = t["x"] @ t["w_router"].mT
            o = eager.experts(t["x"], ids, eager.router_scores(logits, ids, "topk-softmax"), t)
            p = logits.softmax(-1)
            counts = torch.bincount(ids.flatten(), minlength=5)
            balance = 5 * (counts / ids.numel() * p.mean(0)).sum()
            return (o * d_o).sum() + 0.5 * balance + 0.1 * logits.logsumexp(-1).square().mean()

        self.compare(ours, theirs, inputs, torch.ones((), device=self.device), "with losses")

    def test_sentinels_empty_and_repeated_experts(self):
        x, ids, scores, d_o = self.data()
        ids = torch.where(ids == 0, -1, ids)
        ids = torch.where(ids == 1, 5, ids)
        ids[3] = 2  # one expert three times
        ids[4] = 7  # a token without experts
        scores[4] = float("nan")
        x, scores = x.requires_grad_(), scores.requires_grad_()
        w = eager.leaves(self.weights())
        o = tessera.routed_experts(x, ids, scores, **w)
        dx, dscores, dw_up, _ = torch.autograd.grad(o, (x, scores, w["w_up"], w["w_down"]), d_o)
        self.assertEqual(o[4].abs().max(), 0)
        self.assertEqual(dx[4].abs().max(), 0)
        outside = (ids < 0) | (ids >= 5)
        self.assertEqual(dscores[outside].abs().max(), 0)
        self.assertEqual(dw_up[:2].abs().max(), 0)
        exact = {name: t.detach().double() for name, t in w.items()}
        eager.check_close(self, "o", o, eager.experts(x.double(), ids, scores.double(), exact), self.relative)

    def test_no_tokens(self):
        w = eager.leaves(self.weights())
        x = self.stored(torch.empty(0, self.hidden)).requires_grad_()
        ids, scores = torch.empty(0, 2, dtype=torch.int32, device=self.device), torch.empty(0, 2, device=self.device)
        o = tessera.routed_experts(x, ids, scores, **w)
        self.assertEqual(tuple(o.shape), (0, self.hidden))
        o.sum().backward()
        self.assertEqual(w["w_up"].grad.abs().max(), 0)

    def test_grouped_experts(self):
        counts = [4, 0, 6, 1, 0]
        generator = torch.Generator().manual_seed(3)
        x = self.stored(torch.randn(11, self.hidden, generator=generator))
        scores = torch.rand(11, generator=generator).to(self.device)
        d_o = self.stored(torch.randn(14, self.hidden, generator=generator))
        ids = torch.repeat_interleave(torch.arange(5), torch.tensor(counts))[:, None].to(self.device)
        offsets = torch.tensor([0, 4, 4, 10, 11, 11], device=self.device)
        for grouping, given in (("offsets", offsets), ("ends", offsets[1:].int()),
                                ("counts", torch.tensor(counts, device=self.device))):
            padded = torch.cat([x, x.new_full((3, self.hidden), float("nan"))]).requires_grad_()
            mine, exact = eager.leaves(self.weights()), eager.doubled(self.weights())
            row_scores = torch.cat([scores, scores.new_full((3,), float("nan"))]).requires_grad_()
            y = tessera.grouped_experts(padded, given, **mine, row_scores=row_scores, grouping=grouping)
            reference_x, reference_scores = x.double().requires_grad_(), scores.double()[:, None].requires_grad_()
            reference = eager.experts(reference_x, ids, reference_scores, exact)
            self.assertEqual(y[11:].abs().max(), 0)
            eager.check_close(self, "y", y[:11], reference, self.relative)
            got = torch.autograd.grad(y, (padded, row_scores, *mine.values()), d_o)
            wanted = torch.autograd.grad(reference, (reference_x, reference_scores, *exact.values()), d_o[:11].double())
            self.assertEqual(got[0][11:].abs().max(), 0)
            got, wanted = (got[0][:11], got[1][:11], *got[2:]), (wanted[0], wanted[1][:, 0], *wanted[2:])
            for a, b in zip(got, wanted, strict=True):
                eager.check_close(self, "gradient", a, b, self.relative)

    def test_grouped_gemm(self):
        counts, tail = [4, 0, 6], 2
        rows = torch.repeat_interleave(torch.arange(3), torch.tensor(counts)).to(self.device)
        offsets = torch.tensor([0, 4, 4, 10], dtype=torch.int32, device=self.device)
        generator = torch.Generator().manual_seed(4)
        k, n = self.hidden, self.intermediate
        dc = self.stored(torch.randn(10 + tail, n, generator=generator))
        for transpose in (False, True):
            inputs = {"a": torch.randn(10, k, generator=generator),
                      "b": torch.randn(3, *((k, n) if transpose else (n, k)), generator=generator) / k**0.5,
                      "bias": torch.randn(3, n, generator=generator)}
            mine = eager.leaves({name: self.stored(tensor) for name, tensor in inputs.items()})
            exact = eager.doubled({name: tensor.detach() for name, tensor in mine.items()})
            wide = torch.cat([mine["a"], mine["a"].new_full((tail, k), float("nan"))]).mT.contiguous().mT
            c = tessera.grouped_gemm(wide, mine["b"], offsets, bias=mine["bias"], transpose_b=transpose)
            b = exact["b"] if transpose else exact["b"].mT
            reference = torch.einsum("rk,rkn->rn", exact["a"], b[rows]) + exact["bias"][rows]
            self.assertEqual(c[10:].abs().max(), 0)
            eager.check_close(self, "c", c[:10], reference, self.relative)
            got = torch.autograd.grad(c, list(mine.values()), dc)
            wanted = torch.autograd.grad(reference, list(exact.values()), dc[:10].double())
            for name, a, b in zip(mine, got, wanted, strict=True):
                eager.check_close(self, f"d{name}", a, b, self.relative)

    def test_recomputed_h_has_equal_bits(self):
        x, ids, scores, d_o = self.data()
        results = []
        for save in ("h", "x"):
            t = eager.leaves({"x": x, "scores": scores, **self.weights()})
            o = tessera.routed_experts(t["x"], ids, t["scores"], **pick(t), save=save)
            results.append((o, *torch.autograd.grad(o, list(t.values()), d_o)))
        for a, b in zip(*results, strict=True):
            self.assertTrue(torch.equal(a, b))


def pick(t: dict) -> dict:
    """The weights of the experts."""
    return {name: t[name] for name in tessera.ops.WEIGHTS if name in t}


class Operations(_python_dispatch.TorchDispatchMode):
    """The names of all operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Operators(Layer):
    """torch.compile, opcheck, checkpointing, modes, strides, threads."""

    compiler = "aot_eager"
    routers = [f"router={router} top_k=2 groups=1 top_groups=1" for router in ROUTERS]

    def setUp(self):
        x, self.ids, scores, self.d_o = self.data()
        self.tensors = eager.leaves({"x": x, "scores": scores, **self.weights()})
        self.router = self.w_router(5).requires_grad_()

    def routed(self, t, **options):
        return tessera.routed_experts(t["x"], self.ids, t["scores"], t["w_up"], t["w_down"], **options)

    def gradients(self, o):
        return torch.autograd.grad(o, list(self.tensors.values()), self.d_o)

    def test_opcheck(self):
        t, none = self.tensors, (None,) * 3
        weights = (t["w_up"], None, t["w_down"], None, None, None)
        arguments = (t["x"], self.ids, t["scores"], *none, None, None, *weights, "")
        torch.library.opcheck(torch.ops.tessera.moe_forward.default, arguments)
        router = (t["x"], None, None, self.router, None, None, None, None, *weights)
        torch.library.opcheck(torch.ops.tessera.moe_forward.default,
                              (*router, "router=topk-softmax top_k=2 logits=True"))
        constant = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
        torch.library.opcheck(torch.ops.tessera.moe_inference.default, constant)
        torch.library.opcheck(torch.ops.tessera.route.default, (t["x"], self.router, None, None,
                                                                "router=softmax-topk top_k=2"))
        offsets = torch.tensor([0, 3, 3, 7, 9, 13], device=self.device)
        torch.library.opcheck(torch.ops.tessera.grouped_gemm.default, (t["x"], t["w_up"], None, offsets, False))
        o, h, routing = torch.ops.tessera.moe_forward.default(*constant)
        saved = (self.d_o, constant[0], h, routing, None, None, *constant[8:14])
        torch.library.opcheck(torch.ops.tessera.moe_backward.default, (*saved, None, "", 0b1010011))
        buffers = [torch.zeros_like(w) if w is not None else None for w in constant[8:14]]
        torch.library.opcheck(torch.ops.tessera.moe_backward_accumulate.default, (*saved, None, *buffers, "", 0b11),
                               test_utils=("test_schema", "test_faketensor"))

    def test_routing_size_in_fake_kernels(self):
        x = self.tensors["x"].detach()
        for text in self.routers:
            with torch.no_grad():
                real = torch.ops.tessera.moe_forward.default
                arguments = (x, None, None, self.router, None, None, None, None, self.tensors["w_up"], None,
                             self.tensors["w_down"], None, None, None, text)
                with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
                    fake = [tuple(t.shape) for t in real(*arguments)]
                self.assertEqual(fake, [tuple(t.shape) for t in real(*arguments)], text)

    def test_compile_without_graph_breaks(self):
        def layer(t):
            o, r = tessera.moe(t["x"], self.router, t["w_up"], t["w_down"], top_k=2, return_router=True)
            return self.routed(t) + o + 0.1 * tessera.z_loss(r.logits)

        compiled = torch.compile(layer, fullgraph=True, backend=self.compiler)
        o, expected = compiled(self.tensors), layer(self.tensors)
        # A compiler rounds sums of several terms once.
        eager.check_close(self, "o", o, expected, self.relative)
        for name, a, b in zip(self.tensors, self.gradients(o), self.gradients(expected), strict=True):
            eager.check_close(self, name, a, b, self.relative)
        with torch.no_grad():
            eager.check_close(self, "o without gradients", compiled(self.tensors), expected, self.relative)

    def test_compile_does_not_recompile_for_routing(self):
        count = torch._dynamo.testing.CompileCounter()
        compiled = torch.compile(lambda x, ids, s: tessera.routed_experts(x, ids, s, w_up, w_down), backend=count,
                                 dynamic=True, fullgraph=True)
        w_up, w_down = self.tensors["w_up"], self.tensors["w_down"]
        for tokens in range(2, 52):
            x, ids, scores, _ = self.data(tokens=tokens, seed=tokens)
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
        original = tessera.ops.layer.plan_forward
        self.addCleanup(setattr, tessera.ops.layer, "plan_forward", original)
        tessera.ops.layer.plan_forward = lambda *a: runs.append(1) or original(*a)
        policy = functools.partial(checkpoint.create_selective_checkpoint_contexts,
                                   [torch.ops.tessera.moe_forward.default])
        o = checkpoint.checkpoint(lambda x: self.routed({**self.tensors, "x": x}).relu(), self.tensors["x"],
                                  use_reentrant=False, context_fn=policy)
        o.sum().backward()
        self.assertEqual(len(runs), 1)

    def test_strides(self):
        expected = self.routed(self.tensors)
        wanted = self.gradients(expected)
        x, w_up = self.tensors["x"].detach(), self.tensors["w_up"].detach()
        wide = x.new_zeros(self.tokens, 2 * self.hidden)
        wide[:, ::2] = x
        stacked = x.new_zeros(5, 2 * self.intermediate + 4, self.hidden)
        stacked[:, 2:-2] = w_up
        turned = self.tensors["w_down"].detach().mT.contiguous().mT
        t = {"x": wide[:, ::2].requires_grad_(), "scores": self.tensors["scores"],
             "w_up": stacked[:, 2:-2].requires_grad_(), "w_down": turned.requires_grad_()}
        o = self.routed(t)
        self.assertTrue(torch.equal(o, expected))
        got = torch.autograd.grad(o, list(t.values()), self.d_o.t().contiguous().t())
        for a, b in zip(got, wanted, strict=True):
            self.assertTrue(torch.equal(a, b))
        (dx,) = torch.autograd.grad(self.routed(self.tensors).sum(), self.tensors["x"])  # an expanded gradient
        self.assertTrue(torch.isfinite(dx).all())

    def test_a_call_unlike_the_last_one_is_seen(self):
        """Each of these calls, after each other one, gives the bits that it gives where nothing is remembered."""
        x, scores, w, other = self.data()[0], self.data()[2], self.weights(bias=True), self.weights(experts=9)
        wide = x.new_zeros(self.tokens, 2 * self.hidden)
        wide[:, 8:8 + self.hidden] = x
        parameter = torch.nn.Parameter(w["w_up"])

        def inputs(**changes):
            t = {"x": x, "scores": scores, "w_up": w["w_up"], "w_down": w["w_down"], **changes}
            return {name: tensor.detach().requires_grad_() for name, tensor in t.items()}

        def resized():
            t = inputs(w_down=other["w_down"])
            parameter.data = other["w_up"]
            return {**t, "w_up": parameter}

        def as_it_was():
            parameter.data = w["w_up"]
            return {**inputs(), "w_up": parameter}

        def frozen(*names):
            t = inputs()
            return {**t, **{name: t[name].detach() for name in names}}

        def router(*names):  # both are [E], and in fp32 of one type
            biases = {name: self.stored(torch.linspace(-1, 1, 5)) for name in names}
            return {**inputs(), "w_router": self.router, **biases}

        variants = [
            inputs, as_it_was, resized, lambda: inputs(b_up=w["b_up"], b_down=w["b_down"]),
            lambda: inputs(x=x[:7], scores=scores[:7]), lambda: inputs(x=wide[:, 8:8 + self.hidden]),
            lambda: frozen("w_up"), lambda: frozen("x"), lambda: frozen("x", "scores", "w_up", "w_down"),
            router, lambda: router("b_router"), lambda: router("selection_bias")]

        def layer(t, ids):
            if "w_router" not in t:
                return tessera.routed_experts(t["x"], ids[:len(t["x"])], t["scores"], **pick(t))
            bias = t.get("selection_bias")
            return tessera.moe(t["x"], t["w_router"], **pick(t), top_k=2, router="sigmoid-bias",
                               b_router=t.get("b_router"), selection_bias=None if bias is None else bias.float())

        def results(variant, ids, threads):
            torch.set_num_threads(threads)
            t = variant()
            with torch.no_grad():  # the same tensors where no gradient can be asked for
                again = layer(t, ids)
            self.assertFalse(again.requires_grad)
            o = layer(t, ids)
            wanted = [tensor for tensor in t.values() if tensor.requires_grad]
            self.assertEqual(o.requires_grad, bool(wanted))
            gradients = torch.autograd.grad(o, wanted, self.d_o[:len(o)], allow_unused=True) if wanted else ()
            return [o.detach(), again, *[g for g in gradients if g is not None]]

        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        calls = [(v, ids, threads) for v in variants for ids in (self.ids, self.ids.int()) for threads in (1, 2)]
        fresh = []
        for call in calls:
            tessera.ops.plans.here.forget()
            fresh.append(results(*call))
        order = torch.randperm(len(calls) ** 2, generator=torch.Generator().manual_seed(0)).tolist()
        for pair in order[:400]:
            for number in divmod(pair, len(calls)):
                for a, b in zip(results(*calls[number]), fresh[number], strict=True):
                    self.assertTrue(torch.equal(a, b), f"call {number} of {divmod(pair, len(calls))}")

    def test_like_calls_are_remembered(self):
        """Else they would be right and slow."""
        original, asked = tessera.ops.layer.plan_forward, []
        self.addCleanup(setattr, tessera.ops.layer, "plan_forward", original)
        tessera.ops.layer.plan_forward = lambda *a: asked.append(1) or original(*a)
        tessera.ops.plans.here.forget()
        for _ in range(4):
            self.gradients(self.routed(self.tensors))
            with torch.no_grad():
                self.routed(self.tensors)
        self.assertEqual(len(asked), 2)
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(torch.get_num_threads() + 1)  # another context
        self.routed(self.tensors)
        self.assertEqual(len(asked), 3)

    def test_modes_see_calls_that_are_like_the_last_one(self):
        """The short way of a call that is remembered is for calls that nothing looks at."""
        x = self.tensors["x"]

        def routed(x):
            return self.routed({**self.tensors, "x": x})

        for context in (contextlib.nullcontext, torch.no_grad):
            with context():
                for _ in range(2):
                    routed(x)
                with Operations() as operations:
                    routed(x)
                self.assertRegex(" ".join(operations.names), "tessera::moe_(forward|inference)")
                routed(x)
                with torch.profiler.profile() as profile:
                    routed(x)
                self.assertRegex(" ".join(e.key for e in profile.key_averages()), "tessera::moe_(forward|inference)")
                routed(x)
                with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
                    self.assertIsInstance(routed(x), fake_tensor.FakeTensor)
                with torch.autocast(self.device, dtype=torch.bfloat16):
                    self.assertIs(routed(x).dtype, torch.bfloat16)
        with torch.no_grad():
            expected = routed(x)
            self.assertTrue(torch.equal(torch.func.vmap(routed)(x[None])[0], expected))
            self.assertTrue(torch.equal(torch.func.functionalize(routed)(x), expected))

    def test_saved_tensors_hooks_may_change_strides(self):
        """Offloading hands contiguous copies back: what was learnt of the first strides must not be used for them."""
        x = self.tensors["x"].detach()
        wide = x.new_zeros(self.tokens, 2 * self.hidden)
        wide[:, 8:8 + self.hidden] = x
        t = {**self.tensors, "x": wide[:, 8:8 + self.hidden].requires_grad_()}
        wanted = torch.autograd.grad(self.routed(t), list(t.values()), self.d_o)
        with torch.autograd.graph.saved_tensors_hooks(lambda s: s.clone().contiguous(), lambda s: s):
            o = self.routed(t)
        for a, b in zip(torch.autograd.grad(o, list(t.values()), self.d_o), wanted, strict=True):
            self.assertTrue(torch.equal(a, b))

    def test_the_last_backward_pass_of_a_graph_writes_over_h(self):
        t = list(self.tensors.values())
        o = self.routed(self.tensors)
        h = o.grad_fn.saved_tensors[1]
        made = h.clone()
        kept = torch.autograd.grad(o, t, self.d_o, retain_graph=True)
        self.assertTrue(torch.equal(h, made))
        last = torch.autograd.grad(o, t, self.d_o)
        self.assertFalse(torch.equal(h, made))
        for a, b in zip(kept, last, strict=True):
            self.assertTrue(torch.equal(a, b))
        with torch.autograd.graph.saved_tensors_hooks(lambda s: s, lambda s: s):  # h may be somebody's then
            o = self.routed(self.tensors)
        h = o.grad_fn.saved_tensors[1]
        for a, b in zip(torch.autograd.grad(o, t, self.d_o), last, strict=True):
            self.assertTrue(torch.equal(a, b))
        self.assertTrue(torch.equal(h, made))

    def test_leading_dimensions_and_types_of_ids_and_weights(self):
        expected = self.routed(self.tensors)
        t = self.tensors
        o = tessera.routed_experts(t["x"][None], self.ids.int()[None], t["scores"][None], t["w_up"], t["w_down"])
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
            eager.check_close(self, name, a, b, 3 * self.relative)

    def test_frozen_weights_are_skipped(self):
        self.tensors["w_up"].requires_grad_(False)
        self.routed(self.tensors).sum().backward()
        self.assertIsNone(self.tensors["w_up"].grad)
        self.assertIsNotNone(self.tensors["w_down"].grad)

    def test_no_second_derivatives(self):
        o = self.routed(self.tensors)
        with self.assertRaisesRegex(NotImplementedError, "no second derivatives"):
            torch.autograd.grad(o.sum(), self.tensors["x"], create_graph=True)

    def test_no_forward_mode(self):
        """Where nothing requires a gradient too: a result without a tangent would read as a derivative of 0."""
        x, w_router, ids = self.tensors["x"].detach(), self.router.detach(), self.ids
        scores, w_up, w_down = (self.tensors[name].detach() for name in ("scores", "w_up", "w_down"))
        offsets = torch.tensor([0, 3, 3, 7, 9, 13], device=self.device)
        layers = (lambda x: tessera.moe(x, w_router, w_up, w_down, top_k=2),
                  lambda x: tessera.moe(x, w_router, w_up, w_down, top_k=2, return_router=True)[0],
                  lambda x: tessera.moe(x, w_router, self.tensors["w_up"], w_down, top_k=2),
                  lambda x: tessera.routed_experts(x, ids, scores, w_up, w_down),
                  lambda x: tessera.grouped_experts(x, offsets, w_up, w_down),
                  lambda x: tessera.route(x, w_router, top_k=2)[1],
                  lambda x: tessera.grouped_gemm(x, w_up, offsets),
                  lambda x: tessera.grouped_gemm_wgrad(x, x, offsets),
                  lambda x: tessera.z_loss(x[:, :5]))

        def dual_level(layer):
            with forward_ad.dual_level():
                layer(forward_ad.make_dual(x, x))

        ways = (dual_level, lambda layer: torch.func.jvp(layer, (x,), (x,)),
                lambda layer: torch.func.jvp(torch.func.functionalize(layer), (x,), (x,)),
                lambda layer: torch.func.jacfwd(layer)(x))
        for i, layer in enumerate(layers):
            expected = layer(x)  # remembered, and it must not be recalled
            for j, way in enumerate(ways):
                with self.subTest(layer=i, way=j), self.assertRaisesRegex(NotImplementedError, "forward-mode"):
                    way(layer)
            with forward_ad.dual_level():  # without a tangent
                eager.check_close(self, f"layer {i}", layer(x), expected, self.relative)
        with forward_ad.dual_level():
            compiled = torch.compile(layers[0], fullgraph=True, backend=self.compiler)
            eager.check_close(self, "compiled", compiled(x), layers[0](x), self.relative)
        for create in (torch.no_grad, contextlib.nullcontext):  # under vmap it is torch that refuses
            with create(), self.assertRaises((NotImplementedError, RuntimeError)):
                torch.func.jvp(torch.func.vmap(lambda row: layers[0](row[None])), (x,), (x,))

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

    def test_main_grad_is_added_to(self):
        """In fp32, whatever the weights' type is; weights without such a buffer get a gradient of their own type."""
        t = {**self.tensors, "b_down": self.weights(bias=True)["b_down"].requires_grad_()}
        held = torch.tensor([3, 0, 4, 2, self.tokens - 9], device=self.device)
        arguments = (t["x"], held, t["w_up"], t["w_down"])
        options = {"b_up": self.stored(torch.zeros(5, 2 * self.intermediate)), "b_down": t["b_down"],
                   "grouping": "counts"}
        plain = tessera.grouped_experts(*arguments, **options)
        dx, db_down, *wanted = torch.autograd.grad(plain, (t["x"], t["b_down"], t["w_up"], t["w_down"]), self.d_o)
        main = [torch.ones_like(t[name], dtype=torch.float32) for name in ("w_up", "w_down")]
        o = tessera.grouped_experts(*arguments, **options, buffers=(main[0], None, main[1], None, None, None))
        o.backward(self.d_o)
        self.assertIsNone(t["w_up"].grad)
        self.assertTrue(torch.equal(t["x"].grad, dx))
        self.assertTrue(torch.equal(t["b_down"].grad, db_down))
        for added, gradient in zip(main, wanted, strict=True):
            eager.check_close(self, "main_grad", added - 1, gradient, max(self.relative, 1e-5))

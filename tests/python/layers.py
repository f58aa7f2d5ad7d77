# SPDX-License-Identifier: Apache-2.0
"""Tests of every entry against fp64 torch, for any device and storage type: classes of ops_test.py and cuda_test.py say
which.
"""

import math

import eager
import tessera
import tessera.ops
import torch

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
        normalizing = ("softmax-topk", *ROUTERS[3:])
        for router, normalize in [(r, n) for r in ROUTERS for n in (False, True) if not n or r in normalizing]:
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

# SPDX-License-Identifier: Apache-2.0
"""Padding masks: masked calls against the same calls without the padding, bit for bit, and what a mask must be."""

import itertools
import unittest

import eager
import tessera
import torch
import torch._dynamo.testing

ROUTERS = ("topk-softmax", "softmax-topk", "softmax-topk-renorm", "sigmoid-bias", "group-limited", "sqrtsoftplus",
           "expert-choice")
ROUNDINGS = ("nr-f", "sr-f", "nr-s", "balance-f", "up", "down")
NAN = float("nan")


class Masked(unittest.TestCase):
    device, dtype, router_dtype = "cpu", torch.float32, None
    tokens, hidden, intermediate, experts, top_k = 300, 32, 16, 8, 2
    few_tokens_differ = False  # calls of up to 8 tokens have kernels of their own

    def setUp(self):
        generator = torch.Generator().manual_seed(5)

        def draw(*shape):
            return torch.randn(*shape, generator=generator)

        d, n, e = self.hidden, self.intermediate, self.experts
        self.x, self.d_o = self.stored(draw(self.tokens, d)), self.stored(draw(self.tokens, d))
        self.d_logits = draw(self.tokens, e).to(self.device) / 10
        self.weights = {name: self.stored(w) for name, w in (
            ("w_router", draw(e, d) / d**0.5), ("b_router", draw(e) / 4), ("w_up", draw(e, 2 * n, d) / d**0.5),
            ("w_down", draw(e, d, n) / n**0.5), ("b_up", draw(e, 2 * n) / 4), ("b_down", draw(e, d) / 4))}
        if self.router_dtype is not None:  # of values that bf16 does not have
            self.weights["w_router"] = (draw(e, d) / d**0.5).to(self.device, self.router_dtype)
            self.weights["b_router"] = (draw(e) / 4).to(self.device, self.router_dtype)
        self.mask = (torch.rand(self.tokens, generator=generator) < 0.7).to(self.device)
        self.mask[-5:] = self.mask[0] = False  # both ends are padding

    def stored(self, tensor):
        return tensor.to(self.device, self.dtype)

    def run_layer(self, x, d_o, d_logits, mask=None, **options):
        """o, what the router did, and all gradients; with a loss of the logits where d_logits is given."""
        leaves = {"x": x.clone().requires_grad_(),
                  **{name: w.clone().requires_grad_() for name, w in self.weights.items()}}
        o, router = tessera.moe(**leaves, top_k=self.top_k, return_router=True, mask=mask, **options)
        outputs, gradients = [o], [d_o]
        if d_logits is not None:
            outputs, gradients = [o, router.logits], [d_o, d_logits]
        return o, router, dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), gradients), strict=True))

    def padded(self, tensor, mask):
        """The rows of padding are NaN, as attention may leave them."""
        return torch.where(mask.unsqueeze(-1), tensor, NAN)

    def assert_same(self, got, wanted, name: str, close: bool = False):
        """The same bits, or where `close` the same values within the error of the type."""
        self.assertEqual((got.shape, got.dtype), (wanted.shape, wanted.dtype), name)
        if torch.equal(got, wanted):
            return
        a, b = got.double(), wanted.double()
        text = (f"{name}: {int((a != b).sum())} of {a.numel()} values differ, by up to "
                f"{float((a - b).abs().max()):.3g}; the largest is {float(b.abs().max()):.3g}; "
                f"{int(a.isnan().sum())} are NaN")
        self.assertTrue(close, text)
        eager.check_close(self, text, got, wanted, 2 * eager.RELATIVE[self.dtype])

    def check(self, mask, with_aux=True, close=False, **options):
        """The masked call gives what the call of the real tokens does: the same choice, and the same values."""
        d_logits = self.d_logits if with_aux else None
        o, router, gradients = self.run_layer(
            self.padded(self.x, mask), self.d_o, None if d_logits is None else self.padded(d_logits, mask), mask,
            **options)
        wanted_o, wanted, wanted_gradients = self.run_layer(
            self.x[mask], self.d_o[mask], None if d_logits is None else d_logits[mask], **options)
        self.assert_same(router.logits[mask], wanted.logits, "logits", close)
        self.assert_same(router.topk_counts, wanted.topk_counts, "topk_counts")
        self.assert_same(router.counts, wanted.counts, "counts")
        if router.token_offsets is None:
            self.assert_same(router.topk_ids[mask], wanted.topk_ids, "ids")
            self.assert_same(router.topk_weights[mask], wanted.topk_weights, "weights", close)
            self.assertTrue(bool((router.topk_ids[~mask] == -1).all()))
            self.assertEqual(int(router.topk_weights[~mask].count_nonzero()), 0)
        else:
            used, slots = int(wanted.token_offsets[-1]), router.token_offsets.diff()
            self.assert_same(slots[mask], wanted.token_offsets.diff(), "slots per token")
            self.assertEqual(int(slots[~mask].count_nonzero()), 0)
            self.assert_same(router.topk_ids[:used], wanted.topk_ids[:used], "ids")
            self.assert_same(router.topk_weights[:used], wanted.topk_weights[:used], "weights", close)
            self.assertTrue(bool((router.topk_ids[used:] == -1).all()))
        dx = gradients.pop("x")
        for name, got, real in (("o", o, wanted_o), ("dx", dx, wanted_gradients.pop("x"))):
            self.assert_same(got[mask], real, name, close)
            self.assertEqual(int(got[~mask].count_nonzero()), 0, name)
        for name, gradient in gradients.items():
            self.assert_same(gradient, wanted_gradients[name], f"d{name}", close)
        if mask.any():
            self.assertGreater(int(router.counts.sum()), 0)
            self.assertGreater(int(gradients["w_router"].count_nonzero()), 0)

    def options(self, router):
        own_p = router in ("sigmoid-bias", "group-limited", "sqrtsoftplus")
        return {"router": router, **({"normalize_scores": True, "route_scale": 1.5} if own_p else {}),
                **({"selection_bias": torch.linspace(-1, 1, self.experts, device=self.device)}
                   if router != "expert-choice" else {})}

    def test_equals_the_call_without_padding(self):
        for router, with_aux in itertools.product(ROUTERS, (True, False)):
            for save in ("h", "x"):
                with self.subTest(router=router, with_aux=with_aux, save=save):
                    self.check(self.mask, with_aux, save=save, **self.options(router))

    def test_token_rounding(self):
        for router, rounding in itertools.product(ROUTERS[:-1], ROUNDINGS):
            with self.subTest(router=router, rounding=rounding):
                drawn = {"seed": 3} if rounding in ("sr-f", "nr-s") else {}
                self.check(self.mask, rounding=rounding, tile=16, **drawn, **self.options(router))

    def test_capacity_is_that_of_the_real_tokens(self):
        for capacity in (0, 7, self.tokens):
            if capacity <= int(self.mask.sum()):
                with self.subTest(capacity=capacity):
                    self.check(self.mask, router="expert-choice", capacity=capacity)
        # More than there are real tokens: every expert takes all of them.
        o, router, _ = self.run_layer(self.x, self.d_o, None, self.mask, router="expert-choice", capacity=self.tokens)
        self.assertEqual(router.counts.tolist(), [int(self.mask.sum())] * self.experts)

    def test_nothing_or_all_is_padding(self):
        for router in ROUTERS:
            for value in (True, False):
                with self.subTest(router=router, value=value):
                    self.check(torch.full_like(self.mask, value), **self.options(router))
        self.check(torch.zeros_like(self.mask), rounding="up", tile=16)

    def test_few_tokens_are_real(self):
        mask = torch.zeros_like(self.mask)
        mask[[3, 40, 41, 100, 170, 250]] = True
        for router in ROUTERS:
            with self.subTest(router=router):
                self.check(mask, close=self.few_tokens_differ, **self.options(router))

    def test_inference(self):
        for router in ROUTERS:
            options = self.options(router)
            with torch.no_grad():
                o = tessera.moe(self.padded(self.x, self.mask), **self.weights, top_k=2, mask=self.mask, **options)
                wanted = tessera.moe(self.x[self.mask], **self.weights, top_k=2, **options)
            self.assert_same(o[self.mask], wanted, router)
            self.assertEqual(int(o[~self.mask].count_nonzero()), 0)

    def test_changes_from_call_to_call(self):
        """Another mask of the same shape, by the same prepared call."""
        for mask in (self.mask, self.mask.flip(0), ~self.mask):
            self.check(mask)

    def test_route(self):
        for router in ROUTERS[:-1]:
            def run(x, mask, d_weights, options):
                x, w = x.clone().requires_grad_(), self.weights["w_router"].clone().requires_grad_()
                ids, weights, logits = tessera.route(x, w, top_k=2, mask=mask, **options)
                return ids, weights, torch.autograd.grad(weights, (x, w), d_weights)

            options = self.options(router)
            d_weights = self.d_logits[:, :2].contiguous()
            ids, weights, (dx, dw) = run(self.padded(self.x, self.mask), self.mask, d_weights, options)
            wanted_ids, wanted, (wanted_dx, wanted_dw) = run(self.x[self.mask], None, d_weights[self.mask], options)
            self.assertTrue(torch.equal(ids[self.mask], wanted_ids))
            self.assertTrue(torch.equal(weights[self.mask], wanted))
            self.assertTrue(bool((ids[~self.mask] == -1).all()))
            self.assertEqual(int(weights[~self.mask].count_nonzero()), 0)
            self.assertEqual(int(dx[~self.mask].count_nonzero()), 0)
            # torch adds up in an order of its own.
            tolerance = 1e-5 if self.dtype is torch.float32 else 2e-2
            torch.testing.assert_close(dx[self.mask], wanted_dx, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(dw, wanted_dw, rtol=tolerance, atol=tolerance)

    def test_module(self):
        torch.manual_seed(1)
        layer = tessera.MoE(self.hidden, self.intermediate, self.experts, 2, shared=tessera.SharedExpert(24, gate=True),
                            router=tessera.RouterOptions(dtype=self.router_dtype))
        layer = layer.to(self.device, self.dtype)
        shape = (4, self.tokens // 4)
        mask = self.mask.view(shape)
        x = self.padded(self.x, self.mask).view(*shape, -1).requires_grad_()
        o, router = layer(x, mask=mask, return_router=True)
        self.assertEqual(o.shape, x.shape)
        self.assertEqual(int(o[~mask].count_nonzero()), 0)
        d_o = self.d_o.view(*shape, -1)
        o.backward(torch.where(mask.unsqueeze(-1), d_o, NAN))
        gradients = {name: p.grad.clone() for name, p in layer.named_parameters()}
        self.assertEqual(int(x.grad[~mask].count_nonzero()), 0)
        layer.zero_grad()
        alone = self.x[self.mask].clone().requires_grad_()
        wanted = layer(alone)
        wanted.backward(self.d_o[self.mask])
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if self.dtype is torch.float32 else {"rtol": 2e-2, "atol": 3e-2}
        torch.testing.assert_close(o[mask], wanted, **tolerance)
        torch.testing.assert_close(x.grad[mask], alone.grad, **tolerance)
        for name, parameter in layer.named_parameters():
            if "shared" in name:  # torch adds up in an order of its own
                torch.testing.assert_close(gradients[name], parameter.grad, **tolerance)
            else:
                self.assertTrue(torch.equal(gradients[name], parameter.grad), name)

    def test_losses_of_the_module(self):
        layer = tessera.MoE(self.hidden, self.intermediate, self.experts, 2, losses=tessera.Losses(0.3, 0.01, 0.2),
                            router=tessera.RouterOptions(dtype=self.router_dtype)).to(self.device, self.dtype)
        shape = (4, self.tokens // 4)
        mask = self.mask.view(shape)
        results = []
        for x, given in ((self.padded(self.x, self.mask).view(*shape, -1), mask), (self.x[self.mask], None)):
            _, router = layer(x, mask=given, return_router=True)
            loss = layer.auxiliary_loss(router, given, lengths=None if given is not None else mask.sum(-1))
            gradients = torch.autograd.grad(loss, (layer.w_router, router.logits))
            results.append((loss.detach(), gradients[0], gradients[1]))
        (loss, dw, dlogits), (wanted, wanted_dw, wanted_dlogits) = results
        self.assertGreater(float(loss), 0.4)
        self.assertTrue(torch.equal(loss, wanted))
        self.assertTrue(torch.equal(dlogits[self.mask], wanted_dlogits))
        self.assertEqual(int(dlogits[~self.mask].count_nonzero()), 0)
        self.assertTrue(torch.equal(dw, wanted_dw))
        with self.assertRaisesRegex(ValueError, "sequence_balance_coefficient: the sequences are not known"):
            layer.auxiliary_loss(router)
        with self.assertRaisesRegex(ValueError, r"Losses\(sequence_balance=0.1\).*, router=expert-choice"):
            tessera.MoE(32, 16, 8, 2, router="expert-choice", losses=tessera.Losses(sequence_balance=0.1))

    def test_compile(self):
        def loss(x, w_router, mask):
            weights = {**self.weights, "w_router": w_router}
            o = tessera.moe(x, **weights, top_k=2, router="softmax-topk", mask=mask)
            return o.float().square().sum()

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        results = []
        for function in (compiled, loss):
            x, w = self.x.clone().requires_grad_(), self.weights["w_router"].clone().requires_grad_()
            value = function(x, w, self.mask)
            results.append((value.detach(), *torch.autograd.grad(value, (x, w))))
        for a, b in zip(*results, strict=True):
            self.assertTrue(torch.equal(a, b))

    def test_operators(self):
        w = self.weights
        arguments = (self.x, None, None, w["w_router"], None, None, None, None, w["w_up"], None, w["w_down"], None,
                     None, None, "router=topk-softmax top_k=2", 0)
        torch.library.opcheck(torch.ops.tessera.moe_inference.default, (*arguments, self.mask))
        # Where all tokens are real every row of h is written, so that two calls can be compared.
        arguments = (*arguments, torch.ones_like(self.mask))
        torch.library.opcheck(torch.ops.tessera.moe_forward.default, arguments)
        torch.library.opcheck(torch.ops.tessera.route.default,
                              (self.x, w["w_router"], None, None, "router=softmax-topk top_k=2", self.mask))
        o, h, routing = torch.ops.tessera.moe_forward.default(*arguments)
        saved = (self.d_o, self.x, h, routing, w["w_router"], None, w["w_up"], None, w["w_down"], None, None, None,
                 None)
        torch.library.opcheck(torch.ops.tessera.moe_backward.default,
                              (*saved, "router=topk-softmax top_k=2", 0b1010101, arguments[-1]))

    def test_fake_tensors(self):
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            o = tessera.moe(self.x.clone(), **self.weights, top_k=2, mask=self.mask)
            ids, weights, _ = tessera.route(self.x.clone(), self.weights["w_router"], top_k=2, mask=self.mask)
        self.assertEqual((o.shape, ids.shape, weights.shape), (self.x.shape, (self.tokens, 2), (self.tokens, 2)))

    def test_what_is_refused(self):
        w = self.weights
        for mask, text in ((self.mask.long(), "mask: dtype torch.int64; bool is needed"),
                           (self.mask[1:],
                            rf"mask: shape \[299\], x: \[300, {self.hidden}\]; a mask has one value per token")):
            for call in (lambda mask=mask: tessera.moe(self.x, **w, top_k=2, mask=mask),
                         lambda mask=mask: tessera.route(self.x, w["w_router"], top_k=2, mask=mask)):
                with self.assertRaisesRegex(ValueError, text):
                    call()
        ids = torch.zeros(self.tokens, 2, dtype=torch.int32, device=self.device)
        with self.assertRaisesRegex(ValueError, r"token_mask.*padding among given ids is an id outside \[0,experts\)"):
            torch.ops.tessera.moe_inference.default(
                self.x, ids, ids.float(), None, None, None, None, None, w["w_up"], None, w["w_down"], None, None, None,
                "", 0, self.mask)


class MaskedBf16(Masked):
    dtype = torch.bfloat16


class Fp32Router(MaskedBf16):
    """Beside experts in bf16."""

    router_dtype = torch.float32


class ManyTokens(Masked):
    """More tokens than the sums of gradients have in a block."""

    tokens = 2600

    test_token_rounding = test_compile = test_operators = test_fake_tensors = test_what_is_refused = None


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: Apache-2.0
"""An fp32 router beside bf16 experts, in every entry: logits and gradients of the fp32 weights, against fp64 torch."""

import copy
import unittest

import eager
import layers
import tessera
import tessera.ops
import torch
from torch._subclasses import fake_tensor

TOP_K, EXPERTS = 3, 8
# Of a sum in fp32; weights rounded to bf16 would be off by up to 2^-9.
FP32 = 2.0**-19


class RouterDType(unittest.TestCase):
    """cuda_router_dtype_test.py runs the same on a GPU."""

    device, hidden, intermediate, tokens = "cpu", 64, 32, 33
    compiler, dlogits_rounding = "aot_eager", FP32

    def setUp(self):
        torch.manual_seed(0)
        d, n = self.hidden, self.intermediate
        self.x = self.bf16(torch.randn(self.tokens, d))
        self.w_router = (torch.randn(EXPERTS, d) / d**0.5).to(self.device)
        self.b_router = (torch.randn(EXPERTS) / 4).to(self.device)
        self.weights = [self.bf16(torch.randn(EXPERTS, 2 * n, d) / d**0.5),
                        self.bf16(torch.randn(EXPERTS, d, n) / n**0.5)]
        self.d_o = self.bf16(torch.randn(self.tokens, d))

    def bf16(self, tensor):
        return tensor.to(self.device, torch.bfloat16)

    def leaves(self):
        return [t.detach().clone().requires_grad_() for t in (self.x, self.w_router, *self.weights, self.b_router)]

    def call(self, leaves, **options):
        x, w_router, w_up, w_down, b_router = leaves
        return tessera.moe(x, w_router, w_up, w_down, top_k=TOP_K, b_router=b_router, **options)

    def assert_sum(self, got, left, right, name: str, rounding: float = FP32):
        """got = left @ right, each product rounded by less than `rounding`."""
        left, right = left.double(), right.double()
        error, size = (got.double() - left @ right).abs(), left.abs() @ right.abs()
        self.assertTrue((error <= rounding * size).all(), f"{name}: {(error / size).max().item():.2e}")
        self.assertGreater(got.abs().max().item(), 1e-3, name)

    def options(self):
        yield from ({"router": router} for router in (*layers.ROUTERS, "expert-choice"))
        yield {"router": "topk-softmax", "rounding": "nr-f", "tile": 4}
        yield {"router": "sigmoid-bias", "normalize_scores": True, "save": "x"}

    def test_logits_and_gradients_are_those_of_the_fp32_weights(self):
        for options in self.options():
            with self.subTest(**options):
                leaves = self.leaves()
                o, router = self.call(leaves, return_router=True, **options)
                rows = torch.cat([self.x.float(), torch.ones(self.tokens, 1, device=self.device)], 1)
                self.assert_sum(router.logits, rows, torch.cat([self.w_router, self.b_router[:, None]], 1).mT, "logits")
                self.assertIs(o.dtype, torch.bfloat16)
                dx, dw, d_up, d_down, db = torch.autograd.grad(o, leaves, self.d_o)
                self.assertEqual([t.dtype for t in (dx, dw, d_up, d_down, db)],
                                 [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16, torch.float32])
                self.assertTrue(torch.isfinite(dw).all() and dw.abs().max() > 1e-3)
                self.assertFalse(torch.equal(dw, dw.bfloat16().float()), "dw_router looks rounded to bf16")

    def test_gradients_of_a_loss_of_the_logits_alone(self):
        """dlogits are known exactly then: dw_router, db_router and dx are sums of them."""
        leaves = self.leaves()
        logits = self.call(leaves, return_router=True)[1].logits
        dlogits = torch.randn(self.tokens, EXPERTS).to(self.device)
        dx, dw, db = torch.autograd.grad(logits, [leaves[0], leaves[1], leaves[4]], dlogits)
        self.assert_sum(dw, dlogits.mT, self.x.float(), "dw_router", self.dlogits_rounding)
        torch.testing.assert_close(db, dlogits.sum(0))
        exact = dlogits.double() @ self.w_router.double()
        self.assertTrue(((dx.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all())

    def test_matches_fp64(self):
        """The whole layer, as that of a bf16 one: experts round, and the router does not make it worse."""
        for router in layers.ROUTERS:
            with self.subTest(router):
                leaves = self.leaves()
                exact = [t.detach().double().requires_grad_() for t in leaves]
                o = self.call(leaves, router=router)
                x, w_router, w_up, w_down, b_router = exact
                logits = x @ w_router.mT + b_router
                ids = self.call(leaves, router=router, return_router=True)[1].topk_ids.long()
                reference = eager.experts(x, ids, eager.router_scores(logits, ids, router),
                                          {"w_up": w_up, "w_down": w_down})
                eager.check_close(self, f"{router}: o", o, reference, eager.RELATIVE[torch.bfloat16])
                got = torch.autograd.grad(o, leaves, self.d_o)
                wanted = torch.autograd.grad(reference, exact, self.d_o.double())
                for name, a, b in zip(("x", "w_router", "w_up", "w_down", "b_router"), got, wanted, strict=True):
                    eager.check_close(self, f"{router}: d{name}", a, b, eager.RELATIVE[torch.bfloat16])

    def test_route_has_the_bits_of_the_layer(self):
        leaves = self.leaves()
        router = self.call(leaves, return_router=True)[1]
        ids, weights, logits = tessera.route(leaves[0], leaves[1], top_k=TOP_K, b_router=leaves[4])
        for a, b in zip((ids, weights, logits), (router.topk_ids, router.topk_weights, router.logits), strict=True):
            self.assertTrue(torch.equal(a, b))
        dlogits = torch.randn_like(logits)
        dx, dw = torch.autograd.grad(logits, leaves[:2], dlogits)
        self.assertEqual([dx.dtype, dw.dtype], [torch.bfloat16, torch.float32])
        self.assert_sum(dw, dlogits.mT, self.x.float(), "dw_router", self.dlogits_rounding)

    def test_autocast_leaves_an_fp32_router(self):
        full = [t.float() for t in (self.x, *self.weights)]
        leaves = [full[0], self.w_router, full[1], full[2], self.b_router]
        wanted = self.call(self.leaves(), return_router=True)
        with torch.autocast(self.device, torch.bfloat16):
            got = self.call(leaves, return_router=True)
            logits = tessera.route(full[0], self.w_router, top_k=TOP_K, b_router=self.b_router)[2]
        self.assertTrue(torch.equal(got[0], wanted[0]))
        self.assertTrue(torch.equal(got[1].logits, wanted[1].logits))
        self.assertTrue(torch.equal(logits, wanted[1].logits))

    def test_module(self):
        layer = tessera.MoE(self.hidden, self.intermediate, EXPERTS, TOP_K, device=self.device, dtype=torch.bfloat16,
                            router=tessera.RouterOptions(bias=True, dtype=torch.float32))
        types = {name: p.dtype for name, p in layer.named_parameters()}
        self.assertEqual(types, {"w_router": torch.float32, "b_router": torch.float32, "w_up": torch.bfloat16,
                                 "w_down": torch.bfloat16})
        layer(self.x).square().mean().backward()
        self.assertTrue(all(p.grad.dtype is p.dtype for p in layer.parameters()))
        values = layer.w_router.detach().clone()
        for moved in (layer.bfloat16(), layer.to(torch.bfloat16), layer.half().bfloat16()):
            self.assertIs(moved.w_router.dtype, torch.float32)
            self.assertIs(moved.w_router.grad.dtype, torch.float32)
            self.assertTrue(torch.equal(moved.w_router, values))
        lower = {name: value.bfloat16() for name, value in layer.state_dict().items()}
        for assign in (False, True):
            layer.load_state_dict(lower, assign=assign)
            self.assertEqual({name: p.dtype for name, p in layer.named_parameters()}, types)
        fp32 = tessera.RouterOptions(dtype=torch.float32)
        self.assertIs(tessera.MoE(8, 8, 4, 2, router=fp32).bfloat16().w_router.dtype, torch.float32)
        self.assertIs(tessera.MoE(8, 8, 4, 2).bfloat16().w_router.dtype, torch.bfloat16)
        with self.assertRaisesRegex(ValueError, r"RouterOptions\(dtype=torch.bfloat16\)"):
            tessera.MoE(8, 8, 4, 2, router=tessera.RouterOptions(dtype=torch.bfloat16))

    def test_main_grad_of_the_experts(self):
        layer = tessera.MoE(self.hidden, self.intermediate, EXPERTS, TOP_K, main_grad=True, device=self.device,
                            dtype=torch.bfloat16, router=tessera.RouterOptions(dtype=torch.float32))
        plain = copy.deepcopy(layer)
        plain.main_grad = False
        for weight in (layer.w_up, layer.w_down):
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        for each in (layer, plain):
            each(self.x).backward(self.d_o)
        self.assertTrue(torch.equal(layer.w_router.grad, plain.w_router.grad))
        self.assertTrue(torch.equal(layer.w_up.main_grad.bfloat16(), plain.w_up.grad))

    def test_compile_and_meta(self):
        def run(*leaves):
            o, router = self.call(leaves, return_router=True)
            return o, router.logits

        leaves = self.leaves()
        wanted = run(*leaves)
        # Compiled graphs have a gradient for each result: without one for the logits eager code takes another kernel.
        of_results = (self.d_o, torch.zeros_like(wanted[1]))
        gradients = torch.autograd.grad(wanted, leaves, of_results)
        got = torch.compile(run, backend=self.compiler, fullgraph=True)(*leaves)
        for a, b in zip((*got, *torch.autograd.grad(got, leaves, of_results)), (*wanted, *gradients), strict=True):
            self.assertIs(a.dtype, b.dtype)
            self.assertTrue(torch.equal(a, b))
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
            fake = run(*leaves)
            self.assertIs(fake[1].dtype, torch.float32)
            for a, b in zip(torch.autograd.grad(fake[0], leaves, torch.empty_like(fake[0])), gradients, strict=True):
                self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
        text = tessera.functional.options_text(router="topk-softmax", top_k=TOP_K, logits=True)
        arguments = (self.x, None, None, self.w_router, self.b_router, None, None, None, self.weights[0], None,
                     self.weights[1], None, None, None, text)
        meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
        for a, b in zip(torch.ops.tessera.moe_forward.default(*meta),
                        torch.ops.tessera.moe_forward.default(*arguments), strict=True):
            self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
        torch.library.opcheck(torch.ops.tessera.moe_forward.default, arguments)

    def test_errors_name_what_to_change(self):
        half = self.w_router.half()
        cases = {
            "x: dtype torch.float32, but w_up and w_down are torch.bfloat16":
                lambda: tessera.MoE(8, 8, 4, 2, dtype=torch.bfloat16, device=self.device)(
                    torch.zeros(2, 8, device=self.device)),
            "x: dtype torch.float32, but": lambda: tessera.moe(self.x.float(), self.w_router, *self.weights, top_k=2),
            "w_router: dtype torch.float16 beside x in torch.bfloat16":
                lambda: tessera.moe(self.x, half, *self.weights, top_k=2),
            "b_router: dtype torch.bfloat16, w_router: torch.float32":
                lambda: tessera.moe(self.x, self.w_router, *self.weights, top_k=2, b_router=self.bf16(self.b_router)),
            "w_router: dtype torch.bfloat16 beside x in torch.float32":
                lambda: tessera.route(self.x.float(), self.bf16(self.w_router), top_k=2),
        }
        for text, call in cases.items():
            with self.subTest(text), self.assertRaisesRegex(ValueError, text):
                call()


if __name__ == "__main__":
    unittest.main()

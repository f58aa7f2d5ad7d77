# SPDX-License-Identifier: Apache-2.0
"""tessera.MoE: options, shared experts, losses, balancing, main_grad, compile, state."""

import unittest

import eager
import tessera
import tier
import torch
import torch._dynamo.testing


def reference(layer, x, w):
    """The module in fp64 torch; w: its parameters by name."""
    rows = x.double().reshape(-1, x.shape[-1])
    logits = rows @ w["w_router"].mT + w.get("b_router", 0)
    ids = logits.topk(layer.top_k, dim=-1).indices
    o = eager.experts(rows, ids, eager.router_scores(logits, ids, layer.router),
                      {k: w.get(k) for k in ("w_up", "w_down", "b_up", "b_down")})
    if "w_shared_up" in w:
        shared = eager.activate(rows @ w["w_shared_up"].mT) @ w["w_shared_down"].mT
        o = o + (rows @ w["w_shared_gate"].mT).sigmoid() * shared
    return o.view(x.shape)


class Module(unittest.TestCase):
    device, dtype, compiler = "cpu", torch.float32, "aot_eager"

    def setUp(self):
        torch.manual_seed(0)
        self.x = torch.randn(2, 9, 32).to(self.device, self.dtype)

    def layer(self, **options):
        return tessera.MoE(32, 16, 8, 2, **options).to(self.device, self.dtype)

    def test_matches_torch(self):
        for router in ("topk-softmax", "softmax-topk"):
            layer = self.layer(router=tessera.RouterOptions(router, bias=True), bias=True,
                               shared=tessera.SharedExpert(24, gate=True))
            with torch.no_grad():
                for p in layer.parameters():
                    p.copy_(torch.randn_like(p) / p.shape[-1]**0.5)
            exact = {name: p.detach().double() for name, p in layer.named_parameters()}
            eager.check_close(self, router, layer(self.x), reference(layer, self.x, exact))

    def test_losses_and_statistics(self):
        layer = self.layer(losses=tessera.Losses(balance=0.01, z=0.001))
        o, router = layer(self.x, return_router=True)
        self.assertEqual(int(router.counts.sum()), 36)
        loss = layer.auxiliary_loss(router)
        (o.square().mean() + loss).backward()
        p = router.logits.softmax(-1)
        expected = 0.01 * 8 * (router.counts / 36 * p.mean(0)).sum()
        expected = expected + 0.001 * router.logits.logsumexp(-1).square().mean()
        torch.testing.assert_close(loss, expected)
        for name, parameter in layer.named_parameters():
            self.assertGreater(parameter.grad.abs().max(), 0, name)

    def test_selection_bias_balances(self):
        layer = self.layer(router=tessera.RouterOptions("sigmoid-bias", normalize_scores=True, selection_bias=True))
        x = torch.randn(512, 32).to(self.device, self.dtype) + 0.5
        first = layer(x, return_router=True)[1].counts
        for _ in range(300):
            with torch.no_grad():
                layer.update_selection_bias(layer(x, return_router=True)[1].counts, rate=5e-3)
        last = layer(x, return_router=True)[1].counts
        self.assertLess(last.float().std(), first.float().std() / 3)
        self.assertEqual(int(last.sum()), 1024)
        with self.assertRaisesRegex(ValueError, "selection_bias"):
            self.layer().update_selection_bias(last)

    def test_compile(self):
        layer = self.layer(shared=tessera.SharedExpert(16))
        compiled = torch.compile(layer, fullgraph=True, backend=self.compiler)
        o = layer(self.x)
        relative = eager.RELATIVE[self.dtype]  # a compiler rounds sums of several terms once
        eager.check_close(self, "o", compiled(self.x), o, relative)
        o.sum().backward()
        wanted = [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        compiled(self.x).sum().backward()
        for (name, p), grad in zip(layer.named_parameters(), wanted, strict=True):
            eager.check_close(self, name, p.grad, grad, relative)

    def test_compiled_backward_of_an_eager_layer(self):
        """Dynamo traces Python that autograd calls while a compiled function runs."""
        losses = {"sum": lambda o: o.sum(), "squares": lambda o: o.square().sum()}
        self.addCleanup(torch._dynamo.reset)

        def gradients(options, loss, x, backward):
            torch.manual_seed(1)
            layer = self.layer(**options)
            if "main_grad" in options:
                for weight in (layer.w_up, layer.w_down):
                    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            x = x.clone().requires_grad_()
            backward(loss(layer(x)))
            return [x.grad, *[getattr(p, "main_grad", p.grad) for p in layer.parameters()]]

        @torch.compile(backend="eager")
        def backward(loss):
            loss.backward()

        for compiled_autograd in (False, True):
            for options in ({}, {"save": "x"}, {"main_grad": True}):
                for name, loss in losses.items():
                    torch._dynamo.reset()
                    for tokens in (64,) if compiled_autograd else (1, 5, 18, 64):
                        x = torch.randn(tokens, 32).to(self.device, self.dtype)
                        wanted = gradients(options, loss, x, torch.Tensor.backward)
                        with torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
                            got = gradients(options, loss, x, backward)
                        case = f"{options} {name} {tokens} compiled_autograd={compiled_autograd}"
                        for a, b in zip(got, wanted, strict=True):
                            self.assertTrue(torch.equal(a, b), case)

    def test_main_grad_accumulates_over_micro_batches(self):
        """In fp32, also where the weights are stored in less."""
        layer = self.layer(main_grad=True)
        exact = eager.doubled(dict(layer.named_parameters()))
        for weight in (layer.w_up, layer.w_down):
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        for seed in range(64):
            x = torch.randn(5, 32, generator=torch.Generator().manual_seed(seed)).to(self.device, self.dtype)
            layer(x).square().sum().backward()
            reference(layer, x, exact).square().sum().backward()
        self.assertIsNone(layer.w_up.grad)
        for name in ("w_up", "w_down"):
            eager.check_close(self, name, getattr(layer, name).main_grad, exact[name].grad, eager.RELATIVE[self.dtype])
        self.assertIs(layer.w_router.grad.dtype, self.dtype)
        eager.check_close(self, "w_router", layer.w_router.grad, exact["w_router"].grad,
                          2 * eager.RELATIVE[self.dtype])

    def test_frozen_weights_leave_main_grad_alone(self):
        layer = self.layer(main_grad=True)
        for weight in (layer.w_up, layer.w_down):
            weight.main_grad = torch.zeros_like(weight)
        for frozen, trained in ((layer.w_up, layer.w_down), (layer.w_down, layer.w_up)):
            frozen.requires_grad_(False)
            layer(self.x).square().sum().backward()
            frozen.requires_grad_(True)
            self.assertEqual(frozen.main_grad.abs().max(), 0)
            self.assertGreater(trained.main_grad.abs().max(), 0)
            trained.main_grad.zero_()
        for weight in (layer.w_up, layer.w_down):
            weight.requires_grad_(False)
        layer(self.x).square().sum().backward()
        self.assertEqual(max(weight.main_grad.abs().max() for weight in (layer.w_up, layer.w_down)), 0)

    def test_steps_do_not_compile_again(self):
        """Beyond the first two: torch takes an integer for a constant until it changes."""
        layer = self.layer(rounding=tessera.Rounding("sr-f", tile=4))
        count = torch._dynamo.testing.CompileCounterWithBackend(self.compiler)
        torch._dynamo.reset()
        self.addCleanup(torch._dynamo.reset)
        with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
            compiled = torch.compile(layer, fullgraph=True, backend=count)
            for layer.step in range(1, 13):
                self.assertTrue(torch.equal(compiled(self.x), layer(self.x)))
        self.assertLessEqual(count.frame_count, 2)
        compiled(self.x).sum().backward()
        self.assertGreater(layer.w_up.grad.abs().max(), 0)

    def test_token_rounding_in_training_only(self):
        layer = self.layer(rounding=tessera.Rounding("nr-f", tile=4))
        x = torch.randn(64, 32).to(self.device, self.dtype)
        rounded = layer(x, return_router=True)[1]
        self.assertEqual((rounded.counts % 4).tolist(), [0] * 8)
        plain = layer.eval()(x, return_router=True)[1]
        self.assertEqual(plain.counts.tolist(), rounded.topk_counts.tolist())
        compiled = torch.compile(layer.train(), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), layer(x))

    def test_state(self):
        router = tessera.RouterOptions(selection_bias=True)
        layer, other = self.layer(router=router), self.layer(router=router)
        other.load_state_dict(layer.state_dict())
        self.assertTrue(torch.equal(layer(self.x), other(self.x)))
        self.assertIn("experts=8", repr(layer))
        self.assertIs(layer.bfloat16().selection_bias.dtype, torch.float32)
        with torch.device("meta"):
            assigned = tessera.MoE(32, 16, 8, 2, router=router)
        assigned.load_state_dict({name: t.bfloat16() for name, t in other.state_dict().items()}, assign=True)
        self.assertEqual((assigned.w_up.dtype, assigned.selection_bias.dtype), (torch.bfloat16, torch.float32))
        self.assertTrue(torch.equal(assigned(self.x.bfloat16()), other.bfloat16()(self.x.bfloat16())))
        meta = tessera.MoE(32, 16, 8, 2, device="meta", dtype=torch.bfloat16)
        self.assertEqual(meta.w_up.dtype, torch.bfloat16)

    def test_state_after_meta(self):
        """to_empty leaves what the memory held, and reset_parameters sets all of it."""
        router = tessera.RouterOptions(bias=True, selection_bias=True)
        layer = tessera.MoE(32, 16, 8, 2, router=router, bias=True, device="meta")
        layer.to_empty(device=self.device)
        with torch.no_grad():
            for tensor in layer.state_dict().values():
                tensor.fill_(float("nan"))
        layer.reset_parameters()
        for name, tensor in layer.state_dict().items():
            self.assertTrue(torch.isfinite(tensor).all(), name)
        self.assertEqual(layer.selection_bias.abs().max(), 0)

    def test_tracers_that_are_not_served(self):
        layer = self.layer()
        for _ in range(2):  # the second time with a call that is remembered
            for context in (torch.no_grad, torch.enable_grad):
                with context(), self.assertRaisesRegex(NotImplementedError, "^torch.jit.trace: .*; use torch.compile"):
                    torch.jit.trace(layer, self.x)
                with context():
                    layer(self.x)
        with self.assertRaisesRegex(TypeError, "torch.fx.symbolic_trace, .*: use torch.compile"):
            torch.fx.symbolic_trace(layer)
        exported = torch.export.export(layer, (self.x,)).module()
        self.assertTrue(torch.equal(exported(self.x), layer(self.x)))

    def test_bad_options(self):
        for options, text in (({"top_k": 9}, "top_k=9, experts=8"), ({"router": "given"}, "router=given"),
                              ({"activation": "tanh"}, "activation='tanh'"), ({"hidden": 0}, "hidden=0")):
            sizes = {"hidden": 32, "intermediate": 16, "experts": 8, "top_k": 2, **options}
            with self.assertRaisesRegex(ValueError, text):
                tessera.MoE(**sizes)


@tier.deep
class Bf16Module(Module):
    dtype = torch.bfloat16


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: Apache-2.0
"""Tests of what torch asks of an operator, for any device and storage type: classes of ops_test.py and cuda_test.py say
which.
"""

import contextlib
import functools
import threading

import eager
import layers
import tessera
import tessera.ops
import torch
import torch._dynamo.testing
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch, checkpoint


class Operations(_python_dispatch.TorchDispatchMode):
    """The names of all operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Operators(layers.Layer):
    """torch.compile, opcheck, checkpointing, modes, strides, threads."""

    compiler = "aot_eager"
    routers = [f"router={router} top_k=2" + " groups=1 top_groups=1" * (router == "group-limited")
               for router in layers.ROUTERS]

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
        original = tessera.ops.layer.prepared_forward
        self.addCleanup(setattr, tessera.ops.layer, "prepared_forward", original)
        tessera.ops.layer.prepared_forward = lambda *a: runs.append(1) or original(*a)
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

    def test_tensors_that_are_negated_lazily(self):
        def results(names, negate):
            """Of the layer where these are the negative of something."""
            t = eager.leaves({n: -tensor if n in names else tensor for n, tensor in self.tensors.items()})
            given = {name: negate(tensor) if name in names else tensor for name, tensor in t.items()}
            with torch.no_grad():
                inference = self.routed(given)
            o = self.routed(given)
            return [inference, o, *torch.autograd.grad(o, list(t.values()), negate(self.d_o))]

        for names in ((), *[(name,) for name in self.tensors], tuple(self.tensors)):
            for _ in range(2):
                for a, b in zip(results(names, torch._neg_view), results(names, torch.neg), strict=True):
                    self.assertTrue(torch.equal(a, b), names)

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
                return tessera.routed_experts(t["x"], ids[:len(t["x"])], t["scores"], **layers.pick(t))
            bias = t.get("selection_bias")
            return tessera.moe(t["x"], t["w_router"], **layers.pick(t), top_k=2, router="sigmoid-bias",
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
            tessera.ops.prepared_calls.here.forget()
            fresh.append(results(*call))
        order = torch.randperm(len(calls) ** 2, generator=torch.Generator().manual_seed(0)).tolist()
        for pair in order[:400]:
            for number in divmod(pair, len(calls)):
                for a, b in zip(results(*calls[number]), fresh[number], strict=True):
                    self.assertTrue(torch.equal(a, b), f"call {number} of {divmod(pair, len(calls))}")

    def test_like_calls_are_remembered(self):
        """Else they would be right and slow."""
        original, asked = tessera.ops.layer.prepared_forward, []
        self.addCleanup(setattr, tessera.ops.layer, "prepared_forward", original)
        tessera.ops.layer.prepared_forward = lambda *a: asked.append(1) or original(*a)
        tessera.ops.prepared_calls.here.forget()
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

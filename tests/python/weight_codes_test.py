# SPDX-License-Identifier: Apache-2.0
"""Weights that are quantised once for many calls: the bits of calls that quantise, in every entry; what is read; and
what is refused."""

import copy
import io
import unittest

import tessera
import tessera.ops
import tier
import torch
from tessera.ops.layer import GRADIENTS
from tessera.ops.prepared_calls import here

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 24, 256, 128, 4, 2


class Weights(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(5)
        d, n = HIDDEN, INTERMEDIATE
        self.x = torch.randn(TOKENS, d).bfloat16()
        self.ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
        self.scores = torch.rand(TOKENS, TOP_K)
        self.w_up = (torch.randn(EXPERTS, 2 * n, d) / d**0.5).bfloat16()
        self.w_down = (torch.randn(EXPERTS, d, n) / n**0.5).bfloat16()
        self.w_router = (torch.randn(EXPERTS, d) / d**0.5).bfloat16()
        self.d_o = torch.randn(TOKENS, d).bfloat16()

    def assert_same(self, one, other):
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            self.assertTrue(torch.equal(a, b), f"tensor {i}")

    def leaves(self, *tensors):
        return [t.detach().clone().requires_grad_() for t in tensors]


class WeightCodes(Weights):
    def both_ways(self, call, leaves: list, made_by: dict, weights: dict, **options):
        """Compares call(*leaves, **options) with the same by codes: results, gradients, and results without them."""
        def run(**more):
            o = call(*leaves, precision="fp8", **options, **more)
            with torch.no_grad():
                alone = call(*leaves, precision="fp8", **options, **more)
            return [o.detach(), alone, *torch.autograd.grad(o, leaves, self.d_o[:o.shape[0]])]

        codes = tessera.quantise_weights(**weights, **made_by)
        self.assert_same(run(), run(weight_codes=codes))
        self.assert_same(run(), run(weight_codes=codes))  # by calls that are remembered

    def test_every_entry_has_the_bits_of_calls_that_quantise(self):
        for options in ({}, {"save": "x"}, {"scales": "pow2"}):
            made_by = {name: value for name, value in options.items() if name == "scales"}
            with self.subTest(**options):
                leaves = self.leaves(self.x, self.w_router, self.w_up, self.w_down)
                self.both_ways(lambda x, w_router, up, down, **o: tessera.moe(x, w_router, up, down, top_k=TOP_K, **o),
                               leaves, made_by, {"w_up": leaves[2], "w_down": leaves[3]}, **options)
        leaves = self.leaves(self.x, self.scores, self.w_up, self.w_down)
        self.both_ways(lambda x, s, up, down, **o: tessera.routed_experts(x, self.ids, s, up, down, **o), leaves, {},
                       {"w_up": leaves[2], "w_down": leaves[3]})
        counts = torch.tensor([5, 0, 12, 7])
        leaves = self.leaves(self.x, self.w_up, self.w_down)
        self.both_ways(lambda x, up, down, **o: tessera.grouped_experts(x, counts, up, down, grouping="counts", **o),
                       leaves, {}, {"w_up": leaves[1], "w_down": leaves[2]})

    def test_layouts_and_weights_without_a_gate(self):
        for layout in ("interleaved", "transposed", "transposed-up-first"):
            with self.subTest(layout=layout):
                up, down = self.w_up, self.w_down
                if layout.startswith("transposed"):
                    up, down = up.mT.contiguous(), down.mT.contiguous()
                leaves = self.leaves(self.x, self.scores, up, down)
                self.both_ways(
                    lambda x, s, up, down, **o: tessera.routed_experts(x, self.ids, s, up, down, **o),
                    leaves, {"layout": layout}, {"w_up": leaves[2], "w_down": leaves[3]}, layout=layout)
        gate, up = self.w_up.chunk(2, 1)
        leaves = self.leaves(self.x, self.scores, gate, up, self.w_down)
        self.both_ways(lambda x, s, gate, up, down, **o: tessera.routed_experts(x, self.ids, s, up, down, w_gate=gate,
                                                                                **o),
                       leaves, {}, {"w_gate": leaves[2], "w_up": leaves[3], "w_down": leaves[4]})
        leaves = self.leaves(self.x, self.scores, up, self.w_down)
        self.both_ways(lambda x, s, up, down, **o: tessera.routed_experts(x, self.ids, s, up, down, **o), leaves,
                       {"activation": "relu2"}, {"w_up": leaves[2], "w_down": leaves[3]}, activation="relu2")

    def test_codes_are_read_in_place_of_weights(self):
        """Codes of nobody knows which weights: results are theirs, and the weights of the call are not read."""
        def routed(up, down, **options):
            leaves = self.leaves(self.x, self.scores, up, down)
            o = tessera.routed_experts(leaves[0], self.ids, leaves[1], *leaves[2:], precision="fp8", **options)
            return [o, *torch.autograd.grad(o, leaves, self.d_o)]

        made = tessera.quantise_weights(self.w_up, self.w_down)
        codes = tessera.WeightCodes(made.up, made.up_scales, made.down, made.down_scales, made.up_transposed,
                                    made.down_transposed)
        nan = [torch.full_like(weight, float("nan")) for weight in (self.w_up, self.w_down)]
        self.assert_same(routed(self.w_up, self.w_down), routed(*nan, weight_codes=codes))

    def test_a_module_quantises_once_for_a_step(self):
        torch.manual_seed(0)
        first = tessera.MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, dtype=torch.bfloat16, precision="fp8")
        second = copy.deepcopy(first)
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.5) for layer in (first, second)]
        for _ in range(2):
            codes = second.quantise_weights()
            self.assertIs(second.weight_codes, codes)
            for batch in (self.x, self.x.flip(0)):
                self.assert_same([first(batch)], [second(batch, return_router=True)[0]])
                for layer in (first, second):
                    layer(batch).backward(self.d_o)
            self.assert_same([p.grad for p in first.parameters()], [p.grad for p in second.parameters()])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            with self.assertRaisesRegex(ValueError, r"w_up has changed since they were made \(version \d+, now \d+\); "
                                                    "call quantise_weights again"):
                second(self.x)
        second.quantise_weights()
        for other in (copy.deepcopy(second), second.to(torch.bfloat16)):
            self.assertIsNone(other.weight_codes)
            self.assert_same([first(self.x)], [other(self.x)])
        stored = io.BytesIO()
        second.quantise_weights(transposed=False)
        torch.save(second, stored)
        self.assertIsNone(torch.load(io.BytesIO(stored.getvalue()), weights_only=False).weight_codes)
        with torch.no_grad():
            self.assert_same([first(self.x)], [second(self.x)])
        with self.assertRaisesRegex(ValueError, "weight_codes: made with transposed=False, for calls without"):
            second(self.x)

    def test_buffers_of_gradients_and_autocast(self):
        layers = []
        for codes in (False, True):
            torch.manual_seed(0)
            layer = tessera.MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, precision="fp8", main_grad=True)
            layer.w_up.main_grad = torch.ones(layer.w_up.shape)
            layer.w_down.main_grad = torch.zeros(layer.w_down.shape)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                if codes:
                    layer.quantise_weights()
                o = layer(self.x.float())
            o.backward(self.d_o)
            layers.append([o, layer.w_up.main_grad, layer.w_down.main_grad])
        self.assert_same(*layers)

    @tier.deep
    def test_operators_and_compilation(self):
        leaves = self.leaves(self.x, self.w_router, self.w_up, self.w_down)
        x, w_router, w_up, w_down = leaves
        codes = tessera.quantise_weights(w_up, w_down)
        # The other checks compare or add up codes, for which torch has no functions.
        checks = {"test_utils": ("test_autograd_registration", "test_faketensor")}
        torch.library.opcheck(torch.ops.tessera.quantise_weights.default,
                              (w_up.detach(), None, w_down.detach(), "precision=fp8", True), **checks)
        text = f"router=topk-softmax top_k={TOP_K} precision=fp8 weight_codes=True"
        given = codes.of(w_up, None, w_down)
        arguments = (x, None, None, w_router, None, None, None, None, w_up, None, w_down, None, None, None, text, 0,
                     None, *given)
        torch.library.opcheck(torch.ops.tessera.moe_forward.default, arguments, **checks)
        with torch.no_grad():
            _, h, routing, x8, x_scale, h_scale = torch.ops.tessera.moe_forward.default(*arguments)
        saved = (self.d_o, x8, h, routing, w_router.detach(), None, w_up.detach(), None, w_down.detach(), None, None,
                 None, None)
        needs = sum(1 << GRADIENTS.index(name) for name in ("dx", "dw_router", "dw_up", "dw_down"))
        torch.library.opcheck(torch.ops.tessera.moe_backward.default,
                              (*saved, text, needs, None, x_scale, h_scale, *given), **checks)

        def call(x, w_router, w_up, w_down, **options):
            return tessera.moe(x, w_router, w_up, w_down, top_k=TOP_K, precision="fp8", **options)

        def with_gradients(o):
            return [o, *torch.autograd.grad(o, leaves, self.d_o)]

        plain = with_gradients(call(*leaves))
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        self.assert_same(plain, with_gradients(compiled(*leaves, weight_codes=codes)))

        def step(x, w_router, w_up, w_down):
            return call(x, w_router, w_up, w_down, weight_codes=tessera.quantise_weights(w_up, w_down))

        self.assert_same(plain, with_gradients(torch.compile(step, backend="aot_eager", fullgraph=True)(*leaves)))

    def test_refusals_name_what_does_not_fit(self):
        def refuse(text: str, call, error=ValueError):
            with self.assertRaisesRegex(error, text):
                call()

        up, down = self.w_up, self.w_down
        codes = tessera.quantise_weights(up, down)
        for precision in ("native", "mxfp8"):
            refuse(f"weight_codes with precision={precision}: only layers of fp8 read codes",
                   lambda precision=precision: tessera.routed_experts(
                       self.x, self.ids, self.scores, up, down, precision=precision, weight_codes=codes))
            layer = tessera.MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, dtype=torch.bfloat16, precision=precision)
            refuse(f"quantise_weights with precision={precision}", layer.quantise_weights)
        refuse("they are not those of this w_down", lambda: tessera.routed_experts(
            self.x, self.ids, self.scores, up, down.clone(), precision="fp8", weight_codes=codes))
        refuse("w_up: dtype torch.float32; layers that read codes store bf16",
               lambda: tessera.quantise_weights(up.float(), down.float()))
        refuse("hidden=192 with precision=fp8: .*multiple of 128",
               lambda: tessera.quantise_weights(up[..., :192], down[:, :192]))
        refuse("w_up: 255 rows per expert", lambda: tessera.quantise_weights(up[:, :255], down))
        refuse("w_down: .*shape", lambda: tessera.quantise_weights(up, down[:2]))
        refuse("second derivatives", lambda: torch.ops.tessera.quantise_weights(
            up.clone().requires_grad_(), None, down, "precision=fp8", True), NotImplementedError)
        gate = up[:, :INTERMEDIATE]
        refuse("they are not those of this w_gate", lambda: tessera.routed_experts(
            self.x, self.ids, self.scores, up, down, w_gate=gate, precision="fp8", weight_codes=codes))
        with torch.no_grad():
            down.mul_(2)
        refuse("w_down has changed since they were made", lambda: tessera.routed_experts(
            self.x, self.ids, self.scores, up, down, precision="fp8", weight_codes=codes))

    def test_auto_on_the_cpu_reads_the_weights(self):
        leaves = self.leaves(self.x, self.w_router, self.w_up, self.w_down)
        codes = tessera.quantise_weights(*leaves[2:])
        results = []
        for options in ({}, {"precision": "auto"}, {"precision": "auto", "weight_codes": codes}):
            o = tessera.moe(*leaves, top_k=TOP_K, **options)
            results.append([o, *torch.autograd.grad(o, leaves, self.d_o)])
        self.assert_same(results[0], results[1])
        self.assert_same(results[0], results[2])
        layer = tessera.MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, dtype=torch.bfloat16, precision="auto")
        self.assertIsNone(layer.quantise_weights())
        self.assertIsNone(layer.weight_codes)


class Automatic(Weights):
    """precision="auto" where it takes fp8, as a GPU with enough rows does: what decides is replaced."""

    def setUp(self):
        super().setUp()
        original = tessera.ops.layer.taken
        self.addCleanup(here.forget)
        self.addCleanup(setattr, tessera.ops.layer, "taken", original)

    def take(self, fp8: bool) -> None:
        here.forget()
        tessera.ops.layer.taken = lambda options, named: options.taken(fp8=fp8)

    def test_what_it_takes_is_saved_and_read(self):
        leaves = self.leaves(self.x, self.w_router, self.w_up, self.w_down)
        codes = tessera.quantise_weights(*leaves[2:])

        def call(*tensors, **options):
            return tessera.moe(*tensors, top_k=TOP_K, **options)

        def results(function, **options):
            saved = []

            def keep(tensor):
                saved.append(tensor.dtype)
                return tensor
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                o = function(*leaves, **options)
            hooked = torch.autograd.grad(o, leaves, self.d_o)
            o = function(*leaves, **options)
            self.assert_same(hooked, torch.autograd.grad(o, leaves, self.d_o))
            return [o, *hooked], saved.count(torch.float8_e4m3fn)

        fp8, kept = results(call, precision="fp8")
        self.assertEqual(kept, 2)  # x8 and h
        native, kept = results(call)
        self.assertEqual(kept, 0)
        for takes_fp8, expected in ((True, fp8), (False, native)):
            for options in ({}, {"weight_codes": codes}, {"save": "x"}):
                with self.subTest(takes_fp8=takes_fp8, options=list(options)):
                    self.take(takes_fp8)
                    self.assert_same(expected, results(call, precision="auto", **options)[0])

    @tier.deep
    def test_compiled(self):
        leaves = self.leaves(self.x, self.w_router, self.w_up, self.w_down)

        def call(*tensors, precision):
            return tessera.moe(*tensors, top_k=TOP_K, precision=precision)

        o = call(*leaves, precision="fp8")
        fp8 = [o, *torch.autograd.grad(o, leaves, self.d_o)]
        self.take(True)
        compiled = torch.compile(lambda *t: call(*t, precision="auto"), backend="aot_eager", fullgraph=True)
        o = compiled(*leaves)
        self.assert_same(fp8, [o, *torch.autograd.grad(o, leaves, self.d_o)])


if __name__ == "__main__":
    unittest.main()

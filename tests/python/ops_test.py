# SPDX-License-Identifier: Apache-2.0
"""Forward and gradients of every entry against fp64 torch, and what torch asks of an operator, on the CPU."""

import functools
import itertools
import os
import pathlib
import re
import unittest

import eager
import layers
import operators
import tessera
import tessera.ops
import tier
import torch
from tessera import layer_call, library, options


class Fp32Entries(layers.Entries, unittest.TestCase):
    def test_token_rounding_and_expert_choice(self):
        x, _, _, d_o = self.data(tokens=40, experts=5)
        inputs = {"x": x, "w_router": self.w_router(5), **self.weights()}
        choices = [{"rounding": rounding, "tile": 8} for rounding in options.ROUNDINGS[1:]]
        for choice in choices:
            if choice["rounding"] in ("sr-f", "nr-s"):
                choice |= {"seed": 3, "step": 11}
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

    def test_column_chunks_save_workspace_and_change_no_bit(self):
        x, _, _, d_o = self.data(tokens=64)
        t = eager.leaves({"x": x, "w_router": self.w_router(5), **self.weights()})
        results = []
        for chunk in (0, 8, 5):
            tessera.ops.prepared_calls.here.prepared.clear()
            o = tessera.moe(*t.values(), top_k=3, column_chunk=chunk)
            gradients = torch.autograd.grad(o, list(t.values()), d_o)
            workspaces = [prepared.workspace for prepared in tessera.ops.prepared_calls.here.prepared.values()]
            results.append((workspaces, o, *gradients))
        for workspaces, *tensors in results[1:]:
            self.assertTrue(all(a < b for a, b in zip(workspaces, results[0][0], strict=True)), workspaces)
            for a, b in zip(tensors, results[0][1:], strict=True):
                self.assertTrue(torch.equal(a, b))
        with self.assertRaisesRegex(ValueError, "column_chunk=-1"):
            tessera.moe(*t.values(), top_k=3, column_chunk=-1)

    def test_autocast(self):
        x, ids, scores, d_o = self.data()
        t = eager.leaves({"x": x, "scores": scores, **self.weights()})
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o = tessera.routed_experts(t["x"], ids, t["scores"], t["w_up"], t["w_down"])
        self.assertIs(o.dtype, torch.bfloat16)
        o.backward(d_o.bfloat16())
        self.assertEqual([v.grad.dtype for v in t.values()], [torch.float32] * 4)

    def test_gradcheck(self):
        """Finite differences of the fp32 layer; the tolerance is that of fp32 differences, far below the values."""
        x, ids, scores, _ = self.data(tokens=4, top_k=2)
        w = self.weights(experts=5, intermediate=4)
        generator = torch.Generator().manual_seed(5)
        inputs = {"x": x, "scores": scores, **w}
        t = eager.leaves(inputs)
        d_o = torch.randn(4, 24, generator=generator)

        def loss(t):
            return (tessera.routed_experts(t["x"], ids, t["scores"], **layers.pick(t)).double() * d_o).sum()

        loss(t).backward()
        for name, tensor in inputs.items():
            direction = torch.randn(tensor.shape, generator=generator)
            step = 1e-2
            with torch.no_grad():
                ends = [loss({**inputs, name: tensor + sign * step * direction}) for sign in (1, -1)]
            slope = ((ends[0] - ends[1]) / (2 * step)).item()
            expected = (t[name].grad.double() * direction).sum().item()
            self.assertLess(abs(slope - expected), 2e-3 * max(abs(expected), 1), name)


class Bf16Entries(layers.Entries, unittest.TestCase):
    dtype = torch.bfloat16


@tier.deep
class Bf16Operators(operators.Operators, unittest.TestCase):
    dtype = torch.bfloat16


class Fp32Operators(operators.Operators, unittest.TestCase):
    routers = [
        *operators.Operators.routers,
        *[f"router={router} top_k=2 tile=4 rounding={rounding}" for rounding in options.ROUNDINGS[1:]
          for router in ("topk-softmax", "softmax-topk", "sigmoid-bias")],
        "router=expert-choice top_k=2", "router=expert-choice top_k=2 capacity=3"]

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
        original = tessera.ops.layer.prepared_forward
        self.addCleanup(setattr, tessera.ops.layer, "prepared_forward", original)
        tessera.ops.layer.prepared_forward = lambda tensors, *a: (
            seen.append([t.dtype for t in tensors if t is not None]) or original(tensors, *a))
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            self.routed(self.tensors)
        self.assertEqual(seen, [[torch.bfloat16, torch.int64, torch.float32, torch.bfloat16, torch.bfloat16]])

    def test_autocast_of_the_other_functions(self):
        """As of the layer: x, the weights and their biases are cast; selection bias and offsets are not."""
        x, w_router, w_up = self.tensors["x"].detach(), self.router.detach(), self.tensors["w_up"].detach()
        biases = {"b_router": torch.linspace(-1, 1, 5), "selection_bias": torch.linspace(1, -1, 5)}
        offsets, b_up = torch.tensor([0, 3, 3, 7, 9, 13]), torch.linspace(-1, 1, 80).view(5, 16)
        lower = [t.bfloat16() for t in (x, w_router, w_up, b_up)]
        for rows in (x, lower[0]):  # as torch's own linear layers hand it on
            with torch.autocast("cpu", dtype=torch.bfloat16):
                _, router = tessera.moe(rows, w_router, w_up, self.tensors["w_down"].detach(), top_k=2,
                                        router="sigmoid-bias", return_router=True, **biases)
                ids, weights, logits = tessera.route(rows, w_router, top_k=2, router="sigmoid-bias", **biases)
                c = tessera.grouped_gemm(rows, w_up, offsets, bias=b_up)
                dw = tessera.grouped_gemm_wgrad(c, rows.float(), offsets)
            self.assertTrue(torch.equal(logits, router.logits))
            self.assertTrue(torch.equal(ids, router.topk_ids))
            self.assertTrue(torch.equal(weights, router.topk_weights))
            self.assertTrue(torch.equal(c, tessera.grouped_gemm(lower[0], lower[2], offsets, bias=lower[3])))
            self.assertTrue(torch.equal(dw, tessera.grouped_gemm_wgrad(c, lower[0], offsets)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tessera.route(self.tensors["x"], self.router, top_k=2)[1].square().sum().backward()
            tessera.grouped_gemm(self.tensors["x"], self.tensors["w_up"], offsets).sum().backward()
        for tensor in (self.tensors["x"], self.router, self.tensors["w_up"]):
            self.assertIs(tensor.grad.dtype, torch.float32)

    def test_a_thread_keeps_its_workspace(self):
        here, prepared_calls = tessera.ops.prepared_calls.here, tessera.ops.prepared_calls
        expected = [self.routed(self.tensors), *self.gradients(self.routed(self.tensors))]
        kept, most = here.scratch.data_ptr(), max(prepared.workspace for prepared in here.prepared.values())
        self.assertGreaterEqual(here.scratch.numel(), most)
        self.addCleanup(setattr, prepared_calls, "SCRATCH_BYTES", prepared_calls.SCRATCH_BYTES)
        self.addCleanup(setattr, here, "scratch", here.scratch)
        for limit in (prepared_calls.SCRATCH_BYTES, 0):
            prepared_calls.SCRATCH_BYTES = limit
            here.forget()  # prepared calls hold the limit
            here.scratch[:] = 255  # NaN, whatever the type
            for got, wanted in zip([self.routed(self.tensors), *self.gradients(self.routed(self.tensors))], expected,
                                   strict=True):
                self.assertTrue(torch.equal(got, wanted))
            self.assertEqual(here.scratch.data_ptr(), kept)
            self.assertEqual(bool((here.scratch == 255).all()), limit == 0, "which workspace was used")

    def test_default_device(self):
        """Workspace of a layer on the CPU is there, wherever torch makes new tensors."""
        expected = self.routed(self.tensors)
        tessera.ops.prepared_calls.here.grow(0)
        with torch.device("meta"):
            self.assertTrue(torch.equal(self.routed(self.tensors), expected))

    def test_plans_do_not_grow_without_bound(self):
        for tokens in range(tessera.ops.prepared_calls.MAX_PREPARED + 10):
            tessera.routed_experts(torch.ones(1, 24), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1),
                                   self.tensors["w_up"].detach(), self.tensors["w_down"].detach(),
                                   alpha=1 + tokens / 7, activation="clamped-swiglu")
        self.assertLessEqual(len(tessera.ops.prepared_calls.here.prepared), tessera.ops.prepared_calls.MAX_PREPARED)


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


    def test_equal_options_have_equal_texts(self):
        """1 is True to a cache, so it must be True to the layer, whichever of them comes first."""
        for first in (1, True):
            layer_call._cached_text.cache_clear()
            for value in (first, 1, True):
                text = layer_call.options_text(router="sigmoid-bias", normalize_scores=value, limit=1)
                self.assertEqual(text, "limit=1.0 router=sigmoid-bias normalize_scores=True")
                self.assertIs(options.parse(text).normalize_scores, True)
        for changes, text in (({"normalize_scores": 2}, "normalize_scores=2: must be of type bool"),
                              ({"normalize_scores": "False"}, "normalize_scores=False: must be of type bool"),
                              ({"top_k": 2.5}, "top_k=2.5: must be of type int")):
            with self.assertRaisesRegex(ValueError, text):
                layer_call.options_text(**changes)


class Refusals(unittest.TestCase):
    """One line each: rule, value, remedy."""

    def setUp(self):
        self.x, self.ids, self.scores, _ = layers.data()
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
            "x: hidden 16, w_up: hidden [0-9]+ ": {"x": self.x[:, :16]},
            "x: dtype torch.int64; ": {"x": self.x.long()},
            "topk_ids: dtype torch.float32; int32 or int64": {"topk_ids": self.ids.float()},
            "x: rank 0": {"x": self.x[0, 0]},
            "topk_ids: rank 0": {"topk_ids": self.ids[0, 0], "topk_weights": self.scores[0, 0]},
            "topk_weights: rank 0": {"topk_ids": self.ids[0], "topk_weights": self.scores[0, 0]},
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

    def test_x_of_no_dimension(self):
        for call in (tessera.route, functools.partial(tessera.moe, w_up=self.w["w_up"], w_down=self.w["w_down"])):
            with self.assertRaisesRegex(ValueError, "^x: rank 0"):
                call(self.x[0, 0], w_router=self.x[:5], top_k=2)

    def test_other_devices(self):
        with self.assertRaisesRegex(ValueError, "^x is on meta, topk_ids on cpu, .* such as x.to"):
            self.routed(x=self.x.to("meta").double(), topk_ids=self.ids, activation="relu")

    def test_one_of_many_on_another_device(self):
        """An error, not results that nobody wrote."""
        offsets, w_router = torch.tensor([0, 3, 3, 7, 9, 13]), self.x[:5]
        calls = {
            "experts": (self.routed, {"x": self.x, "topk_ids": self.ids, "topk_weights": self.scores, **self.w}),
            "route": (functools.partial(tessera.route, top_k=2), {"x": self.x, "w_router": w_router}),
            "grouped_gemm": (tessera.grouped_gemm, {"a": self.x, "b": self.w["w_up"], "expert_offsets": offsets})}
        for call, (function, tensors) in calls.items():
            for name, tensor in tensors.items():
                for gradients in (False, True):
                    away = tensor.to("meta").requires_grad_(gradients and tensor.is_floating_point())
                    with self.subTest(call=call, name=name, gradients=gradients), \
                            self.assertRaisesRegex(ValueError, rf"^.*\b{name} (is )?on .* device; move .*$"):
                        function(**{**tensors, name: away})
        x, w_router = self.x.to("meta"), w_router.to("meta")
        self.assertEqual([result.device.type for result in tessera.route(x, w_router, top_k=2)], ["meta"] * 3)

    def test_types_that_are_not_served(self):
        """With names that users know, and none of what is not served."""
        served = "; Tessera stores bf16, on the CPU also fp32, and ids as int32 or int64; convert it"
        for dtype, error in ((torch.float16, NotImplementedError), (torch.float64, ValueError)):
            x, w = self.x.to(dtype), {name: tensor.to(dtype) for name, tensor in self.w.items()}
            for call in (lambda: self.routed(x=x, **w), lambda: tessera.route(x, x[:5], top_k=2),
                         lambda: tessera.grouped_gemm(x, w["w_up"], torch.arange(6))):
                with self.assertRaisesRegex(error, f"^[xa]: dtype {dtype}{served}$"):
                    call()



class Sizes(unittest.TestCase):
    """Sizes that Python calculates itself, as they may be symbolic, and that the library knows as well."""

    def test_elements_of_the_routing_tables(self):
        for router, rounding in itertools.product(options.ROUTERS, options.ROUNDINGS):
            if rounding != "none" and router in ("given", "expert-choice"):
                continue
            for tokens, experts in itertools.product((0, 1, 6, 31), range(8, 12)):
                chosen = options.Options(router=router, rounding=rounding, top_k=3,
                                         tile=128 if rounding == "none" else 4,
                                         groups=1 if router == "group-limited" else 0)
                desc = chosen.desc(top_k=3, tokens=tokens, hidden=8, intermediate=8, experts=experts,
                                   dtype=library.FP32, ids_dtype=library.INT32, separate=False, bias=False)
                slots = chosen.slots(tokens, experts, 3)
                with self.subTest(router=router, rounding=rounding, tokens=tokens, experts=experts):
                    self.assertEqual(4 * chosen.routing_elements(tokens, slots, experts),
                                     library.routing_bytes(desc))


if __name__ == "__main__":
    unittest.main()

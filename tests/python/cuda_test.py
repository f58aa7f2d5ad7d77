# SPDX-License-Identifier: Apache-2.0
"""The layers on a GPU: entries, operators and module as on the CPU, and what only a GPU has: streams, graphs, several
devices, memory of torch's allocator, bad values on the device.
"""

import subprocess
import sys
import textwrap
import unittest

import eager
import gpu
import integrations_test
import layers
import module_test
import operators
import tessera
import tessera.ops
import torch
from tessera import library


class OnGpu(layers.Layer):
    device, dtype = "cuda", torch.bfloat16


class SmallEntries(OnGpu, layers.Entries, unittest.TestCase):
    """Sizes that only the plain kernels serve."""


class FastEntries(OnGpu, layers.Entries, unittest.TestCase):
    tokens, hidden, intermediate = 300, 256, 128


class Operators(OnGpu, operators.Operators, unittest.TestCase):
    tokens, hidden, intermediate, compiler = 300, 256, 128, "inductor"


class Module(module_test.Module):
    device, dtype, compiler = "cuda", torch.bfloat16, "inductor"


class Torchtitan(integrations_test.Torchtitan):
    """fp32 parameters and rows, which it computes in bf16."""

    device, relative = "cuda", 2 * eager.RELATIVE[torch.bfloat16]


class Megatron(integrations_test.Megatron):
    device, dtype = "cuda", torch.bfloat16


class RoutedLayer(OnGpu, unittest.TestCase):
    """One layer with a router, and what it gives when nothing special happens."""

    tokens, hidden, intermediate = 300, 256, 128

    def setUp(self):
        x, _, _, self.d_o = self.data()
        self.tensors = eager.leaves({"x": x, "w_router": self.w_router(16), **self.weights(experts=16)})
        self.expected = self.both(self.tensors)

    def layer(self, t, **options):
        return tessera.moe(t["x"], t["w_router"], t["w_up"], t["w_down"], top_k=4, **options)

    def both(self, t):
        """o and all gradients."""
        o = self.layer(t)
        return (o.detach(), *torch.autograd.grad(o, list(t.values()), self.d_o))

    def assert_expected(self, got, what=""):
        for name, a, b in zip(("o", *self.tensors), got, self.expected, strict=True):
            self.assertTrue(torch.equal(a, b), f"{what} {name}: {(a.float() - b.float()).abs().max()}")


class Streams(RoutedLayer):
    def test_nothing_waits_for_the_device(self):
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 30)  # half a second
        got = self.both(self.tensors)
        self.assertFalse(torch.cuda.current_stream().query(), "a call waited")
        torch.cuda.synchronize()
        self.assert_expected(got)

    def test_statistics_and_losses_do_not_wait(self):
        module = tessera.MoE(256, 128, 16, 4, router=tessera.RouterOptions("sigmoid-bias", selection_bias=True),
                             losses=tessera.Losses(balance=0.01, z=0.01)).to("cuda", torch.bfloat16)
        x = self.tensors["x"].detach()
        module(x, return_router=True)
        torch.cuda.set_sync_debug_mode("error")
        try:
            o, router = module(x, return_router=True)
            (o.float().square().mean() + module.auxiliary_loss(router)).backward()
            module.update_selection_bias(router.counts)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.assertEqual(int(router.counts.sum()), 4 * self.tokens)

    def test_calls_run_on_the_current_stream(self):
        """Inputs come into being late on a stream of their own: calls elsewhere would meet NaN."""
        streams = [torch.cuda.Stream() for _ in range(4)]
        late = [{name: torch.full_like(t, float("nan")).requires_grad_() for name, t in self.tensors.items()}
                for _ in streams]
        torch.cuda.synchronize()
        results = []
        for stream, t in zip(streams, late, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1 << 26)
                with torch.no_grad():
                    for name, tensor in self.tensors.items():
                        t[name].copy_(tensor)
                results.append(self.both(t))
        torch.cuda.synchronize()
        for number, got in enumerate(results):
            self.assert_expected(got, f"stream {number}")

    @unittest.skipIf(torch.cuda.device_count() < 2, "needs two GPUs; run on a machine with them")
    def test_the_tensors_say_which_device(self):
        t = {name: tensor.detach().to("cuda:1").requires_grad_() for name, tensor in self.tensors.items()}
        o = self.layer(t)
        gradients = torch.autograd.grad(o, list(t.values()), self.d_o.to("cuda:1"))
        self.assertEqual(torch.cuda.current_device(), 0)
        self.assert_expected([tensor.to("cuda:0") for tensor in (o, *gradients)])

    @unittest.skipIf(torch.cuda.device_count() < 2, "needs two GPUs; run on a machine with them")
    def test_x_on_another_gpu(self):
        with self.assertRaisesRegex(ValueError, r"x is on cuda:1, w_\w+ on cuda:0, .*x.to\('cuda:0'\)"):
            self.layer({**self.tensors, "x": self.tensors["x"].detach().to("cuda:1")})


class Graphs(RoutedLayer):
    def captured(self, run):
        """A graph of run(), and what run returned during the capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # contexts and prepared calls come into being outside the capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
        return graph, results

    def test_replays_follow_new_routing(self):
        fixed = {name: torch.zeros_like(t).requires_grad_() for name, t in self.tensors.items()}
        inference, (o,) = self.captured(lambda: [self.layer({n: t.detach() for n, t in fixed.items()})])
        training, results = self.captured(lambda: self.both(fixed))
        for other in (False, True):
            with torch.no_grad():
                for name, tensor in self.tensors.items():
                    fixed[name].copy_(tensor.flip(0) if other and name == "x" else tensor)
            self.expected = self.both(fixed)
            for graph in (inference, training):
                graph.replay()
            self.assertTrue(torch.equal(o, self.expected[0]))
            self.assert_expected(results, f"other tokens: {other}")

    def test_compiled_into_graphs(self):
        module = tessera.MoE(256, 128, 16, 4).to("cuda", torch.bfloat16)
        compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead")
        for seed in range(4):
            x = self.data(seed=seed)[0]
            torch.compiler.cudagraph_mark_step_begin()
            o = compiled(x)
            o.backward(self.d_o)
            got = [o.detach().clone(), *[p.grad.clone() for p in module.parameters()]]
            module.zero_grad()
            module(x).backward(self.d_o)
            wanted = [module(x).detach(), *[p.grad.clone() for p in module.parameters()]]
            module.zero_grad()
            for a, b in zip(got, wanted, strict=True):
                eager.check_close(self, f"call {seed}", a, b, self.relative)

    def test_graphed_module(self):
        module = tessera.MoE(256, 128, 16, 4).to("cuda", torch.bfloat16)
        x = self.tensors["x"].detach()
        o = module(x)
        wanted = torch.autograd.grad(o, list(module.parameters()), self.d_o)
        o = o.detach()  # what is left of its graph would tie the parameters to this stream
        graphed = torch.cuda.make_graphed_callables(module, (torch.zeros_like(x),))
        again = graphed(x)
        self.assertTrue(torch.equal(again, o))
        for a, b in zip(torch.autograd.grad(again, list(module.parameters()), self.d_o), wanted, strict=True):
            self.assertTrue(torch.equal(a, b))


class Memory(RoutedLayer):
    def requested(self, which: str) -> int:
        return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]

    def test_x_h_and_tables_are_kept(self):
        element, slots = 2, 4 * self.tokens
        before = self.requested("current")
        torch.cuda.reset_peak_memory_stats()
        o = self.layer(self.tensors)
        tables = 4 * tessera.options.parse("router=topk-softmax top_k=4").routing_elements(self.tokens, slots, 16)
        results = element * (o.numel() + slots * 2 * self.intermediate) + tables
        self.assertEqual(self.requested("current") - before, results)
        self.assertEqual(self.requested("peak") - before, results + self.workspace(library.ForwardArgs))
        gradients = torch.autograd.grad(o, list(self.tensors.values()), self.d_o)
        made = sum(g.numel() * g.element_size() for g in gradients)
        self.assertEqual(self.requested("current") - before, made + element * o.numel())

    def workspace(self, kind) -> int:
        """Of training's prepared calls for this layer in this thread."""
        sizes = {prepared.workspace for prepared in tessera.ops.prepared_calls.here.prepared.values()
                 if isinstance(prepared.args, kind) and prepared.desc.save == 0 and prepared.desc.top_k == 4}
        return sizes.pop() if len(sizes) == 1 else self.fail(f"workspaces of {sizes} bytes")

    def test_nothing_is_kept_without_gradients(self):
        before = self.requested("current")
        with torch.no_grad():
            o = self.layer(self.tensors)
        self.assertEqual(self.requested("current") - before, 2 * o.numel())


class Precision(RoutedLayer):
    """precision="fp8": o and gradients near those of bf16, half the bytes saved, training in a captured graph."""

    intermediate = 256

    def fp8(self, t, **options):
        o = self.layer(t, precision="fp8", **options)
        return (o.detach(), *torch.autograd.grad(o, list(t.values()), self.d_o))

    def noise_db(self, ref, out) -> float:
        return 20 * torch.log10(ref.double().norm() / (ref.double() - out.double()).norm()).item()

    def test_results_have_the_noise_of_e4m3(self):
        got = self.fp8(self.tensors)
        for name, plain, out in zip(("o", *self.tensors), self.expected, got, strict=True):
            least = 18 if name == "w_router" else 22
            self.assertGreater(self.noise_db(plain, out), least, name)
            self.assertLess(self.noise_db(plain, out), 34, f"{name} is that of bf16")
        on_cpu = eager.leaves({name: t.detach().cpu() for name, t in self.tensors.items()})
        o = self.layer(on_cpu, precision="fp8")
        self.assertGreater(self.noise_db(o.detach(), got[0].cpu()), 34)

    def test_other_ways_have_equal_bits(self):
        got = self.fp8(self.tensors)
        for other in (self.fp8(self.tensors), self.fp8(self.tensors, save="x")):
            for name, a, b in zip(("o", *self.tensors), got, other, strict=True):
                self.assertTrue(torch.equal(a, b), name)
        with torch.no_grad():
            self.assertTrue(torch.equal(self.layer(self.tensors, precision="fp8"), got[0]))

    def test_codes_and_scales_are_kept(self):
        def kept(**options) -> int:
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            o = self.layer(self.tensors, **options)
            return torch.cuda.memory_stats()["requested_bytes.all.current"] - before - 2 * o.numel()

        kept(), kept(precision="fp8")
        slots = 4 * self.tokens
        tables = 4 * tessera.options.parse("router=topk-softmax top_k=4").routing_elements(self.tokens, slots, 16)
        values = self.tokens * self.hidden + slots * 2 * self.intermediate
        self.assertEqual(kept(), 2 * slots * 2 * self.intermediate + tables)  # x is the caller's
        self.assertEqual(kept(precision="fp8"), 33 * values // 32 + tables)

    def test_refusals_name_the_option(self):
        t = self.tensors
        for options, text in (({"precision": "mxfp8"}, "precision=mxfp8: Hopper"),
                              ({"precision": "fp8", "scales": "pow2"}, "pow2_scales with precision=fp8"),
                              ({"precision": "fp8", "activation": "geglu"}, "activation=geglu with precision=fp8")):
            with self.assertRaisesRegex(NotImplementedError, text):
                self.layer(t, **options)

    def test_codes_of_weights_have_the_bits_of_calls_that_quantise(self):
        got = self.fp8(self.tensors)
        codes = tessera.quantise_weights(self.tensors["w_up"], self.tensors["w_down"])
        on_cpu = tessera.quantise_weights(*[self.tensors[name].detach().cpu() for name in ("w_up", "w_down")])
        for a, b in zip(codes.of(self.tensors["w_up"], None, self.tensors["w_down"]), (
                on_cpu.up, on_cpu.up_scales, on_cpu.down, on_cpu.down_scales, on_cpu.up_transposed,
                on_cpu.down_transposed), strict=True):
            self.assertTrue(torch.equal(a.cpu(), b))
        for options in ({}, {}, {"save": "x"}):  # the second call is remembered
            for name, a, b in zip(("o", *self.tensors), got, self.fp8(self.tensors, weight_codes=codes, **options),
                                  strict=True):
                self.assertTrue(torch.equal(a, b), name)
        with torch.no_grad():
            self.assertTrue(torch.equal(self.layer(self.tensors, precision="fp8", weight_codes=codes), got[0]))
            self.tensors["w_up"].mul_(2)
        with self.assertRaisesRegex(ValueError, "w_up has changed since they were made"):
            self.layer(self.tensors, precision="fp8", weight_codes=codes)

    def test_auto_takes_fp8_for_many_rows(self):
        """1536 and more per expert where calls quantise the weights, 640 where codes are there."""
        torch.manual_seed(0)
        layer = tessera.MoE(2048, 1536, 4, 4, dtype=torch.bfloat16, device="cuda", precision="auto")
        native = tessera.MoE(2048, 1536, 4, 4, dtype=torch.bfloat16, device="cuda")
        fp8 = tessera.MoE(2048, 1536, 4, 4, dtype=torch.bfloat16, device="cuda", precision="fp8")
        for other in (native, fp8):
            other.load_state_dict(layer.state_dict())
        x = torch.randn(1536, 2048, device="cuda").bfloat16()

        def results(layer, x):
            x = x.clone().requires_grad_()
            o = layer(x)
            return [o, *torch.autograd.grad(o.float().square().sum(), [x, *layer.parameters()])]

        for codes, tokens, taken in ((False, 1536, fp8), (False, 1535, native), (True, 640, fp8),
                                     (True, 639, native)):
            with self.subTest(codes=codes, tokens=tokens):
                layer.weight_codes = None
                if codes:
                    self.assertIsNotNone(layer.quantise_weights())
                for a, b in zip(results(layer, x[:tokens]), results(taken, x[:tokens]), strict=True):
                    self.assertTrue(torch.equal(a, b))
        small = tessera.MoE(256, 256, 16, 4, dtype=torch.bfloat16, device="cuda", precision="auto")
        self.assertIsNone(small.quantise_weights())

    def test_a_step_in_a_graph_quantises_the_weights_of_its_replay(self):
        layer = tessera.MoE(256, 256, 16, 4, dtype=torch.bfloat16, device="cuda", precision="fp8")
        x = self.tensors["x"].detach()

        def run():
            layer.quantise_weights(transposed=False)
            with torch.no_grad():
                return layer(x)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = run()
        with torch.no_grad():
            layer.w_down.mul_(2)
        graph.replay()
        self.assertTrue(torch.equal(o, run()))

    def test_a_module_learns(self):
        torch.manual_seed(0)
        layers = [tessera.MoE(256, 256, 16, 4, dtype=torch.bfloat16, device="cuda", precision=name)
                  for name in ("native", "fp8")]
        layers[1].load_state_dict(layers[0].state_dict())
        x, target = (torch.randn(512, 256, device="cuda").bfloat16() for _ in range(2))
        losses = []
        for layer in layers:
            optimizer = torch.optim.AdamW(layer.parameters(), lr=2e-3)
            for _ in range(60):
                loss = (layer(x).float() - target.float()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        self.assertLess(losses[0], 0.9)
        self.assertLess(abs(losses[1] - losses[0]), 0.02)


class Values(OnGpu, unittest.TestCase):
    def test_bad_offsets_are_reported_once(self):
        w, x = self.weights(), self.data()[0]
        torch.cuda.synchronize()
        tessera.check_device_values()
        tessera.grouped_experts(x, torch.tensor([0, 9, 3, 7, 9, 13], device="cuda"), **w)
        torch.cuda.synchronize()
        with self.assertRaisesRegex(ValueError, r"expert_offsets .*\[2\]: a value of 3"):
            tessera.check_device_values()
        tessera.check_device_values("cuda:0")

    def test_autocast(self):
        x, ids, scores, d_o = layers.data(hidden=256)
        t = {name: v.cuda().requires_grad_() for name, v in
             {"x": x, "scores": scores, **eager.weights(hidden=256, intermediate=128)}.items()}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            o = tessera.routed_experts(t["x"], ids.cuda(), t["scores"], t["w_up"], t["w_down"])
        self.assertIs(o.dtype, torch.bfloat16)
        o.backward(d_o.cuda().bfloat16())
        self.assertEqual([v.grad.dtype for v in t.values()], [torch.float32] * 4)

    def test_what_is_refused(self):
        x, ids, scores, _ = self.data()
        w = self.weights()
        for dtype in (torch.float32, torch.float16):
            other = {name: t.to(dtype) for name, t in w.items()}
            with self.assertRaisesRegex(NotImplementedError, "stores bf16"):
                tessera.routed_experts(x.to(dtype), ids, scores, **other)
        with self.assertRaisesRegex(NotImplementedError, "stores bf16"):
            tessera.grouped_gemm(x.float(), w["w_up"].float(), torch.tensor([0, 3, 3, 7, 9, 13], device="cuda"))
        with self.assertRaisesRegex(ValueError, "x is on cuda:0, w_down on cpu, "):
            tessera.routed_experts(x, ids, scores, w["w_up"], w["w_down"].cpu())


class FirstCalls(unittest.TestCase):
    """Of a process: each test is one of its own."""

    LAYER = """
        import os, sys, torch, tessera
        torch.manual_seed(0)
        layer = tessera.MoE(256, 128, 8, 2, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        def run():
            o = layer(x)
            return [o, *torch.autograd.grad(o.float().square().sum(), [x, *layer.parameters()])]
        """

    def check(self, script: str) -> None:
        text = textwrap.dedent(self.LAYER) + textwrap.dedent(script)
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_inference_in_a_capture(self):
        self.check("""
            graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph):
                o = layer(x)
            graph.replay()
            with torch.no_grad():
                expected = layer(x)
            assert expected.abs().max() > 0 and torch.equal(o, expected)
            """)

    def test_training_in_a_capture(self):
        self.check("""
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = run()
            graph.replay()
            for got, expected in zip(captured, run(), strict=True):
                assert expected.abs().max() > 0 and torch.equal(got, expected)
            """)

    def test_a_forked_child(self):
        """Hears of spawn, from torch or from the library."""
        self.check("""
            run()
            torch.cuda.synchronize()
            child = os.fork()
            if child == 0:
                try:
                    run()
                except Exception as error:
                    print(error, flush=True)
                    os._exit(0 if "spawn" in str(error) else 1)
                os._exit(2)
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            """)


if __name__ == "__main__":
    gpu.main()

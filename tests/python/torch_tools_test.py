# SPDX-License-Identifier: Apache-2.0
"""What tools of torch ask of operators: FLOPs, tensors on meta, programs that are saved and load in another process."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest

import eager
import tessera
import tier
import torch
from tessera.ops import flops
from torch._subclasses import fake_tensor
from torch.utils import flop_counter

T, D, N, E, K = 6, 64, 32, 8, 2
UP_AND_DOWN = 2 * T * K * N * D  # of a projection of width n
ROUTER = 2 * T * D * E


def counted(function):
    with flop_counter.FlopCounterMode(display=False) as counter:
        function()
    return {str(op).removeprefix("tessera."): count for op, count in counter.get_flop_counts()["Global"].items()}


def tensors(width=2, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (T, D), "w_router": (E, D), "w_up": (E, width * N, D), "w_down": (E, D, N), "scores": (T, K)}
    made = {name: torch.randn(shape, generator=generator).to(device) for name, shape in shapes.items()}
    return eager.leaves({**made, "scores": made["scores"].sigmoid()})


class Flops(unittest.TestCase):
    """The numbers of work.hpp: 6*T*K*n*d of a gated layer and 2*T*d*E of its router, and twice that backward."""

    def setUp(self):
        self.t = tensors()
        self.ids = torch.rand(T, E, generator=torch.Generator().manual_seed(1)).topk(K).indices
        self.offsets = torch.tensor([0, 1, 1, 2, 4, 4, 4, 5, 5])  # 5 of 6 rows that are allocated

    def moe(self, **options):
        t = self.t
        return tessera.moe(t["x"], t["w_router"], t["w_up"], t["w_down"], top_k=K, **options)

    def routed(self, **options):
        t = self.t
        return tessera.routed_experts(t["x"], self.ids, t["scores"], t["w_up"], t["w_down"], **options)

    def frozen(self, *names):
        for name in names:
            self.t[name].requires_grad_(False)

    def test_layers_with_a_router(self):
        forward = 6 * T * K * N * D + ROUTER
        self.assertEqual(counted(lambda: self.moe().sum().backward()),
                         {"moe_forward": forward, "moe_backward": 2 * forward})
        with torch.no_grad():
            self.assertEqual(counted(self.moe), {"moe_inference": forward})
        self.assertEqual(counted(lambda: self.moe(save="x").sum().backward())["moe_backward"],
                         2 * forward + 4 * T * K * N * D)  # h once more
        self.assertEqual(counted(lambda: self.moe(router="expert-choice", capacity=4))["moe_forward"],
                         6 * E * 4 * N * D + ROUTER)
        self.assertEqual(counted(lambda: self.moe(rounding="up", tile=4).sum().backward()),
                         {"moe_forward": forward, "moe_backward": 2 * forward})

    def test_routing_that_is_given(self):
        forward = 6 * T * K * N * D
        self.assertEqual(counted(lambda: self.routed().sum().backward()),
                         {"moe_forward": forward, "moe_backward": 2 * forward})

    def test_activations_without_a_gate(self):
        self.t = tensors(width=1)
        self.assertEqual(counted(lambda: self.routed(activation="relu2").sum().backward()),
                         {"moe_forward": 2 * UP_AND_DOWN, "moe_backward": 4 * UP_AND_DOWN})

    def test_what_nobody_wants_is_not_counted(self):
        self.frozen("w_up", "w_router")
        self.assertEqual(counted(lambda: self.routed().sum().backward())["moe_backward"], 4 * UP_AND_DOWN)
        self.assertEqual(counted(lambda: self.moe().sum().backward())["moe_backward"], 4 * UP_AND_DOWN + ROUTER)
        self.frozen("x", "scores")
        self.assertEqual(counted(lambda: self.routed().sum().backward())["moe_backward"], 2 * UP_AND_DOWN)

    def test_gate_and_up_apart(self):
        t = self.t
        gate, up = (part.contiguous().detach().requires_grad_() for part in t["w_up"].detach().chunk(2, dim=1))

        def layer():
            return tessera.routed_experts(t["x"], self.ids, t["scores"], up, t["w_down"], w_gate=gate)

        forward = 6 * T * K * N * D
        self.assertEqual(counted(lambda: layer().sum().backward()),
                         {"moe_forward": forward, "moe_backward": 2 * forward})
        gate.requires_grad_(False)
        self.assertEqual(counted(lambda: layer().sum().backward())["moe_backward"], 5 * UP_AND_DOWN)

    def test_rows_that_are_grouped_count_as_allocated(self):
        t = self.t
        main = [torch.zeros_like(t["w_up"]), None, torch.zeros_like(t["w_down"]), None, None, None]
        for buffers, backward in ((None, "moe_backward"), (tuple(main), "moe_backward_accumulate")):
            def layer(buffers=buffers):
                return tessera.grouped_experts(t["x"], self.offsets, t["w_up"], t["w_down"], buffers=buffers)

            # Weight gradients that go into a buffer are no results of the operator, but they are made.
            self.assertEqual(counted(lambda: layer().sum().backward()),
                             {"moe_forward": 6 * T * N * D, backward: 12 * T * N * D})

    def test_building_blocks(self):
        t = self.t
        self.assertEqual(counted(lambda: tessera.route(t["x"], t["w_router"], top_k=K)), {"route": ROUTER})
        gemm = 2 * T * 2 * N * D
        self.assertEqual(counted(lambda: tessera.grouped_gemm(t["x"], t["w_up"], self.offsets).sum().backward()),
                         {"grouped_gemm": 2 * gemm, "grouped_gemm_wgrad": gemm})
        x = t["x"].detach()
        self.assertEqual(counted(lambda: tessera.grouped_gemm_wgrad(x, x[:, :8], self.offsets)),
                         {"grouped_gemm_wgrad": 2 * T * D * 8})
        self.assertEqual(counted(lambda: tessera.z_loss(x[:, :E])).get("router_loss"), 0)

    def test_every_operator_has_a_formula(self):
        names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("tessera::")}
        self.assertEqual(set(flops.FORMULAS), names)


def trained(make, device):
    """Shapes of the output and of every gradient of a layer that `make` makes, its input on `device`."""
    layer = make()
    x = torch.randn(2, T, D, device=device, requires_grad=True)
    o, router = layer(x, return_router=True)
    (o.sum() + layer.auxiliary_loss(router)).backward()
    shapes = {name: tuple(p.grad.shape) for name, p in layer.named_parameters()}
    return {"o": tuple(o.shape), "x": tuple(x.grad.shape), "logits": tuple(router.logits.shape),
            "ids": tuple(router.topk_ids.shape), **shapes}, o


class Meta(unittest.TestCase):
    """Shapes without memory, forward and backward: modules on meta, under torch.device("meta"), and fake tensors."""

    def module(self, router=None, **options):
        return tessera.MoE(D, N, E, K, bias=True, losses=tessera.Losses(balance=0.1, z=0.1),
                           router=router or tessera.RouterOptions(bias=True), shared=tessera.SharedExpert(16),
                           **options)

    def test_modules(self):
        for options in ({}, {"save": "x"}, {"activation": "relu2"},
                        {"router": tessera.RouterOptions("softmax-topk", bias=True)},
                        {"router": tessera.RouterOptions("sigmoid-bias", bias=True, selection_bias=True)}):
            with self.subTest(**options):
                expected, _ = trained(lambda options=options: self.module(**options), "cpu")

                def on_meta(options=options):
                    with torch.device("meta"):
                        return self.module(**options)

                for make in (on_meta, lambda options=options: self.module(device="meta", **options)):
                    shapes, o = trained(make, "meta")
                    self.assertEqual(shapes, expected)
                    self.assertTrue(o.is_meta)
                    with torch.no_grad():
                        self.assertEqual(make()(torch.empty(T, D, device="meta")).shape, (T, D))
                with fake_tensor.FakeTensorMode():
                    shapes, o = trained(lambda options=options: self.module(**options), "cpu")
                    self.assertIsInstance(o, fake_tensor.FakeTensor)
                self.assertEqual(shapes, expected)

    def test_functions(self):
        """Every function, with the shapes that it gives on the CPU."""
        ids, offsets = torch.zeros(T, K, dtype=torch.int64), torch.tensor([0, 1, 1, 2, 4, 4, 4, 5, 6])
        counts = torch.full((E,), 3, dtype=torch.int32)

        def results(device):
            t = tensors(device=device)
            x, up, down = t["x"], t["w_up"], t["w_down"]
            here = offsets.to(device)
            made = [tessera.routed_experts(x, ids.to(device), t["scores"], up, down),
                    tessera.grouped_experts(x, here, up, down, row_scores=t["scores"][:, 0]),
                    tessera.route(x, t["w_router"], top_k=K)[1], tessera.grouped_gemm(x, up, here),
                    tessera.load_balancing_loss(x[:, :E], counts.to(device))]
            sum(o.sum() for o in made).backward()
            made.append(tessera.grouped_gemm_wgrad(x.detach(), x.detach(), here))
            made.append(tessera.selection_bias_update(torch.zeros(E, device=device), counts.to(device)))
            return [(tuple(o.shape), o.dtype) for o in (*made, *[leaf.grad for leaf in t.values()])]

        self.assertEqual(results("meta"), results("cpu"))

    def test_main_grad(self):
        layer = tessera.MoE(D, N, E, K, main_grad=True, device="meta")
        layer.w_up.main_grad = torch.zeros_like(layer.w_up)
        layer(torch.randn(T, D, device="meta")).sum().backward()
        self.assertIsNone(layer.w_up.grad)
        self.assertEqual(layer.w_down.grad.shape, (E, D, N))

    def test_some_tensors_on_meta(self):
        t = tensors()
        for name in ("x", "w_up"):
            mixed = {**t, name: t[name].detach().to("meta")}
            with self.assertRaisesRegex(ValueError, "meta"):
                tessera.moe(mixed["x"], t["w_router"], mixed["w_up"], t["w_down"], top_k=K)


class Program(torch.nn.Module):
    """A layer as users have it: a module of theirs around it, with the router's results in use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = tessera.MoE(D, N, E, K, shared=tessera.SharedExpert(16),
                                 router=tessera.RouterOptions("sigmoid-bias", selection_bias=True))
        with torch.no_grad():
            self.layer.selection_bias[1] = 5.0

    def forward(self, x):
        o, router = self.layer(x, return_router=True)
        return o, router.topk_ids, tessera.z_loss(router.logits)


class SavedPrograms(unittest.TestCase):
    """A fresh process that imports tessera alone, before or after torch, loads and runs what another one saved."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.program, self.x = Program(), torch.randn(9, D, generator=torch.Generator().manual_seed(2))
        self.expected = self.program(self.x)
        self.assertGreater(self.expected[0].abs().min(), 0)
        torch.save(self.x, self.folder / "x")

    def exported(self, **more):
        return torch.export.export(self.program, (self.x,), dynamic_shapes={"x": {0: torch.export.Dim("T", min=2)}},
                                   **more)

    def elsewhere(self, imports: str, load: str):
        """The results of a fresh process. The text has to run without anything else of tessera's being used."""
        code = f"""
            {imports}
            program = {load}
            torch.save([result.detach() for result in program(torch.load({str(self.folder / 'x')!r}))],
                       {str(self.folder / 'results')!r})
            """
        done = subprocess.run([sys.executable, "-B", "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True,
                              text=True, check=False, env=os.environ)
        self.assertEqual(done.returncode, 0, done.stderr)
        return torch.load(self.folder / "results")

    def load_exported(self, imports: str):
        path = self.folder / "program.pt2"
        torch.export.save(self.exported(), path)
        results = self.elsewhere(imports, f"torch.export.load({str(path)!r}).module()")
        for result, expected in zip(results, self.expected, strict=True):
            self.assertTrue(torch.equal(result, expected))

    def test_exported_programs_load(self):
        self.load_exported("import tessera, torch")

    @tier.deep
    def test_exported_programs_load_after_torch(self):
        self.load_exported("import torch, tessera")

    @tier.deep  # Inductor compiles for half a minute
    def test_programs_compiled_ahead_of_time_load(self):
        if shutil.which("g++") is None:
            self.skipTest("no g++, with which Inductor compiles; apt-get install g++")
        path = self.folder / "compiled.pt2"
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(self.exported(), package_path=str(path))
        results = self.elsewhere("import tessera, torch, torch._inductor",
                                 f"torch._inductor.aoti_load_package({str(path)!r})")
        for name, result, expected in zip(("o", "ids", "loss"), results, self.expected, strict=True):
            eager.check_close(self, name, result, expected, 1e-5)

    def test_importing_tessera_does_not_import_torch(self):
        code = "import sys, importlib.util as u, tessera; u.find_spec('torch'); assert 'torch' not in sys.modules"
        done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, check=False,
                              env=os.environ)
        self.assertEqual(done.returncode, 0, done.stderr)


class Autocast(unittest.TestCase):
    """Under autocast the experts are computed in bf16 and a router in fp32 stays so, in its gradient too."""

    def test_the_router_stays_in_fp32(self):
        t = tensors()
        logits = t["x"].detach().bfloat16().double() @ t["w_router"].detach().double().mT
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o, router = tessera.moe(t["x"], t["w_router"], t["w_up"], t["w_down"], top_k=K, return_router=True)
            alone = tessera.route(t["x"], t["w_router"], top_k=K)[2]
            module = tessera.MoE(D, N, E, K)
            by_module = module(t["x"], return_router=True)[1].logits
        self.assertIs(o.dtype, torch.bfloat16)
        for name, got in (("moe", router.logits), ("route", alone)):
            eager.check_close(self, name, got, logits, 1e-5)  # weights rounded to bf16 are off by 2e-3
        module_logits = t["x"].detach().bfloat16().double() @ module.w_router.detach().double().mT
        eager.check_close(self, "MoE", by_module, module_logits, 1e-5)
        (d_router,) = torch.autograd.grad(router.logits.square().sum(), t["w_router"])
        self.assertIs(d_router.dtype, torch.float32)
        eager.check_close(self, "d_router", d_router, 2 * logits.mT @ t["x"].detach().bfloat16().double(), 1e-5)
        (d_up,) = torch.autograd.grad(tessera.z_loss(by_module) + module(t["x"]).sum(), module.w_up)
        self.assertGreater(d_up.abs().max(), 0)


class Opcheck(unittest.TestCase):
    """torch.library.opcheck of every operator; operators.py checks the layer's in both storage types, and on GPUs."""

    def test_every_operator(self):
        t, none = tensors(), None
        x, up, down, router = t["x"], t["w_up"], t["w_down"], t["w_router"]
        ids = torch.rand(T, E, generator=torch.Generator().manual_seed(1)).topk(K).indices
        offsets, counts = torch.tensor([0, 1, 1, 2, 4, 4, 4, 5, 6]), torch.full((E,), 3, dtype=torch.int32)
        weights = (up, none, down, none, none, none)
        given = (x, ids, t["scores"], *(none,) * 5, *weights, "")
        routed = (x, none, none, router, *(none,) * 4, *weights, f"router=softmax-topk top_k={K} logits=True")
        plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in given]
        o, h, routing = torch.ops.tessera.moe_forward.default(*plain)
        saved = (torch.ones_like(o), plain[0], h, routing, none, none, *plain[8:14], none)
        buffers = [a if a is None else torch.zeros_like(a) for a in plain[8:14]]
        logits = torch.randn(T, E, requires_grad=True)
        cases = [("moe_forward", given), ("moe_forward", routed), ("moe_inference", plain),
                 ("moe_backward", (*saved, "", 0b1010011)),
                 ("moe_backward_accumulate", (*saved, *buffers, "", 0b11)),
                 ("route", (x, router, none, none, f"router=softmax-topk top_k={K}")),
                 ("router_loss", (logits, counts, "topk-softmax", 0.5, 0.25, True)),
                 ("router_loss", (logits.detach(), none, "sigmoid-bias", 0.0, 0.25, False)),
                 ("update_selection_bias", (torch.zeros(E), counts, 0.1, True)),
                 ("grouped_gemm", (x, up, none, offsets, False)),
                 ("grouped_gemm_wgrad", (x.detach(), x.detach(), offsets)),
                 ("quantise_weights", (torch.ones(2, 256, 128).bfloat16(), none, torch.ones(2, 128, 128).bfloat16(),
                                       "precision=fp8", True))]
        self.assertEqual({name for name, _ in cases}, set(flops.FORMULAS))
        for name, arguments in cases:
            # What returns a list and writes to its arguments has no functional form, and is for eager mode alone.
            eager_only = {"test_utils": ("test_schema", "test_faketensor", "test_autograd_registration")}
            with self.subTest(operator=name):
                torch.library.opcheck(getattr(torch.ops.tessera, name).default, arguments,
                                      **eager_only if name == "moe_backward_accumulate" else {})


if __name__ == "__main__":
    unittest.main()

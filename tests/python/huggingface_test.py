# SPDX-License-Identifier: Apache-2.0
"""Small random models of each family: logits, loss and every gradient against transformers' own eager experts."""

import copy
import functools
import sys
import tempfile
import types
import unittest
from unittest import mock

import tessera
import tessera.huggingface
import tier
import torch
import transformers
from torch._subclasses import fake_tensor
from torch.utils import checkpoint
from transformers.integrations import finegrained_fp8, moe

COMMON = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0,
          "bos_token_id": 1, "eos_token_id": 2}
FINE = {**COMMON, "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
           "routed_scaling_factor": 2.5, "norm_topk_prob": True}
FAMILIES = {
    "mixtral": {**COMMON, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**FINE, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1},
    "qwen3_moe": {**FINE, "head_dim": 8, "norm_topk_prob": True},
    "qwen3_next": {**FINE, "head_dim": 8, "shared_expert_intermediate_size": 40, "linear_num_key_heads": 2,
                   "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                   "layer_types": ["linear_attention", "full_attention"]},
    "olmoe": {**COMMON, "intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3},
    "deepseek_v3": {**FINE, **LATENT, **GROUPED, "num_key_value_heads": 4},
    "glm4_moe": {**FINE, **GROUPED, "head_dim": 8, "n_group": 1, "topk_group": 1},
    "gpt_oss": {**COMMON, "intermediate_size": 24, "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 3,
                "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
}
EXPECTED = {"gpt_oss": ("clamped-swiglu", "transposed-interleaved")}
RELATIVE = {torch.float32: 2e-5}


def build(family: str, seed: int = 0, **changes):
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**FAMILIES[family], **changes})
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():  # biases and correction biases too: zeros would hide mistakes
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("bias", "sinks")):
                tensor.normal_(std=0.2)
    return model


def step(model, ids):
    """Loss, logits and all gradients."""
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out.loss.detach(), out.logits.detach(), {n: p.grad for n, p in model.named_parameters()}


def relative_error(a, b) -> float:
    difference, size = (a.double() - b.double()).norm().item(), b.double().norm().item()
    return difference / size if size else difference


def bf16_errors(family: str, device: str, **sizes) -> dict:
    """Of logits, loss and every gradient in bf16: Tessera's relative error, that of the eager experts, and the most
    that Tessera's may be. Both round; seen from the same weights in fp32 neither may be far worse than the other."""
    ids = torch.randint(3, 97, (2, 17), generator=torch.Generator().manual_seed(1)).to(device)
    eager = build(family, **sizes).to(device).bfloat16()
    ours, reference = copy.deepcopy(eager), copy.deepcopy(eager).float()
    ours.set_experts_implementation("tessera")
    results = [step(model, ids) for model in (ours, eager, reference)]
    if results[0][1].dtype is not torch.bfloat16 or not tessera.huggingface.prepare(ours):
        raise AssertionError(f"{family}: not in bf16, or without experts of Tessera's")
    tensors = [{"loss": loss, "logits": logits, **{n: g for n, g in gradients.items() if g is not None}}
               for loss, logits, gradients in results]
    found = {}
    for name, exact in tensors[2].items():
        mine, theirs = (relative_error(r[name], exact) for r in tensors[:2])
        found[name] = (mine, theirs, 1.5 * theirs + (5e-3 if name in ("loss", "logits") else 1e-2))
    return found


class Bf16Families(unittest.TestCase):
    device = "cpu"

    def sizes(self, family: str) -> dict:
        """What a test on another device changes in a family's configuration."""
        return {}

    @classmethod
    def setUpClass(cls):
        tessera.register_huggingface()

    def test_families_in_bf16(self):
        for family in FAMILIES:
            with self.subTest(family):
                found = bf16_errors(family, self.device, **self.sizes(family))
                for name, (mine, theirs, allowed) in found.items():
                    self.assertLess(mine, allowed, f"{name}; eager {theirs}")


class Fp32Routers(unittest.TestCase):
    def test_routers_in_fp32_beside_bf16_experts(self):
        """What a router's linear layer gives and gets back is what fp32 weights give, to the rounding of fp32."""
        tessera.register_huggingface()
        ids = torch.randint(3, 97, (2, 17), generator=torch.Generator().manual_seed(1))
        for family in FAMILIES:
            with self.subTest(family):
                model = build(family)
                routers = [child for block in model.modules() for name, child in block.named_children()
                           if name in ("gate", "router") and hasattr(block, "experts")]
                weights = [router.weight.detach().clone() for router in routers]
                model.bfloat16().set_experts_implementation("tessera")
                for router, weight in zip(routers, weights, strict=True):
                    router.float().weight.data.copy_(weight)  # bits that bf16 has not
                for _ in range(2):  # may be called again
                    self.assertEqual(tessera.huggingface.prepare(model, router_dtype=torch.float32), len(routers))
                original, calls = torch.nn.functional.linear, []

                def linear(x, weight, bias=None):
                    out = original(x, weight, bias)
                    if any(weight is router.weight for router in routers):
                        calls.append((x, weight, bias, out))
                    return out

                with mock.patch.object(torch.nn.functional, "linear", linear):
                    _, logits, gradients = step(model, ids)
                self.assertIs(logits.dtype, torch.bfloat16)
                self.assertTrue(routers and len(calls) >= len(routers))
                for x, weight, bias, out in calls:
                    self.assertIs(x.dtype, torch.float32)
                    exact = x.double() @ weight.double().mT + (0 if bias is None else bias.double())
                    self.assertLess(relative_error(out, exact), 1e-6)
                for name, parameter in model.named_parameters():
                    if any(parameter is router.weight for router in routers):
                        self.assertIs(gradients[name].dtype, torch.float32)
                        self.assertGreater(gradients[name].abs().max(), 0)
        with self.assertRaisesRegex(ValueError, "router_dtype=torch.bfloat16"):
            tessera.huggingface.prepare(model, router_dtype=torch.bfloat16)


class QuantisedOperands(unittest.TestCase):
    """precision of register_huggingface() and prepare(): experts save codes, and are the layer's of that precision."""

    SIZES = {"mixtral": {"hidden_size": 128, "intermediate_size": 256},
             "gpt_oss": {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}}

    def run_one(self, model):
        ids = torch.randint(3, 97, (2, 17), generator=torch.Generator().manual_seed(1))
        saved = []

        def keep(tensor):
            saved.append(tensor.dtype)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            _, logits, gradients = step(model, ids)
        return logits, gradients, saved.count(torch.float8_e4m3fn)

    def test_experts_quantise_where_they_are_asked_to(self):
        tessera.register_huggingface()
        tessera.register_huggingface("tessera-fp8", precision="fp8")
        for family, sizes in self.SIZES.items():
            with self.subTest(family):
                model = build(family, **sizes).bfloat16()
                model.set_experts_implementation("tessera")
                layers = tessera.huggingface.prepare(model)
                plain, _, codes = self.run_one(model)
                self.assertEqual(codes, 0)
                named = copy.deepcopy(model)
                named.set_experts_implementation("tessera-fp8")
                fp8, gradients, codes = self.run_one(named)
                self.assertEqual(codes, 2 * layers)  # x and h
                self.assertTrue(0.003 < relative_error(fp8, plain) < 0.3, relative_error(fp8, plain))
                self.assertTrue(all(g.dtype is torch.bfloat16 for g in gradients.values() if g is not None))
                for _ in range(2):
                    tessera.huggingface.prepare(model, precision="fp8")
                self.assertTrue(torch.equal(self.run_one(model)[0], fp8))
                tessera.huggingface.prepare(model, precision="fp8", scales="pow2")
                self.assertFalse(torch.equal(self.run_one(model)[0], fp8))
                tessera.huggingface.prepare(model, precision="auto")  # on the CPU native
                self.assertTrue(torch.equal(self.run_one(model)[0], plain))
                tessera.huggingface.prepare(named, precision="native")  # of a model, before that of the name
                self.assertTrue(torch.equal(self.run_one(named)[0], plain))

    def test_refusals_name_the_option(self):
        tessera.register_huggingface()
        model = build("mixtral", hidden_size=128).bfloat16()
        model.set_experts_implementation("tessera")
        for text, options in (("intermediate=24 with precision=fp8: .*multiple of 128", {"precision": "fp8"}),
                              ("precision='fp4': unknown", {"precision": "fp4"}),
                              ("scales=pow2 without precision", {"scales": "pow2"}),
                              ("scales=pow2 with precision=mxfp8", {"precision": "mxfp8", "scales": "pow2"})):
            with self.assertRaisesRegex(ValueError, text):
                tessera.huggingface.prepare(model, **options)
        self.assertEqual(self.run_one(model)[2], 0)  # nothing has changed
        with self.assertRaisesRegex(ValueError, "scales=pow2 with precision=native"):
            tessera.register_huggingface("another", scales="pow2")


class Families(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        tessera.register_huggingface()

    def compare(self, model, relative: float):
        ids = torch.randint(3, 97, (2, 17), generator=torch.Generator().manual_seed(1))
        loss, logits, gradients = step(model, ids)
        pointers = {n: p.data_ptr() for n, p in model.named_parameters()}
        ours = copy.deepcopy(model)
        ours.set_experts_implementation("tessera")
        calls = []
        original = tessera.functional.routed_experts_with
        self.addCleanup(setattr, tessera.functional, "routed_experts_with", original)
        tessera.functional.routed_experts_with = lambda *a: calls.append(1) or original(*a)
        our_loss, our_logits, our_gradients = step(ours, ids)
        tessera.functional.routed_experts_with = original
        self.assertTrue(calls, "Tessera was not called")
        self.assertLess(relative_error(our_loss, loss), relative)
        self.assertLess(relative_error(our_logits, logits), relative)
        self.assertEqual(our_gradients.keys(), gradients.keys())
        for name, gradient in gradients.items():
            self.assertEqual(gradient is None, our_gradients[name] is None, name)
            if gradient is not None:
                self.assertLess(relative_error(our_gradients[name], gradient), relative, name)
        self.assertEqual(pointers, {n: p.data_ptr() for n, p in model.named_parameters()})
        self.assertEqual(tessera.huggingface.prepare(ours), len(calls))
        return ours

    def test_families_in_fp32(self):
        for family in FAMILIES:
            with self.subTest(family):
                ours = self.compare(build(family), RELATIVE[torch.float32])
                experts = next(m for m in ours.modules() if hasattr(m, "_tessera_options"))
                options = tessera.options.parse(experts._tessera_options)
                self.assertEqual((options.activation, options.layout), EXPECTED.get(family, ("swiglu", "concat")))

    def test_all_experts_unused_but_some(self):
        """Every token to the same experts: the others' gradients are zeros, as eager's."""
        model = build("mixtral")
        with torch.no_grad():
            for module in model.modules():
                if hasattr(module, "top_k") and hasattr(module, "weight"):
                    module.weight.copy_(torch.linspace(1, -1, 4)[:, None] * 1e-3)
        self.compare(model, RELATIVE[torch.float32])

    def test_from_pretrained_and_generate(self):
        model = build("qwen3_moe").eval()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            ours = transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="tessera").eval()
        ids = torch.randint(3, 97, (2, 5), generator=torch.Generator().manual_seed(1))
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        self.assertTrue(torch.equal(model.generate(ids, **options), ours.generate(ids, **options)))

    @tier.deep
    def test_generate_compiled(self):
        """With a static cache transformers compiles the step that makes a token, as a whole."""
        ids = torch.randint(3, 97, (2, 5), generator=torch.Generator().manual_seed(1))
        for family in ("qwen3_moe", "gpt_oss"):
            model = build(family).eval()
            options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
            expected = model.generate(ids, **options)
            model.set_experts_implementation("tessera")
            graphs = []
            torch._dynamo.reset()
            compiled = transformers.CompileConfig(
                backend=lambda graph, _, graphs=graphs: graphs.append(graph) or graph.forward,
                mode=None, fullgraph=True)
            compiled._compile_all_devices = True  # else on a GPU only
            made = model.generate(ids, cache_implementation="static", compile_config=compiled, **options)
            self.assertTrue(torch.equal(made, expected), family)
            self.assertIn("tessera.moe_inference", "".join(graph.code for graph in graphs), family)

    def test_gradient_checkpointing(self):
        model = build("qwen3_moe").train()
        model.set_experts_implementation("tessera")
        ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
        loss, _, gradients = step(model, ids)
        model.gradient_checkpointing_enable()
        again, _, recomputed = step(model, ids)
        self.assertTrue(torch.equal(loss, again))
        for name, gradient in gradients.items():
            self.assertTrue(torch.equal(gradient, recomputed[name]), name)

    def test_compile(self):
        for family in ("qwen3_moe", "gpt_oss"):
            model = build(family).eval()
            model.set_experts_implementation("tessera")
            ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
            tessera.huggingface.prepare(model)
            experts = next(m for m in model.modules() if hasattr(m, "_tessera_options"))
            x = torch.randn(5, 32)
            chosen, scores = torch.tensor([[0, 1, 2]] * 5), torch.rand(5, 3)
            compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(x, chosen, scores), experts(x, chosen, scores))
            self.assertEqual(model(input_ids=ids).logits.shape, (2, 9, 97))


class Interface(unittest.TestCase):
    """Modules made for the purpose, behind transformers' decorator."""

    def experts(self, act=None, gate=None, **flags):
        class Experts(torch.nn.Module):
            def __init__(self, config):
                super().__init__()
                self.num_experts, has_gate = 4, flags.get("has_gate", True)
                up = torch.randn(4, (2 if has_gate else 1) * 8, 16) / 4
                self.down_proj = torch.nn.Parameter(torch.randn(4, 16, 8) / 3)
                setattr(self, "gate_up_proj" if has_gate else "up_proj", torch.nn.Parameter(up))
                self.limit, self.act_fn = 2.5, act or torch.nn.SiLU()

            def forward(self, *_):
                raise AssertionError("eager was called")

        if gate is not None:
            Experts._apply_gate = gate
        torch.manual_seed(0)
        config = transformers.PretrainedConfig()
        config._experts_implementation_internal = "tessera"
        return moe.use_experts_implementation(Experts, **flags)(config)

    def setUp(self):
        tessera.register_huggingface()
        self.x, self.ids, self.scores = torch.randn(6, 16), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)

    def agrees(self, experts, recognised: str):
        o = experts(self.x, self.ids, self.scores)
        self.assertEqual(tessera.options.parse(experts._tessera_options).activation, recognised)
        expected = moe.batched_mm_experts_forward(experts, self.x, self.ids, self.scores)
        torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)

    def test_activations(self):
        for act, gated, plain in (("silu", "swiglu", "silu"), ("gelu", "geglu-erf", "gelu-erf"),
                                  ("gelu_pytorch_tanh", "geglu", "gelu"), ("gelu_new", "geglu", "gelu"),
                                  ("relu", "reglu", "relu")):
            act = transformers.activations.ACT2FN[act]
            self.agrees(self.experts(act), gated)
            self.agrees(self.experts(act, has_gate=False), plain)
        self.agrees(self.experts(transformers.activations.ACT2FN["relu2"], has_gate=False), "relu2")

    def test_clamps(self):
        def deepseek_v4(self, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)

        self.agrees(self.experts(gate=deepseek_v4), "clamped-swiglu")

    def test_a_changed_activation_is_recognised_anew(self):
        def clamped(self, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            if self.config.swiglu_limit is not None:
                gate, up = gate.clamp(max=self.config.swiglu_limit), up.clamp(-self.limit, self.limit)
            return self.act_fn(gate) * up

        experts = self.experts(gate=clamped)
        experts.config.swiglu_limit = 2.5
        self.agrees(experts, "clamped-swiglu")
        experts.limit = experts.config.swiglu_limit = 0.5
        self.agrees(experts, "clamped-swiglu")
        self.agrees(copy.deepcopy(experts), "clamped-swiglu")
        experts.config.swiglu_limit = 0.75  # of one alone
        with self.assertRaisesRegex(NotImplementedError, "none of Tessera's"):
            experts(self.x, self.ids, self.scores)
        experts.config.swiglu_limit = None
        self.agrees(experts, "swiglu")
        experts.act_fn = torch.nn.GELU()
        self.agrees(experts, "geglu-erf")
        with mock.patch.object(tessera.huggingface, "recognise") as recognise:
            for same in (experts, copy.deepcopy(experts)):
                same(self.x, self.ids, self.scores)
        recognise.assert_not_called()

    def test_activations_with_parameters_are_refused(self):
        class Scaled(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = torch.nn.Parameter(torch.ones(()))

            def forward(self, x):
                return torch.nn.functional.silu(x) * self.scale

        for flags in ({}, {"has_gate": False}):
            with self.assertRaisesRegex(NotImplementedError, "its activation has parameters"):
                self.experts(Scaled(), **flags)(self.x, self.ids, self.scores)

    def test_recognised_whatever_mode_is_active(self):
        """Modes are for the layer, not for the numbers that its activation is tried on."""
        expected = self.experts()(self.x, self.ids, self.scores)
        experts = self.experts()
        with torch.device("meta"):
            self.assertTrue(torch.equal(experts(self.x, self.ids, self.scores), expected))
        experts = self.experts()
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
            self.assertEqual(experts(self.x, self.ids, self.scores).shape, expected.shape)

    def test_recognised_under_selective_checkpointing(self):
        """What is saved for the recomputation is the layer's silu alone."""
        silu, x = torch.nn.functional.silu, self.x.clone().requires_grad_()

        def layer(x, experts):
            return (experts(silu(x) * x, self.ids, self.scores) * silu(2 * x)).square().sum()

        (expected,) = torch.autograd.grad(layer(x, self.experts()), x)
        saved = [torch.ops.aten.silu.default, torch.ops.aten.mul.Tensor, torch.ops.aten.sigmoid.default]
        context = functools.partial(checkpoint.create_selective_checkpoint_contexts, saved)
        o = checkpoint.checkpoint(layer, x, self.experts(), use_reentrant=False, context_fn=context)
        self.assertTrue(torch.equal(torch.autograd.grad(o, x)[0], expected))

    def test_unknown_activations_are_refused(self):
        def clamp_after(self, gate_up):  # the limit is applied to silu(gate), not to the gate
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)

        def hidden_limit(self, gate_up):  # a limit that no attribute states
            gate, up = gate_up.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate.clamp(max=123.0)) * up

        for experts in (self.experts(gate=clamp_after), self.experts(gate=hidden_limit),
                        self.experts(torch.nn.Tanh()), self.experts(torch.nn.Tanh(), has_gate=False)):
            with self.assertRaisesRegex(NotImplementedError, "Experts: its activation is none of Tessera's"):
                experts(self.x, self.ids, self.scores)

    def test_unknown_structure_is_refused(self):
        with self.assertRaisesRegex(NotImplementedError, "normalises the experts' outputs"):
            self.experts(has_post_expert_norm=True)(self.x, self.ids, self.scores)
        with self.assertRaisesRegex(NotImplementedError, "one weight per chosen expert"):
            self.experts()(self.x, self.ids, torch.rand(6, 4))
        original = moe.use_experts_implementation
        self.addCleanup(setattr, moe, "use_experts_implementation", original)
        moe.use_experts_implementation = lambda experts_class=None, has_new_thing=False: None
        with self.assertRaisesRegex(NotImplementedError, "has_new_thing"):
            tessera.register_huggingface()

    def test_quantised_weights_are_refused(self):
        """Their scales are elsewhere. On meta as well, where such a model is before it is loaded."""
        for dtype in (torch.float8_e4m3fn, torch.int8):
            experts = self.experts()
            experts.down_proj = torch.nn.Parameter(experts.down_proj.detach().to(dtype), requires_grad=False)
            for module in (experts, copy.deepcopy(experts).to("meta")):
                refused = self.assertRaisesRegex(NotImplementedError, f"Experts: weights of {dtype}")
                with refused:
                    tessera.huggingface.prepare(module)
                with refused:
                    module(self.x, self.ids, self.scores)
        model = build("qwen3_moe")
        model.set_experts_implementation("tessera")
        skipped = ["lm_head", "self_attn", "gate"]
        finegrained_fp8.replace_with_fp8_linear(model, skipped, transformers.FineGrainedFP8Config())
        experts = next(module for module in model.modules() if isinstance(module, finegrained_fp8.FP8Experts))
        with self.assertRaisesRegex(NotImplementedError, "FP8Experts: weights of torch.float8"):
            experts.to_empty(device="cpu")(torch.randn(4, 32), self.ids[:4], self.scores[:4])

    def test_other_versions_are_refused(self):
        """Those before 5 have no experts interface, and one that is not there says what to install."""
        interface = types.ModuleType("transformers.integrations")
        refused = self.assertRaisesRegex(ImportError, r"transformers 4.57.1: .* pip install 'transformers>=5.17,<6'")
        with mock.patch("transformers.__version__", "4.57.1"), refused, \
                mock.patch.dict(sys.modules, {"transformers.integrations": interface}):
            tessera.register_huggingface()
        missing = self.assertRaisesRegex(ImportError, "needs transformers; pip install 'transformers>=5.17,<6'")
        with mock.patch.dict(sys.modules, {"transformers": None}), missing:
            tessera.register_huggingface()

    def test_sentinels_of_expert_parallel_models(self):
        experts = self.experts()
        ids = self.ids.clone()
        ids[:, 1] = 4
        o = experts(self.x, ids, self.scores)
        expected = moe.batched_mm_experts_forward(experts, self.x, ids[:, :1], self.scores[:, :1])
        torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)

    def test_hidden_states_of_another_type(self):
        experts = self.experts()
        o = experts(self.x.double(), self.ids, self.scores)
        self.assertIs(o.dtype, torch.float64)
        torch.testing.assert_close(o.float(), experts(self.x, self.ids, self.scores))


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: Apache-2.0
"""Seams of torchtitan and Megatron-LM, with stand-ins that have their signatures, parameters and flags."""

import types
import unittest

import eager
import torch
from tessera.integrations import megatron, torchtitan
from torch import nn
from torch.nn import functional

E, D, F = 5, 24, 8
COUNTS = [4, 0, 6, 1, 0]


class GroupedExperts(nn.Module):
    """torchtitan's, as of August 2026: names with shape suffixes, counts on the device, tail rows allowed."""

    def __init__(self, activation_fn=None, fused=False):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        gate, up = (torch.randn(E, F, D, generator=generator) / D**0.5 for _ in range(2))
        if fused:
            self.w13 = nn.Parameter(torch.stack([gate, up], dim=2))
        else:
            self.w1_EFD, self.w3_EFD = nn.Parameter(gate), nn.Parameter(up)
        self.w2_EDF = nn.Parameter(torch.randn(E, D, F, generator=generator) / F**0.5)
        if activation_fn is not None:
            self.activation_fn = activation_fn

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        w1, w3 = self.w13.unbind(2) if hasattr(self, "w13") else (self.w1_EFD, self.w3_EFD)
        act = getattr(self, "activation_fn", lambda gate, up: functional.silu(gate) * up)
        rows = x_RD[:num_tokens_per_expert_E.sum()].split(num_tokens_per_expert_E.tolist())
        y = torch.cat([act(x @ w1[e].mT, x @ w3[e].mT) @ self.w2_EDF[e].mT for e, x in enumerate(rows)])
        return functional.pad(y, (0, 0, 0, x_RD.shape[0] - y.shape[0]))


class ClampedSwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.limit = 0.75

    def forward(self, gate, up, *, offsets=None):
        return functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class Torchtitan(unittest.TestCase):
    def test_matches_its_own_forward(self):
        x = torch.randn(13, D, generator=torch.Generator().manual_seed(1))
        d_y = torch.randn(13, D, generator=torch.Generator().manual_seed(2))
        counts = torch.tensor(COUNTS)
        for options in ({}, {"fused": True}, {"activation_fn": ClampedSwiGLU()}):
            results = []
            for ours in (False, True):
                model = nn.Sequential(GroupedExperts(**options))
                rows = x.clone().requires_grad_()
                if ours:
                    self.assertEqual(torchtitan.use_tessera(model), 1)
                y = model[0](rows, counts)
                results.append((y, *torch.autograd.grad(y, (rows, *model.parameters()), d_y)))
            for theirs, mine in zip(*results, strict=True):
                eager.check_close(self, str(options), mine, theirs, 1e-5)
            self.assertEqual(results[1][0][11:].abs().max(), 0)

    def test_compile(self):
        model = GroupedExperts()
        torchtitan.use_tessera(model)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        x = torch.randn(13, D)
        torch.testing.assert_close(compiled(x, torch.tensor(COUNTS)), model(x, torch.tensor(COUNTS)))

    def test_refusals(self):
        with self.assertRaisesRegex(ValueError, "no module with parameters w1_EFD"):
            torchtitan.use_tessera(nn.Linear(2, 2))
        for options, text in (({"activation_fn": lambda gate, up: gate.tanh() * up}, "none of Tessera's"),):
            with self.assertRaisesRegex(NotImplementedError, text):
                torchtitan.use_tessera(GroupedExperts(**options))
        biased = GroupedExperts()
        biased.mlp1_bias = nn.Parameter(torch.zeros(E, F))
        with self.assertRaisesRegex(NotImplementedError, "has mlp1_bias"):
            torchtitan.use_tessera(nn.Sequential(GroupedExperts(), biased))


def config(**changes):
    """The fields of Megatron's TransformerConfig that experts read."""
    return types.SimpleNamespace(**{
        "hidden_size": D, "moe_ffn_hidden_size": F, "gated_linear_unit": True, "activation_func": functional.silu,
        "activation_func_clamp_value": None, "glu_linear_offset": 0.0, "moe_mlp_glu_interleave_size": None,
        "add_bias_linear": False, "params_dtype": torch.float32, "use_cpu_initialization": True, "fp8": None,
        "init_method": lambda w: nn.init.normal_(w, std=D**-0.5), "output_layer_init_method": nn.init.xavier_normal_,
        "gradient_accumulation_fusion": False, "delay_wgrad_compute": False, "moe_apply_probs_on_input": False,
        "expert_model_parallel_size": 1, **changes})


def megatron_reference(experts, x, probs, **options):
    """Probabilities on the activation, in fp32, as Megatron multiplies them."""
    w_up, w_down = experts.w_up.detach().double(), experts.w_down.detach().double()
    parts, probabilities = x.split(COUNTS), probs.split(COUNTS)
    return torch.cat([(eager.activate(rows @ w_up[e].mT, **options) * probabilities[e][:, None]) @ w_down[e].mT
                      for e, rows in enumerate(parts)])


class Megatron(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        self.x, self.probs, self.d_y = torch.randn(11, D), torch.rand(11), torch.randn(11, D)

    def test_matches_a_plain_computation(self):
        cases = (({}, {}),
                 ({"activation_func": functional.gelu}, {"activation": "geglu-erf"}),
                 ({"activation_func_clamp_value": 0.75, "glu_linear_offset": 1.0,
                   "activation_func": lambda h: h * torch.sigmoid(1.702 * h)},
                  {"activation": "clamped-swiglu", "limit": 0.75}),
                 ({"moe_mlp_glu_interleave_size": 4}, {"layout": "blocked:4"}),
                 ({"gated_linear_unit": False, "activation_func": lambda h: functional.relu(h).square()},
                  {"activation": "relu2"}))
        for changes, options in cases:
            experts = megatron.Experts(E, config(**changes))
            x, probs = self.x.clone().requires_grad_(), self.probs.clone().requires_grad_()
            exact_x, exact_probs = self.x.double().requires_grad_(), self.probs.double().requires_grad_()
            reference = megatron_reference(experts, exact_x, exact_probs, **options)
            wanted = torch.autograd.grad(reference, (exact_x, exact_probs), self.d_y.double())
            for tokens_per_expert in (COUNTS, torch.tensor(COUNTS), torch.tensor(COUNTS).int()):
                y, bias = experts(x, tokens_per_expert, probs)
                self.assertIsNone(bias)
                eager.check_close(self, f"{options}: output", y, reference)
                for a, b in zip(torch.autograd.grad(y, (x, probs), self.d_y), wanted, strict=True):
                    eager.check_close(self, f"{options}: gradient", a, b)

    def test_gradient_accumulation_fusion(self):
        plain = megatron.Experts(E, config())
        fused = megatron.Experts(E, config(gradient_accumulation_fusion=True))
        fused.load_state_dict(plain.state_dict())
        with self.assertRaisesRegex(ValueError, "no main_grad"):
            fused(self.x, COUNTS, self.probs)
        hooks = []
        for weight in fused.parameters():
            weight.main_grad = torch.full_like(weight, 7.0)
            weight.grad_added_to_main_grad, weight.overwrite_main_grad = False, True
            weight.zero_out_wgrad = True
            weight.register_post_accumulate_grad_hook(lambda w: hooks.append(w.grad.abs().max().item()))
        for micro_batch in range(2):
            fused(self.x, COUNTS, self.probs)[0].backward(self.d_y)
            plain(self.x, COUNTS, self.probs)[0].backward(self.d_y)
            self.assertEqual(hooks, [0.0, 0.0], "Megatron's hooks wait for a gradient of each weight")
            hooks.clear()
            for weight in fused.parameters():
                self.assertTrue(weight.grad_added_to_main_grad)
                weight.grad, weight.overwrite_main_grad = None, False
        for ours, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.main_grad, theirs.grad)

    def test_state_dict_has_megatrons_names(self):
        experts, other = megatron.Experts(E, config()), megatron.Experts(E, config())
        state = experts.state_dict()
        self.assertEqual(sorted(state), sorted(f"linear_fc{k}.weight{i}" for k in (1, 2) for i in range(E)))
        self.assertEqual(tuple(state["linear_fc1.weight0"].shape), (2 * F, D))
        other.load_state_dict(state)
        self.assertTrue(torch.equal(experts.w_up, other.w_up) and torch.equal(experts.w_down, other.w_down))
        del state["linear_fc2.weight3"]
        with self.assertRaisesRegex(RuntimeError, "linear_fc2.weight3"):
            other.load_state_dict(state)

    def test_refusals(self):
        for option in ("add_bias_linear", "delay_wgrad_compute", "fp8", "moe_apply_probs_on_input"):
            with self.assertRaisesRegex(NotImplementedError, f"config.{option}"):
                megatron.Experts(E, config(**{option: True}))
        with self.assertRaisesRegex(NotImplementedError, "none of Tessera's"):
            megatron.Experts(E, config(activation_func=torch.tanh))


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: Apache-2.0
"""Seams of torchtitan and Megatron-LM, with stand-ins that have their signatures, parameters and flags."""

import sys
import types
import unittest
import unittest.mock

import eager
import torch
from tessera.integrations import megatron, torchtitan
from torch import nn
from torch.nn import functional

E, D, F = 5, 24, 8
COUNTS = [4, 0, 6, 1, 0]


def expert_weights():
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(E, F, D, generator=generator) / D**0.5 for _ in range(2))
    return gate, up, torch.randn(E, D, F, generator=generator) / F**0.5


def swiglu(gate, up):
    return functional.silu(gate) * up


def by_expert(x_RD, counts, act, gate, up, down):
    """What all of torchtitan's versions compute; rows beyond the counts are zeros."""
    rows = x_RD[:counts.sum()].split(counts.tolist())
    y = torch.cat([act(x @ gate[e].mT, x @ up[e].mT) @ down[e].mT for e, x in enumerate(rows)])
    return functional.pad(y, (0, 0, 0, x_RD.shape[0] - y.shape[0]))


class GroupedExperts(nn.Module):
    """torchtitan's, in the forms of its versions: parameter names without and with shape suffixes, gate and up in one
    tensor of four or three dimensions. Counts are on the device, tail rows allowed."""

    def __init__(self, activation_fn=None, form="suffixes"):
        super().__init__()
        gate, up, down = expert_weights()
        fused = torch.stack([gate, up], dim=2)
        parameters = {"plain": {"w1": gate, "w3": up, "w2": down},
                      "suffixes": {"w1_EFD": gate, "w3_EFD": up, "w2_EDF": down},
                      "w13": {"w13": fused, "w2_EDF": down},
                      "flat w13": {"w13": fused.flatten(1, 2), "w2_EDF": down}}[form]
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value))
        self.form = form
        if activation_fn is not None:
            self.activation_fn = activation_fn

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        if "w13" in self.form:
            gate, up = self.w13.reshape(E, F, 2, D).unbind(2)
        else:
            gate, up = (self.w1, self.w3) if self.form == "plain" else (self.w1_EFD, self.w3_EFD)
        down = self.w2 if self.form == "plain" else self.w2_EDF
        return by_expert(x_RD, num_tokens_per_expert_E, getattr(self, "activation_fn", swiglu), gate, up, down)


class TokenDispatcher:
    """Stands for torchtitan's: sorts rows by expert, adds scored rows up."""

    def dispatch(self, x_TD, scores_TK, ids_TK, counts_E):
        order = ids_TK.flatten().argsort(stable=True)
        return x_TD[order // ids_TK.shape[1]], counts_E, (order, scores_TK)

    def combine(self, rows_RD, metadata, x_TD):
        order, scores = metadata
        rows = rows_RD * scores.flatten()[order, None]
        return torch.zeros_like(x_TD).index_add(0, order // scores.shape[1], rows)


class DispatchingExperts(GroupedExperts):
    """A version whose forward dispatches and combines; _experts_forward is what is left."""

    def __init__(self):
        super().__init__()
        self.token_dispatcher = TokenDispatcher()

    def _experts_forward(self, x_RD, num_tokens_per_expert_E):
        return GroupedExperts.forward(self, x_RD, num_tokens_per_expert_E)

    def forward(self, x, scores, ids, counts):
        rows, counts, metadata = self.token_dispatcher.dispatch(x, scores, ids, counts)
        return self.token_dispatcher.combine(self._experts_forward(rows, counts), metadata, x)


class GroupedLinear(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)


class RoutedExperts(nn.Module):
    """torchtitan's as of September 2026: two grouped linears, an activation, a dispatcher."""

    def __init__(self, activation_fn=None, linear=GroupedLinear):
        super().__init__()
        gate, up, down = expert_weights()
        self.w13, self.w2 = linear(torch.stack([gate, up], dim=1)), GroupedLinear(down)
        self.token_dispatcher = TokenDispatcher()
        self.activation_fn = activation_fn or SwiGLU()

    def forward(self, x, scores, ids, counts):
        rows, counts, metadata = self.token_dispatcher.dispatch(x, scores, ids, counts)
        gate, up = self.w13.weight.unbind(1)
        return self.token_dispatcher.combine(by_expert(rows, counts, self.activation_fn, gate, up, self.w2.weight),
                                             metadata, x)


class SwiGLU(nn.Module):
    def forward(self, gate, up):
        return swiglu(gate, up)


class ClampedSwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.limit = 0.75

    def forward(self, gate, up, *, offsets=None):
        return functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class Torchtitan(unittest.TestCase):
    device, relative = "cpu", 1e-5

    def test_matches_its_own_forward(self):
        x = torch.randn(13, D, generator=torch.Generator().manual_seed(1)).to(self.device)
        d_y = torch.randn(13, D, generator=torch.Generator().manual_seed(2)).to(self.device)
        counts = torch.tensor(COUNTS, device=self.device)
        for options in ({}, {"form": "plain"}, {"form": "w13"}, {"form": "flat w13"},
                        {"activation_fn": ClampedSwiGLU()}):
            results = []
            for ours in (False, True):
                model = nn.Sequential(GroupedExperts(**options)).to(self.device)
                rows = x.clone().requires_grad_()
                if ours:
                    self.assertEqual(torchtitan.use_tessera(model), 1)
                y = model[0](rows, counts)
                results.append((y, *torch.autograd.grad(y, (rows, *model.parameters()), d_y)))
            for theirs, mine in zip(*results, strict=True):
                eager.check_close(self, str(options), mine, theirs, self.relative)
            self.assertEqual(results[1][0][11:].abs().max(), 0)

    def test_matches_its_own_forward_with_dispatch(self):
        generator = torch.Generator().manual_seed(1)
        x, d_o = (torch.randn(9, D, generator=generator).to(self.device) for _ in range(2))
        ids = torch.rand(9, E, generator=generator).topk(2).indices.to(self.device)
        scores = torch.rand(9, 2, generator=generator).to(self.device)
        counts = torch.bincount(ids.flatten(), minlength=E)
        for make in (DispatchingExperts, RoutedExperts, lambda: RoutedExperts(ClampedSwiGLU())):
            results = []
            for ours in (False, True):
                model = nn.Sequential(make()).to(self.device)
                if ours:
                    self.assertEqual(torchtitan.use_tessera(model), 1)
                tokens, weights = x.clone().requires_grad_(), scores.clone().requires_grad_()
                o = model[0](tokens, weights, ids, counts)
                results.append((o, *torch.autograd.grad(o, (tokens, weights, *model.parameters()), d_o)))
            for theirs, mine in zip(*results, strict=True):
                eager.check_close(self, type(model[0]).__name__, mine, theirs, self.relative)

    def test_leaves_dense_layers_alone(self):
        dense = nn.Module()
        dense.w1, dense.w2, dense.w3 = nn.Linear(D, F), nn.Linear(F, D), nn.Linear(D, F)
        self.assertEqual(torchtitan.use_tessera(nn.Sequential(dense, GroupedExperts())), 1)

    def test_compile(self):
        model = GroupedExperts().to(self.device)
        torchtitan.use_tessera(model)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        x, counts = torch.randn(13, D).to(self.device), torch.tensor(COUNTS, device=self.device)
        torch.testing.assert_close(compiled(x, counts), model(x, counts))

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

        class QuantisedGroupedLinear(GroupedLinear):
            pass

        with self.assertRaisesRegex(NotImplementedError, "w13 is a QuantisedGroupedLinear"):
            torchtitan.use_tessera(RoutedExperts(linear=QuantisedGroupedLinear))
        nameless, processed = RoutedExperts(), RoutedExperts()
        nameless.activation_fn, processed.output_postprocess = None, SwiGLU()
        with self.assertRaisesRegex(NotImplementedError, "no activation_fn"):
            torchtitan.use_tessera(nameless)
        with self.assertRaisesRegex(NotImplementedError, "output_postprocess"):
            torchtitan.use_tessera(processed)


def config(**changes):
    """The fields of Megatron's TransformerConfig that experts read."""
    return types.SimpleNamespace(**{
        "hidden_size": D, "moe_ffn_hidden_size": F, "gated_linear_unit": True, "activation_func": functional.silu,
        "activation_func_clamp_value": None, "glu_linear_offset": 0.0, "moe_mlp_glu_interleave_size": None,
        "add_bias_linear": False, "params_dtype": torch.float32, "use_cpu_initialization": True, "fp8": None,
        "init_method": lambda w: nn.init.normal_(w, std=D**-0.5), "output_layer_init_method": nn.init.xavier_normal_,
        "gradient_accumulation_fusion": False, "delay_wgrad_compute": False, "moe_apply_probs_on_input": False,
        "expert_model_parallel_size": 1, **changes})


class ShardedTensor:
    """Megatron's: where `data` lies in the tensor of all ranks. A tuple (axis, i, n) says: part i of n along axis."""

    @classmethod
    def from_rank_offsets(cls, key, data, *rank_offsets, replica_id=0, prepend_axis_num=0):
        self = cls()
        self.key, self.data, self.replica_id = key, data, replica_id
        shape, offset = [1] * prepend_axis_num + list(data.shape), [0] * (prepend_axis_num + data.dim())
        for axis, part, parts in rank_offsets:
            offset[axis] = part * shape[axis]
            shape[axis] *= parts
        self.global_shape, self.global_offset = tuple(shape), tuple(offset)
        return self


def megatron_reference(experts, x, probs, **options):
    """Probabilities on the activation, in fp32, as Megatron multiplies them."""
    w_up, w_down = experts.w_up.detach().double(), experts.w_down.detach().double()
    parts, probabilities = x.split(COUNTS), probs.split(COUNTS)
    return torch.cat([(eager.activate(rows @ w_up[e].mT, **options) * probabilities[e][:, None]) @ w_down[e].mT
                      for e, rows in enumerate(parts)])


class Megatron(unittest.TestCase):
    device, dtype = "cpu", torch.float32

    def setUp(self):
        torch.manual_seed(0)
        self.x, self.d_y = (torch.randn(11, D).to(self.device, self.dtype) for _ in range(2))
        self.probs = torch.rand(11).to(self.device)

    def experts(self, **changes):
        on_cpu = self.device == "cpu"
        return megatron.Experts(E, config(params_dtype=self.dtype, use_cpu_initialization=on_cpu, **changes))

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
            experts = self.experts(**changes)
            x, probs = self.x.clone().requires_grad_(), self.probs.clone().requires_grad_()
            exact_x, exact_probs = self.x.double().requires_grad_(), self.probs.double().requires_grad_()
            reference = megatron_reference(experts, exact_x, exact_probs, **options)
            wanted = torch.autograd.grad(reference, (exact_x, exact_probs), self.d_y.double())
            for tokens_per_expert in (COUNTS, torch.tensor(COUNTS), torch.tensor(COUNTS, device=self.device).int()):
                y, bias = experts(x, tokens_per_expert, probs)
                self.assertIsNone(bias)
                eager.check_close(self, f"{options}: output", y, reference, eager.RELATIVE[self.dtype])
                for a, b in zip(torch.autograd.grad(y, (x, probs), self.d_y), wanted, strict=True):
                    eager.check_close(self, f"{options}: gradient", a, b, eager.RELATIVE[self.dtype])

    def test_gradient_accumulation_fusion(self):
        plain, fused = self.experts(), self.experts(gradient_accumulation_fusion=True)
        fused.load_state_dict(plain.state_dict())
        with self.assertRaisesRegex(ValueError, "no main_grad"):
            fused(self.x, COUNTS, self.probs)
        hooks = []
        for weight in fused.parameters():
            weight.main_grad = torch.full_like(weight, 7.0, dtype=torch.float32)
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
            eager.check_close(self, "main_grad", ours.main_grad, theirs.grad, eager.RELATIVE[self.dtype])

    def test_overwritten_main_grad_with_micro_batches_in_flight(self):
        """Each backward pass leaves its own gradient; forward leaves what is there."""
        fused, plain = self.experts(gradient_accumulation_fusion=True), self.experts()
        plain.load_state_dict(fused.state_dict())
        for weight in fused.parameters():
            weight.main_grad, weight.overwrite_main_grad = torch.full_like(weight, 7.0, dtype=torch.float32), True
        fused(self.x, COUNTS, self.probs)
        self.assertTrue(all((weight.main_grad == 7).all() for weight in fused.parameters()))
        batches = (self.x, self.x.flip(0))
        for y, x in zip([fused(x, COUNTS, self.probs)[0] for x in batches], batches, strict=True):
            y.backward(self.d_y)
            fused(x, COUNTS, self.probs)
            plain.zero_grad()
            plain(x, COUNTS, self.probs)[0].backward(self.d_y)
            for ours, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
                eager.check_close(self, "main_grad", ours.main_grad, theirs.grad, eager.RELATIVE[self.dtype])
        fused.w_up.requires_grad_(False)
        before = fused.w_up.main_grad.clone()
        fused(self.x, COUNTS, self.probs)[0].backward(self.d_y)
        self.assertTrue(torch.equal(fused.w_up.main_grad, before))

    def test_state_dict_has_megatrons_names(self):
        experts, other = self.experts(), self.experts()
        state = experts.state_dict()
        self.assertEqual(sorted(state), sorted(f"linear_fc{k}.weight{i}" for k in (1, 2) for i in range(E)))
        self.assertEqual(tuple(state["linear_fc1.weight0"].shape), (2 * F, D))
        other.load_state_dict(state)
        self.assertTrue(torch.equal(experts.w_up, other.w_up) and torch.equal(experts.w_down, other.w_down))
        del state["linear_fc2.weight3"]
        with self.assertRaisesRegex(RuntimeError, "linear_fc2.weight3"):
            other.load_state_dict(state)

    def test_state_dicts_of_others(self):
        """More experts than there are is an error; _extra_state of Transformer Engine is not."""
        experts = self.experts()
        state = experts.state_dict()
        more = {**state, **{f"linear_fc{k}.weight{E}": state[f"linear_fc{k}.weight0"] for k in (1, 2)}}
        with self.assertRaisesRegex(RuntimeError, f"Unexpected.*linear_fc1.weight{E}.*linear_fc2.weight{E}"):
            experts.load_state_dict(more)
        found = experts.load_state_dict(more, strict=False)
        self.assertEqual(found.unexpected_keys, [f"linear_fc{k}.weight{E}" for k in (1, 2)])
        stacked = {"linear_fc1.weight": experts.w_up.detach(), "linear_fc2.weight": experts.w_down.detach()}
        with self.assertRaisesRegex(RuntimeError, "Unexpected.*linear_fc1.weight0"):
            experts.load_state_dict({**state, **stacked})
        extra = {f"linear_fc{k}._extra_state": value for k, value in ((1, torch.zeros(3)), (2, None))}
        self.experts().load_state_dict({**state, **extra})
        with self.assertRaisesRegex(RuntimeError, "Unexpected.*linear_fc1.bias0"):
            experts.load_state_dict({**state, "linear_fc1.bias0": torch.zeros(3)})

    def test_sharded_state_dict(self):
        """Rank 1 of 2: the stacked weights are the second half of each projection's tensor, behind the layers' axis."""
        def group(rank, size):
            return types.SimpleNamespace(rank=lambda: rank, size=lambda: size)

        groups = types.SimpleNamespace(ep=group(1, 2), expt_tp=group(0, 1), expt_dp=group(3, 4))
        experts = megatron.Experts(E, config(), pg_collection=groups)
        module = types.ModuleType("megatron.core.dist_checkpointing.mapping")
        module.ShardedTensor = ShardedTensor
        parents = ("megatron", "megatron.core", "megatron.core.dist_checkpointing")
        with unittest.mock.patch.dict(sys.modules, {**{name: types.ModuleType(name) for name in parents},
                                                    module.__name__: module}):
            sharded = experts.sharded_state_dict("mlp.experts.", ((0, 5, 7),), {})
            for metadata, changes in (({"singleton_local_shards": True}, {}), ({}, {"moe_mlp_glu_interleave_size": 4})):
                with self.assertRaisesRegex(NotImplementedError, "singleton_local_shards|moe_mlp_glu_interleave_size"):
                    megatron.Experts(E, config(**changes), pg_collection=groups).sharded_state_dict("", (), metadata)
        self.assertEqual(list(sharded), ["mlp.experts.linear_fc1.weight", "mlp.experts.linear_fc2.weight"])
        up, down = sharded.values()
        self.assertIs(up.data, experts.w_up)  # the optimizer looks for the parameter itself
        self.assertEqual(up.key, "mlp.experts.experts.linear_fc1.weight")
        self.assertEqual((up.global_shape, up.global_offset), ((7, 2 * E, 2 * F, D), (5, E, 0, 0)))
        self.assertEqual(up.replica_id, (0, 0, 3))
        self.assertEqual((down.global_shape, down.global_offset), ((7, 2 * E, D, F), (5, E, 0, 0)))
        other = megatron.Experts(E, config(), pg_collection=groups)  # as Megatron hands a loaded checkpoint over
        other.load_state_dict({key.removeprefix("mlp.experts."): value.data for key, value in sharded.items()})
        self.assertTrue(torch.equal(experts.w_up, other.w_up) and torch.equal(experts.w_down, other.w_down))
        groups.expt_tp = group(0, 2)
        with self.assertRaisesRegex(NotImplementedError, "expert_tensor_parallel_size=2"):
            megatron.Experts(E, config(), pg_collection=groups)

    def test_is_made_as_its_moe_layer_makes_experts(self):
        """0.16 and older pass no name; 0.17 and later do."""
        for more in ({}, {"name": None}, {"name": "decoder.layers.0.mlp.experts"}):
            experts = megatron.Experts(E, config(), pg_collection=None, **more)
            self.assertEqual(tuple(experts.w_up.shape), (E, 2 * F, D))

    def test_refusals(self):
        for option in ("add_bias_linear", "delay_wgrad_compute", "fp8", "moe_apply_probs_on_input"):
            with self.assertRaisesRegex(NotImplementedError, f"config.{option}"):
                megatron.Experts(E, config(**{option: True}))
        with self.assertRaisesRegex(NotImplementedError, "none of Tessera's"):
            megatron.Experts(E, config(activation_func=torch.tanh))


if __name__ == "__main__":
    unittest.main()

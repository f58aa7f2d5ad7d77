# SPDX-License-Identifier: Apache-2.0
"""Experts for Megatron-LM's MoE layer: what its `experts` submodule has to be, computed by Tessera.

Weights are stacked: w_up [E,w*n,d], w_down [E,d,n]. State dicts have Megatron's names, linear_fc1.weight{i} and
linear_fc2.weight{i}, so that its checkpoints load and its tools read ours. In sharded checkpoints the experts of all
ranks are one tensor per projection, under the keys and in the shapes of Megatron's own experts, whose checkpoints
therefore load, on any number of ranks. The other way round Megatron asks for _extra_state, of which Tessera has none.
"""

import math

import torch
from torch import nn

from tessera import functional
from tessera.options import GATED
from tessera.recognise import recognise


_NAMES = (("w_up", "linear_fc1"), ("w_down", "linear_fc2"))


class Experts(nn.Module):
    """The experts of one rank, as Megatron makes them for its MoE layer.

    Args:
        num_local_experts: E of this rank.
        config: Megatron's TransformerConfig, of which are read hidden_size, moe_ffn_hidden_size, gated_linear_unit,
            activation_func, activation_func_clamp_value, glu_linear_offset, moe_mlp_glu_interleave_size, params_dtype,
            gradient_accumulation_fusion.
        submodules: Not read: there are none.
        pg_collection: Megatron's process groups, or None for those of parallel_state.
        name: Where the layer stands in the model. Megatron passes it since 0.17 and chooses quantisation by it, which
            there is none of here.

    Raises:
        NotImplementedError: An option is not served: biases, delay_wgrad_compute, fp8, probabilities on the input, an
            unknown activation, tensor parallelism within experts, an option of gated experts where they have no gate.

    Example:
        >>> from tessera.integrations.megatron import Experts
        >>> submodules = MoESubmodules(experts=Experts, shared_experts=shared)           # doctest: +SKIP
    """

    def __init__(self, num_local_experts: int, config, submodules=None, pg_collection=None, name=None):
        super().__init__()
        for option, reason in (("add_bias_linear", "biases"), ("delay_wgrad_compute", "delayed weight gradients"),
                               ("fp8", "fp8 weights"), ("moe_apply_probs_on_input", "probabilities on the input")):
            if getattr(config, option, None):
                raise NotImplementedError(f"config.{option}: {reason} are not served by this seam; switch it off")
        if pg_collection is not None and pg_collection.expt_tp.size() > 1:
            raise NotImplementedError(f"expert_tensor_parallel_size={pg_collection.expt_tp.size()}: this seam holds "
                                      "whole experts; set it to 1")
        self.config, self.num_local_experts, self.pg_collection = config, num_local_experts, pg_collection
        hidden, intermediate = config.hidden_size, config.moe_ffn_hidden_size
        options = _activation(config)
        width = (2 if options["activation"] in GATED else 1) * intermediate
        block = getattr(config, "moe_mlp_glu_interleave_size", None)
        layout = f"blocked:{block}" if block else "concat"
        self._text = functional.options_text(grouping="counts", layout=layout, **options)
        dtype = getattr(config, "params_dtype", torch.float32)
        device = "cpu" if getattr(config, "use_cpu_initialization", False) or not torch.cuda.is_available() else "cuda"
        self.w_up = nn.Parameter(torch.empty(num_local_experts, width, hidden, dtype=dtype, device=device))
        self.w_down = nn.Parameter(torch.empty(num_local_experts, hidden, intermediate, dtype=dtype, device=device))
        for weight, initialise in ((self.w_up, getattr(config, "init_method", None)),
                                   (self.w_down, getattr(config, "output_layer_init_method", None))):
            bound = 1 / math.sqrt(weight.shape[-1])
            (initialise or (lambda w, b=bound: nn.init.uniform_(w, -b, b)))(weight)
            weight.allreduce = getattr(config, "expert_model_parallel_size", 1) == 1

    def forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs, output_buffer=None,
                grad_input_buffer=None):
        """The experts of rows that are sorted by expert. No host waits.

        Args:
            permuted_local_hidden_states: [R,d] in the type of the weights.
            tokens_per_expert: [E] as a list or a tensor on any device: rows of each expert.
            permuted_probs: [R] of a floating type, factors of the rows, or None.
            output_buffer: A hint of Megatron's, not used.
            grad_input_buffer: A hint of Megatron's, not used.

        Returns:
            (output [R,d], None).

        Raises:
            ValueError: A shape or dtype does not fit, or gradient_accumulation_fusion finds no main_grad.

        Example:
            >>> output, _ = experts(rows, [3, 0, 5], probabilities)                      # doctest: +SKIP
        """
        x = permuted_local_hidden_states
        if not isinstance(tokens_per_expert, torch.Tensor):
            tokens_per_expert = torch.tensor(tokens_per_expert)
        counts = tokens_per_expert.to(x.device, non_blocking=True)
        weights, buffers = (self.w_up, None, self.w_down, None, None, None), None
        fused = getattr(self.config, "gradient_accumulation_fusion", False) and torch.is_grad_enabled()
        if fused and not torch.compiler.is_compiling():
            buffers = tuple(None if w is None or not w.requires_grad else _main_grad(w) for w in weights)
            weights = tuple(w if w is None else _Announce.apply(w) for w in weights)
        probs = None if permuted_probs is None else permuted_probs.reshape(-1).float()
        y = functional.run(self._text, x, (None, None, None, None, None, counts, probs), weights, buffers)[0]
        return y, None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """What Megatron's dist_checkpointing saves and loads: the stacked weights of this rank as parts of
        [E_global,w*n,d] and [E_global,d,n]. The tensors are the parameters, by which the optimizer finds its state.

        Args:
            prefix: Of the keys.
            sharded_offsets: Megatron's, of the dimensions in front, such as layers.
            metadata: Megatron's, or None.

        Returns:
            Keys and Megatron's ShardedTensor of each weight.

        Raises:
            NotImplementedError: moe_mlp_glu_interleave_size is set, or metadata asks for a key per expert.

        Example:
            >>> parts = experts.sharded_state_dict(prefix="decoder.experts.")            # doctest: +SKIP
        """
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        if (metadata or {}).get("singleton_local_shards"):
            raise NotImplementedError("metadata: singleton_local_shards asks for a key per expert, but experts are "
                                      "stacked; switch it off")
        if getattr(self.config, "moe_mlp_glu_interleave_size", None):
            raise NotImplementedError("config.moe_mlp_glu_interleave_size: sharded checkpoints of interleaved weights "
                                      "are not served; switch it off")
        rank, ranks, replica = self._place()
        axis = len(sharded_offsets)
        return {f"{prefix}{theirs}.weight": ShardedTensor.from_rank_offsets(
                    f"{prefix}experts.{theirs}.weight", getattr(self, ours), *sharded_offsets, (axis, rank, ranks),
                    replica_id=(0, 0, replica), prepend_axis_num=axis)
                for ours, theirs in _NAMES}

    def _place(self):
        """(rank, ranks) of expert parallelism, and the rank among those with the same experts."""
        groups = self.pg_collection
        if groups is not None:
            return groups.ep.rank(), groups.ep.size(), groups.expt_dp.rank()
        from megatron.core import parallel_state

        return (parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_model_parallel_world_size(),
                parallel_state.get_expert_data_parallel_rank())

    def backward_dw(self) -> None:
        """Does nothing: weight gradients are made in backward.

        Raises:
            Nothing.
        """

    # Names of Megatron's TEGroupedMLP in state dicts; a sharded checkpoint comes back stacked.
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        for ours, theirs in _NAMES:
            weight = getattr(self, ours)
            for i, slice_ in enumerate((weight if keep_vars else weight.detach()).unbind(0)):
                destination[f"{prefix}{theirs}.weight{i}"] = slice_

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        def load(key, weight):
            if key not in state_dict:
                missing.append(key)
            elif state_dict[key].shape != weight.shape:
                errors.append(f"{key}: shape {tuple(state_dict[key].shape)}; {tuple(weight.shape)} is needed")
            else:
                weight.copy_(state_dict[key])

        known = set()
        with torch.no_grad():
            for ours, theirs in _NAMES:
                weight, stacked = getattr(self, ours), f"{prefix}{theirs}.weight"
                # Transformer Engine's, which says how fp8 is scaled.
                known.add(f"{prefix}{theirs}._extra_state")
                parts = {stacked: weight} if stacked in state_dict else {
                    f"{stacked}{i}": part for i, part in enumerate(weight.unbind(0))}
                known.update(parts)
                for key, part in parts.items():
                    load(key, part)
        unexpected += [key for key in state_dict if strict and key.startswith(prefix) and key not in known]


def _activation(config) -> dict:
    """Megatron computes act(min(g, c)) * (clamp(u, -c, c) + offset), each clamp only if it is set."""
    act, offset = config.activation_func, getattr(config, "glu_linear_offset", 0.0) or 0.0
    clamp = getattr(config, "activation_func_clamp_value", None)
    if not config.gated_linear_unit:
        for option in ("activation_func_clamp_value", "glu_linear_offset", "moe_mlp_glu_interleave_size"):
            if getattr(config, option, None):
                raise NotImplementedError(f"config.{option}={getattr(config, option)} with gated_linear_unit=False: "
                                          "experts with a gate alone read it; leave it out")
        return recognise("config.activation_func", act, False, ())

    numbers = {"activation_func_clamp_value": clamp, "glu_linear_offset": offset or None}
    given = ", ".join(f"{name}={value}" for name, value in numbers.items() if value is not None)

    def compute(gate, up):
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        return act(gate) * (up + offset)

    return recognise("config.activation_func" + (given and f" with {given}"), compute, True, (config,))


def _main_grad(weight):
    """What backward calls for weight.main_grad: forward must not write it, as other micro-batches may be in flight."""
    if getattr(weight, "main_grad", None) is None:
        raise ValueError("gradient_accumulation_fusion: a weight of the experts has no main_grad; wrap the model in "
                         "Megatron's DistributedDataParallel first")

    def buffer() -> torch.Tensor:
        if getattr(weight, "overwrite_main_grad", False):  # adding to zeros overwrites
            weight.main_grad.zero_()
        return weight.main_grad

    return buffer


class _Announce(torch.autograd.Function):
    """Stands before a weight whose gradient goes into main_grad: calls Megatron's hooks, which wait for a gradient."""

    @staticmethod
    def forward(ctx, weight):
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, _gradient):
        weight = ctx.weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        zero = getattr(weight, "zero_out_wgrad", False)
        return torch.zeros_like(weight) if zero else torch.empty_like(weight)

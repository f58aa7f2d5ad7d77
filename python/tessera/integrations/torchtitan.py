# SPDX-License-Identifier: Apache-2.0
"""torchtitan's routed experts, computed by Tessera.

    from tessera.integrations import torchtitan
    torchtitan.use_tessera(model)          # after it is built, before torch.compile

    --override.imports tessera.integrations.torchtitan.routed_experts     # from torchtitan 0.3 on, instead

Parameters stay torchtitan's, and so do dispatch, combine, sharding and state dicts. Its versions differ in where the
weights are; all of these are found:

    GroupedExperts   w1, w3, w2 or w1_EFD, w3_EFD, w2_EDF   gate and up [E,F,D], down [E,D,F]
    GroupedExperts   w13, w2_EDF                            gate and up rows take turns: [E,F,2,D] or [E,2F,D]
    RoutedExperts    w13.weight, w2.weight of GroupedLinear   gate rows, then up rows: [E,2,F,D]
"""

import dataclasses
import types

import torch

from tessera import functional
from tessera.recognise import recognise


def use_tessera(model: torch.nn.Module) -> int:
    """Lets Tessera compute the experts of every GroupedExperts, or RoutedExperts without one, in the model.

    Args:
        model: Of torchtitan's, built and not yet compiled.

    Returns:
        How many modules there were.

    Raises:
        ValueError: There are none.
        NotImplementedError: One has biases, an activation that Tessera does not know or linears of another kind
            (quantised, with adapters). Then nothing was replaced.

    Example:
        >>> from tessera.integrations import torchtitan
        >>> torchtitan.use_tessera(model)                                                # doctest: +SKIP
    """
    found = [module for module in model.modules() if _weights_of(module) is not None]
    if not found:
        raise ValueError("model: no module with parameters w1_EFD, w2_EDF, w3_EFD, or w13, w2_EDF, or with grouped "
                         "linears w13, w2; pass a model of torchtitan's")
    texts = [_options_of(module) for module in found]
    for module, text in zip(found, texts, strict=True):
        module._tessera_options = text
        if _has_grouped_linears(module):
            module.forward = types.MethodType(routed_experts_forward, module)
        elif hasattr(module, "_experts_forward"):  # versions whose forward dispatches and combines, too
            module._experts_forward = types.MethodType(grouped_experts_forward, module)
        else:
            module.forward = types.MethodType(grouped_experts_forward, module)
    return len(found)


def grouped_experts_forward(self, x_RD, num_tokens_per_expert_E):
    """The experts on rows that are sorted by expert. Computes in bfloat16, as torchtitan does, or in x_RD's type on the
    CPU.

    Args:
        self: torchtitan's experts module.
        x_RD: [R_alloc,d] of a floating type; rows beyond the counts give zeros.
        num_tokens_per_expert_E: [E] int32 or int64 on x_RD's device.

    Returns:
        [R_alloc,d] in x_RD's type.

    Raises:
        ValueError: A shape or dtype does not fit, or, on the CPU, the counts exceed R_alloc.

    Example:
        >>> y = torchtitan.grouped_experts_forward(experts, rows, counts)                # doctest: +SKIP
    """
    dtype = torch.bfloat16 if x_RD.is_cuda else x_RD.dtype
    weights = [w if w is None else functional.local(w).to(dtype) for w in _weights_of(self)]
    y = functional.run(self._tessera_options, functional.local(x_RD).to(dtype),
                       (None, None, None, None, None, num_tokens_per_expert_E, None), (*weights, None, None, None))[0]
    return y.type_as(x_RD)


def routed_experts_forward(self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E):
    """RoutedExperts.forward: dispatch and combine by its token_dispatcher, the experts in between.

    Args:
        self: torchtitan's RoutedExperts.
        x_TD: [T,d] of a floating type.
        topk_scores_TK: [T,K] of a floating type.
        topk_expert_ids_TK: [T,K] int64.
        num_local_tokens_per_expert_E: [E] int64: rows of each expert on this rank.

    Returns:
        [T,d] in x_TD's type.

    Raises:
        ValueError: A shape or dtype does not fit.

    Example:
        >>> o = torchtitan.routed_experts_forward(experts, x, scores, ids, counts)       # doctest: +SKIP
    """
    rows, counts, metadata = self.token_dispatcher.dispatch(x_TD, topk_scores_TK, topk_expert_ids_TK,
                                                            num_local_tokens_per_expert_E)
    return self.token_dispatcher.combine(grouped_experts_forward(self, rows, counts), metadata, x_TD)


def local_experts_forward(self, x_BLD, topk_scores_BLK, topk_expert_ids_BLK):
    """RoutedExperts.forward where all of its inner_experts are on this rank. Computes in the type that
    grouped_experts_forward does.

    Args:
        self: torchtitan's RoutedExperts.
        x_BLD: [B,L,D] of a floating type.
        topk_scores_BLK: [B,L,K] of a floating type.
        topk_expert_ids_BLK: [B,L,K] int64.

    Returns:
        [B,L,D] in x_BLD's type.

    Raises:
        ValueError: A shape or dtype does not fit.

    Example:
        >>> o = torchtitan.local_experts_forward(experts, x, scores, ids)                # doctest: +SKIP
    """
    x = functional.local(x_BLD)
    dtype = torch.bfloat16 if x.is_cuda else x.dtype
    weights = [w if w is None else functional.local(w).to(dtype) for w in _weights_of(self.inner_experts)]
    o = functional.routed_experts_with(self._tessera_options, x.to(dtype), functional.local(topk_expert_ids_BLK),
                                       functional.local(topk_scores_BLK), (*weights, None, None, None))
    return o.type_as(x_BLD)


def _has_grouped_linears(module) -> bool:
    return isinstance(getattr(module, "w13", None), torch.nn.Module)


def _weights_of(module):
    """(w_up, w_gate or None, w_down) as they are stored, w_up with the gate's rows in it where they share a tensor;
    None where the module is no experts of torchtitan's."""
    def tensor(*names):
        values = (getattr(module, name, None) for name in names)
        return next((v for v in values if isinstance(v, torch.Tensor)), None)

    if _has_grouped_linears(module):
        up, down = (getattr(getattr(module, name, None), "weight", None) for name in ("w13", "w2"))
        experts = up is not None and up.dim() == 4 and down is not None and hasattr(module, "token_dispatcher")
        return (up.flatten(1, 2), None, down) if experts else None
    fused, gate, up, down = tensor("w13"), tensor("w1_EFD", "w1"), tensor("w3_EFD", "w3"), tensor("w2_EDF", "w2")
    if down is None or down.dim() != 3:
        return None
    if fused is not None:
        return fused.flatten(1, -2), None, down
    return None if gate is None or up is None else (up, gate, down)


def _options_of(module, grouping: str = "counts") -> str:
    name, linears = type(module).__name__, _has_grouped_linears(module)
    biases = [key for key, _ in module.named_parameters() if "bias" in key]
    if biases:
        raise NotImplementedError(f"{name}: has {', '.join(biases)}, which this seam does not pass on; keep its own "
                                  "implementation")
    for key in ("w13", "w2") if linears else ():
        if type(getattr(module, key)).__name__ != "GroupedLinear":
            raise NotImplementedError(f"{name}: {key} is a {type(getattr(module, key)).__name__}, not a GroupedLinear; "
                                      "keep its own implementation")
    for key in ("output_postprocess", "expert_output_postprocess"):
        if getattr(module, key, None) is not None:
            raise NotImplementedError(f"{name}: has {key}, which this seam does not call; keep its own implementation")
    activation = getattr(module, "activation_fn", None)
    if activation is not None:
        options = recognise(name, activation, True, (module, activation))
    elif linears:
        raise NotImplementedError(f"{name}: has no activation_fn, so that its activation is not known; keep its own "
                                  "implementation")
    else:  # versions without the option compute silu(gate) * up
        options = {"activation": "swiglu"}
    layout = "interleaved" if isinstance(getattr(module, "w13", None), torch.Tensor) else "concat"
    return functional.options_text(grouping=grouping, layout=layout, **options)


try:
    from torchtitan.config.override import derive, override
    from torchtitan.models.common import moe, token_dispatcher
except ImportError:  # there is none, or one without overrides: use_tessera does without
    pass
else:
    class GroupedExperts(moe.GroupedExperts):
        """torchtitan's, with its parameters, their names and sharding, computed by Tessera.

        Args:
            config: torchtitan's.

        Raises:
            NotImplementedError: They have biases, or an activation that Tessera does not know.

        Example:
            >>> experts = GroupedExperts(config)                                         # doctest: +SKIP
        """

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(moe.GroupedExperts.Config):
            pass

        def __init__(self, config: Config):
            super().__init__(config)
            self._tessera_options = _options_of(self)

        # Under expert parallelism torchtitan finds the placement of an argument by its name.
        def forward(self, x_RD, num_tokens_per_expert_E):
            """As torchtitan's.

            Args:
                x_RD: [R,D] of a floating type, sorted by expert.
                num_tokens_per_expert_E: [E] int32 or int64 on x_RD's device: rows of each expert.

            Returns:
                [R,D] in x_RD's type.

            Raises:
                ValueError: A shape or dtype does not fit.

            Example:
                >>> y = experts(rows, counts)                                            # doctest: +SKIP
            """
            return grouped_experts_forward(self, x_RD, num_tokens_per_expert_E)

    class RoutedExperts(moe.RoutedExperts):
        """torchtitan's, without its dispatch and combine where all experts are on this rank: x is read where it lies,
        and what experts put out is not saved. Where experts are spread over ranks its own dispatch runs, with the rows
        in between computed by Tessera.

        Args:
            config: torchtitan's.

        Raises:
            NotImplementedError: Its experts have biases, or an activation that Tessera does not know.

        Example:
            >>> experts = RoutedExperts(config)                                          # doctest: +SKIP
        """

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(moe.RoutedExperts.Config):
            pass

        def __init__(self, config: Config):
            super().__init__(config)
            self._tessera_options = _options_of(self.inner_experts, grouping="slots")

        def forward(self, x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E):
            """As torchtitan's.

            Args:
                x_BLD: [B,L,D] of a floating type.
                topk_scores_BLK: [B,L,K] of a floating type.
                topk_expert_ids_BLK: [B,L,K] int64.
                num_local_tokens_per_expert_E: [E] int64: rows of each expert on this rank.

            Returns:
                [B,L,D] in x_BLD's type.

            Raises:
                ValueError: A shape or dtype does not fit.

            Example:
                >>> o = experts(x, scores, ids, counts)                                  # doctest: +SKIP
            """
            if type(self.token_dispatcher) is not token_dispatcher.LocalTokenDispatcher:
                return super().forward(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E)
            return local_experts_forward(self, x_BLD, topk_scores_BLK, topk_expert_ids_BLK)

    @override(target=moe.GroupedExperts.Config, exact=True, description="Experts computed by Tessera.")
    def grouped_experts(config: moe.GroupedExperts.Config) -> GroupedExperts.Config:
        """The override that replaces GroupedExperts, whatever dispatches.

        Args:
            config: torchtitan's, of its own GroupedExperts.

        Returns:
            The same for Tessera's.

        Raises:
            Nothing.

        Example:
            >>> tessera_config = grouped_experts(config)                                 # doctest: +SKIP
        """
        return derive(config, GroupedExperts.Config)

    @override(target=moe.RoutedExperts.Config, exact=True, description="Routed experts computed by Tessera.")
    def routed_experts(config: moe.RoutedExperts.Config) -> RoutedExperts.Config:
        """The override that replaces RoutedExperts and the GroupedExperts in it: less memory than grouped_experts.

        Args:
            config: torchtitan's, of its own RoutedExperts.

        Returns:
            The same for Tessera's.

        Raises:
            NotImplementedError: The experts in it are not torchtitan's own GroupedExperts.

        Example:
            >>> tessera_config = routed_experts(config)                                  # doctest: +SKIP
        """
        if type(config.inner_experts) is not moe.GroupedExperts.Config:
            raise NotImplementedError(f"{type(config.inner_experts).__qualname__}: not torchtitan's GroupedExperts, so "
                                      "that what it computes is not known; leave these layers out by `fqns`")
        return derive(config, RoutedExperts.Config, inner_experts=grouped_experts(config.inner_experts))

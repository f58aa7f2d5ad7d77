# SPDX-License-Identifier: Apache-2.0
"""torchtitan's routed experts, computed by Tessera.

    from tessera.integrations import torchtitan
    torchtitan.use_tessera(model)          # after it is built, before torch.compile

Parameters stay torchtitan's, and so do dispatch, combine, sharding and state dicts. Its versions differ in where the
weights are; all of these are found:

    GroupedExperts   w1, w3, w2 or w1_EFD, w3_EFD, w2_EDF   gate and up [E,F,D], down [E,D,F]
    GroupedExperts   w13, w2_EDF                            gate and up rows take turns: [E,F,2,D] or [E,2F,D]
    RoutedExperts    w13.weight, w2.weight of GroupedLinear   gate rows, then up rows: [E,2,F,D]
"""

import types

import torch

from tessera import functional
from tessera.recognise import recognise


def use_tessera(model: torch.nn.Module) -> int:
    """Lets Tessera compute the experts of every GroupedExperts, or RoutedExperts without one, in the model; returns how
    many there were.

    Errors: ValueError where there are none; NotImplementedError where one has biases, an activation that Tessera does
    not know or linears of another kind (quantised, with adapters): then nothing was replaced.
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
    """The experts of x_RD [R_alloc,d], sorted by expert, counts [E] on its device -> [R_alloc,d] in x_RD's type.
    Computes in bfloat16, as torchtitan does, or in x_RD's type on the CPU. Rows beyond the counts give zeros."""
    dtype = torch.bfloat16 if x_RD.is_cuda else x_RD.dtype
    weights = [w if w is None else functional.local(w).to(dtype) for w in _weights_of(self)]
    y = functional.run(self._tessera_options, functional.local(x_RD).to(dtype),
                       (None, None, None, None, None, num_tokens_per_expert_E, None), (*weights, None, None, None))[0]
    return y.type_as(x_RD)


def routed_experts_forward(self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E):
    """RoutedExperts.forward: dispatch and combine by its token_dispatcher, the experts in between."""
    rows, counts, metadata = self.token_dispatcher.dispatch(x_TD, topk_scores_TK, topk_expert_ids_TK,
                                                            num_local_tokens_per_expert_E)
    return self.token_dispatcher.combine(grouped_experts_forward(self, rows, counts), metadata, x_TD)


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


def _options_of(module) -> str:
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
    return functional.options_text(grouping="counts", layout=layout, **options)

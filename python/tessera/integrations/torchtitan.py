# SPDX-License-Identifier: Apache-2.0
"""torchtitan's GroupedExperts, computed by Tessera.

    from tessera.integrations import torchtitan
    torchtitan.use_tessera(model)          # after it is built, before torch.compile

Parameters stay torchtitan's (w1_EFD gate, w3_EFD up, w2_EDF down, or w13 [E,F,2,D]), and so do dispatch, combine,
sharding and state dicts.
"""

import types

import torch

from tessera import functional
from tessera.recognise import recognise


def use_tessera(model: torch.nn.Module) -> int:
    """Replaces the forward of every GroupedExperts in the model; returns how many there were.

    Errors: ValueError where there are none; NotImplementedError where one has biases or an activation that Tessera does
    not know: then nothing was replaced.
    """
    found = [module for module in model.modules() if _is_grouped_experts(module)]
    if not found:
        raise ValueError("model: no module with parameters w1_EFD, w2_EDF, w3_EFD or w13, w2_EDF; pass a model of "
                         "torchtitan's")
    texts = [_options_of(module) for module in found]
    for module, text in zip(found, texts, strict=True):
        module._tessera_options = text
        module.forward = types.MethodType(grouped_experts_forward, module)
    return len(found)


def grouped_experts_forward(self, x_RD, num_tokens_per_expert_E):
    """GroupedExperts.forward: x_RD [R_alloc,d] sorted by expert, counts [E] on its device -> [R_alloc,d] in x_RD's
    type. Computes in bfloat16, as torchtitan does, or in fp32 on the CPU. Rows beyond the counts give zeros."""
    dtype = torch.bfloat16 if x_RD.is_cuda else x_RD.dtype
    fused = getattr(self, "w13", None)
    if fused is not None:  # [E,F,2,D]: gate and up rows take turns
        w_gate, w_up = None, fused.flatten(1, 2)
    else:
        w_gate, w_up = self.w1_EFD, self.w3_EFD
    weights = [w if w is None else functional.local(w).to(dtype) for w in (w_up, w_gate, self.w2_EDF)]
    y = functional.run(self._tessera_options, functional.local(x_RD).to(dtype),
                       (None, None, None, None, None, num_tokens_per_expert_E, None), (*weights, None, None, None))[0]
    return y.type_as(x_RD)


def _is_grouped_experts(module) -> bool:
    up = hasattr(module, "w13") or hasattr(module, "w1_EFD") and hasattr(module, "w3_EFD")
    return up and hasattr(module, "w2_EDF")


def _options_of(module) -> str:
    name = type(module).__name__
    biases = [key for key, _ in module.named_parameters(recurse=False) if "bias" in key]
    if biases:
        raise NotImplementedError(f"{name}: has {', '.join(biases)}, which this seam does not pass on; keep its own "
                                  "implementation")
    activation = getattr(module, "activation_fn", None)
    if activation is None:  # versions without the option compute silu(gate) * up
        options = {"activation": "swiglu"}
    else:
        options = recognise(name, activation, True, (module, activation))
    layout = "interleaved" if getattr(module, "w13", None) is not None else "concat"
    return functional.options_text(grouping="counts", layout=layout, **options)

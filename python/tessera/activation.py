# SPDX-License-Identifier: Apache-2.0
"""The activations in plain torch operations: for shared experts, and to recognise the activation of others' code.

Formulas: docs/numerics.md. h [...,w*n] with gate, then up (concat).
"""

import functools

import torch
from torch.nn import functional

_gelu_tanh = functools.partial(functional.gelu, approximate="tanh")
_PHI = {"swiglu": functional.silu, "silu": functional.silu, "geglu": _gelu_tanh, "gelu": _gelu_tanh,
        "geglu-erf": functional.gelu, "gelu-erf": functional.gelu, "reglu": functional.relu, "relu": functional.relu,
        "relu2": lambda h: functional.relu(h).square()}


def activate(h, activation: str, alpha: float = 1.702, limit: float = 7.0, up_offset: float = 1.0):
    """act(h): [...,w*n] -> [...,n]."""
    if activation in ("relu", "relu2", "silu", "gelu", "gelu-erf"):
        return _PHI[activation](h)
    gate, up = h.chunk(2, dim=-1)
    if activation == "clamped-swiglu":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + up_offset) * gate * torch.sigmoid(alpha * gate)
    return _PHI[activation](gate) * up

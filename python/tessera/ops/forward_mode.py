# SPDX-License-Identifier: Apache-2.0
"""Forward-mode derivatives (torch.func.jvp, jacfwd, torch.autograd.forward_ad), of which Tessera has none."""

import torch
from torch.autograd import forward_ad


def refuse_tangents(*arguments) -> None:
    """Raises where a tensor of these has a tangent: results would have none, which reads as a derivative of 0."""
    if forward_ad._current_level >= 0 and any(
            isinstance(a, torch.Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in arguments):
        raise NotImplementedError("forward-mode derivatives: Tessera has none; use backward")

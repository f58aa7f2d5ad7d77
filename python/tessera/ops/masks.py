# SPDX-License-Identifier: Apache-2.0
"""Padding masks as the operators take them."""

import torch


def rows_of_mask(mask, x):
    """mask [...] of x [...,d] as [T] bool."""
    if mask is None:
        return None
    if mask.dtype is not torch.bool:
        raise ValueError(f"mask: dtype {mask.dtype}; bool is needed, True for real tokens: pass mask.bool()")
    if mask.shape != x.shape[:-1]:
        raise ValueError(f"mask: shape {list(mask.shape)}, x: {list(x.shape)}; a mask has one value per token, "
                         f"{list(x.shape[:-1])}")
    return mask.reshape(-1)

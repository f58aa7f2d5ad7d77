# SPDX-License-Identifier: Apache-2.0
"""Auxiliary losses of the router, from its logits: fp32, differentiable, in plain torch operations."""

import torch


def load_balancing_loss(logits, counts, *, scores: str = "softmax"):
    """E * sum_e (f_e / sum f) * mean_t p_te: 1 when balanced. Multiply by your coefficient.

    logits [T,E]; counts f [E] (constants; summed over ranks and micro-batches if you like). p = softmax of the logits,
    or with scores="sigmoid" the sigmoids divided by their sum. 0 for T = 0. Hugging Face's loss is K times larger.
    """
    if scores == "softmax":
        p = torch.softmax(logits.float(), dim=-1)
    elif scores == "sigmoid":
        p = torch.sigmoid(logits.float())
        p = p / (p.sum(-1, keepdim=True) + 1e-20)
    else:
        raise ValueError(f"scores={scores!r}: unknown; choose softmax or sigmoid")
    tokens, experts = logits.shape
    share = counts.float() / counts.sum().clamp(min=1)
    return experts * (share * p.sum(0)).sum() / max(tokens, 1)


def z_loss(logits):
    """mean_t logsumexp_e(logits)^2, which keeps logits small. logits [T,E]; 0 for T = 0."""
    return torch.logsumexp(logits.float(), dim=-1).square().sum() / max(logits.shape[0], 1)


@torch.no_grad()
def selection_bias_update(selection_bias, counts, *, rate: float = 1e-3, centered: bool = False):
    """Balancing without a loss, once per optimizer step, in place: bias += rate * sign(mean f - f_e).

    selection_bias [E] fp32; counts f [E], summed over micro-batches and data-parallel ranks. centered subtracts the
    mean of the update (torchtitan). All counts 0: nothing changes.
    """
    load = counts.float()
    update = rate * torch.sign(load.mean() - load)
    if centered:
        update = update - update.mean()
    return selection_bias.add_(update)

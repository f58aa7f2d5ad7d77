# SPDX-License-Identifier: Apache-2.0
"""Keeping the experts in use: auxiliary losses of the router's logits, and the update of its selection bias.

Sums are fp32 and of fixed order, on CPU and GPU with the same bits; nothing waits for the device. Counts are of any
integer or floating type: the formulas hold for means over ranks and for shares too. Floating ones are read as fp32. A
count that is negative, NaN or infinite raises ValueError on the CPU; on a GPU all counts are then taken for 0, and
check_device_values() raises.
"""

import torch

from tessera import ops

# Which router has these scores; the losses depend on nothing else of it.
_ROUTERS = {"softmax": "topk-softmax", "sigmoid": "sigmoid-bias", "sqrtsoftplus": "sqrtsoftplus"}


def router_losses(logits, counts=None, *, scores: str = "softmax", balance: float = 0.0, z: float = 0.0):
    """balance * load_balancing_loss + z * z_loss by one pass over the logits. counts: not read where balance is 0."""
    if scores not in _ROUTERS:
        raise ValueError(f"scores={scores!r}: unknown; choose {', '.join(_ROUTERS)}")
    counts = ops.countable(counts) if balance else None
    return torch.ops.tessera.router_loss.default(logits.float(), counts, _ROUTERS[scores], balance, z,
                                                 torch.is_grad_enabled() and logits.requires_grad)[0]


def load_balancing_loss(logits, counts, *, scores: str = "softmax"):
    """E * sum_e (f_e / sum f) * mean_t p_te: 1 when balanced. Multiply by your coefficient.

    logits [T,E]; counts f [E] (constants; sums or means over ranks and micro-batches if you like). p = softmax of the
    logits, or with scores="sigmoid" or "sqrtsoftplus" those values divided by their sum. 0 for T = 0. Hugging Face's
    loss is K times larger.
    """
    return router_losses(logits, counts, scores=scores, balance=1.0)


def z_loss(logits):
    """mean_t logsumexp_e(logits)^2, which keeps logits small. logits [T,E]; 0 for T = 0."""
    return router_losses(logits, z=1.0)


@torch.no_grad()
def selection_bias_update(selection_bias, counts, *, rate: float = 1e-3, centered: bool = False):
    """Balancing without a loss, once per optimizer step, in place: bias += rate * sign(mean f - f_e).

    selection_bias [E] fp32; counts f [E], sums or means over micro-batches and data-parallel ranks. centered subtracts
    the mean of the update (torchtitan). All counts 0: nothing changes.
    """
    torch.ops.tessera.update_selection_bias.default(selection_bias, ops.countable(counts), rate, centered)
    return selection_bias

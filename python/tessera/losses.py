# SPDX-License-Identifier: Apache-2.0
"""Keeping the experts in use: auxiliary losses of the router's logits, and the update of its selection bias.

Sums are fp32 and of fixed order, on CPU and GPU with the same bits; nothing waits for the device. Counts are of any
integer or floating type: the formulas hold for means over ranks and for shares too. Floating ones are read as fp32. A
count that is negative, NaN or infinite raises ValueError on the CPU; on a GPU all counts are then taken for 0, and
check_device_values() raises.
"""

import torch

from tessera import ops
from tessera.ops.masks import rows_of_mask

# Which router has these scores; the losses depend on nothing else of it.
_ROUTERS = {"softmax": "topk-softmax", "sigmoid": "sigmoid-bias", "sqrtsoftplus": "sqrtsoftplus"}


def _sequence_offsets(logits, lengths):
    """[B+1] of the sequences of logits [B,S,E], or of lengths [B]; nothing waits for them."""
    if lengths is None:
        if logits.dim() != 3:
            raise ValueError(f"lengths: absent, logits: {list(logits.shape)}; a loss per sequence needs logits "
                             "[B,S,E], or lengths [B] of the sequences that follow each other (cu_seqlens.diff())")
        sequences, length = logits.shape[:2]
        return torch.arange(sequences + 1, device=logits.device) * length
    if lengths.dim() != 1 or lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"lengths: shape {list(lengths.shape)}, dtype {lengths.dtype}; [B] of int32 or int64 is "
                         "needed")
    return torch.nn.functional.pad(lengths.long().cumsum(0), (1, 0))


def router_losses(logits, counts=None, *, scores: str = "softmax", balance: float = 0.0, z: float = 0.0,
                  sequence_balance: float = 0.0, topk_ids=None, lengths=None, mask=None):
    """balance * load_balancing_loss + z * z_loss + sequence_balance * sequence_balance_loss by one pass over the
    logits.

    Args:
        logits: [T,E] or [B,S,E] of any floating type, read as fp32; differentiable.
        counts: [E]; not read where balance is 0.
        scores: softmax, sigmoid or sqrtsoftplus.
        balance: Coefficient of load_balancing_loss.
        z: Coefficient of z_loss.
        sequence_balance: Coefficient of sequence_balance_loss.
        topk_ids: [T,K] or [B,S,K]; only for sequence_balance.
        lengths: [B] int32 or int64, or None; only for sequence_balance.
        mask: [T] or [B,S] bool, or None: False for padding, which has no part in any mean and no gradient, whatever its
            logits are. The counts of a masked layer have no padding.

    Returns:
        A scalar in fp32.

    Raises:
        ValueError: A shape, dtype or value is none of these.

    Example:
        >>> logits, counts = torch.randn(5, 8), torch.arange(8)
        >>> loss = tessera.losses.router_losses(logits, counts, balance=0.01, z=1e-3)
    """
    if scores not in _ROUTERS:
        raise ValueError(f"scores={scores!r}: unknown; choose {', '.join(_ROUTERS)}")
    counts = ops.countable(counts) if balance else None
    token_mask = rows_of_mask(mask, logits)
    offsets = None
    if sequence_balance:
        if topk_ids is None or topk_ids.shape[:-1] != logits.shape[:-1]:
            raise ValueError(f"topk_ids: {None if topk_ids is None else list(topk_ids.shape)}, logits: "
                             f"{list(logits.shape)}; ids of K experts for every token are needed, "
                             f"{[*logits.shape[:-1], 'K']}")
        offsets, topk_ids = _sequence_offsets(logits, lengths), topk_ids.reshape(-1, topk_ids.shape[-1])
    else:
        topk_ids = None
    rows = logits.float()
    rows = rows if rows.dim() < 3 else rows.reshape(-1, rows.shape[-1])
    return torch.ops.tessera.router_loss.default(rows, counts, _ROUTERS[scores], balance, z,
                                                 torch.is_grad_enabled() and logits.requires_grad, sequence_balance,
                                                 topk_ids, offsets, token_mask)[0]


def load_balancing_loss(logits, counts, *, scores: str = "softmax", mask=None):
    """E * sum_e (f_e / sum f) * mean_t p_te: 1 when balanced. Multiply it by your coefficient.

    Hugging Face's loss is K times larger.

    Args:
        logits: [T,E] or [B,S,E] of any floating type, read as fp32; differentiable.
        counts: f [E] of any integer or floating type, constants: RouterOutput.topk_counts, sums or means over ranks and
            micro-batches if you like.
        scores: What p is: softmax of the logits, or sigmoid or sqrtsoftplus of them divided by their sum.
        mask: [T] or [B,S] bool, or None: False for padding, which has no part in any mean and no gradient, whatever its
            logits are. The counts of a masked layer have no padding.

    Returns:
        A scalar in fp32; 0 for T = 0.

    Raises:
        ValueError: scores is unknown, a shape does not fit, or, on the CPU, a count is negative or not finite.

    Example:
        >>> tessera.load_balancing_loss(torch.zeros(5, 8), torch.full((8,), 10)).item()
        1.0
    """
    return router_losses(logits, counts, scores=scores, balance=1.0, mask=mask)


def sequence_balance_loss(logits, topk_ids, *, lengths=None, scores: str = "softmax", mask=None):
    """The mean over sequences b of E * sum_e (f_be / sum_e f_be) * mean_{t in b} p_te, f_be being how many tokens of b
    chose e: DeepSeek-V3's balance loss per sequence, 1 when every sequence is balanced.

    Multiply it by your coefficient. Sequences without tokens, or with padding alone, are left out of the mean.

    Args:
        logits: [B,S,E], a sequence a row, or [T,E] with lengths; of any floating type, read as fp32; differentiable.
        topk_ids: [B,S,K] or [T,K] int32 or int64; ids outside [0,E) count for none.
        lengths: [B] int32 or int64: tokens of sequences that follow each other and make up all T tokens (of cu_seqlens:
            cu_seqlens.diff()), or None.
        scores: What p is: softmax of the logits, or sigmoid or sqrtsoftplus of them divided by their sum.
        mask: [T] or [B,S] bool, or None: False for padding, which has no part in any mean and no gradient, whatever its
            logits are. The counts of a masked layer have no padding.

    Returns:
        A scalar in fp32.

    Raises:
        ValueError: scores is unknown, a shape does not fit, or, on the CPU, the lengths do not add up to T. On a GPU
            check_device_values() reports them.

    Example:
        >>> logits, topk_ids = torch.randn(10, 8), torch.randint(8, (10, 2))
        >>> loss = tessera.sequence_balance_loss(logits, topk_ids, lengths=torch.tensor([4, 6]))
    """
    return router_losses(logits, scores=scores, sequence_balance=1.0, topk_ids=topk_ids, lengths=lengths, mask=mask)


def z_loss(logits, *, mask=None):
    """mean_t logsumexp_e(logits)^2, which keeps logits small. Multiply it by your coefficient.

    Args:
        logits: [T,E] or [B,S,E] of any floating type, read as fp32; differentiable.
        mask: [T] or [B,S] bool, or None: False for padding, which has no part in any mean and no gradient, whatever its
            logits are. The counts of a masked layer have no padding.

    Returns:
        A scalar in fp32; 0 for T = 0.

    Raises:
        ValueError: A shape does not fit.

    Example:
        >>> loss = tessera.z_loss(torch.randn(5, 8))
    """
    return router_losses(logits, z=1.0, mask=mask)


@torch.no_grad()
def selection_bias_update(selection_bias, counts, *, rate: float = 1e-3, centered: bool = False):
    """Balancing without a loss, once per optimizer step, in place: bias += rate * sign(mean f - f_e).

    Args:
        selection_bias: [E] fp32, which is changed.
        counts: f [E] of any integer or floating type, sums or means over micro-batches and data-parallel ranks. Where
            all are 0 nothing changes.
        rate: By how much a bias moves.
        centered: Whether the mean of the update is subtracted (torchtitan).

    Returns:
        selection_bias.

    Raises:
        ValueError: A shape or dtype does not fit, or, on the CPU, a count is negative or not finite.

    Example:
        >>> tessera.selection_bias_update(torch.zeros(3), torch.tensor([4, 1, 1]), rate=0.5)
        tensor([-0.5000,  0.5000,  0.5000])
    """
    torch.ops.tessera.update_selection_bias.default(selection_bias, ops.countable(counts), rate, centered)
    return selection_bias

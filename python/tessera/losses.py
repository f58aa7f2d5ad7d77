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
    """balance * load_balancing_loss + z * z_loss + sequence_balance * sequence_balance_loss by one pass over the logits
    [T,E] or [B,S,E]. counts: not read where balance is 0; topk_ids and lengths: where sequence_balance is.

    mask [T] or [B,S] bool: False for padding, which has no part in any mean and no gradient, whatever its logits are.
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
    """E * sum_e (f_e / sum f) * mean_t p_te: 1 when balanced. Multiply by your coefficient.

    logits [T,E] or [B,S,E]; counts f [E] (constants; sums or means over ranks and micro-batches if you like). p is the
    softmax of the logits, or with scores="sigmoid" or "sqrtsoftplus" those values divided by their sum. 0 for T = 0.
    Hugging Face's loss is K times larger. mask as for router_losses; the counts of a masked layer have no padding.
    """
    return router_losses(logits, counts, scores=scores, balance=1.0, mask=mask)


def sequence_balance_loss(logits, topk_ids, *, lengths=None, scores: str = "softmax", mask=None):
    """The mean over sequences b of E * sum_e (f_be / sum_e f_be) * mean_{t in b} p_te, f_be being how many tokens of b
    chose e: DeepSeek-V3's balance loss per sequence, 1 when every sequence is balanced. Multiply by your coefficient.

    logits [B,S,E] with topk_ids [B,S,K], a sequence a row; or [T,E] with topk_ids [T,K] and lengths [B] int32 or int64,
    of sequences that follow each other and make up all T tokens (of cu_seqlens: cu_seqlens.diff()). Ids outside [0,E)
    count for none. Sequences without tokens, or with padding alone, are left out of the mean. scores as for
    load_balancing_loss, mask as for router_losses. Lengths that do not add up to T raise ValueError on the CPU; on a
    GPU check_device_values() tells of them.

        loss = tessera.sequence_balance_loss(router.logits, router.topk_ids, lengths=cu_seqlens.diff())
    """
    return router_losses(logits, scores=scores, sequence_balance=1.0, topk_ids=topk_ids, lengths=lengths, mask=mask)


def z_loss(logits, *, mask=None):
    """mean_t logsumexp_e(logits)^2, which keeps logits small. logits [T,E] or [B,S,E]; 0 for T = 0. mask as for
    router_losses."""
    return router_losses(logits, z=1.0, mask=mask)


@torch.no_grad()
def selection_bias_update(selection_bias, counts, *, rate: float = 1e-3, centered: bool = False):
    """Balancing without a loss, once per optimizer step, in place: bias += rate * sign(mean f - f_e).

    selection_bias [E] fp32; counts f [E], sums or means over micro-batches and data-parallel ranks. centered subtracts
    the mean of the update (torchtitan). All counts 0: nothing changes.
    """
    torch.ops.tessera.update_selection_bias.default(selection_bias, ops.countable(counts), rate, centered)
    return selection_bias

# SPDX-License-Identifier: Apache-2.0
"""Losses of the router's logits and the update of its selection bias as operators."""

import ctypes

import torch

from tessera import library
from tessera.library import RouterLossArgs, SelectionBiasArgs
from tessera.ops.forward_mode import refuse_tangents
from tessera.ops.prepared_calls import KINDS, PreparedCall, describe, here, one_device, signature
from tessera.options import parse


def countable(counts: torch.Tensor) -> torch.Tensor:
    """Counts as the library takes them: integers exact, fractions in fp32."""
    if counts.dtype in (torch.int32, torch.int64, torch.float32):
        return counts
    if counts.dtype.is_complex:
        raise ValueError(f"counts: dtype {counts.dtype}; integers or real floating-point numbers are needed")
    return counts.to(torch.float32 if counts.dtype.is_floating_point else torch.int64)


_INPUTS = ("logits", "topk_counts", "topk_ids", "sequence_offsets", "token_mask")


def router_loss(logits, counts, router, balance, z, wants_gradient, sequence_balance=0.0, topk_ids=None,
                sequence_offsets=None, token_mask=None):
    """(the weighted sum of the losses, its gradient [T,E] or nothing)."""
    tensors, weights = (logits, counts, topk_ids, sequence_offsets, token_mask), (balance, z, sequence_balance)
    key = ("router_loss", router, weights, wants_gradient, torch.get_num_threads(), signature(tensors))
    prepared = here.prepared.get(key) or _prepare_loss(key, tensors, router, weights, wants_gradient)
    losses, sequence_loss, dlogits = prepared.run([t for t in tensors if t is not None])
    return (losses.sum() if not sequence_balance else losses.sum() + sequence_loss[0]), dlogits


def _check_counts(counts, experts: int) -> None:
    """As the caller spells them."""
    if counts is not None and tuple(counts.shape) != (experts,):
        raise ValueError(f"counts: shape {list(counts.shape)}; [{experts}] is needed, a count of each expert")


def _prepare_loss(key, tensors: tuple, router: str, weights: tuple, wants_gradient: bool) -> PreparedCall:
    logits, sequence_offsets = tensors[0], tensors[3]
    if logits.dim() != 2:
        raise ValueError(f"logits: {tuple(logits.shape)}; [T,E] are needed")
    tokens, experts = logits.shape
    _check_counts(tensors[1], experts)
    balance, z, sequence_balance = weights
    sequences = sequence_offsets.shape[0] - 1 if sequence_balance else 0
    desc = parse(f"router={router} top_k=1").desc(
        top_k=1, tokens=tokens, hidden=1, intermediate=1, experts=experts, dtype=library.FP32,
        ids_dtype=library.INT32, separate=False, bias=False)
    args = RouterLossArgs(balance=balance, z=z, sequence_balance=sequence_balance)
    prepared = PreparedCall("router_loss", logits.device, args, desc)
    prepared.read(_INPUTS, tensors)
    prepared.write("losses", (2,), torch.float32)
    prepared.write("sequence_loss" if sequence_balance else None, (1 if sequence_balance else 0,), torch.float32)
    if wants_gradient:
        prepared.write("dlogits", (tokens, experts), torch.float32)
    else:
        prepared.write(None, (0,), torch.float32)
    return prepared.ready(key, library.router_loss_workspace_bytes(prepared.context, desc, sequences))


def fake_router_loss(logits, counts, router, balance, z, wants_gradient, *_):
    return logits.new_empty(()), logits.new_empty(logits.shape if wants_gradient else (0,))


class RouterLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, counts, router, balance, z, *others):
        with torch._C._AutoDispatchBelowAutograd():
            loss, dlogits = torch.ops.tessera.router_loss.default(logits, counts, router, balance, z, True, *others)
        ctx.save_for_backward(dlogits)
        ctx.mark_non_differentiable(dlogits)
        ctx.others = len(others)
        return loss, dlogits

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss, _):
        return dloss * ctx.saved_tensors[0], *(None,) * (4 + ctx.others)


def router_loss_autograd(logits, counts, router, balance, z, wants_gradient, *others):
    refuse_tangents(logits)
    if wants_gradient:
        return RouterLoss.apply(logits, counts, router, balance, z, *others)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.tessera.router_loss.default(logits, counts, router, balance, z, False, *others)


def update_selection_bias(selection_bias, counts, rate, centered) -> None:
    one_device([("selection_bias", selection_bias), ("counts", counts)])
    device = selection_bias.device
    if selection_bias.dim() == 1:
        _check_counts(counts, selection_bias.shape[0])
    args = SelectionBiasArgs(size=ctypes.sizeof(SelectionBiasArgs), rate=rate, subtract_mean=centered)
    for name, tensor in (("topk_counts", counts), ("selection_bias", selection_bias)):
        field = getattr(args, name)
        describe(name, field, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        field.data = tensor.data_ptr()
    cuda = device.type == "cuda"
    context = library.context(KINDS[device.type], device.index or 0, 0 if cuda else torch.get_num_threads())
    stream = torch.cuda.current_stream(device).cuda_stream if cuda else None
    library.check(library.load().tessera_update_selection_bias(context, ctypes.addressof(args), stream))


def fake_update_selection_bias(selection_bias, counts, rate, centered) -> None:
    pass

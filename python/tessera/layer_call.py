# SPDX-License-Identifier: Apache-2.0
"""One call of a layer: options as text, tensors as the library reads them, and the shortest way to it."""

import functools

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tessera import ops
from tessera.ops.autograd import recall
from tessera.options import Options


def _text(*values) -> str:
    return Options(*values).text()


_cached_text = functools.lru_cache(maxsize=4096)(_text)


def options_text(activation="swiglu", alpha=1.702, limit=7.0, up_offset=1.0, layout="concat",
                 router="given", top_k=1, route_scale=1.0, normalize_scores=False, groups=0, top_groups=0,
                 capacity=0, rounding="none", tile=128, seed=0, layer=0, save="h", grouping="slots",
                 logits=False, column_chunk=0, precision="native",
                 scales="fp32", weight_codes=False) -> str:
    """Options (options.py) as the text that the operators take: under torch.compile a constant of the graph."""
    make = _text if is_compiling() else _cached_text
    return make(activation, alpha, limit, up_offset, layout, router, top_k, route_scale, normalize_scores, groups,
                top_groups, capacity, rounding, tile, seed, layer, save, grouping, logits, column_chunk, precision,
                scales, weight_codes)


def local(tensor):
    """A DTensor's shard on this rank; other tensors unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def as_rows(name: str, tensor):
    """As a matrix: of any rank but 0."""
    if not tensor.dim():
        raise ValueError(f"{name}: rank 0; the last dimension is needed, shape [.., size]")
    return tensor.reshape(-1, tensor.shape[-1])


def run(text: str, x, routing: tuple, weights: tuple, buffers: tuple | None = None, with_tables: bool = False,
        step: int = 0, token_mask=None, codes: tuple = ()):
    """One layer call: results of moe_forward where a gradient or the tables are wanted, else [o].

    routing: topk_ids, topk_weights, w_router, b_router, selection_bias, expert_offsets, row_scores (or None each);
    weights: as WEIGHTS (ops/layer.py); buffers: weight gradients are added into these in backward (eager only);
    token_mask: [T] bool or None; codes: as WEIGHT_CODES (ops/layer.py), where the options say weight_codes.
    """
    arguments, compiling = (x, *routing, *weights, token_mask, *codes), is_compiling()
    forward_mode = forward_ad._current_level >= 0  # then moe_forward, whose autograd refuses tangents
    if not compiling and not step and not forward_mode:
        call, tensors = recall(text, arguments)
        if call is not None:
            return _run(call, tensors, buffers, step)
    if not compiling and torch._C._get_tracing_state() is not None:
        raise NotImplementedError("torch.jit.trace: Tessera's calls depend on shapes, which a trace takes for "
                                  "constants; use torch.compile or torch.export")
    cast = torch._C._is_any_autocast_enabled()
    straight = not compiling and not forward_mode and ops.autograd.direct()
    gradients, plain = False, True
    for tensor in arguments:
        if tensor is not None:
            plain = plain and type(tensor) in ops.autograd.PLAIN and (compiling or not tensor.is_neg())
            gradients = gradients or tensor.requires_grad
    alike = plain and not cast and not compiling and not step
    if not plain:
        arguments = tuple([local(t) for t in arguments])
        if not compiling:  # the memory of a tensor that is negated lazily has the other sign
            arguments = tuple([t if t is None else t.resolve_neg() for t in arguments])
        plain = all(t is None or type(t) in ops.autograd.PLAIN for t in arguments)
    if cast:
        arguments = autocast(arguments, _UNCAST, _ROUTER)
    training = gradients and torch.is_grad_enabled()
    straight = straight and plain and not x.is_meta  # on meta there is nothing to compute: the fake kernels answer
    if compiling or forward_mode and buffers is None or not (training or straight and not with_tables):
        if training or with_tables or forward_mode:
            return torch.ops.tessera.moe_forward.default(*ops.layer.join_inputs(arguments, text, step))
        return (torch.ops.tessera.moe_inference.default(*ops.layer.join_inputs(arguments, text, step)),)
    prepared = ops.layer.prepared_forward(arguments, text, step, training) if straight else None
    call = ops.autograd.Call(text, arguments, with_tables, training, prepared)
    if straight and alike:
        call.remember(arguments)
    return _run(call, call.present(arguments), buffers, step)


def _run(call: ops.autograd.Call, tensors: tuple, buffers: tuple | None, step: int):
    if not call.training:
        return call.prepared.run(tensors, step=step)
    apply = ops.autograd.Layer.apply if call.prepared is None else ops.autograd.apply_directly
    results = apply((call, buffers, step), *tensors)
    return results if call.everything else (results,)


# Positions in INPUTS that stay as they are under autocast: ids, scores, biases of the selection, the mask, codes.
_UNCAST = frozenset((1, 2, 5, 6, 7, *range(14, 21)))
_ROUTER = frozenset((3, 4))  # stay too where they are fp32


def autocast(arguments: tuple, uncast: frozenset = frozenset(), router: frozenset = frozenset()) -> tuple:
    """In the type that autocast wants on the device of the first of them, where it is enabled there. `uncast` stay as
    they are, `router` where they are fp32: logits are sensitive, and their GEMM is small."""
    device = arguments[0].device.type
    if not torch.is_autocast_enabled(device):
        return arguments
    dtype = torch.get_autocast_dtype(device)
    return tuple([t if t is None or i in uncast or i in router and t.dtype is torch.float32 else t.to(dtype)
                  for i, t in enumerate(arguments)])

# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMMs as operators: kernels, fake kernels and autograd."""

import torch

from tessera import library
from tessera.library import GroupedGemmArgs
from tessera.ops.forward_mode import refuse_tangents
from tessera.ops.prepared_calls import PreparedCall, here, one_device, pairs, signature

_NAMES, _WGRAD_NAMES = ("a", "b", "bias", "expert_offsets"), ("a", "b", "expert_offsets")


def _run_grouped_gemm(kind: int, names: tuple, tensors: tuple, c_shape: tuple, transpose_b: bool) -> torch.Tensor:
    tensors = (tensors[0].contiguous(), *tensors[1:])  # the library wants it so on a GPU
    key = ("grouped_gemm", kind, transpose_b, torch.get_num_threads(), signature(tensors))
    prepared = here.prepared.get(key)
    if prepared is None:
        _check(names, tensors)
        a = tensors[0]
        prepared = PreparedCall("grouped_gemm", a.device, GroupedGemmArgs(kind=kind, transpose_b=transpose_b))
        prepared.read(names, tensors)
        prepared.write("c", c_shape, a.dtype)
        prepared.ready(key, library.grouped_gemm_workspace_bytes(prepared.context, prepared.args))
    return prepared.run([t for t in tensors if t is not None])[0]


def grouped_gemm(a, b, bias, expert_offsets, transpose_b):
    if a.dim() != 2 or b.dim() != 3:
        _check(_NAMES, (a, b, bias, expert_offsets))
    shape = (a.shape[0], b.shape[2 if transpose_b else 1])
    return _run_grouped_gemm(0, _NAMES, (a, b, bias, expert_offsets), shape, transpose_b)


def fake_grouped_gemm(a, b, bias, expert_offsets, transpose_b):
    return a.new_empty((a.shape[0], b.shape[2 if transpose_b else 1]))


def grouped_gemm_wgrad(a, b, expert_offsets):
    if a.dim() != 2 or b.dim() != 2 or expert_offsets.dim() != 1:
        _check(_WGRAD_NAMES, (a, b, expert_offsets))
    shape = (expert_offsets.shape[0] - 1, a.shape[1], b.shape[1])
    return _run_grouped_gemm(1, _WGRAD_NAMES, (a, b, expert_offsets), shape, False)


def fake_grouped_gemm_wgrad(a, b, expert_offsets):
    return a.new_empty((expert_offsets.shape[0] - 1, a.shape[1], b.shape[1]))


def _check(names: tuple, tensors: tuple) -> None:
    """What the library would report only of two or three tensors together."""
    one_device(pairs(names, tensors))
    ranks = (2, 3, 2, 1) if names is _NAMES else (2, 2, 1)
    for name, tensor, rank in zip(names, tensors, ranks, strict=True):
        if tensor is not None and tensor.dim() != rank:
            raise ValueError(f"{name}: rank {tensor.dim()}, shape {list(tensor.shape)}; rank {rank} is needed")
    a, b = tensors[:2]
    if a.dtype != b.dtype:
        raise ValueError(f"a: dtype {a.dtype}, b: {b.dtype}; both have the same: convert one of them")


class GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, bias, expert_offsets, transpose_b):
        with torch._C._AutoDispatchBelowAutograd():
            c = torch.ops.tessera.grouped_gemm.default(a, b, bias, expert_offsets, transpose_b)
        ctx.save_for_backward(a, b, expert_offsets)
        ctx.transpose_b, ctx.has_bias = transpose_b, bias is not None
        return c

    @staticmethod
    def backward(ctx, dc):
        a, b, offsets = ctx.saved_tensors
        wants, ops = ctx.needs_input_grad, torch.ops.tessera
        da = ops.grouped_gemm.default(dc, b, None, offsets, not ctx.transpose_b) if wants[0] else None
        db = dbias = None
        if wants[1]:
            pair = (a, dc) if ctx.transpose_b else (dc, a)
            db = ops.grouped_gemm_wgrad.default(*pair, offsets)
        if ctx.has_bias and wants[2]:
            ones = dc.new_ones((dc.shape[0], 8))  # rows of 16 bytes, which fast kernels ask for
            dbias = ops.grouped_gemm_wgrad.default(dc, ones, offsets)[..., 0].contiguous()
        return da, db, dbias, None, None


def grouped_gemm_autograd(*arguments):
    refuse_tangents(*arguments)
    if torch.is_grad_enabled():
        return GroupedGemm.apply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.tessera.grouped_gemm.default(*arguments)

# SPDX-License-Identifier: Apache-2.0
"""The operator that quantises expert weights: codes and scales as fp8 layers read them."""

import torch

from tessera import library
from tessera.ops.prepared_calls import DTYPES, KINDS, contiguous_strides, describe, one_device, pairs, readable
from tessera.options import Options, parse

# As in tessera_weight_codes, without its prefix in the arguments of calls.
FIELDS = ("up", "up_scales", "down", "down_scales", "up_transposed", "down_transposed")
CODES = torch.float8_e4m3fn
_BLOCK = 128


def sizes_of(options: Options, w_up: torch.Tensor, w_gate: torch.Tensor | None) -> tuple:
    """(E, n, d), from whatever shape the up weight has."""
    if w_up.dim() != 3:
        raise ValueError(f"w_up: rank {w_up.dim()}; a tensor of rank 3 is needed, experts first")
    rows, hidden = w_up.shape[2 if options.transposed else 1], w_up.shape[1 if options.transposed else 2]
    if w_gate is not None:
        return w_up.shape[0], w_up.shape[1], w_up.shape[2]
    if rows % options.up_width:
        raise ValueError(f"w_up: {rows} rows per expert; {options.activation} needs an even number, gate and up")
    return w_up.shape[0], rows // options.up_width, hidden


def _shapes(options: Options, w_up, w_gate, transposed: bool) -> list:
    """(shape, dtype) of each result, of FIELDS."""
    experts, n, d = sizes_of(options, w_up, w_gate)
    w, fp32 = options.up_width, torch.float32
    shapes = [((experts, w, n, d), CODES), ((experts, n // _BLOCK, d // _BLOCK, w), fp32),
              ((experts, d, n), CODES), ((experts, d // _BLOCK, n // _BLOCK), fp32)]
    return shapes + ([((experts, d, w * n), CODES), ((experts, n, d), CODES)] if transposed else [])


def quantise_weights(w_up, w_gate, w_down, text: str, transposed: bool) -> list[torch.Tensor]:
    options, device = parse(text), w_up.device
    present = pairs(("w_up", "w_gate", "w_down"), (w_up, w_gate, w_down))
    one_device(present)
    experts, intermediate, hidden = sizes_of(options, w_up, w_gate)
    if w_up.dtype is not torch.bfloat16:
        raise ValueError(f"w_up: dtype {w_up.dtype}; layers that read codes store bf16, and codes of another type are "
                         "not theirs; convert the weights")
    desc = options.desc(top_k=1, tokens=1, hidden=hidden, intermediate=intermediate, experts=experts,
                        dtype=DTYPES[w_up.dtype], ids_dtype=library.INT32, separate=w_gate is not None, bias=False)
    weights, codes, kept = library.ExpertWeights(), library.WeightCodes(), []

    def fill(struct, name: str, tensor: torch.Tensor, strides) -> None:
        field = getattr(struct, name)
        describe(name, field, tensor.shape, strides, tensor.dtype, device)
        field.data = tensor.data_ptr()
        kept.append(tensor)  # until the call is made

    for name, tensor in present:
        tensor = tensor if readable(tensor) else tensor.contiguous()
        fill(weights, name, tensor, tensor.stride() if tensor.numel() else contiguous_strides(tensor.shape))
    results = [torch.empty(shape, dtype=dtype, device=device)
               for shape, dtype in _shapes(options, w_up, w_gate, transposed)]
    for name, result in zip(FIELDS, results, strict=False):
        fill(codes, name, result, contiguous_strides(result.shape))
    if device.type == "cuda":
        with torch.cuda.device(device):
            handle = library.context(KINDS["cuda"], device.index or 0, 0)
            library.quantise_weights(handle, desc, weights, codes, torch.cuda.current_stream().cuda_stream)
    else:
        handle = library.context(KINDS["cpu"], 0, torch.get_num_threads())
        library.quantise_weights(handle, desc, weights, codes, None)
    return results


def fake_quantise_weights(w_up, w_gate, _w_down, text: str, transposed: bool) -> list[torch.Tensor]:
    return [w_up.new_empty(shape, dtype=dtype) for shape, dtype in _shapes(parse(text), w_up, w_gate, transposed)]

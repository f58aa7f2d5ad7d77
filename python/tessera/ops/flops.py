# SPDX-License-Identifier: Apache-2.0
"""FLOPs of every operator for torch.utils.flop_counter: those of its GEMMs, as work.hpp has them.

R rows are computed. Forward has 2(w+1) R n d and the router's 2TdE; backward, where every gradient is wanted, twice
that. With K experts per token R = T*K: how many rows token rounding adds, how many ids are sentinels and how many
tokens are padding depends on values that nobody reads here.
Rows that the caller grouped count as they are allocated. Elementwise work is not counted, as torch counts none.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from tessera.ops.layer import (
    GRADIENTS, INPUTS, SAVED, WEIGHTS, intermediate_of, slots_of, split_inputs, split_saved, top_k_of,
)
from tessera.options import Options, parse


def _rows(options: Options, tokens, experts, top_k):
    return options.slots(tokens, experts, top_k, torch.sym_min) if options.router == "expert-choice" else tokens * top_k


def _projection(options: Options, named: dict, rows):
    """FLOPs of the down projection; the up projection has `up_width` times as many."""
    return 2 * rows * intermediate_of(options, named["w_up"], named["w_gate"]) * named["x"].shape[1]


def _router(named: dict):
    return 2 * named["x"].shape[0] * named["x"].shape[1] * named["w_up"].shape[0]


def _forward(*arguments, **_results):
    tensors, text, _ = split_inputs(arguments)
    named, options = dict(zip(INPUTS, tensors, strict=False)), parse(text)
    rows = _rows(options, named["x"].shape[0], named["w_up"].shape[0], top_k_of(options, named["topk_ids"]))
    router = _router(named) if options.has_router else 0
    return (options.up_width + 1) * _projection(options, named, rows) + router


def _backward(*arguments, **_results):
    """Of the gradients that are wanted: da is made for any of them, and h once more where forward saved x alone."""
    tensors, buffers, text, needs = split_saved(arguments)
    named, options = dict(zip(SAVED, tensors, strict=False)), parse(text)
    wanted = {name for bit, name in enumerate(GRADIENTS) if needs >> bit & 1}
    # Those of moe_backward_accumulate, which adds these gradients there.
    wanted |= {"d" + name for name, buffer in zip(WEIGHTS, buffers, strict=bool(buffers)) if buffer is not None}
    if options.has_router:
        rows = _rows(options, named["x"].shape[0], named["w_up"].shape[0], options.top_k)
    else:
        rows = slots_of(options, named)
    projections = 1 + ("dw_down" in wanted)
    if options.save == "x":
        projections += options.up_width
    if "dx" in wanted:
        projections += options.up_width
    projections += len({"dw_up", "dw_gate"} & wanted) * (1 if named["w_gate"] is not None else options.up_width)
    routers = len({"dx", "dw_router"} & wanted) if options.has_router else 0
    return projections * _projection(options, named, rows) + routers * _router(named)


def _route(x, w_router, *_arguments, **_results):
    return 2 * x.shape[0] * x.shape[1] * w_router.shape[0]


def _grouped_gemm(a, b, _bias, _expert_offsets, transpose_b, **_results):
    return 2 * a.shape[0] * a.shape[1] * b.shape[2 if transpose_b else 1]


def _grouped_gemm_wgrad(a, b, *_arguments, **_results):
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


def _nothing(*_arguments, **_results):
    return 0


FORMULAS = {"moe_forward": _forward, "moe_inference": _forward, "moe_backward": _backward,
            "moe_backward_accumulate": _backward, "route": _route, "grouped_gemm": _grouped_gemm,
            "grouped_gemm_wgrad": _grouped_gemm_wgrad, "router_loss": _nothing, "update_selection_bias": _nothing,
            "quantise_weights": _nothing}


def register() -> None:
    for name, formula in FORMULAS.items():
        register_flop_formula(getattr(torch.ops.tessera, name), get_raw=True)(formula)

# SPDX-License-Identifier: Apache-2.0
"""The layer as functions of tensors.

Letters: T tokens, d hidden, n intermediate, E experts, K experts per token; w = 2 for gated activations, else 1.
All functions are differentiable once, deterministic (equal bits from run to run), and raise ValueError for bad
input, NotImplementedError for what this version does not serve, with rule, value and remedy in one line.
"""

import functools
from typing import NamedTuple

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tessera import library, ops
from tessera.ops import memory
from tessera.ops.autograd import recall
from tessera.ops.masks import rows_of_mask
from tessera.ops.plans import here
from tessera.options import Options


class RouterOutput(NamedTuple):
    """What the router did. logits are differentiable (auxiliary losses); nothing waits for the device.

    Where tokens differ in their number of experts (token rounding, expert-choice) topk_ids and topk_weights are [P]:
    those of token t from token_offsets[t] on; after token_offsets[T] they are -1 and 0.
    """

    logits: torch.Tensor                 # [T,E] fp32
    topk_ids: torch.Tensor               # [T,K] int32
    topk_weights: torch.Tensor           # [T,K] fp32, detached
    counts: torch.Tensor                 # [E] int32: rows that each expert computed
    topk_counts: torch.Tensor            # [E] int32: the same before token rounding, for losses and balancing
    token_offsets: torch.Tensor | None   # [T+1] int32, or None where every token has K experts


def _text(*values) -> str:
    return Options(*values).text()


_cached_text = functools.lru_cache(maxsize=4096)(_text)


def options_text(activation="swiglu", alpha=1.702, limit=7.0, up_offset=1.0, layout="concat",
                 router="given", top_k=1, route_scale=1.0, normalize_scores=False, groups=0, top_groups=0,
                 capacity=0, rounding="none", tile=128, seed=0, layer=0, save="h", grouping="slots",
                 logits=False, column_chunk=0) -> str:
    """Options (options.py) as the text that the operators take: under torch.compile a constant of the graph."""
    make = _text if is_compiling() else _cached_text
    return make(activation, alpha, limit, up_offset, layout, router, top_k, route_scale, normalize_scores, groups,
                top_groups, capacity, rounding, tile, seed, layer, save, grouping, logits, column_chunk)


def local(tensor):
    """A DTensor's shard on this rank; other tensors unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _rows(name: str, tensor):
    """As a matrix: of any rank but 0."""
    if not tensor.dim():
        raise ValueError(f"{name}: rank 0; the last dimension is needed, shape [.., size]")
    return tensor.reshape(-1, tensor.shape[-1])


def run(text: str, x, routing: tuple, weights: tuple, buffers: tuple | None = None, with_tables: bool = False,
        step: int = 0, token_mask=None):
    """One layer call: results of moe_forward where a gradient or the tables are wanted, else [o].

    routing: topk_ids, topk_weights, w_router, b_router, selection_bias, expert_offsets, row_scores (or None each);
    weights: as WEIGHTS (ops/layer.py); buffers: weight gradients are added into these in backward (eager only);
    token_mask: [T] bool or None.
    """
    arguments, compiling = (x, *routing, *weights, token_mask), is_compiling()
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
    plan = ops.layer.plan_forward(arguments, text, step, training) if straight else None
    call = ops.autograd.Call(text, arguments, with_tables, training, plan)
    if straight and alike:
        call.remember(arguments)
    return _run(call, call.present(arguments), buffers, step)


def _run(call: ops.autograd.Call, tensors: tuple, buffers: tuple | None, step: int):
    if not call.training:
        return call.plan.run(tensors, step=step)
    apply = ops.autograd.Layer.apply if call.plan is None else ops.autograd.apply_directly
    results = apply((call, buffers, step), *tensors)
    return results if call.everything else (results,)


# Positions in INPUTS that stay as they are under autocast: ids, scores, biases of the selection, the mask.
_UNCAST = frozenset((1, 2, 5, 6, 7, 14))
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


def _cast(*arguments) -> tuple:
    """The same for other operators, whose last argument (selection bias, offsets) stays as it is."""
    if not torch._C._is_any_autocast_enabled():
        return arguments
    return autocast(arguments, frozenset((len(arguments) - 1,)))


def moe(x, w_router, w_up, w_down, *, top_k: int, router: str = "topk-softmax", b_router=None, selection_bias=None,
        route_scale: float = 1.0, normalize_scores: bool = False, groups: int = 0, top_groups: int = 0,
        w_gate=None, b_up=None, b_gate=None, b_down=None, activation: str = "swiglu", alpha: float = 1.702,
        limit: float = 7.0, up_offset: float = 1.0, layout: str = "concat", save: str = "h", rounding: str = "none",
        tile: int = 128, seed: int = 0, step: int = 0, layer: int = 0, capacity: int = 0, column_chunk: int = 0,
        return_router: bool = False, mask=None):
    """A whole layer: router, experts, weighted sum. Returns o, or (o, RouterOutput) with return_router.

    x [...,d]; w_router [E,d] in x's dtype, or fp32 beside bf16 (then logits are those of the fp32 weights, and so are
    the gradients; autocast leaves it so); w_up [E,w*n,d] and w_down [E,d,n] in x's dtype. `layout` says how gate and
    up rows stand in w_up: concat (gate, then up), up-first, interleaved, blocked:B; transposed,
    transposed-interleaved, ..: w_up [E,d,w*n], w_down [E,n,d]. With w_gate: w_gate and w_up, both [E,n,d]. Biases
    b_up [E,w*n], b_down [E,d] (b_gate with w_gate). b_router [E] as w_router; selection_bias [E] fp32 is added to the
    keys that choose, not to the scores.
    router: topk-softmax, softmax-topk, softmax-topk-renorm, sigmoid-bias, group-limited (with groups, top_groups),
    sqrtsoftplus, expert-choice (each expert takes `capacity` tokens, 0: ceil(T*K/E)).
    normalize_scores divides a token's scores by their sum: of sigmoid-bias, group-limited and sqrtsoftplus, and of
    softmax-topk, which it makes softmax-topk-renorm (Qwen3's norm_topk_prob). Options that the call would not read
    raise ValueError with their name.
    activation: swiglu geglu geglu-erf reglu clamped-swiglu (with alpha, limit, up_offset), or not
    gated: relu relu2 silu gelu gelu-erf. save: "h" keeps the pre-activation for backward, "x" computes it again.
    rounding (training only: nr-f, sr-f, nr-s, balance-f, up, down) makes the rows of every expert a multiple of `tile`;
    the stochastic ones draw from (seed, step, layer). column_chunk: less workspace, the same bits: y and dx rows exist
    for at most so many columns at a time (0: all).
    mask [...] bool: True for real tokens, False for padding, which gets o = 0, no expert and no gradient, whatever its
    x is, and takes part in no choice, count or loss: the rest is what the real tokens alone would give, bit for bit
    (on a GPU but for roundings where 8 tokens or fewer of more are real). In RouterOutput its ids are -1, its weights
    0, its logits meaningless.
    Formulas: docs/numerics.md.

        o = tessera.moe(x, w_router, w_up, w_down, top_k=8, router="softmax-topk-renorm")
    """
    # By position: by name it would take half a microsecond longer.
    text = options_text(activation, alpha, limit, up_offset, layout, router, top_k, route_scale, normalize_scores,
                        groups, top_groups, capacity, rounding, tile, seed, layer, save, "slots", return_router,
                        column_chunk)
    return moe_with(text, (top_k, router, rounding), x, (w_router, b_router, selection_bias),
                    (w_up, w_gate, w_down, b_up, b_gate, b_down), return_router, None, step, mask)


def moe_with(text: str, choice: tuple, x, router_tensors: tuple, weights: tuple, return_router: bool = False,
             buffers: tuple | None = None, step: int = 0, mask=None):
    """`moe` with its options as text (options_text), for callers that keep it; choice: top_k, router and rounding."""
    if step < 0:
        raise ValueError(f"step={step}: must be in [0, 2^63); it counts optimizer steps")
    flat = x.dim() == 2
    rows = x if flat else _rows("x", x)
    results = run(text, rows, (None, None, *router_tensors, None, None), weights, buffers, return_router, step,
                  rows_of_mask(mask, x))
    o = results[0] if flat else results[0].view(x.shape)
    if not return_router:
        return o
    return o, _router_output(choice, rows.shape[0], weights[0].shape[0], *results[2:])


def _router_output(choice: tuple, tokens: int, experts: int, tables, logits, topk_counts) -> RouterOutput:
    """Views into the routing tables, in the order of RoutingView (routing.hpp)."""
    top_k, router, rounding = choice
    offsets = tables[:experts + 1]
    counts = offsets[1:] - offsets[:-1]
    if rounding == "none" and router != "expert-choice":
        slots = tokens * top_k
        rest = tables[experts + 1 + 3 * slots:]
        scores, ids = rest[:slots].view(torch.float32), rest[slots:2 * slots]
        return RouterOutput(logits, ids.view(tokens, top_k), scores.view(tokens, top_k), counts, topk_counts, None)
    # Here P is a bound that the size of the tables tells: they are offsets, 4P, token_offsets, P, T*E (, T*K).
    others = experts + 1 + tokens + 1 + tokens * experts + (tokens * top_k if rounding != "none" else 0)
    slots = (tables.shape[0] - others) // 5
    rest = tables[experts + 1 + 3 * slots:]
    token_offsets, ids = rest[slots:slots + tokens + 1], rest[slots + tokens + 1:2 * slots + tokens + 1]
    return RouterOutput(logits, ids, rest[:slots].view(torch.float32), counts, topk_counts, token_offsets)


def routed_experts(x, topk_ids, topk_weights, w_up, w_down, *, w_gate=None, b_up=None, b_gate=None, b_down=None,
                   activation: str = "swiglu", alpha: float = 1.702, limit: float = 7.0, up_offset: float = 1.0,
                   layout: str = "concat", save: str = "h", column_chunk: int = 0):
    """The experts and the weighted sum, for ids and weights that a router elsewhere made.

    x [...,d]; topk_ids [...,K] int32 or int64, ids outside [0,E) own no row (sentinels: zero output, zero gradient);
    topk_weights [...,K] of any floating type, differentiable. Weights and options as for `moe`.

        o = tessera.routed_experts(x, topk_ids, topk_weights, gate_up_proj, down_proj)
    """
    text = options_text(
        activation=activation, alpha=alpha, limit=limit, up_offset=up_offset, layout=layout,
        save=save, column_chunk=column_chunk)
    return routed_experts_with(text, x, topk_ids, topk_weights, (w_up, w_gate, w_down, b_up, b_gate, b_down))


def routed_experts_with(text: str, x, topk_ids, topk_weights, weights: tuple, buffers=None):
    """`routed_experts` with its options as text (options_text), for callers that keep it."""
    rows = x if x.dim() == 2 else _rows("x", x)
    if topk_ids.dim() != 2:
        topk_ids, topk_weights = _rows("topk_ids", topk_ids), _rows("topk_weights", topk_weights)
    if topk_weights.dtype is not torch.float32:
        topk_weights = topk_weights.float()
    o = run(text, rows, (topk_ids, topk_weights, None, None, None, None, None), weights, buffers)[0]
    return o if x.dim() == 2 else o.view(x.shape)


def grouped_experts(x, expert_offsets, w_up, w_down, *, row_scores=None, grouping: str = "offsets", w_gate=None,
                    b_up=None, b_gate=None, b_down=None, activation: str = "swiglu", alpha: float = 1.702,
                    limit: float = 7.0, up_offset: float = 1.0, layout: str = "concat",
                    save: str = "h", column_chunk: int = 0, buffers: tuple | None = None):
    """The experts on rows that are sorted by expert already (after a dispatch). Returns y [R_alloc,d].

    x [R_alloc,d]; expert_offsets on x's device, int32 or int64: [E+1] offsets, or [E] `ends` or `counts` as
    `grouping` says; rows beyond the last group give zeros, and their content is never read. row_scores [R_alloc]
    multiply the rows of y, differentiable. buffers: six tensors or None (w_up, w_gate, w_down, b_up, b_gate, b_down),
    into which backward adds the weight gradients instead of returning them. Weights and options as for `moe`.

        y = tessera.grouped_experts(x_sorted, num_tokens_per_expert, w_up, w_down, grouping="counts")
    """
    text = options_text(
        grouping=grouping, activation=activation, alpha=alpha, limit=limit, up_offset=up_offset, layout=layout,
        save=save, column_chunk=column_chunk)
    if row_scores is not None and row_scores.dtype is not torch.float32:
        row_scores = row_scores.float()
    weights = (w_up, w_gate, w_down, b_up, b_gate, b_down)
    return run(text, x, (None, None, None, None, None, expert_offsets, row_scores), weights, buffers)[0]


def route(x, w_router, *, top_k: int, router: str = "topk-softmax", b_router=None, selection_bias=None,
          route_scale: float = 1.0, normalize_scores: bool = False, groups: int = 0, top_groups: int = 0, mask=None):
    """The router alone: (topk_ids [...,K] int32, topk_weights [...,K] fp32, logits [...,E] fp32), the same bits that
    `moe` uses. Differentiable in the weights and the logits. Options and mask as for `moe`: padding has ids -1 and
    weights 0.

    With activation checkpointing, save its results (`torch.ops.tessera.route`) so that the recomputation routes alike.
    """
    text = options_text(router=router, top_k=top_k, route_scale=route_scale, normalize_scores=normalize_scores,
                        groups=groups, top_groups=top_groups)
    rows = _rows("x", x)
    tensors = tuple([local(t) for t in (rows, w_router, b_router, selection_bias)])
    if torch._C._is_any_autocast_enabled():
        tensors = autocast(tensors, frozenset((3,)), frozenset((1, 2)))
    results = torch.ops.tessera.route.default(*tensors, text, rows_of_mask(mask, x))
    topk_weights, topk_ids, logits = [result.view(*x.shape[:-1], result.shape[-1]) for result in results]
    return topk_ids, topk_weights, logits


def grouped_gemm(a, b, expert_offsets, *, bias=None, transpose_b: bool = False):
    """c[r] = a[r] . b[e]^T (+ bias[e]) for the rows r of expert e: c [R,N].

    a [R,K]; b [E,N,K], or [E,K,N] with transpose_b; bias [E,N]; expert_offsets [E+1] int32 or int64. Rows beyond the
    last offset give zeros. Differentiable in a, b and bias.
    """
    return torch.ops.tessera.grouped_gemm.default(*_cast(a, b, bias, expert_offsets), transpose_b)


def grouped_gemm_wgrad(a, b, expert_offsets):
    """c[e] = a_e^T . b_e over the rows of expert e: a [R,M], b [R,N], c [E,M,N]; zeros for experts without rows."""
    return torch.ops.tessera.grouped_gemm_wgrad.default(*_cast(a, b, expert_offsets))


def check_device_values(device=None) -> None:
    """Raises ValueError if a kernel on this GPU met bad values that only the device can read: expert_offsets, which
    make the results of that call void, or counts, which were taken for 0. Each report is given once.

    device: a CUDA device, by default torch's current one. Nothing waits: synchronise first to hear of a call. On the
    CPU calls check such values themselves.

        torch.cuda.synchronize()
        tessera.check_device_values()
    """
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    library.check_device_values(library.context(library.CUDA, index, 0))


def empty_cache() -> None:
    """Frees memory on the CPU that is kept for later calls: that of large results which nobody uses any more, and this
    thread's workspace. Results in use stay what they are, and are freed when they die. On a GPU all memory is torch's
    and torch.cuda.empty_cache() does this."""
    memory.forget()
    here.grow(0)

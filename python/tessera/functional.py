# SPDX-License-Identifier: Apache-2.0
"""The layer as functions of tensors.

Letters: T tokens, d hidden, n intermediate, E experts, K experts per token; w = 2 for gated activations, else 1.
All functions are differentiable once, deterministic (equal bits from run to run), and raise ValueError for bad
input, NotImplementedError for what this version does not serve, with rule, value and remedy in one line.
"""

from typing import NamedTuple

import torch

from tessera import library
from tessera.layer_call import as_rows, autocast, local, options_text, run
from tessera.ops import memory
from tessera.ops.masks import rows_of_mask
from tessera.ops.prepared_calls import here
from tessera.weight_codes import WeightCodes


class RouterOutput(NamedTuple):
    """What the router did. Nothing waits for the device.

    Where tokens differ in their number of experts (token rounding, expert-choice) topk_ids and topk_weights are [P]:
    those of token t from token_offsets[t] on; after token_offsets[T] they are -1 and 0.

    Args:
        logits: [T,E] fp32, differentiable (auxiliary losses).
        topk_ids: [T,K] int32.
        topk_weights: [T,K] fp32, detached.
        counts: [E] int32: rows that each expert computed.
        topk_counts: [E] int32: the same before token rounding, for losses and balancing.
        token_offsets: [T+1] int32, or None where every token has K experts.

    Raises:
        Nothing.

    Example:
        >>> layer = tessera.MoE(16, 12, experts=8, top_k=2)
        >>> o, router = layer(torch.randn(5, 16), return_router=True)
        >>> router.logits.shape, router.counts.sum().item(), router.token_offsets
        (torch.Size([5, 8]), 10, None)
    """

    logits: torch.Tensor                 # [T,E] fp32
    topk_ids: torch.Tensor               # [T,K] int32
    topk_weights: torch.Tensor           # [T,K] fp32, detached
    counts: torch.Tensor                 # [E] int32: rows that each expert computed
    topk_counts: torch.Tensor            # [E] int32: the same before token rounding, for losses and balancing
    token_offsets: torch.Tensor | None   # [T+1] int32, or None where every token has K experts


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
        precision: str = "native", scales: str = "fp32", weight_codes: WeightCodes | None = None,
        return_router: bool = False, mask=None):
    """A whole layer: router, experts, weighted sum. Formulas: docs/numerics.md.

    Args:
        x: [...,d] fp32 on the CPU, bf16 on either device.
        w_router: [E,d] in x's dtype, or fp32 beside bf16: then logits are those of the fp32 weights, and so are the
            gradients; autocast leaves it so.
        w_up: [E,w*n,d] in x's dtype, gate and up rows as `layout` says; transposed layouts [E,d,w*n]; [E,n,d] beside
            w_gate.
        w_down: [E,d,n] in x's dtype; transposed layouts [E,n,d].
        top_k: K experts per token, 1 to E.
        router: topk-softmax, softmax-topk, softmax-topk-renorm, sigmoid-bias, group-limited (with groups and
            top_groups), sqrtsoftplus, or expert-choice (with
            capacity).
        b_router: [E] as w_router, or None; added to the logits.
        selection_bias: [E] fp32, or None; added to the keys that choose, not to the scores.
        route_scale: Every score is multiplied by it; not 0.
        normalize_scores: A token's scores are divided by their sum: of sigmoid-bias, group-limited and sqrtsoftplus,
            and of softmax-topk, which it makes softmax-topk-renorm (Qwen3's norm_topk_prob).
        groups: Groups of experts of group-limited, which divide E; 0: chosen from E.
        top_groups: Groups that a token may choose from, of group-limited; 0: chosen from K.
        w_gate: [E,n,d], where the gate's rows are a tensor of their own, or None.
        b_up: [E,w*n], or [E,n] beside w_gate, or None.
        b_gate: [E,n] beside w_gate, or None.
        b_down: [E,d], or None.
        activation: swiglu, geglu, geglu-erf, reglu or clamped-swiglu, which are gated, or relu, relu2, silu, gelu,
            gelu-erf.
        alpha: Slope of clamped-swiglu's gate, without unit.
        limit: Bound at which clamped-swiglu clamps gate and up.
        up_offset: What clamped-swiglu adds to up.
        layout: How gate and up rows stand in w_up: concat (gate, then up), up-first, interleaved, blocked:B;
            transposed, transposed-interleaved and so on have both weights transposed.
        save: "h" saves the pre-activation for backward, "x" computes it again.
        column_chunk: Most columns of y or dx rows that exist at a time, 0 for all: less workspace, the same bits.
        precision: native, or fp8 or mxfp8, which quantise the operands of bf16 layers, save x and h as codes (half the
            bytes) and need d and n in multiples of 128 or 32; or auto: fp8 where a Hopper GPU is expected to be faster,
            else native. GPUs serve them with swiglu and no biases: Hopper fp8 in multiples of 256, Blackwell mxfp8 in
            multiples of 128.
        scales: Of fp8: fp32, or pow2 for powers of two.
        weight_codes: Of fp8 and auto: what quantise_weights made of these weights, or None: then the call quantises
            them. The gradients are those of the weights.
        rounding: none, or, in training only, nr-f, sr-f, nr-s, balance-f, up or down: the rows of every expert become a
            multiple of `tile`.
        tile: Rows, at least 1. Only with rounding.
        seed: Of sr-f and nr-s, which draw from (seed, step, layer).
        step: Optimizer steps so far, in [0, 2^63), of sr-f and nr-s.
        layer: Number of this layer, of sr-f and nr-s.
        capacity: Tokens that each expert takes, of expert-choice; 0: ceil(T*K/E).
        return_router: Whether the router's results are returned too.
        mask: [...] bool, or None: True for real tokens, False for padding, which gets o = 0, no expert and no gradient,
            whatever its x is, and takes part in no choice, count or loss. The rest is what the real tokens alone would
            give, bit for bit (on a GPU but for roundings where 8 tokens or fewer of more are real).

    Returns:
        o [...,d] in x's dtype, or (o, RouterOutput) with return_router; of padding its ids are -1, its weights 0, and
        its logits meaningless.

    Raises:
        ValueError: A shape, dtype or device is none of these, or the call would not read an option that is given.
        NotImplementedError: This version does not serve the call, such as fp32 on a GPU, or second derivatives.

    Example:
        >>> x, w_router = torch.randn(5, 16), torch.randn(8, 16)
        >>> w_up, w_down = torch.randn(8, 2 * 12, 16), torch.randn(8, 16, 12)
        >>> o, router = tessera.moe(x, w_router, w_up, w_down, top_k=2, router="sigmoid-bias", return_router=True)
        >>> o.shape, router.topk_ids.shape
        (torch.Size([5, 16]), torch.Size([5, 2]))
    """
    # By position: by name it would take half a microsecond longer.
    text = options_text(activation, alpha, limit, up_offset, layout, router, top_k, route_scale, normalize_scores,
                        groups, top_groups, capacity, rounding, tile, seed, layer, save, "slots", return_router,
                        column_chunk, precision, scales, weight_codes is not None)
    return moe_with(text, (top_k, router, rounding), x, (w_router, b_router, selection_bias),
                    (w_up, w_gate, w_down, b_up, b_gate, b_down), return_router, None, step, mask, weight_codes)


def moe_with(text: str, choice: tuple, x, router_tensors: tuple, weights: tuple, return_router: bool = False,
             buffers: tuple | None = None, step: int = 0, mask=None, weight_codes: WeightCodes | None = None):
    """`moe` with its options as text (options_text), for callers that keep it; choice: top_k, router and rounding."""
    if step < 0:
        raise ValueError(f"step={step}: must be in [0, 2^63); it counts optimizer steps")
    flat = x.dim() == 2
    rows = x if flat else as_rows("x", x)
    results = run(text, rows, (None, None, *router_tensors, None, None), weights, buffers, return_router, step,
                  rows_of_mask(mask, x), () if weight_codes is None else weight_codes.of(*weights[:3]))
    o = results[0] if flat else results[0].view(x.shape)
    if not return_router:
        return o
    return o, _router_output(choice, rows.shape[0], weights[0].shape[0], *results[2:5])


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
    # Here P is a bound that follows from the size of the tables: they are offsets, 4P, token_offsets, P, up to 3
    # elements that align what follows, T*E (, T*K).
    others = experts + 1 + tokens + 1 + tokens * experts + (tokens * top_k if rounding != "none" else 0)
    slots = (tables.shape[0] - others) // 5
    rest = tables[experts + 1 + 3 * slots:]
    token_offsets, ids = rest[slots:slots + tokens + 1], rest[slots + tokens + 1:2 * slots + tokens + 1]
    return RouterOutput(logits, ids, rest[:slots].view(torch.float32), counts, topk_counts, token_offsets)


def routed_experts(x, topk_ids, topk_weights, w_up, w_down, *, w_gate=None, b_up=None, b_gate=None, b_down=None,
                   activation: str = "swiglu", alpha: float = 1.702, limit: float = 7.0, up_offset: float = 1.0,
                   layout: str = "concat", save: str = "h", column_chunk: int = 0, precision: str = "native",
                   scales: str = "fp32", weight_codes: WeightCodes | None = None):
    """The experts and the weighted sum, for ids and weights that a router elsewhere made.

    Args:
        x: [...,d] fp32 on the CPU, bf16 on either device.
        topk_ids: [...,K] int32 or int64; ids outside [0,E) own no row (sentinels: zero output, zero gradient).
        topk_weights: [...,K] of any floating type, differentiable.
        w_up: [E,w*n,d] in x's dtype, gate and up rows as `layout` says; transposed layouts [E,d,w*n]; [E,n,d] beside
            w_gate.
        w_down: [E,d,n] in x's dtype; transposed layouts [E,n,d].
        w_gate: [E,n,d], where the gate's rows are a tensor of their own, or None.
        b_up: [E,w*n], or [E,n] beside w_gate, or None.
        b_gate: [E,n] beside w_gate, or None.
        b_down: [E,d], or None.
        activation: swiglu, geglu, geglu-erf, reglu or clamped-swiglu, which are gated, or relu, relu2, silu, gelu,
            gelu-erf.
        alpha: Slope of clamped-swiglu's gate, without unit.
        limit: Bound at which clamped-swiglu clamps gate and up.
        up_offset: What clamped-swiglu adds to up.
        layout: How gate and up rows stand in w_up: concat (gate, then up), up-first, interleaved, blocked:B;
            transposed, transposed-interleaved and so on have both weights transposed.
        save: "h" saves the pre-activation for backward, "x" computes it again.
        column_chunk: Most columns of y or dx rows that exist at a time, 0 for all: less workspace, the same bits.
        precision: native, or fp8 or mxfp8, which quantise the operands of bf16 layers, save x and h as codes (half the
            bytes) and need d and n in multiples of 128 or 32; or auto: fp8 where a Hopper GPU is expected to be faster,
            else native. GPUs serve them with swiglu and no biases: Hopper fp8 in multiples of 256, Blackwell mxfp8 in
            multiples of 128.
        scales: Of fp8: fp32, or pow2 for powers of two.
        weight_codes: Of fp8 and auto: what quantise_weights made of these weights, or None: then the call quantises
            them. The gradients are those of the weights.

    Returns:
        o [...,d] in x's dtype.

    Raises:
        ValueError: A shape, dtype or device is none of these, or the call would not read an option that is given.
        NotImplementedError: This version does not serve the call, such as fp32 on a GPU, or second derivatives.

    Example:
        >>> x = torch.randn(5, 16)
        >>> topk_weights, topk_ids = torch.rand(5, 8).topk(2)
        >>> w_up, w_down = torch.randn(8, 2 * 12, 16), torch.randn(8, 16, 12)
        >>> o = tessera.routed_experts(x, topk_ids, topk_weights, w_up, w_down)
        >>> o.shape
        torch.Size([5, 16])
    """
    text = options_text(
        activation=activation, alpha=alpha, limit=limit, up_offset=up_offset, layout=layout,
        save=save, column_chunk=column_chunk, precision=precision, scales=scales,
        weight_codes=weight_codes is not None)
    return routed_experts_with(text, x, topk_ids, topk_weights, (w_up, w_gate, w_down, b_up, b_gate, b_down),
                               weight_codes=weight_codes)


def routed_experts_with(text: str, x, topk_ids, topk_weights, weights: tuple, buffers=None,
                        weight_codes: WeightCodes | None = None):
    """`routed_experts` with its options as text (options_text), for callers that keep it."""
    rows = x if x.dim() == 2 else as_rows("x", x)
    if topk_ids.dim() != 2:
        topk_ids, topk_weights = as_rows("topk_ids", topk_ids), as_rows("topk_weights", topk_weights)
    if topk_weights.dtype is not torch.float32:
        topk_weights = topk_weights.float()
    codes = () if weight_codes is None else weight_codes.of(*weights[:3])
    o = run(text, rows, (topk_ids, topk_weights, None, None, None, None, None), weights, buffers, codes=codes)[0]
    return o if x.dim() == 2 else o.view(x.shape)


def grouped_experts(x, expert_offsets, w_up, w_down, *, row_scores=None, grouping: str = "offsets", w_gate=None,
                    b_up=None, b_gate=None, b_down=None, activation: str = "swiglu", alpha: float = 1.702,
                    limit: float = 7.0, up_offset: float = 1.0, layout: str = "concat",
                    save: str = "h", column_chunk: int = 0, precision: str = "native", scales: str = "fp32",
                    weight_codes: WeightCodes | None = None, buffers: tuple | None = None):
    """The experts on rows that are sorted by expert already (after a dispatch).

    Args:
        x: [R_alloc,d] fp32 on the CPU, bf16 on either device.
        expert_offsets: On x's device, int32 or int64: [E+1] offsets, or [E] ends or counts, as `grouping` says. Rows
            beyond the last group give zeros, and their content is never read.
        w_up: [E,w*n,d] in x's dtype, gate and up rows as `layout` says; transposed layouts [E,d,w*n]; [E,n,d] beside
            w_gate.
        w_down: [E,d,n] in x's dtype; transposed layouts [E,n,d].
        row_scores: [R_alloc] of any floating type, or None: factors of the rows of y, differentiable.
        grouping: offsets, ends or counts.
        w_gate: [E,n,d], where the gate's rows are a tensor of their own, or None.
        b_up: [E,w*n], or [E,n] beside w_gate, or None.
        b_gate: [E,n] beside w_gate, or None.
        b_down: [E,d], or None.
        activation: swiglu, geglu, geglu-erf, reglu or clamped-swiglu, which are gated, or relu, relu2, silu, gelu,
            gelu-erf.
        alpha: Slope of clamped-swiglu's gate, without unit.
        limit: Bound at which clamped-swiglu clamps gate and up.
        up_offset: What clamped-swiglu adds to up.
        layout: How gate and up rows stand in w_up: concat (gate, then up), up-first, interleaved, blocked:B;
            transposed, transposed-interleaved and so on have both weights transposed.
        save: "h" saves the pre-activation for backward, "x" computes it again.
        column_chunk: Most columns of y or dx rows that exist at a time, 0 for all: less workspace, the same bits.
        precision: native, or fp8 or mxfp8, which quantise the operands of bf16 layers, save x and h as codes (half the
            bytes) and need d and n in multiples of 128 or 32; or auto: fp8 where a Hopper GPU is expected to be faster,
            else native. GPUs serve them with swiglu and no biases: Hopper fp8 in multiples of 256, Blackwell mxfp8 in
            multiples of 128.
        scales: Of fp8: fp32, or pow2 for powers of two.
        weight_codes: Of fp8 and auto: what quantise_weights made of these weights, or None: then the call quantises
            them. The gradients are those of the weights.
        buffers: Six tensors or None (w_up, w_gate, w_down, b_up, b_gate, b_down) as the weights, into which backward
            adds the weight gradients instead of returning them; or None.

    Returns:
        y [R_alloc,d] in x's dtype.

    Raises:
        ValueError: A shape, dtype or device is none of these, or the call would not read an option that is given.
        NotImplementedError: This version does not serve the call, such as fp32 on a GPU, or second derivatives.

    Example:
        >>> rows, counts = torch.randn(10, 16), torch.tensor([3, 0, 2, 1, 0, 4, 0, 0])
        >>> w_up, w_down = torch.randn(8, 2 * 12, 16), torch.randn(8, 16, 12)
        >>> y = tessera.grouped_experts(rows, counts, w_up, w_down, grouping="counts")
        >>> y.shape
        torch.Size([10, 16])
    """
    text = options_text(
        grouping=grouping, activation=activation, alpha=alpha, limit=limit, up_offset=up_offset, layout=layout,
        save=save, column_chunk=column_chunk, precision=precision, scales=scales,
        weight_codes=weight_codes is not None)
    if row_scores is not None and row_scores.dtype is not torch.float32:
        row_scores = row_scores.float()
    weights = (w_up, w_gate, w_down, b_up, b_gate, b_down)
    codes = () if weight_codes is None else weight_codes.of(*weights[:3])
    return run(text, x, (None, None, None, None, None, expert_offsets, row_scores), weights, buffers, codes=codes)[0]


def route(x, w_router, *, top_k: int, router: str = "topk-softmax", b_router=None, selection_bias=None,
          route_scale: float = 1.0, normalize_scores: bool = False, groups: int = 0, top_groups: int = 0, mask=None):
    """The router alone: the same bits that `moe` uses, differentiable in the weights and the logits.

    With activation checkpointing, save its results (`torch.ops.tessera.route`) so that the recomputation routes alike.

    Args:
        x: [...,d] fp32 on the CPU, bf16 on either device.
        w_router: [E,d] in x's dtype, or fp32 beside bf16.
        top_k: K experts per token, 1 to E.
        router: topk-softmax, softmax-topk, softmax-topk-renorm, sigmoid-bias, group-limited (with groups and
            top_groups), sqrtsoftplus.
        b_router: [E] as w_router, or None; added to the logits.
        selection_bias: [E] fp32, or None; added to the keys that choose, not to the scores.
        route_scale: Every score is multiplied by it; not 0.
        normalize_scores: A token's scores are divided by their sum: of sigmoid-bias, group-limited and sqrtsoftplus,
            and of softmax-topk, which it makes softmax-topk-renorm (Qwen3's norm_topk_prob).
        groups: Groups of experts of group-limited, which divide E; 0: chosen from E.
        top_groups: Groups that a token may choose from, of group-limited; 0: chosen from K.
        mask: [...] bool, or None: False for padding, which has ids -1 and weights 0.

    Returns:
        (topk_ids [...,K] int32, topk_weights [...,K] fp32, logits [...,E] fp32).

    Raises:
        ValueError: A shape, dtype or device is none of these, or the call would not read an option that is given.
        NotImplementedError: This version does not serve the call, such as fp32 on a GPU, or second derivatives.

    Example:
        >>> topk_ids, topk_weights, logits = tessera.route(torch.randn(5, 16), torch.randn(8, 16), top_k=2)
        >>> topk_ids.shape, logits.shape
        (torch.Size([5, 2]), torch.Size([5, 8]))
    """
    text = options_text(router=router, top_k=top_k, route_scale=route_scale, normalize_scores=normalize_scores,
                        groups=groups, top_groups=top_groups)
    rows = as_rows("x", x)
    tensors = tuple([local(t) for t in (rows, w_router, b_router, selection_bias)])
    if torch._C._is_any_autocast_enabled():
        tensors = autocast(tensors, frozenset((3,)), frozenset((1, 2)))
    results = torch.ops.tessera.route.default(*tensors, text, rows_of_mask(mask, x))
    topk_weights, topk_ids, logits = [result.view(*x.shape[:-1], result.shape[-1]) for result in results]
    return topk_ids, topk_weights, logits


def grouped_gemm(a, b, expert_offsets, *, bias=None, transpose_b: bool = False):
    """c[r] = a[r] . b[e]^T (+ bias[e]) for the rows r of expert e. Differentiable in a, b and bias.

    Args:
        a: [R,K] fp32 on the CPU, bf16 on either device.
        b: [E,N,K] in a's dtype, or [E,K,N] with transpose_b.
        expert_offsets: [E+1] int32 or int64 on a's device; rows beyond the last offset give zeros.
        bias: [E,N] in a's dtype, or None.
        transpose_b: Whether b is [E,K,N].

    Returns:
        c [R,N] in a's dtype.

    Raises:
        ValueError: A shape, dtype or device is none of these, or, on the CPU, offsets decrease or exceed R.
        NotImplementedError: fp32 on a GPU, or second derivatives.

    Example:
        >>> offsets = torch.tensor([0, 3, 7])
        >>> tessera.grouped_gemm(torch.randn(7, 16), torch.randn(2, 12, 16), offsets).shape
        torch.Size([7, 12])
    """
    return torch.ops.tessera.grouped_gemm.default(*_cast(a, b, bias, expert_offsets), transpose_b)


def grouped_gemm_wgrad(a, b, expert_offsets):
    """c[e] = a_e^T . b_e over the rows of expert e; zeros for experts without rows.

    Args:
        a: [R,M] fp32 on the CPU, bf16 on either device.
        b: [R,N] in a's dtype.
        expert_offsets: [E+1] int32 or int64 on a's device.

    Returns:
        c [E,M,N] in a's dtype.

    Raises:
        ValueError: A shape, dtype or device is none of these, or, on the CPU, offsets decrease or exceed R.
        NotImplementedError: fp32 on a GPU, or a gradient is asked for.

    Example:
        >>> offsets = torch.tensor([0, 3, 7])
        >>> tessera.grouped_gemm_wgrad(torch.randn(7, 16), torch.randn(7, 12), offsets).shape
        torch.Size([2, 16, 12])
    """
    return torch.ops.tessera.grouped_gemm_wgrad.default(*_cast(a, b, expert_offsets))


def check_device_values(device=None) -> None:
    """Raises for bad values that a kernel on a GPU met and that only the device can read. Each is reported once.

    Nothing waits: synchronise first to hear of a call. On the CPU calls check such values themselves.

    Args:
        device: A CUDA device; None: torch's current one. On the CPU nothing happens.

    Raises:
        ValueError: Expert offsets were bad, which makes the results of that call void, or counts, which were taken for
            0.

    Example:
        >>> torch.cuda.synchronize()                                                     # doctest: +SKIP
        >>> tessera.check_device_values()                                                # doctest: +SKIP
    """
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    library.check_device_values(library.context(library.CUDA, index, 0))


def empty_cache() -> None:
    """Frees memory on the CPU that is kept for later calls: that of large results which nobody uses any more, and this
    thread's workspace.

    Results in use stay what they are, and are freed when they die. On a GPU all memory is torch's and
    torch.cuda.empty_cache() does this.

    Raises:
        Nothing.

    Example:
        >>> tessera.empty_cache()
    """
    memory.forget()
    here.grow(0)

# SPDX-License-Identifier: Apache-2.0
"""Passes of ExpertParallel in pieces: rows to the owners of their experts, the experts as on one GPU, and back.

Saved for backward: x, h and what names the rows (20 bytes each). Backward brings x again, beside d_o. With save="x" the
forward pass is one launch, and x, ids and weights are all that is saved: backward also routes and makes h again.
"""

import contextlib
import ctypes
from ctypes import POINTER, Structure, addressof, byref, c_int32, c_int64, c_uint64, c_void_p
from typing import Callable, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from tessera import library
from tessera.ops import plans
from tessera.ops.autograd import _captures, _keeps_graph
from tessera.ops.layer import GRADIENTS, plan_forward, run_backward_input, run_backward_weights

MOST_CALLS = 256  # whose structs are kept
COMBINE_SMS = 16  # that send dx rows while the others make gradients of weights; as many as fill the link


def _args(names: str, *others: tuple) -> type:
    fields = [("size", c_uint64), *[(name, library.Tensor) for name in names.split()], *others]
    return type("_Args", (Structure,), {"_fields_": fields})


_RouteArgs = _args("topk_ids topk_weights", ("room", c_int64))
_DispatchArgs = _args("x second_x topk_ids expert_offsets row_origins row_scores rows second_rows",
                      ("may_overflow", c_int32), ("reserved", c_int32))
_CombineArgs = _args("rows expert_offsets row_origins topk_weights row_dscores dscores o", ("sms", c_int32),
                     ("reserved", c_int32), ("begun", c_void_p))


def declare(lib: ctypes.CDLL) -> None:
    for name in ("route", "dispatch", "combine"):
        getattr(lib, f"tessera_expert_parallel_{name}").argtypes = [c_void_p] * 3
    lib.tessera_expert_parallel_routed_rows.argtypes = [c_void_p, POINTER(c_int64), POINTER(c_int32)]


class Pieces(NamedTuple):
    """Of one ExpertParallel: the options of its experts as text, most rows that a rank may have, a bound of them, or
    None, and what is saved."""

    text: str
    most_rows: int
    max_rows: int | None
    save: str


class Tables(NamedTuple):
    """DispatchTables of dist.hpp."""

    expert_offsets: torch.Tensor
    row_origins: torch.Tensor
    row_scores: torch.Tensor


def _describe(kind: type, options: tuple, tensors: dict) -> tuple:
    """(args, their words of 64 bits, which of these are addresses)."""
    args, places = kind(ctypes.sizeof(kind)), []
    for name, value in options:
        setattr(args, name, value)
    for field, tensor in tensors.items():
        if tensor is not None:
            # Strides of an empty tensor mean nothing.
            stride = tensor.stride() if tensor.numel() else plans.contiguous_strides(tensor.shape)
            plans.describe(field, getattr(args, field), tensor.shape, stride, tensor.dtype, tensor.device)
            places.append(plans.field_word(kind, field))
    return args, memoryview(args).cast("B").cast("Q"), places


def _call(group, name: str, kind: type, options: tuple = (), begun: int = 0, **tensors) -> None:
    """One function of the library on the current stream; tensors that are None are absent. Structs are kept, and only
    addresses change from call to call. options: (name, value) of other fields; begun: an event's address."""
    key = name, options, *[None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors.values()]
    if key not in group._calls:
        if len(group._calls) >= MOST_CALLS:
            group._calls.clear()
        group._calls[key] = _describe(kind, options, tensors)
    args, words, places = group._calls[key]
    for place, tensor in zip(places, [t for t in tensors.values() if t is not None], strict=True):
        words[place] = tensor.data_ptr()
    if begun:
        args.begun = begun
    function = getattr(library.load(), f"tessera_expert_parallel_{name}")
    library.check(function(group._handle, addressof(args), group._stream()))


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """As the library reads them: contiguous rows, which may lie apart."""
    return x if x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def _routed_rows(group) -> tuple[int, bool]:
    """This rank's rows of the last route, and whether all ranks' fit into what they have room for."""
    counted, all_fit = c_int64(), c_int32()
    library.check(library.load().tessera_expert_parallel_routed_rows(group._handle, byref(counted), byref(all_fit)))
    return counted.value, all_fit.value != 0


def _room(rows: int, most: int) -> int:
    """Rows to have memory for, never none: at most a sixteenth more, or 256, so that most passes of a layer are alike
    and find the plans of earlier ones (ops/plans.py)."""
    step = max(256, 1 << max(rows.bit_length() - 5, 0))
    return min(max((rows + step - 1) // step, 1) * step, most)


def _new_pass(group, pieces: Pieces, layer: int, enqueue: Callable):
    """The result of enqueue(count, may_overflow), which makes a pass with memory for `count` rows.

    Where the layer has had a pass, as much as for that one and a sixteenth more: then the host asks how many rows there
    are behind all that it enqueues. If they do not fit on some rank, all ranks make the pass again, also those that had
    asked before."""
    if pieces.max_rows is not None:
        return enqueue(pieces.max_rows, False)
    last = group._rows.get(layer)
    if last is None:
        result = enqueue(None, False)
    else:
        result = enqueue(_room(last + last // 16 + 1, pieces.most_rows), True)
        _ask(group, layer)
    if group._all_fit:
        return result
    del result  # memory for the other one
    return enqueue(None, False)


def _ask(group, layer: int) -> int:
    """This rank's rows of the last route, which are remembered."""
    if len(group._rows) >= MOST_CALLS:
        group._rows.clear()
    group._rows[layer], group._all_fit = _routed_rows(group)
    return group._rows[layer]


def _dispatch_new(group, pieces: Pieces, layer: int, x, second_x, topk_ids, topk_weights, count: int | None,
                  may_overflow: bool) -> tuple:
    """The rows of a new pass: (rows, second_rows, tables). count: None for as many as there are."""
    _call(group, "route", _RouteArgs, (("room", count if may_overflow else 0),), topk_ids=topk_ids,
          topk_weights=topk_weights)
    if count is None:
        if x.is_cuda:  # to its place while the host waits
            x = group.input(x.shape[0]).copy_(x)
        count = _room(_ask(group, layer), pieces.most_rows)
    local_experts = group._desc.experts // group._desc.ranks
    tables = Tables(x.new_empty(local_experts + 1, dtype=torch.int32), x.new_empty((count, 4), dtype=torch.int32),
                    x.new_empty(count, dtype=torch.float32))
    return *_dispatch(group, x, second_x, topk_ids, tables, may_overflow), tables


def _dispatch(group, x, second_x, topk_ids, tables: Tables, may_overflow: bool = False) -> tuple:
    """(rows, second_rows)."""
    shape = (tables.row_scores.shape[0], x.shape[1])
    rows, second_rows = x.new_empty(shape), None if second_x is None else x.new_empty(shape)
    _call(group, "dispatch", _DispatchArgs, (("may_overflow", int(may_overflow)),), x=x, second_x=second_x,
          topk_ids=topk_ids, rows=rows, second_rows=second_rows, **tables._asdict())
    return rows, second_rows


def _combine(group, rows, tables: Tables, o, **tensors) -> torch.Tensor:
    _call(group, "combine", _CombineArgs, rows=rows, expert_offsets=tables.expert_offsets,
          row_origins=tables.row_origins, o=o, **tensors)
    return o


def _run_forward(group, pieces: Pieces, layer: int, x, topk_ids, topk_weights, weights: tuple, training: bool) -> tuple:
    """(o, tables, h, routing), the last two with training."""
    w_up, w_down, b_up, b_down = weights

    def enqueue(count, may_overflow):
        rows, _, tables = _dispatch_new(group, pieces, layer, x, None, topk_ids, topk_weights, count, may_overflow)
        # As INPUTS (ops/layer.py). Without row_scores: rows are weighted where their tokens are.
        inputs = (rows, None, None, None, None, None, tables.expert_offsets, None, w_up, None, w_down, b_up, None,
                  b_down)
        y, *kept = plan_forward(inputs, pieces.text, 0, training).run([t for t in inputs if t is not None])
        o = _combine(group, y, tables, torch.empty_like(x, memory_format=torch.contiguous_format),
                     topk_weights=topk_weights)
        return o, tables, *kept

    return _new_pass(group, pieces, layer, enqueue)


def _routing(tables: Tables, routing=None) -> torch.Tensor:
    """The routing tables of the experts' pass (RoutingView in routing.hpp) with the scores of the rows: those that
    forward made without scores, or new ones."""
    count, first = tables.row_scores.shape[0], tables.expert_offsets.shape[0]
    scores = tables.row_scores.view(torch.int32)
    if routing is not None:
        routing[first + 3 * count:first + 4 * count].copy_(scores)
        return routing
    row = torch.arange(count, dtype=torch.int32, device=scores.device)
    routed = row < tables.expert_offsets[-1]
    own = torch.where(routed, row, -1)
    return torch.cat((tables.expert_offsets, own, torch.where(routed, row, 0), own, scores))


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, pieces: Pieces, layer: int, x, topk_ids, topk_weights, *weights):
        ctx.made = group, pieces, layer
        if pieces.save == "x":
            ctx.save_for_backward(x, topk_ids, topk_weights, *weights)
            return _run_inference(group, pieces, layer, x, topk_ids, topk_weights, weights)
        o, tables, h, routing = _run_forward(group, pieces, layer, x, topk_ids, topk_weights, weights, True)
        ctx.save_for_backward(x, topk_ids, h, _routing(tables, routing), *tables, *weights)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o):
        group, pieces, layer = ctx.made
        needs, d_o, text = ctx.needs_input_grad[3:], d_o.contiguous(), pieces.text
        if pieces.save == "x":
            x, topk_ids, topk_weights, *weights = ctx.saved_tensors

            def enqueue(count, may_overflow):
                rows = _dispatch_new(group, pieces, layer, d_o, x, topk_ids, topk_weights, count, may_overflow)
                return _run_backward(group, text + " save=x", x, topk_ids, needs, *rows, x.new_empty(0),
                                     _routing(rows[2]), weights)

            return None, None, None, *_new_pass(group, pieces, layer, enqueue)
        x, topk_ids, h, routing, *others = ctx.saved_tensors
        tables, weights = Tables(*others[:3]), others[3:]
        rows = _dispatch(group, d_o, x, topk_ids, tables)
        if not _keeps_graph() and not (x.is_cuda and _captures()):
            text += " overwrite_h=True"
        return None, None, None, *_run_backward(group, text, x, topk_ids, needs, *rows, tables, h, routing, weights)


def _run_backward(group, text: str, x, topk_ids, needs: tuple, d_o_rows, x_rows, tables: Tables, h, routing,
                  weights: tuple) -> tuple:
    """Gradients of x, topk_ids, topk_weights, w_up, w_down, b_up, b_down, None where `needs` says so."""
    w_up, w_down, b_up, b_down = weights
    layer = (w_up, None, w_down, b_up, None, b_down)
    dx_rows, *row_dscores, a_scaled, dh = run_backward_input(
        (d_o_rows, x_rows, h, routing, None, None, *layer, None), text, needs[2])
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dscores = x.new_empty(topk_ids.shape, dtype=torch.float32) if needs[2] else None
    # dx rows go back while gradients of weights are made, also where nobody wants dx: other ranks wait for them.
    bits = sum(1 << bit for bit, name in enumerate(GRADIENTS) if _wants(name, needs))
    with group._beside(bool(bits) and x.is_cuda and not _captures()) as how:
        _combine(group, dx_rows, tables, dx, row_dscores=row_dscores[0] if row_dscores else None, dscores=dscores,
                 **how)
    made = {}
    if bits:
        results = run_backward_weights((d_o_rows, x_rows, routing, *layer, a_scaled, dh), text, bits)
        made = dict(zip([name for name in GRADIENTS if _wants(name, needs)], results, strict=True))
    group._beside.join()
    return dx if needs[0] else None, None, dscores, *[made.get(name) for name in _GRADIENT_OF]


_GRADIENT_OF = {"dw_up": 3, "dw_down": 4, "db_up": 5, "db_down": 6}


def _wants(name: str, needs: tuple) -> bool:
    """A gradient of weights. needs: x, topk_ids, topk_weights, w_up, w_down, b_up, b_down."""
    return name in _GRADIENT_OF and needs[_GRADIENT_OF[name]]


class Beside:
    """A stream beside the current one, on which dx rows go back."""

    def __init__(self):
        self.stream = self.main = self.begun = None

    @contextlib.contextmanager
    def __call__(self, wanted: bool):
        """The combine() that is enqueued in it, with the options that it gives, runs beside what follows; without
        `wanted` before that."""
        self.main = None
        if not wanted:
            yield {}
            return
        if self.stream is None:
            self.stream, self.begun = torch.cuda.Stream(priority=-1), torch.cuda.Event()
            self.begun.record(self.stream)  # makes it
        self.main = torch.cuda.current_stream()
        self.stream.wait_stream(self.main)
        with torch.cuda.stream(self.stream):
            yield {"options": (("sms", COMBINE_SMS),), "begun": self.begun.cuda_event}
        self.main.wait_event(self.begun)  # what follows would take all SMs

    def join(self) -> None:
        if self.main is not None:
            self.main.wait_stream(self.stream)


def _run_inference(group, pieces: Pieces, layer: int, x, topk_ids, topk_weights, weights: tuple) -> torch.Tensor:
    """o without gradients: in one launch where there are no biases."""
    if weights[2] is None:
        return group(x, topk_ids, topk_weights, *weights[:2])
    return _run_forward(group, pieces, layer, x, topk_ids, topk_weights, weights, False)[0]


def run(group, pieces: Pieces, layer: int, x, topk_ids, topk_weights, w_up, w_down, b_up=None,
        b_down=None) -> torch.Tensor:
    """o of a pass of `group`: differentiable in all but the ids. layer: any number of its own."""
    weights = (w_up, w_down, b_up, b_down)
    x, topk_weights = _dense_rows(x), topk_weights.float().contiguous()
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, topk_weights, *weights)):
        return _Experts.apply(group, pieces, layer, x, topk_ids, topk_weights, *weights)
    return _run_inference(group, pieces, layer, x, topk_ids, topk_weights, weights)

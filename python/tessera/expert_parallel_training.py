# SPDX-License-Identifier: Apache-2.0
"""Passes of ExpertParallel with gradients or biases.

Forward is one launch; with biases, but for those of clamped-swiglu, it is in pieces: rows to the owners of their
experts, the experts as on one GPU, and back. So is backward. Saved for it: x, h but with save="x", and what names the
rows, 20 bytes for each. Backward brings x again, beside d_o, and makes h again where there is none.

The host enqueues a pass with memory for the rows that the layer had before and a sixteenth more, and asks behind it how
many there are. Ranks tell each other what they have room for: where it was not enough on one of them, all make the pass
again, forward in one launch its backward pass.
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
from tessera.options import ACTIVATIONS

MOST_CALLS = 256  # whose structs are kept
BESIDE_SMS = 24  # that bring or send rows while the others multiply
APART_BYTES = 8 << 20  # of x, from which on its rows come beside GEMMs: with fewer the host would be late


def _args(names: str, *others: tuple) -> type:
    fields = [("size", c_uint64), *[(name, library.Tensor) for name in names.split()], *others]
    return type("_Args", (Structure,), {"_fields_": fields})


_ForwardArgs = _args("x topk_ids topk_weights w_up w_down o expert_offsets row_origins row_scores h",
                     ("may_overflow", c_int32), ("reserved", c_int32), ("b_up", library.Tensor),
                     ("b_down", library.Tensor))
_RouteArgs = _args("topk_ids topk_weights", ("room", c_int64))
_DispatchArgs = _args("x second_x topk_ids expert_offsets row_origins row_scores rows second_rows",
                      ("may_overflow", c_int32), ("sms", c_int32), ("begun", c_void_p))
_CombineArgs = _args("rows expert_offsets row_origins topk_weights row_dscores dscores o", ("sms", c_int32),
                     ("reserved", c_int32), ("begun", c_void_p))


def declare(lib: ctypes.CDLL) -> None:
    for name in ("route", "dispatch", "combine"):
        getattr(lib, f"tessera_expert_parallel_{name}").argtypes = [c_void_p] * 3
    lib.tessera_expert_parallel_routed_rows.argtypes = [c_void_p, c_int64, POINTER(c_int64), POINTER(c_int32)]


class Pieces(NamedTuple):
    """Of one ExpertParallel: the options of its experts as text, most rows that a rank may have, a bound of them, or
    None, and what is saved."""

    text: str
    most_rows: int
    max_rows: int | None
    save: str


class Tables(NamedTuple):
    """DispatchTables of expert_parallel.hpp."""

    expert_offsets: torch.Tensor
    row_origins: torch.Tensor
    row_scores: torch.Tensor

    @staticmethod
    def empty(group, rows: int, like: torch.Tensor) -> "Tables":
        experts = group._desc.experts // group._desc.ranks
        return Tables(like.new_empty(experts + 1, dtype=torch.int32), like.new_empty((rows, 4), dtype=torch.int32),
                      like.new_empty(rows, dtype=torch.float32))


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


def _routed_rows(group, passes_ago: int = 0) -> tuple[int, bool]:
    """This rank's rows of the last pass that was counted, or of one so many before it, and whether all ranks' fit into
    what they have room for."""
    rows, all_fit = c_int64(), c_int32()
    library.check(library.load().tessera_expert_parallel_routed_rows(group._handle, passes_ago, byref(rows),
                                                                     byref(all_fit)))
    return rows.value, all_fit.value != 0


def _remember(group, layer: int, rows: int) -> int:
    if len(group._rows) >= MOST_CALLS:
        group._rows.clear()
    group._rows[layer] = rows
    return rows


def _refuse_capture(x: torch.Tensor) -> None:
    if x.is_cuda and _captures():
        raise RuntimeError("a pass whose number of rows the host has to know cannot be captured into a graph: make the "
                           "object with max_rows, a bound of them")


def _room(rows: int, most: int) -> int:
    """Rows to have memory for, never none: at most a sixteenth more, or 256, so that most passes of a layer are alike
    and find the plans of earlier ones (ops/plans.py)."""
    step = max(256, 1 << max(rows.bit_length() - 5, 0))
    return min(max((rows + step - 1) // step, 1) * step, most)


def _new_pass(group, pieces: Pieces, layer: int, x: torch.Tensor, enqueue: Callable):
    """The result of enqueue(count, may_overflow), which makes a forward pass in pieces with memory for `count` rows,
    where the layer has had none before as many as there are."""
    if pieces.max_rows is not None:
        return enqueue(pieces.max_rows, False)
    _refuse_capture(x)
    last = group._rows.get(layer)
    if last is None:
        result = enqueue(None, False)
    else:
        result = enqueue(_room_behind(last, pieces.most_rows), True)
        _ask(group, layer)
    if group._all_fit:
        return result
    del result  # memory for the other one
    return enqueue(None, False)


def _ask(group, layer: int) -> int:
    """This rank's rows of the last route, which are remembered."""
    rows, group._all_fit = _routed_rows(group)
    return _remember(group, layer, rows)


def _room_behind(rows: int, most: int) -> int:
    """For a pass of a layer that had so many in the last one."""
    return _room(rows + rows // 16 + 1, most)


def _dispatch_new(group, pieces: Pieces, layer: int, x, second_x, topk_ids, topk_weights, count: int | None,
                  may_overflow: bool) -> tuple:
    """The rows of a new pass: (rows, second_rows, tables). count: None for as many as there are."""
    _call(group, "route", _RouteArgs, (("room", count if may_overflow else 0),), topk_ids=topk_ids,
          topk_weights=topk_weights)
    group._counted += 1
    if count is None:
        if x.is_cuda:  # to its place while the host waits
            x = group.input(x.shape[0]).copy_(x)
        count = _room(_ask(group, layer), pieces.most_rows)
    tables = Tables.empty(group, count, x)
    return *_dispatch(group, x, second_x, topk_ids, tables, may_overflow), tables


def _dispatch(group, x, second_x, topk_ids, tables: Tables, may_overflow: bool = False) -> tuple:
    """(rows, second_rows)."""
    shape = (tables.row_scores.shape[0], x.shape[1])
    rows, second_rows = x.new_empty(shape), None if second_x is None else x.new_empty(shape)
    _call(group, "dispatch", _DispatchArgs, (("may_overflow", int(may_overflow)),), x=x, second_x=second_x,
          topk_ids=topk_ids, rows=rows, second_rows=second_rows, **tables._asdict())
    return rows, second_rows


def _dispatch_apart(group, x, second_x, topk_ids, tables: Tables, may_overflow: bool) -> tuple:
    """(rows, second_rows), these beside what follows, until the next combine that is beside it as well has begun."""
    is_beside = x.is_cuda and not _captures()
    if is_beside:
        with group._beside.ahead():
            second_x = group._place("second_input")[:x.shape[0]].copy_(second_x)
    rows = _dispatch(group, x, None, topk_ids, tables, may_overflow)[0]
    second_rows, options = torch.empty_like(rows), (("may_overflow", int(may_overflow)),)
    with group._beside(is_beside) as how:
        _call(group, "dispatch", _DispatchArgs, options + how.pop("options", ()), second_x=second_x,
              second_rows=second_rows, **tables._asdict(), **how)
    return rows, second_rows


def _combine(group, rows, tables: Tables, o, **tensors) -> torch.Tensor:
    _call(group, "combine", _CombineArgs, rows=rows, expert_offsets=tables.expert_offsets,
          row_origins=tables.row_origins, o=o, **tensors)
    return o


def _run_forward(group, pieces: Pieces, layer: int, x, topk_ids, topk_weights, weights: tuple, training: bool) -> tuple:
    """(o, tables, h) of a pass in pieces; h with training."""
    w_up, w_down, b_up, b_down = weights

    def enqueue(count, may_overflow):
        rows, _, tables = _dispatch_new(group, pieces, layer, x, None, topk_ids, topk_weights, count, may_overflow)
        # As INPUTS (ops/layer.py). Without row_scores: rows are weighted where their tokens are.
        inputs = (rows, None, None, None, None, None, tables.expert_offsets, None, w_up, None, w_down, b_up, None,
                  b_down, None)
        y, *kept = plan_forward(inputs, pieces.text, 0, training).run([t for t in inputs if t is not None])
        o = _combine(group, y, tables, torch.empty_like(x, memory_format=torch.contiguous_format),
                     topk_weights=topk_weights)
        return o, tables, kept[0] if training else x.new_empty(0)

    return _new_pass(group, pieces, layer, x, enqueue)


def _run_fused(group, pieces: Pieces, layer: int, x, topk_ids, topk_weights, weights: tuple) -> tuple:
    """(o, tables, h) of a pass in one launch."""
    count = pieces.max_rows
    if count is None:
        _refuse_capture(x)
        count = _room_behind(group._rows.get(layer, topk_ids.numel()), pieces.most_rows)
    tables, h = Tables.empty(group, count, x), None
    if pieces.save == "h":
        h = x.new_empty((count, weights[0].shape[1]))
    o = _launch(group, (("may_overflow", int(pieces.max_rows is None)),), x, topk_ids, topk_weights, weights, h=h,
                **tables._asdict())
    group._counted += 1
    return o, tables, x.new_empty(0) if h is None else h


def _launch(group, options: tuple, x, topk_ids, topk_weights, weights: tuple, **kept) -> torch.Tensor:
    """o of a pass in one launch."""
    o = torch.empty_like(x, memory_format=torch.contiguous_format)
    _call(group, "forward", _ForwardArgs, options, x=x, topk_ids=topk_ids, topk_weights=topk_weights, o=o, **kept,
          **dict(zip(("w_up", "w_down", "b_up", "b_down"), weights, strict=True)))
    return o


def fuses(group, w_up, w_down, b_up, b_down) -> bool:
    """Whether forward is one launch: with weights as that takes them, and biases with clamped-swiglu alone."""
    if b_up is not None and ACTIVATIONS[group._desc.activation] != "clamped-swiglu":
        return False
    return all(w is None or w.is_contiguous() and w.data_ptr() % 16 == 0 for w in (w_up, w_down, b_up, b_down))


def _routing(group, tables: Tables) -> torch.Tensor:
    """The routing tables of the experts' pass (RoutingView in routing.hpp): rows that lie where they are, each with its
    score. Those behind the last one are nobody's."""
    count, scores = tables.row_scores.shape[0], tables.row_scores.view(torch.int32)
    numbers = group._row_numbers
    if numbers is None or numbers.shape[0] < count:
        numbers = torch.arange(count, dtype=torch.int32, device=scores.device)
        if not (scores.is_cuda and _captures()):  # what a graph makes is there when it is replayed
            group._row_numbers = numbers
    row = numbers[:count]
    return torch.cat((tables.expert_offsets, row, row, row, scores))


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, pieces: Pieces, layer: int, x, topk_ids, topk_weights, *weights):
        ctx.made, ctx.counted = (group, pieces, layer), None
        if fuses(group, *weights):
            o, tables, h = _run_fused(group, pieces, layer, x, topk_ids, topk_weights, weights)
            ctx.counted = group._counted
        else:
            o, tables, h = _run_forward(group, pieces, layer, x, topk_ids, topk_weights, weights, pieces.save == "h")
        ctx.save_for_backward(x, topk_ids, topk_weights, h, *tables, *weights)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o):
        group, pieces, layer = ctx.made
        needs, d_o = ctx.needs_input_grad[3:], d_o.contiguous()
        x, topk_ids, topk_weights, h, *others = ctx.saved_tensors
        tables, weights = Tables(*others[:3]), others[3:]
        may_overflow = ctx.counted is not None and pieces.max_rows is None
        if may_overflow:
            _refuse_capture(x)
        # Of x rows gradients of weights are made, but where h has to be as well. All ranks decide alike.
        apart = h.dim() == 2 and any(needs[3:]) and 2 * group._desc.max_tokens * group._desc.hidden >= APART_BYTES
        bring = _dispatch_apart if apart else _dispatch
        rows = *bring(group, d_o, x, topk_ids, tables, may_overflow), tables
        gradients = _run_backward(group, pieces.text, x, topk_ids, needs, *rows, h, weights)
        if may_overflow:
            count, all_fit = _routed_rows(group, group._counted - ctx.counted)
            _remember(group, layer, count)
            if not all_fit:
                del rows, gradients  # memory for others
                rows = _dispatch_new(group, pieces, layer, d_o, x, topk_ids, topk_weights,
                                     _room(count, pieces.most_rows), False)
                gradients = _run_backward(group, pieces.text, x, topk_ids, needs, *rows, x.new_empty(0), weights)
        return None, None, None, *gradients


def _run_backward(group, text: str, x, topk_ids, needs: tuple, d_o_rows, x_rows, tables: Tables, h,
                  weights: tuple) -> tuple:
    """Gradients of x, topk_ids, topk_weights, w_up, w_down, b_up, b_down, None where `needs` says so. An h without rows
    is made again."""
    w_up, w_down, b_up, b_down = weights
    routing = _routing(group, tables)
    if h.dim() == 1:
        text += " save=x"
    elif not _keeps_graph() and not (x.is_cuda and _captures()):
        text += " overwrite_h=True"
    layer = (w_up, None, w_down, b_up, None, b_down)
    dx_rows, *row_dscores, a_scaled, dh = run_backward_input(
        (d_o_rows, x_rows, h, routing, None, None, *layer, None, None), text, needs[2])
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
    """A stream beside the current one, on which rows come and go while the GPU multiplies."""

    def __init__(self):
        self.stream = self.main = self.begun = None

    @contextlib.contextmanager
    def ahead(self):
        """What is enqueued in it runs beside what follows."""
        if self.stream is None:
            self.stream, self.begun = torch.cuda.Stream(priority=-1), torch.cuda.Event()
            self.begun.record(self.stream)  # makes it
        # Of an index, and set by hand: contexts of torch look the device up each time.
        self.main = torch.cuda.current_stream(torch._C._cuda_getDevice())
        self.stream.wait_stream(self.main)
        torch.cuda.set_stream(self.stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(self.main)

    @contextlib.contextmanager
    def __call__(self, wanted: bool):
        """The call that is enqueued in it, with the options that it gives, runs beside what follows; without `wanted`
        before that."""
        if not wanted:
            self.join()
            yield {}
            return
        with self.ahead():
            yield {"options": (("sms", BESIDE_SMS),), "begun": self.begun.cuda_event}
        self.main.wait_event(self.begun)  # what follows would take all SMs

    def join(self) -> None:
        if self.main is not None:
            self.main.wait_stream(self.stream)
        self.main = None


def _run_inference(group, pieces: Pieces, layer: int, x, topk_ids, topk_weights, weights: tuple) -> torch.Tensor:
    """o without gradients."""
    if weights[2] is None:
        return group(x, topk_ids, topk_weights, *weights[:2])
    if fuses(group, *weights):
        return _launch(group, (), x, topk_ids, topk_weights, weights)
    return _run_forward(group, pieces, layer, x, topk_ids, topk_weights, weights, False)[0]


def needs_gradients(*tensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def run(group, pieces: Pieces | None, layer: int, x, topk_ids, topk_weights, w_up, w_down, b_up=None,
        b_down=None) -> torch.Tensor:
    """o of a pass of `group`: differentiable in all but the ids. layer: any number of its own. pieces may be None where
    it needs no gradients and fuses()."""
    weights = (w_up, w_down, b_up, b_down)
    x, topk_weights = _dense_rows(x), topk_weights.float().contiguous()
    if needs_gradients(x, topk_weights, *weights):
        return _Experts.apply(group, pieces, layer, x, topk_ids, topk_weights, *weights)
    return _run_inference(group, pieces, layer, x, topk_ids, topk_weights, weights)

# SPDX-License-Identifier: Apache-2.0
"""Passes of ExpertParallel with gradients or biases.

Forward is one launch. With biases, but for those of clamped-swiglu, it is unfused: rows go to the owners of their
experts, the experts run as on one GPU, and results come back. Backward is always unfused. Saved for it are x, h (not
with save="x"), and what names the rows, 20 bytes for each. Backward pulls the rows of x again, beside those of d_o, and
makes h again where none was saved.

The host enqueues a pass with memory for the rows that the layer had before and a sixteenth more, and then asks how many
there are. All ranks know how many rows each has memory for: where it was not enough on one of them, all make
the pass again. Of a forward pass in one launch the backward pass is made again.
"""

from typing import Callable, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from tessera.expert_parallel_library import CombineArgs, DispatchArgs, ForwardArgs, RouteArgs
from tessera.expert_parallel_prepared import PreparedBackward, PreparedForward, Saved, Tables, gathers_tokens
from tessera.expert_parallel_session import Session
from tessera.ops.autograd import captures, direct, keeps_graph, plain_saving
from tessera.ops.layer import GRADIENTS, prepared_forward, run_backward_input, run_backward_weights
from tessera.ops.prepared_calls import guard

# Bytes of x from which on its rows come on the side stream while GEMMs run: with fewer the host would be late.
SIDE_STREAM_BYTES = 8 << 20


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """As the library reads them: contiguous rows, which may lie apart."""
    return x if x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def _refuse_capture(x: torch.Tensor) -> None:
    if x.is_cuda and captures():
        raise RuntimeError("a pass whose number of rows the host has to know cannot be captured into a graph: make the "
                           "object with max_rows, a bound of them")


def memory_for(rows: int, row_limit: int) -> int:
    """Rows to have memory for, never none: at most a sixteenth more, or 256, so that most passes of a layer are alike
    and find the prepared calls of earlier ones (ops/prepared_calls.py)."""
    step = max(256, 1 << max(rows.bit_length() - 5, 0))
    return min(max((rows + step - 1) // step, 1) * step, row_limit)


def _memory_after(rows: int, row_limit: int) -> int:
    """The same for a pass of a layer that had so many rows in its last one."""
    return memory_for(rows + rows // 16 + 1, row_limit)


def _new_pass(session: Session, layer: int, x: torch.Tensor, enqueue: Callable):
    """The result of enqueue(count, may_overflow), which makes an unfused forward pass with memory for `count` rows. The
    pass is made again where there were more rows than that."""
    training = session.training
    if training.max_rows is not None:
        return enqueue(training.max_rows, False)
    _refuse_capture(x)
    last = session.rows_of_last_pass(layer)
    if last is None:
        result = enqueue(None, False)
    else:
        result = enqueue(_memory_after(last, training.row_limit), True)
        _ask(session, layer)
    if session.all_fit:
        return result
    del result  # frees memory for the other pass
    return enqueue(None, False)


def _ask(session: Session, layer: int) -> int:
    """This rank's rows of the last route, which the session remembers."""
    rows, session.all_fit = session.routed_rows()
    session.remember_rows(layer, rows)
    return rows


def _dispatch_new(session: Session, layer: int, x, second_x, topk_ids, topk_weights, count: int | None,
                  may_overflow: bool) -> tuple:
    """The rows of a new pass: (rows, second_rows, tables). count: None for as many as there are."""
    session.call("route", RouteArgs, (("row_limit", count if may_overflow else 0),), topk_ids=topk_ids,
                 topk_weights=topk_weights)
    session.passes_counted += 1
    if count is None:
        if x.is_cuda:  # copied into the window while the host waits
            x = session.place("input")[:x.shape[0]].copy_(x)
        count = memory_for(_ask(session, layer), session.training.row_limit)
    tables = Tables.empty(session, count, x)
    return *_dispatch(session, x, second_x, topk_ids, tables, may_overflow), tables


def _dispatch(session: Session, x, second_x, topk_ids, tables: Tables, may_overflow: bool = False) -> tuple:
    """(rows, second_rows)."""
    shape = (tables.row_scores.shape[0], x.shape[1])
    rows, second_rows = x.new_empty(shape), None if second_x is None else x.new_empty(shape)
    session.call("dispatch", DispatchArgs, (("may_overflow", int(may_overflow)),), x=x, second_x=second_x,
                 topk_ids=topk_ids, rows=rows, second_rows=second_rows, **tables._asdict())
    return rows, second_rows


def uses_side_stream(x: torch.Tensor) -> bool:
    """Whether rows may come and go on the side stream: on a GPU, in a step that a graph captures, too."""
    return x.is_cuda


def _dispatch_on_side_stream(session: Session, x, second_x, topk_ids, tables: Tables, may_overflow: bool) -> tuple:
    """(rows, second_rows): second_rows come on the side stream while the current one goes on, until the next combine on
    the side stream has begun."""
    uses_side = uses_side_stream(x)
    if uses_side:  # x first: two copies at once would both take longer
        x = session.place("input")[:x.shape[0]].copy_(x)
        with session.side.fork():
            second_x = session.place("second_input")[:x.shape[0]].copy_(second_x)
    rows = _dispatch(session, x, None, topk_ids, tables, may_overflow)[0]
    second_rows, options = torch.empty_like(rows), (("may_overflow", int(may_overflow)),)
    with session.side.call(uses_side) as how:
        session.call("dispatch", DispatchArgs, options + how.pop("options", ()), second_x=second_x,
                     second_rows=second_rows, **tables._asdict(), **how)
    return rows, second_rows


def _rows_of_x_apart(session: Session, needs: tuple, x, h) -> bool:
    """Only gradients of weights read rows of x, unless h has to be made again. Where a graph captures the pass the host
    is never late. Each rank decides by itself."""
    desc = session.desc
    large = 2 * desc.max_tokens * desc.hidden >= SIDE_STREAM_BYTES
    return h.dim() == 2 and any(needs[3:]) and (large or x.is_cuda and captures())


def _dispatch_saved(session: Session, needs: tuple, d_o, x, topk_ids, tables: Tables, h, may_overflow: bool) -> tuple:
    """(rows of d_o, rows of x), as the tables of a forward pass say. needs: as in _run_backward."""
    dispatch = _dispatch_on_side_stream if _rows_of_x_apart(session, needs, x, h) else _dispatch
    return dispatch(session, d_o, x, topk_ids, tables, may_overflow)


def combine(session: Session, rows, tables: Tables, o, **tensors) -> torch.Tensor:
    """o: the rows, brought back to the ranks of their tokens and added up there."""
    session.call("combine", CombineArgs, rows=rows, expert_offsets=tables.expert_offsets,
                 row_origins=tables.row_origins, o=o, **tensors)
    return o


def _run_unfused(session: Session, layer: int, x, topk_ids, topk_weights, weights: tuple, saves_h: bool) -> tuple:
    """(o, tables, h) of an unfused forward pass; h is empty unless it saves one."""
    w_up, w_down, b_up, b_down = weights

    def enqueue(count, may_overflow):
        rows, _, tables = _dispatch_new(session, layer, x, None, topk_ids, topk_weights, count, may_overflow)
        # As INPUTS (ops/layer.py). Without row_scores: rows are weighted where their tokens are.
        inputs = (rows, None, None, None, None, None, tables.expert_offsets, None, w_up, None, w_down, b_up, None,
                  b_down, None)
        prepared = prepared_forward(inputs, session.training.text, 0, saves_h)
        y, *saved = prepared.run([t for t in inputs if t is not None])
        o = combine(session, y, tables, torch.empty_like(x, memory_format=torch.contiguous_format),
                    topk_weights=topk_weights)
        return o, tables, saved[0] if saves_h else x.new_empty(0)

    return _new_pass(session, layer, x, enqueue)


class Alike:
    """Forward passes in one launch on tensors of the same shapes and strides: prepared ones are found by it. last: for
    how many rows the last one had memory, and the prepared one."""

    __slots__ = ("last",)

    def __init__(self):
        self.last = None, None


def passes_like(session: Session, x, w_up, b_up) -> Alike:
    """Those on such tensors; shapes and strides of all others follow."""
    return session.prepared(("passes like", x.shape, x.stride(), b_up is None), Alike)


def _run_fused(session: Session, layer: int, alike: Alike, tensors: tuple) -> tuple:
    """(memory of what is saved, o, the prepared pass, rows that have memory) of a forward pass in one launch. tensors:
    x, topk_ids, topk_weights, w_up, w_down, b_up, b_down."""
    training = session.training
    count = training.max_rows
    if count is None:
        _refuse_capture(tensors[0])
        last = session.rows_of_last_pass(layer)
        count = _memory_after(tensors[1].numel() if last is None else last, training.row_limit)
    rows, prepared = alike.last
    if rows != count:
        prepared = _prepare_forward(session, alike, count, tensors)
    memory, o = prepared.run(session, tensors)
    session.passes_counted += 1
    return memory, o, prepared, count


def _prepare_forward(session: Session, alike: Alike, count: int, tensors: tuple) -> PreparedForward:
    prepared = session.prepared((alike, count), lambda: PreparedForward(
        session, count, tensors[0], tensors[1].shape[1], tensors[3:]))
    alike.last = count, prepared
    return prepared


def _launch(session: Session, options: tuple, x, topk_ids, topk_weights, weights: tuple, **saved) -> torch.Tensor:
    """o of a forward pass in one launch, which leaves there what is to be saved."""
    o = torch.empty_like(x, memory_format=torch.contiguous_format)
    session.call("forward", ForwardArgs, options, x=x, topk_ids=topk_ids, topk_weights=topk_weights, o=o, **saved,
                 **dict(zip(("w_up", "w_down", "b_up", "b_down"), weights, strict=True)))
    return o


class SavedPass(NamedTuple):
    """A forward pass as its backward pass reads it: inputs, tables of the rows, and h, which is empty where it is made
    again. All rows have memory."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    h: torch.Tensor
    expert_offsets: torch.Tensor
    row_origins: torch.Tensor
    row_scores: torch.Tensor


def forward_saved(session: Session, layer, x, topk_ids, topk_weights, weights: tuple) -> tuple:
    """(o, SavedPass) of a pass for backward_saved, outside of autograd. weights: w_up, w_down, b_up, b_down. Without
    max_rows the host waits until the number of rows is known, so that a pass makes its gradients once: those of weights
    are added to what other passes have left."""
    if not session.fuses(*weights):
        o, tables, h = _run_unfused(session, layer, x, topk_ids, topk_weights, weights, session.training.save == "h")
    else:
        alike, tensors = passes_like(session, x, *weights[::2]), (x, topk_ids, topk_weights, *weights)
        memory, o, *_ = _run_fused(session, layer, alike, tensors)
        if session.training.max_rows is None:
            _ask(session, layer)
            if not session.all_fit:  # now it is known for how many rows there has to be memory
                memory, o, *_ = _run_fused(session, layer, alike, tensors)
        saved = _saved_in(session, memory)
        tables, h = saved.tables(), saved.h(x.dtype)
    return o, SavedPass(x, topk_ids, topk_weights, h, *tables)


def backward_saved(session: Session, saved: SavedPass, d_o, weights: tuple, buffers: tuple) -> tuple:
    """(dx, dscores [T,K] fp32) of a pass. buffers: gradients of weights are added there, None of those that are not
    wanted."""
    x, topk_ids, _, h, *tables = saved
    tables, needs = Tables(*tables), (True, False, True, *[buffer is not None for buffer in buffers])
    rows = _dispatch_saved(session, needs, d_o, x, topk_ids, tables, h, False)
    dx, _, dscores, *_ = _run_backward(session, x, topk_ids, needs, *rows, tables, h, weights, buffers)
    return dx, dscores


def _saved_in(session: Session, memory: torch.Tensor) -> Saved:
    return Saved(memory, session.desc.experts // session.desc.ranks)


class _Experts(torch.autograd.Function):
    """A pass whose forward is unfused."""

    @staticmethod
    def forward(ctx, session: Session, layer: int, x, topk_ids, topk_weights, *weights):
        ctx.session = session
        o, tables, h = _run_unfused(session, layer, x, topk_ids, topk_weights, weights, session.training.save == "h")
        ctx.save_for_backward(x, topk_ids, h, *tables, *weights)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o):
        x, topk_ids, h, *others = ctx.saved_tensors
        tables, weights, needs = Tables(*others[:3]), others[3:], ctx.needs_input_grad[2:]
        rows = _dispatch_saved(ctx.session, needs, d_o.contiguous(), x, topk_ids, tables, h, False)
        return None, None, *_run_backward(ctx.session, x, topk_ids, needs, *rows, tables, h, weights)


class _FusedExperts(torch.autograd.Function):
    """A pass whose forward is one launch. Without max_rows its number is saved, too: where forward runs again for
    backward, the rows that count are those of the pass that left these tables."""

    @staticmethod
    def forward(ctx, how: tuple, *tensors):
        session, layer, alike = how
        memory, o, prepared, count = _run_fused(session, layer, alike, tensors)
        x, topk_ids, topk_weights, *weights = tensors
        if session.training.max_rows is None:
            number = torch.scalar_tensor(session.passes_counted, dtype=torch.int64, device="cpu")
            ctx.save_for_backward(x, topk_ids, memory, *weights, topk_weights, number)
        else:
            ctx.save_for_backward(x, topk_ids, memory, *weights)
        # Hooks on saved tensors may hand other strides back.
        ctx.made = session, layer, prepared if plain_saving() else None, count
        return o

    @staticmethod
    def backward(ctx, d_o):
        # once_differentiable turns gradients off in any case, which takes its time.
        return _once(ctx, d_o) if torch.is_grad_enabled() else _gradients(ctx, d_o)


def _gradients(ctx, d_o) -> tuple:
    """What the backward pass of _FusedExperts returns."""
    session, layer, forward, count = ctx.made
    x, topk_ids, memory, w_up, w_down, b_up, b_down, *counted = ctx.saved_tensors
    if not d_o.is_contiguous():
        d_o = d_o.contiguous()
    needs, weights = ctx.needs_input_grad, (w_up, w_down, b_up, b_down)
    if counted:
        _refuse_capture(x)
    if forward is None:
        gradients = _backward_of_any(session, needs[1:], d_o, x, topk_ids, _saved_in(session, memory), weights,
                                     bool(counted))
    else:
        captured = x.is_cuda and captures()
        key = needs, session.training.save == "h" and not captured and not keeps_graph(), captured
        last, prepared = forward.last_backward
        if last != key:
            prepared = _prepare_backward(session, forward, key, (d_o, x, topk_ids, memory, weights), bool(counted))
        gradients = prepared.run(session, memory, d_o, x, topk_ids, weights)
    if counted:
        topk_weights, number = counted
        count, all_fit = session.routed_rows(session.passes_counted - number.item())
        session.remember_rows(layer, count)
        if not all_fit:
            del gradients  # frees memory for the other pass
            rows = _dispatch_new(session, layer, d_o, x, topk_ids, topk_weights,
                                 memory_for(count, session.training.row_limit), False)
            gradients = _run_backward(session, x, topk_ids, needs[1:], *rows, x.new_empty(0), weights)
    return None, *gradients


_once = once_differentiable(_gradients)


def _backward_of_any(session: Session, needs: tuple, d_o, x, topk_ids, saved: Saved, weights,
                     may_overflow: bool) -> tuple:
    tables, h = saved.tables(), saved.h(x.dtype)
    rows = _dispatch_saved(session, needs, d_o, x, topk_ids, tables, h, may_overflow)
    return _run_backward(session, x, topk_ids, needs, *rows, tables, h, weights)


def _prepare_backward(session: Session, forward: PreparedForward, key: tuple, tensors: tuple,
                      may_overflow: bool) -> PreparedBackward:
    """key: what the gradients are wanted of, whether dh is written over h, and whether a graph captures the pass.
    tensors: d_o, x, topk_ids, memory of what is saved, and the weights."""
    prepared = session.prepared((forward, *key), lambda: _new_backward(session, key, *tensors, may_overflow))
    forward.last_backward = key, prepared
    return prepared


def _new_backward(session: Session, key: tuple, d_o, x, topk_ids, memory, weights: tuple,
                  may_overflow: bool) -> PreparedBackward:
    needs, over_h, _ = key
    needs, saved, names = needs[1:], _saved_in(session, memory), ("dx", "dscores", *_GRADIENT_OF)
    wanted = tuple([name if needed else None for name, needed in zip(names, (needs[0], *needs[2:]), strict=True)])
    return PreparedBackward(
        session, d_o, x, topk_ids, saved, weights, wanted=wanted, over_h=over_h, may_overflow=may_overflow,
        side=uses_side_stream(x) and any(needs[3:]), x_apart=_rows_of_x_apart(session, needs, x, saved.h(x.dtype)),
        gathered=gathers_tokens(session, saved.rows()))


def _run_backward(session: Session, x, topk_ids, needs: tuple, d_o_rows, x_rows, tables: Tables, h,
                  weights: tuple, buffers: tuple = (None,) * 4) -> tuple:
    """Gradients of x, topk_ids, topk_weights, w_up, w_down, b_up, b_down, None where `needs` says so. An h without rows
    is made again. buffers: gradients of weights are added there where these are given, for all that are wanted."""
    w_up, w_down, b_up, b_down = weights
    text = session.training.text
    routing = session.routing(tables.expert_offsets, tables.row_scores)
    if h.dim() == 1:
        text += " save=x"
    elif not keeps_graph() and not (x.is_cuda and captures()):
        text += " overwrite_h=True"
    layer = (w_up, None, w_down, b_up, None, b_down)
    dx_rows, *row_dscores, a_scaled, dh = run_backward_input(
        (d_o_rows, x_rows, h, routing, None, None, *layer, None, None), text, needs[2])
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dscores = x.new_empty(topk_ids.shape, dtype=torch.float32) if needs[2] else None
    # dx rows go back while gradients of weights are made, also where nobody wants dx: other ranks wait for them.
    bits = sum(1 << bit for bit, name in enumerate(GRADIENTS) if _wants(name, needs))
    with session.side.call(bool(bits) and uses_side_stream(x)) as how:
        combine(session, dx_rows, tables, dx, row_dscores=row_dscores[0] if row_dscores else None, dscores=dscores,
                **how)
    made = {}
    if bits:
        into_up, into_down, into_b_up, into_b_down = buffers  # as WEIGHTS (ops/layer.py)
        results = run_backward_weights((d_o_rows, x_rows, routing, *layer, a_scaled, dh), text, bits,
                                       (into_up, None, into_down, into_b_up, None, into_b_down))
        wanted = _wanted_gradients(needs) if results else ()
        made = dict(zip(wanted, results, strict=True))
    session.side.join()
    return dx if needs[0] else None, None, dscores, *[made.get(name) for name in _GRADIENT_OF]


_GRADIENT_OF = {"dw_up": 3, "dw_down": 4, "db_up": 5, "db_down": 6}


def _wants(name: str, needs: tuple) -> bool:
    """Whether a gradient of weights is wanted. needs: x, topk_ids, topk_weights, w_up, w_down, b_up, b_down."""
    return name in _GRADIENT_OF and needs[_GRADIENT_OF[name]]


def _wanted_gradients(needs: tuple) -> tuple:
    return tuple([name for name in GRADIENTS if _wants(name, needs)])


# Calls with `direct` use this: torch's own `apply` asks first, tensor by tensor, whether transforms are active.
_apply_directly = super(torch.autograd.Function, _FusedExperts).apply


def needs_gradients(*tensors) -> bool:
    """Whether a pass on these tensors has gradients; those that are None are absent."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def run(session: Session, layer: int, x, topk_ids, topk_weights, w_up, w_down, b_up=None, b_down=None) -> torch.Tensor:
    """o of a pass of the session: differentiable in all but the ids. layer: a number of the layer's own. A session
    without training serves passes in one launch, without gradients (Session.fuses)."""
    weights = (w_up, w_down, b_up, b_down)
    x, topk_weights = _dense_rows(x), topk_weights.float().contiguous()
    if needs_gradients(x, topk_weights, *weights):
        if not session.fuses(*weights):
            return _Experts.apply(session, layer, x, topk_ids, topk_weights, *weights)
        return run_fused(session, layer, passes_like(session, x, w_up, b_up), x, topk_ids, topk_weights, *weights)
    if session.fuses(*weights):
        return _launch(session, (), x, topk_ids, topk_weights, weights)
    return _run_unfused(session, layer, x, topk_ids, topk_weights, weights, False)[0]


class Ready(NamedTuple):
    """Passes of run_fused on tensors as they are, without biases. check(*tensors): whether others are like these,
    requires_grad included; where weights begin is not looked at."""

    check: Callable
    alike: Alike


def ready(session: Session, x, topk_ids, topk_weights, w_up, w_down) -> Ready | None:
    """None where passes on such tensors are others."""
    check = guard((x, topk_ids, topk_weights, w_up, w_down))
    if (check is not None and session.fuses(w_up, w_down, None, None)
            and needs_gradients(x, topk_weights, w_up, w_down) and _dense_rows(x) is x
            and topk_ids.dtype is torch.int32 and topk_ids.is_contiguous()
            and topk_weights.dtype is torch.float32 and topk_weights.is_contiguous()):
        return Ready(check, passes_like(session, x, w_up, None))
    return None


def run_fused(session: Session, layer: int, alike: Alike, x, topk_ids, topk_weights, w_up, w_down, b_up=None,
              b_down=None):
    """`run` with gradients, on tensors as a forward pass in one launch takes them, and which are alike."""
    apply = _apply_directly if direct() else _FusedExperts.apply
    return apply((session, layer, alike), x, topk_ids, topk_weights, w_up, w_down, b_up, b_down)

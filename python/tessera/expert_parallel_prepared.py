# SPDX-License-Identifier: Apache-2.0
"""Prepared passes with gradients of ExpertParallel: all C structs of a forward pass in one launch and of a backward
pass, in which only addresses change from step to step.

A pass allocates its results, what it saves, and one piece of scratch memory; no operation of torch runs in it. Scratch
memory is torch's, not the session's, so that other layers use it between two passes, and a graph has its own.
"""

import ctypes
from ctypes import addressof
from typing import NamedTuple

import torch

from tessera import expert_parallel_session as sessions
from tessera import library
from tessera.expert_parallel_library import BackwardArgs, CombineArgs, DispatchArgs, ForwardArgs
from tessera.expert_parallel_side_stream import BESIDE_SMS, SIDE_SMS, TOKEN_SMS
from tessera.ops import layer
from tessera.ops.prepared_calls import Written, contiguous_strides, describe, field_word, maker

OWN_ROWS = 256  # of an expert, of this rank's tokens, from which on a backward pass begins with them; measured
ALIGNMENT = 256  # bytes, of whatever lies in one piece of memory
WEIGHTS = ("w_up", "w_down", "b_up", "b_down")


def gathers_tokens(session, rows: int) -> bool:
    """Whether a backward pass with memory for that many rows brings tokens, each once, whose rows its GEMMs gather:
    where they take at most half of the memory of rows, which is where ranks are few and tokens have several rows. With
    as many rows as tokens it is slower. Bits are the same. Each rank decides by itself."""
    return 2 * session.desc.ranks * session.desc.max_tokens <= rows


def begins_with_own_rows(desc, tokens: int) -> bool:
    """Whether a backward pass whose tokens come once multiplies rows of this rank's tokens while the peers' come: where
    an expert has OWN_ROWS of them on average. Bits are the same. Each rank decides by itself."""
    return tokens * desc.top_k >= OWN_ROWS * desc.experts


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Tables(NamedTuple):
    """DispatchTables of expert_parallel.hpp."""

    expert_offsets: torch.Tensor
    row_origins: torch.Tensor
    row_scores: torch.Tensor

    @staticmethod
    def empty(session, rows: int, like: torch.Tensor) -> "Tables":
        """New ones of that many rows."""
        experts = session.desc.experts // session.desc.ranks
        return Saved(like.new_empty(Saved.shape(rows, experts, 0), dtype=torch.int32), experts).tables()


class Saved(NamedTuple):
    """What a pass in one launch leaves for backward, as one tensor: the tables of its rows and, where it is saved, h,
    of 16-bit elements. memory: [rows + spare,5 + half of h's columns] int32; experts: of this rank."""

    memory: torch.Tensor
    experts: int

    @staticmethod
    def _spare(experts: int) -> int:
        """Rows of the memory beyond those of the pass."""
        return -(-(_aligned(4 * (experts + 1)) + 2 * ALIGNMENT) // 20)

    @staticmethod
    def shape(rows: int, experts: int, columns: int) -> tuple[int, int]:
        """Of the memory. columns: of h, an even number, 0 where h is not saved."""
        return rows + Saved._spare(experts), 5 + columns // 2

    @staticmethod
    def places(rows: int, experts: int) -> dict[str, int]:
        """Where each tensor begins, in bytes."""
        scores = _aligned(16 * rows)
        offsets = scores + _aligned(4 * rows)
        return {"expert_offsets": offsets, "row_origins": 0, "row_scores": scores,
                "h": offsets + _aligned(4 * (experts + 1))}

    def rows(self) -> int:
        """Rows that have memory."""
        return self.memory.shape[0] - Saved._spare(self.experts)

    def tables(self) -> Tables:
        """Views of the memory."""
        rows, words = self.rows(), self.memory.view(-1)
        offsets, origins, scores, _ = [place // 4 for place in Saved.places(rows, self.experts).values()]
        return Tables(words[offsets:offsets + self.experts + 1], words[origins:origins + 4 * rows].view(rows, 4),
                      words[scores:scores + rows].view(torch.float32))

    def h(self, dtype: torch.dtype) -> torch.Tensor:
        """[rows,columns], a view of the memory; empty where it is not saved."""
        rows, half = self.rows(), self.memory.shape[1] - 5
        if not half:
            return self.memory.new_empty(0, dtype=dtype)
        begin = Saved.places(rows, self.experts)["h"] // 4
        return self.memory.view(-1)[begin:begin + rows * half].view(rows, half).view(dtype)


class PreparedForward:
    """A forward pass in one launch, with memory for `rows` rows, which leaves tables and h for backward.

    x and weights are of these shapes and strides; ids and scores are contiguous, int32 and fp32; so are weights.
    last_backward: what told the last prepared pass behind it from others, and that pass.
    """

    __slots__ = ("args", "address", "fill", "last_backward")

    def __init__(self, session, rows: int, x: torch.Tensor, top_k: int, weights: tuple):
        training, device, tokens = session.training, x.device, x.shape[0]
        experts = session.desc.experts // session.desc.ranks
        self.last_backward = None, None
        self.args = args = ForwardArgs(ctypes.sizeof(ForwardArgs))
        args.may_overflow = int(training.max_rows is None)
        self.address = addressof(args)
        described = {"x": (x.shape, x.stride(), x.dtype), "topk_ids": ((tokens, top_k), None, torch.int32),
                     "topk_weights": ((tokens, top_k), None, torch.float32), "o": (tuple(x.shape), None, x.dtype)}
        described |= {name: (tuple(weight.shape), None, weight.dtype)
                      for name, weight in zip(WEIGHTS, weights, strict=True) if weight is not None}
        columns = weights[0].shape[1] if training.save == "h" else 0
        saved = {"expert_offsets": ((experts + 1,), None, torch.int32), "row_origins": ((rows, 4), None, torch.int32),
                 "row_scores": ((rows,), None, torch.float32)}
        if columns:
            saved["h"] = (rows, columns), None, x.dtype
        for name, (shape, strides, dtype) in (described | saved).items():
            # Strides of an empty tensor mean nothing.
            plain = strides is None or 0 in shape
            describe(name, getattr(args, name), shape, contiguous_strides(shape) if plain else strides, dtype, device)
        written = Written(f"fill(x, topk_ids, topk_weights, {', '.join(WEIGHTS)})",
                          words=memoryview(args).cast("B").cast("Q"))
        memory = Saved.shape(rows, experts, columns)
        written.make("memory", maker(memory, contiguous_strides(memory), torch.int32, device))
        written.make("o", maker(tuple(x.shape), contiguous_strides(x.shape), x.dtype, device))
        written.line("begin = memory.data_ptr()")
        places = Saved.places(rows, experts)
        for name in saved:
            written.line(f"words[{field_word(ForwardArgs, name)}] = begin + {places[name]}")
        for name in described:
            written.line(f"words[{field_word(ForwardArgs, name)}] = {name}.data_ptr()")
        written.line("return memory, o")
        self.fill = written.function()

    def run(self, session, inputs: tuple) -> tuple:
        """(memory of what is saved, o). inputs: x, topk_ids, topk_weights and WEIGHTS."""
        results = self.fill(*inputs)
        code = sessions.load().tessera_expert_parallel_forward(session.handle, self.address, session.stream())
        if code:
            library.check(code)
        return results


class _Places:
    """Of the structs of a pass: where addresses go. Names of a piece of memory stand with their places in it."""

    def __init__(self):
        self.of, self.bytes = {}, 0

    def room(self, name: str, shape: tuple, dtype: torch.dtype) -> None:
        self.of[name] = self.bytes, shape, dtype
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        self.bytes += _aligned(max(size, 1))

    def views(self, memory: torch.Tensor) -> dict:
        return {name: memory[place:place + _bytes(shape, dtype)].view(dtype).view(shape)
                for name, (place, shape, dtype) in self.of.items()}


def _bytes(shape: tuple, dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _written_fill(fields: list, scratch: _Places, saved: dict, made: dict, gradients: list):
    """fill(memory of what is saved, d_o, x, topk_ids, WEIGHTS): writes all addresses and returns (memory that the pass
    needs, gradients). fields: as PreparedBackward._fields gives them; saved: Saved.places; made: results and scratch
    memory, of `maker`; gradients: names of results, or None."""
    written = Written(f"fill(memory, d_o, x, topk_ids, {', '.join(WEIGHTS)})")
    for name, how in made.items():
        written.make(name, how)
    words, in_scratch, elsewhere = {}, [], {}
    for args, field, name in fields:
        # A struct is known by its address: two structs of ctypes never compare equal, and have no hash.
        of, word = words.setdefault(addressof(args), f"words{len(words)}"), field_word(type(args), field)
        written.values[of] = memoryview(args).cast("B").cast("Q")
        if name in scratch.of:
            in_scratch.append((written.values[of], word, scratch.of[name][0]))
        else:
            elsewhere.setdefault(name, []).append(f"{of}[{word}]")

    def move(begin: int) -> None:
        for of, word, place in in_scratch:
            of[word] = begin + place
        last[0] = begin

    last = [0]  # torch's allocator often gives the same memory again
    written.line("begin, m = scratch.data_ptr(), memory.data_ptr()", last=last, move=move)
    written.line("if begin != last[0]: move(begin)")
    for name, places in elsewhere.items():
        address = f"m + {saved[name]}" if name in saved else f"{name}.data_ptr()"
        written.line(" = ".join([*places, address]))
    # Scratch memory, and dx that nobody wants, live until all is enqueued that writes there.
    written.line(f"return (scratch, dx), ({', '.join(map(str, gradients))})")
    return written.function()


class PreparedBackward:
    """A backward pass of rows that a forward pass has named in its tables.

    h is made again where none is saved. weights: w_up, w_down, b_up, b_down.
    wanted: dx, dscores and gradients of weights, as GRADIENTS names them, None for each that nobody wants. x_apart:
    rows of x come on the side stream, as those that go back do with `side`. gathered: tokens come, each once, and the
    GEMMs gather rows. With all three the peers' rows of d_o come there, too, while GEMMs have begun with this rank's.
    """

    def __init__(self, session, d_o, x, ids, saved: Saved, weights: tuple, *, wanted: tuple, over_h: bool,
                 may_overflow: bool, side: bool, x_apart: bool, gathered: bool):
        _, dscores, *of_weights = wanted
        with_dscores, of_weights = dscores is not None, [name for name in of_weights if name is not None]
        desc, device = session.desc, x.device
        experts, rows, h = saved.experts, saved.rows(), saved.h(x.dtype)
        places, gathered_rows = (desc.ranks * desc.max_tokens, rows) if gathered else (rows, None)
        self.side, self.x_apart, self.gathered = side, x_apart, gathered
        self.beside = side and x_apart and gathered and begins_with_own_rows(desc, x.shape[0])
        self.places = None  # of d_o and x in the window
        text = session.training.text + ("" if h.dim() == 2 else " save=x") + (" overwrite_h=True" if over_h else "")
        scratch = self._room(rows, places, x, weights[0].shape[1], desc.intermediate, with_dscores, over_h)
        scratch.room("routing", (4 * rows + experts + 1,), torch.int32)  # which dispatch writes
        # Descriptions are read off tensors: of scratch memory off views of some.
        views = scratch.views(torch.empty(scratch.bytes, dtype=torch.uint8, device=device))
        tables = saved.tables()
        named = dict(zip(WEIGHTS, weights, strict=True))
        groups = (named["w_up"], None, named["w_down"], named["b_up"], None, named["b_down"])
        dh = h if over_h else views["dh"]
        self.input = layer.prepare_backward_input(
            None, (views["rows"], views["second_rows"], h, views["routing"], None, None, *groups, None, None), text,
            with_dscores, gathered_rows)
        self.weights = None
        if of_weights:
            bits = sum(1 << layer.GRADIENTS.index(name) for name in of_weights)
            self.weights = layer.prepare_backward_weights(
                None, (views["rows"], views["second_rows"], views["routing"], *groups, views["a_scaled"], dh), text,
                bits, (), gathered_rows)
        # One after the other on one stream.
        size = max(call.workspace for call in (self.input, self.weights) if call is not None)
        scratch.room("workspace", (size,), torch.uint8)
        dx = torch.empty(x.shape, dtype=x.dtype, device=device)
        dscores = torch.empty(ids.shape, dtype=torch.float32, device=device) if with_dscores else None
        self._describe(session, d_o, x, ids, tables, views, dx, dscores, may_overflow)
        # dx is made also where nobody wants it: other ranks wait for its rows.
        results = {"dx": dx} | ({"dscores": dscores} if with_dscores else {})
        results |= {name: named[name[1:]] for name in of_weights}  # like these
        made = {name: maker(tuple(t.shape), contiguous_strides(t.shape), t.dtype, device)
                for name, t in results.items()}
        made["scratch"] = maker((scratch.bytes,), (1,), torch.uint8, device)
        present = [name for name in WEIGHTS if named[name] is not None]
        self.fill = _written_fill(self._fields(of_weights, with_dscores, h.dim() == 2, over_h, present), scratch,
                                  Saved.places(rows, experts), made, [wanted[0], None, *wanted[1:]])
        self.args = self._all(session)
        self.address = addressof(self.args)

    @staticmethod
    def _room(rows: int, places: int, x, width: int, intermediate: int, with_dscores: bool, over_h: bool) -> _Places:
        scratch = _Places()
        for name, count in (("rows", places), ("second_rows", places), ("dx_rows", rows)):
            scratch.room(name, (count, x.shape[1]), x.dtype)
        if with_dscores:
            scratch.room("row_dscores", (rows,), torch.float32)
        scratch.room("a_scaled", (rows, intermediate), x.dtype)
        if not over_h:
            scratch.room("dh", (rows, width), x.dtype)
        return scratch

    def _describe(self, session, d_o, x, ids, tables: Tables, views: dict, dx, dscores, may_overflow: bool) -> None:
        overflow, tables = ("may_overflow", int(may_overflow)), tables._asdict()
        def on_side(sms: int) -> tuple:
            return (("sms", sms),) if self.side else ()

        first, second = {"x": d_o, "topk_ids": ids, "rows": views["rows"]}, {"second_x": x,
                                                                           "second_rows": views["second_rows"]}
        if self.x_apart:
            options = overflow, *on_side(BESIDE_SMS if self.beside else TOKEN_SMS if self.gathered else SIDE_SMS)
            self.second_dispatch = sessions.described_call(DispatchArgs, options, {**tables, **second})[0]
            if self.side and not self.beside:  # the place of x in the window, where its rows lie together
                self.second_dispatch.second_x.stride[0] = x.shape[1]
        else:
            self.second_dispatch, first = None, first | second
        self.dispatch = sessions.described_call(DispatchArgs, (overflow,), {**tables, **first})[0]
        self.dispatch.routing.bytes = 4 * views["routing"].numel()
        for call in (self.dispatch, self.second_dispatch) if self.x_apart else (self.dispatch,):
            call.gathered = int(self.gathered)
        self.combine = sessions.described_call(
            CombineArgs, on_side(SIDE_SMS), {"rows": views["dx_rows"], "expert_offsets": tables["expert_offsets"],
                                             "row_origins": tables["row_origins"], "o": dx, "dscores": dscores,
                                             "row_dscores": views.get("row_dscores")})[0]

    def _fields(self, wanted: list, with_dscores: bool, saves_h: bool, over_h: bool, weights: list) -> list:
        """[(struct, field, what its address is of)]: a name of scratch memory, of what is saved, or of a tensor."""
        second = ("second_x", "x"), ("second_rows", "second_rows")
        named = [(name, name) for name in Tables._fields]
        first = [("x", "d_o"), ("topk_ids", "topk_ids"), ("rows", "rows"), ("routing", "routing"), *named]
        calls = [(self.dispatch, [*first, *([] if self.x_apart else second)])]
        if self.x_apart:
            calls.append((self.second_dispatch, [*second, *named]))
        scores = [("row_dscores", "row_dscores"), ("dscores", "dscores")] if with_dscores else []
        calls.append((self.combine, [("rows", "dx_rows"), *named[:2], ("o", "dx"), *scores]))
        both = [("d_o", "rows"), ("x", "second_rows"), ("routing", "routing"), ("a_scaled", "a_scaled"),
                ("workspace", "workspace")]
        dh = [] if over_h else [("dh", "dh")]
        calls.append((self.input.args, [
            *both, *dh, *[(name, name) for name in weights], ("dx", "dx_rows"), *([("h", "h")] if saves_h else []),
            *([("dscores", "row_dscores")] if with_dscores else [])]))
        if self.weights is not None:
            calls.append((self.weights.args, [*both, *(dh or [("dh", "h")]), *[(name, name) for name in wanted]]))
        return [(args, field, name) for args, fields in calls for field, name in fields]

    def _all(self, session) -> BackwardArgs:
        """The calls that one call of the library makes. dx rows go back while gradients of weights are made, also where
        nobody wants dx: other ranks wait for them."""
        args = BackwardArgs(ctypes.sizeof(BackwardArgs), combine=addressof(self.combine))
        if not self.x_apart or self.beside:
            args.dispatch = addressof(self.dispatch)
        if self.beside:
            args.second_dispatch = addressof(self.second_dispatch)
        args.context, args.input_desc, args.input = self.input.addresses
        if self.weights is not None:
            _, args.weights_desc, args.weights = self.weights.addresses
        if self.side:
            args.side_stream = session.side_stream()
        return args

    def run(self, session, memory, d_o, x, topk_ids, weights: tuple) -> tuple:
        """Gradients of x, topk_ids, topk_weights and WEIGHTS, None where nobody wants them."""
        # Scratch memory is free behind the call on the current stream.
        needed, gradients = self.fill(memory, d_o, x, topk_ids, *weights)
        stream = session.stream()
        if self.x_apart and not self.beside:
            self._rows_apart(session, d_o, x, stream)
        code = sessions.load().tessera_expert_parallel_backward(session.handle, self.address, stream)
        if code:
            library.check(code)
        return gradients

    def _rows_apart(self, session, d_o, x, stream: int) -> None:
        """Rows of d_o come, and those of x on the side stream while GEMMs run. d_o is staged, then x while rows of d_o
        come: two copies at once would both take longer."""
        dispatch, side = sessions.load().tessera_expert_parallel_dispatch, session.side
        if self.side:
            if self.places is None:
                self.places = [session.place(name)[:x.shape[0]] for name in ("input", "second_input")]
            of_d_o, of_x = self.places
            self.dispatch.x.data = of_d_o.copy_(d_o).data_ptr()
            with side.fork():
                of_x.copy_(x)
            self.second_dispatch.second_x.data = of_x.data_ptr()
        library.check(dispatch(session.handle, addressof(self.dispatch), stream))
        if self.side:
            side.begin()
            stream, self.second_dispatch.begun = session.side_stream(), side.begun.cuda_event
        library.check(dispatch(session.handle, addressof(self.second_dispatch), stream))
        if self.side:
            side.wait_until_begun()
            side.leave()

# SPDX-License-Identifier: Apache-2.0
"""What all passes of one ExpertParallel share: the library's object and its memory, the streams that have used it, the
prepared calls, and the numbers of rows that layers had.

Inference (expert_parallel.py) and training (expert_parallel_training.py) both stand on a Session and know nothing of
each other's state.
"""

import contextlib
import ctypes
import os
from ctypes import addressof, byref, c_int32, c_int64, c_size_t, c_void_p
from typing import NamedTuple

import torch
from torch import distributed

from tessera import library, options
from tessera.expert_parallel_checks import call_within, gather, refuse_differences
from tessera.expert_parallel_library import TENSORS, Desc, InferenceArgs, load
from tessera.expert_parallel_side_stream import SideStream
from tessera.ops import prepared_calls

MAX_RANKS = 8
MAX_SECONDS = 86400  # the longest time_limit, a day
OPENING_SECONDS = 120  # that ranks wait at least for each other's windows, once all have said that they will open one
MAX_CALLS = 256  # prepared calls that a session holds
# Where the structs of inference have the addresses of TENSORS.
ADDRESS_WORDS = tuple([prepared_calls.field_word(InferenceArgs, name) for name in TENSORS])


def check_devices(names: tuple, tensors: tuple, device: torch.device) -> None:
    """Refuses tensors that are not on the session's device; those that are None are absent."""
    for name, tensor in zip(names, tensors, strict=False):
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name}: on {tensor.device}; this rank computes on {device}, move it there")


class PreparedPass:
    """A prepared inference pass on tensors like these: x, topk_ids, topk_weights, w_up, w_down and, where it is given,
    o. Only addresses change from call to call.

    check(*tensors): whether they are like these, requires_grad included. narrow: whether topk_ids have to become int32.
    """

    __slots__ = ("check", "narrow", "make_o", "args", "words", "address")

    def __init__(self, tensors: tuple, device: torch.device):
        check_devices(TENSORS, tensors, device)
        x, ids = tensors[:2]
        self.check, self.narrow = prepared_calls.guard(tensors), ids.dtype is torch.int64
        self.args = InferenceArgs(ctypes.sizeof(InferenceArgs))
        self.words, self.address = memoryview(self.args).cast("B").cast("Q"), addressof(self.args)
        self.make_o = None
        described = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        if self.narrow:
            described[1] = (ids.shape, prepared_calls.contiguous_strides(ids.shape), torch.int32)
        if len(tensors) < len(TENSORS):
            described.append((tuple(x.shape), prepared_calls.contiguous_strides(x.shape), x.dtype))
            self.make_o = prepared_calls.maker(*described[-1], device)
        for name, how in zip(TENSORS, described, strict=True):
            prepared_calls.describe(name, getattr(self.args, name), *how, device)


class TrainingOptions(NamedTuple):
    """Of a session whose passes may have gradients: the options of its experts as text (options.py), the most rows that
    this rank's experts can have, a bound of them that the caller gave, or None, and what is saved for backward."""

    text: str
    row_limit: int
    max_rows: int | None
    save: str


def training_options(desc: Desc, max_rows: int | None, save: str = "h") -> TrainingOptions | None:
    """None for a session whose passes have no gradients. ValueError where `save` or `max_rows` break their rules."""
    if save not in ("h", "x"):
        raise ValueError(f"save={save!r}: choose from h, x")
    if not desc.training:
        if save != "h":
            raise ValueError(f"save={save}: of passes with gradients; make the object with training=True")
        if max_rows is not None:
            raise ValueError("max_rows: of passes with gradients or biases; make the object with training=True")
        return None
    row_limit = desc.ranks * desc.max_tokens * desc.top_k
    if max_rows is not None and not 0 < max_rows <= row_limit:
        raise ValueError(f"max_rows={max_rows}: 1 to ranks * max_tokens * top_k = {row_limit}")
    text = options.Options(activation=options.ACTIVATIONS[desc.activation], alpha=desc.alpha, limit=desc.limit,
                           up_offset=desc.up_offset, grouping="offsets").text()
    return TrainingOptions(text, row_limit, max_rows, save)


class _WindowMemory:
    """16-bit words of the window, which torch.as_tensor reads in place."""

    def __init__(self, shape: tuple, address: int):
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<i2", "data": (address, False), "version": 3}


class Session:
    """Joins the other ranks when it is made, and holds what passes share.

    handle: of the library's object. desc: its shape. device: this rank's. training: TrainingOptions or None. passes:
    the PreparedPass of each kind. side: the SideStream.
    ready: the kind of passes with gradients that the last one was of, where it was one launch on tensors as they are.
    passes_counted: forward passes whose rows the library counts; all_fit: whether the last counted pass had memory for
    its rows on every rank.
    """

    ready = None

    def __init__(self, *, activation: str, save: str, max_rows: int | None, group, device, windows, **sizes):
        self.handle, self.passes = c_void_p(), {}
        self.passes_counted, self.all_fit, self.side = 0, True, SideStream()
        self._window, self._calls, self._places, self._layer_rows = c_void_p(), {}, {}, {}
        rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
        with contextlib.ExitStack() as on_device:
            # Whatever may fail on one rank alone comes before the ranks meet, so that none waits for it in vain.
            try:
                self.device = device = gpu(device)
                if torch.cuda.is_available():
                    on_device.enter_context(torch.cuda.device(device))
                self.desc = make_desc(rank, ranks, activation, **sizes)
                self.training = training_options(self.desc, max_rows, save)
                bytes_ = self.window_bytes()
                if windows is not None and len(windows) != ranks:
                    raise ValueError(f"windows: {len(windows)} addresses for {ranks} ranks; pass one of each rank")
                addresses = (c_void_p * MAX_RANKS)(*(windows or []))
                context = library.context(library.CUDA, device.index, 1)
                buffer = self._make_workspace(context)
                made = _make_id(rank) if windows is None else None
            except Exception as error:
                gather((None, None, f"{type(error).__name__}: {error}"), group)
                raise
            group_id, lib = agree(self.desc, made, group, save, max_rows), load()
            try:
                if windows is None:
                    self._window = self._open_window(context, group_id, bytes_)
                    library.check(lib.tessera_peer_window_addresses(self._window, addresses))
                library.check(lib.tessera_expert_parallel_create(context, byref(self.desc), addresses, buffer,
                                                                 byref(self.handle)))
            except Exception:
                self.abort()
                raise
            # torch knows that the workspace is used on these.
            self._streams = {torch._C._cuda_getCurrentRawStream(device.index)}
        self.forward = lib.tessera_expert_parallel_forward

    def window_bytes(self) -> int:
        """Bytes of the window that each rank needs."""
        return window_bytes(self.desc)

    def _open_window(self, context: int, group_id: bytes, bytes_: int) -> c_void_p:
        """This rank's window. NCCL would wait without end for a rank that has failed since all agreed."""
        lib, desc, window = load(), self.desc, c_void_p()
        seconds = max(desc.time_limit, OPENING_SECONDS)
        call_within(seconds, lambda: library.check(lib.tessera_peer_window_open(
            context, desc.rank, desc.ranks, group_id, bytes_, None, byref(window))),
            lambda: lib.tessera_peer_window_abort(window),
            f"no window within {seconds:g} s: rank {desc.rank} of {desc.ranks} waited for another rank, which has "
            "failed since all agreed to open theirs; end all ranks and start them anew")
        return window

    def _make_workspace(self, context: int) -> library.Buffer:
        needed = c_size_t()
        library.check(load().tessera_expert_parallel_workspace(context, byref(self.desc), byref(needed)))
        self._workspace = torch.empty(needed.value, dtype=torch.uint8, device=self.device)
        return library.Buffer(self._workspace.data_ptr(), needed.value)

    def stream(self) -> int:
        """The current stream. torch gives the workspace to nobody else before what this stream does there."""
        index = self.device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        if stream not in self._streams:
            self._workspace.record_stream(torch.cuda.current_stream(index))
            self._streams.add(stream)
        return stream

    def side_stream(self) -> int:
        """The side stream, as `stream` has the current one."""
        stream = self.side.make().cuda_stream
        if stream not in self._streams:
            self._workspace.record_stream(self.side.stream)
            self._streams.add(stream)
        return stream

    def place(self, name: str) -> torch.Tensor:
        """The place of x (`input`) or second_x (`second_input`) [max_tokens,d] in this rank's window."""
        if name not in self._places:
            address = c_void_p()
            library.check(getattr(load(), f"tessera_expert_parallel_{name}")(self.handle, byref(address)))
            memory = _WindowMemory((self.desc.max_tokens, self.desc.hidden), address.value)
            self._places[name] = torch.as_tensor(memory, device=self.device).view(torch.bfloat16)
        return self._places[name]

    def fuses(self, w_up, w_down, b_up, b_down) -> bool:
        """Whether forward is one launch: with weights as that takes them, and biases with clamped-swiglu alone."""
        if b_up is not None and options.ACTIVATIONS[self.desc.activation] != "clamped-swiglu":
            return False
        return all(w is None or w.is_contiguous() and w.data_ptr() % 16 == 0 for w in (w_up, w_down, b_up, b_down))

    def call(self, name: str, kind: type, options: tuple = (), begun: int = 0, **tensors) -> None:
        """One function of the library on the current stream; tensors that are None are absent. The call is prepared
        once, and only addresses change from call to call. options: (name, value) of other fields; begun: an event's
        address."""
        key = name, options, *[None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors.values()]
        prepared = self.prepared(key, lambda: described_call(kind, options, tensors))
        args, words, places = prepared
        for place, tensor in zip(places, [t for t in tensors.values() if t is not None], strict=True):
            words[place] = tensor.data_ptr()
        if begun:
            args.begun = begun
        function = getattr(load(), f"tessera_expert_parallel_{name}")
        library.check(function(self.handle, addressof(args), self.stream()))

    def prepared(self, key: tuple, make):
        """What make() has given for the key."""
        return self._calls.get(key) or self._prepare(key, make)

    def _prepare(self, key: tuple, make):
        if len(self._calls) >= MAX_CALLS:
            self._calls.clear()
        prepared = self._calls[key] = make()
        return prepared

    def routing(self, expert_offsets: torch.Tensor, row_scores: torch.Tensor) -> torch.Tensor:
        """The routing tables of rows that lie sorted by expert, each with its score, for a backward pass of the
        experts on them: routing_of_groups of routing.hpp."""
        key = "routing_of_groups", row_scores.shape
        prepared = self.prepared(
            key, lambda: prepared_routing(self.desc, self.training.text, expert_offsets, row_scores))
        return routing_of_groups(prepared, expert_offsets, row_scores, self.stream())

    def routed_rows(self, passes_ago: int = 0) -> tuple[int, bool]:
        """This rank's rows of the last pass that was counted, or of the one so many before it, and whether the rows of
        every rank fit into its memory. The host waits until they are known."""
        rows, all_fit = c_int64(), c_int32()
        library.check(load().tessera_expert_parallel_routed_rows(self.handle, passes_ago, byref(rows),
                                                                 byref(all_fit)))
        return rows.value, all_fit.value != 0

    def rows_of_last_pass(self, layer: int) -> int | None:
        """Rows that the layer's last pass had on this rank, None before its first one."""
        return self._layer_rows.get(layer)

    def remember_rows(self, layer: int, rows: int) -> None:
        """Notes them for `rows_of_last_pass`."""
        if len(self._layer_rows) >= MAX_CALLS:
            self._layer_rows.clear()
        self._layer_rows[layer] = rows

    def check(self) -> None:
        """Raises if a pass that has ended waited in vain for a rank."""
        library.check(load().tessera_expert_parallel_check(self.handle))

    def close(self) -> None:
        """Frees the window when this rank's GPU is done; collective."""
        library.check(load().tessera_peer_window_close(self._release()))

    def abort(self) -> None:
        """Frees the window without waiting for the other ranks."""
        load().tessera_peer_window_abort(self._release())

    def _release(self) -> c_void_p:
        """The window, whose memory nothing uses any more."""
        load().tessera_expert_parallel_destroy(self.handle)
        window, self.handle, self._window = self._window, c_void_p(), c_void_p()
        self._workspace, self._places = None, {}
        return window


def window_bytes(desc: Desc) -> int:
    """Bytes of the window that each rank needs. ValueError where a bound of the description is broken."""
    needed = c_size_t()
    library.check(load().tessera_expert_parallel_window(byref(desc), byref(needed)))
    return needed.value


def prepared_routing(of: Desc, text: str, expert_offsets: torch.Tensor, row_scores: torch.Tensor) -> tuple:
    """A call of routing_of_groups on tensors like these. text: options of the experts (options.py)."""
    device = row_scores.device
    desc = options.parse(text).desc(
        top_k=1, tokens=row_scores.shape[0], hidden=of.hidden, intermediate=of.intermediate,
        experts=of.experts // of.ranks, dtype=library.BF16, ids_dtype=library.INT32, separate=False, bias=False)
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    described = []
    for name, tensor in (("expert_offsets", expert_offsets), ("row_scores", row_scores)):
        described.append(library.Tensor())
        prepared_calls.describe(name, described[-1], tensor.shape, (1,), tensor.dtype, device)
    context = library.context(prepared_calls.KINDS[device.type], device.index or 0, threads)
    # The struct comes last, so that it lives as long as its address is used.
    return context, addressof(desc), *described, library.Buffer(None, library.routing_bytes(desc)), desc


def routing_of_groups(prepared: tuple, expert_offsets: torch.Tensor, row_scores: torch.Tensor, stream) -> torch.Tensor:
    """The tables that the prepared call makes of these on the stream."""
    context, desc, offsets, scores, buffer, _ = prepared
    tables = row_scores.new_empty(buffer.bytes // 4, dtype=torch.int32)
    offsets.data, scores.data, buffer.data = expert_offsets.data_ptr(), row_scores.data_ptr(), tables.data_ptr()
    library.check(load().tessera_routing_of_groups(context, desc, offsets, scores, buffer, stream))
    return tables


def described_call(kind: type, options: tuple, tensors: dict) -> tuple:
    """(args, their words of 64 bits, which of these are addresses)."""
    args, places = kind(ctypes.sizeof(kind)), []
    for name, value in options:
        setattr(args, name, value)
    for field, tensor in tensors.items():
        if tensor is not None:
            # Strides of an empty tensor mean nothing.
            stride = tensor.stride() if tensor.numel() else prepared_calls.contiguous_strides(tensor.shape)
            prepared_calls.describe(field, getattr(args, field), tensor.shape, stride, tensor.dtype, tensor.device)
            places.append(prepared_calls.field_word(kind, field))
    return args, memoryview(args).cast("B").cast("Q"), places


def gpu(device) -> torch.device:
    """This rank's GPU: the one that is named, or torch's current one."""
    if device is None and not torch.cuda.is_available():
        raise RuntimeError("experts over several ranks run on GPUs: torch sees none; device=\"cpu\" takes the CPU")
    device = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
    if device.type != "cuda" or device.index is None:
        raise ValueError(f"device={device}: experts over several ranks run on GPUs; name one, such as cuda:0, or cpu")
    return device


def make_desc(rank: int, ranks: int, activation: str, *, max_tokens, hidden, intermediate, experts, top_k,
              partial_combine, alpha, limit, up_offset, training, time_limit, sms=0) -> Desc:
    """The description of a session, its bounds unchecked but for the activation's. sms: that passes take, 0 for all."""
    if activation not in options.ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: choose from {', '.join(options.ACTIVATIONS)}")
    options.Options(activation=activation, alpha=alpha, limit=limit, up_offset=up_offset)  # refuses zeros
    if not 0 < time_limit <= MAX_SECONDS:  # a desc of C means its default by 0
        raise ValueError(f"time_limit={time_limit}: seconds, above 0 and at most a day, {MAX_SECONDS}")
    return Desc(ctypes.sizeof(Desc), rank, ranks, max_tokens, hidden, intermediate, experts, top_k,
                options.ACTIVATIONS.index(activation), bool(partial_combine), alpha, limit, up_offset, bool(training),
                time_limit, sms)


def _make_id(rank: int) -> bytes | None:
    """Rank 0 makes the id. Elsewhere only that is asked which each process has to be asked for: an id made there would
    keep a thread of NCCL waiting for ranks."""
    if rank == 0:
        made = ctypes.create_string_buffer(128)
        library.check(load().tessera_peer_group_id_make(None, made))
        return made.raw
    multicast = os.environ.get("NCCL_NVLS_ENABLE")
    if multicast != "0":
        raise RuntimeError(f"NVLink multicast must be off: NCCL_NVLS_ENABLE is {multicast or 'not set'}; set it to "
                           "0 before the first NCCL call of the process")
    return None


def agree(desc: Desc, group_id, group, save: str = "h", max_rows: int | None = None):
    """The id that rank 0 made. Where a rank has failed, or ranks differ in anything else, all of them raise."""
    mine = {name: getattr(desc, name) for name, _ in Desc._fields_ if name not in ("size", "rank")}
    mine = {"hosts": 1} | mine | {"save": save, "max_rows": max_rows}
    of_ranks = gather((mine, group_id, None), group)
    refuse_differences(of_ranks)
    return of_ranks[0][1]

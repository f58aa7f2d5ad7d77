# SPDX-License-Identifier: Apache-2.0
"""The experts of a layer spread over the GPUs of a process group: expert_parallel.hpp for PyTorch.

    experts = tessera.ExpertParallel(max_tokens=8192, hidden=2048, intermediate=768, experts=128, top_k=8)
    o = experts(x, topk_ids, topk_weights, w_up, w_down)    # on every rank, with its own tokens and experts

Forward is one launch; gradients, with training=True, are made in pieces (expert_parallel_training.py).

NVLink multicast must be off: set NCCL_NVLS_ENABLE=0 before the first NCCL call of the process.
"""

import contextlib
import ctypes
import functools
import os
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t
from ctypes import c_uint64, c_void_p

import torch
from torch import distributed

from tessera import expert_parallel_training as in_pieces
from tessera import functional, library, options
from tessera.ops import plans

_MOST_RANKS = 8


class _Desc(library.Struct):
    _fields_ = [("size", c_uint64), ("rank", c_int32), ("ranks", c_int32),
                *[(name, c_int64) for name in ("max_tokens", "hidden", "intermediate", "experts", "top_k")],
                ("activation", c_int32), ("sums_on_owners", c_int32),
                *[(name, c_float) for name in ("alpha", "limit", "up_offset")], ("training", c_int32),
                ("time_limit", c_double)]


_TENSORS = ("x", "topk_ids", "topk_weights", "w_up", "w_down", "o")


class _Args(Structure):
    _fields_ = [("size", c_uint64), *[(name, library.Tensor) for name in _TENSORS]]


@functools.cache
def _library() -> ctypes.CDLL:
    lib = library.load()
    group_id, desc, handle = c_char_p, POINTER(_Desc), c_void_p
    lib.tessera_peer_group_id_make.argtypes = [c_char_p, group_id]
    lib.tessera_peer_window_open.argtypes = [handle, c_int32, c_int32, group_id, c_size_t, c_char_p, POINTER(handle)]
    lib.tessera_peer_window_addresses.argtypes = [handle, POINTER(c_void_p)]
    lib.tessera_peer_window_close.argtypes = [handle]
    lib.tessera_peer_window_abort.argtypes = [handle]
    lib.tessera_peer_window_abort.restype = None
    lib.tessera_expert_parallel_window.argtypes = [desc, POINTER(c_size_t)]
    lib.tessera_expert_parallel_workspace.argtypes = [handle, desc, POINTER(c_size_t)]
    lib.tessera_expert_parallel_create.argtypes = [handle, desc, POINTER(c_void_p), library.Buffer, POINTER(handle)]
    lib.tessera_expert_parallel_destroy.argtypes = [handle]
    lib.tessera_expert_parallel_destroy.restype = None
    for name in ("input", "second_input"):
        getattr(lib, f"tessera_expert_parallel_{name}").argtypes = [handle, POINTER(c_void_p)]
    lib.tessera_expert_parallel_forward.argtypes = [handle, c_void_p, c_void_p]  # _Args by address
    lib.tessera_expert_parallel_check.argtypes = [handle]
    in_pieces.declare(lib)
    return lib


_WORDS = tuple([plans.field_word(_Args, name) for name in _TENSORS])


def check_devices(names: tuple, tensors: tuple, device: torch.device) -> None:
    for name, tensor in zip(names, tensors, strict=False):
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name}: on {tensor.device}; this rank computes on {device}, move it there")


class _Pass:
    """A pass in one launch on tensors like these: x, topk_ids, topk_weights, w_up, w_down and, where it is given, o.
    Only addresses change from call to call.

    check(*tensors): whether they are like these, requires_grad included. narrow: whether topk_ids have to become int32.
    """

    __slots__ = ("check", "narrow", "make_o", "args", "words", "address")

    def __init__(self, tensors: tuple, device: torch.device):
        check_devices(_TENSORS, tensors, device)
        x, ids = tensors[:2]
        self.check, self.narrow = plans.guard(tensors), ids.dtype is torch.int64
        self.args = _Args(ctypes.sizeof(_Args))
        self.words, self.address = memoryview(self.args).cast("B").cast("Q"), ctypes.addressof(self.args)
        self.make_o = None
        described = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        if self.narrow:
            described[1] = (ids.shape, plans.contiguous_strides(ids.shape), torch.int32)
        if len(tensors) < len(_TENSORS):
            described.append((tuple(x.shape), plans.contiguous_strides(x.shape), x.dtype))
            self.make_o = plans.maker(*described[-1], device)
        for name, how in zip(_TENSORS, described, strict=True):
            plans.describe(name, getattr(self.args, name), *how, device)


def _pieces(desc: _Desc, max_rows: int | None, save: str = "h") -> in_pieces.Pieces | None:
    if save not in ("h", "x"):
        raise ValueError(f"save={save!r}: choose from h, x")
    if not desc.training:
        if save != "h":
            raise ValueError(f"save={save}: of passes with gradients; make the object with training=True")
        if max_rows is not None:
            raise ValueError("max_rows: of passes with gradients or biases; make the object with training=True")
        return None
    most = desc.ranks * desc.max_tokens * desc.top_k
    if max_rows is not None and not 0 < max_rows <= most:
        raise ValueError(f"max_rows={max_rows}: 1 to ranks * max_tokens * top_k = {most}")
    text = options.Options(activation=options.ACTIVATIONS[desc.activation], alpha=desc.alpha, limit=desc.limit,
                           up_offset=desc.up_offset, grouping="offsets").text()
    return in_pieces.Pieces(text, most, max_rows, save)


class _Memory:
    """16-bit words of the GPU's memory, as torch.as_tensor takes what is not its own."""

    def __init__(self, shape: tuple, address: int):
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<i2", "data": (address, False), "version": 3}


class ExpertParallel:
    """Rank r of the P ranks of `group` owns experts [r*E/P, (r+1)*E/P). All ranks make the same passes in the same
    order, also those in which they have no token; layers of one shape share one object. Whether a pass has gradients,
    and of what, is the same on all ranks.

    max_tokens: most tokens of any rank in any pass, up to 2^24. hidden and intermediate: multiples of 8 up to 2^20.
    experts: E, a multiple of P, at most 512. top_k: K, at most 32 and at most E. group: of torch.distributed, 1 to 8
    ranks, one per GPU of one host, its default where None. windows: addresses of memory of all ranks, as this rank's
    GPU sees it, zeroed, of `window_bytes` each; where None NCCL makes them. time_limit: seconds that a pass waits for
    another rank, above 0 and at most 86400. sums_on_owners: where the link would hold up a pass, a rank may send back
    one weighted sum of a token's choices there, rounded to bf16, instead of each result; then the bits of o, the same
    every time, depend on P and on the token's rank. training: passes may have gradients, or biases with any activation;
    windows and workspace are larger. save: "h" keeps the pre-activation for backward, "x" makes it again. Behind a
    backward pass, and a forward pass in pieces, the host waits until the number of rows is known, which it was when the
    GPU began to multiply: where memory for a sixteenth more than the layer had in its last pass was not enough for them
    on some rank, all make the pass again. With max_rows, a bound of the rows that a rank's experts have in any pass, it
    does not wait; where there are more the pass is void, and check() says so. alpha, limit and up_offset belong to
    clamped-swiglu. Everything but `device` and `windows` is equal on all ranks. Larger passes have to be split:
    max_tokens * K * K is at most 2^32, and a rank's pool, P * max_tokens * K rows and 127 for each of its experts, has
    at most 2^31 - 1. ValueError where a bound is broken. Making and closing are collective; where one rank fails to
    join, all of them raise.
    """

    def __init__(self, *, max_tokens: int, hidden: int, intermediate: int, experts: int, top_k: int,
                 activation: str = "swiglu", alpha: float = 1.702, limit: float = 7.0, up_offset: float = 1.0,
                 sums_on_owners: bool = False, training: bool = False, save: str = "h", max_rows: int | None = None,
                 group=None, device=None, windows=None, time_limit: float = 30):
        self._handle, self._window = c_void_p(), c_void_p()
        self._passes, self._calls, self._places = {}, {}, {}
        self._rows, self._all_fit, self._beside = {}, True, in_pieces.Beside()
        self._counted, self._row_numbers = 0, None
        rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
        with contextlib.ExitStack() as on_device:
            # Whatever may fail on one rank alone comes before the ranks meet, so that none waits for it in vain.
            try:
                self._device = device = self._gpu(device)
                if torch.cuda.is_available():
                    on_device.enter_context(torch.cuda.device(device))
                if activation not in options.ACTIVATIONS:
                    raise ValueError(f"activation={activation!r}: choose from {', '.join(options.ACTIVATIONS)}")
                options.Options(activation=activation, alpha=alpha, limit=limit, up_offset=up_offset)  # refuses zeros
                self._desc = _Desc(ctypes.sizeof(_Desc), rank, ranks, max_tokens, hidden, intermediate, experts, top_k,
                                   options.ACTIVATIONS.index(activation), bool(sums_on_owners), alpha, limit,
                                   up_offset, bool(training), time_limit)
                self._pieces = _pieces(self._desc, max_rows, save)
                bytes_ = self.window_bytes
                if windows is not None and len(windows) != ranks:
                    raise ValueError(f"windows: {len(windows)} addresses for {ranks} ranks; pass one of each rank")
                addresses = (c_void_p * _MOST_RANKS)(*(windows or []))
                context = library.context(library.CUDA, device.index, 1)
                buffer = self._make_workspace(context)
                made = self._make_id(rank) if windows is None else None
            except Exception as error:
                self._gather((None, None, f"{type(error).__name__}: {error}"), group)
                raise
            group_id, lib = self._agree(self._desc, made, group, save, max_rows), _library()
            try:
                if windows is None:
                    library.check(lib.tessera_peer_window_open(context, rank, ranks, group_id, bytes_, None,
                                                               byref(self._window)))
                    library.check(lib.tessera_peer_window_addresses(self._window, addresses))
                library.check(lib.tessera_expert_parallel_create(context, byref(self._desc), addresses, buffer,
                                                                 byref(self._handle)))
            except Exception:
                self.abort()
                raise
            self._streams = {torch._C._cuda_getCurrentRawStream(device.index)}  # that torch knows the workspace has
        self._forward = lib.tessera_expert_parallel_forward

    @staticmethod
    def _gpu(device) -> torch.device:
        if device is None and not torch.cuda.is_available():
            raise RuntimeError("experts over several ranks run on GPUs: torch sees none")
        device = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        if device.type != "cuda" or device.index is None:
            raise ValueError(f"device={device}: experts over several ranks run on GPUs; name one, such as cuda:0")
        return device

    def _make_workspace(self, context: int) -> library.Buffer:
        needed = c_size_t()
        library.check(_library().tessera_expert_parallel_workspace(context, byref(self._desc), byref(needed)))
        self._workspace = torch.empty(needed.value, dtype=torch.uint8, device=self._device)
        return library.Buffer(self._workspace.data_ptr(), needed.value)

    @staticmethod
    def _make_id(rank: int) -> bytes | None:
        """Of rank 0. On the others what each process has to be asked for: an id of theirs would keep a thread of NCCL
        waiting for the group."""
        if rank == 0:
            made = ctypes.create_string_buffer(128)
            library.check(_library().tessera_peer_group_id_make(None, made))
            return made.raw
        multicast = os.environ.get("NCCL_NVLS_ENABLE")
        if multicast != "0":
            raise RuntimeError(f"NVLink multicast must be off: NCCL_NVLS_ENABLE is {multicast or 'not set'}; set it to "
                               "0 before the first NCCL call of the process")
        return None

    @staticmethod
    def _gather(mine: tuple, group) -> list:
        """(desc, id, failure) of all ranks."""
        of_ranks = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(of_ranks, mine, group=group)
        return of_ranks

    @staticmethod
    def _agree(desc, group_id, group, save="h", max_rows=None):
        """The id that rank 0 made. Where a rank has failed, or ranks differ in anything else, all of them raise."""
        mine = {name: getattr(desc, name) for name, _ in _Desc._fields_ if name not in ("size", "rank")}
        mine |= {"save": save, "max_rows": max_rows}
        of_ranks = ExpertParallel._gather((mine, group_id, None), group)
        for rank, (_, _, failure) in enumerate(of_ranks):
            if failure is not None:
                raise RuntimeError(f"rank {rank} cannot join: {failure}")
        first, group_id, _ = of_ranks[0]
        for rank, (theirs, _, _) in enumerate(of_ranks):
            for name, value in theirs.items():
                if value != first[name]:
                    raise ValueError(f"{name}={first[name]} on rank 0, {value} on rank {rank}: equal on all ranks")
        return group_id

    @property
    def window_bytes(self) -> int:
        needed = c_size_t()
        library.check(_library().tessera_expert_parallel_window(byref(self._desc), byref(needed)))
        return needed.value

    def __call__(self, x, topk_ids, topk_weights, w_up, w_down, out=None, *, b_up=None, b_down=None):
        """o [T,d] of this rank's tokens: x [T,d]; topk_ids, topk_weights [T,K], ids outside [0,E) own no row; w_up
        [E/P,2n,d] (gate rows first) or [E/P,n,d], w_down [E/P,d,n], this rank's; with training, or with clamped-swiglu,
        biases, both or none: b_up [E/P,2n] or [E/P,n], b_down [E/P,d]. Enqueued on the current stream. Differentiable
        with training. out: without gradients and biases."""
        layer = w_up.data_ptr()  # before it is cast
        if torch._C._is_any_autocast_enabled():
            x, w_up, w_down, b_up, b_down = functional.autocast((x, w_up, w_down, b_up, b_down))
        if b_up is not None or b_down is not None:
            return self._in_pieces(layer, x, topk_ids, topk_weights, w_up, w_down, b_up, b_down, out)
        tensors = (x, topk_ids, topk_weights, w_up, w_down) if out is None else (
            x, topk_ids, topk_weights, w_up, w_down, out)
        kind = (out is None, torch.is_grad_enabled())
        ready = self._passes.get(kind)
        if ready is None or ready.check is None or not ready.check(*tensors):
            if kind[1] and any(tensor.requires_grad for tensor in tensors):
                return self._in_pieces(layer, x, topk_ids, topk_weights, w_up, w_down, None, None, out)
            ready = self._passes[kind] = _Pass(tensors, self._device)
        index = self._device.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self(x, topk_ids, topk_weights, w_up, w_down, out)
        if ready.narrow:
            topk_ids = self._narrowed(topk_ids)
        if out is None:
            make, how = ready.make_o
            out = make(*how)
        words = ready.words
        for word, tensor in zip(_WORDS, (x, topk_ids, topk_weights, w_up, w_down, out), strict=True):
            words[word] = tensor.data_ptr()
        code = self._forward(self._handle, ready.address, self._stream())
        if code:
            library.check(code)
        return out

    def _narrowed(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """As int32, contiguous whatever their strides."""
        # Clamped first: an id outside [0,E) stays one, where its low half may be an expert.
        return topk_ids.clamp(-1, self._desc.experts).to(torch.int32, memory_format=torch.contiguous_format)

    def _stream(self) -> int:
        """The current one. torch gives the workspace to nobody else before what this stream does there."""
        index = self._device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        if stream not in self._streams:
            self._workspace.record_stream(torch.cuda.current_stream(index))
            self._streams.add(stream)
        return stream

    def _check_shapes(self, x, topk_ids, topk_weights, *weights) -> None:
        """Before a pass in pieces begins: where one breaks off, the other ranks wait in vain."""
        desc, tokens = self._desc, x.shape[0] if x.dim() else 0
        d, n, experts = desc.hidden, desc.intermediate, desc.experts // desc.ranks
        up = n * (2 if options.ACTIVATIONS[desc.activation] in options.GATED else 1)
        shapes = (tokens, d), (experts, up, d), (experts, d, n), (experts, up), (experts, d)
        for name, tensor, shape in zip(("x", "w_up", "w_down", "b_up", "b_down"), (x, *weights), shapes, strict=True):
            if tensor is not None and (tensor.shape != shape or tensor.dtype is not torch.bfloat16):
                raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}; bf16 {list(shape)} is needed")
        for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            if tensor.shape != (tokens, desc.top_k):
                raise ValueError(f"{name}: {list(tensor.shape)}; {[tokens, desc.top_k]} is needed")
        if topk_ids.dtype not in (torch.int32, torch.int64) or not topk_weights.is_floating_point():
            raise ValueError(f"topk_ids, topk_weights: {topk_ids.dtype}, {topk_weights.dtype}; int32 or int64, and a "
                             "floating type, are needed")
        if tokens > desc.max_tokens:
            raise ValueError(f"x: {tokens} tokens; at most max_tokens={desc.max_tokens}")

    def _in_pieces(self, layer: int, x, topk_ids, topk_weights, w_up, w_down, b_up, b_down, out) -> torch.Tensor:
        if (b_up is None) != (b_down is None):
            raise ValueError("b_up, b_down: give both or neither")
        tensors = (x, topk_ids, topk_weights, w_up, w_down, b_up, b_down)
        if self._pieces is None and (in_pieces.needs_gradients(*tensors) or not in_pieces.fuses(self, *tensors[3:])):
            raise RuntimeError("a pass with gradients, or with biases that one launch does not take (of another "
                               "activation than clamped-swiglu, or beside tensors that are not contiguous): make the "
                               "object with training=True, or call it under torch.no_grad() and without biases")
        if out is not None:
            raise ValueError("out: a pass with gradients or biases makes its own result")
        check_devices((*_TENSORS[:5], "b_up", "b_down"), tensors, self._device)
        self._check_shapes(*tensors)
        if topk_ids.dtype is torch.int64:
            topk_ids = self._narrowed(topk_ids)
        elsewhere = torch._C._cuda_getDevice() != self._device.index
        with torch.cuda.device(self._device) if elsewhere else contextlib.nullcontext():
            return in_pieces.run(self, self._pieces, layer, x, topk_ids.contiguous(), topk_weights, w_up, w_down, b_up,
                                 b_down)

    def input(self, tokens: int) -> torch.Tensor:
        """The place of x [tokens,d] in this rank's window: a pass on what is written there copies nothing.

        It may be overwritten once a pass has ended on this rank: write it on the stream of the passes. Valid until
        close()."""
        if tokens > self._desc.max_tokens:
            raise ValueError(f"tokens={tokens}: at most max_tokens={self._desc.max_tokens}")
        return self._place("input")[:tokens]

    def _place(self, name: str) -> torch.Tensor:
        """Of x or second_x [max_tokens,d] in the window."""
        if name not in self._places:
            address = c_void_p()
            library.check(getattr(_library(), f"tessera_expert_parallel_{name}")(self._handle, byref(address)))
            memory = _Memory((self._desc.max_tokens, self._desc.hidden), address.value)
            self._places[name] = torch.as_tensor(memory, device=self._device).view(torch.bfloat16)
        return self._places[name]

    def check(self) -> None:
        """Raises if a pass that has ended waited in vain for a rank; synchronise its stream first."""
        library.check(_library().tessera_expert_parallel_check(self._handle))

    def close(self) -> None:
        """Waits for this rank's GPU and frees the window that NCCL made; collective. Passes of other ranks may still
        run, but none may start."""
        library.check(_library().tessera_peer_window_close(self._let_go()))

    def abort(self) -> None:
        """Waits for this rank's GPU and frees the window without waiting for the other ranks, where check() has raised:
        one of them may be gone."""
        _library().tessera_peer_window_abort(self._let_go())

    def _let_go(self) -> c_void_p:
        """The window, of which nothing uses the memory any more."""
        _library().tessera_expert_parallel_destroy(self._handle)
        window, self._handle, self._window = self._window, c_void_p(), c_void_p()
        self._workspace, self._places = None, {}
        return window

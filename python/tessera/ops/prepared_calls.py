# SPDX-License-Identifier: Apache-2.0
"""Prepared calls: the C structs of a call of the library.

A prepared call belongs to one combination of shapes, strides and options; only the pointers in it change from call to
call. Each thread has its own, so that filling one needs no lock.
"""

import functools
import itertools
import math
import os
import threading
from typing import NamedTuple

import torch

from tessera import library
from tessera.ops import memory

DTYPES = {torch.float32: library.FP32, torch.bfloat16: library.BF16, torch.int32: library.INT32,
          torch.int64: library.INT64, torch.bool: library.UINT8, torch.uint8: library.UINT8,
          torch.float8_e4m3fn: library.FP8_E4M3, torch.float8_e8m0fnu: library.E8M0}
KINDS = {"cpu": library.CPU, "cuda": library.CUDA}
MAX_PREPARED = 1024  # per thread; each is about 8 KB
SCRATCH_BYTES = 1 << 30  # of a CPU thread
# make(shape, strides, dtype) of torch.compile's generated code; that of CUDA makes tensors on the current device.
_MAKERS = {kind: getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None) for kind in KINDS}


class _PerThread(threading.local):
    def __init__(self):
        self.prepared = {}
        self.calls, self.ways = {}, {}  # autograd.py
        self.grow(0)

    def grow(self, size: int) -> None:
        self.scratch = None  # before the larger one comes
        self.scratch = torch.empty(size, dtype=torch.uint8, device="cpu")

    def forget(self) -> None:
        for kept in (self.prepared, self.calls, self.ways):
            kept.clear()


here = _PerThread()
_numbers = itertools.count()
# A forked child has one thread, and contexts of its own (library.py).
os.register_at_fork(after_in_child=lambda: here.forget())


def signature(tensors: tuple) -> tuple:
    return tuple([t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors])


def guard(tensors: tuple):
    """check(*tensors) -> whether they are like these in type, storage type, device, shape, strides, requires_grad and
    the state of the dispatcher. It is torch.compile's own, and takes a tenth of the time of `signature`; None where
    this torch has no such thing."""
    try:
        made = torch._C._dynamo.guards.TensorGuards(
            *tensors, dynamic_dims_sizes=[list(t.shape) for t in tensors],
            dynamic_dims_strides=[list(t.stride()) for t in tensors])
    except (AttributeError, TypeError):
        return None
    return made.check


class PreparedCall:
    """C structs with everything but the pointers; `words` is the argument struct as 64-bit words.

    run(tensors, buffers=(), step=0): one call of the library on the inputs that are present, in the order of `read`;
    returns the outputs. buffers: (word, tensor) of what else is written; step: of stochastic rounding.
    """

    __slots__ = ("number", "function", "on_gpu", "desc", "args", "words", "addresses", "device", "context", "count",
                 "inputs", "copied", "outputs", "workspace", "run")

    def __init__(self, function: str, device: torch.device, args, desc=None):
        if device.type not in KINDS:
            raise NotImplementedError(f"device {device}: Tessera runs on the CPU and on CUDA devices; move the tensors")
        self.number = next(_numbers)
        index = 0 if device.index is None else device.index
        threads = torch.get_num_threads() if device.type == "cpu" else 0
        self.function = getattr(library.load(), f"tessera_{function}")
        self.context = library.context(KINDS[device.type], index, threads)
        self.device, self.on_gpu, self.desc, self.args = device, device.type == "cuda", desc, args
        args.size = library.ctypes.sizeof(args)
        self.words = memoryview(args).cast("B").cast("Q")
        self.addresses = (self.context, *([] if desc is None else [library.ctypes.addressof(desc)]),
                          library.ctypes.addressof(args))
        self.count, self.inputs, self.copied, self.outputs = 0, [], [], []

    def read(self, names: tuple, tensors: tuple, unread: tuple = ()) -> None:
        """Describes the inputs that are present; remembers which have to be copied into readable strides. The library
        does not see those whose names are in `unread`."""
        present = pairs(names, tensors)
        one_device(present)
        self.count = len(present)
        for position, (name, tensor) in enumerate(present):
            if name in unread:
                continue
            self.inputs.append((position, field_word(type(self.args), name)))
            if not readable(tensor):
                self.copied.append(position)
                tensor = tensor.contiguous()
            field = getattr(self.args, name)
            if isinstance(field, library.Buffer):
                field.bytes = tensor.numel() * tensor.element_size()
            else:
                # Strides of an empty tensor mean nothing, and contiguous() leaves them as they are.
                strides = tensor.stride() if tensor.numel() else contiguous_strides(tensor.shape)
                describe(name, field, tensor.shape, strides, tensor.dtype, tensor.device)

    def write(self, name: str | None, shape: tuple, dtype: torch.dtype, zeroed: bool = False,
              converted: torch.dtype | None = None) -> None:
        """An output that each call makes, contiguous; without a name it is empty and the library does not see it.
        zeroed: before the call. converted: to this type, after it."""
        strides, word = contiguous_strides(shape), None
        if name is not None:
            word, field = field_word(type(self.args), name), getattr(self.args, name)
            if isinstance(field, library.Buffer):
                field.bytes = math.prod(shape) * dtype.itemsize
            else:
                describe(name, field, shape, strides, dtype, self.device)
        converted = converted if converted is not dtype else None
        size = math.prod(shape) * dtype.itemsize
        if self.device.type == "cpu" and size >= memory.LARGE:
            made = memory.tensor, (shape, strides, dtype, size)
        else:
            made = maker(shape, strides, dtype, self.device)
        self.outputs.append(_Output(made, word, zeroed, converted))

    def ready(self, key, workspace: int) -> "PreparedCall":
        """Without a key the caller keeps the call, and no other has it."""
        self.workspace = self.args.workspace.bytes = workspace
        self.run = self._written_run()
        if key is not None:
            if len(here.prepared) >= MAX_PREPARED:
                here.forget()
            here.prepared[key] = self
        return self

    def _written_run(self):
        """`run`, written for this call, a line for each pointer: loops over what a call has took twice the time."""
        written = Written("run(tensors, buffers=(), step=0)", prepared=self, words=self.words, here=here,
                          check=library.check, torch=torch)
        line, cuda = written.line, self.on_gpu
        if cuda:
            line("if get_device() != index:", get_device=torch._C._cuda_getDevice, index=self.device.index)
            line("    with torch.cuda.device(index): return run(tensors, buffers, step)")
        if self.desc is not None:
            line("if step: prepared.desc.step = step")
        line("".join([f"t{i}, " for i in range(self.count)]) + "= tensors")
        for i in self.copied:
            line(f"t{i} = t{i}.contiguous()")
        for i, word in self.inputs:
            line(f"words[{word}] = t{i}.data_ptr()")
        line("for word, buffer in buffers: words[word] = buffer.data_ptr()")
        for i, output in enumerate(self.outputs):
            written.make(f"o{i}", output.made)
            if output.zeroed:
                line(f"o{i}.zero_()")
            if output.word is not None:
                line(f"words[{output.word}] = o{i}.data_ptr()")
        # A CPU thread keeps its workspace, as new memory costs page faults (memory.py). Those of a GPU, and larger
        # ones, come from torch's allocator, call by call.
        if cuda or self.workspace > SCRATCH_BYTES:
            written.make("workspace", maker((self.workspace,), (1,), torch.uint8, self.device))
        else:
            line("if here.scratch.numel() < size: here.grow(size)", size=self.workspace)
            line("workspace = here.scratch")
        line(f"words[{field_word(type(self.args), 'workspace')}] = workspace.data_ptr()")
        # The stream's handle alone: an object of torch.cuda.Stream would take longer than all the rest.
        line(f"code = prepared.function(*addresses, {'stream(index)' if cuda else None})", addresses=self.addresses,
             stream=getattr(torch._C, "_cuda_getCurrentRawStream", None))
        # To Dynamo a copy that nothing reads later is dead before the C call.
        line("if code: check(code)")
        line(f"del {', '.join([f't{i}' for i in self.copied] + ['workspace'])}")
        for i, output in enumerate(self.outputs):
            if output.converted is not None:
                line(f"o{i} = o{i}.to(to{i})", **{f"to{i}": output.converted})
        line(f"return [{', '.join([f'o{i}' for i in range(len(self.outputs))])}]")
        return written.function()


class Written:
    """A function that is written line by line. head: its name and parameters; values: what it knows by name."""

    def __init__(self, head: str, **values):
        self.name, self.lines, self.values = head[:head.index("(")], [f"def {head}:"], values

    def line(self, text: str, **values) -> None:
        self.lines.append("    " + text)
        self.values.update(values)

    def make(self, name: str, made: tuple) -> None:
        """A variable of that name, a new tensor of `maker`."""
        make, how = made
        self.line(f"{name} = make_{name}(*how_{name})", **{f"make_{name}": make, f"how_{name}": how})

    def function(self):
        exec(_compiled("\n".join(self.lines)), self.values)
        return self.values[self.name]


@functools.lru_cache(maxsize=256)
def _compiled(source: str):
    """Calls that differ in sizes alone have the same text."""
    return compile(source, "<prepared call>", "exec")


class _Output(NamedTuple):
    made: tuple  # of `maker`
    word: int | None
    zeroed: bool
    converted: torch.dtype | None


def maker(shape: tuple, strides: tuple, dtype: torch.dtype, device: torch.device) -> tuple:
    """(make, how): make(*how) is a new tensor, sooner than torch.empty has one. A prepared call that comes into being
    while a graph is captured holds none of the graph's memory: an empty tensor has none."""
    if _MAKERS[device.type] is not None:
        return _MAKERS[device.type], (shape, strides, dtype)
    return torch.empty(0, dtype=dtype, device=device).new_empty_strided, (shape, strides)


def not_stored(name: str, dtype: torch.dtype) -> Exception:
    error = NotImplementedError if dtype is torch.float16 else ValueError
    return error(f"{name}: dtype {dtype}; Tessera stores bf16, on the CPU also fp32, and ids as int32 or int64; "
                 "convert it")


def describe(name: str, field: library.Tensor, shape, stride, dtype: torch.dtype, device: torch.device) -> None:
    """Fills a tessera_tensor with all but its address."""
    number = DTYPES.get(dtype)
    if number is None:
        raise not_stored(name, dtype)
    if len(shape) > 4:
        raise ValueError(f"{name}: rank {len(shape)}; at most 4 dimensions are possible; reshape it")
    if device.type not in KINDS:
        raise ValueError(f"{name}: on device {device}; all of a call are on the CPU or on one CUDA device; move it")
    field.dtype, field.rank = number, len(shape)
    field.device_kind, field.device_index = KINDS[device.type], device.index or 0
    field.shape[:len(shape)] = shape
    field.stride[:len(stride)] = stride


def pairs(names, tensors) -> list:
    """(name, tensor) pairs of those that are present."""
    return [(name, tensor) for name, tensor in zip(names, tensors, strict=True) if tensor is not None]


def one_device(present: list) -> None:
    """Refuses (name, tensor) pairs that are not all on one device, by the names of the two that differ."""
    first, device = present[0][0], present[0][1].device
    for name, tensor in present:
        if tensor.device != device:
            raise ValueError(f"{first} is on {device}, {name} on {tensor.device}, all of a call on one device; "
                             f"move one, such as {first}.to('{tensor.device}') or module.to('{device}')")


def router_dtype(x: torch.Tensor, w_router: torch.Tensor | None, b_router: torch.Tensor | None) -> int:
    """Of a desc: 0 where the router is of x's type or absent. Errors: ValueError where it is neither that nor fp32."""
    if w_router is None:
        return 0
    if w_router.dtype not in (torch.float32, x.dtype):
        raise ValueError(f"w_router: dtype {w_router.dtype} beside x in {x.dtype}; a router is fp32 or of x's type; "
                         "convert it")
    if b_router is not None and b_router.dtype is not w_router.dtype:
        raise ValueError(f"b_router: dtype {b_router.dtype}, w_router: {w_router.dtype}; both have the same; convert "
                         "b_router")
    return 0 if w_router.dtype is x.dtype else library.FP32


def contiguous_strides(shape) -> tuple:
    return torch.empty(shape, device="meta").stride()


def field_word(struct: type, name: str) -> int:
    return getattr(struct, name).offset // 8


def readable(tensor: torch.Tensor) -> bool:
    """Whether the library takes these strides: 1 in the last dimension, no overlap nor transposition before it."""
    inner, last = 1, tensor.dim() - 1
    for axis in range(last, -1, -1):
        size, stride = tensor.shape[axis], tensor.stride(axis)
        if size > 1:
            if stride < inner or axis == last and stride != 1:
                return False
            inner = stride * size
    return True

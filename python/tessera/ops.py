# SPDX-License-Identifier: Apache-2.0
"""The torch operators tessera::* on top of the C ABI: kernels, fake kernels, autograd.

    moe_forward(x, routing inputs, weights, options) -> [o, h, routing] (+ [logits, topk_counts])
    moe_inference(the same)                          -> o
    moe_backward(...) -> the gradients that `needs` asks for, in the order of GRADIENTS
    moe_backward_accumulate(...): the same, weight gradients are added into the caller's buffers
    route, grouped_gemm, grouped_gemm_wgrad

A call fills a *plan*: the C structs of one combination of shapes, strides and options, in which only the
pointers change from call to call. Plans are kept per thread, so that filling one needs no lock.
"""

import functools
import itertools
import math
import os
import threading

import torch

from tessera import library
from tessera.library import BackwardArgs, ForwardArgs, GroupedGemmArgs, RouteArgs
from tessera.options import Options, parse

if torch.torch_version.TorchVersion(torch.__version__) < (2, 10):
    raise ImportError(f"torch {torch.__version__}: Tessera needs 2.10 or later; update torch")

_DTYPES = {torch.float32: library.FP32, torch.bfloat16: library.BF16, torch.float16: library.FP16,
           torch.int32: library.INT32, torch.int64: library.INT64}
_KINDS = {"cpu": library.CPU, "cuda": library.CUDA}
MAX_PLANS = 1024  # per thread; a plan is about 4 KB
SCRATCH_BYTES = 1 << 18

WEIGHTS = ("w_up", "w_gate", "w_down", "b_up", "b_gate", "b_down")
GRADIENTS = ("dx", "dscores", "dw_router", "db_router", *("d" + name for name in WEIGHTS))

_WEIGHT_SCHEMA = "Tensor w_up, Tensor? w_gate, Tensor w_down, Tensor? b_up, Tensor? b_gate, Tensor? b_down"
_INPUT_SCHEMA = ("Tensor x, Tensor? topk_ids, Tensor? topk_weights, Tensor? w_router, Tensor? b_router, "
                 "Tensor? selection_bias, Tensor? expert_offsets, Tensor? row_scores, "
                 f"{_WEIGHT_SCHEMA}, str options, int step=0")
_SAVED_SCHEMA = ("Tensor d_o, Tensor x, Tensor h, Tensor routing, Tensor? w_router, Tensor? b_router, "
                 f"{_WEIGHT_SCHEMA}, Tensor? aux_dlogits")

_library = torch.library.Library("tessera", "DEF")
_library.define(f"moe_forward({_INPUT_SCHEMA}) -> Tensor[]")
_library.define(f"moe_inference({_INPUT_SCHEMA}) -> Tensor")
_library.define(f"moe_backward({_SAVED_SCHEMA}, str options, int needs) -> Tensor[]")
_library.define(f"moe_backward_accumulate({_SAVED_SCHEMA}, "
                + ", ".join(f"Tensor({letter}!)? d{name}" for letter, name in zip("abcdef", WEIGHTS, strict=True))
                + ", str options, int needs) -> Tensor[]")
_library.define("route(Tensor x, Tensor w_router, Tensor? b_router, Tensor? selection_bias, str options)"
                " -> (Tensor topk_weights, Tensor topk_ids, Tensor logits)")
_library.define("grouped_gemm(Tensor a, Tensor b, Tensor? bias, Tensor expert_offsets, bool transpose_b) -> Tensor")
_library.define("grouped_gemm_wgrad(Tensor a, Tensor b, Tensor expert_offsets) -> Tensor")


# --- from tensors to C structs

class _PerThread(threading.local):
    def __init__(self):
        self.plans = {}
        self.scratch = torch.empty(0, dtype=torch.uint8)


_here = _PerThread()
_numbers = itertools.count()
# A forked child has one thread, and contexts of its own (library.py).
os.register_at_fork(after_in_child=lambda: _here.plans.clear())


def _signature(tensors: tuple) -> tuple:
    return tuple([t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors])


class _Plan:
    """C structs with everything but the pointers; `words` is the argument struct as 64-bit words."""

    __slots__ = ("number", "function", "context", "desc", "args", "words", "addresses", "device", "inputs", "copied",
                 "zeroed", "converted", "outputs", "made", "workspace", "make_workspace", "workspace_word")

    def __init__(self, function: str, device: torch.device, args, desc=None):
        if device.type not in _KINDS:
            raise NotImplementedError(f"device {device}: Tessera runs on the CPU and on CUDA devices; move the tensors")
        self.number = next(_numbers)
        index = 0 if device.index is None else device.index
        threads = torch.get_num_threads() if device.type == "cpu" else 0
        self.function = getattr(library.load(), f"tessera_{function}")
        self.context = library.context(_KINDS[device.type], index, threads)
        self.device, self.desc, self.args = device, desc, args
        args.size = library.ctypes.sizeof(args)
        self.words = memoryview(args).cast("B").cast("Q")
        self.addresses = (self.context, *([] if desc is None else [library.ctypes.addressof(desc)]),
                          library.ctypes.addressof(args))
        self.inputs, self.copied, self.zeroed, self.converted, self.outputs, self.made = [], [], [], [], [], []

    def read(self, names: tuple, tensors: tuple) -> None:
        """Describes the inputs that are present; remembers which have to be copied into readable strides."""
        for position, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
            if tensor is None:
                continue
            self.inputs.append((position, _word(type(self.args), name)))
            if not _readable(tensor):
                self.copied.append(position)
                tensor = tensor.contiguous()
            field = getattr(self.args, name)
            if isinstance(field, library.Buffer):
                field.bytes = tensor.numel() * tensor.element_size()
            else:
                # Strides of an empty tensor mean nothing, and contiguous() leaves them as they are.
                strides = tensor.stride() if tensor.numel() else _contiguous_strides(tensor.shape)
                _describe(name, field, tensor.shape, strides, tensor.dtype, tensor.device)

    def write(self, name: str | None, shape: tuple, dtype: torch.dtype, zeroed: bool = False,
              converted: torch.dtype | None = None) -> None:
        """An output that each call makes, contiguous; without a name it is empty and the library does not see it.
        zeroed: before the call. converted: to this type, after it."""
        position, strides = len(self.made), _contiguous_strides(shape)
        if zeroed:
            self.zeroed.append(position)
        if converted not in (None, dtype):
            self.converted.append((position, converted))
        self.made.append((self.maker(dtype), shape, strides))
        if name is None:
            return
        self.outputs.append((position, _word(type(self.args), name)))
        field = getattr(self.args, name)
        if isinstance(field, library.Buffer):
            field.bytes = math.prod(shape) * dtype.itemsize
        else:
            _describe(name, field, shape, strides, dtype, self.device)

    def maker(self, dtype: torch.dtype):
        """make(shape, strides) -> a new tensor. Quicker than torch.empty; and as an empty tensor has no memory, a plan
        that comes into being while a graph is captured holds none of the graph's."""
        return torch.empty(0, dtype=dtype, device=self.device).new_empty_strided

    def ready(self, key, workspace: int) -> "_Plan":
        self.workspace = self.args.workspace.bytes = workspace
        self.make_workspace = self.maker(torch.uint8)
        self.workspace_word = _word(type(self.args), "workspace")
        plans = _here.plans
        if len(plans) >= MAX_PLANS:
            plans.clear()
        plans[key] = self
        return self

    def run(self, tensors: tuple, buffers: tuple = (), step: int = 0) -> list[torch.Tensor]:
        """One call of the library; returns the outputs. step: of stochastic rounding."""
        words = self.words
        if step:
            self.desc.step = step
        if self.copied:
            tensors = list(tensors)
            for position in self.copied:
                tensors[position] = tensors[position].contiguous()
        for position, word in self.inputs:
            words[word] = tensors[position].data_ptr()
        for word, buffer in buffers:
            words[word] = buffer.data_ptr()
        results = [make(shape, strides) for make, shape, strides in self.made]
        for position in self.zeroed:
            results[position].zero_()
        for position, word in self.outputs:
            words[word] = results[position].data_ptr()
        cuda = self.device.type == "cuda"
        # Small workspaces of the CPU stay with the thread; others come from torch's allocator, call by call.
        if self.workspace <= SCRATCH_BYTES and not cuda:
            workspace = _here.scratch
            if workspace.numel() < self.workspace:
                workspace = _here.scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8)
        else:
            workspace = self.make_workspace((self.workspace,), (1,))
        words[self.workspace_word] = workspace.data_ptr()
        # The handle alone: an object of torch.cuda.Stream would take longer than the rest of this function.
        stream = torch._C._cuda_getCurrentRawStream(self.device.index) if cuda else None
        code = self.function(*self.addresses, stream)
        if code:
            library.check(code)
        for position, dtype in self.converted:
            results[position] = results[position].to(dtype)
        return results


def _describe(name: str, field: library.Tensor, shape, stride, dtype: torch.dtype, device: torch.device) -> None:
    """Fills a tessera_tensor with all but its address."""
    number = _DTYPES.get(dtype)
    if number is None:
        raise ValueError(f"{name}: dtype {dtype}; Tessera takes float32, bfloat16, float16, int32, int64; convert it")
    if len(shape) > 4:
        raise ValueError(f"{name}: rank {len(shape)}; at most 4 dimensions are possible")
    field.dtype, field.rank = number, len(shape)
    field.device_kind, field.device_index = _KINDS[device.type], device.index or 0
    field.shape[:len(shape)] = shape
    field.stride[:len(stride)] = stride


def _contiguous_strides(shape) -> tuple:
    return torch.empty(shape, device="meta").stride()


def _word(struct: type, name: str) -> int:
    return getattr(struct, name).offset // 8


def _readable(tensor: torch.Tensor) -> bool:
    """Whether the library takes these strides: 1 in the last dimension, no overlap nor transposition before it."""
    inner, last = 1, tensor.dim() - 1
    for axis in range(last, -1, -1):
        size, stride = tensor.shape[axis], tensor.stride(axis)
        if size > 1:
            if stride < inner or axis == last and stride != 1:
                return False
            inner = stride * size
    return True


def _intermediate(options: Options, w_up: torch.Tensor, w_gate: torch.Tensor | None):
    """n, from whatever shape the up weight has."""
    if w_up.dim() != 3:
        raise ValueError(f"w_up: rank {w_up.dim()}; a tensor of rank 3 is needed, experts first")
    if w_gate is not None:
        return w_up.shape[1]
    rows = w_up.shape[2 if options.transposed else 1]
    if rows % options.up_width:
        raise ValueError(f"w_up: {rows} rows per expert; {options.activation} needs an even number, gate and up")
    return rows // options.up_width


def _desc(options: Options, x: torch.Tensor, tensors: dict, top_k: int, ids_dtype: torch.dtype) -> library.MoeDesc:
    if x.dim() != 2:
        raise ValueError(f"x: rank {x.dim()}; shape [tokens, hidden] is needed")
    return options.desc(
        top_k=top_k, tokens=x.shape[0], hidden=x.shape[1], experts=tensors["w_up"].shape[0],
        intermediate=_intermediate(options, tensors["w_up"], tensors["w_gate"]),
        dtype=_DTYPES.get(x.dtype, library.FP32), ids_dtype=_DTYPES.get(ids_dtype, library.INT32),
        separate=tensors["w_gate"] is not None, bias=tensors["b_up"] is not None or tensors["b_down"] is not None)


# --- forward

_INPUTS = ("x", "topk_ids", "topk_weights", "w_router", "b_router", "selection_bias", "expert_offsets", "row_scores",
           *WEIGHTS)


def _top_k(options: Options, topk_ids: torch.Tensor | None):
    """Experts per token: of the ids that are given, or of the router."""
    if topk_ids is None:
        return options.top_k
    if topk_ids.dim() != 2:
        raise ValueError(f"topk_ids: rank {topk_ids.dim()}; shape [tokens, top_k] is needed")
    return topk_ids.shape[1]


def _forward_plan(key, tensors: tuple, text: str, training: bool) -> _Plan:
    named = dict(zip(_INPUTS, tensors, strict=True))
    options, x = parse(text), named["x"]
    ids = named["topk_ids"] if named["topk_ids"] is not None else named["expert_offsets"]
    desc = _desc(options, x, named, _top_k(options, named["topk_ids"]), torch.int32 if ids is None else ids.dtype)
    if not training:
        desc.save = 2
    plan = _Plan("moe_forward", x.device, ForwardArgs(), desc)
    plan.read(_INPUTS, tensors)
    plan.write("o", tuple(x.shape), x.dtype)
    if training:
        slots = options.slots(desc.tokens, desc.experts, desc.top_k)
        kept = options.save == "h"
        plan.write("h" if kept else None, (slots, options.up_width * desc.intermediate) if kept else (0,), x.dtype)
        plan.write("routing", (options.routing_elements(desc.tokens, slots, desc.experts),), torch.int32)
        if options.logits:
            plan.write("logits", (desc.tokens, desc.experts), torch.float32)
            plan.write("topk_counts", (desc.experts,), torch.int32)
    return plan.ready(key, library.moe_workspace_bytes(plan.context, desc, library.PASS_FORWARD))


def _plan_forward(tensors: tuple, text: str, step: int, training: bool) -> _Plan:
    key = (text, training, torch.get_num_threads(), _signature(tensors), step != 0)
    return _here.plans.get(key) or _forward_plan(key, tensors, text, training)


def _run_forward(tensors: tuple, text: str, step: int, training: bool) -> list[torch.Tensor]:
    return _plan_forward(tensors, text, step, training).run(tensors, step=step)


# In the kernels `arguments` are the tensors of _INPUTS, then options and step.
def _moe_forward(*arguments) -> list[torch.Tensor]:
    return _run_forward(arguments[:14], arguments[14], *arguments[15:] or (0,), True)


def moe_inference(*arguments) -> torch.Tensor:
    return _run_forward(arguments[:14], arguments[14], *arguments[15:] or (0,), False)[0]


def _fake_forward(*arguments) -> list[torch.Tensor]:
    named, options = dict(zip(_INPUTS, arguments, strict=False)), parse(arguments[14])
    x, w_up = named["x"], named["w_up"]
    tokens, experts = x.shape[0], w_up.shape[0]
    slots = options.slots(tokens, experts, _top_k(options, named["topk_ids"]), torch.sym_min)
    width = options.up_width * _intermediate(options, w_up, named["w_gate"])
    results = [x.new_empty(x.shape), x.new_empty((slots, width) if options.save == "h" else (0,)),
               x.new_empty((options.routing_elements(tokens, slots, experts),), dtype=torch.int32)]
    if options.logits:
        results.append(x.new_empty((tokens, experts), dtype=torch.float32))
        results.append(x.new_empty((experts,), dtype=torch.int32))
    return results


def _fake_inference(*arguments) -> torch.Tensor:
    return arguments[0].new_empty(arguments[0].shape)


# --- backward

_SAVED = ("d_o", "x", "h", "routing", "w_router", "b_router", *WEIGHTS, "aux_dlogits")
_WEIGHT_GRADIENT_WORDS = tuple(_word(BackwardArgs, "d" + name) for name in WEIGHTS)


def _slots(options: Options, named: dict):
    """P. With given ids only the size of the routing tables tells: 4P + E + 1 elements."""
    if options.has_router or options.grouping != "slots":
        return options.slots(named["x"].shape[0], named["w_up"].shape[0], options.top_k, torch.sym_min)
    return (named["routing"].shape[0] - named["w_up"].shape[0] - 1) // 4


def _gradient_shapes(options: Options, named: dict) -> dict:
    """Shape and dtype of every gradient that could be asked for."""
    x = named["x"]
    shapes = {"dx": (tuple(x.shape), x.dtype), "dscores": ((_slots(options, named),), torch.float32)}
    for name in ("w_router", "b_router", *WEIGHTS):
        if named[name] is not None:
            shapes["d" + name] = (tuple(named[name].shape), named[name].dtype)
    return shapes


def _backward_plan(key, tensors: tuple, buffers: tuple, text: str, needs: int) -> _Plan:
    named = dict(zip(_SAVED, tensors, strict=True))
    options, x = parse(text), named["x"]
    tokens = x.shape[0]
    given = not options.has_router and options.grouping == "slots" and tokens
    top_k = _slots(options, named) // tokens if given else options.top_k
    desc = _desc(options, x, named, top_k, torch.int32)
    plan = _Plan("moe_backward", x.device, BackwardArgs(), desc)
    plan.read(_SAVED, tuple([None if name == "h" and options.save != "h" else t for name, t in named.items()]))
    # `accumulate` and the type of the buffers hold for all weight gradients of a call: those without a buffer are added
    # to zeros of that type.
    shared = None
    for name, buffer in zip(WEIGHTS, buffers, strict=bool(buffers)):
        if buffer is not None:
            field = getattr(plan.args, "d" + name)
            _describe("d" + name, field, buffer.shape, buffer.stride(), buffer.dtype, buffer.device)
            plan.args.accumulate = 1
            shared = buffer.dtype
    shapes = _gradient_shapes(options, named)
    for bit, name in enumerate(GRADIENTS):
        if needs >> bit & 1:
            shape, dtype = shapes[name]
            if shared is not None and name.startswith(("dw_", "db_")):
                plan.write(name, shape, shared, zeroed=True, converted=dtype)
            else:
                plan.write(name, shape, dtype)
    return plan.ready(key, library.moe_workspace_bytes(plan.context, desc, library.PASS_BACKWARD))


def _run_backward(tensors: tuple, buffers: tuple, text: str, needs: int) -> list[torch.Tensor]:
    key = (text, needs, torch.get_num_threads(), _signature(tensors), _signature(buffers))
    plan = _here.plans.get(key) or _backward_plan(key, tensors, buffers, text, needs)
    return plan.run(tensors, [(w, b) for w, b in zip(_WEIGHT_GRADIENT_WORDS, buffers) if b is not None])


def _moe_backward(*arguments) -> list[torch.Tensor]:
    return _run_backward(arguments[:-2], (), *arguments[-2:])


def _moe_backward_accumulate(*arguments) -> list[torch.Tensor]:
    count = len(_SAVED)
    return _run_backward(arguments[:count], arguments[count:-2], *arguments[-2:])


def _fake_backward(*arguments) -> list[torch.Tensor]:
    named, options, needs = dict(zip(_SAVED, arguments, strict=False)), parse(arguments[-2]), arguments[-1]
    shapes = _gradient_shapes(options, named)
    wanted = [name for bit, name in enumerate(GRADIENTS) if needs >> bit & 1]
    return [named["x"].new_empty(shapes[name][0], dtype=shapes[name][1]) for name in wanted]


# --- autograd

PLAIN = (torch.Tensor, torch.nn.Parameter)


def direct() -> bool:
    """Whether nothing could see the operators: no dispatch mode, no functional transform, no profiler. Then their
    kernels are called without the dispatcher, which would take longer than they do."""
    return not (torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack()
                or torch._C._autograd._profiler_enabled())


class Layer(torch.autograd.Function):
    """Arguments: the buffers for weight gradients (a tuple as WEIGHTS, or None), whether all results are wanted or
    o alone, then those of moe_forward, all of them.

    Saved for backward: x, h, the routing tables and the weights. Ids and weights of the routing are in the tables.
    """

    @staticmethod
    def forward(ctx, buffers, everything, *arguments):
        if direct() and type(arguments[0]) in PLAIN:
            tensors, text, step = arguments[:14], arguments[14], arguments[15]
            plan = _plan_forward(tensors, text, step, True)
            results = plan.run(tensors, step=step)
            # Hooks on saved tensors may hand other strides back: then backward looks at them anew.
            hooked = torch._C._autograd._top_saved_tensors_default_hooks(True)
            ctx.plan = plan.number if hooked is None else None
        else:
            ctx.plan = None
            with torch._C._AutoDispatchBelowAutograd():
                results = torch.ops.tessera.moe_forward.default(*arguments)
        o, h, routing, *_ = results
        ctx.save_for_backward(arguments[0], h, routing, *arguments[3:5], *arguments[8:14])
        ctx.options, ctx.buffers = arguments[14], buffers
        given = arguments[2]
        ctx.scores_shape = None if given is None else given.shape
        ctx.set_materialize_grads(False)
        if not everything:
            return o
        ctx.mark_non_differentiable(h, routing, *results[4:])
        return tuple(results)

    @staticmethod
    def backward(ctx, d_o, _dh=None, _drouting=None, dlogits=None, _dcounts=None):
        held = () if ctx.buffers is None else tuple([buffer is not None for buffer in ctx.buffers])
        needs, positions = _wanted(ctx.needs_input_grad, held)
        saved = (d_o, *ctx.saved_tensors, dlogits)
        if d_o is None:
            if dlogits is None:
                return (None,) * 18
            saved = (torch.zeros_like(saved[1]), *saved[1:])
        if direct() and type(saved[0]) in PLAIN and not torch.is_grad_enabled():
            if ctx.plan is not None and not held and dlogits is None and d_o.is_contiguous():
                # All signatures follow from those of forward's plan.
                key = (ctx.plan, needs)
                plan = _here.plans.get(key) or _backward_plan(key, saved, (), ctx.options, needs)
                gradients = plan.run(saved)
            else:
                gradients = _run_backward(saved, ctx.buffers or (), ctx.options, needs)
        elif not held:
            gradients = torch.ops.tessera.moe_backward.default(*saved, ctx.options, needs)
        else:
            gradients = torch.ops.tessera.moe_backward_accumulate.default(*saved, *ctx.buffers, ctx.options, needs)
        results = [None] * 18
        for position, gradient in zip(positions, gradients, strict=True):
            results[position] = gradient
        if results[_TOPK_WEIGHTS] is not None:
            results[_TOPK_WEIGHTS] = results[_TOPK_WEIGHTS].view(ctx.scores_shape)
        return tuple(results)


# Where moe_forward's arguments stand among Layer's.
_TOPK_WEIGHTS, _ROW_SCORES = 4, 9
_DIFFERENTIABLE = (2, _TOPK_WEIGHTS, 5, 6, *range(10, 16))  # in the order of GRADIENTS


@functools.cache
def _wanted(needs_input_grad: tuple, held: tuple) -> tuple[int, tuple]:
    """The bits of the gradients that backward has to return, and where they stand among Layer's arguments. held: which
    weights have a buffer of their own."""
    needs, positions = 0, []
    for bit, position in enumerate(_DIFFERENTIABLE):
        if position == _TOPK_WEIGHTS and needs_input_grad[_ROW_SCORES]:
            position = _ROW_SCORES
        if needs_input_grad[position] and not (held and bit >= 4 and held[bit - 4]):
            needs |= 1 << bit
            positions.append(position)
    return needs, tuple(positions)


def _moe_forward_autograd(*arguments) -> list[torch.Tensor]:
    if torch.is_grad_enabled():
        return list(Layer.apply(None, True, *arguments, *(0,) * (16 - len(arguments))))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.tessera.moe_forward.default(*arguments)


class Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_router, b_router, selection_bias, options):
        with torch._C._AutoDispatchBelowAutograd():
            results = torch.ops.tessera.route.default(x, w_router, b_router, selection_bias, options)
        topk_weights, topk_ids, logits = results
        ctx.save_for_backward(x, w_router, topk_ids, topk_weights, logits)
        ctx.options, ctx.has_bias = options, b_router is not None
        ctx.mark_non_differentiable(topk_ids)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx, dweights, _dids, dlogits):
        x, w_router, topk_ids, topk_weights, logits = ctx.saved_tensors
        if dweights is not None:
            through = router_gradient(parse(ctx.options), logits, topk_ids, topk_weights, dweights)
            dlogits = through if dlogits is None else through + dlogits
        if dlogits is None:
            return (None,) * 5
        rows = dlogits.to(x.dtype)
        wants = ctx.needs_input_grad
        return (rows @ w_router if wants[0] else None, rows.mT @ x if wants[1] else None,
                dlogits.sum(0).to(x.dtype) if wants[2] else None, None, None)


def router_gradient(options: Options, logits, topk_ids, topk_weights, dweights):
    """dlogits [T,E] of the chosen scores, as docs/numerics.md has them (section Routers)."""
    ids, g = topk_ids.long(), options.route_scale * dweights
    if options.router == "softmax-topk":
        p = torch.softmax(logits, dim=-1)
        g_all = torch.zeros_like(logits).scatter_(1, ids, g)
        return p * (g_all - (g_all * p).sum(-1, keepdim=True))
    if options.router in ("topk-softmax", "softmax-topk-renorm"):
        q = topk_weights / options.route_scale
        chosen = q * (g - (g * q).sum(-1, keepdim=True))
        return torch.zeros_like(logits).scatter_(1, ids, chosen)
    chosen_logits = logits.gather(1, ids)
    if options.router == "sqrtsoftplus":
        p = torch.nn.functional.softplus(chosen_logits).sqrt()
        slope = torch.where(p > 0, -torch.expm1(-p * p) / (2 * p), 0)
    else:
        p = torch.sigmoid(chosen_logits)
        slope = p * torch.sigmoid(-chosen_logits)
    if options.normalize_scores:
        total = p.sum(-1, keepdim=True) + 1e-20
        g = (g - (g * p).sum(-1, keepdim=True) / total) / total
    return torch.zeros_like(logits).scatter_(1, ids, g * slope)


def _route_autograd(*arguments):
    if torch.is_grad_enabled():
        return Route.apply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.tessera.route.default(*arguments)


class GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, bias, expert_offsets, transpose_b):
        with torch._C._AutoDispatchBelowAutograd():
            c = torch.ops.tessera.grouped_gemm.default(a, b, bias, expert_offsets, transpose_b)
        ctx.save_for_backward(a, b, expert_offsets)
        ctx.transpose_b, ctx.has_bias = transpose_b, bias is not None
        return c

    @staticmethod
    def backward(ctx, dc):
        a, b, offsets = ctx.saved_tensors
        wants, ops = ctx.needs_input_grad, torch.ops.tessera
        da = ops.grouped_gemm.default(dc, b, None, offsets, not ctx.transpose_b) if wants[0] else None
        db = dbias = None
        if wants[1]:
            pair = (a, dc) if ctx.transpose_b else (dc, a)
            db = ops.grouped_gemm_wgrad.default(*pair, offsets)
        if ctx.has_bias and wants[2]:
            ones = dc.new_ones((dc.shape[0], 8))  # rows of 16 bytes, which fast kernels ask for
            dbias = ops.grouped_gemm_wgrad.default(dc, ones, offsets)[..., 0].contiguous()
        return da, db, dbias, None, None


def _grouped_gemm_autograd(*arguments):
    if torch.is_grad_enabled():
        return GroupedGemm.apply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.tessera.grouped_gemm.default(*arguments)


def _once_only(op):
    """Autograd of a backward op: there is none, and saying so beats a wrong second derivative."""
    def refuse(*arguments):
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            raise NotImplementedError(f"{op}: Tessera has no second derivatives; call backward without create_graph")
        with torch._C._AutoDispatchBelowAutograd():
            return op(*arguments)
    return refuse


# --- route and grouped GEMM

_ROUTE_INPUTS = ("x", "w_router", "b_router", "selection_bias")


def _route(*arguments) -> tuple:
    *tensors, text = arguments
    key = ("route", text, torch.get_num_threads(), _signature(tensors))
    plan = _here.plans.get(key) or _route_plan(key, tensors, text)
    return tuple(plan.run(tensors))


def _route_plan(key, tensors: list, text: str) -> _Plan:
    x, w_router = tensors[:2]
    if x.dim() != 2 or w_router.dim() != 2:
        raise ValueError(f"x: {tuple(x.shape)}, w_router: {tuple(w_router.shape)}; [T,d] and [E,d] are needed")
    options, (tokens, hidden), experts = parse(text), x.shape, w_router.shape[0]
    desc = options.desc(top_k=options.top_k, tokens=tokens, hidden=hidden, intermediate=1, experts=experts,
                        dtype=_DTYPES.get(x.dtype, library.FP32), ids_dtype=library.INT32, separate=False, bias=False)
    plan = _Plan("route", x.device, RouteArgs(), desc)
    plan.read(_ROUTE_INPUTS, tensors)
    plan.write("topk_weights", (tokens, options.top_k), torch.float32)
    plan.write("topk_ids", (tokens, options.top_k), torch.int32)
    plan.write("logits", (tokens, experts), torch.float32)
    return plan.ready(key, library.moe_workspace_bytes(plan.context, desc, library.PASS_ROUTE))


def _fake_route(x, w_router, b_router, selection_bias, options):
    choice = (x.shape[0], parse(options).top_k)
    return (x.new_empty(choice, dtype=torch.float32), x.new_empty(choice, dtype=torch.int32),
            x.new_empty((x.shape[0], w_router.shape[0]), dtype=torch.float32))


def _run_grouped_gemm(kind: int, names: tuple, tensors: tuple, c_shape: tuple, transpose_b: bool) -> torch.Tensor:
    tensors = (tensors[0].contiguous(), *tensors[1:])  # the library wants it so on a GPU
    key = ("grouped_gemm", kind, transpose_b, torch.get_num_threads(), _signature(tensors))
    plan = _here.plans.get(key)
    if plan is None:
        a = tensors[0]
        plan = _Plan("grouped_gemm", a.device, GroupedGemmArgs(kind=kind, transpose_b=transpose_b))
        plan.read(names, tensors)
        plan.write("c", c_shape, a.dtype)
        plan.ready(key, library.grouped_gemm_workspace_bytes(plan.context, plan.args))
    return plan.run(tensors)[0]


def _grouped_gemm(a, b, bias, expert_offsets, transpose_b):
    _check_ranks(a, 2, b, 3)
    shape = (a.shape[0], b.shape[2 if transpose_b else 1])
    return _run_grouped_gemm(0, ("a", "b", "bias", "expert_offsets"), (a, b, bias, expert_offsets), shape, transpose_b)


def _fake_grouped_gemm(a, b, bias, expert_offsets, transpose_b):
    return a.new_empty((a.shape[0], b.shape[2 if transpose_b else 1]))


def _grouped_gemm_wgrad(a, b, expert_offsets):
    _check_ranks(a, 2, b, 2)
    shape = (expert_offsets.shape[0] - 1, a.shape[1], b.shape[1])
    return _run_grouped_gemm(1, ("a", "b", "expert_offsets"), (a, b, expert_offsets), shape, False)


def _fake_grouped_gemm_wgrad(a, b, expert_offsets):
    return a.new_empty((expert_offsets.shape[0] - 1, a.shape[1], b.shape[1]))


def _check_ranks(a, a_rank: int, b, b_rank: int) -> None:
    if a.dim() != a_rank or b.dim() != b_rank:
        raise ValueError(f"a: rank {a.dim()}, b: rank {b.dim()}; {a_rank} and {b_rank} are needed")


def _register(name: str, kernel, fake, autograd=None) -> None:
    for key in ("CPU", "CUDA"):
        _library.impl(name, kernel, key)
    torch.library.register_fake(f"tessera::{name}", fake, lib=_library)
    if autograd is None:
        autograd = _once_only(getattr(torch.ops.tessera, name).default)
    _library.impl(name, autograd, "Autograd")


_register("moe_forward", _moe_forward, _fake_forward, _moe_forward_autograd)
_library.impl("moe_inference", moe_inference, "CPU")
_library.impl("moe_inference", moe_inference, "CUDA")
torch.library.register_fake("tessera::moe_inference", _fake_inference, lib=_library)
_register("moe_backward", _moe_backward, _fake_backward)
_register("moe_backward_accumulate", _moe_backward_accumulate, _fake_backward)
_register("route", _route, _fake_route, _route_autograd)
_register("grouped_gemm", _grouped_gemm, _fake_grouped_gemm, _grouped_gemm_autograd)
_register("grouped_gemm_wgrad", _grouped_gemm_wgrad, _fake_grouped_gemm_wgrad)

# SPDX-License-Identifier: Apache-2.0
"""The layer as operators: kernels, fake kernels and autograd of moe_forward, moe_inference and moe_backward."""

import functools

import torch

from tessera import library
from tessera.library import BackwardArgs, ForwardArgs
from tessera.ops.plans import DTYPES, Plan, describe, here, signature, word
from tessera.options import Options, parse

WEIGHTS = ("w_up", "w_gate", "w_down", "b_up", "b_gate", "b_down")
GRADIENTS = ("dx", "dscores", "dw_router", "db_router", *("d" + name for name in WEIGHTS))
PLAIN = (torch.Tensor, torch.nn.Parameter)


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
        dtype=DTYPES.get(x.dtype, library.FP32), ids_dtype=DTYPES.get(ids_dtype, library.INT32),
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


def _forward_plan(key, tensors: tuple, text: str, training: bool) -> Plan:
    named = dict(zip(_INPUTS, tensors, strict=True))
    options, x = parse(text), named["x"]
    ids = named["topk_ids"] if named["topk_ids"] is not None else named["expert_offsets"]
    desc = _desc(options, x, named, _top_k(options, named["topk_ids"]), torch.int32 if ids is None else ids.dtype)
    if not training:
        desc.save = 2
    plan = Plan("moe_forward", x.device, ForwardArgs(), desc)
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


def _plan_forward(tensors: tuple, text: str, step: int, training: bool) -> Plan:
    key = (text, training, torch.get_num_threads(), signature(tensors), step != 0)
    return here.plans.get(key) or _forward_plan(key, tensors, text, training)


def _run_forward(tensors: tuple, text: str, step: int, training: bool) -> list[torch.Tensor]:
    return _plan_forward(tensors, text, step, training).run(tensors, step=step)


# In the kernels `arguments` are the tensors of _INPUTS, then options and step.
def moe_forward(*arguments) -> list[torch.Tensor]:
    return _run_forward(arguments[:14], arguments[14], *arguments[15:] or (0,), True)


def moe_inference(*arguments) -> torch.Tensor:
    return _run_forward(arguments[:14], arguments[14], *arguments[15:] or (0,), False)[0]


def fake_forward(*arguments) -> list[torch.Tensor]:
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


def fake_inference(*arguments) -> torch.Tensor:
    return arguments[0].new_empty(arguments[0].shape)


# --- backward

_SAVED = ("d_o", "x", "h", "routing", "w_router", "b_router", *WEIGHTS, "aux_dlogits")
_WEIGHT_GRADIENT_WORDS = tuple(word(BackwardArgs, "d" + name) for name in WEIGHTS)


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


def _backward_plan(key, tensors: tuple, buffers: tuple, text: str, needs: int) -> Plan:
    named = dict(zip(_SAVED, tensors, strict=True))
    options, x = parse(text), named["x"]
    tokens = x.shape[0]
    given = not options.has_router and options.grouping == "slots" and tokens
    top_k = _slots(options, named) // tokens if given else options.top_k
    desc = _desc(options, x, named, top_k, torch.int32)
    plan = Plan("moe_backward", x.device, BackwardArgs(), desc)
    plan.read(_SAVED, tuple([None if name == "h" and options.save != "h" else t for name, t in named.items()]))
    # `accumulate` and the type of the buffers hold for all weight gradients of a call: those without a buffer are added
    # to zeros of that type.
    shared = None
    for name, buffer in zip(WEIGHTS, buffers, strict=bool(buffers)):
        if buffer is not None:
            field = getattr(plan.args, "d" + name)
            describe("d" + name, field, buffer.shape, buffer.stride(), buffer.dtype, buffer.device)
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
    key = (text, needs, torch.get_num_threads(), signature(tensors), signature(buffers))
    plan = here.plans.get(key) or _backward_plan(key, tensors, buffers, text, needs)
    return plan.run(tensors, [(w, b) for w, b in zip(_WEIGHT_GRADIENT_WORDS, buffers) if b is not None])


def moe_backward(*arguments) -> list[torch.Tensor]:
    return _run_backward(arguments[:-2], (), *arguments[-2:])


def moe_backward_accumulate(*arguments) -> list[torch.Tensor]:
    count = len(_SAVED)
    return _run_backward(arguments[:count], arguments[count:-2], *arguments[-2:])


def fake_backward(*arguments) -> list[torch.Tensor]:
    named, options, needs = dict(zip(_SAVED, arguments, strict=False)), parse(arguments[-2]), arguments[-1]
    shapes = _gradient_shapes(options, named)
    wanted = [name for bit, name in enumerate(GRADIENTS) if needs >> bit & 1]
    return [named["x"].new_empty(shapes[name][0], dtype=shapes[name][1]) for name in wanted]


# --- autograd

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
                plan = here.plans.get(key) or _backward_plan(key, saved, (), ctx.options, needs)
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


def moe_forward_autograd(*arguments) -> list[torch.Tensor]:
    if torch.is_grad_enabled():
        return list(Layer.apply(None, True, *arguments, *(0,) * (16 - len(arguments))))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.tessera.moe_forward.default(*arguments)

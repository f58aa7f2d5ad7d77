# SPDX-License-Identifier: Apache-2.0
"""The layer as operators: kernels and fake kernels of moe_forward, moe_inference and moe_backward."""

import torch

from tessera import library
from tessera.library import BackwardArgs, ForwardArgs
from tessera.ops.prepared_calls import (
    DTYPES, KINDS, PreparedCall, describe, field_word, here, one_device, pairs, router_dtype, signature,
)
from tessera.ops.weight_codes import CODES, FIELDS, sizes_of
from tessera.options import PRECISIONS, Options, parse

WEIGHTS = ("w_up", "w_gate", "w_down", "b_up", "b_gate", "b_down")
GRADIENTS = ("dx", "dscores", "dw_router", "db_router", *("d" + name for name in WEIGHTS))
# Weights as codes, where the options say weight_codes: the last of INPUTS and of SAVED.
WEIGHT_CODES = tuple(["weight_codes_" + name for name in FIELDS])
_OF_CODES = ("w_up", "w_gate", "w_down")


def scale_type(options: Options) -> torch.dtype:
    return torch.float8_e8m0fnu if options.precision == "mxfp8" else torch.float32


def intermediate_of(options: Options, w_up: torch.Tensor, w_gate: torch.Tensor | None):
    """n, from whatever shape the up weight has."""
    return sizes_of(options, w_up, w_gate)[1]


def _desc(options: Options, x: torch.Tensor, tensors: dict, top_k: int, ids_dtype: torch.dtype) -> library.MoeDesc:
    if x.dim() != 2:
        raise ValueError(f"x: rank {x.dim()}; shape [tokens, hidden] is needed")
    if not x.dtype.is_floating_point:
        raise ValueError(f"x: dtype {x.dtype}; Tessera stores bf16, on the CPU also fp32; convert it")
    _check_types(x, tensors)
    intermediate = intermediate_of(options, tensors["w_up"], tensors["w_gate"])
    hidden = tensors["w_up"].shape[1 if options.transposed else 2]
    if x.shape[1] != hidden:
        raise ValueError(f"x: hidden {x.shape[1]}, w_up: hidden {hidden} (layout {options.layout}); both have the same")
    return options.desc(
        top_k=int(top_k), tokens=int(x.shape[0]), hidden=int(hidden), experts=int(tensors["w_up"].shape[0]),
        intermediate=int(intermediate),
        dtype=DTYPES.get(x.dtype, library.FP32), ids_dtype=DTYPES.get(ids_dtype, library.INT32),
        separate=tensors["w_gate"] is not None, bias=tensors["b_up"] is not None or tensors["b_down"] is not None,
        router_dtype=router_dtype(x, tensors.get("w_router"), tensors.get("b_router")))


def _check_types(x: torch.Tensor, tensors: dict) -> None:
    """Where all experts are of one type, and x is of another, x is what the caller would change."""
    types = {tensors[name].dtype for name in WEIGHTS if tensors[name] is not None}
    if len(types) == 1 and x.dtype not in types and x.device == tensors["w_up"].device:
        dtype = types.pop()
        raise ValueError(f"x: dtype {x.dtype}, but w_up and w_down are {dtype}; convert x: x.to({dtype})")


# --- forward

INPUTS = ("x", "topk_ids", "topk_weights", "w_router", "b_router", "selection_bias", "expert_offsets", "row_scores",
          *WEIGHTS, "token_mask", *WEIGHT_CODES)


def top_k_of(options: Options, topk_ids: torch.Tensor | None):
    """Experts per token: of the ids that are given, or of the router."""
    if topk_ids is None:
        return options.top_k
    if topk_ids.dim() != 2:
        raise ValueError(f"topk_ids: rank {topk_ids.dim()}; shape [tokens, top_k] is needed")
    return topk_ids.shape[1]


def _forward_desc(options: Options, named: dict) -> library.MoeDesc:
    ids = named["expert_offsets"] if named["topk_ids"] is None else named["topk_ids"]
    name = "topk_ids" if named["topk_ids"] is not None else options.groups_name
    if ids is not None and ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: dtype {ids.dtype}; int32 or int64 is needed; convert it")
    return _desc(options, named["x"], named, top_k_of(options, named["topk_ids"]),
                 torch.int32 if ids is None else ids.dtype)


def taken(options: Options, named: dict) -> Options:
    """The options with what auto takes for these tensors, which may be fake: then sizes become constants of the graph,
    as what is saved depends on them. Where nothing is computed and on the CPU it is native without a look at sizes."""
    device = named["x"].device
    if options.precision != "auto" or device.type != "cuda":
        return options.taken(fp8=False)
    handle = library.context(KINDS["cuda"], device.index or 0, 0)
    chosen = library.chosen_precision(handle, _forward_desc(options, named))
    return options.taken(fp8=PRECISIONS[chosen] == "fp8")


def takes_fp8(text: str, device: torch.device, *, tokens: int, hidden: int, intermediate: int, experts: int,
              bias: bool) -> bool:
    """Whether auto, of a bf16 layer with these options and codes of weights, takes fp8 there."""
    options = parse(text + " weight_codes=True")
    if device.type != "cuda":
        return False
    desc = options.desc(top_k=options.top_k, tokens=tokens, hidden=hidden, intermediate=intermediate, experts=experts,
                        dtype=library.BF16, ids_dtype=library.INT32, separate=False, bias=bias)
    chosen = library.chosen_precision(library.context(KINDS["cuda"], device.index or 0, 0), desc)
    return PRECISIONS[chosen] == "fp8"


def _unread(options: Options) -> tuple:
    """What the library does not see of weights and codes."""
    return _OF_CODES if options.weight_codes else WEIGHT_CODES


def _prepare_forward(key, tensors: tuple, text: str, training: bool) -> PreparedCall:
    named = dict(zip(INPUTS, tensors, strict=False))
    options, x = parse(text), named["x"]
    names = [options.groups_name if each == "expert_offsets" else each for each in INPUTS[:len(tensors)]]
    one_device(pairs(names, tensors))
    options = taken(options, named)
    if training and options.weight_codes and named.get("weight_codes_down_transposed") is None:
        raise ValueError("weight_codes: made with transposed=False, for calls without gradients; quantise the weights "
                         "with transposed=True, or call under torch.no_grad()")
    desc = _forward_desc(options, named)
    if not training:
        desc.save = 2
    prepared = PreparedCall("moe_forward", x.device, ForwardArgs(), desc)
    prepared.read(INPUTS[:len(tensors)], tensors, unread=_unread(options))
    prepared.write("o", tuple(x.shape), x.dtype)
    if training:
        slots = options.slots(desc.tokens, desc.experts, desc.top_k)
        saves_h = options.save == "h"
        h_shape = (slots, options.up_width * desc.intermediate) if saves_h else (0,)
        prepared.write("h" if saves_h else None, h_shape, CODES if options.quantises else x.dtype)
        prepared.write("routing", (options.routing_elements(desc.tokens, slots, desc.experts),), torch.int32)
        if options.logits:
            prepared.write("logits", (desc.tokens, desc.experts), torch.float32)
            prepared.write("topk_counts", (desc.experts,), torch.int32)
        if options.quantises:
            width = options.up_width * desc.intermediate
            of_x, of_h = options.scale_shapes(desc.tokens, desc.hidden, slots, width)
            prepared.write("x8", tuple(x.shape), CODES)
            prepared.write("x_scale", of_x, scale_type(options))
            prepared.write("h_scale" if saves_h else None, of_h if saves_h else (0,), scale_type(options))
    return prepared.ready(key, library.moe_workspace_bytes(prepared.context, desc, library.PASS_FORWARD))


def present(tensors) -> list:
    return [tensor for tensor in tensors if tensor is not None]


def prepared_forward(tensors: tuple, text: str, step: int, training: bool) -> PreparedCall:
    key = (text, training, torch.get_num_threads(), signature(tensors), step != 0)
    return here.prepared.get(key) or _prepare_forward(key, tensors, text, training)


def _run_forward(tensors: tuple, text: str, step: int, training: bool) -> list[torch.Tensor]:
    return prepared_forward(tensors, text, step, training).run(present(tensors), step=step)


def split_inputs(arguments: tuple) -> tuple:
    """(tensors as INPUTS, options, step) of the operators' arguments, whose last ones, step, mask and codes of weights,
    may be absent; codes are then among the tensors neither."""
    last = arguments[16:] or (None,)
    return (*arguments[:14], *last), arguments[14], arguments[15] if len(arguments) > 15 else 0


def join_inputs(tensors: tuple, text: str, step: int) -> tuple:
    """The arguments of the operators."""
    return (*tensors[:14], text, step, *tensors[14:])


def moe_forward(*arguments) -> list[torch.Tensor]:
    return _run_forward(*split_inputs(arguments), True)


def moe_inference(*arguments) -> torch.Tensor:
    return _run_forward(*split_inputs(arguments), False)[0]


def fake_forward(*arguments) -> list[torch.Tensor]:
    named = dict(zip(INPUTS, arguments[:14], strict=False))
    options, x, w_up = taken(parse(arguments[14]), named), named["x"], named["w_up"]
    tokens, experts = x.shape[0], w_up.shape[0]
    slots = options.slots(tokens, experts, top_k_of(options, named["topk_ids"]), torch.sym_min)
    width = options.up_width * intermediate_of(options, w_up, named["w_gate"])
    saves_h = options.save == "h"
    results = [x.new_empty(x.shape),
               x.new_empty((slots, width) if saves_h else (0,), dtype=CODES if options.quantises else x.dtype),
               x.new_empty((options.routing_elements(tokens, slots, experts),), dtype=torch.int32)]
    if options.logits:
        results.append(x.new_empty((tokens, experts), dtype=torch.float32))
        results.append(x.new_empty((experts,), dtype=torch.int32))
    if options.quantises:
        of_x, of_h = options.scale_shapes(tokens, x.shape[1], slots, width)
        results.append(x.new_empty(x.shape, dtype=CODES))
        results.append(x.new_empty(of_x, dtype=scale_type(options)))
        results.append(x.new_empty(of_h if saves_h else (0,), dtype=scale_type(options)))
    return results


def fake_inference(*arguments) -> torch.Tensor:
    return arguments[0].new_empty(arguments[0].shape)


# --- backward

# Where operands are quantised, x is x8.
SAVED = ("d_o", "x", "h", "routing", "w_router", "b_router", *WEIGHTS, "aux_dlogits", "token_mask", "x_scale",
         "h_scale", *WEIGHT_CODES)
_NOT_SCALED = SAVED[:14]
_WEIGHT_GRADIENT_WORDS = tuple(field_word(BackwardArgs, "d" + name) for name in WEIGHTS)


def slots_of(options: Options, named: dict):
    """P. With given ids it follows from the size of the routing tables alone: 4P + E + 1 elements."""
    if options.has_router or options.grouping != "slots":
        return options.slots(named["x"].shape[0], named["w_up"].shape[0], options.top_k, torch.sym_min)
    return (named["routing"].shape[0] - named["w_up"].shape[0] - 1) // 4


def saved_options(text: str, named: dict) -> Options:
    """The options of a backward pass. What auto took is told by what forward saved: scales, or none."""
    return parse(text).taken(fp8=named.get("x_scale") is not None)


def _read_saved(prepared: PreparedCall, options: Options, tensors: tuple) -> None:
    names = ["x8" if name == "x" and options.quantises else name for name in SAVED]
    unread = _unread(options) if options.save == "h" else ("h", "h_scale", *_unread(options))
    prepared.read(tuple(names[:len(tensors)]), tensors, unread=unread)


def _like_x(options: Options, named: dict) -> torch.Tensor:
    """A tensor of the shape and type of x, which need not be saved."""
    return named["d_o"] if options.quantises else named["x"]


def _gradient_shapes(options: Options, named: dict) -> dict:
    """Shape and dtype of every gradient that could be asked for."""
    x = _like_x(options, named)
    shapes = {"dx": (tuple(x.shape), x.dtype), "dscores": ((slots_of(options, named),), torch.float32)}
    for name in ("w_router", "b_router", *WEIGHTS):
        if named[name] is not None:
            shapes["d" + name] = (tuple(named[name].shape), named[name].dtype)
    return shapes


def prepare_backward(key, tensors: tuple, buffers: tuple, text: str, needs: int) -> PreparedCall:
    named = dict(zip(SAVED, tensors, strict=False))
    options = saved_options(text, named)
    x = _like_x(options, named)
    tokens = x.shape[0]
    given = not options.has_router and options.grouping == "slots" and tokens
    top_k = slots_of(options, named) // tokens if given else options.top_k
    desc = _desc(options, x, named, top_k, torch.int32)
    prepared = PreparedCall("moe_backward", x.device, BackwardArgs(), desc)
    _read_saved(prepared, options, tensors)
    # `accumulate` and the type of the buffers hold for all weight gradients of a call: those without a buffer are added
    # to zeros of that type.
    shared = None
    for name, buffer in zip(WEIGHTS, buffers, strict=bool(buffers)):
        if buffer is not None:
            field = getattr(prepared.args, "d" + name)
            describe("d" + name, field, buffer.shape, buffer.stride(), buffer.dtype, buffer.device)
            prepared.args.accumulate = 1
            shared = buffer.dtype
    shapes = _gradient_shapes(options, named)
    for bit, name in enumerate(GRADIENTS):
        if needs >> bit & 1:
            shape, dtype = shapes[name]
            if shared is not None and name.startswith(("dw_", "db_")):
                fp32_router = name.endswith("_router") and dtype is torch.float32
                prepared.write(name, shape, dtype if fp32_router else shared, zeroed=True, converted=dtype)
            else:
                prepared.write(name, shape, dtype)
    return prepared.ready(key, library.moe_workspace_bytes(prepared.context, desc, library.PASS_BACKWARD))


def run_backward(tensors: tuple, buffers: tuple, text: str, needs: int) -> list[torch.Tensor]:
    key = (text, needs, torch.get_num_threads(), signature(tensors), signature(buffers))
    prepared = here.prepared.get(key) or prepare_backward(key, tensors, buffers, text, needs)
    return prepared.run(present(tensors), [(w, b) for w, b in zip(_WEIGHT_GRADIENT_WORDS, buffers) if b is not None])


def run_backward_input(tensors: tuple, text: str, with_dscores: bool) -> list[torch.Tensor]:
    """The first part of a split backward pass of grouped rows, in native precision: [dx, dscores if wanted, a_scaled,
    dh], dh in the memory of h where the options say so. tensors: as SAVED without the scales."""
    key = (text, "input", with_dscores, torch.get_num_threads(), signature(tensors))
    prepared = here.prepared.get(key) or prepare_backward_input(key, tensors, text, with_dscores)
    results = prepared.run(present(tensors))
    return results if len(results) == 3 + with_dscores else [*results, tensors[SAVED.index("h")]]


def _gather_tokens(desc: library.MoeDesc, rows: int | None) -> None:
    """Of a layer of so many grouped rows whose x and d_o are tokens; None: of one whose x and d_o are rows."""
    if rows is not None:
        desc.variable_experts, desc.slots = 1, rows


def prepare_backward_input(key, tensors: tuple, text: str, with_dscores: bool,
                           gathered_rows: int | None = None) -> PreparedCall:
    """gathered_rows: with x and d_o of tokens, how many rows there are, which the routing tables gather."""
    named, options = dict(zip(_NOT_SCALED, tensors, strict=True)), parse(text)
    x = named["x"]
    desc, rows = _desc(options, x, named, 1, torch.int32), x.shape[0] if gathered_rows is None else gathered_rows
    _gather_tokens(desc, gathered_rows)
    prepared = PreparedCall("moe_backward_input", x.device, BackwardArgs(), desc)
    _read_saved(prepared, options, tensors)
    prepared.write("dx", (rows, x.shape[1]), x.dtype)
    if with_dscores:
        prepared.write("dscores", (rows,), torch.float32)
    prepared.write("a_scaled", (rows, desc.intermediate), x.dtype)
    if not options.overwrite_h:
        prepared.write("dh", (rows, options.up_width * desc.intermediate), x.dtype)
    return prepared.ready(key, library.moe_workspace_bytes(prepared.context, desc, library.PASS_BACKWARD_INPUT))


_SPLIT = ("d_o", "x", "routing", *WEIGHTS, "a_scaled", "dh")


def run_backward_weights(tensors: tuple, text: str, needs: int, buffers: tuple = ()) -> list[torch.Tensor]:
    """The second part: the gradients of weights whose bits of GRADIENTS are set. tensors: as _SPLIT. buffers: as
    WEIGHTS, contiguous and of one type; gradients that have one are added there and are not among the results. Where
    any has one all have."""
    key = (text, "weights", needs, torch.get_num_threads(), signature(tensors), signature(buffers))
    prepared = here.prepared.get(key) or prepare_backward_weights(key, tensors, text, needs, buffers)
    return prepared.run(present(tensors), [(w, b) for w, b in zip(_WEIGHT_GRADIENT_WORDS, buffers) if b is not None])


def prepare_backward_weights(key, tensors: tuple, text: str, needs: int, buffers: tuple,
                             gathered_rows: int | None = None) -> PreparedCall:
    """gathered_rows: as in prepare_backward_input."""
    named, options = dict(zip(_SPLIT, tensors, strict=True)), parse(text)
    desc = _desc(options, named["x"], named, 1, torch.int32)
    _gather_tokens(desc, gathered_rows)
    prepared = PreparedCall("moe_backward_weights", named["x"].device, BackwardArgs(), desc)
    prepared.read(_SPLIT, tensors, unread=WEIGHTS)
    if any(buffer is not None for buffer in buffers):
        prepared.args.accumulate = 1
        for name, buffer in pairs(WEIGHTS, buffers):
            field = getattr(prepared.args, "d" + name)
            describe("d" + name, field, buffer.shape, buffer.stride(), buffer.dtype, buffer.device)
        needs = 0
    for bit, name in enumerate(GRADIENTS):
        if needs >> bit & 1:
            weight = named[name[1:]]
            prepared.write(name, tuple(weight.shape), weight.dtype)
    return prepared.ready(key, library.moe_workspace_bytes(prepared.context, desc, library.PASS_BACKWARD_WEIGHTS))


def split_saved(arguments: tuple) -> tuple:
    """(tensors as SAVED, buffers, options, needs) of the operators' arguments, in which mask, scales and codes of
    weights come last, or are left out; codes are then among the tensors neither."""
    at = next(i for i, argument in enumerate(arguments) if isinstance(argument, str))
    tensors, buffers, last = arguments[:13], arguments[13:at], arguments[at + 2:]
    return (*tensors, *last, *(None,) * (3 - len(last))), buffers, arguments[at], arguments[at + 1]


def join_saved(tensors: tuple, buffers: tuple, text: str, needs: int) -> tuple:
    """The arguments of the operators."""
    return (*tensors[:13], *buffers, text, needs, *tensors[13:])


def moe_backward(*arguments) -> list[torch.Tensor]:
    return run_backward(*split_saved(arguments))


def fake_backward(*arguments) -> list[torch.Tensor]:
    tensors, _, text, needs = split_saved(arguments)
    named = dict(zip(SAVED, tensors, strict=False))
    options = saved_options(text, named)
    shapes = _gradient_shapes(options, named)
    wanted = [name for bit, name in enumerate(GRADIENTS) if needs >> bit & 1]
    return [named["x"].new_empty(shapes[name][0], dtype=shapes[name][1]) for name in wanted]

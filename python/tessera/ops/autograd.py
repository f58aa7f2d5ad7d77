# SPDX-License-Identifier: Apache-2.0
"""Autograd of the layer, and the short way that calls take in eager mode."""

import functools
import operator
from typing import Callable, NamedTuple

import torch
from torch._C import _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled, _top_saved_tensors_default_hooks
from torch._C._functorch import peek_interpreter_stack

from tessera.ops.forward_mode import refuse_tangents
from tessera.ops.layer import (INPUTS, SAVED, WEIGHT_CODES, join_inputs, join_saved, prepare_backward, run_backward,
                               split_inputs)
from tessera.ops.prepared_calls import PreparedCall, guard, here
from tessera.options import parse

PLAIN = (torch.Tensor, torch.nn.Parameter)
# True if the backward pass that runs keeps its graph for another one, or torch is too old to know.
keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
captures = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


def direct() -> bool:
    """Whether nothing could see the operators: no dispatch mode, no functional transform, no profiler. Then their
    kernels are called without the dispatcher, which would take longer than they do."""
    return not (_len_torch_dispatch_stack() or peek_interpreter_stack() or _profiler_enabled())


def plain_saving() -> bool:
    """Whether saved tensors come back as they are: no hooks on them."""
    return _top_saved_tensors_default_hooks(True) is None


class Call:
    """All that calls of a layer with the same options and like tensors have in common.

    present(arguments): the tensors that are there, of INPUTS. prepared: forward's call of the library, or None to go by
    the dispatcher.
    text, text_over_h: the options, and those of a backward pass that may write dh over h, or None if there is none.
    everything: whether Layer returns all results of moe_forward, or o alone. saved(tensors): what backward needs of
    them besides x, and saved_names; kept: those of SAVED that a backward pass may have; scores: which is topk_weights.
    codes: how many of saved_names, the last, are codes of weights. quantises, once Layer has run forward: whether it
    saved codes.
    """

    __slots__ = ("text", "text_over_h", "everything", "training", "prepared", "positions", "present", "saved",
                 "saved_names", "kept", "codes", "scores", "absent", "nothing", "check", "threads", "quantises",
                 "logits")

    def __init__(self, text: str, arguments: tuple, everything: bool, training: bool, prepared: PreparedCall | None):
        self.text, self.everything, self.training, self.prepared = text, everything, training, prepared
        # Through the dispatcher anybody may have h; here nobody but Layer.
        options = parse(text)
        over_h = prepared is not None and options.save == "h"
        self.text_over_h = f"{text} overwrite_h=True" if over_h else None
        self.quantises, self.logits = None, options.logits
        self.kept = SAVED if options.weight_codes else SAVED[:-len(WEIGHT_CODES)]
        self.positions = tuple([i for i, tensor in enumerate(arguments) if tensor is not None])
        self.present = operator.itemgetter(*self.positions)
        saved = [i for i, position in enumerate(self.positions) if INPUTS[position] in SAVED and position]
        self.saved = operator.itemgetter(*saved)  # two at least: w_up and w_down
        self.saved_names = tuple([INPUTS[self.positions[i]] for i in saved])
        self.codes = sum(name in WEIGHT_CODES for name in self.saved_names)
        self.scores = self.positions.index(_SCORES) if _SCORES in self.positions else None

    def remember(self, arguments: tuple) -> None:
        """For `recall`: the next call is most often like this one."""
        absent = [i for i, tensor in enumerate(arguments) if tensor is None]
        self.absent, self.nothing = operator.itemgetter(*absent), (None,) * len(absent)
        self.check, self.threads = guard(self.present(arguments)), torch.get_num_threads()
        if self.check is not None:
            here.calls[self.text, torch.is_grad_enabled()] = self


def recall(text: str, arguments: tuple) -> tuple[Call | None, tuple]:
    """The last call with these options, if these tensors are like its and nothing could see the operators, and the
    tensors that are present. The guard sees autocast and functional transforms too, as keys of the dispatcher."""
    call = here.calls.get((text, torch.is_grad_enabled()))
    if call is None or call.absent(arguments) != call.nothing:
        return None, ()
    tensors = call.present(arguments)
    if (call.check(*tensors) and call.threads == torch.get_num_threads()
            and not _len_torch_dispatch_stack() and not _profiler_enabled()):
        return call, tensors
    return None, ()


class Wanted(NamedTuple):
    """Which gradients backward has to return. needs: their bits. pick((None, *gradients)): they at the places of
    Layer's arguments. scores: which is that of topk_weights, which the library has as [slots]."""

    needs: int
    pick: Callable
    scores: int | None

    def arrange(self, gradients: list, scores_shape) -> tuple:
        if self.scores is not None:
            gradients[self.scores] = gradients[self.scores].view(scores_shape)
        return self.pick((None, *gradients))


class Layer(torch.autograd.Function):
    """Arguments: (the call, the buffers for weight gradients (a tuple as WEIGHTS, or None), the step), and the tensors
    that are present. A buffer may be a function, which backward calls for it.

    Saved for backward: x, h, the routing tables and the weights; where operands are quantised, x8 in place of x, and
    the scales. Ids and weights of the routing are in the tables. A
    backward pass that is the last one of its graph writes dh over h, which takes that much less memory.
    """

    @staticmethod
    def forward(ctx, how, *tensors):
        call, buffers, step = how
        if call.prepared is not None:
            results = call.prepared.run(tensors, step=step)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                results = torch.ops.tessera.moe_forward.default(
                    *join_inputs(_spread(call.positions, tensors, len(INPUTS)), call.text, step))
        # Calls that are alike take the same precision for auto.
        call.quantises = len(results) > (5 if call.logits else 3)
        if call.quantises:
            *_, x8, x_scale, h_scale = results
            kept = call.saved(tensors)
            at = len(kept) - call.codes
            ctx.save_for_backward(x8, results[1], results[2], *kept[:at], x_scale, h_scale, *kept[at:])
        else:
            ctx.save_for_backward(tensors[0], results[1], results[2], *call.saved(tensors))
        # Hooks on saved tensors may hand other strides back: then backward looks at them anew.
        alike = call.prepared is not None and plain_saving()
        ctx.made = call, buffers, alike, None if call.scores is None else tensors[call.scores].shape
        ctx.set_materialize_grads(False)
        if not call.everything:
            return results[0]
        ctx.mark_non_differentiable(results[1], results[2], *results[4 if call.logits else 3:])
        return tuple(results)

    @staticmethod
    def backward(ctx, d_o, _dh=None, _drouting=None, dlogits=None, *_others):
        call, buffers, alike, scores_shape = ctx.made
        if buffers is not None:
            buffers = _held(call.positions, ctx.needs_input_grad, buffers)
        # Dynamo, where it traces a backward pass, may free what a prepared C call still reads: it gets the operators.
        compiling = torch.compiler.is_compiling()
        plain = (not compiling and type(d_o) in PLAIN and direct() and not torch.is_grad_enabled()
                 and not (d_o.is_neg() or d_o.is_meta))  # else its memory has the other sign, or there is none
        # What is captured may be replayed more often than forward.
        over_h = (not compiling and alike and call.text_over_h is not None and not keeps_graph()
                  and not (call.prepared.on_gpu and captures()))
        text = call.text_over_h if over_h else call.text
        if plain and alike and buffers is None and dlogits is None and d_o.is_contiguous():
            # All signatures follow from those of forward's prepared call.
            key = call.prepared.number, ctx.needs_input_grad, over_h
            prepared, wanted = here.ways.get(key) or _way(key, call, d_o, ctx.saved_tensors, text)
            return wanted.arrange(prepared.run((d_o, *ctx.saved_tensors)), scores_shape)
        held = () if buffers is None else tuple([buffer is not None for buffer in buffers])
        wanted = _wanted(call.positions, ctx.needs_input_grad, held)
        saved = ctx.saved_tensors
        if d_o is None:
            if dlogits is None:
                return (None,) * len(ctx.needs_input_grad)
            d_o = torch.zeros_like(saved[0], dtype=saved[3 + call.saved_names.index("w_up")].dtype)
            plain = not compiling and direct() and not torch.is_grad_enabled() and not d_o.is_meta
        everything = _all_saved(call, d_o, saved, dlogits)
        if plain:
            gradients = run_backward(everything, buffers or (), text, wanted.needs)
        elif not held:
            gradients = torch.ops.tessera.moe_backward.default(*join_saved(everything, (), call.text, wanted.needs))
        else:
            gradients = torch.ops.tessera.moe_backward_accumulate.default(
                *join_saved(everything, buffers, call.text, wanted.needs))
        return wanted.arrange(gradients, scores_shape)


def _way(key: tuple, call: Call, d_o, saved: tuple, text: str) -> tuple[PreparedCall, Wanted]:
    wanted = _wanted(call.positions, key[1], ())
    prepared = prepare_backward(key, _all_saved(call, d_o, saved, None), (), text, wanted.needs)
    way = here.ways[key] = prepared, wanted
    return way


# Layer.apply where `direct`: torch's own asks first whether functional transforms are active, tensor by tensor.
apply_directly = super(torch.autograd.Function, Layer).apply

_SCORES, _ROW_SCORES, _W_UP = INPUTS.index("topk_weights"), INPUTS.index("row_scores"), INPUTS.index("w_up")
_DIFFERENTIABLE = (0, _SCORES, 3, 4, *range(8, 14))  # of INPUTS, in the order of GRADIENTS


def _spread(positions: tuple, tensors: tuple, count: int) -> list:
    """A list of `count` with the tensors at these positions and None elsewhere."""
    spread = [None] * count
    for position, tensor in zip(positions, tensors, strict=True):
        spread[position] = tensor
    return spread


def _all_saved(call: Call, d_o, saved: tuple, dlogits) -> tuple:
    """As SAVED has them, of what Layer.forward saved."""
    at = len(call.saved_names) - call.codes
    scales = ("x_scale", "h_scale") if call.quantises else ()
    names = ("x", "h", "routing", *call.saved_names[:at], *scales, *call.saved_names[at:])
    named = {"d_o": d_o, **dict(zip(names, saved, strict=True)), "aux_dlogits": dlogits}
    return tuple([named.get(name) for name in call.kept])


def _held(positions: tuple, needs_input_grad: tuple, buffers: tuple) -> tuple | None:
    """The buffers of the weights that have gradients, which frozen ones have not."""
    needed = {position for position, needs in zip(positions, needs_input_grad[1:], strict=True) if needs}
    held = [buffer if _W_UP + i in needed else None for i, buffer in enumerate(buffers)]
    if not any(buffer is not None for buffer in held):
        return None
    return tuple([buffer() if callable(buffer) else buffer for buffer in held])


@functools.cache
def _wanted(positions: tuple, needs_input_grad: tuple, held: tuple) -> Wanted:
    """held: which weights have a buffer of their own."""
    needs, sources, count, scores = 0, [0] * len(needs_input_grad), 0, None
    place_of = {position: place + 1 for place, position in enumerate(positions)}
    for bit, position in enumerate(_DIFFERENTIABLE):
        if position == _SCORES and _ROW_SCORES in place_of:
            position = _ROW_SCORES
        place = place_of.get(position)
        if place is not None and needs_input_grad[place] and not (held and bit >= 4 and held[bit - 4]):
            if position == _SCORES:
                scores = count
            count += 1
            needs, sources[place] = needs | 1 << bit, count
    return Wanted(needs, operator.itemgetter(*sources), scores)


def moe_forward_autograd(*arguments) -> list[torch.Tensor]:
    refuse_tangents(*arguments)
    if torch.is_grad_enabled():
        tensors, text, step = split_inputs(arguments)
        call = Call(text, tensors, True, True, None)
        return list(Layer.apply((call, None, step), *call.present(tensors)))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.tessera.moe_forward.default(*arguments)

# SPDX-License-Identifier: Apache-2.0
"""The torch operators tessera::* on top of the C ABI: schemas, and which function serves which key of the dispatcher.

    moe_forward(x, routing inputs, weights, options) -> [o, h, routing] (+ [logits, topk_counts]) (+ [x8, x_scale,
                                                         h_scale], which take the place of x and of h in bf16)
    moe_inference(the same)                          -> o
    moe_backward(...) -> the gradients that `needs` asks for, in the order of GRADIENTS
    moe_backward_accumulate(...): the same, weight gradients are added into the caller's buffers
    quantise_weights(weights, options, transposed) -> codes and scales that these take in place of weights they would
                                                      quantise
    route, router_loss, update_selection_bias, grouped_gemm, grouped_gemm_wgrad
"""

import torch

from tessera.ops import autograd, balance, flops, grouped_gemm, layer, route, weight_codes
from tessera.ops.balance import countable
from tessera.ops.forward_mode import refuse_tangents
from tessera.ops.layer import GRADIENTS, WEIGHT_CODES, WEIGHTS
from tessera.ops.prepared_calls import one_device, pairs

if torch.torch_version.TorchVersion(torch.__version__) < (2, 10):
    raise ImportError(f"torch {torch.__version__}: Tessera needs 2.10 or later; update torch")

_WEIGHT_SCHEMA = "Tensor w_up, Tensor? w_gate, Tensor w_down, Tensor? b_up, Tensor? b_gate, Tensor? b_down"
_CODES_SCHEMA = ", ".join([f"Tensor? {name}=None" for name in WEIGHT_CODES])
_INPUT_SCHEMA = ("Tensor x, Tensor? topk_ids, Tensor? topk_weights, Tensor? w_router, Tensor? b_router, "
                 "Tensor? selection_bias, Tensor? expert_offsets, Tensor? row_scores, "
                 f"{_WEIGHT_SCHEMA}, str options, SymInt step=0, Tensor? token_mask=None, {_CODES_SCHEMA}")
_SAVED_SCHEMA = ("Tensor d_o, Tensor x, Tensor h, Tensor routing, Tensor? w_router, Tensor? b_router, "
                 f"{_WEIGHT_SCHEMA}, Tensor? aux_dlogits")
_LAST_SCHEMA = f"Tensor? token_mask=None, Tensor? x_scale=None, Tensor? h_scale=None, {_CODES_SCHEMA}"

_library = torch.library.Library("tessera", "DEF")
_library.define(f"moe_forward({_INPUT_SCHEMA}) -> Tensor[]")
_library.define(f"moe_inference({_INPUT_SCHEMA}) -> Tensor")
_library.define(f"moe_backward({_SAVED_SCHEMA}, str options, int needs, {_LAST_SCHEMA}) -> Tensor[]")
_library.define(f"moe_backward_accumulate({_SAVED_SCHEMA}, "
                + ", ".join(f"Tensor({letter}!)? d{name}" for letter, name in zip("abcdef", WEIGHTS, strict=True))
                + f", str options, int needs, {_LAST_SCHEMA}) -> Tensor[]")
_library.define("quantise_weights(Tensor w_up, Tensor? w_gate, Tensor w_down, str options, bool transposed)"
                " -> Tensor[]")
_library.define("route(Tensor x, Tensor w_router, Tensor? b_router, Tensor? selection_bias, str options, "
                "Tensor? token_mask=None) -> (Tensor topk_weights, Tensor topk_ids, Tensor logits)")
_library.define("router_loss(Tensor logits, Tensor? counts, str router, float balance, float z, bool wants_gradient, "
                "float sequence_balance=0.0, Tensor? topk_ids=None, Tensor? sequence_offsets=None, "
                "Tensor? token_mask=None) -> (Tensor loss, Tensor dlogits)")
_library.define("update_selection_bias(Tensor(a!) selection_bias, Tensor counts, float rate, bool centered) -> ()")
_library.define("grouped_gemm(Tensor a, Tensor b, Tensor? bias, Tensor expert_offsets, bool transpose_b) -> Tensor")
_library.define("grouped_gemm_wgrad(Tensor a, Tensor b, Tensor expert_offsets) -> Tensor")


def _once_only(op):
    """Autograd of a backward op: there is none, and saying so beats a wrong second derivative."""
    def refuse(*arguments):
        refuse_tangents(*arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            raise NotImplementedError(f"{op}: Tessera has no second derivatives; call backward without create_graph")
        with torch._C._AutoDispatchBelowAutograd():
            return op(*arguments)
    return refuse


def _alike(name: str, fake):
    """The fake kernel with a check: it serves tensors on meta too, and of some on meta and others not it would make
    results that nobody writes."""
    names = tuple([argument.name for argument in getattr(torch.ops.tessera, name).default._schema.arguments])

    def checked(*arguments):
        tensors = [a if isinstance(a, torch.Tensor) else None for a in arguments]
        if len({tensor.device.type for tensor in tensors if tensor is not None}) > 1:
            one_device(pairs(names[:len(tensors)], tensors))
        return fake(*arguments)
    return checked


def _register(name: str, kernel, fake, autograd=None) -> None:
    for key in ("CPU", "CUDA"):
        _library.impl(name, kernel, key)
    torch.library.register_fake(f"tessera::{name}", _alike(name, fake), lib=_library)
    if autograd is None:
        autograd = _once_only(getattr(torch.ops.tessera, name).default)
    _library.impl(name, autograd, "Autograd")


_register("moe_forward", layer.moe_forward, layer.fake_forward, autograd.moe_forward_autograd)
_library.impl("moe_inference", layer.moe_inference, "CPU")
_library.impl("moe_inference", layer.moe_inference, "CUDA")
torch.library.register_fake("tessera::moe_inference", _alike("moe_inference", layer.fake_inference), lib=_library)
_register("moe_backward", layer.moe_backward, layer.fake_backward)
_register("moe_backward_accumulate", layer.moe_backward, layer.fake_backward)
_register("quantise_weights", weight_codes.quantise_weights, weight_codes.fake_quantise_weights)
_register("route", route.route, route.fake_route, route.route_autograd)
_register("router_loss", balance.router_loss, balance.fake_router_loss, balance.router_loss_autograd)
_register("update_selection_bias", balance.update_selection_bias, balance.fake_update_selection_bias)
_register("grouped_gemm", grouped_gemm.grouped_gemm, grouped_gemm.fake_grouped_gemm, grouped_gemm.grouped_gemm_autograd)
_register("grouped_gemm_wgrad", grouped_gemm.grouped_gemm_wgrad, grouped_gemm.fake_grouped_gemm_wgrad)
flops.register()

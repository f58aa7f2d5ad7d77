# SPDX-License-Identifier: Apache-2.0
"""The router alone as an operator: its kernel, its fake kernel and its autograd."""

import torch

from tessera import library
from tessera.library import RouteArgs
from tessera.ops.forward_mode import refuse_tangents
from tessera.ops.prepared_calls import DTYPES, PreparedCall, here, not_stored, one_device, pairs, router_dtype
from tessera.ops.prepared_calls import signature
from tessera.options import Options, parse

_ROUTE_INPUTS = ("x", "w_router", "b_router", "selection_bias", "token_mask")


def route(x, w_router, b_router, selection_bias, text, token_mask=None) -> tuple:
    tensors = (x, w_router, b_router, selection_bias, token_mask)
    key = ("route", text, torch.get_num_threads(), signature(tensors))
    prepared = here.prepared.get(key) or _prepare_route(key, tensors, text)
    return tuple(prepared.run([t for t in tensors if t is not None]))


def _prepare_route(key, tensors: tuple, text: str) -> PreparedCall:
    x, w_router = tensors[:2]
    one_device(pairs(_ROUTE_INPUTS, tensors))
    for name, tensor, shape in (("x", x, "[T,d]"), ("w_router", w_router, "[E,d]")):
        if tensor.dim() != 2:
            raise ValueError(f"{name}: shape {list(tensor.shape)}; {shape} is needed")
    if DTYPES.get(x.dtype) not in (library.FP32, library.BF16):
        raise not_stored("x", x.dtype)
    options, (tokens, hidden), experts = parse(text), x.shape, w_router.shape[0]
    if options.experts_vary:
        raise ValueError(f"router={options.router}: tessera.route returns K experts of every token, and here their "
                         "number varies; call tessera.moe with return_router=True")
    desc = options.desc(top_k=options.top_k, tokens=tokens, hidden=hidden, intermediate=1, experts=experts,
                        dtype=DTYPES.get(x.dtype, library.FP32), ids_dtype=library.INT32, separate=False, bias=False,
                        router_dtype=router_dtype(x, w_router, tensors[2]))
    prepared = PreparedCall("route", x.device, RouteArgs(), desc)
    prepared.read(_ROUTE_INPUTS, tensors)
    prepared.write("topk_weights", (tokens, options.top_k), torch.float32)
    prepared.write("topk_ids", (tokens, options.top_k), torch.int32)
    prepared.write("logits", (tokens, experts), torch.float32)
    return prepared.ready(key, library.moe_workspace_bytes(prepared.context, desc, library.PASS_ROUTE))


def fake_route(x, w_router, b_router, selection_bias, options, token_mask=None):
    choice = (x.shape[0], parse(options).top_k)
    return (x.new_empty(choice, dtype=torch.float32), x.new_empty(choice, dtype=torch.int32),
            x.new_empty((x.shape[0], w_router.shape[0]), dtype=torch.float32))


class Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_router, b_router, selection_bias, options, token_mask=None):
        with torch._C._AutoDispatchBelowAutograd():
            results = torch.ops.tessera.route.default(x, w_router, b_router, selection_bias, options, token_mask)
        topk_weights, topk_ids, logits = results
        ctx.save_for_backward(x, w_router, topk_ids, topk_weights, logits, token_mask)
        ctx.options, ctx.has_bias = options, b_router is not None
        ctx.mark_non_differentiable(topk_ids)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx, dweights, _dids, dlogits):
        x, w_router, topk_ids, topk_weights, logits, token_mask = ctx.saved_tensors
        if token_mask is not None:
            topk_ids = topk_ids.clamp(min=0)  # of padding, whose gradients are dropped below
        if dweights is not None:
            through = router_gradient(parse(ctx.options), logits, topk_ids, topk_weights, dweights)
            dlogits = through if dlogits is None else through + dlogits
        if dlogits is None:
            return (None,) * 6
        if token_mask is not None:  # padding may be anything, NaN too
            real = token_mask.unsqueeze(-1)
            dlogits, x = torch.where(real, dlogits, 0), torch.where(real, x, 0)
        rows = dlogits.to(w_router.dtype)
        wants = ctx.needs_input_grad
        return ((rows @ w_router).to(x.dtype) if wants[0] else None,
                rows.mT @ x.to(w_router.dtype) if wants[1] else None,
                dlogits.sum(0).to(w_router.dtype) if wants[2] else None, None, None, None)


def router_gradient(options: Options, logits, topk_ids, topk_weights, dweights):
    """dlogits [T,E] of the chosen scores, as docs/numerics.md has them (section Routers)."""
    ids, g = topk_ids.long(), options.route_scale * dweights
    if options.router == "softmax-topk" and not options.normalize_scores:
        p = torch.softmax(logits, dim=-1)
        g_all = torch.zeros_like(logits).scatter_(1, ids, g)
        return p * (g_all - (g_all * p).sum(-1, keepdim=True))
    if options.router in ("topk-softmax", "softmax-topk", "softmax-topk-renorm"):
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


def route_autograd(*arguments):
    refuse_tangents(*arguments)
    if torch.is_grad_enabled():
        return Route.apply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.tessera.route.default(*arguments)

# SPDX-License-Identifier: Apache-2.0
"""The layer in plain torch operations, for any floating type: what the tests compare with, in fp64.

Also: data at unit scale, and the one comparison that all tests use.
"""

import itertools
import math

import torch
from torch.nn import functional

PHI = {
    "swiglu": functional.silu, "geglu": lambda g: functional.gelu(g, approximate="tanh"),
    "geglu-erf": functional.gelu, "reglu": functional.relu,
    "relu": functional.relu, "relu2": lambda h: functional.relu(h).square(), "silu": functional.silu,
    "gelu": lambda h: functional.gelu(h, approximate="tanh"), "gelu-erf": functional.gelu,
}


def split(h, layout: str):
    """Gate and up of the columns of h."""
    layout, _, block = layout.removeprefix("transposed").removeprefix("-").partition(":")
    if layout == "interleaved":
        return h[..., 0::2], h[..., 1::2]
    if layout == "blocked":
        pairs = h.unflatten(-1, (-1, 2, int(block)))
        return pairs[..., 0, :].flatten(-2), pairs[..., 1, :].flatten(-2)
    first, second = h.chunk(2, dim=-1)
    return (second, first) if layout == "up-first" else (first, second)


def clamp(h, limit, below=math.inf):
    """h between -below and limit. The bounds themselves pass the gradient: of those torch's clamp has other ones from
    2.14 on, and h in bf16 meets them."""
    return torch.where(h < -below, -below, torch.where(h > limit, limit, h))


def activate(h, activation="swiglu", layout="concat", alpha=1.702, limit=7.0, up_offset=1.0):
    if activation in ("relu", "relu2", "silu", "gelu", "gelu-erf"):
        return PHI[activation](h)
    gate, up = split(h, layout)
    if activation == "clamped-swiglu":
        gate, up = clamp(gate, limit), clamp(up, limit, below=limit)
        return (up + up_offset) * gate * torch.sigmoid(alpha * gate)
    return PHI[activation](gate) * up


def rounded(h, dtype):
    """h as it is stored, with the gradient of h: where a clamp bends, rounding decides on which side an element is."""
    return h + (h.to(dtype).to(h.dtype) - h).detach()


def expert(x, w, e, layout="concat", stored=None, **options):
    """Expert e on the rows of x; w: dict of weights by name; stored: the type that h is rounded to."""
    turn = (lambda m: m) if layout.startswith("transposed") else (lambda m: m.mT)
    if w.get("w_gate") is not None:
        h = torch.cat([x @ w["w_gate"][e].mT, x @ w["w_up"][e].mT], dim=-1)
        if w.get("b_up") is not None:
            h = h + torch.cat([w["b_gate"][e], w["b_up"][e]])
    else:
        h = x @ turn(w["w_up"][e])
        if w.get("b_up") is not None:
            h = h + w["b_up"][e]
    if stored is not None:
        h = rounded(h, stored)
    y = activate(h, layout=layout, **options) @ turn(w["w_down"][e])
    return y if w.get("b_down") is None else y + w["b_down"][e]


def experts(x, ids, scores, w, **options):
    """Sum over the slots of a token of score * expert(token); ids outside the experts add nothing."""
    o = torch.zeros_like(x)
    for e in range(w["w_up"].shape[0]):
        token, k = torch.where(ids == e)
        y = expert(x[token], w, e, **options)
        o = o.index_add(0, token, scores[token, k, None] * y)
    return o


def router_scores(logits, ids, router, route_scale=1.0, normalize_scores=False):
    """Scores of chosen experts, differentiable."""
    if router in ("topk-softmax", "softmax-topk-renorm"):
        return route_scale * logits.gather(1, ids).softmax(-1)
    if router == "softmax-topk":
        p = logits.softmax(-1).gather(1, ids)
        return route_scale * (p / p.sum(-1, keepdim=True) if normalize_scores else p)
    chosen = logits.gather(1, ids)
    p = functional.softplus(chosen).sqrt() if router == "sqrtsoftplus" else chosen.sigmoid()
    return route_scale * (p / (p.sum(-1, keepdim=True) + 1e-20) if normalize_scores else p)


def weights(experts=5, hidden=24, intermediate=8, activation="swiglu", layout="concat",
            separate=False, bias=False, seed=0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    width = (2 if activation in ("swiglu", "geglu", "geglu-erf", "reglu", "clamped-swiglu") else 1) * intermediate
    def draw(*shape, scale=1.0):
        return torch.randn(*shape, generator=generator) * scale
    up = draw(experts, width, hidden, scale=1 / math.sqrt(hidden))
    down = draw(experts, hidden, intermediate, scale=1 / math.sqrt(intermediate))
    w = {"w_up": up, "w_down": down}
    if layout.startswith("transposed"):
        w = {name: tensor.mT.contiguous() for name, tensor in w.items()}
    if separate:
        w |= {"w_gate": up[:, :intermediate].contiguous(), "w_up": up[:, intermediate:].contiguous()}
    if bias:
        w |= {"b_up": draw(experts, intermediate if separate else width), "b_down": draw(experts, hidden)}
        if separate:
            w["b_gate"] = draw(experts, intermediate)
    return w


def doubled(tensors: dict) -> dict:
    return {name: t.detach().double().requires_grad_() for name, t in tensors.items()}


def leaves(tensors: dict) -> dict:
    return {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}


RELATIVE = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


def check_close(test, name: str, got, reference, relative=None) -> None:
    """norm(got - reference) <= relative * norm(reference), over all and by rows of the last dimension with a floor
    of their root mean square. Zeros never pass; where the reference is 0, got is 0."""
    relative = RELATIVE[got.dtype] if relative is None else relative
    test.assertEqual(tuple(got.shape), tuple(reference.shape), name)
    test.assertTrue(torch.isfinite(got).all(), f"{name}: not finite")
    error, exact = (got.double() - reference.double()).detach(), reference.double().detach()
    total = exact.norm().item()
    test.assertLessEqual(error.norm().item(), relative * total, f"{name}: error of {error.norm():.2e} in {total:.2e}")
    if got.dim() > 1 and got.numel():
        floor = exact.square().mean().sqrt() * math.sqrt(exact.shape[-1])
        rows = error.norm(dim=-1) / (exact.norm(dim=-1) + floor)
        test.assertLessEqual(rows.max().item(), 4 * relative, f"{name}: worst row")


def cases(**axes):
    """Every combination of the axes, as dicts."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]

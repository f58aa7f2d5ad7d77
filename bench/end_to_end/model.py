# SPDX-License-Identifier: Apache-2.0
"""A decoder with Mixture-of-Experts layers whose experts can be exchanged between two steps.

    x = embedding[tokens]
    L times: x += out(attention(rotary(q), rotary(k), v)), q, k, v of rms(x);  x += experts(rms(x), router(rms(x)))
    loss = mean cross entropy of rms(x) @ head^T

Weights of the experts are named and laid out as Hugging Face's: gate_up_proj [E,2n,d], gate rows first, and
down_proj [E,d,n].
"""

import dataclasses

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

LOSS_ROWS = 4096  # of logits that exist at a time
BALANCE, Z = 0.01, 0.001  # coefficients of the auxiliary losses


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Sizes of a model: d = hidden, n = intermediate, E = experts, K = top_k; context in tokens."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    experts: int
    top_k: int
    vocabulary: int
    tied: bool  # the head is the embedding
    context: int

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < (0 if field.name == "tied" else 1):
                raise ValueError(f"{field.name}={getattr(self, field.name)}: must be at least 1")
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k}: more than experts={self.experts}; lower it")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads}: must be a multiple of kv_heads={self.kv_heads}")
        if self.head_size % 2:
            raise ValueError(f"head_size={self.head_size}: must be even, as rotary turns pairs")

    def layer_parameters(self) -> int:
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        return attention + self.experts * (3 * self.hidden * self.intermediate + self.hidden) + 2 * self.hidden

    def parameters(self) -> int:
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters() + tables + self.hidden

    def flops_per_token(self) -> float:
        """Of forward and backward, six per active weight and causal attention's half; without recomputation."""
        experts = 3 * self.top_k * self.hidden * self.intermediate + self.experts * self.hidden
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        products = self.context * self.heads * self.head_size  # q.k and p.v, half of them masked
        return 6 * (self.layers * (attention + experts + products) + self.vocabulary * self.hidden)


CONFIGURATIONS = {
    "7B-n256": Configuration(44, 1536, 12, 12, 128, 256, 128, 8, 50_304, True, 4096),
    "Qwen3-30B": Configuration(48, 2048, 32, 4, 128, 768, 128, 8, 151_936, False, 4096),
    # bench/quality trains these two: 95 M parameters, 12.7 M of them active; K/E is 2/64 and 4/128.
    "95M-2of64": Configuration(6, 384, 6, 6, 64, 192, 64, 2, 16_384, True, 1024),
    "95M-4of128": Configuration(6, 384, 6, 6, 64, 96, 128, 4, 16_384, True, 1024),
    # For a CPU: `small` learns something within minutes, `tiny` is for tests.
    "small": Configuration(4, 256, 4, 2, 64, 128, 32, 4, 4096, True, 256),
    # For layers in fp8 on a GPU, which take an intermediate of 256; many runs of it share one.
    "small-n256": Configuration(2, 256, 4, 2, 64, 256, 32, 4, 4096, True, 256),
    "tiny": Configuration(2, 64, 4, 2, 16, 32, 8, 2, 512, True, 64),
}


class _RouterLogits(torch.autograd.Function):
    """x @ w^T in fp32; backward keeps x and w as they came instead of their fp32 copies."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.float() @ w.float().mT

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return (gradient @ w.float()).to(x.dtype), (gradient.mT @ x.float()).to(w.dtype)


def loss_chunk(rows, w, chosen, count: int):
    """Sum of -log softmax(rows @ w^T)[chosen], and the gradients of that sum / count by the logits and by rows."""
    logits = (rows @ w.mT).float()
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    total = (normalizer - logits.gather(-1, chosen)).sum()
    hit = torch.arange(w.shape[0], device=w.device) == chosen
    gradient = (((logits - normalizer).exp() - hit.float()) / count).to(rows.dtype)
    return total, gradient, gradient @ w


def add_product(total, a, b) -> None:
    """total [m,n] in fp32 += a [m,k] @ b [k,n]. For bf16 on a GPU the GEMM adds it, whose accumulators are fp32."""
    if total.is_cuda and a.dtype is not total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class _CrossEntropy(torch.autograd.Function):
    """Mean of -log softmax(x @ w^T)[target], LOSS_ROWS rows at a time. Forward makes the gradients too, as the logits
    are there then, and keeps them alone."""

    @staticmethod
    def forward(ctx, x, w, targets, chunk):
        total, dx, dw = 0, torch.empty_like(x), torch.zeros_like(w, dtype=torch.float32)
        for rows, chosen, place in zip(*(t.split(LOSS_ROWS) for t in (x, targets, dx)), strict=True):
            added, dlogits, dx_rows = chunk(rows, w, chosen[:, None], x.shape[0])
            total = total + added
            place.copy_(dx_rows)
            add_product(dw, dlogits.mT, rows)
        ctx.save_for_backward(dx, dw.to(w.dtype))
        return total / x.shape[0]

    @staticmethod
    def backward(ctx, gradient):
        dx, dw = ctx.saved_tensors
        return dx * gradient.to(dx.dtype), dw * gradient.to(dw.dtype), None, None


def rotary_tables(context: int, head_size: int, device) -> tuple:
    """cos and sin [context, head_size/2] in fp32, base 10^4."""
    frequencies = 1e4 ** (-torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size)
    angles = torch.arange(context, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """x [B, heads, context, head_size], halves of a head as pairs."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rms(x, weight):
    return functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def attention(x, cos, sin, norm, qkv, out, experts_norm, heads: int, kv_heads: int, head_size: int):
    """x + out(attention(rms(x))) and its norm for the experts, both [B,S,d]. All weights are arguments, so that one
    compiled graph serves every layer."""
    b, s, _ = x.shape
    rows = functional.linear(rms(x, norm), qkv).view(b, s, heads + 2 * kv_heads, head_size).transpose(1, 2)
    q, k, v = rows.split((heads, kv_heads, kv_heads), dim=1)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    o = functional.scaled_dot_product_attention(q, k, v.contiguous(), is_causal=True, enable_gqa=heads != kv_heads)
    x = x + functional.linear(o.transpose(1, 2).reshape(b, s, heads * head_size), out)
    return x, rms(x, experts_norm)


def choose(logits, top_k: int):
    """ids [T,K], weights [T,K] fp32 (softmax over the chosen logits) and counts [E] of rows, of logits [T,E]."""
    chosen, ids = logits.topk(top_k, dim=-1)
    flat = ids.flatten()
    counts = torch.zeros(logits.shape[1], device=logits.device, dtype=torch.int32)
    counts = counts.scatter_add(0, flat, torch.ones_like(flat, dtype=torch.int32))
    return ids, chosen.softmax(dim=-1), counts


def route(x, w_router, top_k: int, choose=choose):
    """ids [T,K], weights [T,K] fp32 (softmax over the chosen logits), logits [T,E] fp32, counts [E] of rows x [T,d]."""
    # Never compiled: torch.compile would keep the fp32 copy of x for backward, 4*T*d bytes of every layer.
    logits = _RouterLogits.apply(x, w_router)
    ids, weights, counts = choose(logits, top_k)
    return ids, weights, logits, counts


def auxiliary_loss(logits, counts):
    """BALANCE * E * sum_e (f_e / sum f) * mean_t p_te + Z * mean_t logsumexp^2, as tessera.router_losses."""
    share = counts.float() / counts.sum().clamp(min=1)
    balance = logits.shape[1] * (share * logits.softmax(dim=-1).mean(dim=0)).sum()
    return BALANCE * balance + Z * logits.logsumexp(dim=-1).square().mean()


class Dense:
    """The parts that all implementations share, as they are or compiled."""

    def __init__(self, compiled: bool):
        def prepared(function):
            return torch.compile(function, dynamic=False, fullgraph=True) if compiled else function

        if compiled:  # a graph for each batch size, and for evaluation
            torch._dynamo.config.recompile_limit = 64
        self.attention, self.choose, self.auxiliary_loss = map(prepared, (attention, choose, auxiliary_loss))
        self.loss_chunk = prepared(loss_chunk)


class Experts(nn.Module):
    """Router and experts of a layer, a module so that sharding can gather them apart from its attention."""

    def __init__(self, c: Configuration, owner: dict):
        super().__init__()
        self.c, self.owner = c, owner
        self.router = nn.Parameter(torch.empty(c.experts, c.hidden))
        self.gate_up_proj = nn.Parameter(torch.empty(c.experts, 2 * c.intermediate, c.hidden))
        self.down_proj = nn.Parameter(torch.empty(c.experts, c.hidden, c.intermediate))

    def forward(self, rows):
        """Of rows [T,d]: what the experts add [T,d], the auxiliary loss, and the rows of each expert [E]."""
        top_k, dense, experts = self.c.top_k, self.owner["dense"], self.owner["experts"]
        if getattr(experts, "routes", False):  # a whole layer, router included
            return experts(rows, self.router, self.gate_up_proj, self.down_proj, top_k)
        ids, weights, logits, counts = route(rows, self.router, top_k, dense.choose)
        auxiliary = dense.auxiliary_loss(logits, counts)
        return experts(rows, ids, weights, self.gate_up_proj, self.down_proj), auxiliary, counts


class Block(nn.Module):
    """Weights of a layer and its forward pass, recomputed in backward with `recompute`."""

    def __init__(self, c: Configuration, owner: dict):
        super().__init__()
        self.c, self.owner, self.recompute = c, owner, False
        self.norm, self.experts_norm = nn.Parameter(torch.empty(c.hidden)), nn.Parameter(torch.empty(c.hidden))
        self.qkv = nn.Parameter(torch.empty((c.heads + 2 * c.kv_heads) * c.head_size, c.hidden))
        self.out = nn.Parameter(torch.empty(c.hidden, c.heads * c.head_size))
        self.experts = Experts(c, owner)

    def forward(self, x, cos, sin):
        """x [B,S,d] to the same, the layer's auxiliary loss and the rows of each expert [E]."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._run, x, cos, sin, use_reentrant=False)
        return self._run(x, cos, sin)

    def _run(self, x, cos, sin):
        c = self.c
        x, normed = self.owner["dense"].attention(x, cos, sin, self.norm, self.qkv, self.out, self.experts_norm,
                                                  c.heads, c.kv_heads, c.head_size)
        y, auxiliary, counts = self.experts(normed.flatten(0, 1))
        return x + y.view_as(x), auxiliary, counts


class Head(nn.Module):
    """A head of its own, a module so that sharding gathers it when it is its turn and not with the embedding."""

    def __init__(self, c: Configuration, owner: dict):
        super().__init__()
        self.owner = owner
        self.weight = nn.Parameter(torch.empty(c.vocabulary, c.hidden))

    def forward(self, rows, targets):
        """Mean cross entropy of rows [T,d] in nats, targets [T] int64."""
        return _CrossEntropy.apply(rows, self.weight, targets, self.owner["dense"].loss_chunk)


class Model(nn.Module):
    """experts: experts(x [T,d], ids [T,K], weights [T,K], gate_up_proj, down_proj) -> [T,d], or one with `routes`, as
    bench/end_to_end/experts.py has them. `use` exchanges it."""

    def __init__(self, c: Configuration, experts, compiled: bool = False):
        super().__init__()
        self.c, self.owner = c, {"dense": Dense(compiled), "experts": experts}
        self.embedding = nn.Parameter(torch.empty(c.vocabulary, c.hidden))
        self.blocks = nn.ModuleList(Block(c, self.owner) for _ in range(c.layers))
        self.norm = nn.Parameter(torch.empty(c.hidden))
        self.head = None if c.tied else Head(c, self.owner)
        self.tables = None  # of rotary

    def use(self, experts) -> None:
        self.owner["experts"] = experts

    def recompute(self, wanted: bool) -> None:
        for block in self.blocks:
            block.recompute = wanted

    def forward(self, tokens, targets):
        """tokens, targets [B,S] int64: mean cross entropy in nats, sum of the auxiliary losses, counts [L,E]."""
        if self.tables is None or self.tables[0].shape[0] != tokens.shape[1]:
            self.tables = rotary_tables(tokens.shape[1], self.c.head_size, tokens.device)
        x, auxiliary, counts = functional.embedding(tokens, self.embedding), 0, []
        for block in self.blocks:
            x, added, rows = block(x, *self.tables)
            auxiliary = auxiliary + added
            counts.append(rows)
        rows, targets = rms(x, self.norm).flatten(0, 1), targets.flatten()
        if self.head is None:
            loss = _CrossEntropy.apply(rows, self.embedding, targets, self.owner["dense"].loss_chunk)
        else:
            loss = self.head(rows, targets)
        return loss, auxiliary, torch.stack(counts)

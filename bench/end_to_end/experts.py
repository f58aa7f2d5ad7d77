# SPDX-License-Identifier: Apache-2.0
"""The experts of several libraries behind one signature, and the check that they compute the same.

    experts(x [T,d], ids [T,K] int64, weights [T,K] fp32, gate_up_proj [E,2n,d], down_proj [E,d,n]) -> [T,d]

A library is imported when its name is asked for. One that cannot be imported gives a reason instead.
"""

import functools
import importlib.metadata
import os
import pathlib
import sys

import torch

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))

BASELINE = "torch-grouped-mm"
TOLERANCE = 2e-2  # ||difference|| / ||baseline||, in bf16


class Unavailable(Exception):
    """Why an implementation cannot run here."""


def _tessera():
    import tessera
    return lambda x, ids, weights, gate_up, down: tessera.routed_experts(x, ids, weights, gate_up, down)


def _tessera_layer(precision: str = "native"):
    import tessera
    from model import BALANCE, Z

    def layer(x, w_router, gate_up, down, top_k):
        o, router = tessera.moe(x, w_router, gate_up, down, top_k=top_k, router="topk-softmax", return_router=True,
                                precision=precision)
        return o, tessera.losses.router_losses(router.logits, router.topk_counts, balance=BALANCE, z=Z), router.counts

    layer.routes = True
    return layer


def _torch_grouped_mm():
    from torch_experts import grouped_mm_experts
    return grouped_mm_experts


def _torch_grouped_mm_compiled():
    return torch.compile(_torch_grouped_mm(), dynamic=False)


def _torch_eager():
    from torch_experts import eager_experts
    return eager_experts


def _hugging_face(implementation: str):
    """transformers' Qwen3MoeExperts, whose weights are set for each call."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    @functools.cache
    def module(count: int, intermediate: int, hidden: int):
        config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=intermediate, num_experts=count)
        config._experts_implementation = implementation
        with torch.device("meta"):
            made = Qwen3MoeExperts(config)
        del made.gate_up_proj, made.down_proj  # then they may be any tensors
        return made

    def experts(x, ids, weights, gate_up, down):
        called = module(gate_up.shape[0], down.shape[2], down.shape[1])
        called.__dict__.update(gate_up_proj=gate_up, down_proj=down)
        try:
            return called(x, ids, weights.to(x.dtype))  # its router gives weights in the model's type
        finally:
            del called.__dict__["gate_up_proj"], called.__dict__["down_proj"]

    return experts


def _swiglu(gate, up):
    return torch.nn.functional.silu(gate) * up


def _sonicmoe_functions():
    """sonicmoe.functional and its activation. Weights are passed as it wants them: [2n,d,E] and [d,n,E], views whose
    last stride is an expert's size; gate rows first (`concat_layout`), gradients in the same layout."""
    _needs_gpu()
    import quack.gemm_config as gemm_config
    # Its whole tuning space takes 5 minutes a shape to compile; (2, 1) is the cluster that won on H100 and H200.
    if not hasattr(gemm_config, "_whole_sm90"):
        gemm_config._whole_sm90 = gemm_config._get_sm90_configs
    gemm_config._get_sm90_configs = lambda *a, **k: [c for c in gemm_config._whole_sm90(*a, **k)
                                                     if (c.cluster_m, c.cluster_n) == (2, 1) and not c.swap_ab]
    gemm_config._get_sm100_configs = gemm_config._get_sm120_configs = lambda *a, **k: []
    from sonicmoe import functional
    from sonicmoe.enums import ActivationType
    return functional, ActivationType.SWIGLU


def _sonicmoe():
    """Its call for routing by others, which may give every token another number of experts."""
    functional, swiglu = _sonicmoe_functions()

    @functools.lru_cache(maxsize=4)
    def token_ids(tokens, top_k, device):
        return torch.arange(tokens, device=device, dtype=torch.int32).repeat_interleave(top_k)

    def experts(x, ids, weights, gate_up, down):
        o, _ = functional.moe_general_routing_inputs(
            x, weights.flatten(), token_ids(x.shape[0], ids.shape[1], x.device), ids.flatten().int(),
            gate_up.permute(1, 2, 0), None, down.permute(1, 2, 0), None, gate_up.shape[0],
            torch.cuda.current_stream().cuda_stream, swiglu, False, concat_layout=True)
        return o

    return experts


def _sonicmoe_layer():
    """Its layer with its router, whose logits are bf16; the model's auxiliary losses of these."""
    from model import auxiliary_loss
    functional, swiglu = _sonicmoe_functions()
    auxiliary = torch.compile(auxiliary_loss, dynamic=False, fullgraph=True) if torch.cuda.is_available() else (
        auxiliary_loss)

    def layer(x, w_router, gate_up, down, top_k):
        o, logits, counts = functional.moe_TC_softmax_topk_layer(
            x, w_router, gate_up.permute(1, 2, 0), None, down.permute(1, 2, 0), None, top_k,
            torch.cuda.current_stream().cuda_stream, swiglu, concat_layout=True)
        return o, auxiliary(logits.float(), counts), counts

    layer.routes = layer.rounds_logits = True
    return layer


def _scattermoe():
    _needs_gpu()
    from scattermoe.parallel_experts import flatten_sort_count, parallel_linear

    def experts(x, ids, weights, gate_up, down):
        sorted_ids, sorted_slots, ends = flatten_sort_count(ids, gate_up.shape[0])
        gate, up = parallel_linear(x, gate_up.permute(0, 2, 1), ids.shape[1], sorted_ids, sorted_slots, ends,
                                   grouped_out=True).chunk(2, dim=-1)
        return parallel_linear(_swiglu(gate, up), down.permute(0, 2, 1), 1, sorted_ids, sorted_slots, ends,
                               gates=weights.to(x.dtype), grouped_in=True)

    return experts


def _liger():
    _needs_gpu()
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction
    return lambda x, ids, weights, gate_up, down: LigerFusedMoEFunction.apply(x, gate_up, down, ids.int(), weights)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, gate_up, down):
        ctx.save_for_backward(weights, gate_up, down)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return (gradient, *map(torch.zeros_like, ctx.saved_tensors))


def _no_experts():
    """x itself, and zeros for gradients, so that their reduction and the optimizer remain: what is not experts."""
    return lambda x, ids, weights, gate_up, down: _Identity.apply(x, weights, gate_up, down)


def _needs_gpu():
    if not torch.cuda.is_available():
        raise Unavailable("its kernels need a GPU and torch sees none")


NO_EXPERTS = "no-experts"
_FACTORIES = {
    "tessera": _tessera,
    "tessera-layer": _tessera_layer,
    "tessera-layer-fp8": lambda: _tessera_layer("fp8"),
    BASELINE: _torch_grouped_mm,
    "torch-grouped-mm-compiled": _torch_grouped_mm_compiled,
    "torch-eager": _torch_eager,
    "hf-grouped-mm": lambda: _hugging_face("grouped_mm"),
    "hf-eager": lambda: _hugging_face("eager"),
    "sonicmoe": _sonicmoe,
    "sonicmoe-layer": _sonicmoe_layer,
    "scattermoe": _scattermoe,
    "liger-triton": _liger,
    NO_EXPERTS: _no_experts,
}
NAMES = tuple(_FACTORIES)
COMPILE_FOR_MINUTES = ("sonicmoe", "sonicmoe-layer")  # at their first call, into a cache that later processes read
PACKAGES = {"tessera": "tessera-moe", "tessera-layer": "tessera-moe", "tessera-layer-fp8": "tessera-moe",
            "hf-grouped-mm": "transformers", "hf-eager": "transformers", "sonicmoe": "sonic-moe",
            "sonicmoe-layer": "sonic-moe", "scattermoe": "scattermoe", "liger-triton": "liger-kernel"}


@functools.cache
def load(name: str):
    """The experts of that name. Unavailable with the reason where they cannot run; ValueError for an unknown name."""
    if name not in _FACTORIES:
        raise ValueError(f"experts {name!r}: unknown; choose from {', '.join(NAMES)}")
    try:
        return _FACTORIES[name]()
    except Unavailable:
        raise
    except Exception as error:  # a peer's import may end in anything
        raise Unavailable(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def version(name: str) -> str:
    try:
        return importlib.metadata.version(PACKAGES.get(name, "torch"))
    except importlib.metadata.PackageNotFoundError:
        return "from its sources"


def variant(name: str) -> str:
    """What is not usual about how it runs here."""
    untuned = os.environ.get("LIGER_FUSED_MOE_AUTOTUNE", "1").lower() in ("0", "false", "no")
    clusters = "clusters of (2, 1) only"
    return {"liger-triton": "not tuned" if untuned else "", "sonicmoe": clusters, "sonicmoe-layer": clusters
            }.get(name, "")


def results(experts, x, ids, weights, gate_up, down, do) -> dict:
    """o and the gradients of x, weights and both matrices."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights, gate_up, down)]
    o = experts(leaves[0], ids, *leaves[1:])
    gradients = torch.autograd.grad(o, leaves, do)
    return dict(zip(("o", "dx", "dscores", "dw_up", "dw_down"), (o.detach(), *gradients), strict=True))


def _layer_results(layer, x, w_router, gate_up, down, do, top_k: int) -> dict:
    leaves = [t.detach().clone().requires_grad_() for t in (x, w_router, gate_up, down)]
    o = layer(*leaves, top_k)[0]
    gradients = torch.autograd.grad(o, leaves, do)
    return dict(zip(("o", "dx", "dw_router", "dw_up", "dw_down"), (o.detach(), *gradients), strict=True))


def _tell_apart(x, experts: int, generator) -> torch.Tensor:
    """Puts into the first columns of x [T,d] numbers that differ in bf16, every row in another order, and returns the
    router [E,d] that reads them: whoever rounds its logits to bf16 chooses the same experts as one who does not."""
    binade = torch.arange(128, 256, device=x.device) / 128
    numbers = torch.cat([sign * scale * binade for sign in (1, -1) for scale in (0.25, 0.5, 1)])
    order = torch.rand(x.shape[0], len(numbers), generator=generator, device=x.device).argsort(dim=-1)[:, :experts]
    x[:, :experts] = numbers[order].to(x.dtype)
    return torch.eye(experts, x.shape[1], device=x.device, dtype=x.dtype)


def errors(name: str, hidden: int, intermediate: int, experts: int, top_k: int, tokens: int, device, dtype) -> dict:
    """||difference|| / ||baseline|| of each result against BASELINE on drawn tensors."""
    import model
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape, scale=1.0, dtype=dtype):
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    x, do = normal(tokens, hidden), normal(tokens, hidden)
    gate_up = normal(experts, 2 * intermediate, hidden, scale=hidden**-0.5)
    down = normal(experts, hidden, intermediate, scale=intermediate**-0.5)
    w_router = normal(experts, hidden, scale=hidden**-0.5)
    candidate, baseline = load(name), load(BASELINE)
    if getattr(candidate, "rounds_logits", False):
        w_router = _tell_apart(x, experts, generator)
    if getattr(candidate, "routes", False):
        def reference(x, w_router, gate_up, down, top_k):
            ids, weights, _, _ = model.route(x, w_router, top_k)
            return (baseline(x, ids, weights, gate_up, down),)

        wanted = _layer_results(reference, x, w_router, gate_up, down, do, top_k)
        got = _layer_results(candidate, x, w_router, gate_up, down, do, top_k)
    else:
        ids, weights, _, _ = (t.detach() for t in model.route(x, w_router, top_k))
        wanted = results(baseline, x, ids, weights, gate_up, down, do)
        got = results(candidate, x, ids, weights, gate_up, down, do)
    return {key: ((got[key].float() - wanted[key].float()).norm() / wanted[key].float().norm()).item()
            for key in wanted}


def checked(name: str, *sizes, **options) -> dict:
    """`errors`, or ValueError where one is above TOLERANCE or not a number."""
    apart = errors(name, *sizes, **options)
    bad = {key: value for key, value in apart.items() if not value <= TOLERANCE}
    if bad:
        raise ValueError(f"{name}: {', '.join(f'{key} is {value:.1e} off' for key, value in bad.items())} from "
                         f"{BASELINE}; more than {TOLERANCE:.0e} is another result, which is not timed")
    return apart

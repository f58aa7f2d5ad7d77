# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's own MoE layer on two CPU ranks that share its experts, for megatron_test.py.

    megatron_program.py JSON

JSON: dispatcher (alltoall or allgather), experts (list of stock, tessera, zeros), results. Rank 0 writes, for each, the
losses of a few steps of training the layer to a target.
"""

import contextlib
import json
import os
import pathlib
import sys

import frameworks
import torch
from torch import distributed

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, STEPS = 32, 16, 8, 2, 5


class Nothing:
    """A stream or an event of a machine that has none."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, _name):
        return lambda *_, **__: Nothing()


def shim_the_cpu() -> None:
    """What megatron-core asks of torch.cuda; a random state of GPUs is not needed where weights are made on the CPU."""
    torch.cuda.Stream = torch.cuda.Event = Nothing
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.current_stream = lambda *_: Nothing()
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda *_: None
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None
    # Else split sizes stay tensors, which gloo does not take.
    token_dispatcher.maybe_move_tensor_to_cpu = (
        lambda tensor, as_numpy=False, record_stream=False:
        tensor.cpu().numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor)


def losses(kind: str, dispatcher: str) -> list:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tessera.integrations import megatron

    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, num_moe_experts=EXPERTS, moe_router_topk=TOP_K,
        moe_ffn_hidden_size=INTERMEDIATE, ffn_hidden_size=INTERMEDIATE, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, bias_activation_fusion=False,
        expert_model_parallel_size=2, moe_token_dispatcher_type=dispatcher, moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0, use_cpu_initialization=True, moe_grouped_gemm=False, params_dtype=torch.float32)
    stock = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    experts = stock.keywords["submodules"].experts if kind == "stock" else megatron.Experts
    layer = MoELayer(config, submodules=MoESubmodules(experts=experts), layer_number=1,
                     pg_collection=ProcessGroupCollection.use_mpu_process_groups(), name="decoder.layers.0.mlp")
    rank = distributed.get_rank()
    with torch.no_grad():
        layer.router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1)) / 2)
        for i in range(EXPERTS // 2):
            generator = torch.Generator().manual_seed(100 + rank * EXPERTS // 2 + i)
            up = torch.randn(2 * INTERMEDIATE, HIDDEN, generator=generator) / HIDDEN**0.5
            down = torch.randn(HIDDEN, INTERMEDIATE, generator=generator) / INTERMEDIATE**0.5
            if kind == "zeros":
                down.zero_()
            if kind == "stock":
                expert = layer.experts.local_experts[i]
                expert.linear_fc1.weight.copy_(up)
                expert.linear_fc2.weight.copy_(down)
            else:
                layer.experts.w_up[i].copy_(up)
                layer.experts.w_down[i].copy_(down)
    generator = torch.Generator().manual_seed(7 + rank)
    x, target = (torch.randn(12, 2, HIDDEN, generator=generator) for _ in range(2))
    optimizer, found = torch.optim.SGD(layer.parameters(), lr=0.5), []
    if kind == "zeros":
        optimizer = torch.optim.SGD([layer.router.weight], lr=0.5)
    for _ in range(STEPS):
        output, bias = layer(x)
        assert bias is None
        loss = (output - target).square().mean()
        loss.backward()
        distributed.all_reduce(layer.router.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        distributed.all_reduce(mean)
        found.append(mean.item() / 2)
    return found


def main(case: dict) -> None:
    shim_the_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    results = {kind: losses(kind, case["dispatcher"]) for kind in case["experts"]}
    if os.environ["RANK"] == "0":
        pathlib.Path(case["results"]).write_text(json.dumps(results))
    frameworks.end()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

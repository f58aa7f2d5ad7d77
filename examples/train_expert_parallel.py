#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The transformer of train_transformer.py with its experts spread over the GPUs of a host, and everything else under
FSDP2.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 examples/train_expert_parallel.py --text README.md docs/numerics.md

One process per GPU, or on the CPU with gloo where there is none. Every rank takes its part of each batch and owns E/P
of the experts of each layer; rows go to the owners of their experts and back. --accumulate N makes N passes for each
step of the optimizer, --checkpoint saves the inputs of blocks alone and makes the rest again in backward. Then rank 0
alone trains the same model from the same weights on whole batches, and prints how far the losses are apart and how many
times as fast the ranks were together. Experts of a real size show what that is on GPUs, where the defaults are too
small to fill them:

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 examples/train_expert_parallel.py --text README.md docs/*.md \
        --steps 25 --hidden 4096 --heads 32 --layers 2 --context 1024 --batch 16 --experts 32 --top-k 4 \
        --intermediate 2048
"""

import argparse
import functools
import os
import pathlib
import sys

import tessera
import torch
import torch.distributed as dist
import train_transformer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint


class SpreadMoE(tessera.MoE):
    """tessera.MoE of which this rank has its own experts. spread: the tessera.ExpertParallel session of all layers."""

    def __init__(self, *sizes, spread, **options):
        super().__init__(*sizes, **options)  # as one GPU would make it
        self.spread = spread
        for name in ("w_up", "w_down"):
            whole = getattr(self, name)
            setattr(self, name, nn.Parameter(whole.data.chunk(dist.get_world_size())[dist.get_rank()].clone()))

    def forward(self, x, return_router: bool = False):
        rows = x.reshape(-1, x.shape[-1])
        ids, scores, logits = tessera.route(rows, self.w_router, top_k=self.top_k, router=self.router)
        o = self.spread(rows, ids, scores, self.w_up, self.w_down).view(x.shape)
        # bincount would have the host wait for the largest id.
        counts = torch.zeros(logits.shape[1], dtype=torch.int32, device=ids.device)
        counts.scatter_add_(0, ids.flatten().long(), torch.ones_like(counts[:1]).expand(ids.numel()))
        router = tessera.RouterOutput(logits, ids, scores.detach(), counts, counts, None)
        return (o, router) if return_router else o


def shard_the_rest(model: nn.Module, mesh) -> tuple[list, list]:
    """Puts all but the experts under FSDP2: (parameters of experts, all others). They are plain tensors and DTensors:
    give them to optimizers of their own, as one step takes one kind.

    It is one unit, gathered before the first block and reduced behind the last: block by block FSDP would gather beside
    a pass over GPUs, which takes all SMs and waits for the other ranks, as the gathering does."""
    experts = [p for name, p in model.named_parameters() if name.endswith(("w_up", "w_down"))]
    fully_shard(model, mesh=mesh, ignored_params=set(experts), reshard_after_forward=False)
    spread = {id(p) for p in experts}
    return experts, [p for p in model.parameters() if id(p) not in spread]


def clip(experts: list, others: list, most: float = 1.0) -> None:
    """Clips the gradients of the mean loss of all ranks as one vector. Experts have sums over all ranks. It reads each
    gradient twice and writes it once, and no host waits for the norm."""
    ranks = dist.get_world_size()
    squares = (nn.utils.get_total_norm([p.grad for p in experts]) / ranks).square()
    dist.all_reduce(squares)
    of_others = nn.utils.get_total_norm([p.grad for p in others]).full_tensor()
    scale = (most / ((squares + of_others.square()).sqrt() + 1e-6)).clamp(max=1)
    for parameter in experts:
        parameter.grad *= scale / ranks
    for parameter in others:
        parameter.grad.to_local().mul_(scale)


def checkpoint_blocks(model: nn.Module) -> None:
    """Blocks save their inputs alone. Before shard_the_rest, whose gathering is around what runs again."""
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def train(text: bytes, *, spread: bool, steps: int, device: torch.device, accumulate: int = 1,
          again: bool = False, report=print, **changes) -> tuple[list[float], float]:
    """Mean losses by step, and tokens per second. spread: over all ranks; else on this one alone, on whole batches.
    changes: of train_transformer.SIZES; batch is that of all ranks together."""
    torch.manual_seed(0)
    sizes = train_transformer.SIZES | changes
    batch, context = sizes.pop("batch"), sizes["context"]
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if spread else (0, 1)
    parts = ranks * accumulate if spread else 1
    if batch % parts:
        raise ValueError(f"batch={batch}: a multiple of {parts}, which is ranks times --accumulate, as parts are equal")
    moe, session = tessera.MoE, None
    if spread:
        shape = {name: sizes[name] for name in ("hidden", "intermediate", "experts", "top_k")}
        session = tessera.ExpertParallel(max_tokens=batch // parts * context, training=True, device=device, **shape)
        moe = functools.partial(SpreadMoE, spread=session)  # all layers share it: their weights are arguments
    model = train_transformer.Transformer(moe, **sizes).to(device)
    if again:
        checkpoint_blocks(model)
    experts, others = [], list(model.parameters())
    if spread:
        experts, others = shard_the_rest(model, init_device_mesh(device.type, (ranks,)))
    optimizers = [torch.optim.AdamW(params, betas=(0.9, 0.95)) for params in (others, experts) if params]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    source = train_transformer.batches(data, context, batch, torch.Generator().manual_seed(0))
    losses, pace = [], train_transformer.Pace(device)
    for step in range(1, steps + 1):
        rate = train_transformer.learning_rate(step, steps, sizes["hidden"])
        tokens, targets = (t.chunk(parts) for t in next(source))
        for optimizer in optimizers:
            train_transformer.set_learning_rate(optimizer, rate)
            optimizer.zero_grad()
        mean = torch.zeros((), device=device)
        passes = range(rank * accumulate, (rank + 1) * accumulate) if spread else range(1)
        for part in passes:
            if spread:  # gradients of the rest meet once
                model.set_requires_gradient_sync(part == passes[-1])
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                # Without auxiliary losses: those of a batch are not the mean of those of its parts.
                loss, _, _ = model(tokens[part], targets[part])
            loss = loss / len(passes)
            loss.backward()
            mean += loss.detach()
        if spread:
            clip(experts, others)
            dist.all_reduce(mean)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            if spread and optimizer is optimizers[0] and step < steps:
                model.unshard(async_op=True)  # beside the step of the experts
        losses.append(mean / ranks)
        pace.mark()
        if rank == 0 and step % max(steps // 5, 1) == 0:
            report(f"{ranks} ranks: step {step}/{steps}  loss {losses[-1].item():.3f}")
    losses = torch.stack(losses).tolist()
    speed = pace.tokens_per_second(batch * context)
    if rank == 0:
        held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
        report(f"{ranks} ranks: {speed:.0f} tokens/s, {held} parameters on each")
    if session is not None:
        session.check()
        dist.barrier()
        session.close()
    return losses, speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", nargs="+", type=pathlib.Path, required=True, help="files to learn from")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--accumulate", type=int, default=1, help="passes for each step of the optimizer")
    parser.add_argument("--checkpoint", dest="again", action="store_true", help="activation checkpointing of blocks")
    for name, default in train_transformer.SIZES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    arguments = vars(parser.parse_args())
    text = b"\n".join(path.read_bytes() for path in arguments.pop("text"))
    on_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    ours, speed = train(text, spread=True, device=device, **arguments)
    if dist.get_rank() == 0:
        losses, alone = train(text, spread=False, device=device, **arguments)
        apart = torch.tensor(ours) - torch.tensor(losses)
        print(f"losses differ by {apart.abs().max():.1e} at most, {apart.mean().abs():.1e} on average")
        print(f"{dist.get_world_size()} ranks: {speed / alone:.2f} times as many tokens/s as one")
    dist.barrier()
    dist.destroy_process_group()
    if not on_gpu:  # as in train_fsdp.py: gloo's threads outlive the group and need the interpreter
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()

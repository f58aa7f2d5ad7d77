#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The transformer of train_transformer.py with its experts spread over the GPUs of a host, everything else on each.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 examples/train_expert_parallel.py --text README.md docs/numerics.md

One process per GPU. Every rank takes its part of each batch and owns E/P of the experts of each layer; rows go to the
owners of their experts and back. Then rank 0 alone trains the same model from the same weights on whole batches, which
at this size is faster, and prints how far the losses are apart.
"""

import argparse
import functools
import os
import pathlib

import tessera
import torch
import torch.distributed as dist
import train_transformer
from torch import nn


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
        counts = torch.bincount(ids.flatten(), minlength=logits.shape[1]).int()
        router = tessera.RouterOutput(logits, ids, scores.detach(), counts, counts, None)
        return (o, router) if return_router else o


def reduce_gradients(model: nn.Module) -> None:
    """To those of the mean loss of all ranks, and clips them as one vector. Experts have the sum over all ranks."""
    ranks, spread = dist.get_world_size(), []
    for name, parameter in model.named_parameters():
        if name.endswith(("w_up", "w_down")):
            spread.append(parameter)
        else:
            dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    squares = sum(p.grad.square().sum() for p in spread)
    dist.all_reduce(squares)
    owned = {id(p) for p in spread}
    norm = (squares + sum(p.grad.square().sum() for p in model.parameters() if id(p) not in owned)).sqrt()
    for parameter in model.parameters():
        parameter.grad *= (1 / (norm + 1e-6)).clamp(max=1)


def train(text: bytes, *, spread: bool, steps: int, report=print, **changes) -> list[float]:
    """Mean losses by step. spread: over all ranks; else on this one alone, on whole batches. changes: of
    train_transformer.SIZES; batch is that of all ranks together."""
    torch.manual_seed(0)
    sizes = train_transformer.SIZES | changes
    batch, context = sizes.pop("batch"), sizes["context"]
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if spread else (0, 1)
    moe, session = tessera.MoE, None
    if spread:
        shape = {name: sizes[name] for name in ("hidden", "intermediate", "experts", "top_k")}
        session = tessera.ExpertParallel(max_tokens=-(-batch // ranks) * context, training=True, **shape)
        moe = functools.partial(SpreadMoE, spread=session)
    model = train_transformer.Transformer(moe, **sizes).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to("cuda")
    source = train_transformer.batches(data, context, batch, torch.Generator().manual_seed(0))
    losses, pace = [], train_transformer.Pace(torch.device("cuda"))
    for step in range(1, steps + 1):
        rate = train_transformer.learning_rate(step, steps, sizes["hidden"])
        train_transformer.set_learning_rate(optimizer, rate)
        tokens, targets = (t.chunk(ranks)[rank] for t in next(source))
        with torch.autocast("cuda", torch.bfloat16):
            loss, auxiliary, _ = model(tokens, targets)
        optimizer.zero_grad()
        (loss + auxiliary).backward()
        mean = loss.detach().float().clone()
        if spread:
            reduce_gradients(model)
            dist.all_reduce(mean)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(mean / ranks)
        pace.mark()
        if rank == 0 and step % max(steps // 5, 1) == 0:
            report(f"{ranks} GPUs: step {step}/{steps}  loss {losses[-1].item():.3f}")
    losses = torch.stack(losses).tolist()
    if rank == 0:
        speed = pace.tokens_per_second(batch * context)
        report(f"{ranks} GPUs: {speed:.0f} tokens/s, {sum(p.numel() for p in model.parameters())} parameters on each")
    if session is not None:
        session.check()
        dist.barrier()
        session.close()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", nargs="+", type=pathlib.Path, required=True, help="files to learn from")
    parser.add_argument("--steps", type=int, default=100)
    for name, default in train_transformer.SIZES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    arguments = vars(parser.parse_args())
    text = b"\n".join(path.read_bytes() for path in arguments.pop("text"))
    if not torch.cuda.is_available():
        parser.error("experts over several GPUs need GPUs; torch sees none (train_transformer.py runs on the CPU)")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    ours = torch.tensor(train(text, spread=True, **arguments))
    if dist.get_rank() == 0:
        apart = ours - torch.tensor(train(text, spread=False, **arguments))
        print(f"losses differ by {apart.abs().max():.4f} at most, {apart.mean().abs():.4f} on average")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

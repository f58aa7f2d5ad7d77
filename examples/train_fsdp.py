#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The transformer of train_transformer.py under FSDP2: parameters, gradients and optimizer state are sharded.

    torchrun --nproc-per-node 2 examples/train_fsdp.py --text README.md docs/numerics.md

One process per GPU, or on the CPU with gloo where there is none. Every rank takes its part of each batch. Trains with
Tessera's experts and with torch's own from the same weights on the same text (--implementation for one of them), and
prints of each its losses, tokens per second without the first steps, by the slowest rank, and the memory of the rank
that needs most.
"""

import argparse
import gc
import os
import pathlib
import sys

import torch
import torch.distributed as dist
import train_transformer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def train(text: bytes, implementation: str, *, steps: int, device: torch.device, report=print, **changes) -> dict:
    """changes: of train_transformer.SIZES; batch is that of all ranks together."""
    torch.manual_seed(0)
    gc.collect()  # an earlier model's cycles would count as memory of this one
    rank, ranks, on_gpu = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    sizes = train_transformer.SIZES | changes
    batch, context = sizes.pop("batch"), sizes["context"]
    mesh = init_device_mesh(device.type, (ranks,))
    # On a GPU layers compute in bf16; gradients are reduced and weights are kept in fp32.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if on_gpu \
        else MixedPrecisionPolicy()
    model = train_transformer.Transformer(train_transformer.IMPLEMENTATIONS[implementation], **sizes).to(device)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    source = train_transformer.batches(data, context, batch, torch.Generator().manual_seed(0))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses, pace = [], train_transformer.Pace(device)
    for step in range(1, steps + 1):
        rate = train_transformer.learning_rate(step, steps, sizes["hidden"])
        train_transformer.set_learning_rate(optimizer, rate)
        tokens, targets = (t.chunk(ranks)[rank] for t in next(source))
        loss, auxiliary, _ = model(tokens, targets)
        optimizer.zero_grad()
        (loss + auxiliary).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(mean / ranks)
        pace.mark()
        if rank == 0 and step % max(steps // 5, 1) == 0:
            report(f"{implementation}: step {step}/{steps}  loss {losses[-1].item():.3f}")
    losses = torch.stack(losses).tolist()
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    worst = torch.tensor([-pace.tokens_per_second(batch * context), peak], dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    speed, peak = -worst[0].item(), int(worst[1].item())
    if rank == 0:
        report(f"{implementation}: {speed:.0f} tokens/s on {ranks} ranks"
               + (f", at most {peak / 2**20:.0f} MiB in use on one of them" if on_gpu else ""))
    return {"losses": losses, "tokens_per_second": speed, "peak_bytes": peak}


def compare(text: bytes, implementations: list[str], **options) -> dict:
    """Results by implementation; rank 0 prints how far their losses are apart."""
    results = {name: train(text, name, **options) for name in implementations}
    ours, *others = (torch.tensor(result["losses"]) for result in results.values())
    for other in others if dist.get_rank() == 0 else ():
        apart = ours - other
        print(f"losses differ by {apart.abs().max():.4f} at most, {apart.mean().abs():.4f} on average")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", nargs="+", type=pathlib.Path, required=True, help="files to learn from")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--implementation", choices=train_transformer.IMPLEMENTATIONS)
    for name, default in train_transformer.SIZES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    arguments = vars(parser.parse_args())
    text = b"\n".join(path.read_bytes() for path in arguments.pop("text"))
    chosen = arguments.pop("implementation")
    rank, on_gpu = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    device = torch.device(f"cuda:{rank}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    compare(text, [chosen] if chosen else ["tessera", "eager"], device=device, **arguments)
    dist.barrier()
    dist.destroy_process_group()
    if not on_gpu:
        # torch's caches keep the group, so that gloo's threads live on. They let go of the last collective's tensors
        # after it is reported done, and need the interpreter for it: one that is still at it when the interpreter
        # ends takes the process down. So the process ends without ending the interpreter.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()

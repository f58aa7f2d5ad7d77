#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The transformer of train_transformer.py with its experts spread over several hosts, and everything else under HSDP:
sharded within a host, replicated over the hosts.

    torchrun --nproc-per-node 4 examples/train_hosts.py --hosts 2 --text README.md docs/numerics.md

This pretends two hosts of two ranks each on one machine, with gloo where there is no GPU. On real hosts leave --hosts
out, and start it on each of them (docs/several-hosts.md). Every rank takes its part of each batch. Then rank 0 alone
trains the same model from the same weights on whole batches, and prints how far the losses are apart.

With --save it leaves checkpoints there, and goes on from the newest one that it finds, also with another number of
hosts or ranks.
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
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from train_expert_parallel import SpreadMoE, clip, shard_the_rest


class Checkpoints:
    """Weights and moments by name, experts by their global numbers: any number of hosts and ranks reads them."""

    def __init__(self, folder: pathlib.Path, model: nn.Module, optimizer, device: torch.device):
        self.folder, self.model, self.optimizer = folder, model, optimizer
        self.mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    def state(self) -> dict:
        """The tensors themselves, which loading fills."""
        state = {}
        for name, parameter in self.model.named_parameters():
            moments = self.optimizer.state[parameter]
            state[f"{name}.step"] = moments["step"]
            for kind, tensor in (("weight", parameter.detach()), ("exp_avg", moments["exp_avg"]),
                                 ("exp_avg_sq", moments["exp_avg_sq"])):
                state[f"{name}.{kind}"] = tensor if isinstance(tensor, DTensor) else DTensor.from_local(
                    tensor, self.mesh, [Shard(0)], run_check=False)
        return state

    def save(self, step: int) -> None:
        checkpoint.save(self.state(), checkpoint_id=self.folder / f"step-{step:08}")

    def resume(self) -> int:
        """The step of the newest checkpoint that was written to its end, 0 without one."""
        whole = sorted(path.parent for path in self.folder.glob("step-*/.metadata"))
        if not whole:
            return 0
        train_transformer.set_learning_rate(self.optimizer, 0.0)
        for parameter in self.model.parameters():  # a step that changes nothing makes the moments
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        checkpoint.load(self.state(), checkpoint_id=whole[-1])
        return int(whole[-1].name.removeprefix("step-"))


def train(text: bytes, *, spread: bool, hosts: int, steps: int, device: torch.device, report=print,
          overlap: bool = False, save: pathlib.Path | None = None, save_every: int = 10, **changes) -> list[float]:
    """Losses by step, from that of a checkpoint on. spread: over all ranks; else on this one alone, on whole batches.
    changes: of train_transformer.SIZES; batch is that of all ranks together."""
    torch.manual_seed(0)
    sizes = train_transformer.SIZES | changes
    batch, context = sizes.pop("batch"), sizes["context"]
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if spread else (0, 1)
    if batch % ranks:
        raise ValueError(f"batch={batch}: a multiple of the {ranks} ranks, which take equal parts of it")
    moe, session = tessera.MoE, None
    if spread:
        shape = {name: sizes[name] for name in ("hidden", "intermediate", "experts", "top_k")}
        session = tessera.ExpertParallel(max_tokens=batch // ranks * context, training=True, hosts=hosts,
                                         overlap=overlap and hosts > 1, device=device, **shape)
        moe = functools.partial(SpreadMoE, spread=session)
    model = train_transformer.Transformer(moe, **sizes).to(device)
    experts, others = [], list(model.parameters())
    if spread:
        mesh = init_device_mesh(device.type, (hosts, ranks // hosts), mesh_dim_names=("hosts", "local"))
        experts, others = shard_the_rest(model, mesh)
    groups = [{"params": params} for params in (experts, others) if params]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    source = train_transformer.batches(data, context, batch, torch.Generator().manual_seed(0))
    losses, begun = [], 0
    if save is not None:
        checkpoints = Checkpoints(save, model, optimizer, device)
        begun = checkpoints.resume()
        if begun and rank == 0:
            report(f"goes on from step {begun} on {hosts} hosts")
        for _ in range(begun):
            next(source)
    for step in range(begun + 1, steps + 1):
        rate = train_transformer.learning_rate(step, steps, sizes["hidden"])
        train_transformer.set_learning_rate(optimizer, rate)
        tokens, targets = (t.chunk(ranks)[rank] for t in next(source))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            # Without auxiliary losses: those of a batch are not the mean of those of its parts.
            loss, _, _ = model(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        mean = loss.detach().float().clone()
        if spread:
            clip(experts, others)
            dist.all_reduce(mean)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(mean / ranks)
        if rank == 0 and step % max(steps // 5, 1) == 0:
            report(f"{f'{ranks} ranks' if spread else 'alone'}: step {step}/{steps}  loss {losses[-1].item():.3f}")
        if save is not None and step % save_every == 0:
            checkpoints.save(step)
            if rank == 0:
                report(f"saved step {step}")
    if session is not None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        session.check()
        dist.barrier()
        session.close()
    return torch.stack(losses).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", nargs="+", type=pathlib.Path, required=True, help="files to learn from")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hosts", type=int, help="pretend so many hosts; else as many as torchrun was started on")
    parser.add_argument("--overlap", action="store_true", help="rows cross between hosts while experts multiply")
    parser.add_argument("--save", type=pathlib.Path, help="folder of checkpoints")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    for name, default in train_transformer.SIZES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    arguments = vars(parser.parse_args())
    text = b"\n".join(path.read_bytes() for path in arguments.pop("text"))
    local_rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    of_hosts = {name: arguments.pop(name) for name in ("overlap", "save", "save_every")}
    hosts = arguments.pop("hosts") or ranks // int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{local_rank}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        # NCCL goes by this too: pretended hosts reach each other over the network, not by NVLink.
        if hosts != ranks // int(os.environ["LOCAL_WORLD_SIZE"]):
            os.environ["NCCL_HOSTID"] = f"host{int(os.environ['RANK']) * hosts // ranks}"
    dist.init_process_group("nccl" if on_gpu else "gloo")
    ours = torch.tensor(train(text, spread=True, hosts=hosts, device=device, **of_hosts, **arguments))
    if dist.get_rank() == 0:
        alone = torch.tensor(train(text, spread=False, hosts=1, device=device, **arguments))
        apart = ours - alone[len(alone) - len(ours):]
        print(f"losses differ by {apart.abs().max():.1e} at most, {apart.mean().abs():.1e} on average")
    dist.barrier()
    dist.destroy_process_group()
    if not on_gpu:  # as in train_fsdp.py: gloo's threads outlive the group and need the interpreter
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()

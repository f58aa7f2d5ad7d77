#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times what FSDP sends for a layer, alone and beside compute, and compute beside that.

    torchrun --nproc-per-node 4 communication.py --config 7B-n256 --sequences 5 --out communication.json

gather is the layer in bf16, reduce its gradient in fp32, both the two of backward, one after the other on the one
communicator that FSDP2 has. GEMMs are those of the queries, keys and values; the copy reads and writes x. From these a
step's rates follow: bytes/s of a link, and how much slower compute is while NCCL holds some of the SMs and of the
memory's bandwidth. Times are medians of the slowest rank.
"""

import argparse
import json
import pathlib
import statistics
import time

import model as models
import torch
import torch.distributed as dist
import training


class Mark:
    """A point on a stream, or in time on a CPU."""

    def __init__(self, stream):
        self.event = torch.cuda.Event(enable_timing=True) if stream is not None else None
        self.time = time.perf_counter() if stream is None else 0.0
        if stream is not None:
            self.event.record(stream)

    def until(self, other) -> float:
        """Milliseconds; the device has to be synchronised before."""
        return 1e3 * (other.time - self.time) if self.event is None else self.event.elapsed_time(other.event)


class Layer:
    """What is sent and computed for one layer."""

    def __init__(self, c: models.Configuration, here: training.Ranks, tokens: int):
        def filled(*size, dtype=torch.bfloat16):
            return torch.ones(size, dtype=dtype, device=here.device)

        self.here, self.c, self.tokens = here, c, tokens
        self.parameters = -(-c.layer_parameters() // here.count) * here.count
        part = self.parameters // here.count
        self.weights, self.shard = filled(self.parameters), filled(part)
        self.gradient, self.reduced = filled(self.parameters, dtype=torch.float32), filled(part, dtype=torch.float32)
        self.x = filled(tokens, c.hidden)
        self.qkv = filled(c.hidden, (c.heads + 2 * c.kv_heads) * c.head_size)
        self.rows, self.copied = filled(tokens, self.qkv.shape[1]), torch.empty_like(self.x)

    def bytes_sent(self) -> dict:
        """By one rank."""
        share = self.parameters * (self.here.count - 1) / self.here.count
        return {"gather": 2 * share, "reduce": 4 * share, "both": 6 * share}

    def gather(self):
        return [dist.all_gather_into_tensor(self.weights, self.shard, async_op=True)]

    def reduce(self):
        return [dist.reduce_scatter_tensor(self.reduced, self.gradient, async_op=True)]

    def both(self):
        return self.gather() + self.reduce()

    def gemm(self):
        torch.mm(self.x, self.qkv, out=self.rows)

    def copy(self):
        self.copied.copy_(self.x)


def series(here, collectives, sends: int, compute, computes: int) -> tuple[float, float]:
    """Milliseconds of `sends` collectives and of `computes` calls that start together; 0 for none of them."""
    current = torch.cuda.current_stream() if here.on_gpu else None
    other = torch.cuda.Stream() if here.on_gpu else None
    here.synchronize()
    dist.barrier()
    start = Mark(current)
    works = [work for _ in range(sends) for work in collectives()]
    if other is not None:
        other.wait_event(start.event)
        with torch.cuda.stream(other):
            for _ in range(computes):
                compute()
    else:
        for _ in range(computes):
            compute()
    computed = Mark(other)
    for work in works:
        work.wait()
    sent = Mark(current)
    here.synchronize()
    times = here.worst(start.until(sent) if sends else 0.0, start.until(computed) if computes else 0.0)
    return tuple(times)


def median(here, repeats: int, *arguments) -> tuple[float, float]:
    series(here, *arguments)
    times = [series(here, *arguments) for _ in range(repeats)]
    return tuple(statistics.median(column) for column in zip(*times, strict=True))


def measure(here, layer: Layer, sends: int, repeats: int) -> dict:
    """Milliseconds of one collective and of one call, alone and beside each other."""
    found = {"alone_ms": {}, "beside": []}
    for name in ("gather", "reduce", "both"):
        found["alone_ms"][name] = median(here, repeats, getattr(layer, name), sends, None, 0)[0] / sends
    for name in ("gemm", "copy"):
        found["alone_ms"][name] = median(here, repeats, None, 0, getattr(layer, name), 20)[1] / 20
    for collective in ("gather", "reduce", "both"):
        for compute in ("gemm", "copy"):
            calls = max(1, round(sends * found["alone_ms"][collective] / found["alone_ms"][compute]))
            arguments = (getattr(layer, collective), getattr(layer, compute))
            # A time beside the other is one in which the other does not end: there is half as much again of it.
            slow_compute = median(here, repeats, arguments[0], -(-3 * sends // 2), arguments[1], calls)[1] / calls
            slow_sends = median(here, repeats, arguments[0], sends, arguments[1], 2 * calls)[0] / sends
            found["beside"].append({
                "collective": collective, "compute": compute, "collective_ms": slow_sends, "compute_ms": slow_compute,
                "collective_times_slower": slow_sends / found["alone_ms"][collective],
                "compute_times_slower": slow_compute / found["alone_ms"][compute]})
    sent = layer.bytes_sent()
    found["bytes_per_s"] = {name: sent[name] / 1e-3 / found["alone_ms"][name] for name in sent}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="7B-n256", choices=models.CONFIGURATIONS)
    parser.add_argument("--sequences", type=int, default=5, help="whose tokens the compute beside has")
    parser.add_argument("--sends", type=int, default=8, help="collectives of a time")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON file")
    a = parser.parse_args()
    for name in ("sequences", "sends", "repeats"):
        if getattr(a, name) < 1:
            raise training.Stop(f"--{name} {getattr(a, name)}: must be at least 1")
    c = models.CONFIGURATIONS[a.config]
    with training.ranks() as here:
        if here.count < 2:
            raise training.Stop("1 process: has nobody to send to; start two or more with torchrun")
        layer = Layer(c, here, a.sequences * c.context)
        found = {"config": a.config, "ranks": here.count, "device": training.device_name(here),
                 "torch": torch.__version__, "layer_parameters": c.layer_parameters(),
                 "tokens": layer.tokens, "bytes_sent": layer.bytes_sent(), **measure(here, layer, a.sends, a.repeats)}
        if here.rank == 0:
            a.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        here.say(f"{a.config}, a layer over {here.count} x {found['device']}: " + ", ".join(
            f"{name} {ms:.3f} ms" for name, ms in found["alone_ms"].items()) + "; GB/s of a rank: " + ", ".join(
            f"{name} {rate / 1e9:.0f}" for name, rate in found["bytes_per_s"].items()))
        for pair in found["beside"]:
            here.say(f"{pair['collective']} beside {pair['compute']}: {pair['collective_times_slower']:.2f} times as "
                     f"slow; {pair['compute']} beside it {pair['compute_times_slower']:.2f}")


if __name__ == "__main__":
    training.end(main)

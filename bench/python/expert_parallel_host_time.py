#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Host time of a training step, forward and backward, of one layer whose experts are spread over the GPUs of a host.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 bench/python/expert_parallel_host_time.py [--out FILE]

Each number is of rank 0, in us, the median of 300 steps, the GPU idle when a step begins:
    alone     wall time from the call of forward to the end of backward's, each step behind a barrier;
    in turn   the same without the barrier: this rank's GPU alone is idle;
    thread    the same with backward on the thread that asks for it: torch.autograd.set_multithreading_enabled(False);
    stacked   what a layer more takes, in turn: five layers less one of them, divided by four, so that the handing over
              between torch's threads, once in a step, is in none of it;
    cpu       CPU time of all threads of the process in a step, steps following one another, the best of ten runs;
    replay    wall time of one replay of the captured step, with max_rows.
A pass without max_rows asks for its number of rows at its end, which is time of the GPU: "alone" and "in turn" are of
its own, too. The captured step is replayed 1,000 times, and all results of all replays have the bits of the first.
"""

import argparse
import itertools
import json
import os
import statistics
import time

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import tessera  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

STEPS, REPLAYS, LAYERS = 300, 1000, 5


def median_us(step, synchronize) -> float:
    times = []
    for _ in range(STEPS):
        synchronize()
        begin = time.perf_counter_ns()
        step()
        times.append(time.perf_counter_ns() - begin)
    return round(1e-3 * statistics.median(times), 1)


def cpu_us(step) -> float:
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.process_time()
        for _ in range(30):
            step()
        best = min(best, (time.process_time() - begin) / 30)
    return round(1e6 * best, 1)


def barrier() -> None:
    dist.barrier()
    torch.cuda.synchronize()


def captured(step) -> tuple:
    """(graph, its results)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # passes of a layer are in the order of one stream
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


@torch.no_grad()
def equal_replays(graph, results) -> bool:
    graph.replay()
    first = [t.clone() for t in results]
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPLAYS):
        for t in results:
            t.zero_()
        graph.replay()
        for a, b in zip(results, first, strict=True):
            differ += (a != b).sum()
    return differ.item() == 0 and all(bool(t.any()) for t in first)


def measure(tokens: int, bounded: bool) -> dict:
    d, n, experts, top_k = 2048, 768, 128, 8  # Qwen3-30B
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    x, d_o = (torch.randn(tokens, d, **options) for _ in range(2))
    rows = min(ranks * tokens * top_k, tokens * top_k * 3 // 2 + 1024)
    layer = tessera.ExpertParallel(max_tokens=tokens, hidden=d, intermediate=n, experts=experts, top_k=top_k,
                                   training=True, max_rows=rows if bounded else None)

    def tensors() -> tuple:
        scores, ids = torch.rand(tokens, experts, device="cuda").topk(top_k)
        weights = (torch.randn(experts // ranks, *shape, **options) / 32 for shape in ((2 * n, d), (d, n)))
        return ids.int(), *[t.requires_grad_() for t in (scores, *weights)]

    layers = [tensors() for _ in range(LAYERS)]

    def steps_of(count: int):
        leaves = [x.requires_grad_(), *[t for _, *differentiable in layers[:count] for t in differentiable]]

        def step():
            o = x
            for of_layer in layers[:count]:
                o = layer(o, *of_layer)
            return (o, *torch.autograd.grad(o, leaves, d_o))

        for _ in range(20):
            step()
        return step

    step, synchronize = steps_of(1), torch.cuda.synchronize
    row = {"tokens": tokens, "max_rows": rows if bounded else None, "alone_us": median_us(step, barrier),
           "in_turn_us": median_us(step, synchronize), "cpu_us": cpu_us(step)}
    with torch.autograd.set_multithreading_enabled(False):
        row["thread_us"] = median_us(step, synchronize)
    several = steps_of(LAYERS)
    row["stacked_us"] = round((median_us(several, synchronize) - row["in_turn_us"]) / (LAYERS - 1), 1)
    if bounded:
        graph, results = captured(step)
        barrier()
        row["replay_us"] = median_us(graph.replay, torch.cuda.synchronize)
        row["equal"] = equal_replays(graph, results)
        torch.cuda.synchronize()
        del graph, results
    layer.check()
    dist.barrier()
    layer.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rows = []
    for tokens, bounded in itertools.product(arguments.tokens, (True, False)):
        rows.append(measure(tokens, bounded))
        if dist.get_rank() == 0:
            print(rows[-1], flush=True)
    if dist.get_rank() == 0 and arguments.out:
        result = {"device": torch.cuda.get_device_name(), "gpus": dist.get_world_size(),
                  "torch": torch.__version__, "config": "Qwen3-30B", "rows": rows}
        with open(arguments.out, "w", encoding="utf-8") as file:
            file.write(json.dumps(result, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Experts over the GPUs of a host: NCCL all-to-all around torch's grouped_mm, cuBLAS, Tessera, in one process group.

usage: NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node N expert_parallel.py [--config NAME,NAME] [--impl NAME,NAME]
                                                                       [--pass forward,training]
                                                                       [--behind barrier,stream] [--tokens N,N]
                                                                       [--rounds N] [--out FILE]

nccl-grouped-mm is the usual layer: sort rows by expert, exchange counts, all-to-all, sort by expert again, grouped_mm,
act, grouped_mm, back the same way, weight and add per token. Counts pass through the host, as torch's call takes its
splits from there. nccl-all-to-all is the exchange of the rows alone, there and back. cublas-bmm is the two GEMMs alone,
on equally many rows for every expert and without activation: what an exchange may hide behind. tessera-in-place is
tessera on an x that lies in the window; tessera-partial-combine may send weighted sums back
where the link would decide. liger-cute, where asked for, is the forward pass of the package
liger-cute-kernels, which takes swiglu and scores in bf16. T is that of each GPU; a time is that of the slowest rank. o
is checked against the same experts on one GPU.

gpt-oss has biases, which cublas-bmm leaves out.

training is a forward and a backward pass, with gradients of x, scores, weights and biases, which are checked, of
liger-cute that of x. tessera-save-x makes h again in backward; with tessera-bound no host waits for the number of rows,
as max_rows is a quarter more than their mean, and tessera-graph replays such a step, captured once. tessera-rows and
tessera-graph-rows bring each row of x and d_o where the others bring tokens, each once. saved_mib is what torch's
allocator holds between the two besides o.

Behind a barrier the GPUs are idle when a call begins: the time has the host's in it, and how far apart ranks leave the
barrier. Behind the stream the call is enqueued before an all-reduce has ended on the GPU, as in a model whose host runs
ahead. host_us is what the call takes on the host of rank 0; nccl-grouped-mm waits for the GPU in it.
"""

import argparse
import datetime
import functools
import itertools
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.nn import functional

# d, n, E, K, activation
CONFIGS = {"Qwen3-30B": (2048, 768, 128, 8, "swiglu"), "FlashDMoE-swiglu": (2048, 2048, 32, 2, "swiglu"),
           "FlashDMoE": (2048, 2048, 32, 2, "gelu"), "DSv3": (7168, 2048, 256, 8, "swiglu"),
           "gpt-oss": (2880, 2880, 128, 4, "clamped-swiglu")}  # with biases
IMPLS = "nccl-grouped-mm,nccl-all-to-all,cublas-bmm,tessera,tessera-in-place,tessera-partial-combine"
TRAIN_IMPLS = ("nccl-grouped-mm", "cublas-bmm", "tessera", "tessera-rows", "tessera-save-x", "tessera-bound",
               "tessera-graph", "tessera-graph-rows", "liger-cute")
TOLERANCE = 2e-2  # relative error in the norm: a few roundings, far from a wrong result
ALL_IMPLS = [*IMPLS.split(","), *[impl for impl in TRAIN_IMPLS if impl not in IMPLS.split(",")]]
WARM_UPS = 5
AHEAD_CYCLES = 2_000_000  # about a millisecond of the GPU, in which the host enqueues a call


def act(h, activation: str):
    if activation == "gelu":
        return functional.gelu(h, approximate="tanh")
    gate, up = h.chunk(2, dim=-1)
    if activation == "clamped-swiglu":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return (up + 1) * (gate * torch.sigmoid(1.702 * gate))
    return functional.silu(gate) * up


def multiply(rows, ends, weights, activation: str):
    """Of w_up, w_down and, with clamped-swiglu, b_up and b_down."""
    w_up, w_down, *biases = weights
    if not biases:
        return functional.grouped_mm(act(functional.grouped_mm(rows, w_up.mT, offs=ends), activation), w_down.mT,
                                     offs=ends)
    expert = torch.bucketize(torch.arange(rows.shape[0], device=rows.device, dtype=ends.dtype), ends, right=True)
    b_up, b_down = (functional.embedding(expert, b) for b in biases)  # its gradients are added up in fp32
    a = act(functional.grouped_mm(rows, w_up.mT, offs=ends) + b_up, activation)
    return functional.grouped_mm(a, w_down.mT, offs=ends) + b_down


def with_biases(layer):
    """layer(x, ids, scores, weights) of an ExpertParallel."""

    def run(x, ids, scores, weights):
        return layer(x, ids, scores, *weights[:2], **dict(zip(("b_up", "b_down"), weights[2:])))

    return run


def add_up(y, order, scores):
    """Rows in the order of experts back to slots, weighted, added per token."""
    slots = torch.empty_like(y).index_put((order,), y)
    return torch.einsum("tkd,tk->td", slots.view(*scores.shape, -1), scores.to(y.dtype))


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, receive: list, send: list):
        ctx.splits = send, receive
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows, receive, send)
        return out

    @staticmethod
    def backward(ctx, d_out):
        return AllToAll.apply(d_out.contiguous(), *ctx.splits), None, None


class Exchange:
    """Rows sorted by expert to their owners and back."""

    def __init__(self, ids, experts: int):
        self.ranks = dist.get_world_size()
        flat = ids.flatten()
        self.order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=experts)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)  # [source][local expert]
        by_source = received.view(self.ranks, -1)
        self.send = counts.view(self.ranks, -1).sum(1).tolist()
        self.receive = by_source.sum(1).tolist()
        # Rows arrive by source, then expert; the place of each by expert, then source.
        expert_of = torch.arange(by_source.shape[1], device=ids.device).repeat(self.ranks).repeat_interleave(received)
        self.by_expert = expert_of.argsort(stable=True)
        self.ends = by_source.sum(0).cumsum(0).int()

    def dispatch(self, rows):
        return AllToAll.apply(rows, self.receive, self.send)

    def combine(self, rows):
        return AllToAll.apply(rows, self.send, self.receive)


def nccl_layer(x, ids, scores, weights, experts: int, activation: str):
    exchange = Exchange(ids, experts)
    rows = exchange.dispatch(x[exchange.order // ids.shape[1]])
    y = multiply(rows[exchange.by_expert], exchange.ends, weights, activation)
    back = torch.empty_like(y).index_put((exchange.by_expert,), y)
    return add_up(exchange.combine(back), exchange.order, scores)


def one_gpu(x, ids, scores, weights, activation: str):
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=weights[0].shape[0]).cumsum(0).int()
    return add_up(multiply(x[order // ids.shape[1]], ends, weights, activation), order, scores)


class LigerCute:
    """The layer of liger-cute-kernels, set up once for the largest of the configurations."""

    def __init__(self, configs: list[str], tokens: int):
        from liger_cute_kernels import MoEConfig, configure, tvm_ffi
        from liger_cute_kernels.nvshmem import resolve_team
        shapes = [CONFIGS[config] for config in configs if CONFIGS[config][4] == "swiglu"]
        largest = MoEConfig(max_tokens=tokens, hidden_size=max(shape[0] for shape in shapes),
                            num_experts=max(shape[2] for shape in shapes), top_k=max(shape[3] for shape in shapes),
                            num_hosts=1, gpus_per_host=dist.get_world_size(), max_inflight=1)
        device = torch.device("cuda", torch.cuda.current_device())
        configure(bootstrap_group=dist.group.WORLD, device=device, moe=largest)
        self.calls = tvm_ffi
        self.team = resolve_team(None, create=False)

    def body(self, x, ids, scores, w_up, w_down):
        gate, up = (half.contiguous() for half in w_up.chunk(2, dim=1))
        experts, top_k = w_up.shape[0] * dist.get_world_size(), ids.shape[1]
        narrow, weights = ids.int(), scores.to(x.dtype)

        def forward():
            out = self.calls.moe_fused_fwd_bf16(x, narrow, weights, gate, up, w_down, experts, top_k, self.team)
            self.calls.moe_pop_fwd(self.team)  # what a backward pass would take
            return out[0]

        return forward

    def training_body(self, x, ids, scores, w_up, w_down, d_o):
        gate, up = (half.contiguous() for half in w_up.chunk(2, dim=1))
        experts, top_k = w_up.shape[0] * dist.get_world_size(), ids.shape[1]
        narrow, weights = ids.int(), scores.to(x.dtype)

        def both():
            o, rows, y, order, *tables = self.calls.moe_fused_fwd_bf16(
                x, narrow, weights, gate, up, w_down, experts, top_k, self.team)
            gradients = self.calls.moe_fused_bwd_bf16(d_o, y, rows, tables[0], tables[1], order, narrow, weights, gate,
                                                      up, w_down, experts, top_k, self.team, tables[2])
            self.calls.moe_pop_fwd(self.team)
            return {"o": o, "dx": next(g for g in gradients if g.shape == x.shape)}

        return both


class Training:
    """A forward and a backward pass of each implementation, and what their gradients should be."""

    GRADIENTS = ("dx", "dscores", "dw_up", "dw_down", "db_up", "db_down")

    def __init__(self, x, ids, scores, weights: list, activation: str, d_o):
        """weights: of all experts."""
        self.ids, self.activation, self.d_o = ids, activation, d_o
        rank, ranks, self.experts = dist.get_rank(), dist.get_world_size(), weights[0].shape[0]
        local = self.experts // ranks
        own = slice(rank * local, (rank + 1) * local)
        self.leaves = [t.detach().clone().requires_grad_() for t in (x, scores, *[w[own] for w in weights])]
        leaves = [x.detach().requires_grad_(), scores.detach().requires_grad_()]
        o = one_gpu(leaves[0], ids, leaves[1], weights, activation)
        self.wanted = {"o": o.detach(), **dict(zip(self.GRADIENTS, torch.autograd.grad(o, leaves, d_o)))}
        # Gradients of the rank's weights, from the rows of all ranks.
        whole = [torch.cat(self._gather(t)) for t in (x, ids, scores, d_o)]
        flat = whole[1].flatten()
        mine = ((flat >= own.start) & (flat < own.stop)).nonzero().flatten()
        mine = mine[flat[mine].argsort(stable=True)]
        ends = torch.bincount(flat[mine] - own.start, minlength=local).cumsum(0).int()
        token = mine // ids.shape[1]
        weights = [t.detach().requires_grad_() for t in self.leaves[2:]]
        y = multiply(whole[0][token], ends, weights, activation)
        d_y = whole[3][token] * whole[2].flatten()[mine, None].to(x.dtype)
        self.wanted |= dict(zip(self.GRADIENTS[2:], torch.autograd.grad(y, weights, d_y)))

    @staticmethod
    def _gather(t) -> list:
        parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, t.contiguous())
        return parts

    def body(self, layer):
        """Of layer(x, ids, scores, weights)."""

        def both():
            o = self._forward(layer)
            gradients = torch.autograd.grad(o, self.leaves, self.d_o)
            return {"o": o, **dict(zip(self.GRADIENTS, gradients))}

        return both

    def saved(self, layer) -> int:
        """Bytes that it saves between the passes."""
        before = torch.cuda.memory_allocated()
        o = self._forward(layer)
        return torch.cuda.memory_allocated() - before - o.numel() * o.element_size()

    def _forward(self, layer):
        x, scores, *weights = self.leaves
        return layer(x, self.ids, scores, weights)

    def nccl(self, x, ids, scores, weights):
        return nccl_layer(x, ids, scores, weights, self.experts, self.activation)

    def gemms(self, even, even_a):
        """The six GEMMs alone, on equally many rows for every expert and without activation."""
        w_up, w_down = (t.detach() for t in self.leaves[2:4])
        even_h = torch.randn(*even.shape[:2], w_up.shape[1], dtype=even.dtype, device=even.device)

        pairs = ((even, w_up.mT), (even_a, w_down.mT), (even, w_down), (even.mT, even_a), (even_h, w_up),
                 (even_h.mT, even))
        self.wanted |= {f"gemm{i}": a[0] @ b[0] for i, (a, b) in enumerate(pairs)}

        def six():
            return {f"gemm{i}": torch.bmm(a, b)[0] for i, (a, b) in enumerate(pairs)}

        return six

    def error(self, results: dict) -> float:
        """The largest relative error in the norm."""
        return max(((results[name] - self.wanted[name]).float().norm() / self.wanted[name].float().norm()).item()
                   for name in results)


def with_rows(body):
    """body(), whose backward passes bring every row of x and d_o."""
    from tessera import expert_parallel_training as passes

    def run():
        chosen, passes.gathers_tokens = passes.gathers_tokens, lambda session, rows: False
        try:
            return body()
        finally:
            passes.gathers_tokens = chosen

    return run


def measure(body, rounds: int, behind: str) -> tuple[list[float], float]:
    """ms of the slowest rank for each round, ascending, and us of the host for a call, median."""
    times, host, gate = torch.empty(rounds, device="cuda"), [], torch.zeros(1, device="cuda")
    for i in range(-WARM_UPS, rounds):
        dist.barrier()
        if behind == "stream":
            torch.cuda._sleep(AHEAD_CYCLES)
            dist.all_reduce(gate)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        begin = time.perf_counter_ns()
        body()
        host.append(time.perf_counter_ns() - begin)
        end.record()
        end.synchronize()
        if i >= 0:
            times[i] = start.elapsed_time(end)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return sorted(times.tolist()), 1e-3 * statistics.median(host)


def bench(config: str, tokens: int, impls: list[str], passes: list[str], behind: list[str], rounds: int,
          liger_cute: LigerCute | None) -> list[dict]:
    d, n, experts, top_k, activation = CONFIGS[config]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    halves = 1 if activation == "gelu" else 2
    torch.manual_seed(1)  # equal weights on all ranks
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    w_up = torch.empty(experts, halves * n, d, **options).uniform_(-1, 1).mul_(d**-0.5)
    w_down = torch.empty(experts, d, n, **options).uniform_(-1, 1).mul_(n**-0.5)
    weights = [w_up, w_down]
    if activation == "clamped-swiglu":
        weights += [torch.randn(experts, width, **options) for width in (2 * n, d)]
    torch.manual_seed(2 + rank)
    x = torch.randn(tokens, d, **options)
    scores, ids = torch.rand(tokens, experts, device="cuda").topk(top_k)
    local = experts // ranks
    own = [w[rank * local:(rank + 1) * local] for w in weights]
    own_up, own_down = own[:2]
    wanted = one_gpu(x, ids, scores, weights, activation)

    bodies, sessions = {}, []
    exchange = Exchange(ids, experts)
    rows = x[exchange.order // top_k]
    share = tokens * top_k // local  # rows of an expert, were they equally many
    even, even_a = (torch.randn(local, share, width, **options) for width in (d, n))
    bodies["cublas-bmm"] = lambda: (torch.bmm(even, own_up.mT), torch.bmm(even_a, own_down.mT))[1]
    targets = {"nccl-all-to-all": rows, "cublas-bmm": torch.stack([a @ w.mT for a, w in zip(even_a, own_down)])}
    bodies["nccl-all-to-all"] = lambda: exchange.combine(exchange.dispatch(rows))
    bodies["nccl-grouped-mm"] = lambda: nccl_layer(x, ids, scores, own, experts, activation)
    if any(impl.startswith("tessera") for impl in impls):
        import tessera
        narrow = ids.int()

        def make_session(**options):
            sessions.append(tessera.ExpertParallel(max_tokens=tokens, hidden=d, intermediate=n, experts=experts,
                                                   top_k=top_k, activation=activation, **options))
            return sessions[-1]

        session = make_session()
        placed = session.input(tokens).copy_(x)
        layer = with_biases(session)
        bodies["tessera"] = lambda: layer(x, narrow, scores, own)
        bodies["tessera-in-place"] = lambda: layer(placed, narrow, scores, own)
        if "tessera-partial-combine" in impls:
            with_sums = with_biases(make_session(partial_combine=True))
            bodies["tessera-partial-combine"] = lambda: with_sums(x, narrow, scores, own)
    if liger_cute is not None and activation == "swiglu":
        bodies["liger-cute"] = liger_cute.body(x, ids, scores, own_up, own_down)
    elif liger_cute is not None and rank == 0:
        print(f"{config}: liger-cute has no {activation}, left out")
    out = []
    forward = [impl for impl in impls if impl in bodies] if "forward" in passes else []
    for impl, place in itertools.product(forward, behind):
        result, target = bodies[impl](), targets.get(impl, wanted)
        error = ((result - target).float().norm() / target.float().norm()).reshape(1)
        dist.all_reduce(error, dist.ReduceOp.MAX)
        with torch.no_grad():
            ms, host_us = measure(bodies[impl], rounds, place)
        for made in sessions:
            made.check()
        flops = (0 if impl == "nccl-all-to-all" else 2 * (halves + 1)) * tokens * top_k * n * d
        timed = "gemms" if impl == "cublas-bmm" else "forward-inference"
        middle = statistics.median(ms)
        out.append({"config": config, "shape": [tokens, d, n, experts, top_k], "dtype": "bf16", "gpus": ranks,
                    "routing": "random", "router": "given", "round": "none", "pass": timed,
                    "impl": impl, "variant": "torch" if impl.startswith("tessera") else "", "behind": place,
                    "ms": round(middle, 4), "ms_p10": round(ms[len(ms) // 10], 4),
                    "ms_p90": round(ms[len(ms) * 9 // 10], 4), "host_us": round(host_us, 1),
                    "tflops": round(flops / middle * 1e-9, 1), "relative_error": float(f"{error.item():.2e}"),
                    "checked": error.item() < TOLERANCE})
    if "training" in passes:
        out += bench_training(config, (x, ids, scores, weights), (even, even_a), impls, behind, rounds, liger_cute)
    for made in sessions:
        dist.barrier()
        made.close()
    return out


def bench_training(config: str, tensors: tuple, gemm_rows: tuple, impls: list[str], behind: list[str], rounds: int,
                   liger_cute: LigerCute | None) -> list[dict]:
    d, n, experts, top_k, activation = CONFIGS[config]
    x, ids, scores, weights = tensors
    tokens = x.shape[0]
    training = Training(x, ids, scores, weights, activation, torch.randn_like(x))
    layers, sessions = {"nccl-grouped-mm": training.nccl}, []
    bound = {"max_rows": tokens * top_k * 5 // 4 + 64}
    for impl, options in (("tessera", {}), ("tessera-rows", {}), ("tessera-save-x", {"save": "x"}),
                          ("tessera-bound", bound), ("tessera-graph", bound), ("tessera-graph-rows", bound)):
        if impl in impls:
            import tessera
            sessions.append(tessera.ExpertParallel(max_tokens=tokens, hidden=d, intermediate=n, experts=experts,
                                                   top_k=top_k, activation=activation, training=True, **options))
            layers[impl] = with_biases(sessions[-1])
    bodies = {impl: training.body(layer) for impl, layer in layers.items()}
    for impl in [impl for impl in bodies if impl.endswith("-rows")]:
        bodies[impl] = with_rows(bodies[impl])
    graphs = []
    for impl in [impl for impl in bodies if impl.startswith("tessera-graph")]:
        from expert_parallel_host_time import captured
        graphs.append(captured(bodies[impl]))
        bodies[impl] = functools.partial(lambda graph, made: (graph.replay(), made)[1], *graphs[-1])
    bodies["cublas-bmm"] = training.gemms(*gemm_rows)
    if liger_cute is not None and activation == "swiglu":
        x_, scores_, own_up, own_down = (t.detach() for t in training.leaves[:4])
        bodies["liger-cute"] = liger_cute.training_body(x_, ids, scores_, own_up, own_down, training.d_o)
    out = []
    for impl, place in itertools.product([impl for impl in TRAIN_IMPLS if impl in impls and impl in bodies], behind):
        results = bodies[impl]()
        saved = training.saved(layers[impl]) if impl in layers else None
        error = torch.tensor([training.error(results)], device="cuda")
        del results
        dist.all_reduce(error, dist.ReduceOp.MAX)
        ms, host_us = measure(bodies[impl], rounds, place)
        for session in sessions:
            session.check()
        flops = 6 * (2 if activation == "gelu" else 3) * tokens * top_k * n * d
        middle = statistics.median(ms)
        out.append({"config": config, "shape": [tokens, d, n, experts, top_k], "dtype": "bf16",
                    "gpus": dist.get_world_size(), "routing": "random", "router": "given", "round": "none",
                    "pass": "gemms-training" if impl == "cublas-bmm" else "training", "impl": impl,
                    "variant": "torch" if impl.startswith("tessera") else "", "behind": place,
                    "ms": round(middle, 4),
                    "ms_p10": round(ms[len(ms) // 10], 4), "ms_p90": round(ms[len(ms) * 9 // 10], 4),
                    "host_us": round(host_us, 1), "tflops": round(flops / middle * 1e-9, 1),
                    "saved_mib": saved and round(saved / 2**20, 1), "relative_error": float(f"{error.item():.2e}"),
                    "checked": error.item() < TOLERANCE})
    bodies.clear()
    graphs.clear()  # frees what they hold
    for session in sessions:
        dist.barrier()
        session.close()
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="Qwen3-30B,FlashDMoE-swiglu,DSv3")
    parser.add_argument("--impl", default=IMPLS)
    parser.add_argument("--pass", default="forward", dest="passes")
    parser.add_argument("--behind", default="barrier,stream")
    parser.add_argument("--tokens", default="8192")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out")
    flags = parser.parse_args()
    if os.environ.get("NCCL_NVLS_ENABLE") != "0":
        parser.error("NVLink multicast must be off: set NCCL_NVLS_ENABLE=0")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    configs, impls, behind = flags.config.split(","), flags.impl.split(","), flags.behind.split(",")
    sizes = [int(tokens) for tokens in flags.tokens.split(",")]
    for impl in impls:
        if impl not in ALL_IMPLS:
            parser.error(f"--impl {impl}: one of {', '.join(ALL_IMPLS)}")
    liger_cute = LigerCute(configs, max(sizes)) if "liger-cute" in impls else None
    rows = []
    for config, tokens in itertools.product(configs, sizes):
        for row in bench(config, tokens, impls, flags.passes.split(","), behind, flags.rounds, liger_cute):
            rows.append(row)
            if dist.get_rank() == 0:
                saved = f"  saves {row['saved_mib']} MiB" if row.get("saved_mib") else ""
                print(f"{row['config']:<18} T {tokens:<5} {row['gpus']} GPUs {row['pass']:<17} {row['impl']:<22} "
                      f"{row['behind']:<7} "
                      f"{row['ms']:9.4f} ms {row['tflops']:7.1f} TFLOP/s per GPU, host {row['host_us']:6.1f} us  "
                      f"error {row['relative_error']:.1e}{saved}"
                      f"{'' if row['checked'] else '  WRONG'}", flush=True)
        torch.cuda.empty_cache()
    document = {"command": f"torchrun --nproc-per-node {dist.get_world_size()} bench/python/expert_parallel.py",
                "commit": "unknown", "device": f"{dist.get_world_size()}x {torch.cuda.get_device_name()}",
                "driver": "", "clocks_mhz": [0, 0], "date": datetime.date.today().isoformat(),
                "protocol": f"median of {flags.rounds} after {WARM_UPS}, slowest rank, uniform random routing; "
                            f"torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}",
                "rows": rows}
    if flags.out and dist.get_rank() == 0:
        lines = ",\n".join(f"  {json.dumps(row)}" for row in document.pop("rows"))
        with open(flags.out, "w", encoding="utf-8") as file:
            file.write(f'{json.dumps(document)[:-1]},\n "rows": [\n{lines}\n]}}\n')
    dist.destroy_process_group()
    return 0 if all(row["checked"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

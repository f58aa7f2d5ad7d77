# SPDX-License-Identifier: Apache-2.0
"""What several_hosts_test.py and cuda_several_hosts_test.py make passes of: tokens, routings and weights, one process's
results, and the bytes that a pass sends."""

import dataclasses
import itertools

import tessera
import torch
from tessera import functional

LEAVES = ("x", "topk_weights", "w_up", "w_down", "b_up", "b_down")


@dataclasses.dataclass(frozen=True)
class Case:
    """tokens: of each rank. routing: random, zipf, one-expert, repeated (an expert twice for a token) or sentinels."""

    tokens: tuple
    experts: int = 12
    top_k: int = 3
    routing: str = "random"
    dtype: torch.dtype = torch.float32
    activation: str = "swiglu"
    biases: bool = False
    save: str = "h"
    seed: int = 0
    hidden: int = 32
    intermediate: int = 16

    def ids(self, generator) -> torch.Tensor:
        """[T,K] int64 of all ranks."""
        count, experts = sum(self.tokens), self.experts
        weights = torch.ones(experts)
        if self.routing == "zipf":
            weights = 1 / torch.arange(1, experts + 1) ** 1.5
        if count == 0:
            return torch.empty(0, self.top_k, dtype=torch.int64)
        ids = torch.multinomial(weights.expand(count, -1), self.top_k, generator=generator)
        if self.routing == "one-expert":
            ids = torch.full_like(ids, -1)
            ids[:, 0] = experts - 1
        elif self.routing == "repeated":
            ids[::2, 1] = ids[::2, 0]
        elif self.routing == "sentinels":
            # One of them lies beyond int32, as do ids that nobody has narrowed.
            ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
            ids[0, :3] = torch.tensor([2**32, experts, -7])[:self.top_k]
        return ids

    def tensors(self) -> tuple[dict, torch.Tensor, torch.Tensor]:
        """(leaves by name, ids, d_o) of all ranks."""
        generator = torch.Generator().manual_seed(self.seed)
        gated = self.activation in ("swiglu", "clamped-swiglu")
        count, width = sum(self.tokens), self.intermediate * (2 if gated else 1)

        def draw(*shape, scale=1.0):
            return (torch.randn(*shape, generator=generator) * scale).to(self.dtype)

        ids = self.ids(generator)
        weights = torch.rand(count, self.top_k, generator=generator)
        weights[(ids < 0) | (ids >= self.experts)] = torch.nan  # the score of no expert is not read
        leaves = {"x": draw(count, self.hidden), "topk_weights": weights,
                  "w_up": draw(self.experts, width, self.hidden, scale=0.2),
                  "w_down": draw(self.experts, self.hidden, self.intermediate, scale=0.2)}
        if self.biases:
            leaves |= {"b_up": draw(self.experts, width), "b_down": draw(self.experts, self.hidden)}
        return leaves, ids, draw(count, self.hidden)

    def expected(self) -> dict:
        """o and the gradients of the leaves, in one process."""
        leaves, ids, d_o = self.tensors()
        leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
        # Ids beyond int32 are refused there.
        o = tessera.routed_experts(leaves["x"], ids.clamp(-1, self.experts), leaves["topk_weights"], leaves["w_up"],
                                   leaves["w_down"], b_up=leaves.get("b_up"), b_down=leaves.get("b_down"),
                                   activation=self.activation)
        o.backward(d_o)
        return {"o": o.detach()} | {name: leaf.grad for name, leaf in leaves.items()}

    def expected_bits(self, hosts: int) -> dict:
        """The same as hosts make it: the experts of each host on the tokens of one host after the other, gradients of
        weights added up in fp32; then sums over hosts in fp32, ascending, rounded once."""
        leaves, all_ids, d_o = self.tensors()
        text, per_host = functional.options_text(activation=self.activation, save=self.save), self.experts // hosts
        of_hosts = [sum(self.tokens[h * len(self.tokens) // hosts:(h + 1) * len(self.tokens) // hosts])
                    for h in range(hosts)]
        ends = list(itertools.accumulate(of_hosts, initial=0))
        sums = {"o": torch.zeros(d_o.shape), "x": torch.zeros(d_o.shape), "topk_weights": torch.zeros(all_ids.shape)}
        buffers = {name: torch.zeros(leaf.shape) for name, leaf in leaves.items() if name not in sums}
        partials = {}
        for host in range(hosts):
            ids = all_ids - host * per_host
            ids[(ids < 0) | (ids >= per_host)] = -1
            here = slice(host * per_host, (host + 1) * per_host)
            for step in range(hosts):
                source = (host + step) % hosts
                tokens = slice(ends[source], ends[source + 1])
                x, scores = [leaves[name][tokens].clone().requires_grad_() for name in LEAVES[:2]]
                weights, into = [[None if name is None or name not in leaves else of[name][here] for name in
                                  ("w_up", None, "w_down", "b_up", None, "b_down")] for of in (leaves, buffers)]
                if x.shape[0]:
                    weights = [weight if weight is None else weight.clone().requires_grad_() for weight in weights]
                    o = functional.routed_experts_with(text, x, ids[tokens], scores, tuple(weights), tuple(into))
                    o.backward(d_o[tokens])
                    partials[host, source] = {"o": o.detach(), "x": x.grad, "topk_weights": scores.grad}
        for (_, source), results in sorted(partials.items()):
            for name, partial in results.items():
                sums[name][ends[source]:ends[source + 1]] += partial
        return {name: tensor.to(torch.float32 if name == "topk_weights" else self.dtype)
                for name, tensor in (sums | buffers).items()}

    def make(self, *, hosts, exchange=None, **more) -> tessera.ExpertParallel:
        """The object of a rank."""
        return tessera.ExpertParallel(**{
            "max_tokens": max(*self.tokens, 1) + 1, "hidden": self.hidden, "intermediate": self.intermediate,
            "experts": self.experts, "top_k": self.top_k, "activation": self.activation, "training": True,
            "save": self.save, "hosts": hosts, "exchange": exchange, "device": "cpu", "time_limit": 20, **more})

    def part(self, rank: int) -> tuple[dict, torch.Tensor, torch.Tensor]:
        """What a rank has of `tensors`."""
        leaves, ids, d_o = self.tensors()
        ranks, begin = len(self.tokens), sum(self.tokens[:rank])
        tokens = slice(begin, begin + self.tokens[rank])
        per_rank = self.experts // ranks
        experts = slice(rank * per_rank, (rank + 1) * per_rank)
        mine = {name: leaf[tokens if name in LEAVES[:2] else experts].clone().requires_grad_()
                for name, leaf in leaves.items()}
        return mine, ids[tokens], d_o[tokens]


def bytes_expected(case: Case, hosts: int, exchange: str) -> list[list[int]]:
    """By rank, to each host: what the formula says of a forward and a backward pass, from the ids alone."""
    _, ids, _ = case.tensors()
    count, item = len(case.tokens), case.dtype.itemsize
    local, per_host = count // hosts, case.experts // hosts
    host_of = [[set((ids_t[(ids_t >= 0) & (ids_t < case.experts)] // per_host).tolist()) for ids_t in part]
               for part in ids.split(list(case.tokens))]

    def rows(rank: int, host: int) -> int:
        return sum(host in there for there in host_of[rank]) if exchange == "counted" else max(*case.tokens, 1) + 1

    expected = []
    for rank in range(count):
        mine, of_rank = rank // local, []
        for host in range(hosts):
            counterpart = host * local + rank % local
            out, back = rows(rank, host), rows(counterpart, mine)
            forward_ = out * (case.hidden * item + 8 * case.top_k) + back * case.hidden * item
            backward = out * case.hidden * item + back * (case.hidden * item + 4 * case.top_k)
            of_rank.append(0 if host == mine else forward_ + backward + (8 if exchange == "counted" else 0))
        expected.append(of_rank)
    return expected


def forward(experts: tessera.ExpertParallel, leaves: dict, ids: torch.Tensor) -> torch.Tensor:
    biases = {name: leaves[name] for name in LEAVES[4:] if name in leaves}
    return experts(leaves["x"], ids, leaves["topk_weights"], leaves["w_up"], leaves["w_down"], **biases)


def one_pass(case: Case, experts: tessera.ExpertParallel, rank: int) -> dict:
    """o and the gradients on a rank."""
    leaves, ids, d_o = case.part(rank)
    o = forward(experts, leaves, ids)
    o.backward(d_o)
    return {"o": o.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def together(of_ranks: list[dict]) -> dict:
    """The results of all ranks, as one process has them."""
    return {name: torch.cat([results[name] for results in of_ranks]) for name in of_ranks[0]}

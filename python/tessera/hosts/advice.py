# SPDX-License-Identifier: Apache-2.0
"""Which way of using several hosts sends fewer bytes: rows to experts that are spread over the hosts, or weights of
experts that each host has, sharded over the hosts by FSDP. Calculated, for uniform routing."""

import math

from tessera import options


def reach(experts: int, top_k: int, hosts: int) -> float:
    """The chance that a token has an expert on a given host."""
    return 1 - math.comb(experts - experts // hosts, top_k) / math.comb(experts, top_k)


def bytes_of_rows(tokens: int, hidden: int, experts: int, top_k: int, hosts: int) -> float:
    """Bytes that a GPU sends in a step of training with a layer's experts over the hosts: x and o, d_o and dx, bf16,
    once for each token and host."""
    return 4 * tokens * (hosts - 1) * reach(experts, top_k, hosts) * 2 * hidden


def bytes_of_weights(hidden: int, intermediate: int, experts: int, local_ranks: int, hosts: int, gated: bool) -> float:
    """Bytes that a GPU sends in a step with the experts within each host, their state sharded over the hosts: two
    gathers in bf16, and gradients reduced in fp32."""
    weights = (3 if gated else 2) * hidden * intermediate * experts / local_ranks
    return 8 * weights * (hosts - 1) / hosts


def tokens_of_equal_bytes(hidden: int, intermediate: int, experts: int, top_k: int, local_ranks: int, hosts: int,
                          gated: bool = True) -> float:
    """Tokens per GPU and step above which spreading experts over the hosts sends more."""
    return (bytes_of_weights(hidden, intermediate, experts, local_ranks, hosts, gated)
            / bytes_of_rows(1, hidden, experts, top_k, hosts))


def advice(topology, desc) -> str | None:
    """What to do instead, where the object is for more tokens than that; else None. desc: as ExpertParallel's."""
    if topology.hosts == 1:
        return None
    gated = options.ACTIVATIONS[desc.activation] in options.GATED
    most = tokens_of_equal_bytes(desc.hidden, desc.intermediate, desc.experts, desc.top_k, topology.local_ranks,
                                 topology.hosts, gated)
    if desc.max_tokens <= most:
        return None
    return (f"hosts={topology.hosts}: above {most:.0f} tokens per rank and step (max_tokens={desc.max_tokens}) fewer "
            "bytes cross the network with the experts of a layer within each host and FSDP over the hosts; "
            "docs/several-hosts.md has both")

# SPDX-License-Identifier: Apache-2.0
"""What ranks check before they wait for each other: that all can join and are alike, and the shapes of a pass."""

import threading
from typing import Callable

import torch
from torch import distributed

from tessera import options


def gather(mine: tuple, group) -> list:
    """(fields, id, failure) of all ranks; collective."""
    of_ranks = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(of_ranks, mine, group=group)
    return of_ranks


def call_within(seconds: float, call: Callable, undo: Callable, otherwise: str) -> None:
    """call(), which waits for other ranks, in a thread of its own, as nothing ends such a wait from outside.

    Args:
        seconds: How long this thread waits for it.
        call: What it raises is raised here.
        undo: What that thread does should the call come to a good end when nobody waits any more.
        otherwise: What to say where it has not ended by then.

    Raises:
        RuntimeError: The call had not ended by then.
    """
    lock, ended, failures, given_up = threading.Lock(), threading.Event(), [], []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)
        with lock:
            ended.set()
        if given_up and not failures:
            undo()

    threading.Thread(target=run, daemon=True).start()
    if not ended.wait(seconds):
        with lock:
            if not ended.is_set():
                given_up.append(True)
                raise RuntimeError(otherwise)
    if failures:
        raise failures[0]


def refuse_differences(of_ranks: list, numbers: list[int] | None = None) -> None:
    """Of what `gather` gives: raises on all ranks where one has failed, or where they differ in a field.

    Args:
        of_ranks: (fields, id, failure) of each rank.
        numbers: What the ranks are called; None: 0, 1 and so on.

    Raises:
        RuntimeError: A rank cannot join; its failure is in the text.
        ValueError: A field differs between ranks.
    """
    numbers = numbers or range(len(of_ranks))
    for rank, (_, _, failure) in zip(numbers, of_ranks, strict=True):
        if failure is not None:
            raise RuntimeError(f"rank {rank} cannot join: {failure}")
    first = of_ranks[0][0]
    for rank, (theirs, *_) in zip(numbers, of_ranks, strict=True):
        for name in (*first, *theirs):
            mine, other = first.get(name, "absent"), theirs.get(name, "absent")
            if mine != other:
                raise ValueError(f"{name}={mine} on rank {numbers[0]}, {other} on rank {rank}: equal on all ranks")


def check_shapes(desc, dtype: torch.dtype, x, topk_ids, topk_weights, *weights) -> None:
    """Of a pass, before it begins: where one rank breaks off, the others wait in vain.

    Args:
        desc: Has max_tokens, hidden, intermediate, experts, top_k, activation and the ranks that share the experts.
        dtype: Of x and the weights.
        x: [T,d].
        topk_ids: [T,K] int32 or int64.
        topk_weights: [T,K] of a floating type.
        weights: w_up, w_down, b_up, b_down of this rank's experts; those that are None are absent.

    Raises:
        ValueError: A shape or dtype is another.
    """
    tokens, d, n, experts = x.shape[0] if x.dim() else 0, desc.hidden, desc.intermediate, desc.experts // desc.ranks
    up = n * (2 if options.ACTIVATIONS[desc.activation] in options.GATED else 1)
    shapes = (tokens, d), (experts, up, d), (experts, d, n), (experts, up), (experts, d)
    short = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    for name, tensor, shape in zip(("x", "w_up", "w_down", "b_up", "b_down"), (x, *weights), shapes, strict=True):
        if tensor is not None and (tensor.shape != shape or tensor.dtype is not dtype):
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}; {short} {list(shape)} is needed")
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if tensor.shape != (tokens, desc.top_k):
            raise ValueError(f"{name}: {list(tensor.shape)}; {[tokens, desc.top_k]} is needed")
    if topk_ids.dtype not in (torch.int32, torch.int64) or not topk_weights.is_floating_point():
        raise ValueError(f"topk_ids, topk_weights: {topk_ids.dtype}, {topk_weights.dtype}; int32 or int64, and a "
                         "floating type, are needed")
    if tokens > desc.max_tokens:
        raise ValueError(f"x: {tokens} tokens; at most max_tokens={desc.max_tokens}")


def narrowed(topk_ids: torch.Tensor, experts: int) -> torch.Tensor:
    """As int32, contiguous whatever their strides."""
    # Clamped first: an id outside [0,E) stays one, where its low half may be an expert.
    return topk_ids.clamp(-1, experts).to(torch.int32, memory_format=torch.contiguous_format)

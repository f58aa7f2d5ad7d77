# SPDX-License-Identifier: Apache-2.0
"""What an expert_parallel_session.Session is to ranks with GPUs, for ranks of one host that compute on the CPU: rows go
to the owners of their experts and back by torch.distributed.

Rows of an expert stand by rank and token, as in one process that has the tokens of all ranks one after the other, and
a token's results are added in fp32 by ascending choice: o, dx and gradients of weights have that process's bits.
"""

from typing import NamedTuple

import torch
from torch import distributed

from tessera.expert_parallel_session import (
    SideStream, make_desc, prepared_routing, routing_of_groups, training_options, window_bytes,
)
from tessera.hosts.faults import Faults


class _Plan(NamedTuple):
    """Of a rank's slots t*K+k that have an expert, sorted by it: `slots`, and how many of them go to each rank and come
    from each."""

    slots: torch.Tensor
    send: list[int]
    receive: list[int]


class CpuSession:
    """The public members of Session that passes with and without gradients use. group: of the ranks of this host.

    Raises:
        ValueError: A bound of the description is broken, which is so on all ranks.
    """

    def __init__(self, *, activation: str, save: str, max_rows: int | None, group, device: torch.device,
                 faults: Faults, **sizes):
        self.device, self.side, self.passes_counted, self.all_fit = device, SideStream(), 0, True
        self._group, self._faults, self._rows, self._plan, self._new = group, faults, 0, None, None
        rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
        self.desc = make_desc(rank, ranks, activation, **sizes)
        self.training = training_options(self.desc, max_rows, save) or training_options(
            make_desc(rank, ranks, activation, **sizes | {"training": True}), None)
        window_bytes(self.desc)  # checks the bounds

    def fuses(self, *weights) -> bool:
        """Forward is never one launch."""
        return False

    def rows_of_last_pass(self, layer) -> None:
        """None, so that every pass asks for its rows before it has memory for them."""

    def remember_rows(self, layer, rows: int) -> None:
        """Nothing is remembered."""

    def routed_rows(self, passes_ago: int = 0) -> tuple[int, bool]:
        """This rank's rows of the pass that was routed last; all have memory."""
        return self._rows, True

    def routing(self, expert_offsets: torch.Tensor, row_scores: torch.Tensor) -> torch.Tensor:
        """As Session.routing."""
        prepared = prepared_routing(self.desc, self.training.text, expert_offsets, row_scores)
        return routing_of_groups(prepared, expert_offsets, row_scores, None)

    def call(self, name: str, kind: type, options: tuple = (), begun: int = 0, **tensors) -> None:
        """route, dispatch or combine, as the library's functions of a session do them."""
        getattr(self, name)(**tensors)

    def route(self, *, topk_ids, topk_weights) -> None:
        """Sends to the ranks of this host how many rows each of their experts gets from this one."""
        key = self._key(topk_ids)
        counts = torch.bincount(key, minlength=self.desc.experts + 1)[:-1]
        of_ranks = counts[None]
        if self.desc.ranks > 1:
            gathered = [torch.empty_like(counts) for _ in range(self.desc.ranks)]
            with self._faults.name("numbers of rows"):
                distributed.all_gather(gathered, counts, group=self._group)
            of_ranks = torch.stack(gathered)
        here = of_ranks.unflatten(1, (self.desc.ranks, -1))[:, self.desc.rank]  # [ranks, experts of this rank]
        self._rows, self._new = int(here.sum()), (here, topk_weights)

    def dispatch(self, *, topk_ids=None, expert_offsets, row_origins, row_scores, x=None, second_x=None, rows=None,
                 second_rows=None) -> None:
        """Fills rows [R,d] with the rows of x that have an expert here, sorted by it, and second_rows with those of
        second_x. After route() it writes the tables, else it goes by them: row_origins has the rank of each row and its
        place among the rows that come."""
        if self._new is not None:
            self._write_tables(expert_offsets, row_origins)
        count = int(expert_offsets[-1])
        if topk_ids is not None:
            self._make_plan(topk_ids, row_origins[:count, 0])
        arrived = row_origins[:count, 1].long()
        if self._new is not None:
            scores = self._new[1].flatten()[self._plan.slots]
            row_scores.zero_()
            row_scores[:count] = self._forth(scores[:, None], "scores")[arrived, 0]
            self._new = None
        for source, into in ((x, rows), (second_x, second_rows)):
            if source is not None:
                token = self._plan.slots // self.desc.top_k
                into[:count] = self._forth(source[token], "rows to their experts")[arrived]

    def combine(self, *, rows, expert_offsets, row_origins, o, topk_weights=None, row_dscores=None, dscores=None):
        """Fills o [T,d] with each token's rows, weighted where topk_weights are given, and dscores [T,K]."""
        count, top_k = int(expert_offsets[-1]), self.desc.top_k
        arrived, slots = row_origins[:count, 1].long(), self._plan.slots
        there = rows.new_empty((count, rows.shape[1]))
        there[arrived] = rows[:count]
        of_slots = torch.zeros(o.shape[0] * top_k, o.shape[1])
        of_slots[slots] = self._back(there, "rows to their tokens").float()
        if topk_weights is not None:
            weights = torch.where(self._routed, topk_weights.flatten(), 0.0)  # the score of no expert may be NaN
            of_slots *= weights[:, None]
        of_slots, total = of_slots.view(-1, top_k, o.shape[1]), torch.zeros(o.shape)
        for choice in range(top_k):
            total += of_slots[:, choice]
        o.copy_(total)
        if dscores is not None:
            there = row_dscores.new_empty((count, 1))
            there[arrived, 0] = row_dscores[:count]
            dscores.zero_()
            dscores.view(-1)[slots] = self._back(there, "gradients of scores")[:, 0]

    def window_bytes(self) -> int:
        """There is no window."""
        return 0

    def check(self) -> None:
        """Passes fail where they are made."""

    def close(self) -> None:
        """There is no window."""

    def abort(self) -> None:
        """There is no window."""

    def _key(self, topk_ids) -> torch.Tensor:
        """The expert of each slot, E where it has none."""
        ids = topk_ids.flatten().long()
        return torch.where((ids >= 0) & (ids < self.desc.experts), ids, self.desc.experts)

    def _write_tables(self, expert_offsets, row_origins) -> None:
        here, memory = self._new[0], row_origins.shape[0]
        if self._rows > memory:
            raise RuntimeError(f"max_rows={memory}: the pass has {self._rows} rows; make the object with a larger "
                               "bound")
        expert_offsets[0] = 0
        expert_offsets[1:] = here.sum(0).cumsum(0)
        # Rows come by rank and, from each, by expert; they stand by expert and, of each, by rank.
        ranks, experts = here.shape
        starts = (here.flatten().cumsum(0) - here.flatten()).view(ranks, experts).T.flatten()
        lengths = here.T.flatten()
        within = torch.arange(self._rows) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        row_origins[:self._rows, 0] = torch.repeat_interleave(torch.arange(ranks).repeat(experts), lengths)
        row_origins[:self._rows, 1] = torch.repeat_interleave(starts, lengths) + within

    def _make_plan(self, topk_ids, rank_of_rows) -> None:
        """From ids that are this rank's, and from where the rows here are: the same forward and backward."""
        key, ranks = self._key(topk_ids), self.desc.ranks
        self._routed = key < self.desc.experts
        order = torch.argsort(key, stable=True)[:int(self._routed.sum())]
        owner = key[order] // (self.desc.experts // ranks)
        self._plan = _Plan(order, torch.bincount(owner, minlength=ranks).tolist(),
                           torch.bincount(rank_of_rows.long(), minlength=ranks).tolist())

    def _forth(self, rows, what: str) -> torch.Tensor:
        return self._exchange(rows, self._plan.send, self._plan.receive, what)

    def _back(self, rows, what: str) -> torch.Tensor:
        return self._exchange(rows, self._plan.receive, self._plan.send, what)

    def _exchange(self, rows, send: list[int], receive: list[int], what: str) -> torch.Tensor:
        """rows [R,c], the first send[0] of which go to rank 0 and so on; those that come, by rank."""
        if self.desc.ranks == 1:
            return rows
        into = rows.new_empty((sum(receive), rows.shape[1]))
        with self._faults.name(what):  # as bytes, which gloo takes of any type
            distributed.all_to_all_single(into.view(torch.uint8), rows.contiguous().view(torch.uint8), receive, send,
                                          group=self._group)
        return into

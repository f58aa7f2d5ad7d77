# SPDX-License-Identifier: Apache-2.0
"""Messages between the hosts, along a rail: the ranks that have one index within their hosts.

A message is the rows of one pass that two counterparts have for each other, as bytes, one tensor behind the other.
"""

import torch
from torch import distributed

from tessera.hosts.faults import Faults


class Rail:
    """Sends to counterparts and counts the bytes.

    group: of the rail's ranks, by host. bytes_sent: to the counterpart on each host, since the object was made.
    """

    def __init__(self, group, faults: Faults, device: torch.device):
        self.group, self._faults, self._device = group, faults, device
        self.host, self.hosts = faults.topology.host, faults.topology.hosts
        self.bytes_sent = [0] * self.hosts
        self._peers = [distributed.get_global_rank(group, host) for host in range(self.hosts)]

    def exchange(self, what: str, parts: list[torch.Tensor], to: int, rows: int, of: int, like: list) -> list:
        """Sends the parts, matrices of one number of rows, to the counterpart on host `to`, and receives `rows` rows
        from that on host `of`, as matrices with the (columns, dtype) of `like`."""
        message = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
        into = torch.empty(rows * bytes_of_row(like), dtype=torch.uint8, device=self._device)
        self._move(what, {to: message}, {of: into})
        received, begin = [], 0
        for columns, dtype in like:
            end = begin + rows * columns * dtype.itemsize
            received.append(into[begin:end].view(dtype).view(rows, columns))
            begin = end
        return received

    def exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """counts [H] int64: one for each host, this one excepted; those that the counterparts have for this rank."""
        theirs = torch.zeros_like(counts)
        others = [host for host in range(self.hosts) if host != self.host]
        self._move("numbers of rows", {host: counts[host:host + 1] for host in others},
                   {host: theirs[host:host + 1] for host in others})
        return theirs

    def _move(self, what: str, out: dict, into: dict) -> None:
        """Tensors by host, none sent that is empty. On a GPU the current stream waits, not the host."""
        calls = [(host, distributed.P2POp(call, tensor, self._peers[host], self.group))
                 for call, tensors in ((distributed.isend, out), (distributed.irecv, into))
                 for host, tensor in tensors.items() if tensor.numel()]
        for host, tensor in out.items():
            self.bytes_sent[host] += tensor.nbytes
        if not calls:
            return
        host = next(iter(into))
        with self._faults.name(what, host):
            works = distributed.batch_isend_irecv([call for _, call in calls])
        # Where a group gives one handle for all calls (NCCL), a failure is that of the host that rows come from.
        hosts = [host for host, _ in calls] if len(works) == len(calls) else [host] * len(works)
        for host, work in zip(hosts, works, strict=True):
            with self._faults.name(what, host):
                work.wait()


def bytes_of_row(parts: list) -> int:
    """Of a message with these (columns, dtype)."""
    return sum(columns * dtype.itemsize for columns, dtype in parts)

# SPDX-License-Identifier: Apache-2.0
"""Messages between the hosts, along a rail: the ranks that have one index within their hosts.

A message is the rows of one pass that two counterparts have for each other, as bytes, one tensor behind the other.
"""

import torch
from torch import distributed

from tessera.hosts.faults import Faults
from tessera.hosts.watch import Watch


def waits_on_stream(device: torch.device) -> bool:
    """Whether a wait for a message is the stream's (NCCL), and not the host's (gloo)."""
    return device.type == "cuda"


class Crossing:
    """A message that was sent, and the one that comes for it. Both keep their memory until `wait` has been called."""

    def __init__(self, rail: "Rail", what: str, out: torch.Tensor, into: torch.Tensor, rows: int, like: list,
                 works: list):
        self._rail, self._what, self._out, self._into = rail, what, out, into
        self._rows, self._like, self._works = rows, like, works

    def wait(self) -> list[torch.Tensor]:
        """What came, matrices of its rows. The host waits for it, or on a GPU the current stream."""
        self._rail.finish(self._what, self._works)
        received, begin = [], 0
        for columns, dtype in self._like:
            end = begin + self._rows * columns * dtype.itemsize
            received.append(self._into[begin:end].view(dtype).view(self._rows, columns))
            begin = end
        return received


class Rail:
    """Sends to counterparts and counts the bytes.

    group: of the rail's ranks, by host. seconds: how long a wait for a counterpart may take. bytes_sent: to the
    counterpart on each host, since the object was made.
    """

    def __init__(self, group, faults: Faults, device: torch.device, seconds: float):
        self.group, self._faults, self._device = group, faults, device
        self.host, self.hosts = faults.topology.host, faults.topology.hosts
        self.bytes_sent = [0] * self.hosts
        self._peers = [distributed.get_global_rank(group, host) for host in range(self.hosts)]
        self._watch = Watch(faults, seconds, group.abort) if waits_on_stream(device) else None

    def begin(self, what: str, parts: list[torch.Tensor], to: int, rows: int, of: int, like: list) -> Crossing:
        """Sends the parts, matrices of one number of rows, to the counterpart on host `to`, and receives `rows` rows
        from that on host `of`, as matrices with the (columns, dtype) of `like`. On a GPU it is sent behind what the
        current stream has."""
        message = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
        into = torch.empty(rows * bytes_of_row(like), dtype=torch.uint8, device=self._device)
        return Crossing(self, what, message, into, rows, like, self._start(what, {to: message}, {of: into}))

    def exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """counts [H] int64: one for each host, this one excepted; those that the counterparts have for this rank."""
        theirs, what = torch.zeros_like(counts), "numbers of rows"
        others = [host for host in range(self.hosts) if host != self.host]
        self.finish(what, self._start(what, {host: counts[host:host + 1] for host in others},
                                      {host: theirs[host:host + 1] for host in others}))
        return theirs

    def read(self, numbers: torch.Tensor) -> list:
        """The numbers, for which the host waits."""
        read = numbers.tolist()
        self._faults.refuse()  # they are no numbers where a counterpart did not come
        return read

    def finish(self, what: str, works: list) -> None:
        """Waits for what `_start` has begun."""
        for host, work in works:
            if self._watch is not None:
                self._watch.wait(what, host, work)
            else:
                with self._faults.name(what, host):
                    work.wait()

    def close(self) -> None:
        """Ends the thread that watches, where there is one."""
        if self._watch is not None:
            self._watch.close()

    def _start(self, what: str, out: dict, into: dict) -> list:
        """Tensors by host, none sent that is empty: (the host that is waited for, what is waited for) of each call."""
        self._faults.refuse()
        calls = [(host, distributed.P2POp(call, tensor, self._peers[host], self.group))
                 for call, tensors in ((distributed.isend, out), (distributed.irecv, into))
                 for host, tensor in tensors.items() if tensor.numel()]
        for host, tensor in out.items():
            self.bytes_sent[host] += tensor.nbytes
        # NCCL takes all calls as one, whose failure is that of the host that rows come from.
        together = [(next(iter(into)), calls)] if self._device.type == "cuda" and calls else []
        works = []
        for host, some in together or [(host, [(host, call)]) for host, call in calls]:
            with self._faults.name(what, host):
                works += [(host, work) for work in distributed.batch_isend_irecv([call for _, call in some])]
        return works


def bytes_of_row(parts: list) -> int:
    """Of a message with these (columns, dtype)."""
    return sum(columns * dtype.itemsize for columns, dtype in parts)

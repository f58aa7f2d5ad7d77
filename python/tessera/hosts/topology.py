# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a process group share a host, and the groups that follow from it."""

import contextlib
import dataclasses
import datetime
import itertools
import os
import pathlib
import socket

from torch import distributed

from tessera.expert_parallel_session import MAX_RANKS

# Waits within a host take so much longer than those between hosts, whose error names a host and comes first.
LOCAL_SECONDS = 10
# torch reads it when it makes a group, and has no thread then that watches the group and ends the process.
NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
# Thread blocks of NCCL's kernel on a rail where passes leave SMs to it, and those SMs: kernels of passes are made of
# pairs of SMs, of which each of 8 GPCs may have one left over.
RAIL_BLOCKS = 8
RAIL_SMS = RAIL_BLOCKS + 8
BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """What NCCL goes by: NCCL_HOSTID, else the name of the host and the id of its boot."""
    boot = BOOT_ID.read_text(encoding="ascii").strip() if BOOT_ID.exists() else ""
    return os.environ.get("NCCL_HOSTID") or f"{socket.gethostname()} {boot}".strip()


@dataclasses.dataclass(frozen=True)
class Topology:
    """Rank `rank` of hosts * local ranks, those of a host being consecutive: rank = host * local_ranks + local."""

    rank: int
    ranks: int
    hosts: int

    @property
    def local_ranks(self) -> int:
        return self.ranks // self.hosts

    @property
    def host(self) -> int:
        return self.rank // self.local_ranks

    def counterpart(self, host: int) -> int:
        """The rank of that host on this rank's rail."""
        return host * self.local_ranks + self.rank % self.local_ranks

    def of_host(self, host: int) -> range:
        """Its ranks."""
        return range(host * self.local_ranks, (host + 1) * self.local_ranks)

    def name(self, host: int) -> str:
        ranks = self.of_host(host)
        return f"host {host} ({f'ranks {ranks[0]}-{ranks[-1]}' if len(ranks) > 1 else f'rank {ranks[0]}'})"

    def name_rank(self, rank: int) -> str:
        return f"rank {rank} of {self.name(rank // self.local_ranks)}"


def hosts_of(names: list[str]) -> int:
    """How many hosts ranks with these names of their hosts have.

    Raises:
        ValueError: Hosts have different numbers of ranks, or ranks of a host are not consecutive.
    """
    runs = [(name, len(list(run))) for name, run in itertools.groupby(names)]
    if len({name for name, _ in runs}) != len(runs):
        raise ValueError(f"hosts: ranks of a host are consecutive, and those here are on {', '.join(names)}; number "
                         "ranks host by host, as torchrun does")
    if len({count for _, count in runs}) != 1:
        counts = ", ".join([f"{count} on {name}" for name, count in runs])
        raise ValueError(f"hosts: equal numbers of ranks on all hosts; there are {counts}")
    return len(runs)


def find(rank: int, names: list[str], hosts: int | str) -> Topology:
    """The topology that `hosts` says, or with "auto" the names.

    Raises:
        ValueError: The ranks cannot be divided so.
    """
    ranks = len(names)
    if hosts == "auto":
        hosts = hosts_of(names)
    if isinstance(hosts, bool) or not isinstance(hosts, int) or hosts < 1 or ranks % hosts:
        raise ValueError(f"hosts={hosts!r}: \"auto\", or a number that divides the {ranks} ranks of the group")
    if ranks // hosts > MAX_RANKS:
        raise ValueError(f"hosts={hosts}: {ranks // hosts} ranks on each host; at most {MAX_RANKS}")
    return Topology(rank, ranks, hosts)


@contextlib.contextmanager
def _watched_by_us():
    """Groups of NCCL that are made in it have no thread of torch's which ends the process where a rank is lost."""
    before = os.environ.get(NO_WATCHDOG)
    os.environ[NO_WATCHDOG] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_WATCHDOG]
        else:
            os.environ[NO_WATCHDOG] = before


def _few_blocks():
    """Options of a group of NCCL whose kernels fit into the SMs that passes leave to them."""
    made = distributed.ProcessGroupNCCL.Options()
    made.config.max_ctas = RAIL_BLOCKS
    made.config.cga_cluster_size = 0  # a cluster would want its SMs in one GPC
    return made


def make_groups(topologies: dict, group, seconds: float, leaves_sms: bool) -> tuple:
    """(the group of this rank's host, that of its rail). Collective over all ranks, as torch makes groups.

    Args:
        topologies: That of each group whose object is made now, by the group's global ranks, in the same order on all
            ranks.
        group: This object's.
        seconds: How long a wait in the rail's group may take; one within a host LOCAL_SECONDS more.
        leaves_sms: Whether rails are NCCL's and run beside passes that leave RAIL_SMS to them.
    """
    backend, mine = distributed.get_backend(group), distributed.get_rank()
    local = rail = None
    for members, one in topologies.items():
        for of_host, ranks in ((True, [one.of_host(host) for host in range(one.hosts)]),
                               (False, [range(each, len(members), one.local_ranks) for each in one.of_host(0)])):
            for some in ranks:
                limit = datetime.timedelta(seconds=seconds + LOCAL_SECONDS if of_host else seconds)
                with contextlib.nullcontext() if of_host else _watched_by_us():
                    made = distributed.new_group([members[rank] for rank in some], timeout=limit, backend=backend,
                                                 pg_options=_few_blocks() if leaves_sms and not of_host else None)
                if mine in [members[rank] for rank in some]:
                    local, rail = (made, rail) if of_host else (local, made)
    return local, rail

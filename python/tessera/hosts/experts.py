# SPDX-License-Identifier: Apache-2.0
"""The object behind ExpertParallel(hosts=) and ExpertParallel(device="cpu"): joins the ranks of all hosts, and makes
passes of a Rotation."""

import contextlib
import dataclasses
import itertools
import warnings
from typing import NamedTuple

import torch
from torch import distributed

from tessera import expert_parallel_session, expert_parallel_training, functional, options
from tessera.expert_parallel_checks import check_shapes, gather, narrowed, refuse_differences
from tessera.expert_parallel_library import TENSORS
from tessera.expert_parallel_session import Session, check_devices, gpu, make_desc
from tessera.hosts import topology as topologies
from tessera.hosts.advice import advice
from tessera.hosts.cpu_session import CpuSession
from tessera.hosts.faults import Faults
from tessera.hosts.messages import Rail
from tessera.hosts.rotation import Rotation

EXCHANGES = ("static", "counted")
# From so many hosts on `static` sends half as many rows again as are needed.
COUNTED_FROM = 5
# The library's bound, less what waits within a host take longer.
MAX_SECONDS = expert_parallel_session.MAX_SECONDS - topologies.LOCAL_SECONDS
_made = itertools.count()


def _checked(hosts, exchange, overlap, device, windows, time_limit: float, sizes: dict) -> torch.device:
    """The device. What may fail on one rank alone comes here, before the ranks meet."""
    if exchange is not None and exchange not in EXCHANGES:
        raise ValueError(f"exchange={exchange!r}: choose from {', '.join(EXCHANGES)}")
    if exchange is not None and hosts == 1:
        raise ValueError(f"exchange={exchange!r}: between hosts; leave it out with hosts=1")
    if overlap and hosts == 1:
        raise ValueError("overlap=True: of rows between hosts; leave it out with hosts=1")
    if windows is not None:
        raise ValueError("windows: addresses within a host of GPUs; leave them out with hosts=, and on the CPU")
    if sizes["partial_combine"] and str(device) == "cpu":
        raise ValueError("partial_combine=True: for links between GPUs; leave it out on the CPU")
    if not 0 < time_limit <= MAX_SECONDS:
        raise ValueError(f"time_limit={time_limit}: seconds, above 0 and at most {MAX_SECONDS}")
    if sizes["activation"] not in options.ACTIVATIONS:
        raise ValueError(f"activation={sizes['activation']!r}: choose from {', '.join(options.ACTIVATIONS)}")
    return torch.device("cpu") if str(device) == "cpu" else gpu(device)


def _found(members: tuple, joined: dict) -> topologies.Topology:
    """The topology of the group with these global ranks, as its first rank has it. What is wrong with one group all
    ranks say, so that none waits for it."""
    fields, names = joined[members[0]][0], [joined[rank][1].host for rank in members]
    topology = topologies.find(0, names, fields["hosts"])
    experts, top_k = fields["experts"], fields["top_k"]
    if experts < 1 or experts % topology.ranks:
        raise ValueError(f"experts={experts}: a multiple of the {topology.ranks} ranks")
    if top_k > experts // topology.hosts:
        raise ValueError(f"top_k={top_k}: at most the {experts // topology.hosts} experts of each of {topology.hosts} "
                         "hosts")
    return topology


class _Rank(NamedTuple):
    """A rank introduces itself by the global ranks of its group, its host, and a number that the object alone has."""

    members: tuple
    host: str
    number: int


def _tell(fields: dict, members: tuple, failure: str | None) -> list:
    """What all ranks of the default group say, by global rank."""
    return gather((fields, _Rank(members, topologies.host_name(), next(_made)), failure), None)


def _join(fields: dict, members: tuple) -> dict:
    """The same. All ranks raise where one cannot join, or where ranks of one group differ."""
    said = _tell(fields, members, None)
    refuse_differences([({}, None, failure) for _, _, failure in said])
    for rank, (_, one, _) in enumerate(said):
        # A rank that joins a session of one host says nothing of itself, and differs in `hosts`.
        of_group = one.members if isinstance(one, _Rank) else members
        if rank == of_group[0] or not isinstance(one, _Rank):
            refuse_differences([said[each] for each in of_group], list(of_group))
    return dict(enumerate(said))


class HostsExperts:
    """A session over hosts; arguments as ExpertParallel's, which documents them.

    topology: Topology. rail: the Rail, which counts bytes. session: of this host's ranks.
    """

    def __init__(self, *, hosts, exchange, overlap, group, device, windows, time_limit: float, training: bool, **sizes):
        whole = group or distributed.group.WORLD
        members = tuple(distributed.get_process_group_ranks(whole))
        fields = {"hosts": hosts, "group": members, "exchange": exchange, "overlap": bool(overlap),
                  "training": bool(training), "time_limit": time_limit, **sizes}
        try:
            device = _checked(hosts, exchange, overlap, device, windows, time_limit, sizes)
        except Exception as error:
            _tell(fields, members, f"{type(error).__name__}: {error}")
            raise
        self.device = device
        with self._on_device():
            self._make(_join(fields | {"device": device.type}, members), whole, members, exchange, bool(overlap),
                       time_limit, training, sizes)

    def _make(self, joined: dict, whole, members: tuple, exchange, overlap: bool, time_limit: float, training: bool,
              sizes: dict):
        """When all ranks have joined."""
        found = {one.members: _found(one.members, joined) for _, one, _ in joined.values()}
        self.topology = topology = dataclasses.replace(found[members], rank=distributed.get_rank(whole))
        device, self._training = self.device, bool(training)
        self.sizes = make_desc(topology.rank, topology.ranks, training=training, time_limit=time_limit,
                               **{name: sizes[name] for name in sizes if name not in ("save", "max_rows")})
        leaves_sms = overlap and device.type == "cuda"
        self._groups = local, rail = topologies.make_groups(found, whole, time_limit, leaves_sms)
        self.faults = Faults(topology, f"{members[0]}-{joined[members[0]][1].number}")
        self.rail = Rail(rail, self.faults, device, time_limit)
        self.session = self._session(sizes | {
            "experts": sizes["experts"] // topology.hosts, "training": training, "group": local, "device": device,
            "time_limit": time_limit + topologies.LOCAL_SECONDS, "sms": self._sms_of_passes() if leaves_sms else 0})
        counted = exchange == "counted" or exchange is None and topology.hosts >= COUNTED_FROM
        self._rotation = Rotation(self.session, self.rail, self.faults, sizes["experts"], counted, overlap)
        advised = advice(topology, self.sizes) if training else None
        if advised is not None and topology.rank == 0:
            warnings.warn(advised, stacklevel=4)

    def _session(self, arguments: dict):
        """This host's. Where one host has none all ranks raise."""
        try:
            session = (CpuSession(faults=self.faults, **arguments) if self.device.type == "cpu" else
                       Session(windows=None, **arguments))
        except Exception as error:
            gather((None, None, f"{type(error).__name__}: {error}"), None)
            self._leave()
            raise
        try:
            refuse_differences(gather(({}, None, None), None))
        except RuntimeError:
            session.abort()
            self._leave()
            raise
        return session

    def _sms_of_passes(self) -> int:
        """What is left beside the rail."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count - topologies.RAIL_SMS

    def _on_device(self):
        """torch's collectives go by its current GPU, as the passes of a session do."""
        elsewhere = self.device.type == "cuda" and torch.cuda.current_device() != self.device.index
        return torch.cuda.device(self.device) if elsewhere else contextlib.nullcontext()

    def __call__(self, x, topk_ids, topk_weights, w_up, w_down, out, b_up, b_down) -> torch.Tensor:
        layer = w_up.data_ptr()
        if torch._C._is_any_autocast_enabled():
            x, w_up, w_down, b_up, b_down = functional.autocast((x, w_up, w_down, b_up, b_down))
        tensors = (x, topk_ids, topk_weights, w_up, w_down, b_up, b_down)
        self._check(tensors, out)
        with self._on_device():
            o = self._rotation(layer, x.contiguous(), narrowed(topk_ids, self.sizes.experts),
                               topk_weights.float().contiguous(), (w_up, w_down, b_up, b_down))
        return o if out is None else out.copy_(o)

    def _check(self, tensors: tuple, out) -> None:
        x, *_, b_up, b_down = tensors
        if (b_up is None) != (b_down is None):
            raise ValueError("b_up, b_down: give both or neither")
        gradients = expert_parallel_training.needs_gradients(*tensors)
        if not self._training and (gradients or self.session.training is None
                                   and not self.session.fuses(*tensors[3:])):
            raise RuntimeError("a pass with gradients, or with biases that one launch does not take: make the object "
                               "with training=True, or call it under torch.no_grad() and without biases")
        if out is not None and gradients:
            raise ValueError("out: a pass with gradients makes its own result")
        check_devices((*TENSORS[:5], "b_up", "b_down"), tensors, self.device)
        dtype = x.dtype if self.device.type == "cpu" and x.dtype is torch.float32 else torch.bfloat16
        check_shapes(self.sizes, dtype, *tensors)

    def input(self, tokens: int) -> torch.Tensor:
        """Has no place in a window: rows of other hosts come there."""
        raise NotImplementedError("input(): of one host on GPUs; over several hosts, and on the CPU, pass x itself")

    def check(self) -> None:
        """Reports to the other ranks how far this one is, too."""
        self.faults.report()
        self.faults.refuse()
        with self.faults.within_host():
            self.session.check()

    def close(self) -> None:
        """Collective."""
        self.rail.close()
        self.session.close()
        self._leave()

    def abort(self) -> None:
        """Without the other ranks. The rail goes first: this rank's GPU may wait there."""
        self.rail.close()
        if self.device.type == "cuda":
            for group in self._groups:
                with contextlib.suppress(RuntimeError):  # where it takes longer than its limit it goes on by itself
                    group.abort()
        self.session.abort()
        self._leave()

    def _leave(self) -> None:
        for group in self._groups:
            distributed.destroy_process_group(group)
        self._groups = ()


def over_hosts(hosts, device) -> bool:
    """Whether HostsExperts serves these arguments, and not a Session alone."""
    return hosts != 1 or str(device) == "cpu"

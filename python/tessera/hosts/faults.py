# SPDX-License-Identifier: Apache-2.0
"""Names who did not come: what a rank was doing when a wait for another one ended in vain, and what the others have
reported of themselves."""

import contextlib
import re
import threading

from torch import distributed

# Errors of gloo and NCCL name a place in their sources so.
_PLACE = re.compile(r"\[[^\]]*:\d+\] ")
# Seconds that a rank which has failed waits for what others have reported: the store may be where a rank has died.
STORE_SECONDS = 2


class Faults:
    """The passes of this rank, as far as it has reported them to the others through the process group's store.

    topology: Topology of the ranks. name: of the object, the same on all ranks and of no other object.
    """

    def __init__(self, topology, name: str):
        self.topology, self.passes, self.failure = topology, 0, None
        self._prefix = f"tessera/hosts/{name}/"
        self._doing = "making the object"
        self._store = distributed.distributed_c10d._get_default_store()

    def begin(self, what: str) -> None:
        """A pass of which `what` is said: forward or backward."""
        if self.failure is not None:
            raise RuntimeError(f"an earlier pass has failed, abort() and make the object anew: {self.failure}")
        self.passes += 1
        self._doing = what

    @contextlib.contextmanager
    def name(self, what: str, host: int | None = None):
        """What fails in it is named: a wait for ranks of this host, or for this rank's counterpart on another host."""
        try:
            yield
        except RuntimeError as error:
            self.failure = self._text(what, host, _PLACE.sub("", str(error)).split("\n")[0].split(". ")[0])
            raise RuntimeError(self.failure) from error

    def report(self) -> None:
        """Writes how many passes this rank has made, for others that wait for it."""
        self._bounded(self._report)

    def _report(self, states: dict | None = None) -> None:
        state = f"at pass {self.passes}" if self.failure is None else f"failed in pass {self.passes}"
        self._store.set(self._prefix + str(self.topology.rank), state)

    def _collect(self, states: dict) -> None:
        self._report()
        for rank in range(self.topology.ranks):
            if rank != self.topology.rank:
                key = self._prefix + str(rank)
                states[rank] = self._store.get(key).decode() if self._store.check([key]) else "has reported nothing"

    def _bounded(self, run) -> dict:
        """What run(states) leaves in `states` within STORE_SECONDS; a store that is gone or late leaves nothing."""
        states = {}

        def guarded():
            with contextlib.suppress(RuntimeError):
                run(states)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        thread.join(STORE_SECONDS)
        return dict(states)

    def _text(self, what: str, host: int | None, error: str) -> str:
        topology, self.failure = self.topology, "fails"
        awaited = (f"rank {topology.counterpart(host)} of {topology.name(host)}" if host is not None
                   else f"a rank of its own {topology.name(topology.host)}")
        states = self._bounded(self._collect)
        known = "; ".join([f"rank {rank} {state}" for rank, state in sorted(states.items())]) or "the store is gone"
        return (f"rank {topology.rank} at pass {self.passes} ({self._doing}), {what}: {awaited} did not come "
                f"({error}); last reported: {known}; abort() on all ranks and make the group and this object anew")

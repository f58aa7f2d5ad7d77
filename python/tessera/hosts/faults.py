# SPDX-License-Identifier: Apache-2.0
"""Names who did not come: what a rank was doing when a wait for another one ended in vain, and what the others have
reported of themselves."""

import contextlib
import re
import threading
import time
from typing import NamedTuple

from torch import distributed

# Errors of gloo, and of NCCL as torch has them, name a place in their sources so.
_PLACE = re.compile(r"\[[^\]]*:\d+\] |NCCL error in: \S+:\d+, ")
# Seconds that a rank which has failed waits for what others have reported: the store may be where a rank has died. For
# REPORT_SECONDS of these it waits for those that are about to fail, too.
STORE_SECONDS = 2
REPORT_SECONDS = 1
# An ExpertParallel on GPUs begins its error so where a pass has failed: a rank did not come, or another fault.
_OF_SESSION = re.compile(r"rank \d+ (waited )?")
_FAILED = re.compile(r"failed in pass \d+, waiting for (.*)")


class Moment(NamedTuple):
    """What a rank does: the number of its pass, and forward or backward."""

    number: int
    what: str


class Faults:
    """The passes of this rank, as far as it has reported them to the others through the process group's store.

    topology: Topology of the ranks. name: of the object, the same on all ranks and of no other object. moment: the
    Moment of what this rank's host enqueues. failure: None, or the text of the first wait that was in vain.
    """

    def __init__(self, topology, name: str):
        self.topology, self.failure = topology, None
        self.moment = Moment(0, "making the object")
        self._prefix = f"tessera/hosts/{name}/"
        self._store = distributed.distributed_c10d._get_default_store()
        self._state, self._lock = None, threading.Lock()

    def begin(self, what: str) -> None:
        """A pass of which `what` is said: forward or backward."""
        if self.failure is not None:
            raise RuntimeError(f"an earlier pass has failed, abort() and make the object anew: {self.failure}")
        self.moment = Moment(self.moment.number + 1, what)

    def refuse(self) -> None:
        """Raises what has failed meanwhile, where waits are watched by a thread of their own."""
        if self.failure is not None:
            raise RuntimeError(self.failure)

    @contextlib.contextmanager
    def name(self, what: str, host: int | None = None):
        """What fails in it is named: a wait for ranks of this host, or for this rank's counterpart on another host."""
        try:
            yield
        except RuntimeError as error:
            self.fail(what, host, str(error), self.moment)
            raise RuntimeError(self.failure) from error

    @contextlib.contextmanager
    def within_host(self):
        """Names what an ExpertParallel on GPUs raises in it, which numbers the ranks of this host from 0 on."""
        try:
            yield
        except RuntimeError as error:
            said = _OF_SESSION.match(str(error))
            if said is None or str(error) == self.failure:
                raise
            if said[1]:
                self.fail("a pass within the host", None, str(error), self.moment)
                raise RuntimeError(self.failure) from error
            raise RuntimeError(f"within {self.topology.name(self.topology.host)}: {error}") from error

    def fail(self, what: str, host: int | None, error: str, moment: Moment) -> None:
        """Notes and reports that this rank's wait at the moment was in vain. The first failure stays: the others follow
        from it."""
        with self._lock:
            if self.failure is None:
                error = _PLACE.sub("", error).split("\n")[0].split(". ")[0]
                self.failure = self._text(what, host, error, moment)

    def report(self) -> None:
        """Writes how many passes this rank has made, for others that wait for it."""
        self._bounded(self._report)

    def _report(self, states: dict | None = None) -> None:
        self._store.set(self._prefix + str(self.topology.rank), self._state or f"at pass {self.moment.number}")

    def _collect(self, states: dict) -> None:
        self._report()
        end = time.monotonic() + REPORT_SECONDS
        while True:
            for rank in range(self.topology.ranks):
                if rank != self.topology.rank:
                    key = self._prefix + str(rank)
                    states[rank] = self._store.get(key).decode() if self._store.check([key]) else "has reported nothing"
            failed = sum(bool(_FAILED.match(state)) for state in states.values())
            if failed + 1 >= len(states) or time.monotonic() > end:
                return
            time.sleep(0.05)

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

    def _text(self, what: str, host: int | None, error: str, moment: Moment) -> str:
        topology, local = self.topology, self.topology.of_host(self.topology.host)
        if host is None:
            awaited = [rank for rank in local if rank != topology.rank]
            said = f"a rank of its own {topology.name(topology.host)}"
        else:
            awaited = [topology.counterpart(host)]
            said = topology.name_rank(awaited[0])
        self._state = f"failed in pass {moment.number}, waiting for {' or '.join([f'rank {rank}' for rank in awaited])}"
        states = self._bounded(self._collect)
        known = "; ".join([f"rank {rank} {state}" for rank, state in sorted(states.items())]) or "the store is gone"
        lost = [topology.name_rank(rank) for rank in self._lost(awaited, states)]
        want = f" for want of {lost[0]}" if len(lost) == 1 and lost[0] != said else ""
        return (f"rank {topology.rank} at pass {moment.number} ({moment.what}), {what}: {said} did not come ({error})"
                f"{want}; last reported: {known}; abort() on all ranks and make the group and this object anew")

    def _lost(self, awaited: list[int], states: dict) -> set[int]:
        """Who of the awaited ranks has not failed, and who that those have waited for which have."""
        lost, seen, unseen = set(), {self.topology.rank}, list(awaited)
        while unseen:
            rank = unseen.pop()
            if rank in seen:
                continue
            seen.add(rank)
            failed = _FAILED.match(states.get(rank, ""))
            if failed:
                unseen += [int(number) for number in re.findall(r"\d+", failed[1])]
            else:
                lost.add(rank)
        return lost

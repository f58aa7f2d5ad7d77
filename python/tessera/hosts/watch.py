# SPDX-License-Identifier: Apache-2.0
"""Waits for other hosts that a GPU's stream makes, and not its host: each ends within a limit, by a thread of ours.

torch's own thread ends the process where a rank is lost or late, and says what it was doing and not who did not come.
Rails have none (topology.py), so that the error of this one is the only one.
"""

import contextlib
import ctypes
import threading
import time
from collections import deque
from typing import Callable, NamedTuple

import torch

from tessera.hosts.faults import Faults, Moment
from tessera.ops.autograd import captures

# Between two looks at what is waited for.
POLL_SECONDS = 0.05


class _Wait(NamedTuple):
    """One of the stream: whether it has come there, and whether it has gone on."""

    what: str
    host: int
    moment: Moment
    reached: Callable[[], bool]
    passed: Callable[[], bool]


def on_stream(work) -> tuple | None:
    """The current stream waits for the work. (reached, passed) as in _Wait; None where it is captured into a graph,
    whose waits nobody can ask for."""
    if captures():
        work.synchronize()
        return None
    reached, passed = torch.cuda.Event(), torch.cuda.Event()
    reached.record()
    work.synchronize()  # not wait(), which waits on the host in a group without a watchdog
    passed.record()
    return reached.query, passed.query


def beside_captures() -> None:
    """This thread may ask for events while others capture graphs, which would end a capture otherwise."""
    relaxed = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


class Watch:
    """Ends waits of the stream for other hosts. Time before the stream has come to a wait does not count, so that
    whatever is enqueued ahead of it may take as long as it likes.

    Args:
        faults: Told of the first wait that takes longer than `seconds`.
        seconds: How long one may take.
        let_go: Called behind that: ends what the GPU waits for, so that streams, and hosts that wait for them, go on.
    """

    def __init__(self, faults: Faults, seconds: float, let_go: Callable[[], None]):
        self._faults, self._seconds, self._let_go = faults, seconds, let_go
        self._waits, self._changed, self._thread, self._ended = deque(), threading.Condition(), None, False

    def wait(self, what: str, host: int, work) -> None:
        """The current stream waits for the work, a message of the counterpart on the host."""
        events = on_stream(work)
        if events is None:
            return
        with self._changed:
            self._waits.append(_Wait(what, host, self._faults.moment, *events))
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="tessera rail")
            self._thread.start()

    def close(self) -> None:
        """Nothing is watched any more."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _run(self) -> None:
        # Where events cannot be asked for the GPU has failed, and where nothing can be let go the failure stands: both
        # are raised where they are used next.
        with contextlib.suppress(RuntimeError):
            beside_captures()
            late = self._late()
            if late is not None:
                self._faults.fail(late.what, late.host, f"no message within {self._seconds:g} s", late.moment)
                self._let_go()

    def _late(self) -> _Wait | None:
        """The first wait that takes too long; None when nothing is watched any more."""
        since = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waits or self._ended)
                if self._ended:
                    return None
                first = self._waits[0]
            if first.passed():
                self._waits.popleft()
                since = None
                continue
            if since is None and first.reached():
                since = time.monotonic()
            if since is not None and time.monotonic() - since > self._seconds:
                return first
            time.sleep(POLL_SECONDS)

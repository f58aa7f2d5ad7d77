# SPDX-License-Identifier: Apache-2.0
"""The side stream of a session, on which rows come and go while the GPU multiplies."""

import contextlib

import torch

SIDE_SMS = 24  # SMs that move rows on the side stream while the others multiply
TOKEN_SMS = 8  # the same where tokens come, each once: the link needs no more, and the GEMMs have these
BESIDE_SMS = 16  # for those of d_o that come while the GEMM runs that reads them
MAX_MAINS = 64  # current streams that are kept in mind


class SideStream:
    """A stream beside the current one, on which rows come and go while the GPU multiplies."""

    def __init__(self):
        self.stream = self.main = self.begun = None
        self._mains = {}  # torch's streams by what torch knows them by: making an object takes longer than the rest

    def make(self) -> torch.cuda.Stream:
        """The stream, which the first call makes."""
        if self.stream is None:
            self.stream, self.begun = torch.cuda.Stream(priority=-1), torch.cuda.Event()
            self.begun.record(self.stream)  # makes the event
            self._forked, self._done = torch.cuda.Event(), torch.cuda.Event()
        return self.stream

    def begin(self) -> None:
        """What is enqueued on it from now on waits for what the current stream has, and runs while that goes on."""
        self.make()
        current = torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())
        self.main = self._mains.get(current) or self._object(current)
        # torch's wait_stream() makes an event each time.
        self._forked.record(self.main)
        self.stream.wait_event(self._forked)

    def _object(self, current: tuple) -> torch.cuda.Stream:
        if len(self._mains) >= MAX_MAINS:
            self._mains.clear()
        number, device, kind = current
        stream = self._mains[current] = torch.cuda.Stream(stream_id=number, device_index=device, device_type=kind)
        return stream

    @contextlib.contextmanager
    def fork(self):
        """begin(), and the side stream is the current one."""
        self.begin()
        torch.cuda.set_stream(self.stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(self.main)

    def wait_until_begun(self) -> None:
        """The current stream waits until the call that has got `begun` has its SMs: what follows would take all."""
        self.main.wait_event(self.begun)

    @contextlib.contextmanager
    def call(self, wanted: bool):
        """The call of the library that is enqueued in it, with the arguments that it gives, runs while what follows
        does; without `wanted` it runs before that."""
        if not wanted:
            self.join()
            yield {}
            return
        with self.fork():
            yield {"options": (("sms", SIDE_SMS),), "begun": self.begun.cuda_event}
        self.wait_until_begun()

    def leave(self) -> None:
        """A call of the library that follows has the current stream wait for it."""
        self.main = None

    def join(self) -> None:
        """The current stream waits for what the side stream has."""
        if self.main is not None:
            self._done.record(self.stream)
            self.main.wait_event(self._done)
        self.main = None

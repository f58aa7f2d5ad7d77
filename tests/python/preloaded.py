# SPDX-License-Identifier: Apache-2.0
"""A process that has imported torch and forks a test for whoever asks: the import takes longer than most tests.

    preloaded.py start SOCKET                 leaves it behind; it ends with the process that called this one
    preloaded.py run SOCKET SCRIPT [ARG...]   runs a script there with this environment, folder and files, and ends
                                              with its status
    preloaded.py end SOCKET

What runs there differs from a fresh process in that torch and transformers are imported already. Linux alone.
"""

import array
import contextlib
import json
import os
import pathlib
import select
import signal
import socket
import struct
import sys

HEADER = struct.Struct("!q")


@contextlib.contextmanager
def folder_of(path: str):
    """The name of `path` in its folder, which is the current one: a socket's path has 107 bytes at most."""
    before = os.getcwd()
    os.chdir(pathlib.Path(path).parent)
    try:
        yield pathlib.Path(path).name
    finally:
        os.chdir(before)


def connect(path: str) -> socket.socket:
    with folder_of(path) as name:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(name)
    return connection


def receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer where the other side has ended."""
    data = b""
    while len(data) < size and (part := connection.recv(size - len(data))):
        data += part
    return data


def run(path: str, arguments: list) -> int:
    """The status of the script; 1 where the server is lost."""
    job = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    with connect(path) as connection:
        files = array.array("i", [0, 1, 2])
        connection.sendmsg([HEADER.pack(len(job))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        connection.sendall(job)
        status = receive(connection, HEADER.size)
    if len(status) < HEADER.size:
        print("the process that forks tests has ended", file=sys.stderr)
        return 1
    status = HEADER.unpack(status)[0]
    if status < 0:  # the test died of this signal
        print(f"the test died of signal {-status}, {signal.Signals(-status).name}", file=sys.stderr)
        return 128 - status
    return status


def end(path: str) -> None:
    with contextlib.suppress(OSError), connect(path) as connection:
        connection.sendall(HEADER.pack(-1))
        receive(connection, 1)  # until it has ended


def import_all() -> None:
    """What tests import; no thread is left, which a fork would not have."""
    import gc

    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    gc.disable()
    import torch
    import torch._dynamo.testing
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.utils.checkpoint
    with contextlib.suppress(ImportError):
        import transformers.integrations.finegrained_fp8
        import transformers.integrations.moe  # noqa: F401
    gc.enable()
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1 and not torch.cuda.is_initialized(), f"{threads} threads"


class Server:
    """Its only process has no threads; every test is a child, the leader of a process group."""

    def __init__(self, listener: socket.socket, watched: int):
        self.listener, self.poll = listener, select.poll()
        self.connections = {}  # by file descriptor
        self.children = {}  # process, connection of its client and script, by the file descriptor of its end
        self.watched = os.pidfd_open(watched)
        for file in (self.listener.fileno(), self.watched):
            self.poll.register(file, select.POLLIN)

    def serve(self) -> dict | None:
        """In a child its job; None in the server, when it is to end."""
        while True:
            for file, _ in self.poll.poll():
                if file == self.watched:
                    return self.stop()
                if file == self.listener.fileno():
                    connection, _ = self.listener.accept()
                    self.connections[connection.fileno()] = connection
                    self.poll.register(connection, select.POLLIN)
                elif file in self.children:
                    self.finish(file)
                elif file in self.connections and (job := self.hear(file)) is not None:
                    return job or self.stop()

    def hear(self, file: int) -> dict | None:
        """A client asks once, and is gone when it is heard again."""
        connection = self.connections[file]
        data, files = b"", []
        with contextlib.suppress(ConnectionError):
            data, files, _, _ = socket.recv_fds(connection, HEADER.size, 3)
        if len(data) < HEADER.size:
            return self.forget(file)
        size = HEADER.unpack(data)[0]
        if size < 0:
            return {}
        job = json.loads(receive(connection, size))
        child = os.fork()
        if child == 0:
            os.setsid()
            for own, other in enumerate(files):
                os.dup2(other, own)
            for other in (*files, *self.connections, *self.children, self.watched, self.listener.fileno()):
                os.close(other)
            for other in self.connections.values():
                other.detach()
            self.listener.detach()
            return job
        for other in files:
            os.close(other)
        ends = os.pidfd_open(child)
        self.children[ends] = (child, connection, job["arguments"][0])
        self.poll.register(ends, select.POLLIN)
        return None

    def finish(self, ends: int) -> None:
        child, connection, script = self.children.pop(ends)
        self.poll.unregister(ends)
        os.close(ends)
        _, status, used = os.wait4(child, 0)
        print(f"{used.ru_utime + used.ru_stime:7.1f} processor seconds: {script}", flush=True)
        status = os.waitstatus_to_exitcode(status)
        if connection in self.connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(HEADER.pack(status))
            self.forget(connection.fileno())

    def forget(self, file: int) -> None:
        """A client that has ended takes its test with it."""
        self.poll.unregister(file)
        connection = self.connections.pop(file)
        self.kill([child for child, client, _ in self.children.values() if client is connection])
        connection.close()

    def stop(self) -> None:
        self.kill([child for child, _, _ in self.children.values()])

    @staticmethod
    def kill(children: list) -> None:
        for child in children:
            with contextlib.suppress(ProcessLookupError):  # it has ended, or leads no group yet
                os.killpg(child, signal.SIGKILL)


def become(job: dict) -> None:
    """Runs the job's script as the main module."""
    import types

    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    sys.stdout.reconfigure(write_through=bool(os.environ.get("PYTHONUNBUFFERED")))
    script = job["arguments"][0]
    sys.argv = job["arguments"]
    sys.path[0] = str(pathlib.Path(script).resolve().parent)
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    exec(compile(pathlib.Path(script).read_bytes(), script, "exec"), main.__dict__)


def start(path: str) -> None:
    """Returns when the server can be asked; its output goes to a file beside the socket."""
    watched = os.getppid()
    ready, readied = os.pipe()
    if os.fork():
        os.close(readied)
        if os.read(ready, 1) != b"+":
            sys.exit(f"no process that forks tests: {pathlib.Path(path + '.log').read_text()}")
        return
    os.setsid()
    log = os.open(path + ".log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for own, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, own)
    import_all()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with folder_of(path) as name:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(name)
    listener.listen(64)
    os.write(readied, b"+")
    os.close(readied)
    job = Server(listener, watched).serve()
    if job:
        become(job)
    else:
        os.unlink(path)


if __name__ == "__main__":
    if sys.argv[1] == "start":
        start(sys.argv[2])
    elif sys.argv[1] == "run":
        sys.exit(run(sys.argv[2], sys.argv[3:]))
    else:
        end(sys.argv[2])

# SPDX-License-Identifier: Apache-2.0
"""Programs of Python that a test runs as processes of their own. Where ctest has a process that has imported torch, it
forks them (preloaded.py): the import takes longer than most of these programs."""

import os
import pathlib
import socket
import subprocess
import sys

PRELOADED = pathlib.Path(__file__).parent / "preloaded.py"


def command(script: pathlib.Path, *arguments) -> list[str]:
    """What runs the script. Where it is forked, what it is started with is a process that ends as the script does, and
    takes the script with it; of signals only SIGKILL does what it does to a script without that process."""
    server = os.environ.get("TESSERA_PRELOADED", "")
    forks = pathlib.Path(server).is_socket()  # as in run.sh: the process has ended where ctest leaves its fixture out
    start = ["-I", "-S", "-B", PRELOADED, "run", server] if forks else ["-W", "ignore"]
    return [sys.executable, *map(str, (*start, script, *arguments))]


def start_ranks(count: int, script: pathlib.Path, *arguments) -> list[subprocess.Popen]:
    """Ranks on the CPU as torchrun starts them on one machine, with pipes for what they print."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1",
                   "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "localhost",
                   "MASTER_PORT": str(port)}
    return [subprocess.Popen(command(script, *arguments), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)]


def kill(ranks: list[subprocess.Popen]) -> None:
    """When it returns none of them is left: a pipe ends with the last process that has it."""
    for process in ranks:
        process.kill()
    for process in ranks:
        process.communicate(timeout=300)


def finish(ranks: list[subprocess.Popen]) -> list[tuple[str, str]]:
    """What each has printed, and its complaints; AssertionError with all of it where one has not ended well."""
    try:
        printed = [process.communicate(timeout=300) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    statuses = [process.returncode for process in ranks]
    assert not any(statuses), f"{statuses}: {printed}"
    return printed

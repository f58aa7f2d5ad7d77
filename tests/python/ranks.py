# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several ranks of a gloo group, each a process of this machine."""

import datetime
import multiprocessing
import os
import pathlib
import pickle
import tempfile
import time
import traceback

import torch
import torch.distributed as dist

torch.set_num_threads(1)  # a fork has no threads of its parent


def _run(rank: int, ranks: int, folder: str, pipe, function, arguments: tuple) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks,
                                timeout=datetime.timedelta(seconds=60))
        outcome = ("result", function(rank, *arguments))
    except BaseException as error:  # it is handed to the test, which knows what it expects
        outcome = (type(error).__name__, f"{error}\n{traceback.format_exc()}")
    pipe.send_bytes(pickle.dumps(outcome))
    (pathlib.Path(folder) / f"done-{rank}").touch()
    # Ranks end together: gloo's threads of one complain where the others are gone. One that was killed never comes.
    end = time.monotonic() + 20
    while len(list(pathlib.Path(folder).glob("done-*"))) < ranks and time.monotonic() < end:
        time.sleep(0.02)
    os._exit(0)


def run(ranks: int, function, *arguments, seconds: float = 120, dies: tuple = ()) -> list:
    """(kind, value) of each rank: ("result", what the function returns), (name of the exception, its text), or None of
    those in `dies`, which end without a word. The processes are forks."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(rank, ranks, folder, there, function, arguments), daemon=True)
            process.start()
            there.close()
            started.append((process, here))
        outcomes, end = [], time.monotonic() + seconds
        for rank, (process, pipe) in enumerate(started):
            try:
                came = pipe.poll(max(end - time.monotonic(), 0))
                outcomes.append(pickle.loads(pipe.recv_bytes()) if came else ("late", seconds))
            except EOFError:
                outcomes.append(None)
        for rank in dies:
            (pathlib.Path(folder) / f"done-{rank}").touch()
        for process, _ in started:
            process.join(1)
            process.kill()
            process.join()
    return outcomes


def results(outcomes: list) -> list:
    """What all ranks have returned; AssertionError with the text of one that has raised."""
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None and outcome[0] == "result", f"rank {rank}: {outcome}"
    return [value for _, value in outcomes]

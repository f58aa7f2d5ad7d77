# SPDX-License-Identifier: Apache-2.0
"""What the tests of frameworks have in common: versions, processes, and how losses are compared."""

import importlib.metadata
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
REQUIREMENTS = [HERE.parents[1] / "tools" / f"requirements-{name}.txt" for name in ("frameworks", "megatron")]


def needs(*packages: str) -> None:
    """Ends the program as skipped where a package is not there in the version that is pinned."""
    texts = "".join(requirements.read_text() for requirements in REQUIREMENTS)
    pinned = dict(re.findall(r"^([\w.-]+)==([\w.]+)", texts, re.MULTILINE))
    lacking = []
    for package in packages:
        try:
            found = importlib.metadata.version(package).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found != pinned[package]:
            lacking.append(f"{package} {pinned[package]} (found {found})")
    if lacking:
        print(f"skipped: lacks {', '.join(lacking)}; tools/bootstrap.sh frameworks installs it")
        sys.exit(77)


def ranks(program: str, case: dict, count: int = 2):
    """What rank 0 of `count` processes writes, as JSON, to case["results"]; their environment has rank and port."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder, "results.json")
        text = json.dumps({**case, "results": str(results)})
        environment = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                       "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        logs = [open(pathlib.Path(folder, f"rank{rank}.log"), "w+", encoding="utf-8") for rank in range(count)]
        processes = [subprocess.Popen([sys.executable, "-W", "ignore", str(HERE / program), text], stdout=log,
                                      stderr=subprocess.STDOUT,
                                      env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                     for rank, log in enumerate(logs)]
        codes = [process.wait() for process in processes]
        output = ""
        for log in logs:
            log.seek(0)
            output += log.read()[-4000:]
            log.close()
        if any(codes):
            raise AssertionError(f"{program} {case}: exit codes {codes}\n{output}")
        return json.loads(results.read_text())


def end() -> None:
    """The end of a rank's program. Threads of gloo outlive the group and need the interpreter, so that ending it could
    take the process down ("terminate called without an active exception")."""
    from torch import distributed  # here, as needs() says where torch is missing

    distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def check_losses(test: unittest.TestCase, mine: list, stock: list, tolerance: float, without: list, apart: int = 10):
    """mine are stock's within the tolerance, and fall. without: the losses of a model whose experts put out zeros,
    which are further off, by `apart` times the tolerance at least."""
    test.assertEqual(len(mine), len(stock))
    difference = max(abs(a - b) for a, b in zip(mine, stock, strict=True))
    test.assertLessEqual(difference, tolerance, f"{mine} and {stock}")
    test.assertLess(mine[-1], mine[0] - 10 * tolerance, "nothing was learnt")
    further = max(abs(a - b) for a, b in zip(without, stock, strict=True))
    test.assertGreater(further, apart * tolerance, "experts that put out zeros could pass")

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The program `tessera` for tests that drive it as a user or script does."""

import contextlib
import json
import os
import subprocess
import sys
import unittest

PROGRAM = ""
# Streams that take no byte.
BROKEN = ["closed", "no reader"] + ["full"] * os.path.exists("/dev/full")


class Cli(unittest.TestCase):
    def run_tessera(self, *arguments: str, code: int) -> subprocess.CompletedProcess:
        done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True)
        self.assertEqual(done.returncode, code, f"{arguments}: {done.stdout}{done.stderr}")
        return done

    def run_json(self, *arguments: str, code: int = 0) -> dict:
        """Stdout must be one JSON document and nothing else."""
        return json.loads(self.run_tessera(*arguments, "--json", code=code).stdout)

    def refuse(self, *arguments: str, naming: str, code: int = 2) -> None:
        """Bad input: the exit code, one line on stderr that names the culprit, nothing on stdout."""
        done = self.run_tessera(*arguments, code=code)
        self.assertEqual(done.stdout, "", arguments)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        self.assertIn(naming, done.stderr)


@contextlib.contextmanager
def broken(kind: str):
    """A descriptor that takes no byte; none where the stream is to be closed."""
    if kind == "closed":
        yield None
        return
    if kind == "full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def run_broken(kind: str, stream: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs the program with `stream`, "stdout" or "stderr", broken and the other one captured.

    Stdin is closed where the stream is: a program that opens two files may get what it prints in the second.
    """
    number, other = {"stdout": (1, "stderr"), "stderr": (2, "stdout")}[stream]

    def close() -> None:
        os.close(0)
        os.close(number)

    with broken(kind) as descriptor:
        return subprocess.run([PROGRAM, *arguments], preexec_fn=close if descriptor is None else None,
                              **{stream: descriptor, other: subprocess.PIPE})


def main(suites: dict[str, type]) -> None:
    """Runs the suite of the command line PROGRAM SUITE."""
    global PROGRAM
    PROGRAM = sys.argv[1]
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(suites[sys.argv[2]])
    sys.exit(not unittest.TextTestRunner(verbosity=1).run(suite).wasSuccessful())

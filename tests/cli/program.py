#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The program `tessera` for tests that drive it as a user or script does."""

import json
import subprocess
import sys
import unittest

PROGRAM = ""


class Cli(unittest.TestCase):
    def run_tessera(self, *arguments: str, code: int) -> subprocess.CompletedProcess:
        done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=300)
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


def main(suites: dict[str, type]) -> None:
    """Runs the suite of the command line PROGRAM SUITE."""
    global PROGRAM
    PROGRAM = sys.argv[1]
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(suites[sys.argv[2]])
    sys.exit(not unittest.TextTestRunner(verbosity=1).run(suite).wasSuccessful())

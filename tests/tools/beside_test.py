# SPDX-License-Identifier: Apache-2.0
"""beside.sh runs two commands at once, and fails if either does."""

import pathlib
import subprocess
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "beside.sh"


def run(first: str, second: str) -> subprocess.CompletedProcess:
    return subprocess.run([TOOL, first, second], capture_output=True, text=True, check=False)


class BesideTest(unittest.TestCase):
    def test_both_run_at_once(self):
        """Each waits for what the other writes."""
        with tempfile.TemporaryDirectory() as folder:
            waits = [f"touch {folder}/{mine}; until [[ -e {folder}/{other} ]]; do sleep 0.01; done"
                     for mine, other in (("a", "b"), ("b", "a"))]
            self.assertEqual(run(*waits).returncode, 0)

    def test_says_what_both_say(self):
        done = run("echo first", "echo second")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "second\n", "first\n"))

    def test_the_first_fails(self):
        done = run("echo because; exit 3", "true")
        self.assertEqual((done.returncode, done.stderr), (3, "because\n"))

    def test_the_second_fails_and_stops_the_first(self):
        with tempfile.TemporaryDirectory() as folder:
            late = pathlib.Path(folder, "late")
            first = f"until [[ -e {folder}/go ]]; do sleep 0.01; done; touch {late}"
            self.assertEqual(run(first, "exit 4").returncode, 4)
            pathlib.Path(folder, "go").touch()
            self.assertEqual(subprocess.run(["sleep", "0.2"], check=False).returncode, 0)
            self.assertFalse(late.exists())


if __name__ == "__main__":
    unittest.main()

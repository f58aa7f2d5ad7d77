# SPDX-License-Identifier: Apache-2.0
"""bench/end_to_end/measure.py: a library that compiles for minutes, or for ever, and rows that are there before the
end."""

import argparse
import contextlib
import os
import pathlib
import sys
import tempfile
import time
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench" / "end_to_end"))

import experts  # noqa: E402
import measure  # noqa: E402
import model as models  # noqa: E402
import training  # noqa: E402


def arguments(**changes) -> argparse.Namespace:
    return argparse.Namespace(**{"config": "tiny", "check_tokens": 64, "compile_seconds": 60.0, "experts": "tessera",
                                 **changes})


def is_running(pid: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False


class Beforehand(unittest.TestCase):
    def interpreter(self, script: str):
        """A stand-in for the Python that runs check.py."""
        place = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / "python"
        place.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        place.chmod(0o755)
        self.enterContext(mock.patch.object(sys, "executable", str(place)))
        return place.parent

    def test_what_does_not_end_is_ended_with_all_that_it_started(self):
        folder = self.interpreter('sleep 300 & echo $! > "$(dirname "$0")/child"; wait')
        begin = time.monotonic()
        reason = measure.compiled_beforehand("sonicmoe", arguments(compile_seconds=1.0))
        self.assertLess(time.monotonic() - begin, 60)
        self.assertEqual(reason, "its first call did not end within --compile-seconds 1")
        child = int((folder / "child").read_text())
        until = time.monotonic() + 30
        while is_running(child) and time.monotonic() < until:
            time.sleep(0.05)
        self.assertFalse(is_running(child))

    def test_it_is_no_rank_and_says_what_was_wrong(self):
        self.interpreter('echo "rank $RANK of $WORLD_SIZE, $2 $3 $4 $5 $6"; exit 3')
        with mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "2"}):
            reason = measure.compiled_beforehand("sonicmoe-layer", arguments())
        self.assertEqual(reason, "a process of it ended with status 3: rank of , sonicmoe-layer --config tiny "
                                 "--tokens 64")
        self.interpreter("exit 0")
        self.assertEqual(measure.compiled_beforehand("sonicmoe", arguments()), "")

    def test_one_process_compiles_unless_others_are_asked_for(self):
        self.interpreter('echo "$QUACK_COMPILE_WORKERS workers"; exit 3')
        for asked, wanted in (({}, "1"), ({"QUACK_COMPILE_WORKERS": "4"}, "4")):
            with mock.patch.dict(os.environ, asked):
                self.assertRegex(measure.compiled_beforehand("sonicmoe", arguments()), f"status 3: {wanted} workers$")

    def test_the_others_go_on(self):
        """One that is too slow is left out by name, and never called; one that does not compile is not asked."""
        asked = []

        def beforehand(name, _):
            asked.append(name)
            return "too slow" if name == "hf-eager" else ""

        slow = mock.patch.object(experts, "COMPILE_FOR_MINUTES", ("hf-eager", "torch-eager"))
        with training.ranks() as here, slow, mock.patch.object(measure, "compiled_beforehand", beforehand), \
                contextlib.redirect_stdout(None):
            passed, left_out = measure.chosen(arguments(experts="hf-eager,torch-eager,tessera"),
                                              models.CONFIGURATIONS["tiny"], here)
        self.assertEqual(asked, ["hf-eager", "torch-eager"])
        self.assertEqual(left_out, {"hf-eager": "too slow"})
        self.assertEqual(list(passed), ["torch-eager", "tessera"])

    def test_a_full_cache_is_not_filled_again(self):
        compiles = mock.patch.object(experts, "COMPILE_FOR_MINUTES", ("torch-eager",))
        with training.ranks() as here, compiles, contextlib.redirect_stdout(None), \
                mock.patch.object(measure, "compiled_beforehand", side_effect=AssertionError("was asked")):
            passed, left_out = measure.chosen(arguments(experts="torch-eager", compile_seconds=0.0),
                                              models.CONFIGURATIONS["tiny"], here)
        self.assertEqual((list(passed), left_out), (["torch-eager"], {}))


class Rounds(unittest.TestCase):
    def test_rows_are_there_after_each(self):
        block = {"ms": [1.0], "loss": 2.0, "peak_bytes": 5, "reserved_bytes": 6, "state_bytes": 1,
                 "allocator_retries": 0}
        here = mock.Mock()
        here.worst = lambda *values: list(values)
        timer = mock.Mock(here=here, block=lambda name, first: {"name": name, **block})
        seen = []
        measure.measure(argparse.Namespace(seed=0, rounds=3, seconds=1e9, timed=1), timer, ["a", "b"], 0.0,
                        lambda rounds: seen.append(measure.summary("a", rounds, {"a": 1, "b": 1}, 100, "b")))
        self.assertEqual([len(row["times_faster_than_b"]["rounds"]) for row in seen], [1, 2, 3])
        self.assertIsNone(seen[0]["times_faster_than_b"]["half_interval"])


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Streams that cannot be written: full, closed, or a pipe without a reader. usage: streams_test.py PROGRAM SUITE

What is lost on stderr must not end a run; what is lost on stdout must show in the exit code.
"""

import json
import os
import pathlib
import tempfile

import program
from program import Cli

SMALL = ["--steps", "12", "--hidden", "16", "--intermediate", "8", "--layers", "1", "--heads", "2", "--kv-heads", "1",
         "--head-dim", "8", "--context", "32", "--batch", "4", "--experts", "4", "--threads", "2"]


class Streams(Cli):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.text = self.folder / "text.txt"
        self.text.write_text("to be, or not to be: that is the question.\n" * 200)

    def train(self, name: str) -> list[str]:
        return ["train", "--text", str(self.text), "--out", str(self.folder / name), *SMALL]

    def test_training_goes_on_without_stderr(self):
        self.run_tessera(*self.train("good"), code=0)
        for kind in program.BROKEN:
            with self.subTest(kind):
                done = program.run_broken(kind, "stderr", *self.train(kind), "--json")
                self.assertEqual(done.returncode, 0)
                self.assertEqual(json.loads(done.stdout)["step"], 12)
                self.assertEqual(sorted(os.listdir(self.folder / kind)), sorted(os.listdir(self.folder / "good")))
                for path in (self.folder / "good").iterdir():
                    self.assertEqual((self.folder / kind / path.name).read_bytes(), path.read_bytes(), path.name)

    def test_resuming_goes_on_without_stderr(self):
        self.run_tessera(*self.train("run"), code=0)
        for steps, kind in enumerate(program.BROKEN, 13):
            with self.subTest(kind):
                done = program.run_broken(kind, "stderr", "train", "--resume", str(self.folder / "run"), "--steps",
                                          str(steps), "--json")
                self.assertEqual((done.returncode, json.loads(done.stdout)["step"]), (0, steps))

    def test_lost_results_are_an_error(self):
        self.run_tessera(*self.train("run"), code=0)
        generate = ["generate", "--checkpoint", str(self.folder / "run"), "--tokens"]
        for arguments in ([*generate, "3"], [*generate, "0"], [*generate, "3", "--json"],
                          [*self.train("other"), "--json"]):
            for kind in set(program.BROKEN) - {"no reader"}:  # which ends generate by SIGPIPE
                with self.subTest(f"{arguments[0]} {kind}"):
                    done = program.run_broken(kind, "stdout", *arguments)
                    self.assertEqual(done.returncode, 3, done.stderr)
                    self.assertTrue(done.stderr.endswith(b"tessera: stdout: cannot be written\n"), done.stderr)
        self.assertTrue((self.folder / "other" / "model.safetensors").exists())


if __name__ == "__main__":
    program.main({"streams": Streams})

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Memory of training. usage: train_memory_test.py PROGRAM SUITE"""

import os
import pathlib
import random
import subprocess
import tempfile

import program
from program import Cli

# Attention keeps 2 layers x 8 heads x 1024^2 probabilities of a window: 67 MB, and 1.1 GB of sixteen.
LONG = ["--context", "1024", "--batch", "1", "--layers", "2", "--heads", "8", "--kv-heads", "1", "--head-dim", "2",
        "--hidden", "16", "--intermediate", "8", "--experts", "4", "--top-k", "1", "--threads", "1"]


class TrainMemory(Cli):
    def test_evaluation_needs_what_a_step_needs(self):
        with tempfile.TemporaryDirectory() as folder:
            text = pathlib.Path(folder) / "text.txt"
            text.write_bytes(random.Random(1).randbytes(250_000))  # 19 windows are held out
            process = subprocess.Popen([program.PROGRAM, "train", "--text", str(text), "--out", folder + "/run",
                                        "--steps", "1", "--eval-every", "1", *LONG], stderr=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self.assertEqual(process.returncode, 0)
            self.assertLess(usage.ru_maxrss, 600 * 1024)  # KiB


if __name__ == "__main__":
    program.main({"train_memory": TrainMemory})

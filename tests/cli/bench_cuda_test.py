#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tessera bench on a GPU. usage: bench_cuda_test.py PROGRAM SUITE; exit code 77: there is no GPU"""

import subprocess
import sys

import program
from program import Cli

# Plain twins run where rows are not a multiple of 16 bytes.
SHAPES = {"fast": ["--hidden", "256", "--intermediate", "192"], "plain": ["--hidden", "36", "--intermediate", "20"]}


class BenchCuda(Cli):
    def rows(self, shape: str, *flags: str) -> list[dict]:
        document = self.run_json("bench", "--device", "cuda", "--tokens", "300", *SHAPES[shape], "--experts", "12",
                                 "--top-k", "3", "--seconds", "0.05", *flags)
        return document["rows"]

    def test_every_row_has_a_name(self):
        ops = {"router_logits", "route", "metadata", "up_projection_fwd", "down_projection_fwd", "aggregate",
               "down_projection_dgrad", "router_dlogits", "up_projection_dgrad", "router_wgrad"}
        for shape in SHAPES:
            with self.subTest(shape):
                names = {row["pass"] for row in self.rows(shape) if row["impl"] == "tessera"}
                self.assertNotIn("", names)
                self.assertLessEqual(ops, names)

    def test_terms_of_the_logits(self):
        for flags in (["--aux-dlogits"], ["--router-bias"], ["--aux-dlogits", "--router-bias"],
                      ["--router", "sigmoid-bias", "--normalize-scores", "--aux-dlogits"]):
            with self.subTest(flags):
                rows = [row for row in self.rows("fast", *flags) if row["impl"] == "tessera"]
                self.assertTrue(all(row["checked"] for row in rows))


if __name__ == "__main__":
    if "use device cpu" in subprocess.run([sys.argv[1], "explain", "--device", "cuda"], capture_output=True,
                                          text=True).stderr:
        print("skipped: no Hopper GPU that the library runs on; run on a machine with one, built by make cuda")
        sys.exit(77)
    program.main({"bench_cuda": BenchCuda})

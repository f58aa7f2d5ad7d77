# SPDX-License-Identifier: Apache-2.0
"""bench/end_to_end: losses of several libraries over seeds, and what may be said of their differences."""

import argparse
import contextlib
import io
import json
import math
import pathlib
import sys
import tempfile
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench" / "end_to_end"))

import intervals  # noqa: E402
import loss_gaps  # noqa: E402
import losses  # noqa: E402
import training  # noqa: E402


class Intervals(unittest.TestCase):
    def test_interval(self):
        mean, half = intervals.mean_interval([1.0, 2.0, 3.0, 4.0])
        self.assertEqual(mean, 2.5)
        self.assertAlmostEqual(half, 3.182 * math.sqrt(5 / 3) / 2, places=12)
        self.assertEqual(intervals.mean_interval([1.0]), (1.0, math.inf))

    def test_p_value(self):
        # One degree of freedom is Cauchy's distribution, two have a closed form.
        self.assertAlmostEqual(intervals.p_value([0.0, 2.0]), 0.5, places=12)  # t = 1
        t = 2.0 / (1.0 / math.sqrt(3))
        self.assertAlmostEqual(intervals.p_value([1.0, 2.0, 3.0]), 1 - t / math.sqrt(2 + t * t), places=12)
        for freedom, t in enumerate(intervals.STUDENT, 1):  # what the interval's points say
            self.assertAlmostEqual(intervals._beta(freedom / (freedom + t * t), freedom / 2, 0.5), 0.05, delta=1e-4)
        self.assertEqual(intervals.p_value([1.0]), 1.0)
        self.assertEqual(intervals.p_value([0.0, 0.0]), 1.0)
        self.assertEqual(intervals.p_value([-1.0, -2.0, -4.0]), intervals.p_value([1.0, 2.0, 4.0]))

    def test_holm(self):
        self.assertEqual(intervals.holm({"a": 0.04, "b": 0.01, "c": 0.03}), {"b": 0.03, "c": 0.06, "a": 0.06})
        self.assertEqual(intervals.holm({"a": 0.9, "b": 0.8}), {"b": 1.0, "a": 1.0})


def run(*last: float) -> dict:
    return {"losses": [9.0, *last], "held_out": {"2": 7.0, "10": last[-1] + 1}}


def state(seeds: dict, **pinned) -> dict:
    return {"pinned": {"steps": 3, **pinned}, "ranks": 1, "device": "cpu", "runs": seeds}


class Gaps(unittest.TestCase):
    def test_differences_are_of_one_seed(self):
        runs = {"a 0": run(2.0, 3.0), "b 0": run(2.5, 3.5), "a 1": run(2.0, 4.0), "b 1": run(2.0, 3.0),
                "a 2": run(0.0, 0.0)}  # which b has not run
        found = loss_gaps.gaps(runs, ["a", "b", "c"], ["0", "1", "2"], "a", last=2)
        self.assertEqual(found.keys(), {"a", "b"})
        self.assertEqual(found["b"]["gaps"], [0.5, -0.5])
        self.assertEqual(found["b"]["gap"], 0.0)
        self.assertEqual(found["b"]["held_out_gaps"], [0.5, -1.0])
        self.assertAlmostEqual(found["b"]["half_interval"], 12.706 * math.sqrt(0.5) / math.sqrt(2))
        lines = loss_gaps.lines(found, "a", 2)
        self.assertIn("+0.00000 +- 6.35300, p 1.00 (+0.50000 -0.50000), held out -0.25000", lines[1])
        self.assertNotIn("minus", lines[0])
        alone = loss_gaps.gaps(runs, ["b"], ["0"], "a", last=2)
        self.assertIn("b: loss of the last 2 steps 3.0000; minus a's +0.50000 (+0.50000), held out +0.50000",
                      loss_gaps.lines(alone, "a", 2))

    def test_differences_by_part_of_the_steps(self):
        mine, others = [[float(i) for i in range(30)], [0.0] * 30], [[0.0] * 30, [2.0] * 30]
        found = loss_gaps.by_part(mine, others)
        self.assertEqual(found, [(3 * part + 1 - 2) / 2 for part in range(10)])
        self.assertEqual(loss_gaps.by_part([[1.0, 3.0]], [[0.0, 1.0]]), [1.0, 2.0])

    def test_files_of_different_commands_are_not_compared(self):
        with self.assertRaisesRegex(ValueError, "other sizes, steps or ranks"):
            loss_gaps.merged([state({}), state({}, layers=7)])
        with self.assertRaisesRegex(ValueError, "a 0 is in two state files"):
            loss_gaps.merged([state({"a 0": run(1.0)}), state({"a 0": run(1.0)})])

    def test_program(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            for name, seeds in (("0", ("0", "1")), ("1", ("2",))):
                (folder / name).write_text(json.dumps(state({f"{who} {seed}": run(3.0 + int(seed) + (who == "far"))
                                                             for seed in seeds for who in ("near", "far", "base")})))
            sys.argv = ["loss_gaps.py", str(folder / "0"), str(folder / "1"), "--baseline", "base", "--last",
                        "1", "--out", str(folder / "gaps.json")]
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                status = loss_gaps.main()
            written = json.loads((folder / "gaps.json").read_text())
        self.assertEqual(status, 1)
        self.assertIn("more than 0.005 nats from base: far\n", printed.getvalue())
        self.assertEqual(written["gaps"]["far"]["seeds"], ["0", "1", "2"])
        self.assertEqual((written["gaps"]["near"]["gap"], written["last"]), (0.0, 1))
        self.assertEqual(written["gaps"]["far"]["gaps_by_part"], [0.0, 1.0])

    def test_runs_of_the_program_that_trains(self):
        """Two libraries and a copy of one, from the same seed: the copy has its losses, the other nearly. A run that
        shares its first steps with itself is the one that does not."""
        with tempfile.TemporaryDirectory() as folder:
            place, shared = pathlib.Path(folder) / "losses.json", pathlib.Path(folder) / "shared.json"
            command = ["losses.py", "--config", "tiny", "--context", "32", "--text", str(ROOT / "docs"),
                       "--text-bytes", "200000", "--cache", folder, "--text-vocabulary", "300", "--steps", "6",
                       "--warm-up", "2", "--sequences", "2", "--held-out-every", "3"]
            for more in (["--experts", "torch-grouped-mm,torch-grouped-mm#2,tessera", "--seeds", "0,1", "--state",
                          str(place)],
                         ["--experts", "torch-grouped-mm,torch-grouped-mm#2,tessera", "--seeds", "0", "--state",
                          str(shared), "--shared-steps", "4"]):
                sys.argv = command + more
                with contextlib.redirect_stdout(io.StringIO()):
                    losses.run(losses.arguments())
            runs, branches = (json.loads(file.read_text())["runs"] for file in (place, shared))
            picture = place.with_suffix(".gp").read_text()
        self.assertEqual(len(runs), 6)
        found = loss_gaps.gaps(runs, ["torch-grouped-mm#2", "tessera"], ["0", "1"], "torch-grouped-mm")
        self.assertEqual(found["torch-grouped-mm#2"]["gaps"], [0.0, 0.0])
        self.assertLess(max(map(abs, found["tessera"]["gaps"])), 1e-3)
        self.assertNotEqual(runs["tessera 0"]["losses"], runs["tessera 1"]["losses"])
        self.assertLess(runs["tessera 0"]["losses"][0], math.log(512) + 0.3)
        self.assertEqual(sorted(runs["tessera 0"]["held_out"]), ["3", "6"])
        self.assertIn("tessera", picture)
        self.assertEqual(branches["torch-grouped-mm 0"], runs["torch-grouped-mm 0"])
        self.assertEqual(branches["torch-grouped-mm#2 0"], runs["torch-grouped-mm 0"])
        self.assertEqual(branches["tessera 0"]["losses"][:4], runs["torch-grouped-mm 0"]["losses"][:4])

    def test_a_seed_whose_runs_are_of_one_command_is_whole_or_run_again(self):
        a, here = argparse.Namespace(seconds=math.inf, steps=1), training.Ranks(1, 1, None)
        for together, wanted in ((False, ["b 0", "a 1", "b 1"]), (True, ["a 0", "b 0", "a 1", "b 1"])):
            ran = []
            with unittest.mock.patch.object(training.Ranks, "worst", lambda here, *values: values):
                losses.complete(a, here, {"runs": {"a 0": run(1.0)}}, ["a", "b"], ["0", "1"], lambda name, seed: (
                    ran.append(f"{name} {seed}"), {"losses": [1.0], "held_out": {"1": 1.0}})[1], together)
            self.assertEqual(ran, wanted)


if __name__ == "__main__":
    unittest.main()

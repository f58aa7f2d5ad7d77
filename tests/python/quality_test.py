# SPDX-License-Identifier: Apache-2.0
"""bench/quality: variants of token rounding in a model, and what is said of their losses."""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

import tessera
import torch

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench" / "end_to_end"))
sys.path.insert(0, str(ROOT / "bench" / "quality"))

import compare_variants  # noqa: E402
import model as models  # noqa: E402
import train_variants  # noqa: E402
import training  # noqa: E402
import variants  # noqa: E402


def run(*held_out: float) -> dict:
    return {"losses": [9.0], "held_out": {str(10 * i): loss for i, loss in enumerate(held_out, 1)},
            "rows": {"added": 0.25, "dropped": 0.125}}


def drawn(experts: int, tokens: int) -> tuple:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(size, generator=generator) for size in (
        (tokens, 16), (experts, 16), (experts, 24, 16), (experts, 16, 12)))


class Layers(unittest.TestCase):
    def test_configurations(self):
        for name, tokens in (("95M-2of64", 512), ("95M-4of128", 512)):
            c = models.CONFIGURATIONS[name]
            self.assertAlmostEqual(c.parameters() / 95e6, 1, delta=0.01)
            self.assertAlmostEqual(c.flops_per_token() / 90e6, 1, delta=0.05)
            self.assertEqual(16 * c.context * c.top_k // c.experts, tokens)

    def test_each_variant_is_the_librarys(self):
        """Rows of every expert are multiples of the tile, and its output is that of the call with the same options."""
        x, w_router, up, down = drawn(16, 400)
        rounded = {name: {**options, "tile": 8} for name, options in variants.VARIANTS.items() if options}
        with mock.patch.dict(variants.VARIANTS, rounded):
            outputs = {}
            for name, options in variants.VARIANTS.items():
                layer = variants.Layer(name, 3, seed=5)
                layer.at_step(7)
                first = layer(x, w_router, up, down, 2)[2]
                o, auxiliary, counts = layer(x, w_router, up, down, 2)  # the second of three layers
                outputs[name] = o
                draws = {"seed": 5, "step": 7, "layer": 1} if name in variants.DRAWS else {}
                router = "expert-choice" if name == "expert-choice" else "softmax-topk"
                self.assertTrue(torch.equal(o, tessera.moe(x, w_router, up, down, top_k=2, router=router, **options,
                                                           **draws)), name)
                if options:
                    self.assertTrue(bool((counts % 8 == 0).all()), name)
                    rows = layer.rows()
                    added, dropped = rows["added"] * 800, rows["dropped"] * 800  # of a call
                    self.assertAlmostEqual(added - dropped, int((first + counts).sum()) / 2 - 800)
                    self.assertEqual((added > 0, dropped > 0), (name != "down", name != "up"), name)
                    self.assertNotEqual(torch.equal(first, counts), name in variants.DRAWS, name)
                self.assertEqual(auxiliary.shape, ())
            self.assertFalse(torch.equal(outputs["up"], outputs["down"]))
            self.assertFalse(torch.equal(outputs["top-k"], outputs["nr-f"]))


class Table(unittest.TestCase):
    def test_verdicts(self):
        runs = {}
        for seed, base in enumerate((3.0, 3.2, 3.1, 3.3)):
            wobble = (-1) ** seed * 0.001
            for name, added in (("top-k", 0.0), ("nr-f", wobble), ("down", 0.05 + wobble), ("up", 20 * wobble),
                                ("nr-f-tile-1024", 0.3 + wobble)):
                runs[f"{name} {seed}"] = run(9.0, *[base + added] * 3)
        rows = {row["variant"]: row for row in compare_variants.table(runs, 0.01)}
        self.assertEqual(list(rows), ["top-k", "nr-f", "up", "down", "nr-f-tile-1024"])
        self.assertAlmostEqual(rows["top-k"]["loss"], 3.15)  # the first held-out loss does not count
        self.assertEqual({name: (row["worse"], row["harmless"]) for name, row in rows.items() if name != "top-k"},
                         {"nr-f": (False, True), "up": (False, False), "down": (True, False),
                          "nr-f-tile-1024": (True, False)})
        self.assertTrue(compare_variants.counts(list(rows.values())))
        self.assertAlmostEqual(rows["down"]["difference"], 0.05)
        self.assertLess(rows["down"]["p"], 1e-3)
        for key in [key for key in runs if key.startswith("nr-f-tile")]:
            runs[key] = runs[key.replace("nr-f-tile-1024", "up")]
        self.assertFalse(compare_variants.counts(compare_variants.table(runs, 0.01)))

    def test_what_is_better_is_not_worse(self):
        runs = {f"{name} {seed}": run(*[3.0 - added - seed] * 3) for seed in range(3)
                for name, added in (("top-k", 0.0), ("nr-f", 0.2 + 0.001 * seed))}
        (_, row) = compare_variants.table(runs, 0.01)
        self.assertLess(row["p"], 0.01)
        self.assertFalse(row["worse"] or row["harmless"])

    def test_seeds_that_top_k_has_not_run(self):
        runs = {"top-k 1": run(3.0), "nr-f 1": run(3.5), "nr-f 2": run(9.0)}
        rows = compare_variants.table(runs, 0.01)
        self.assertEqual((rows[1]["seeds"], rows[1]["difference"], rows[1]["half_interval"]), (["1"], 0.5, None))
        self.assertFalse(rows[1]["worse"] or rows[1]["harmless"])
        self.assertIn("| 3.5000 | +0.5000 | 1.000 | open |", compare_variants.line(rows[1]))


class Programs(unittest.TestCase):
    def test_training_and_table(self):
        """Two seeds in two files as of two GPUs: the same weights and data, rounding in training alone."""
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            small = {name: {**options, "tile": 16} for name, options in variants.VARIANTS.items() if options}
            judged, steps, held_out_loss = set(), [], training.Trainer.held_out_loss

            def judge(trainer, *arguments):
                judged.add(trainer.model.owner["experts"].variant)
                return held_out_loss(trainer, *arguments)

            with mock.patch.dict(variants.VARIANTS, small), contextlib.redirect_stdout(io.StringIO()) as printed, \
                    mock.patch.object(training.Trainer, "held_out_loss", judge), \
                    mock.patch.object(variants.Layer, "at_step", lambda layer, step: steps.append(step)):
                for seed in "01":
                    sys.argv = ["train_variants.py", "--config", "tiny", "--text", str(ROOT / "docs"), "--text-bytes",
                                "200000", "--cache", str(folder), "--text-vocabulary", "300", "--variants",
                                "top-k,nr-f,expert-choice", "--seeds", seed, "--steps", "6", "--warm-up", "2",
                                "--sequences", "2", "--held-out-every", "2", "--held-out-batches", "1", "--state",
                                str(folder / f"{seed}.json")]
                    train_variants.run(train_variants.arguments())
                runs = json.loads((folder / "0.json").read_text())["runs"]
                sys.argv = ["compare_variants.py", *(str(folder / f"{seed}.json") for seed in "01"), "--out",
                            str(folder / "table.json")]
                self.assertEqual(compare_variants.main(), 1)
            written = json.loads((folder / "table.json").read_text())
        self.assertEqual(judged, {"top-k"})
        self.assertEqual(steps, [1, 2, 3, 4, 5, 6] * 6)
        self.assertIn("no control is worse: the table does not count", printed.getvalue())
        self.assertIn("nr-f seed 0: loss", printed.getvalue())
        self.assertEqual([row["variant"] for row in written["rows"]], ["top-k", "nr-f", "expert-choice"])
        self.assertEqual(written["rows"][1]["seeds"], ["0", "1"])
        self.assertNotEqual(runs["nr-f 0"]["held_out"], runs["top-k 0"]["held_out"])
        self.assertLess(abs(runs["nr-f 0"]["losses"][0] - runs["top-k 0"]["losses"][0]), 0.1)  # the same weights
        self.assertGreater(runs["nr-f 0"]["rows"]["dropped"], 0)
        self.assertEqual(runs["top-k 0"]["rows"], {"added": 0.0, "dropped": 0.0})

    def test_unknown_variant(self):
        sys.argv = ["train_variants.py", "--variants", "nr", "--text", "docs", "--state", "x.json"]
        with self.assertRaisesRegex(training.Stop, "variant 'nr': unknown; choose from top-k, nr-f"):
            train_variants.run(train_variants.arguments())


if __name__ == "__main__":
    unittest.main()

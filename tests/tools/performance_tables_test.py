# SPDX-License-Identifier: Apache-2.0
import json
import pathlib
import tempfile
import unittest

import performance_tables
from performance_tables import number, ratio, typed_numbers

PAGE = "# Page\n\n<!-- table experts current/h200/2026-11-25-a.json -->\n<!-- end -->\n\nSonicMoE keeps less.\n"


def row(impl, ms, **keys):
    return {"config": "OLMoE", "shape": [4096, 2048, 1024, 64, 8], "dtype": "bf16", "gpus": 1, "impl": impl,
            "variant": "", "pass": "forward+backward", "ms": ms, "checked": True} | keys


ROWS = [row("tessera", 2.0), row("torch-grouped-mm", 3.0), row("hf-grouped-mm", 1.5)]


class PerformanceTablesTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.results = pathlib.Path(scratch.name)
        self.write("current/h200/2026-11-25-a.json", ROWS)

    def write(self, name, rows):
        path = self.results / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"device": "NVIDIA H200", "date": "2026-11-25", "commit": "32302a3", "rows": rows}))

    def written(self, text=PAGE):
        return performance_tables.written(text, self.results, "../bench/results")

    def check(self, text):
        return performance_tables.check(text, self.results, "../bench/results")

    def test_table(self):
        text = self.written()
        self.assertIn("| OLMoE, bf16, GPU | 2.00 | 3.00, 1.50 times | 1.50, **0.75** times |  |", text)
        self.assertIn("[NVIDIA H200, 2026-11-25](../bench/results/current/h200/2026-11-25-a.json), build `32302a3`.",
                      text)
        self.assertNotIn("earlier build", text)
        self.assertEqual(self.written(text), text)
        self.assertEqual(self.check(text), [])

    def test_steps_of_a_model_at_one_batch_and_at_the_largest(self):
        def step(impl, ms, speed, batch):
            return row(impl, ms, tokens_per_s_per_gpu=speed, batch_tokens=batch, peak_bytes=2**31,
                       **{"pass": "train-step"})

        self.write("current/b.json", [step("tessera-layer", 100, 2000, 200), step("scattermoe", 90, 1900, 200),
                                      step("sonicmoe", 110, 1800, 200)])
        self.write("current/c.json", [step("tessera-layer", 200, 900, 200), step("scattermoe", 250, 700, 200)])
        self.write("current/d.json", [step("tessera-layer", 300, 3000, 900), step("scattermoe", 200, 2000, 400)])
        files = "current/b.json current/c.json current/d.json"
        text = self.written(f"<!-- table train-step {files} -->\n<!-- end -->\n")
        for line in (" router included | 100 | 1.00 | 2.00 | 200 | 1.00 | 2.00 | 900 | 3,000 | 1.00 |",
                     "| scattermoe | 90.0 | **0.90** | 2.00 | 250 | 1.25 | 2.00 | 400 | 2,000 | 1.50 |",
                     "| sonicmoe | 110 | 1.10 | 2.00 |  |  |  |  |  |  |"):
            self.assertIn(line, text)

    def test_the_archive_is_of_an_earlier_build(self):
        self.write("archive/h200/2026-11-25-a.json", ROWS)
        self.assertIn("**an earlier build**", self.written(PAGE.replace("current", "archive")))

    def test_check_sees_what_changed(self):
        text = self.written()
        self.assertEqual(len(self.check(text.replace("1.50 times", "1.51 times"))), 1)
        self.write("current/h200/2026-11-25-a.json", [*ROWS[:2], row("hf-grouped-mm", 1.6)])
        self.assertEqual(len(self.check(text)), 1)

    def test_check_counts_lines_and_typed_numbers(self):
        text = self.written()
        self.assertEqual(len(self.check(text + performance_tables.MAX_LINES * "\n")), 1)
        self.assertEqual(len(self.check(text + "It takes 1.5 ms.\n")), 1)

    def test_unchecked_rows_are_not_quoted(self):
        self.write("current/h200/2026-11-25-a.json", [*ROWS[:2], row("hf-grouped-mm", 1.5, checked=False)])
        self.assertIn("| OLMoE, bf16, GPU | 2.00 | 3.00, 1.50 times |  |  |", self.written())
        rows = performance_tables.Rows({"rows": [row("cublas-bmm", 1.0, checked=False)]})
        self.assertEqual(rows.ms(impl="cublas-bmm"), 1.0)

    def test_the_layer_beside_sonicmoe(self):
        bound = {"bound_ms": 1.8, "aggregate_floor_ms": 0.1}
        self.write("current/h200/2026-11-25-layer.json", [
            row("tessera", 2.0, **bound, **{"pass": "forward"}), row("tessera", 4.0, **bound, **{"pass": "backward"}),
            row("tessera", 5.0, variant="main-grad", **bound, **{"pass": "backward"})])
        self.write("current/h200/2026-11-25-beside.json", [
            row(impl, ms, **{"pass": what}) for what, ours, theirs in (("forward", 1.0, 1.1), ("backward", 2.0, 1.0))
            for impl, ms in (("tessera", ours), ("sonicmoe", theirs))])
        text = self.written("<!-- table layer current/h200/2026-11-25-layer.json "
                            "current/h200/2026-11-25-beside.json -->\n<!-- end -->\n")
        self.assertIn("| OLMoE (4096, 2048, 1024, 64, 8) | 2.00 | 0.950 | 4.00 | 0.475 | 0.380 | 1.10 | 1.10 | 1.00 | "
                      "**0.50** |", text)
        self.assertIn("| geometric mean |  | 0.950 |  | 0.475 | 0.380 |  | 1.10 |  | **0.50** |", text)
        self.write("current/h200/2026-11-25-apart.json", [
            row("tessera", 1.9, **bound, **{"pass": "forward"}), row("tessera", 3.8, **bound, **{"pass": "backward"}),
            row("tessera", 4.0, variant="main-grad", **bound, **{"pass": "backward"})])
        text = self.written("<!-- table layer current/h200/2026-11-25-layer.json current/h200/2026-11-25-beside.json "
                            "current/h200/2026-11-25-apart.json -->\n<!-- end -->\n")
        self.assertIn("| geometric mean |  | 0.950 |  | 0.475 | 0.380 |  | 1.10 |  | **0.50** |\n"
                      "| OLMoE (4096, 2048, 1024, 64, 8) | 1.90 | 1.000 | 3.80 | 0.500 | 0.475 |  |  |  |  |", text)

    def test_what_rounding_costs(self):
        def rows(forward: float, backward: float, **kernels: float) -> list[dict]:
            return [row("tessera", forward, **{"pass": "forward"}), row("tessera", backward, **{"pass": "backward"}),
                    *(row("tessera", ms, variant=variant, **{"pass": name.removeprefix("b_")}) for name, ms in
                      kernels.items() for variant in ["backward kernel" if name.startswith("b_") else "kernel"])]

        self.write("current/h200/2026-11-25-exact.json",
                   rows(2.0, 4.0, route=0.01, metadata=0.02, aggregate=0.1, b_aggregate=0.1, up_projection_fwd=0.9))
        self.write("current/h200/2026-11-25-rounded.json",
                   rows(1.6, 5.0, choose_tokens=0.05, aggregate=0.12, b_aggregate=0.11, b_router_dgrad=0.03))
        text = self.written("<!-- table rounding current/h200/2026-11-25-exact.json "
                            "current/h200/2026-11-25-rounded.json -->\n<!-- end -->\n")
        self.assertIn("| OLMoE (4096, 2048, 1024, 64, 8) | 2.00 | 1.60 | 1.25 | 4.00 | 5.00 | **0.80** | 40 | 40 |",
                      text)

    def test_markers_come_in_pairs(self):
        for text in (PAGE.replace("<!-- end -->", ""), PAGE + "<!-- end -->\n", PAGE + "<!-- table layer x.json -->\n"):
            with self.subTest(text=text), self.assertRaises(ValueError):
                self.written(text)

    def test_typed_numbers(self):
        for text in ("H200 and bf16, gpt-oss-20b, 2^-7, n-256", "`--gpus 2`", "[a](b-2026.json)",
                     "```sh\nrun 1 2 3\n```\n", "<!-- table a b2.json -->\n| 1.5 | 2 |\n<!-- end -->\n"):
            with self.subTest(text=text):
                self.assertEqual(typed_numbers(text), [])
        for text in ("takes 2 ms", "0.97, 0.96", "(1.126)", "**0.85**", "47% of", "24,576 and 3."):
            with self.subTest(text=text):
                self.assertEqual(len(typed_numbers(text)), 2 if " and " in text or ", " in text else 1)

    def test_numbers(self):
        self.assertEqual([number(x) for x in (0.5721, 1.0391, 12.44, 242.6, 2822.0, None)],
                         ["0.572", "1.04", "12.4", "243", "2822", ""])
        self.assertEqual([ratio(x, 0.85) for x in (0.9, 0.85, 0.8499, 0.7, None)],
                         ["0.90", "0.85", "**0.850**", "**0.70**", ""])


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: Apache-2.0
import copy
import json
import pathlib
import tempfile
import unittest

import check_results
import current_results

SCHEMA = json.loads((pathlib.Path(__file__).resolve().parents[2] / "bench/results/schema.json").read_text())
ROW = {"config": "7B-n256", "shape": [24576, 1536, 256, 128, 8], "dtype": "bf16", "gpus": 1, "routing": "random",
       "router": "topk-softmax", "round": "none", "pass": "forward", "impl": "tessera", "variant": "", "ms": 1.1,
       "ms_p10": 1.0, "ms_p90": 1.2, "checked": True}
DOCUMENT = {"command": "tessera bench", "commit": "32302a3", "device": "NVIDIA H200", "driver": "580",
            "clocks_mhz": [1, 2], "date": "2026-11-25", "protocol": "median of 20",
            "ceilings": {"copy_tbps": 4.2}, "rows": [ROW]}


def changed(row=None, without=(), **keys):
    """DOCUMENT with other keys, or with another row."""
    document = copy.deepcopy(DOCUMENT) | keys
    if row:
        document["rows"][0].update(row)
    for name in without:
        (document if name in document else document["rows"][0]).pop(name)
    return document


BAD = {
    "a key that is missing": changed(without=["protocol"]),
    "a key of a row that is missing": changed(without=["checked"]),
    "a key that the schema does not have": changed(notes="long"),
    "a key of a row that it does not have": changed(row={"saved_mib": 1.0}),
    "several builds": changed(commit="base: 1d9763f; kept: 55d93d8"),
    "no rows": changed(rows=[]),
    "a date in another order": changed(date="25.11.2026"),
    "one clock": changed(clocks_mhz=[1]),
    "a number as text": changed(row={"ms": "1.1"}),
    "true for a number": changed(row={"ms": True}),
    "a number for true": changed(row={"checked": 1}),
    "a time of zero": changed(row={"ms": 0, "ms_p10": 0, "ms_p90": 0}),
    "half a token": changed(row={"shape": [1.5, 1, 1, 1, 1]}),
    "a shape of four": changed(row={"shape": [1, 1, 1, 1]}),
    "a type that is none": changed(row={"dtype": "fp16"}),
    "an unknown transfer": changed(row={"transfer": "dedup"}),
    "a median outside its spread": changed(row={"ms": 1.3}),
    "an old word": changed(row={"variant": "unfused-chain"}),
    "an old pass": changed(row={"pass": "forward-backward"}),
    "a step without its tokens": changed(row={"pass": "train-step"}),
    "not an object": [DOCUMENT],
}


class SchemaTest(unittest.TestCase):
    def test_good(self):
        self.assertEqual(check_results.check_document(SCHEMA, DOCUMENT), [])

    def test_bad(self):
        for what, document in BAD.items():
            with self.subTest(what):
                self.assertTrue(check_results.check_document(SCHEMA, document))

    def test_a_rule_that_nobody_applies(self):
        with self.assertRaisesRegex(ValueError, "uniqueItems"):
            check_results.broken({"type": "array", "uniqueItems": True}, [], "rows")


class TreeTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = pathlib.Path(scratch.name)
        self.write("bench/results/schema.json", json.dumps(SCHEMA))
        self.write("bench/results/archive/h200/any.json", "{}")
        self.add("current/h200/2026-11-25-layer.json")
        self.write("docs/page.md", "<!-- table layer current/h200/2026-11-25-layer.json archive/h200/any.json -->\n")

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def add(self, name, document=None):
        self.write(f"bench/results/{name}", json.dumps(document or DOCUMENT))

    def errors(self):
        return check_results.check_tree(self.root)[0]

    def test_good(self):
        self.assertEqual(check_results.check_tree(self.root), ([], 1))

    def test_a_picture_reads_too(self):
        self.add("current/h200x2/2026-11-25-beside.json")
        self.assertEqual(len(self.errors()), 1)
        self.write("bench/draw_it.py", 'FILE = "current/h200x2/2026-11-25-beside.json"\n')
        self.assertEqual(self.errors(), [])

    def test_a_link_alone_is_no_reader(self):
        self.add("current/h200/2026-11-25-more.json")
        self.write("README.md", "[results](bench/results/current/h200/2026-11-25-more.json)\n")
        self.assertEqual(len(self.errors()), 1)

    def test_nothing_lies_beside_the_two(self):
        self.add("h200x2/2026-11-25-new.json")
        self.assertEqual(len(self.errors()), 1)

    def test_the_archive_holds_json(self):
        self.write("bench/results/archive/h200/2026-11-25-a.json", '{"any": "key"}')
        self.write("bench/results/archive/h200/2026-11-25-b.json", '{"variant": "\x13"}')
        errors = self.errors()
        self.assertEqual(len(errors), 1)
        self.assertIn("2026-11-25-b.json: Invalid control character", errors[0])

    def test_bad(self):
        self.write("bench/draw_it.py", "".join(
            f"'current/{name}'\n" for name in ("H200/2026-11-25-a.json", "h200/layer.json", "h200/2026-11-26-b.json",
                                               "h200/2026-11-25-c.json", "h200/2026-11-25-d.json")))
        self.add("current/H200/2026-11-25-a.json")
        self.add("current/h200/layer.json")
        self.add("current/h200/2026-11-26-b.json")
        self.write("bench/results/current/h200/2026-11-25-c.json", "{")
        errors = self.errors()
        for word in ("folder H200", "layer.json: name", "is not that of the name", "Expecting", "does not exist"):
            with self.subTest(word):
                self.assertEqual(sum(word in error for error in errors), 1, errors)
        self.assertEqual(len(errors), 5)


class ConversionTest(unittest.TestCase):
    def convert(self, row, **keys):
        document, left_out = current_results.convert(changed(row=row, **keys), SCHEMA)
        return document, " ".join(left_out)

    def test_words(self):
        document, _ = self.convert({"pass": "forward+backward", "variant": "unfused-chain", "transfer": "dedup",
                                    "saved_mib": 1.5, "mhz": None})
        self.assertEqual(check_results.check_document(SCHEMA, document), [])
        words = {"pass": "training", "variant": "unfused", "transfer": "partial-combine", "saved_bytes": 1572864}
        self.assertEqual({key: document["rows"][0][key] for key in words}, words)

    def test_nothing_goes_unsaid(self):
        document, left_out = self.convert({"mhz": 1500}, notes="long")
        self.assertNotIn("mhz", document["rows"][0])
        self.assertIn("mhz: 1", left_out)
        self.assertIn("notes: 1", left_out)

    def test_commands_without_the_machines_folders(self):
        document, _ = self.convert({}, command="bench/a.py --text /opt/venv/lib/text --out /root/o.json --in a/b.json")
        self.assertEqual(document["command"], "bench/a.py --text text --out o.json --in a/b.json")

    def test_the_step_of_a_loss(self):
        row = {"pass": "train-step", "loss": 3.4, "tokens_per_s_per_gpu": 9, "peak_bytes": 9, "batch_tokens": 9}
        for step, wanted in ((None, None), (400, [[400, 3.4]])):
            document, left_out = current_results.convert(changed(row=row), SCHEMA, step=step)
            self.assertEqual(document["rows"][0].get("loss_at_step"), wanted)
            self.assertEqual(bool(check_results.check_document(SCHEMA, document)), wanted is None)
            self.assertEqual("loss: 1" in left_out, wanted is None)

    def test_unchecked_rows(self):
        document, left_out = self.convert({"checked": False})
        self.assertEqual(document["rows"], [])
        self.assertIn("not checked: 1", left_out)
        document, _ = self.convert({"checked": None, "impl": "cublas", "variant": "cublas-bmm", "pass": "gemms"})
        self.assertEqual([(row["impl"], row["variant"], row["checked"]) for row in document["rows"]],
                         [("cublas-bmm", "", False)])


if __name__ == "__main__":
    unittest.main()

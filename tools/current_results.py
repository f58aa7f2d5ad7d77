#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what a program measured, or a file of bench/results/archive, in the schema of bench/results/current.

    tools/current_results.py SOURCE.json bench/results/current/h200/2026-11-25-layer.json [--pass forward,backward]

Renames what has another word now (training, unfused, partial-combine, saved_bytes), leaves out keys that the schema
does not have and rows that were not checked, except for bounds by cuBLAS, and says what it has left out. It refuses
a file with several builds. Whether the build's kernels are those of the tree, nobody but you can say: compare with
tools/sass_diff.py, or measure again.
"""

import argparse
import collections
import json
import pathlib
import re
import sys

import check_results

WORDS = {"pass": {"forward+backward": "training", "forward-backward": "training"},
         "variant": {"unfused-chain": "unfused", "chain": "unfused"}, "transfer": {"dedup": "partial-combine"}}
FOLDERS = re.compile(r"(?<![\w.])/(?:[\w.-]+/)+")  # of an absolute path: the machine's own


def convert_row(row: dict) -> dict:
    """A row in today's words, with whatever other keys it had."""
    new = {key: WORDS.get(key, {}).get(value, value) if isinstance(value, str) else value
           for key, value in row.items() if value is not None}
    if "saved_mib" in new:
        new["saved_bytes"] = round(new.pop("saved_mib") * 2**20)
    if new["impl"] == "cublas" and new.get("variant", "").startswith("cublas-"):  # the variant named the call
        new["impl"], new["variant"] = new["variant"], ""
    if new["impl"] in ("tessera-sums-on-owners", "tessera-partial-combine"):
        new["impl"], new["variant"] = "tessera", "partial-combine"
    return new


def is_bound(row: dict) -> bool:
    return row["impl"].startswith("cublas")


def convert(source: dict, schema: dict, passes: set[str] | None = None,
            step: int | None = None) -> tuple[dict, list[str]]:
    """(document, what was left out); `step`: of training, at which the rows' `loss` was taken"""
    row_schema = schema["properties"]["rows"]["items"]["properties"]
    left_out = collections.Counter()
    document = {key: source[key] for key in schema["properties"] if key in source and key != "rows"}
    left_out.update(source.keys() - document.keys() - {"rows"})
    document["command"] = FOLDERS.sub("", document["command"])
    document.setdefault("clocks_mhz", [0, 0])
    document["rows"] = []
    for row in map(convert_row, source["rows"]):
        if passes and row["pass"] not in passes:
            continue
        if not row.get("checked") and not is_bound(row):
            left_out["rows that were not checked"] += 1
            continue
        if step is not None and "loss" in row:
            row["loss_at_step"] = [[step, row.pop("loss")]]
        left_out.update(row.keys() - row_schema.keys())
        document["rows"].append({"checked": False, "variant": ""} | {k: v for k, v in row.items() if k in row_schema})
    return document, [f"{what}: {count}" for what, count in sorted(left_out.items())]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--pass", dest="passes", help="these alone, by comma")
    parser.add_argument("--step", type=int, help="of training, at which the rows' `loss` was taken")
    options = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parents[1]
    schema = json.loads((root / "bench/results/schema.json").read_text(encoding="utf-8"))
    passes = set(options.passes.split(",")) if options.passes else None
    document, left_out = convert(json.loads(options.source.read_text(encoding="utf-8")), schema, passes, options.step)
    if errors := check_results.check_document(schema, document):
        print("\n".join(f"{options.source}: {error}" for error in errors), file=sys.stderr)
        sys.exit(1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n  ".join(json.dumps(row) for row in document.pop("rows"))
    options.out.write_text(json.dumps(document, indent=1)[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n', encoding="utf-8")
    print(f"{options.out}: written; left out: {', '.join(left_out) or 'nothing'}", file=sys.stderr)


if __name__ == "__main__":
    main()

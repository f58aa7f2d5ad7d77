#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the files of bench/results/current: each follows bench/results/schema.json, says what its name says, and is
read by a table of a document or by a picture. And that all others lie in bench/results/archive, and are JSON.

    tools/check_results.py            the tree it stands in
    tools/check_results.py FILE ..    the schema alone, of files that are about to be added

The schema's words that are used are checked here, without a library, so that it needs nothing but Python; any other
word in it is an error rather than a rule that nobody applies.
"""

import json
import pathlib
import re
import sys

MARKER = re.compile(r"<!-- table (\S+) (.+?) -->")
DEVICE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
NAME = re.compile(r"(\d{4}-\d{2}-\d{2})-[a-z0-9]+(-[a-z0-9]+)*\.json")
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "number": (int, float), "integer": int}
NOTES = {"$schema", "title", "description"}
# What files of the archive call what has one word now.
OLD_WORDS = re.compile(r"unfused-chain|dedup|forward-backward|forward\+backward|in pieces|sums-on-owners")


def broken(schema: dict, value, at: str) -> list[str]:
    """What of a schema's rules a value breaks; `at` names the value."""
    if unknown := schema.keys() - NOTES - RULES.keys() - {"type"}:
        raise ValueError(f"schema of {at}: {sorted(unknown)} is not known to {pathlib.Path(__file__).name}")
    expected = schema["type"]
    if not isinstance(value, TYPES[expected]) or isinstance(value, bool) != (expected == "boolean"):
        return [f"{at}: {value!r} is no {expected}"]
    return [error for word, rule in schema.items() if word in RULES for error in RULES[word](rule, value, at, schema)]


def _when(holds: bool, text: str) -> list[str]:
    return [] if holds else [text]


RULES = {
    "required": lambda names, value, at, _: [f"{at}: {name} is missing" for name in names if name not in value],
    "properties": lambda schemas, value, at, _: [
        error for name in value if name in schemas for error in broken(schemas[name], value[name], f"{at}.{name}")],
    "additionalProperties": lambda _, value, at, schema: [
        f"{at}: {name} is no key of the schema" for name in value if name not in schema["properties"]],
    "items": lambda schema, value, at, _: [
        error for i, one in enumerate(value) for error in broken(schema, one, f"{at}[{i}]")],
    "enum": lambda all_, value, at, _: _when(value in all_, f"{at}: {value!r} is none of {all_}"),
    "pattern": lambda rule, value, at, _: _when(re.search(rule, value), f"{at}: {value!r} does not match {rule}"),
    "minLength": lambda least, value, at, _: _when(len(value) >= least, f"{at} is empty"),
    "minItems": lambda least, value, at, _: _when(len(value) >= least, f"{at}: {len(value)} items, fewer than {least}"),
    "maxItems": lambda most, value, at, _: _when(len(value) <= most, f"{at}: {len(value)} items, more than {most}"),
    "minimum": lambda least, value, at, _: _when(value >= least, f"{at}: {value} is below {least}"),
    "exclusiveMinimum": lambda floor, value, at, _: _when(value > floor, f"{at}: {value} is not above {floor}"),
}


def sense(document: dict) -> list[str]:
    """What a schema cannot say of a document that follows it."""
    found = []
    for i, row in enumerate(document["rows"]):
        at = f"rows[{i}]"
        if not row["ms_p10"] <= row["ms"] <= row["ms_p90"]:
            found.append(f"{at}: ms {row['ms']} is not between ms_p10 {row['ms_p10']} and ms_p90 {row['ms_p90']}")
        if row["pass"] == "train-step" and (lacks := {"tokens_per_s_per_gpu", "peak_bytes", "loss_at_step",
                                                      "batch_tokens"} - row.keys()):
            found.append(f"{at}: a train-step without {sorted(lacks)}")
        found += [f"{at}.{key}: {row[key]!r} has a newer word" for key in ("pass", "impl", "variant")
                  if OLD_WORDS.search(row[key])]
    return found


def check_document(schema: dict, document) -> list[str]:
    return broken(schema, document, "document") or sense(document)


def check_name(path: pathlib.Path, document: dict) -> list[str]:
    """Of a file current/<device>/<date>-<what>.json."""
    found = _when(DEVICE.fullmatch(path.parent.name), f"folder {path.parent.name}: a device in lower case, as h200x4")
    match = NAME.fullmatch(path.name)
    if not match:
        return [*found, "name: YYYY-MM-DD-what.json in lower case"]
    return found + _when(match[1] == document["date"], f"date {document['date']} is not that of the name")


def read_files(root: pathlib.Path) -> set[str]:
    """What tables of documents and pictures read, as paths below bench/results."""
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md")]
    files = {file for page in pages for _, files in MARKER.findall(page.read_text(encoding="utf-8"))
             for file in files.split()}
    for script in root.glob("bench/draw_*.py"):
        files |= set(re.findall(r"[\"']((?:current|archive)/[\w./-]+\.json)[\"']", script.read_text(encoding="utf-8")))
    return files


def check_tree(root: pathlib.Path) -> tuple[list[str], int]:
    """(errors, number of files)"""
    results = root / "bench/results"
    schema = json.loads((results / "schema.json").read_text(encoding="utf-8"))
    read, found = read_files(root), []
    files = sorted(p for p in (results / "current").rglob("*") if p.is_file() and p.name != "README.md")
    for path in files:
        name = path.relative_to(results).as_posix()
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            found.append(f"{name}: {error}")
            continue
        errors = check_document(schema, document)
        found += [f"{name}: {error}" for error in errors or check_name(path, document)]
        if name not in read:
            found.append(f"{name}: no table and no picture reads it; move it to archive")
    for path in (results / "archive").rglob("*.json"):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            found.append(f"{path.relative_to(results).as_posix()}: {error}")
    found += [f"{p.relative_to(results).as_posix()}: lies in neither archive nor current" for p in results.rglob("*")
              if p.is_file() and p.relative_to(results).parts[0] not in ("archive", "current", "schema.json")]
    found += [f"{name}: a table or a picture reads it, and it does not exist"
              for name in sorted(read) if not (results / name).is_file()]
    return found, len(files)


def main():
    root = pathlib.Path(__file__).resolve().parents[1]
    if sys.argv[1:]:
        schema = json.loads((root / "bench/results/schema.json").read_text(encoding="utf-8"))
        found = [f"{file}: {error}" for file in sys.argv[1:]
                 for error in check_document(schema, json.loads(pathlib.Path(file).read_text(encoding="utf-8")))]
        count = len(sys.argv) - 1
    else:
        found, count = check_tree(root)
    for line in found:
        print(line)
    if not found:
        print(f"results: ok ({count} current files)")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()

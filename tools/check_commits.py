#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Commit subjects: `scope: imperative subject`, at most 72 characters; and a body wherever a decision or a figure is.

Checks the latest commits, merges left out; or, with a file, the message in it and what is staged (a commit-msg hook).
A commit has a decision if it adds or changes a page of docs/adr, a figure if its subject has one, or if it touches
measurements (bench/results) or what quotes them. The body is asked for after BODIES_SINCE; history is not rewritten.
"""

import pathlib
import re
import subprocess
import sys

LATEST = 50
MAX_LENGTH = 72
# Landed with subjects of 91 and 75 characters; history is not rewritten for that. They go when older than the latest.
EXCEPTED = ("30cfde866c7279e40c6f04fe441773536546cbee", "bc95d94ed00d9ed9bac165de22dd87356bd93d55")
BODIES_SINCE = "972ebff00f763ed0245161230efc7f0a14d2b1b2"
FIGURE = re.compile(r"\d+\.\d|\d+ ?(%|percent|times|x|ns|us|ms|s|KB|MB|GB|KiB|MiB|GiB|TB|TFLOPS?)(?![\w])")
DECIDES = re.compile(r"docs/adr/\d|bench/results/(current|archive)/|docs/(performance|lessons)\.md")
TRAILER = re.compile(r"[A-Z][\w-]+: \S.*")
SUBJECT = re.compile(r"[a-z0-9_./, -]+: \S.*[^. ]")


def complaint(subject: str) -> str | None:
    if len(subject) > MAX_LENGTH:
        return f"{len(subject)} characters, more than {MAX_LENGTH}: {subject}"
    if not SUBJECT.fullmatch(subject):
        return f"not `scope: imperative subject`: {subject}"
    return None


def lacks_body(message: str, files: list[str]) -> str | None:
    """Of a whole message and the files that its commit touches."""
    subject, *rest = message.splitlines()
    if any(line.strip() and not line.startswith("#") and not TRAILER.fullmatch(line) for line in rest):
        return None
    why = [*(["a figure"] if FIGURE.search(subject) else []), *(file for file in files if DECIDES.match(file))]
    return f"no body, although it has {why[0]}; say why, and what was measured how: {subject}" if why else None


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def complaints_of_history() -> list[str]:
    log = git("log", "--no-merges", f"--max-count={LATEST}", "--format=%H %s").splitlines()
    found = [complaint(line.partition(" ")[2]) for line in log if not line.startswith(EXCEPTED)]
    # In a shallow copy the commit may be missing.
    known = subprocess.run(["git", "merge-base", "--is-ancestor", BODIES_SINCE, "HEAD"], check=False,
                           capture_output=True).returncode == 0
    since = git("log", "--no-merges", "--format=%x01%B%x00", "--name-only", f"{BODIES_SINCE}..HEAD") if known else ""
    for entry in since.split("\x01")[1:]:
        message, _, files = entry.partition("\0")
        found.append(lacks_body(message, files.split()))
    return [text for text in found if text]


def complaints_of_message(path: str) -> list[str]:
    message = pathlib.Path(path).read_text(encoding="utf-8")
    found = [complaint(message.partition("\n")[0]), lacks_body(message, git("diff", "--cached", "--name-only").split())]
    return [text for text in found if text]


def main() -> int:
    found = complaints_of_message(sys.argv[1]) if len(sys.argv) > 1 else complaints_of_history()
    print("\n".join(found) or "commits: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

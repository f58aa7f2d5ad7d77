#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Commit subjects: `scope: imperative subject`, at most 72 characters.

Checks the latest commits, merges left out; or, with a file, the message in it (a commit-msg hook).
"""

import pathlib
import re
import subprocess
import sys

LATEST = 50
MAX_LENGTH = 72
# Landed with subjects of 75 and 73 characters; history is not rewritten for that. Go when older than the latest.
EXCEPTED = ("4d78d76e85be22e48cd036546ddb6c36c4cb6549", "571792bf9b3e4f413ff65fe3a4747caaac4881e4")
SUBJECT = re.compile(r"[a-z0-9_./, -]+: \S.*[^. ]")


def complaint(subject: str) -> str | None:
    if len(subject) > MAX_LENGTH:
        return f"{len(subject)} characters, more than {MAX_LENGTH}: {subject}"
    if not SUBJECT.fullmatch(subject):
        return f"not `scope: imperative subject`: {subject}"
    return None


def subjects() -> list[str]:
    if len(sys.argv) > 1:
        return pathlib.Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()[:1]
    command = ["git", "log", "--no-merges", f"--max-count={LATEST}", "--format=%H %s"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [line.partition(" ")[2] for line in lines if not line.startswith(EXCEPTED)]


def main() -> int:
    found = [text for subject in subjects() if (text := complaint(subject))]
    print("\n".join(found) or "commit subjects: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

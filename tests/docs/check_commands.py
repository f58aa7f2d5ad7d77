#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Commands that the documents show in ```sh blocks exist: subcommands and flags of `tessera`, verbs of make.

check_commands.py PROGRAM MAKEFILE DOCUMENT...
"""

import functools
import pathlib
import re
import shlex
import subprocess
import sys

BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@functools.cache
def help_text(program: str, *subcommand: str) -> str:
    command = [program, *subcommand, "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_tessera(program: str, words: list[str]) -> list[str]:
    if not words or not re.search(rf"^  {re.escape(words[0])}\b", help_text(program), re.MULTILINE):
        return [f"no subcommand {' '.join(words[:1])}"]
    text = help_text(program, words[0])
    flags = [word.split("=")[0] for word in words[1:] if word.startswith("--")]
    return [f"{words[0]} has no {flag}" for flag in flags if not re.search(rf"{flag}(?![\w-])", text)]


def check_line(line: str, program: str, verbs: set[str]) -> list[str]:
    words = shlex.split(line, comments=True)
    if not words:
        return []
    if words[0] == "tessera" or words[0].endswith("/tessera"):
        return check_tessera(program, words[1:])
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        return [f"make has no verb {verb}" for verb in targets if verb not in verbs]
    return []


def main() -> int:
    program, makefile, *documents = sys.argv[1:]
    verbs = set(re.findall(r"^([a-z-]+):", pathlib.Path(makefile).read_text(encoding="utf-8"), re.MULTILINE))
    found, lines = [], 0
    for document in documents:
        for block in BLOCK.findall(pathlib.Path(document).read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                lines += 1
                found += [f"{document}: `{line}`: {text}" for text in check_line(line, program, verbs)]
    # Seen to fail: a flag, the beginning of one, a subcommand and a verb that do not exist.
    planted = ("tessera verify --no-such-flag", "build-cuda/bin/tessera verify --top 4", "tessera no-such-command",
               "make no-such-verb")
    found += [f"not noticed: {line}" for line in planted if not check_line(line, program, verbs)]
    print("\n".join(found) or f"{lines} lines of commands: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

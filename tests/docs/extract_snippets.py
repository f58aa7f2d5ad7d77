#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes every ```cpp and ```c block of the given Markdown files as a program of its own.

OUT/<file>_<number>.cpp, numbered from 1 in each file. A block without `main` is the inside of a function:
it gets the API's header and a main around it. Prints the paths, one per line; a file whose text did not
change is not touched.
"""

import pathlib
import re
import sys

FENCE = re.compile(r"^```(cpp|c)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
AROUND = """// From {source}.
#include <cstdint>
#include <cstdio>
#include <tessera/tessera.hpp>
#include <vector>

int main() {{
{body}  return 0;
}}
"""


def snippets(source: pathlib.Path) -> list[tuple[str, str]]:
    result = []
    for language, body in FENCE.findall(source.read_text(encoding="utf-8")):
        whole = re.search(r"\bmain\(", body) is not None
        result.append((language, body if whole else AROUND.format(source=source.name, body=body)))
    return result


def main() -> int:
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:]:
        source = pathlib.Path(name)
        for number, (language, text) in enumerate(snippets(source), start=1):
            target = out / f"{source.stem}_{number}.{language}"
            if not target.is_file() or target.read_text(encoding="utf-8") != text:
                target.write_text(text, encoding="utf-8")
            print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())

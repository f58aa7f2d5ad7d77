# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/kernels/blackwell.md are those that the program emulator_sm100_page prints from the kernels'
configurations. With --write they are put there:

    cmake --build build --target emulator_sm100_page && python3 tests/emulator/sm100/page_test.py --program \\
        build/bin/emulator_sm100_page --write
"""

import argparse
import difflib
import pathlib
import re
import subprocess
import sys

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "kernels" / "blackwell.md"
BLOCK = re.compile(r"(<!-- printed (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def tables(printed: str) -> dict[str, str]:
    return {name: text for name, text in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", printed, re.DOTALL | re.MULTILINE)}


def filled(page: str, by_name: dict[str, str]) -> str:
    named = [match[1] for match in BLOCK.findall(page)]
    if sorted(named) != sorted(by_name):
        sys.exit(f"{PAGE.name}: it has the tables {named}, and {sorted(by_name)} are printed")
    return BLOCK.sub(lambda match: match[1] + by_name[match[2]] + match[4], page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", required=True)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    by_name = tables(subprocess.run([args.program], check=True, capture_output=True, text=True).stdout)
    # A table without a row, or a page that is one row short, has to be found wrong.
    if min(text.count("\n") for text in by_name.values()) < 5:
        sys.exit("a table has no rows")
    page = PAGE.read_text(encoding="utf-8")
    wanted = filled(page, by_name)
    if args.write:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    if page != wanted:
        lines = (page.splitlines(True), wanted.splitlines(True))
        sys.stdout.writelines(difflib.unified_diff(*lines, PAGE.name, "printed"))
        print("write them: page_test.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

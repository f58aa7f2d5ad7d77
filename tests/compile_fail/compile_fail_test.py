# SPDX-License-Identifier: Apache-2.0
"""What must not compile, does not, and says why.

Each file names in its line `// error: TEXT` what the first error of the compiler has to say. Files without
such a line have to compile, and so has one that asks for TESSERA_COMPILES once that is defined. Each text of the
contract is expected by some file.
"""
import argparse
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
EXPECTED = re.compile(r"^// error: (.+)$", re.MULTILINE)
ERROR = re.compile(r"^.*?: (?:fatal )?error: (.*)$", re.MULTILINE)
ASSERTED = re.compile(r"static_assert\([^;]*?,\s*((?:\"[^\"]*\"\s*)+)\);")


def texts(contract: str) -> list[str]:
    """The messages of a header's static_asserts."""
    return ["".join(re.findall(r'"([^"]*)"', literals)) for literals in ASSERTED.findall(contract)]


def complaint(file: pathlib.Path, command: list[str]) -> str | None:
    """What is wrong with how a file compiles, if anything."""
    text = file.read_text(encoding="utf-8")
    expected = EXPECTED.search(text)

    def errors(*flags):
        run = subprocess.run([*command, *flags, str(file)], capture_output=True, text=True, check=False,
                             env={**os.environ, "LC_ALL": "C"})
        found = ERROR.findall(run.stderr)
        return found or ([run.stderr] if run.returncode != 0 else [])

    if expected is None or "TESSERA_COMPILES" in text:
        found = errors() if expected is None else errors("-DTESSERA_COMPILES")
        if found:
            return f"should compile: {found[0]}"
    if expected is not None:
        found = errors()
        if not found:
            return "compiles"
        if expected[1] not in found[0]:
            return f"says: {found[0]}\n  not: {expected[1]}"
    return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--contract", required=True, type=pathlib.Path, help="the header with the static_asserts")
    parser.add_argument("--include", action="append", default=[], help="a folder of headers")
    args = parser.parse_args()
    files = sorted(HERE.glob("*.cpp"))
    command = [args.compiler, "-std=c++20", "-fsyntax-only", "-w", *(f"-I{folder}" for folder in args.include)]
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for file, wrong in zip(files, pool.map(lambda file: complaint(file, command), files)):
            if wrong is not None:
                failed += 1
                print(f"{file.name}: {wrong}")
    expected = [match[1] for file in files if (match := EXPECTED.search(file.read_text(encoding="utf-8")))]
    asserted = texts(args.contract.read_text(encoding="utf-8"))
    if not asserted:
        sys.exit(f"{args.contract}: no static_assert with a text was found")
    for text in asserted:
        if not any(text.startswith(begin) for begin in expected):
            failed += 1
            print(f"no file expects: {text}")
    print(f"{len(files)} files, {len(expected)} that must not compile, {len(asserted)} texts, {failed} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the machine code of all kernels in two builds, whatever the kernels are called.

    tools/sass_diff.py OLD NEW

OLD and NEW are build folders, object files or shared libraries. A change that only moves or renames leaves each
kernel's instructions as they were, although its mangled name differs: so kernels are matched by their instructions
first. What is left over on both sides is paired by the nearest name, and each pair's number of instructions and of
differing lines is printed. Exits with 0 if every kernel has an equal in the other build, with 1 if not, with 2 if
nothing can be compared.
"""

import argparse
import collections
import concurrent.futures
import difflib
import hashlib
import os
import pathlib
import re
import subprocess
import sys

import ptxas_report

INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);")
# Names of functions and of variables in an operand: they change with a namespace, and the linker fills in their place.
SYMBOL = re.compile(r"\b(_Z\w+|\$\w+\$\w*|\w+@\(\w+\))|`\([^)]*\)")


def kernels_of(sass: str) -> dict[str, list[str]]:
    """The instructions of each function in cuobjdump's output by mangled name, without addresses and encodings. Where
    one object holds a function twice (once for each architecture), the name is numbered."""
    found, name = {}, None
    for line in sass.splitlines():
        if "Function : " in line:
            name = base = line.split("Function : ")[1].strip()
            number = 2
            while name in found:
                name, number = f"{base}#{number}", number + 1
            found[name] = []
        elif name is not None and (match := INSTRUCTION.match(line)):
            found[name].append(SYMBOL.sub("symbol", match[1]).strip())
    return found


def objects(path: pathlib.Path) -> list[pathlib.Path]:
    """The files with device code: a file itself; of a build folder the objects that are compiled from .cu files of the
    library, as bench/resources lists them."""
    if path.is_file():
        return [path]
    files = sorted(path.glob("src/**/*.cu.o"))
    if not files:
        print(f"{path}: no file and no folder with src/**/*.cu.o; build it first: make cuda", file=sys.stderr)
        sys.exit(2)
    return files


def read(path: pathlib.Path, dumper: str, jobs: int) -> dict[str, list[str]]:
    def dump(file):
        done = subprocess.run([dumper, "-sass", file], check=False, capture_output=True, text=True)
        if done.returncode:
            print(f"{file}: {done.stderr.strip()}", file=sys.stderr)
            sys.exit(2)
        return file, kernels_of(done.stdout)

    found = {}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for file, kernels in pool.map(dump, objects(path)):
            found |= {f"{file.name}: {name}": body for name, body in kernels.items()}
    return found


def unmatched(old: dict[str, list[str]], new: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """Names on each side that have no partner with equal instructions; each kernel is a partner once."""
    def by_body(kernels):
        groups = collections.defaultdict(list)
        for name, body in kernels.items():
            groups[hashlib.sha256("\n".join(body).encode()).digest()].append(name)
        return groups

    olds, news = by_body(old), by_body(new)
    left = [name for key, names in olds.items() for name in names[len(news.get(key, ())):]]
    right = [name for key, names in news.items() for name in names[len(olds.get(key, ())):]]
    return sorted(left), sorted(right)


def pairs(left: list[str], right: list[str]) -> list[tuple[str | None, str | None]]:
    """Each name with the nearest one of the other side; None where the other side has fewer."""
    result, free = [], list(right)
    for name in left:
        nearest = difflib.get_close_matches(name, free, n=1, cutoff=0.5)
        if nearest:
            free.remove(nearest[0])
        result.append((name, nearest[0] if nearest else None))
    return result + [(None, name) for name in free]


def differing(old: list[str], new: list[str]) -> int:
    """Instructions that one has and the other lacks, wherever they stand: registers count, places do not."""
    return sum(((collections.Counter(old) - collections.Counter(new)) +
                (collections.Counter(new) - collections.Counter(old))).values())


def short(name: str) -> str:
    file, colon, mangled = name.rpartition(": ")
    return file + colon + ptxas_report.demangle([mangled.split("#")[0]])[0]


def compare(old: dict[str, list[str]], new: dict[str, list[str]]) -> list[str]:
    """A line for each kernel without an equal."""
    lines = []
    for before, after in pairs(*unmatched(old, new)):
        if after is None:
            lines.append(f"only in the old build  {len(old[before]):6} instructions  {short(before)}")
        elif before is None:
            lines.append(f"only in the new build  {len(new[after]):6} instructions  {short(after)}")
        else:
            lines.append(f"{len(old[before]):6} -> {len(new[after]):6} instructions, "
                         f"{differing(old[before], new[after])} differ  {short(after)}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    dumper = ptxas_report.disassembler()
    old, new = (read(path, dumper, arguments.jobs) for path in (arguments.old, arguments.new))
    if not old or not new:
        print(f"{arguments.new if old else arguments.old}: no kernel found", file=sys.stderr)
        return 2
    lines = compare(old, new)
    print("\n".join(lines) if lines else f"sass: {len(new)} kernels, all with equal instructions")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())

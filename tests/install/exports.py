#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libtessera.so exports the functions that tessera.h declares, namespace tessera's C++ API, nothing else."""

import argparse
import re
import subprocess
import sys

INNER_NAMESPACES = ("core", "cpu", "cuda", "ops", "detail")


def exported(nm: str, library: str) -> list[str]:
    command = [nm, "--dynamic", "--defined-only", "--demangle", "--format=posix", library]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [re.sub(r" [A-Za-z] [0-9a-f]+( [0-9a-f]+)?$", "", line) for line in lines]


def declared(header: str) -> set[str]:
    with open(header, encoding="utf-8") as file:
        return set(re.findall(r"\b(tessera_\w+)\(", re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)))


def complaints(symbols: list[str], c_functions: set[str]) -> list[str]:
    found = []
    for symbol in symbols:
        inner = re.match(r"tessera::(\w+)::", symbol)
        if symbol.startswith("tessera_"):
            if symbol not in c_functions:
                found.append(f"exported, but not declared in tessera.h: {symbol}")
        elif not symbol.startswith("tessera::") or (inner and inner[1] in INNER_NAMESPACES):
            found.append(f"leaks: {symbol}")
    for function in sorted(c_functions - set(symbols)):
        found.append(f"declared in tessera.h, but not exported: {function}")
    return found


def self_test() -> None:
    planted = ["tessera_a", "tessera_b", "bli_sgemm", "tessera::cpu::dot(float)", "tessera::route()"]
    assert len(complaints(planted, {"tessera_a", "tessera_c"})) == 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--header", required=True)
    arguments = parser.parse_args()
    self_test()
    symbols = exported(arguments.nm, arguments.library)
    found = complaints(symbols, declared(arguments.header))
    print("\n".join(found) or f"{len(symbols)} symbols, all part of the API")
    return 1 if found or not symbols else 0


if __name__ == "__main__":
    sys.exit(main())

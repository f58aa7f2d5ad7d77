# SPDX-License-Identifier: Apache-2.0
"""Compiles and runs mutants: copies of the sources with an error each, which an emulator's tests have to notice.

A mutant is a tuple that begins with its name, a file of the tree, a text that stands there once, what stands there
instead, and a part of what the test then says.
"""
import argparse
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
SUITE = pathlib.Path(sys.argv[0]).resolve().parent

# What every test includes, compiled once for all mutants.
HEADERS = "algorithm array cmath cstdint cstring functional random string vector gtest/gtest.h".split()

# Against mutants that never end, and nothing else: a mutant takes up to five minutes where twenty other programs run.
LIMIT_S = 3000


def text_of(tree, mutant):
    """The text of the mutant's file, in which what it replaces stands once."""
    name, file, old = mutant[:3]
    text = (tree / file).read_text(encoding="utf-8")
    if text.count(old) != 1:
        sys.exit(f"{name}: {file} has {text.count(old)} times: {old}")
    return text


def mutate(tree, scratch, mutant):
    """A tree of links in which one file is a changed copy."""
    _, file, old, new = mutant[:4]
    copy = scratch / "tree"
    shutil.copytree(tree, copy, symlinks=True)
    path = copy / file
    text = text_of(copy, mutant)
    path.unlink()
    path.write_text(text.replace(old, new), encoding="utf-8")
    return copy


def options(level):
    return ["-std=c++20", level, "-w", "-Wno-psabi", "-fno-strict-aliasing", "-ffp-contract=off"]


def precompiled(args, level):
    """Options that include the headers of tests as compiled once at `level`; none for a few mutants, which do not pay
    for that."""
    if args.quick:
        return []
    header = pathlib.Path(args.headers) / level / "tests.hpp"
    with args.lock:
        if not header.exists():
            header.parent.mkdir()
            header.write_text("".join(f"#include <{name}>\n" for name in HEADERS), encoding="utf-8")
            subprocess.run([args.compiler, *options(level), "-x", "c++-header", str(header), "-o", f"{header}.gch"],
                           check=True)
    return ["-include", str(header)]  # the compiler takes the .gch beside it


# gold links a test in half the time of ld.bfd.
LINKER = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []


def outcome(args, mutant, source, tests, level="-O1"):
    """The mutant's name, whether the test said what it should, what it said, and the seconds that it took.

    `source`, of the tree or of the suite's own folder, is compiled again at `level` and takes the place of its object.
    """
    start = time.monotonic()
    name, notice = mutant[0], mutant[4]
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        tree = mutate(pathlib.Path(args.tree), scratch, mutant)
        program = scratch / "test"
        objects = [o for o in args.objects.split(",") if source not in o]
        path = tree / source if (tree / source).exists() else SUITE / source
        folders = (tree, HERE / "include", ROOT, ROOT / "src", ROOT / "include")
        subprocess.run([args.compiler, *options(level), *precompiled(args, level),
                        *(f"-I{folder}" for folder in folders), "-x", "c++", str(path), "-x", "none", *objects,
                        *args.libraries.split(","), "-lpthread", *LINKER, "-o", str(program)], check=True)
        try:
            run = subprocess.run([str(program), f"--gtest_filter={tests}"], capture_output=True, text=True,
                                 timeout=LIMIT_S, check=False, env={**os.environ, "GTEST_FAIL_FAST": "1"})
        except subprocess.TimeoutExpired:
            return name, False, f"had not ended after {LIMIT_S} s\n", time.monotonic() - start
        return name, run.returncode == 1 and notice in run.stdout, run.stdout, time.monotonic() - start


def main(mutants, quick, run):
    """Runs all mutants, or those named in `quick`, by run(args, mutant), and returns how the program should exit."""
    parser = argparse.ArgumentParser()
    for flag in ("--compiler", "--tree", "--objects", "--libraries"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--quick", action="store_true", help="a few of them")
    args = parser.parse_args()
    for mutant in mutants:  # of all: a text that has changed would else be found by night
        text_of(pathlib.Path(args.tree), mutant)
    chosen = [mutant for mutant in mutants if not args.quick or mutant[0] in quick]
    if args.quick and len(chosen) != len(quick):
        sys.exit("a mutant of --quick is not there")
    missed = 0
    args.lock = threading.Lock()
    with (tempfile.TemporaryDirectory() as args.headers,
          concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool):
        for name, noticed, says, seconds in pool.map(lambda mutant: run(args, mutant), chosen):
            print(f"{'noticed ' if noticed else 'MISSED  '} {seconds:4.0f} s  {name}", flush=True)
            if not noticed:
                missed += 1
                print(says[-3000:])
    return 1 if missed else 0

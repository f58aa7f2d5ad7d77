# SPDX-License-Identifier: Apache-2.0
"""Compiles and runs mutants: copies of the sources with an error each, which an emulator's tests have to notice.

A mutant is a tuple that begins with its name, a file of the tree, a text that stands there once, what stands there
instead, and a part of what the test then says. Mutants that the same tests notice are compiled as one program, which is
told by a number which of them it is (mutant_switches.py); without a number its tests have to pass.
"""
import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import mutant_switches

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
SUITE = pathlib.Path(sys.argv[0]).resolve().parent

# Every test includes these headers; they are compiled once for all programs.
HEADERS = "algorithm array cmath cstdint cstring functional random string vector gtest/gtest.h".split()

# Against mutants that never end, and nothing else: a mutant takes up to five minutes where twenty other programs run.
LIMIT_S = 3000


@dataclasses.dataclass
class Program:
    """`source`, of the tree or of the suite's own folder, compiled at `level` with each mutant's place in it.

    It takes the place of its object. Where it has several mutants, they are chosen by their number in the list, from 1.
    """
    source: str
    level: str
    shares: bool  # whether further mutants may be in it
    mutants: list = dataclasses.field(default_factory=list)
    tests: list = dataclasses.field(default_factory=list)  # those that each mutant runs
    places: list = dataclasses.field(default_factory=list)  # (file, place) of each mutant, where it shares
    file: pathlib.Path | None = None  # once it is compiled
    failed: set = dataclasses.field(default_factory=set)  # tests that a mutant failed

    def takes(self, source, level, file, place):
        return ((self.source, self.level, self.shares) == (source, level, True) and
                not any(file == other and mutant_switches.cross(place, taken) for other, taken in self.places))

    def files(self, at_run_time):
        """The files that are not those of the tree."""
        return {mutant[1] for mutant in self.mutants} | (set(at_run_time) if len(self.mutants) > 1 else set())

    def text(self, file, text, at_run_time):
        """What stands in a file instead of `text`."""
        if len(self.mutants) == 1:
            return text.replace(*self.mutants[0][2:4])
        text = mutant_switches.at_run_time(text, at_run_time.get(file, ()))
        numbered = enumerate(self.places, start=1)
        return mutant_switches.switched(text, [(number, place) for number, (of, place) in numbered if of == file])


def text_of(tree, mutant):
    """The text of the mutant's file, in which what it replaces stands once."""
    name, file, old = mutant[:3]
    text = (tree / file).read_text(encoding="utf-8")
    if text.count(old) != 1:
        sys.exit(f"{name}: {file} has {text.count(old)} times: {old}")
    return text


def programs_of(tree, mutants, how, alone):
    """As few programs as hold all mutants, those named in `alone` by themselves."""
    programs = []
    for mutant in mutants:
        source, tests, level = how(mutant)
        file, place = mutant[1], None
        if mutant[0] not in alone:
            place = mutant_switches.place_of(text_of(tree, mutant), *mutant[2:4])
        program = next((p for p in programs if place and p.takes(source, level, file, place)), None)
        if program is None:
            program = Program(source, level, place is not None)
            programs.append(program)
        program.mutants.append(mutant)
        program.tests.append(tests)
        program.places.append((file, place))
    return programs


def options(level):
    return ["-std=c++20", level, "-w", "-Wno-psabi", "-fno-strict-aliasing", "-ffp-contract=off"]


def made_once(args, name, *words):
    """The file `name`, which the first that asks for it compiles."""
    file = pathlib.Path(args.scratch) / name
    with args.lock:
        if not file.exists():
            subprocess.run([args.compiler, *words, "-o", str(file)], check=True)
    return str(file)


def of_all(args, level):
    """Words of the compiler's command that all programs share: headers of tests as compiled once at `level`, and what
    ends a program early. None of them for a few mutants, which do not pay for that."""
    if args.quick:
        return []
    header = pathlib.Path(args.scratch) / f"tests{level}.hpp"
    with args.lock:
        if not header.exists():
            header.write_text("".join(f"#include <{name}>\n" for name in HEADERS), encoding="utf-8")
    made_once(args, f"{header.name}.gch", *options(level), "-x", "c++-header", str(header))
    noticed = made_once(args, "noticed.o", *options("-O0"), "-c", str(HERE / "mutant_noticed.cpp"))
    return ["-include", str(header), noticed]  # the compiler takes the .gch beside it


# gold links a test in half the time of ld.bfd.
LINKER = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []


def compiled(args, program):
    """Makes the program's file, and returns the seconds that it took."""
    start = time.monotonic()
    scratch = pathlib.Path(tempfile.mkdtemp(dir=args.scratch))
    tree = scratch / "tree"  # of links, in which some files are changed copies
    shutil.copytree(args.tree, tree, symlinks=True)
    for file in program.files(args.at_run_time):
        text = (tree / file).read_text(encoding="utf-8")
        (tree / file).unlink()
        (tree / file).write_text(program.text(file, text, args.at_run_time), encoding="utf-8")
    objects = [o for o in args.objects.split(",") if program.source not in o]
    path = tree / program.source if (tree / program.source).exists() else SUITE / program.source
    folders = (tree, HERE / "include", ROOT, ROOT / "src", ROOT / "include")
    subprocess.run([args.compiler, *options(program.level), *of_all(args, program.level),
                    "-include", str(HERE / "chosen_mutant.hpp"), *(f"-I{folder}" for folder in folders),
                    "-x", "c++", str(path), "-x", "none", *objects, *args.libraries.split(","), "-lpthread", *LINKER,
                    "-o", str(scratch / "test")], check=True)
    program.file = scratch / "test"
    return time.monotonic() - start


def ran(file, tests, chosen):
    """How a program exits, what it says, and the seconds that it takes. `chosen` are variables of its environment."""
    start = time.monotonic()
    environment = {**os.environ, "GTEST_FAIL_FAST": "1", **chosen}
    try:
        run = subprocess.run([str(file), f"--gtest_filter={tests}"], capture_output=True, text=True, timeout=LIMIT_S,
                             check=False, env=environment)
    except subprocess.TimeoutExpired:
        return None, f"had not ended after {LIMIT_S} s\n", time.monotonic() - start
    return run.returncode, run.stdout, time.monotonic() - start


def run_all(args, programs):
    """Runs all programs, and returns how many did not do what they should."""
    wrong = 0

    def report(is_right, good, bad, seconds, what, says):
        nonlocal wrong
        print(f"{good if is_right else bad} {seconds:4.0f} s  {what}", flush=True)
        if not is_right:
            wrong += 1
            print(says[-3000:])

    def run(which):
        program, i = which
        return ran(program.file, program.tests[i], {"TESSERA_MUTANT": str(i + 1),
                                                    "TESSERA_NOTICE": program.mutants[i][4]})

    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for program, seconds in zip(programs, pool.map(lambda program: compiled(args, program), programs)):
            report(True, "compiled", "", seconds, f"{program.source}, mutants: {len(program.mutants)}", "")
        runs = [(program, i) for program in programs for i in range(len(program.mutants))]
        for (program, i), (code, says, seconds) in zip(runs, pool.map(run, runs)):
            name, notice = program.mutants[i][0], program.mutants[i][4]
            report(code == 1 and notice in says, "noticed ", "MISSED  ", seconds, name, says)
            program.failed |= set(re.findall(r"^\[  FAILED  \] ([\w/]+\.[\w/]+)", says, re.MULTILINE))
        # The tests that notice mutants pass without one; not of a few, which are among all that are run elsewhere.
        shared = [program for program in programs if len(program.mutants) > 1 and not args.quick]
        outcomes = pool.map(lambda program: ran(program.file, ":".join(sorted(program.failed)), {}), shared)
        for program, (code, says, seconds) in zip(shared, outcomes):
            report(code == 0 and program.failed, "passed  ", "FAILED  ", seconds,
                   f"{program.source} with no mutant chosen", says)
    return wrong


def main(mutants, quick, how, alone=(), at_run_time=None):
    """Runs all mutants, or those named in `quick`, and returns how the program should exit.

    how(mutant, whether few are run) is what is compiled for a mutant, the tests that are run, and the level of
    optimisation; `alone` names the mutants whose place no number can switch. `at_run_time` has declarations, by their
    file, that the compiler need not evaluate: where several mutants share a program it can not, as it has no number.
    """
    parser = argparse.ArgumentParser()
    for flag in ("--compiler", "--tree", "--objects", "--libraries"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--quick", action="store_true", help="a few of them")
    args = parser.parse_args()
    args.at_run_time = at_run_time or {}
    tree = pathlib.Path(args.tree)
    for mutant in mutants:  # of all: a text that has changed would else be found by night
        text_of(tree, mutant)
    names = [mutant[0] for mutant in mutants]
    if not {*quick, *alone} <= set(names):
        sys.exit("a mutant of --quick, or one that is alone, is not there")
    chosen = [mutant for mutant in mutants if not args.quick or mutant[0] in quick]
    args.lock = threading.Lock()
    with tempfile.TemporaryDirectory() as args.scratch:
        return min(1, run_all(args, programs_of(tree, chosen, lambda mutant: how(mutant, args.quick), alone)))

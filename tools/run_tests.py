#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs ctest in one or more build folders and closes with `N passed, N failed, N skipped`.

The numbers come from the JUnit file that ctest writes; a table gives the seconds of every suite, and skipped and failed
tests are listed with the reason. `--skipped NAME=REASON` counts a suite that this machine cannot run at all.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    name: str
    outcome: str  # passed, failed, skipped
    reason: str = ""
    output: str = ""
    suite: str = ""
    seconds: float = 0.0


def skip_reason(output: str) -> str:
    """The message a test gave: GoogleTest prints it above `[  SKIPPED ]`, programs on the last line."""
    match = re.search(r"Skipped\n(.*?)\n+\[  SKIPPED \]", output, re.DOTALL)
    if match:
        return " ".join(match.group(1).split())
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def listed_tests(folder: str) -> list[dict]:
    command = ["ctest", "--test-dir", folder, "--show-only=json-v1"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return json.loads(listed or "{}").get("tests", [])


def left_out(tests: list[dict], extra: list[str]) -> list[str]:
    """The tests labelled `deep`, where these arguments of ctest leave them out."""
    if not any(extra[i:i + 2] == ["--label-exclude", "^deep$"] for i in range(len(extra))):
        return []
    labels = {test["name"]: [label for p in test.get("properties", []) if p["name"] == "LABELS" for label in p["value"]]
              for test in tests}
    return sorted(name for name, own in labels.items() if "deep" in own)


def suites_of(folder: str, tests: list[dict]) -> dict[str, str]:
    """The suite of every test: the folder that declares it, without `tests/`."""
    top, suites = pathlib.Path(folder).resolve(), {}
    for test in tests:
        where = [p["value"] for p in test.get("properties", []) if p["name"] == "WORKING_DIRECTORY"]
        path = pathlib.Path(where[0] if where else top)
        inside = path.relative_to(top) if path.is_relative_to(top) else path
        suites[test["name"]] = inside.as_posix().removeprefix("tests/")
    return suites


def read_junit(path: pathlib.Path, suites: dict[str, str]) -> list[Result]:
    results = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        listed = case.get("name", "?")  # GoogleTest adds what a parameter is, which is bytes where it has no name
        name = listed.split("  # GetParam()")[0]
        output = case.findtext("system-out") or ""
        where = {"suite": suites.get(listed, "?"), "seconds": float(case.get("time") or 0)}
        skipped = case.find("skipped")
        if case.get("status") == "run" and case.find("failure") is None and skipped is None:
            results.append(Result(name, "passed", **where))
        elif skipped is not None and skipped.get("message", "").startswith("SKIP"):
            results.append(Result(name, "skipped", skip_reason(output), **where))
        elif case.get("status") == "disabled":
            results.append(Result(name, "skipped", "disabled", **where))
        else:  # failed, timed out, or its program is not there
            node = case.find("failure") if skipped is None else skipped
            reason = "" if node is None else node.get("message", "")
            results.append(Result(name, "failed", reason, output, **where))
    return results


def run_ctest(build: str, jobs: int, extra: list[str]) -> list[Result]:
    folder, _, label = build.partition(":")
    if label:
        extra = ["--label-regex", f"^{label}$", *extra]
    with tempfile.TemporaryDirectory() as scratch:
        junit = pathlib.Path(scratch, "junit.xml")
        command = ["ctest", "--test-dir", folder, "--no-tests=ignore", "--output-junit", str(junit)]
        command += ["--parallel", str(jobs), "--progress" if sys.stdout.isatty() else "--quiet", *extra]
        tests = listed_tests(folder)
        suites = suites_of(folder, tests)
        start = time.monotonic()
        # Tests run side by side: threads of one that spin while they wait would take the other's processor.
        code = subprocess.run(command, check=False, env={"OMP_WAIT_POLICY": "passive", **os.environ}).returncode
        results = read_junit(junit, suites) if junit.is_file() else []
    for result in results:
        if result.outcome == "failed":
            print(f"--- {result.name}\n{result.output}")
    print(f"{folder}: {len(results)} tests in {time.monotonic() - start:.0f} s", flush=True)
    if deep := left_out(tests, extra):
        names = ", ".join(deep)
        print(f"{folder}: {len(deep)} tests that only add depth are left out; make test-deep runs them: {names}")
    if code and not any(result.outcome == "failed" for result in results):
        results.append(Result(f"ctest in {folder}", "failed", f"exit status {code}"))
    return results


def times(results: list[Result]) -> list[str]:
    """A line per suite; its seconds are the sum over its tests, several of which run at once."""
    suites = collections.defaultdict(list)
    for result in results:
        if result.suite:
            suites[result.suite].append(result)
    lines = [f"{'suite':14} {'tests':>5} {'seconds':>8}  longest test"]
    for name, tests in sorted(suites.items(), key=lambda suite: -sum(r.seconds for r in suite[1])):
        longest = max(tests, key=lambda r: r.seconds)
        seconds = sum(r.seconds for r in tests)
        lines.append(f"{name:14} {len(tests):5d} {seconds:8.1f}  {longest.seconds:.1f} s {longest.name}")
    return lines


def summary(results: list[Result]) -> str:
    counts = [sum(r.outcome == outcome for r in results) for outcome in ("passed", "failed", "skipped")]
    return "{} passed, {} failed, {} skipped".format(*counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", nargs="+", help="build folder, or FOLDER:LABEL for its tests of one label")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--skipped", action="append", default=[], metavar="NAME=REASON")
    parser.add_argument("--ctest", action="append", default=[], metavar="ARGUMENT",
                        help="passed on to ctest, e.g. --ctest=--label-regex --ctest=threads")
    arguments = parser.parse_args()

    results = []
    for folder in arguments.build:
        results += run_ctest(folder, arguments.jobs, arguments.ctest)
    for entry in arguments.skipped:
        name, _, reason = entry.partition("=")
        results.append(Result(name, "skipped", reason))

    print()
    print("\n".join(times(results)))
    print()
    for outcome in ("skipped", "failed"):
        for result in results:
            if result.outcome == outcome:
                print(f"{outcome}: {result.name}" + (f" ({result.reason})" if result.reason else ""))
    if not any(result.outcome == "passed" for result in results):
        results.append(Result("no test passed", "failed"))
        print("failed: no test passed")
    print(summary(results))
    return 1 if any(result.outcome == "failed" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())

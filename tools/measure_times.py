#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where the time of `make run`, `make test`, `.ci/run` goes, from nothing: a clone, no cache of the compiler or of pip.

Prints the table of CONTRIBUTING.md; `--write` puts it there. Packages of the system are not removed: where they are
missing, as in a new container, their installation counts. Seconds of a part of the build are those of its steps, and
seconds of a suite those of its tests; two of them run at once on two processors. `--verbs run,test,ci` measures
`.ci/run` as well, tier by tier.
"""

import argparse
import collections
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- made by tools/measure_times.py -->", "<!-- end -->"


CI = "ci"  # among the verbs: .ci/run


@dataclass
class Measured:
    verb: str
    status: int
    wall: float
    cpu: float
    setup: list[tuple[str, float]] = field(default_factory=list)
    build: dict[str, float] = field(default_factory=dict)
    suites: list[tuple[str, int, float, str]] = field(default_factory=list)
    tiers: list[tuple[str, float]] = field(default_factory=list)

    def command(self) -> str:
        return ".ci/run" if self.verb == CI else f"make {self.verb}"


def part_of(output: str) -> str:
    """The part of the build that a file belongs to: the folder of its sources."""
    if match := re.match(r"(.*?)/?CMakeFiles/([^/]+)\.dir/", output):
        return f"{match[1]}: {match[2]}" if match[1] == "src" else match[1]
    return "linking"


def build_parts(ninja_log: str) -> dict[str, float]:
    steps = {}  # the last time that a file was made counts
    for line in ninja_log.splitlines()[1:]:
        begin, end, _, output, _ = line.split("\t")
        steps[output] = (int(end) - int(begin)) / 1000
    parts = collections.Counter()
    for output, seconds in steps.items():
        parts[part_of(output)] += seconds
    return dict(parts.most_common())


def setup_parts(text: str) -> list[tuple[str, float]]:
    parts = collections.Counter()  # of what was set up twice the sum
    for what, seconds in re.findall(r"^bootstrap: (.*) took (\d+) s$", text, re.M):
        parts[what] += float(seconds)
    return list(parts.items())


def suites(text: str) -> list[tuple[str, int, float, str]]:
    rows = re.findall(r"^(\S+) +(\d+) +(\d+\.\d)  (\d+\.\d s .*)$", text, re.M)
    return [(name, int(tests), float(seconds), longest) for name, tests, seconds, longest in rows]


def tiers(text: str) -> list[tuple[str, float]]:
    """Those of .ci/run, whose table stands at its end."""
    return [(name, float(seconds)) for name, seconds in re.findall(r"^(\w+) +(\d+) s  (?:ok|FAILED)$", text, re.M)]


def measure(verb: str, folder: pathlib.Path) -> Measured:
    clone = folder / verb / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    environment = {**os.environ, "CCACHE_DIR": str(folder / verb / "ccache"), "PIP_NO_CACHE_DIR": "1"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [".ci/run"] if verb == CI else ["make", verb]
    done = subprocess.run(command, cwd=clone, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=False)
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        print(done.stdout[-5000:], file=sys.stderr)
    log = clone / "build" / ".ninja_log"
    return Measured(verb, done.returncode, wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
                    setup_parts(done.stdout), build_parts(log.read_text()) if log.is_file() else {},
                    suites(done.stdout), tiers(done.stdout))


def machine() -> str:
    text = pathlib.Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.*)$", text, re.M)
    return f"{os.cpu_count()} processors ({model[1] if model else 'unknown'})"


def table(results: list[Measured]) -> str:
    lines = [f"On {machine()}; from nothing:", "", "| | seconds | processor seconds |", "|---|--:|--:|"]
    for r in results:
        lines.append(f"| **`{r.command()}`** | {r.wall:.0f} | {r.cpu:.0f} |")
        lines += [f"| its tier {name} | {seconds:.0f} | |" for name, seconds in r.tiers]
    last = [r for r in results if r.verb != CI or len(results) == 1][-1]  # its parts are those of several builds
    lines += [f"| set-up: {what} | {seconds:.0f} | |" for what, seconds in last.setup]
    lines += [f"| compiling {part} | | {seconds:.0f} |" for part, seconds in last.build.items() if seconds >= 1]
    lines += [f"| testing {name} ({tests}; longest: {longest}) | | {seconds:.0f} |"
              for name, tests, seconds, longest in last.suites if seconds >= 1]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verbs", default="run,test",
                        help="which are measured, of run, test, ci; the parts are those of the last one but ci")
    parser.add_argument("--write", action="store_true", help="into CONTRIBUTING.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = [measure(verb, pathlib.Path(folder)) for verb in arguments.verbs.split(",")]
    text = table(results)
    print(text)
    if arguments.write:
        page = ROOT / "CONTRIBUTING.md"
        head, rest = page.read_text(encoding="utf-8").split(BEGIN)
        page.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return max(r.status for r in results)


if __name__ == "__main__":
    sys.exit(main())

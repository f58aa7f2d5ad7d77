#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Finds the largest batch that each library's experts leave memory for: one sequence more until memory ends, or until
steps wait for an allocator that gives memory back and asks again.

    largest.py --gpus 2 --state largest.json --experts tessera,torch-grouped-mm --config 7B-n256 --layers 12 --text SRC

Every trial is a process of its own for each GPU (measure.py with one implementation), so that nothing is left of the
one before. The state file says what was tried; the same command goes on from there, and --seconds ends it between
trials. Other flags go to measure.py as they are.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent


def flags(name: str, sequences: int, rest: list[str], out: pathlib.Path) -> list[str]:
    """Of measure.py: a few steps show whether memory suffices, which does not depend on the routing."""
    return ["--experts", name, "--sequences", str(sequences), "--rounds", "2", "--warm-up", "3", "--most-loaded", "inf",
            "--regime", "R1", *rest, "--out", str(out)]


def trial(gpus: int, name: str, sequences: int, rest: list[str], folder: pathlib.Path) -> dict:
    """{"fits": whether, and measure.py's row or why not}; RuntimeError where something else went wrong."""
    out = folder / f"{name}-{sequences}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus),
               str(HERE / "measure.py"), *flags(name, sequences, rest, out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        row = json.loads(out.read_text(encoding="utf-8"))["rows"][0]
        return {"fits": row["allocator_retries"] == 0, "row": row}
    if "out of memory" in result.stdout + result.stderr:
        return {"fits": False}
    raise RuntimeError(f"{name} with {sequences} sequences ended with status {result.returncode}: "
                       + " | ".join((result.stdout + result.stderr).splitlines()[-12:]))


def save(path: pathlib.Path, state: dict) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def next_trial(tried: dict, first: int) -> int | None:
    """Sequences to try next: upwards from `first` while they fit, else downwards; None once the limit is known."""
    fits = [int(n) for n, result in tried.items() if result["fits"]]
    fails = [int(n) for n, result in tried.items() if not result["fits"]]
    if not tried:
        return first
    if not fits:
        return min(fails) - 1 if min(fails) > 1 else None
    return None if max(fits) + 1 in fails else max(fits) + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--state", type=pathlib.Path, required=True)
    parser.add_argument("--first", default="1", help="sequences to begin with: N, or NAME=N,NAME=N")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no trial starts that may end later")
    a, rest = parser.parse_known_args()
    names = a.experts.split(",")
    first = dict(part.split("=") for part in a.first.split(",")) if "=" in a.first else dict.fromkeys(names, a.first)
    state = json.loads(a.state.read_text(encoding="utf-8")) if a.state.exists() else {"flags": rest, "gpus": a.gpus,
                                                                                     "tried": {}}
    if (state["flags"], state["gpus"]) != (rest, a.gpus):
        parser.error(f"--state {a.state}: is of {state['gpus']} GPUs and {' '.join(state['flags'])}; name another file")
    start, longest = time.monotonic(), 0.0
    for name in names:
        tried = state["tried"].setdefault(name, {})
        while (sequences := next_trial(tried, int(first.get(name, "1")))) is not None:
            began = time.monotonic()
            if began - start + 1.2 * longest > a.seconds:
                print(f"ends here, as --seconds {a.seconds:.0f} would be over; the same command goes on", flush=True)
                return 0
            try:
                tried[str(sequences)] = trial(a.gpus, name, sequences, rest, a.state.parent)
            except RuntimeError as error:
                print(f"largest.py: {error}", file=sys.stderr)
                return 1
            save(a.state, state)
            longest = max(longest, time.monotonic() - began)
            row = tried[str(sequences)].get("row", {})
            outcome = "out of memory" if not row else (
                ("fits" if tried[str(sequences)]["fits"] else f"{row['allocator_retries']} retries of the allocator")
                + f", {row['ms']:.1f} ms, {row['tokens_per_s_per_gpu']} tokens/s per rank")
            print(f"{name} {sequences} sequences: {outcome}", flush=True)
        fits = [int(n) for n, result in tried.items() if result["fits"]]
        print(f"{name}: at most {max(fits)} sequences" if fits else f"{name}: not even one sequence fits", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

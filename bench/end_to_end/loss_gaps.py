#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Says how far the losses of several libraries are apart over seeds, from the state files of losses.py.

    loss_gaps.py losses-0.json losses-1.json --baseline torch-grouped-mm --limit 0.005 --out gaps.json

A run's loss is the mean of its last steps (--last). What is written has the differences in every tenth of the steps,
too. Runs of one seed saw the same weights and data, so that differences are taken seed by seed. `torch-grouped-mm#2`, a
copy of the baseline, says how far two runs of the same program come apart. Exit status 1 where the mean loss of a
library, over the seeds that both have, is more than --limit nats from the baseline's.
"""

import argparse
import json
import math
import pathlib
import statistics
import sys

import intervals

LAST = 50  # steps whose mean is a run's loss
PARTS = 10  # of a run, whose differences are written


def merged(states: list[dict]) -> dict:
    """Runs by "NAME SEED". ValueError where files are of other sizes, or have the same run."""
    runs = {}
    for state in states:
        if (state["pinned"], state["ranks"]) != (states[0]["pinned"], states[0]["ranks"]):
            raise ValueError("state files are of other sizes, steps or ranks; compare runs of one command")
        if twice := runs.keys() & state["runs"].keys():
            raise ValueError(f"{sorted(twice)[0]} is in two state files; name each run once")
        runs |= state["runs"]
    return runs


def gaps(runs: dict, names: list[str], seeds: list[str], baseline: str, last: int = LAST) -> dict:
    """By name, over the seeds that it shares with the baseline: its losses and their differences to the baseline's."""
    found = {}
    for name in names:
        done = [seed for seed in seeds if f"{name} {seed}" in runs and f"{baseline} {seed}" in runs]
        if not done:
            continue
        mine, others = ([statistics.fmean(runs[f"{one} {seed}"]["losses"][-last:]) for seed in done]
                        for one in (name, baseline))
        apart = [x - y for x, y in zip(mine, others, strict=True)]
        gap, half = intervals.mean_interval(apart)
        found[name] = {"seeds": done, "losses": mine, "loss": statistics.fmean(mine), "gaps": apart, "gap": gap,
                       "half_interval": half if half < math.inf else None, "p": intervals.p_value(apart),
                       "spread": statistics.stdev(mine) if len(done) > 1 else None,
                       "gaps_by_part": by_part([runs[f"{name} {seed}"]["losses"] for seed in done],
                                               [runs[f"{baseline} {seed}"]["losses"] for seed in done])}
        if all("held_out" in runs[f"{one} {seed}"] for one in (name, baseline) for seed in done):
            held_out = [held(runs[f"{name} {seed}"]) - held(runs[f"{baseline} {seed}"]) for seed in done]
            found[name] |= {"held_out_gaps": held_out, "held_out_gap": statistics.fmean(held_out)}
    return found


def by_part(mine: list[list[float]], others: list[list[float]]) -> list[float]:
    """The mean difference over seeds in each of PARTS parts of the steps; fewer where there are fewer steps."""
    steps = len(mine[0])
    cuts = sorted({steps * part // PARTS for part in range(PARTS + 1)})
    return [statistics.fmean(statistics.fmean(x[begin:end]) - statistics.fmean(y[begin:end])
                             for x, y in zip(mine, others, strict=True))
            for begin, end in zip(cuts, cuts[1:], strict=False)]


def held(run: dict) -> float:
    return run["held_out"][max(run["held_out"], key=int)]


def lines(found: dict, baseline: str, last: int = LAST) -> list[str]:
    said = []
    for name, it in found.items():
        spread = f", {min(it['losses']):.4f} to {max(it['losses']):.4f} over seeds" if len(it["seeds"]) > 1 else ""
        line = f"{name}: loss of the last {last} steps {it['loss']:.4f}{spread}"
        if name != baseline:
            sure = "" if it["half_interval"] is None else f" +- {it['half_interval']:.5f}, p {it['p']:.2f}"
            line += f"; minus {baseline}'s {it['gap']:+.5f}{sure} (" + " ".join(f"{x:+.5f}" for x in it["gaps"]) + ")"
            if "held_out_gap" in it:
                line += f", held out {it['held_out_gap']:+.5f}"
        said.append(line)
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("states", nargs="+", type=pathlib.Path)
    parser.add_argument("--baseline", default="torch-grouped-mm")
    parser.add_argument("--limit", type=float, default=0.005, help="nats")
    parser.add_argument("--last", type=int, default=LAST, help=f"steps whose mean is a run's loss ({LAST})")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    a = parser.parse_args()
    if a.last < 1:
        parser.error(f"--last {a.last}: must be at least 1")
    states = [json.loads(path.read_text(encoding="utf-8")) for path in a.states]
    try:
        runs = merged(states)
    except ValueError as error:
        parser.error(str(error))
    names = list(dict.fromkeys(key.rsplit(" ", 1)[0] for key in runs))
    seeds = sorted({key.rsplit(" ", 1)[1] for key in runs}, key=int)
    found = gaps(runs, names, seeds, a.baseline, a.last)
    if a.baseline not in found:
        parser.error(f"--baseline {a.baseline}: has no run; there are {', '.join(names)}")
    for line in lines(found, a.baseline, a.last):
        print(line)
    far = [name for name, it in found.items() if not abs(it["gap"]) <= a.limit]
    print(f"more than {a.limit} nats from {a.baseline}: {', '.join(far) or 'none'}")
    if a.out:
        a.out.write_text(json.dumps({"pinned": states[0]["pinned"], "ranks": states[0]["ranks"],
                                     "device": states[0]["device"], "baseline": a.baseline, "last": a.last,
                                     "gaps": found}, indent=1) + "\n", encoding="utf-8")
    return int(bool(far))


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Says whether token rounding changes what a model learns, from state files of train_variants.py.

    compare_variants.py quality-0.json quality-1.json --out table.json

Of each variant and seed the loss is the mean of the last three held-out losses, and the difference is to top-k with the
same seed. A variant is *worse* where the mean difference is above 0 and Holm's p, among all variants, below 0.05;
*harmless* where the 95 % interval lies within --harmless nats. The table counts only if a control is worse: exit status
1 says that none is, so that runs have to be longer.
"""

import argparse
import json
import pathlib
import statistics
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1] / "end_to_end"))

import intervals  # noqa: E402
import loss_gaps  # noqa: E402
import variants  # noqa: E402

JUDGED = 3  # held-out losses whose mean is a run's


def held_out(run: dict) -> float:
    last = sorted(run["held_out"], key=int)[-JUDGED:]
    return statistics.fmean(run["held_out"][step] for step in last)


def table(runs: dict, harmless: float) -> list[dict]:
    """A row for each variant, in the order of VARIANTS."""
    rows, p_values = [], {}
    for name in variants.VARIANTS:
        seeds = sorted((key.rsplit(" ", 1)[1] for key in runs if key.rsplit(" ", 1)[0] == name
                        and f"{variants.PLAIN} {key.rsplit(' ', 1)[1]}" in runs), key=int)
        if not seeds:
            continue
        found = [held_out(runs[f"{name} {seed}"]) for seed in seeds]
        row = {"variant": name, "control": name in variants.CONTROLS, "seeds": seeds, "losses": found,
               "loss": statistics.fmean(found), "sd": statistics.stdev(found) if len(found) > 1 else None,
               **{key: statistics.fmean(runs[f"{name} {seed}"]["rows"][key] for seed in seeds)
                  for key in ("added", "dropped")}}
        if name != variants.PLAIN:
            apart = [loss - held_out(runs[f"{variants.PLAIN} {seed}"])
                     for loss, seed in zip(found, seeds, strict=True)]
            mean, half = intervals.mean_interval(apart)
            p_values[name] = intervals.p_value(apart)
            row |= {"differences": apart, "difference": mean, "half_interval": half if len(apart) > 1 else None,
                    "harmless": abs(mean) + half <= harmless}
        rows.append(row)
    corrected = intervals.holm(p_values)
    for row in rows:
        if row["variant"] in corrected:
            row["p"] = corrected[row["variant"]]
            row["worse"] = row["difference"] > 0 and row["p"] < 0.05
    return rows


def counts(rows: list[dict]) -> bool:
    """Whether runs were long enough to see a control's harm."""
    return any(row["control"] and row["worse"] for row in rows)


def line(row: dict) -> str:
    text = (f"| {row['variant']}{' (control)' if row['control'] else ''} | {100 * row['added']:.1f} | "
            f"{100 * row['dropped']:.1f} | {' '.join(f'{loss:.4f}' for loss in row['losses'])} | {row['loss']:.4f} | ")
    if "difference" not in row:
        return text + "| | |"
    half = "" if row["half_interval"] is None else f" ± {row['half_interval']:.4f}"
    verdict = "worse" if row["worse"] else "harmless" if row["harmless"] else "open"
    return text + f"{row['difference']:+.4f}{half} | {row['p']:.3f} | {verdict} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("states", nargs="+", type=pathlib.Path)
    parser.add_argument("--harmless", type=float, default=0.01, help="nats")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    a = parser.parse_args()
    states = [json.loads(path.read_text(encoding="utf-8")) for path in a.states]
    try:
        runs = loss_gaps.merged(states)
    except ValueError as error:
        parser.error(str(error))
    rows = table(runs, a.harmless)
    if not rows or rows[0]["variant"] != variants.PLAIN:
        parser.error(f"{variants.PLAIN} has no run: nothing can be compared with it")
    print("| variant | rows added, % | dropped, % | held-out loss by seed | mean | minus top-k | p | |\n"
          "|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(line(row))
    print("a control is worse: the table counts" if counts(rows) else
          "no control is worse: the table does not count, train for longer")
    if a.out:
        a.out.write_text(json.dumps({"pinned": states[0]["pinned"], "device": states[0]["device"],
                                     "counts": counts(rows), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return int(not counts(rows))


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws results files as the picture of docs/performance.md (needs gnuplot).

    bench/draw_speed.py --out docs/pictures/speed.svg

Above: the layer's score on each configuration, forward and backward, where 1 is cuBLAS's batched GEMMs and aggregation
at copy speed; SonicMoE's time as a multiple of Tessera's. Below: forward + backward of the experts through Python and
forward over two GPUs, other implementations' times as multiples of Tessera's.
"""

import argparse
import json
import pathlib

import draw_over_gpus
from gnuplot import block, write

# Below bench/results.
LAYER = "current/h200/2026-11-30-layer-ten-configurations.json"  # of tessera bench --device cuda
SONICMOE = "archive/h200/2026-11-24-layer-sonicmoe.json"  # of bench/python/layer.py
EXPERTS = "archive/h200/2026-11-21-python-experts.json"  # of bench/python/grouped_mm.py on cuda
BOTH_PASSES = ("training", "forward+backward")  # its name in current and in archive
NAMES = {"torch-grouped-mm": "torch grouped\\\\_mm", "hf-grouped-mm": "transformers grouped\\\\_mm",
         "hf-eager": "transformers eager"}


def scores(document: dict) -> list[tuple[str, float, float]]:
    """(configuration, forward, backward) of the eager layer, in the file's order."""
    found: dict[str, dict[str, float]] = {}
    for row in document["rows"]:
        if row["impl"] == "tessera" and row["variant"] == "" and row["pass"] in ("forward", "backward"):
            score = (row["bound_ms"] + row["aggregate_floor_ms"]) / row["ms"]
            found.setdefault(row["config"], {})[row["pass"]] = score
    return [(config, both["forward"], both["backward"]) for config, both in found.items()]


def multiples(document: dict) -> tuple[list[str], list[list[float]]]:
    """Configurations, and for each implementation of NAMES its time over Tessera's on each of them."""
    times = {(row["config"], row["impl"]): row["ms"] for row in document["rows"] if row["pass"] in BOTH_PASSES}
    configs = list(dict.fromkeys(config for config, _ in times))
    return configs, [[times[c, impl] / times[c, "tessera"] for c in configs] for impl in NAMES]


def beside(document: dict, other: str) -> list[tuple[str, float, float]]:
    """(configuration, forward, backward): another implementation's time over Tessera's."""
    times = {(row["config"], row["pass"], row["impl"]): row["ms"] for row in document["rows"]}
    configs = dict.fromkeys(config for config, _, _ in times)
    return [(c, *(times[c, what, other] / times[c, what, "tessera"] for what in ("forward", "backward")))
            for c in configs]


def draw(layer: dict, sonicmoe: dict, experts: dict, results: pathlib.Path, picture: pathlib.Path):
    configs, values = multiples(experts)
    both = ("using 2:xtic(1) title columnheader(2) lc rgb '#1f77b4', "
            "'' using 3 title columnheader(3) lc rgb '#ff7f0e', 1 notitle with lines lc rgb '#444444' dt 2\n")
    data, panel = draw_over_gpus.panel(results, 2)
    script = (
        block("score", ["", "forward", "backward"], [list(row) for row in scores(layer)])
        + block("sonicmoe", ["", "forward", "backward"], [list(row) for row in beside(sonicmoe, "sonicmoe")])
        + block("times", ["", *NAMES.values()], [[c, *(v[i] for v in values)] for i, c in enumerate(configs)]) + data
        + "set multiplot layout 2,2\nset xtics rotate by 30 right\nset key top left horizontal\n"
        "set title 'Layer on one H200: share of the bound reached'\nset yrange [0:1.15]\n"
        "plot $score " + both
        + "set title 'The same layers in SonicMoE: time over Tessera''s'\nset yrange [0:1.4]\n"
        "plot $sonicmoe " + both
        + "set title 'Experts in Python, forward + backward: time over Tessera''s'\nset logscale y 2\n"
        "set yrange [1:64]\nset xtics norotate center\nset key top left vertical\n"
        "plot for [i=2:4] $times using i:xtic(1) title columnheader(i)\nunset logscale\n"
        + panel + "unset multiplot\n")
    write(script, picture, 1100, 800)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=draw_over_gpus.RESULTS, help="the folder bench/results")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    layer, sonicmoe, experts = (json.loads((options.results / file).read_text()) for file in (LAYER, SONICMOE, EXPERTS))
    draw(layer, sonicmoe, experts, options.results, options.out)


if __name__ == "__main__":
    main()

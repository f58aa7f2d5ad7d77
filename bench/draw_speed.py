#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws results files as the picture of docs/performance.md (needs gnuplot).

    bench/draw_speed.py --layer LAYER.json --experts EXPERTS.json --out docs/pictures/speed.svg

Left: the layer's score on each configuration, forward and backward; 1 is cuBLAS's batched GEMMs and aggregation at copy
speed. Right: forward + backward of the experts through Python, as a multiple of Tessera's time.
"""

import argparse
import json
import pathlib
import subprocess

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
    times = {(row["config"], row["impl"]): row["ms"] for row in document["rows"] if row["pass"] == "forward+backward"}
    configs = list(dict.fromkeys(config for config, _ in times))
    return configs, [[times[c, impl] / times[c, "tessera"] for c in configs] for impl in NAMES]


def block(name: str, header: list[str], rows: list[list]) -> str:
    lines = [" ".join(f'"{field}"' if isinstance(field, str) else f"{field:.3f}" for field in row) for row in rows]
    return f"${name} << EOD\n" + " ".join(f'"{field}"' for field in header) + "\n" + "\n".join(lines) + "\nEOD\n"


def draw(layer: dict, experts: dict, picture: pathlib.Path):
    configs, values = multiples(experts)
    script = (
        block("score", ["", "forward", "backward"], [list(row) for row in scores(layer)])
        + block("times", ["", *NAMES.values()], [[c, *(v[i] for v in values)] for i, c in enumerate(configs)])
        + f"set terminal svg size 1100,400 background 'white' font 'sans,13'\nset output '{picture}'\n"
        "set multiplot layout 1,2\nset style data histograms\nset style fill solid 0.9 border 0\nset grid y\n"
        "set boxwidth 0.9\nset xtics rotate by 30 right\nset key top left horizontal\n"
        "set title 'Layer on one H200: share of the bound reached'\nset yrange [0:1.15]\n"
        "plot $score using 2:xtic(1) title columnheader(2) lc rgb '#1f77b4', "
        "'' using 3 title columnheader(3) lc rgb '#ff7f0e', 1 notitle with lines lc rgb '#444444' dt 2\n"
        "set title 'Experts in Python, forward + backward: time over Tessera''s'\nset logscale y 2\n"
        "set yrange [1:64]\nset xtics norotate center\nset key top left vertical\n"
        "plot for [i=2:4] $times using i:xtic(1) title columnheader(i)\nunset multiplot\n")
    subprocess.run(["gnuplot"], input=script, text=True, check=True)
    lines = picture.read_text().splitlines()
    picture.write_text("".join(line.rstrip() + "\n" for line in lines))  # gnuplot leaves blanks at ends


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", type=pathlib.Path, required=True, help="of tessera bench --device cuda")
    parser.add_argument("--experts", type=pathlib.Path, required=True, help="of bench/python/grouped_mm.py on cuda")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    draw(json.loads(options.layer.read_text()), json.loads(options.experts.read_text()), options.out)


if __name__ == "__main__":
    main()

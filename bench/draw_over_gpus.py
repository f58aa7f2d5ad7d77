#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws results of experts spread over GPUs as a picture of docs/performance.md (needs gnuplot).

    bench/draw_over_gpus.py --out docs/pictures/over-gpus.svg

Forward over two GPUs and over four, and below it a training step: the time of other ways to do the same work, as a
multiple of Tessera's in the same results file, 8192 tokens per GPU. An eager torch layer around NCCL
and grouped_mm, and LigerCute, are beside Tessera's call from Python with an x of the caller's, and of calls behind the
stream where a file has others, as in the tables.
"""

import argparse
import json
import pathlib

from gnuplot import block, write

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
TOKENS = 8192
CONFIGS = ("Qwen3-30B", "FlashDMoE-swiglu", "FlashDMoE", "DSv3")
GEMMS, UNFUSED, LIGER_CUTE = "its GEMMs alone", "unfused kernels", "LigerCute"
NCCL = "eager torch: NCCL, grouped\\\\_mm"
GPUS = (2, 4)
WAYS = (GEMMS, UNFUSED, LIGER_CUTE, NCCL)
# The files that have both a way and Tessera's pass, below bench/results.
BESIDE = {2: "archive/h200x2/2026-11-26-beside.json", 4: "archive/h200x4/2026-11-26-beside.json"}
FILES = {GEMMS: BESIDE, UNFUSED: BESIDE,
         LIGER_CUTE: {2: "archive/h200x2/2026-11-26-python-expert-parallel-liger-cute.json",
                      4: "archive/h200x4/2026-11-26-python-expert-parallel-liger-cute.json"},
         NCCL: {2: "archive/h200x2/2026-11-26-python-expert-parallel.json",
                4: "archive/h200x4/2026-11-26-python-expert-parallel.json"}}
# Of a training step: implementation as results name it.
TRAINING = {"cuBLAS, its six GEMMs alone": "cublas-bmm", "Tessera, h made again": "tessera-save-x",
            NCCL: "nccl-grouped-mm"}
TRAINING_FILES = {2: ("archive/h200x2/2026-11-30-training.json", "archive/h200x2/2026-11-30-training-dsv3.json"),
                  4: ("archive/h200x4/2026-11-27-training.json", "archive/h200x4/2026-11-27-training-dsv3.json")}
OURS = "Tessera"
OUR_VARIANTS = ("fused", "torch")


def way_of(row: dict) -> str:
    """One of WAYS, OURS, or "" for what is not drawn."""
    implementation, variant = row["impl"], row.get("variant", "")
    if row["pass"] == "gemms":
        return GEMMS if implementation == "tessera" else ""
    if not row["pass"].startswith("forward") or row.get("behind", "stream") != "stream":
        return ""
    if implementation.startswith("liger-cute"):
        return LIGER_CUTE
    if implementation == "nccl-grouped-mm":
        return NCCL
    if variant in ("unfused", "unfused-chain"):  # its name in current and in archive
        return UNFUSED
    return OURS if implementation == "tessera" and variant in OUR_VARIANTS else ""


def multiple(results: pathlib.Path, gpus: int, way: str, config: str) -> float:
    """Time of a way over Tessera's, NaN where it was not run."""
    document = json.loads((results / FILES[way][gpus]).read_text())
    times: dict[str, list[float]] = {}
    for row in document["rows"]:
        if row["config"] == config and row["shape"][0] == TOKENS:
            times.setdefault(way_of(row), []).append(row["ms"])
    return min(times[way]) / min(times[OURS]) if way in times and OURS in times else float("nan")


def multiples(results: pathlib.Path, gpus: int) -> list[list]:
    return [[config, *(multiple(results, gpus, way, config) for way in WAYS)] for config in CONFIGS]


def panel(results: pathlib.Path, gpus: int) -> tuple[str, str]:
    """gnuplot's data and commands."""
    return (block(f"gpus{gpus}", ["", *WAYS], multiples(results, gpus)),
            f"set title 'Forward over {gpus} H200: time over Tessera''s'\nset yrange [0:8.5]\n"
            "set xtics rotate by 20 right\nset key top right vertical\n"
            f"plot for [i=2:{len(WAYS) + 1}] $gpus{gpus} using i:xtic(1) title columnheader(i), "
            "1 notitle with lines lc rgb '#444444' dt 2\n")


def training_multiples(results: pathlib.Path, gpus: int) -> list[list]:
    times: dict[tuple, list[float]] = {}
    for file in TRAINING_FILES[gpus]:
        for row in json.loads((results / file).read_text())["rows"]:
            if row["shape"][0] == TOKENS:
                times.setdefault((row["config"], row["impl"]), []).append(row["ms"])
    return [[config, *(min(times[config, way]) / min(times[config, "tessera"]) for way in TRAINING.values())]
            for config in CONFIGS]


def training_panel(results: pathlib.Path, gpus: int) -> tuple[str, str]:
    return (block(f"training{gpus}", ["", *TRAINING], training_multiples(results, gpus)),
            f"set title 'Forward and backward over {gpus} H200: time over Tessera''s'\nset yrange [0:5.5]\n"
            f"plot for [i=2:{len(TRAINING) + 1}] $training{gpus} using i:xtic(1) title columnheader(i), "
            "1 notitle with lines lc rgb '#444444' dt 2\n")


def draw(results: pathlib.Path, picture: pathlib.Path):
    panels = [one(results, gpus) for one in (panel, training_panel) for gpus in GPUS]
    write("".join(data for data, _ in panels) + "set multiplot layout 2,2\n" + "".join(plot for _, plot in panels)
          + "unset multiplot\n", picture, 1000, 800)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="the folder bench/results")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    draw(options.results, options.out)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Predicts step time, tokens per second and memory of bench/end_to_end/train.py for any number of GPUs.

    predict.py --config 7B-n256 --hosts 8 --gpus 8 --sequences 6
    predict.py --validation --out predictions.json       every point that measure.py is to be held against
    predict.py --against rows.json                       measured over predicted time of every row

Formulas, rates and where they are from are those of `tessera plan --cluster` (cli/cluster.hpp, cli/cluster_rates.cpp):
this program asks it for configurations by name. It is TESSERA_PROGRAM, or build/bin/tessera, or the one on PATH.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys

import model as models

GIB = 2**30
GPUS = ("h200", "h100")
RATES = ("before-runs", "first-run", "balanced-run")
CONFIGURATIONS = ("7B-n256", "Qwen3-30B")  # those with measured experts
BUILT = pathlib.Path(__file__).parents[2] / "build" / "bin" / "tessera"
NO_EXPERTS = "no-experts"  # not among all: it is asked for by name
# Terms of a step that only some points have.
OPTIONAL_TERMS = ("router", "exchange")


def program() -> str:
    found = os.environ.get("TESSERA_PROGRAM") or (str(BUILT) if BUILT.exists() else shutil.which("tessera"))
    if found is None:
        raise FileNotFoundError(f"the program tessera is neither {BUILT} nor on PATH: build its target tessera_cli, or "
                                "set TESSERA_PROGRAM")
    return found


@functools.cache
def plan(config: str, layers: int, hosts: int, gpus: int, sequences: int, recompute: bool, gpu: str,
         rates: str, keep_gathered: bool, impl: str = "") -> dict:
    """Predictions of all implementations by name, or of one, as `tessera plan --cluster` has them."""
    c = models.CONFIGURATIONS[config]
    sizes = {"hidden": c.hidden, "intermediate": c.intermediate, "experts": c.experts, "top-k": c.top_k,
             "layers": layers, "heads": c.heads, "kv-heads": c.kv_heads, "head-size": c.head_size,
             "vocabulary": c.vocabulary, "context": c.context, "sequences": sequences, "gpu": gpu, "rates": rates,
             "cluster": f"{hosts}x{gpus}", "sharding": "hsdp"}
    command = [program(), "plan", "--json", *(f"--{name}={value}" for name, value in sizes.items())]
    command += ["--tied"] * c.tied + ["--recompute"] * recompute + ["--keep-gathered"] * keep_gathered
    command += [f"--impl={impl}"] if impl else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: the batch does not fit
        raise ValueError(done.stderr.strip())
    return {p["impl"]: p for p in json.loads(done.stdout)["predictions"]}


@dataclasses.dataclass(frozen=True)
class Point:
    config: str
    layers: int
    hosts: int
    gpus: int  # of a host
    sequences: int  # of a GPU
    recompute: bool
    experts: str
    gpu: str
    rates: str = RATES[-1]
    keep_gathered: bool = False

    def plans(self) -> dict:
        place = (self.config, self.layers, self.hosts, self.gpus, self.sequences, self.recompute, self.gpu, self.rates,
                 self.keep_gathered)
        return plan(*place, NO_EXPERTS) if self.experts == NO_EXPERTS else plan(*place)

    def predict(self) -> dict:
        """Milliseconds, tokens/s of a GPU and bytes at the peak; `terms` are the parts of it."""
        p = self.plans()[self.experts]
        terms = {k: round(v, 2) for k, v in p["terms_ms"].items() if v or k not in OPTIONAL_TERMS}
        known = {k: v for k, v in dataclasses.asdict(self).items() if k not in ("rates", "keep_gathered")}
        return {**known, "ms": round(p["ms"], 1), "tokens_per_s_per_gpu": round(p["tokens_per_s_per_gpu"]),
                "tokens_per_day": round(p["tokens_per_day"]), "peak_bytes": round(p["peak_bytes"]),
                "fits": p["fits"], "terms_ms": terms}


def validation(rates: str = RATES[-1]):
    """{1, 2, 4 GPUs} x {12, 44 layers} x {2, 4, 6 sequences} x {R0, R2} of 7B-n256 for Tessera and torch-grouped-mm,
    and every implementation on two GPUs without recomputation, on both kinds of GPU; those that fit."""
    for gpu in GPUS:
        for gpus in (1, 2, 4):
            for layers in (12, 44):
                for sequences in (2, 4, 6):
                    for recompute in (False, True):
                        few = gpus != 2 or layers != 12 or recompute
                        place = ("7B-n256", layers, 1, gpus, sequences, recompute)
                        for name in Point(*place, "", gpu, rates).plans():
                            if few and name not in ("tessera", "tessera-layer", "torch-grouped-mm"):
                                continue
                            point = Point(*place, name, gpu, rates).predict()
                            if point["fits"]:
                                yield point


def against(document: dict, rates: str = RATES[-1]) -> list[tuple[str, float]]:
    """Measured over predicted time of every row of a results file that has a prediction."""
    gpu = next((name for name in GPUS if name in document["device"].lower()), None)
    if gpu is None:
        raise ValueError(f"device {document['device']}: has no constants; known are {', '.join(GPUS)}")
    found = []
    for row in document["rows"]:
        if row["config"] not in CONFIGURATIONS:
            continue
        point = Point(row["config"], row["layers"], 1, row["gpus"], row["sequences"], row["recompute"], row["impl"],
                      gpu, rates, row.get("keep_gathered", False))
        if row["impl"] in point.plans():
            found.append((f"{row['config']}, {row['layers']} layers, {row['gpus']} GPUs, {row['sequences']} sequences, "
                          f"{row['regime']}, {row['impl']}", row["ms"] / point.predict()["ms"]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="7B-n256", choices=CONFIGURATIONS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hosts", type=int, default=1, help="state is sharded within each")
    parser.add_argument("--gpus", type=int, default=2, help="of a host")
    parser.add_argument("--sequences", type=int, default=6, help="of a GPU")
    parser.add_argument("--gpu", default="h200", choices=GPUS)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--rates", default=RATES[-1], choices=RATES, help="before-runs: those of predictions.json")
    parser.add_argument("--validation", action="store_true", help="all points of the validation, on both kinds of GPU")
    parser.add_argument("--against", type=pathlib.Path, help="results of measure.py: exit status 1 where one is more "
                        "than a tenth off")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    a = parser.parse_args()
    if a.against:
        ratios = against(json.loads(a.against.read_text(encoding="utf-8")), a.rates)
        for point, ratio in ratios:
            print(f"{point}: {ratio:.3f} of the predicted time{'' if abs(ratio - 1) <= 0.1 else ', a MISS'}")
        return int(any(abs(ratio - 1) > 0.1 for _, ratio in ratios))
    for name in ("layers", "hosts", "gpus", "sequences"):
        if (value := getattr(a, name)) is not None and value < 1:
            parser.error(f"--{name} {value}: must be at least 1")
    layers = a.layers or models.CONFIGURATIONS[a.config].layers
    place = (a.config, layers, a.hosts, a.gpus, a.sequences, a.recompute)
    points = list(validation(a.rates)) if a.validation else [
        Point(*place, name, a.gpu, a.rates).predict() for name in Point(*place, "", a.gpu, a.rates).plans()]
    for p in points:
        print(f"{p['config']} {p['layers']} layers, {p['hosts']} x {p['gpus']} {p['gpu']}, {p['sequences']} sequences"
              f"{', recomputed' if p['recompute'] else ''}, {p['experts']}: {p['ms']:.1f} ms, "
              f"{p['tokens_per_s_per_gpu']} tokens/s per GPU, {p['peak_bytes'] / GIB:.1f} GiB"
              f"{'' if p['fits'] else ', does not fit'}")
    if a.out:
        lines = ",\n".join(json.dumps(p) for p in points)
        command = json.dumps("bench/end_to_end/predict.py " + " ".join(sys.argv[1:]))
        a.out.write_text(f'{{"command": {command}, "rates": "{a.rates}", "points": [\n{lines}\n]}}\n', encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

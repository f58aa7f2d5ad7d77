#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Predicts step time, tokens per second and memory of bench/end_to_end/train.py for any number of GPUs.

    predict.py --config 7B-n256 --hosts 8 --gpus 8 --sequences 6
    predict.py --validation --out predictions.json       every point that measure.py is to be held against
    predict.py --against rows.json                       measured over predicted time of every row

    step = slowdown * (L * (max(forward, gather) + max(backward, gather + reduce)) + head + optimizer + ends)

gather and reduce are FSDP's, of one layer; `ends` are those that nothing covers. Constants name where they come from;
none is fitted to a step of this program.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

import model as models

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What one GPU does, FLOP/s and bytes/s."""

    memory: float  # bytes that can be used
    dense: float  # projections, bf16
    attention: float  # causal flash attention forward and backward, masked half not counted
    head: float  # the head with its loss
    bandwidth: float  # of elementwise passes, bytes read and written
    link: float  # NCCL, bytes/s of one rank's share over NVLink, without multicast
    network: float  # bytes/s of a GPU between hosts


# H200: dense and attention are what cuBLAS and flash attention 2 reached there in other programs, link is NCCL's
# all-reduce bus bandwidth on two and four GPUs (329 and 355 GB/s), network is 400 Gb/s less a tenth: nothing here.
GPUS = {"h200": Gpu(139 * GIB, 650e12, 390e12, 650e12, 3.4e12, 340e9, 45e9),
        "h100": Gpu(78 * GIB, 630e12, 380e12, 630e12, 2.4e12, 340e9, 45e9)}
# Experts of a layer, forward and backward, ms on one H200 by configuration: (T, ms); straight lines through FIXED_MS.
# Measured: bench/results/archive/h200, 2026-11-24-layer-sonicmoe.json, 2026-11-21-python-experts.json and
# docs/performance.md;
# scattermoe, and hf-grouped-mm of 7B-n256, are inferred from its memory traffic beside torch-grouped-mm's.
EXPERTS_MS = {
    "7B-n256": {"tessera": (24576, 2.59), "sonicmoe": (24576, 2.96), "liger-triton": (24576, 5.35),
                "scattermoe": (24576, 6.51), "torch-grouped-mm": (24576, 9.55), "hf-grouped-mm": (24576, 12.8)},
    "Qwen3-30B": {"tessera": (32768, 11.35), "sonicmoe": (32768, 12.67), "torch-grouped-mm": (32768, 25.33),
                  "hf-grouped-mm": (32768, 34.04)},
}
FIXED_MS = 0.10  # of the experts of a layer whatever T: launches and the last wave
FORWARD_SHARE = 0.36  # of a layer's time, both passes together
SLOWDOWN = 1.03  # SMs that NCCL holds, and clocks of long runs
STRAGGLERS = (1.02, 1.06)  # over more than one host: a range, as nothing here measures it
ELEMENTWISE_ROWS = 40  # rows of d in bf16 that norms, rotary, residuals and their gradients read and write, per token
SAVED_BYTES = {  # per token for the experts of a layer; d, n, K
    "tessera": lambda d, n, k: 2 * d + 4 * k * n, "sonicmoe": lambda d, n, k: 2 * d + 4 * k * n,
    "liger-triton": lambda d, n, k: 2 * d + 4 * k * n, "scattermoe": lambda d, n, k: 2 * d + 2 * k * d + 8 * k * n,
    "torch-grouped-mm": lambda d, n, k: 2 * d + 6 * k * d + 8 * k * n,
    "hf-grouped-mm": lambda d, n, k: 2 * d + 6 * k * d + 8 * k * n}


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

    def predict(self) -> dict:
        """Milliseconds, tokens/s of a GPU and bytes at the peak; `terms` are the parts of it."""
        c = dataclasses.replace(models.CONFIGURATIONS[self.config], layers=self.layers)
        gpu, tokens, d = GPUS[self.gpu], self.sequences * c.context, c.hidden
        ranks, p = self.hosts * self.gpus, c.layer_parameters()
        projections = 6 * tokens * 2 * d * c.head_size * (c.heads + c.kv_heads) / gpu.dense
        attention = 3.5 * 2 * tokens * c.context * c.heads * c.head_size / gpu.attention
        elementwise = tokens * d * 2 * ELEMENTWISE_ROWS / gpu.bandwidth + p * 14 / gpu.bandwidth  # and sharding copies
        at, ms = EXPERTS_MS[self.config][self.experts]
        slower = GPUS["h200"].dense / gpu.dense
        experts = (FIXED_MS + (ms - FIXED_MS) * tokens / at) * 1e-3 * slower
        layer = projections + attention + elementwise + experts
        forward, backward = FORWARD_SHARE * layer, (1 - FORWARD_SHARE) * layer
        if self.recompute:
            backward += forward
        share = (self.gpus - 1) / self.gpus
        gather, reduce = 2 * p * share / gpu.link, 4 * p * share / gpu.link
        if self.hosts > 1:  # sharded within hosts, gradients reduced between them
            reduce += 4 * p / self.gpus * 2 * (self.hosts - 1) / self.hosts / gpu.network
        sharded = c.parameters() / self.gpus
        head = 6 * tokens * c.vocabulary * d / gpu.head + 4 * tokens * c.vocabulary * 2 / gpu.bandwidth
        optimizer = sharded * 36 / gpu.bandwidth  # AdamW reads and writes 28 bytes, clipping reads 8
        ends = gather + reduce
        layers = self.layers * (max(forward, gather) + max(backward, gather + reduce))
        step = SLOWDOWN * (layers + head + optimizer + ends)
        peak = self.memory(c, tokens, sharded)
        terms = {"experts": experts * self.layers, "attention": attention * self.layers,
                 "projections": projections * self.layers, "elementwise": elementwise * self.layers, "head": head,
                 "optimizer": optimizer, "gather of a layer": gather, "reduction of a layer": reduce}
        return {**dataclasses.asdict(self), "ms": round(step * 1e3, 1), "tokens_per_s_per_gpu": round(tokens / step),
                "tokens_per_day": round(tokens / step * ranks * 86400), "peak_bytes": round(peak),
                "fits": peak <= gpu.memory, "terms_ms": {k: round(v * 1e3, 2) for k, v in terms.items()}}

    def memory(self, c: models.Configuration, tokens: int, sharded: float) -> float:
        """Bytes at the peak: sharded state, what FSDP holds of two layers, saved tensors, the loss, CUDA and NCCL."""
        attention = 2 * (2 * c.hidden + c.head_size * (2 * c.heads + 2 * c.kv_heads) + c.head_size * c.heads) \
            + 4 * c.heads + 2 * c.hidden + 4 * c.experts * 2
        layer = attention + SAVED_BYTES[self.experts](c.hidden, c.intermediate, c.top_k)
        kept = self.layers * 2 * c.hidden + layer if self.recompute else self.layers * layer
        loss = 3 * models.LOSS_ROWS * c.vocabulary * 4 + 8 * c.vocabulary * c.hidden
        return 16 * sharded + 10 * c.layer_parameters() + tokens * kept + loss + 3 * GIB


def validation():
    """{1, 2, 4 GPUs} x {12, 44 layers} x {2, 4, 6 sequences} x {R0, R2} of 7B-n256 for Tessera and torch-grouped-mm,
    and every implementation on two GPUs without recomputation, on both kinds of GPU; those that fit."""
    for gpu in GPUS:
        for gpus in (1, 2, 4):
            for layers in (12, 44):
                for sequences in (2, 4, 6):
                    for recompute in (False, True):
                        few = gpus != 2 or layers != 12 or recompute
                        for name in ("tessera", "torch-grouped-mm") if few else EXPERTS_MS["7B-n256"]:
                            point = Point("7B-n256", layers, 1, gpus, sequences, recompute, name, gpu).predict()
                            if point["fits"]:
                                yield point


def against(document: dict) -> list[tuple[str, float]]:
    """Measured over predicted time of every row of a results file that has a prediction."""
    gpu = next((name for name in GPUS if name in document["device"].lower()), None)
    if gpu is None:
        raise ValueError(f"device {document['device']}: has no constants; known are {', '.join(GPUS)}")
    found = []
    for row in document["rows"]:
        if row["impl"] in EXPERTS_MS.get(row["config"], {}):
            point = Point(row["config"], row["layers"], 1, row["gpus"], row["sequences"], row["recompute"], row["impl"],
                          gpu)
            found.append((f"{row['config']}, {row['layers']} layers, {row['gpus']} GPUs, {row['sequences']} sequences, "
                          f"{row['regime']}, {row['impl']}", row["ms"] / point.predict()["ms"]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="7B-n256", choices=EXPERTS_MS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=2, help="of a host")
    parser.add_argument("--sequences", type=int, default=6, help="of a GPU")
    parser.add_argument("--gpu", default="h200", choices=GPUS)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--validation", action="store_true", help="all points of the validation, on both kinds of GPU")
    parser.add_argument("--against", type=pathlib.Path, help="results of measure.py: exit status 1 where one is more "
                        "than a tenth off")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    a = parser.parse_args()
    if a.against:
        ratios = against(json.loads(a.against.read_text(encoding="utf-8")))
        for point, ratio in ratios:
            print(f"{point}: {ratio:.3f} of the predicted time{'' if abs(ratio - 1) <= 0.1 else ', a MISS'}")
        return int(any(abs(ratio - 1) > 0.1 for _, ratio in ratios))
    for name in ("layers", "hosts", "gpus", "sequences"):
        if (value := getattr(a, name)) is not None and value < 1:
            parser.error(f"--{name} {value}: must be at least 1")
    layers = a.layers or models.CONFIGURATIONS[a.config].layers
    points = list(validation()) if a.validation else [
        Point(a.config, layers, a.hosts, a.gpus, a.sequences, a.recompute, name, a.gpu).predict()
        for name in EXPERTS_MS[a.config]]
    for p in points:
        more = "" if p["hosts"] == 1 else " (times {} to {} for stragglers: {:.0f} to {:.0f} B tokens a day)".format(
            *STRAGGLERS, *(p["tokens_per_day"] / s / 1e9 for s in reversed(STRAGGLERS)))
        print(f"{p['config']} {p['layers']} layers, {p['hosts']} x {p['gpus']} {p['gpu']}, {p['sequences']} sequences"
              f"{', recomputed' if p['recompute'] else ''}, {p['experts']}: {p['ms']:.1f} ms, "
              f"{p['tokens_per_s_per_gpu']} tokens/s per GPU, {p['peak_bytes'] / GIB:.1f} GiB"
              f"{'' if p['fits'] else ', does not fit'}{more}")
    if a.out:
        lines = ",\n".join(json.dumps(p) for p in points)
        command = json.dumps("bench/end_to_end/predict.py " + " ".join(sys.argv[1:]))
        a.out.write_text(f'{{"command": {command}, "points": [\n{lines}\n]}}\n', encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

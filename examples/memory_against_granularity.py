#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a layer keeps for backward while experts become finer at constant n*K: measured, not computed.

    examples/memory_against_granularity.py --out memory.svg

Counts the tensors that autograd holds after a forward call: for Tessera and for the usual torch code with grouped_mm.
Prints a table; draws it with gnuplot where --out is given. Parameters are not counted.
"""

import argparse
import pathlib
import subprocess
import tempfile

import tessera
import torch
from torch.nn import functional

TOKENS, HIDDEN, WIDTH = 1024, 256, 1024  # WIDTH = n*K


def kept_bytes(layer, parameters) -> int:
    """Bytes of distinct storages that autograd keeps, without parameters."""
    known = {p.untyped_storage().data_ptr() for p in parameters}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer()
    del output
    return sum(storages.values())


def grouped_mm_layer(x, w_router, w_up, w_down, top_k: int):
    """Sort, gather, two grouped products, weight, add: the way that is usual in torch."""
    scores, ids = (x @ w_router.mT).topk(top_k, dim=-1)
    scores = scores.softmax(-1)
    order = ids.flatten().argsort(stable=True)
    ends = torch.bincount(ids.flatten(), minlength=w_up.shape[0]).cumsum(0).int()
    h = functional.grouped_mm(x[order // top_k], w_up.mT, offs=ends)
    gate, up = h.chunk(2, dim=-1)
    y = functional.grouped_mm(functional.silu(gate) * up, w_down.mT, offs=ends)
    y = y * scores.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // top_k, y)


def measure(top_k: int) -> dict:
    torch.manual_seed(0)
    experts, n = 4 * top_k, WIDTH // top_k
    shapes = ((experts, HIDDEN), (experts, 2 * n, HIDDEN), (experts, HIDDEN, n))
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weights = [(torch.randn(*shape) / shape[-1]**0.5).requires_grad_() for shape in shapes]
    return {"top_k": top_k, "intermediate": n,
            "tessera": kept_bytes(lambda: tessera.moe(x, *weights, top_k=top_k), weights),
            "tessera, h recomputed": kept_bytes(lambda: tessera.moe(x, *weights, top_k=top_k, save="x"), weights),
            "torch grouped_mm": kept_bytes(lambda: grouped_mm_layer(x, *weights, top_k), weights)}


def draw(rows: list[dict], names: list[str], out: pathlib.Path) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".dat") as data:
        for row in rows:
            data.write(f"{row['top_k']} " + " ".join(f"{row[name] / 2**20:.3f}" for name in names) + "\n")
        data.flush()
        lines = ", ".join(f"'{data.name}' using 1:{i + 2} with linespoints linewidth 2 title '{name}'"
                          for i, name in enumerate(names))
        script = (f"set terminal svg size 720,440; set output '{out}'; set logscale x 2; set yrange [0:*]; set grid; "
                  f"set key top left; set xlabel 'experts per token K, at n*K = {WIDTH}'; "
                  f"set ylabel 'MiB kept for backward'; plot {lines}")
        subprocess.run(["gnuplot", "-e", script], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="an SVG file (needs gnuplot)")
    out = parser.parse_args().out
    rows = [measure(top_k) for top_k in (1, 2, 4, 8, 16)]
    names = list(rows[0])[2:]
    print(f"T={TOKENS} d={HIDDEN} fp32, MiB kept for backward")
    print("   K     n  " + "  ".join(names))
    for row in rows:
        print(f"{row['top_k']:4} {row['intermediate']:5}  "
              + "  ".join(f"{row[name] / 2**20:{len(name)}.2f}" for name in names))
    if out:
        draw(rows, names, out)
        print(f"drawn: {out}")


if __name__ == "__main__":
    main()

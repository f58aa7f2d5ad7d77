#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a layer saves for backward while experts become finer at constant n*K: measured, not computed.

    examples/memory_against_granularity.py --out memory.svg
    examples/memory_against_granularity.py --device cuda --out memory.svg

Counts the tensors that autograd holds after a forward call: for Tessera and for the usual torch code with grouped_mm.
Prints a table; draws it with gnuplot where --out is given. Parameters are not counted.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile

import tessera
import torch
import torch_experts

# T, d, n*K and the storage type: small and fp32 on the CPU, those of a 7B model's layers and bf16 on a GPU.
SIZES = {"cpu": (1024, 256, 1024, torch.float32), "cuda": (24576, 1536, 2048, torch.bfloat16)}


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


def measure(top_k: int, device: str = "cpu") -> dict:
    torch.manual_seed(0)
    tokens, hidden, width, dtype = SIZES[device]
    experts, n = 4 * top_k, width // top_k
    layer = torch_experts.TorchMoE(hidden, n, experts, top_k, experts_function=torch_experts.grouped_mm_experts,
                                   device=device, dtype=dtype)
    x = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    weights = list(layer.parameters())
    return {"top_k": top_k, "intermediate": n,
            "tessera": kept_bytes(lambda: tessera.moe(x, *weights, top_k=top_k), weights),
            "tessera, h recomputed": kept_bytes(lambda: tessera.moe(x, *weights, top_k=top_k, save="x"), weights),
            "torch grouped_mm": kept_bytes(lambda: layer(x), weights)}


def draw(rows: list[dict], names: list[str], width: int, out: pathlib.Path) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".dat") as data:
        for row in rows:
            data.write(f"{row['top_k']} " + " ".join(f"{row[name] / 2**20:.3f}" for name in names) + "\n")
        data.flush()
        lines = ", ".join(f"'{data.name}' using 1:{i + 2} with linespoints linewidth 2 title '{name}'"
                          for i, name in enumerate(names))
        script = (f"set terminal svg size 720,440; set output '{out}'; set logscale x 2; set yrange [0:*]; set grid; "
                  f"set key top left; set xlabel 'experts per token K, at n*K = {width}'; "
                  f"set ylabel 'MiB saved for backward'; plot {lines}")
        subprocess.run(["gnuplot", "-e", script], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=SIZES)
    parser.add_argument("--out", type=pathlib.Path, help="an SVG file (needs gnuplot)")
    parser.add_argument("--json", type=pathlib.Path, help="a file for the bytes of each")
    arguments = parser.parse_args()
    tokens, hidden, width, dtype = SIZES[arguments.device]
    rows = [measure(top_k, arguments.device) for top_k in (1, 2, 4, 8, 16)]
    names = list(rows[0])[2:]
    print(f"T={tokens} d={hidden} {dtype}, MiB saved for backward".replace("torch.", ""))
    print("   K     n  " + "  ".join(names))
    for row in rows:
        print(f"{row['top_k']:4} {row['intermediate']:5}  "
              + "  ".join(f"{row[name] / 2**20:{len(name)}.2f}" for name in names))
    if arguments.json:
        arguments.json.write_text(json.dumps({"tokens": tokens, "hidden": hidden, "rows": rows}, indent=1) + "\n")
    if arguments.out:
        draw(rows, names, width, arguments.out)
        print(f"drawn: {arguments.out}")


if __name__ == "__main__":
    main()

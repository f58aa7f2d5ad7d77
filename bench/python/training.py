#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the transformer of examples/train_transformer.py with Tessera's experts and with torch's own, one after the
other from equal weights on equal text: loss curves, tokens per second, the most memory in use.

usage: training.py --text FILE... [--device cuda] [--steps N] [--impl NAME,NAME] [--SIZE N] [--out FILE]
       torchrun --nproc-per-node 2 training.py ...     the same under FSDP2 (examples/train_fsdp.py)

Each implementation trains for a few steps first, which are not timed. `smoothed` is the mean of 20 losses.
"""

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import train_fsdp  # noqa: E402
import train_transformer  # noqa: E402

WINDOW, WARM_UP = 20, 5


def smoothed(losses: list[float]) -> list[float]:
    return [round(sum(losses[i:i + WINDOW]) / WINDOW, 4) for i in range(0, len(losses) - WINDOW + 1, WINDOW)]


def train(text: bytes, name: str, device: torch.device, steps: int, report, sizes: dict) -> dict:
    if dist.is_initialized():
        return train_fsdp.train(text, name, steps=steps, device=device, report=report, **sizes)
    return train_transformer.train(text, implementation=name, steps=steps, device=device, report=report, **sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", nargs="+", type=pathlib.Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--impl", default="tessera,eager,grouped_mm")
    parser.add_argument("--out", type=pathlib.Path)
    for name, default in train_transformer.SIZES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in train_transformer.SIZES}
    text = b"\n".join(path.read_bytes() for path in arguments.text)
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rows, names = [], arguments.impl.split(",")
    for name in names:
        train(text, name, device, WARM_UP, lambda _: None, sizes)
        result = train(text, name, device, arguments.steps, lambda _: None, sizes)
        rows.append({"impl": name, "gpus": ranks if device.type == "cuda" else 0, "ranks": ranks,
                     "tokens_per_second": round(result["tokens_per_second"]), "peak_bytes": result["peak_bytes"],
                     "bits_per_byte": result.get("after"), "last_loss": result["losses"][-1],
                     "smoothed": smoothed(result["losses"])})
    if ranks > 1:
        dist.destroy_process_group()
    if rank:
        return
    for row in rows:
        apart = max((abs(a - b) for a, b in zip(row["smoothed"], rows[0]["smoothed"], strict=True)), default=0)
        row["apart_from_first"] = round(apart, 4)
        peak = f"{row['peak_bytes'] / 2**20:.0f} MiB"
        print(f"{row['impl']}: {row['tokens_per_second']} tokens/s, {peak}, smoothed loss "
              f"{row['smoothed'][0]:.3f} to {row['smoothed'][-1]:.3f}, at most {apart:.4f} from {names[0]}'s")
    if arguments.out:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        arguments.out.write_text(json.dumps({
            "command": ("torchrun --nproc-per-node %d " % ranks if ranks > 1 else "")
                       + "bench/python/training.py " + " ".join(sys.argv[1:]),
            "commit": commit.stdout.strip(), "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "driver": f"torch {torch.__version__}", "sizes": sizes, "steps": arguments.steps, "text_bytes": len(text),
            "protocol": f"one implementation after the other, after {WARM_UP} steps; losses are means of {WINDOW}",
            "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

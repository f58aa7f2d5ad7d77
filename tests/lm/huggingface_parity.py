#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of `tessera train` in Hugging Face transformers: every tensor is used, and the held-out text
has the bits per byte that the run reported. Skipped (77) where torch or transformers are missing.

usage: huggingface_parity.py TESSERA_PROGRAM
"""

import json
import math
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    from transformers import AutoModelForCausalLM
except ImportError as missing:
    print(f"skipped: {missing}; tools/bootstrap.sh python installs it")
    sys.exit(77)

CONTEXT = 64
HELD_OUT_PERCENT = 8


def train(program: str, text: pathlib.Path, out: pathlib.Path) -> float:
    """Held-out bits per byte, as `tessera train` reports them."""
    command = [program, "train", "--text", text, "--out", out, "--steps", "60", "--hidden", "48",
               "--layers", "2", "--experts", "6", "--context", str(CONTEXT), "--lr", "0.005", "--json"]
    result = subprocess.run(command, check=True, capture_output=True)
    return json.loads(result.stdout)["held_out_bits_per_byte"]


def bits_per_byte(model: torch.nn.Module, held_out: bytes) -> float:
    """Over windows side by side: the last target of one is the first input of the next."""
    count = (len(held_out) - 1) // CONTEXT
    windows = torch.tensor([list(held_out[CONTEXT * i:CONTEXT * (i + 1) + 1]) for i in range(count)])
    with torch.no_grad():
        logits = model(windows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    return loss.item() / math.log(2)


def main() -> int:
    sources = sorted(pathlib.Path(__file__).parent.glob("*.cpp"))
    text = b"".join(source.read_bytes() for source in sources)
    with tempfile.TemporaryDirectory() as folder:
        path, out = pathlib.Path(folder) / "text", pathlib.Path(folder) / "run"
        path.write_bytes(text)
        ours = train(sys.argv[1], path, out)
        model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    unused = {what: names for what, names in report.items() if names}
    theirs = bits_per_byte(model, text[len(text) - len(text) * HELD_OUT_PERCENT // 100:])
    print(f"held-out bits per byte: {ours:.6f}, in transformers {theirs:.6f}")
    print(f"tensors not used or missing: {unused or 'none'}")
    return 0 if abs(ours - theirs) < 1e-4 and not unused else 1


if __name__ == "__main__":
    sys.exit(main())

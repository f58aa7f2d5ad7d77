#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Small random models of each Hugging Face family in bf16, Tessera's experts beside transformers' eager ones: relative
errors of loss, logits and gradients, seen from the same weights in fp32. The check is that of
tests/python/huggingface_test.py; on a GPU the sizes are those of cuda_huggingface_test.py, which the fast kernels
serve.

usage: families.py [--device cuda] [--out FILE]
"""

import argparse
import datetime
import json
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests" / "python"))

import cuda_huggingface_test  # noqa: E402
import huggingface_test  # noqa: E402
import tessera  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402


def row(family: str, device: str) -> dict:
    sizes = cuda_huggingface_test.CudaFamilies().sizes(family) if device != "cpu" else {}
    errors = huggingface_test.bf16_errors(family, device, **sizes)
    worst = max((name for name in errors if name not in ("loss", "logits")), key=lambda name: errors[name][0])
    named = {"loss": "loss", "logits": "logits", "worst_gradient": worst}
    return {"family": family, "sizes": {**huggingface_test.FAMILIES[family], **sizes}, "gradients": len(errors) - 2,
            "worst_gradient_of": worst, "checked": all(mine < allowed for mine, _, allowed in errors.values()),
            **{key: {"tessera": errors[name][0], "eager": errors[name][1]} for key, name in named.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    tessera.register_huggingface()
    rows = [row(family, arguments.device) for family in huggingface_test.FAMILIES]
    print(f"{'relative error, Tessera / eager':32}{'loss':>22}{'logits':>22}{'worst gradient':>22}")
    for r in rows:
        print(f"{r['family']:20}{'ok' if r['checked'] else 'FAILED':12}" + "".join(
            f"{r[key]['tessera']:12.2e} /{r[key]['eager']:8.1e}" for key in ("loss", "logits", "worst_gradient")))
    if arguments.out:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        on_gpu = arguments.device != "cpu"
        arguments.out.write_text(json.dumps({
            "command": "bench/python/families.py " + " ".join(sys.argv[1:]), "commit": commit.stdout.strip(),
            "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__,
            "transformers": transformers.__version__, "dtype": "bf16",
            "protocol": "errors in the norm over those of the same weights in fp32, 2 x 17 tokens", "rows": rows},
            indent=1) + "\n")
    return 0 if all(r["checked"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time per token of transformers' generate, one sequence, a random Qwen3-MoE: Tessera's experts beside transformers'
own, each step as it is and, with a static cache on a GPU, compiled by transformers into CUDA graphs.

usage: decode.py [--device cuda] [--impl NAME,NAME] [--new-tokens N] [--SIZE N] [--out FILE]

Checked first: logits of the prompt against the eager experts in fp32, the relative error in the norm.
"""

import argparse
import copy
import datetime
import json
import pathlib
import statistics
import subprocess
import sys
import time

import tessera
import torch
import transformers

SIZES = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
         "num_hidden_layers": 4}
PROMPT, REPEATS, TOLERANCE = 16, 5, 2e-2


def build(sizes: dict, device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **sizes, vocab_size=4096, intermediate_size=sizes["hidden_size"], num_attention_heads=16, num_key_value_heads=4,
        head_dim=64, norm_topk_prob=True, max_position_embeddings=1024, eos_token_id=None)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def milliseconds(model, ids, count: int, **options) -> float:
    def run() -> float:
        if ids.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        made = model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0,
                              **options)
        if ids.is_cuda:
            torch.cuda.synchronize()
        if made.shape[1] != ids.shape[1] + count:
            raise RuntimeError(f"generate made {made.shape[1] - ids.shape[1]} tokens of {count}")
        return 1e3 * (time.perf_counter() - start) / count

    for _ in range(2):  # compiles, records graphs
        run()
    return round(statistics.median(run() for _ in range(REPEATS)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--impl", default="tessera,grouped_mm,eager")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--out", type=pathlib.Path)
    for name, default in SIZES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in SIZES}
    tessera.register_huggingface()
    model = build(sizes, arguments.device)
    ids = torch.randint(4096, (1, PROMPT), generator=torch.Generator().manual_seed(1)).to(arguments.device)
    exact = copy.deepcopy(model).float()
    exact.set_experts_implementation("eager")
    rows = []
    with torch.no_grad():
        wanted = exact(input_ids=ids).logits
        del exact
        for name in arguments.impl.split(","):
            model.set_experts_implementation(name)
            error = ((model(input_ids=ids).logits.float() - wanted).norm() / wanted.norm()).item()
            graphs = ids.is_cuda and name != "eager"  # whose loop has no graph
            caches = ("dynamic", "static") if graphs else ("dynamic",)
            for cache in caches:
                torch._dynamo.reset()
                options = {} if cache == "dynamic" else {"cache_implementation": "static"}
                ms = milliseconds(model, ids, arguments.new_tokens, **options)
                rows.append({"impl": name, "cache": cache, "ms_per_token": ms, "error": error,
                             "checked": error < TOLERANCE})
                print(f"{name:12} {cache:8} {ms:8.3f} ms per token, error {error:.1e}", flush=True)
    if arguments.out:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        arguments.out.write_text(json.dumps({
            "command": "bench/python/decode.py " + " ".join(sys.argv[1:]), "commit": commit.stdout.strip(),
            "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name() if ids.is_cuda else "cpu", "torch": torch.__version__,
            "transformers": transformers.__version__, "dtype": "bf16", "sizes": sizes,
            "protocol": f"wall clock, median of {REPEATS} times {arguments.new_tokens} tokens, {PROMPT} in the prompt",
            "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

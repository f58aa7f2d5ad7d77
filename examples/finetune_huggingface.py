#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a Mixture-of-Experts model of Hugging Face's with Tessera's experts: one line is different.

    examples/finetune_huggingface.py --text README.md                      # a small random Qwen3-MoE
    examples/finetune_huggingface.py --text README.md --model MODEL        # a model by name or folder
    examples/finetune_huggingface.py --text README.md --device cuda        # in bf16

Runs the same steps with transformers' own experts too (--compare) and prints both losses and times.
"""

import argparse
import pathlib
import time

import tessera
import torch
import transformers

SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8,
         "num_experts_per_tok": 2, "norm_topk_prob": True, "max_position_embeddings": 256, "initializer_range": 0.1}


def load(name: str | None, implementation: str):
    """The model and a function from text to token ids."""
    if name is None:
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(**SMALL, experts_implementation=implementation)
        model = transformers.AutoModelForCausalLM.from_config(config)
        return model, lambda text: list(text.encode())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        name, experts_implementation=implementation)  # the line that is different
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    return model, lambda text: tokenizer(text)["input_ids"]


def finetune(text: str, *, name: str | None, implementation: str, steps: int, context: int = 64, batch: int = 4,
             device: str = "cpu", report=print) -> list[float]:
    model, encode = load(name, implementation)
    model.train().to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    ids = torch.tensor(encode(text))
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 if name is None else 1e-5)
    losses, start = [], None
    for step in range(1, steps + 1):
        starts = torch.randint(len(ids) - context, (batch,), generator=generator)
        windows = torch.stack([ids[first:first + context] for first in starts]).to(device)
        loss = model(input_ids=windows, labels=windows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        start = start or time.monotonic()  # the first step sets much up
        if step % max(steps // 5, 1) == 0:
            report(f"{implementation}: step {step}/{steps}  loss {losses[-1]:.4f}")
    report(f"{implementation}: {1000 * (time.monotonic() - start) / max(steps - 1, 1):.1f} ms per step after the first")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--model", help="name or folder; without it a small random Qwen3-MoE")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compare", action="store_true", help="run with transformers' own experts as well")
    arguments = parser.parse_args()
    tessera.register_huggingface()
    text = arguments.text.read_text(encoding="utf-8")
    for implementation in ("tessera", "grouped_mm") if arguments.compare else ("tessera",):
        finetune(text, name=arguments.model, implementation=implementation, steps=arguments.steps,
                 device=arguments.device)


if __name__ == "__main__":
    main()

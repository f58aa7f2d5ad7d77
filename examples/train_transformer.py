#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A transformer with Mixture-of-Experts layers, trained on text in about a hundred lines.

    examples/train_transformer.py --text README.md docs/numerics.md --steps 200

Bytes are tokens. Prints the loss, the bits per byte of held-out text, and how evenly the experts are used.
"""

import argparse
import math
import pathlib
import time

import tessera
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    def __init__(self, hidden: int, heads: int, options: dict):
        super().__init__()
        self.heads = heads
        self.norm, self.experts_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.experts = tessera.MoE(hidden, **options, balance_coefficient=0.01, z_coefficient=0.001)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y, router = self.experts(self.experts_norm(x), return_router=True)
        return x + y, router


class Transformer(nn.Module):
    def __init__(self, hidden: int, layers: int, heads: int, context: int, options: dict):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, hidden), nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, options) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, 256, bias=False)

    def forward(self, tokens, targets):
        """Cross entropy per byte, the auxiliary losses, and the rows of each expert [layers, E]."""
        x = self.embedding(tokens) + self.positions.weight[:tokens.shape[1]]
        auxiliary, counts = 0, []
        for block in self.blocks:
            x, router = block(x)
            auxiliary = auxiliary + block.experts.auxiliary_loss(router)
            counts.append(router.counts)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), auxiliary, torch.stack(counts)


def batches(data, context: int, batch: int, generator):
    """Random windows of the text and the same shifted by one."""
    while True:
        starts = torch.randint(len(data) - context - 1, (batch,), generator=generator)
        windows = torch.stack([data[start:start + context + 1] for start in starts]).long()
        yield windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def bits_per_byte(model, data, context: int) -> float:
    windows = data[:(len(data) - 1) // context * context + 1].long()
    tokens, targets = windows[:-1].view(-1, context), windows[1:].view(-1, context)
    losses = [model(t, y)[0] for t, y in zip(tokens.split(16), targets.split(16), strict=True)]
    weights = torch.tensor([float(len(t)) for t in tokens.split(16)])
    return (torch.stack(losses).cpu() * weights).sum().item() / weights.sum().item() / math.log(2)


def train(text: bytes, *, steps: int, hidden=96, layers=2, heads=4, context=64, batch=16, experts=8, top_k=2,
          intermediate=64, router="topk-softmax", device="cpu", report=print) -> dict:
    torch.manual_seed(0)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    held_out, data = data[:len(data) // 10], data[len(data) // 10:]
    options = {"intermediate": intermediate, "experts": experts, "top_k": top_k, "router": router}
    model = Transformer(hidden, layers, heads, context, options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    source = batches(data, context, batch, torch.Generator().manual_seed(0))
    before, start, losses = bits_per_byte(model, held_out, context), time.monotonic(), []
    for step in range(1, steps + 1):
        loss, auxiliary, counts = model(*next(source))
        optimizer.zero_grad()
        (loss + auxiliary).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % max(steps // 10, 1) == 0:
            share = counts.float().max(dim=1).values / counts.float().mean(dim=1)
            speed = step * batch * context / (time.monotonic() - start)
            report(f"step {step}/{steps}  loss {loss.item():.3f}  busiest expert {share.max():.2f} x mean  "
                   f"{speed:.0f} tokens/s")
    after = bits_per_byte(model, held_out, context)
    report(f"held-out bits per byte: {before:.3f} before, {after:.3f} after {steps} steps")
    return {"before": before, "after": after, "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", nargs="+", type=pathlib.Path, required=True, help="files to learn from")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--router", default="topk-softmax")
    arguments = parser.parse_args()
    text = b"\n".join(path.read_bytes() for path in arguments.text)
    train(text, steps=arguments.steps, router=arguments.router, device=arguments.device)


if __name__ == "__main__":
    main()

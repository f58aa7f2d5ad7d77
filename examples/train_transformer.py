#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A transformer with Mixture-of-Experts layers, trained on text in about a hundred lines.

    examples/train_transformer.py --text README.md docs/numerics.md --steps 200
    examples/train_transformer.py --text README.md docs/numerics.md --device cuda --implementation eager

Bytes are tokens. Prints the loss, the bits per byte of held-out text, how evenly the experts are used, tokens per
second without the first steps (on a GPU by events) and on a GPU, where layers compute in bf16, the most memory that was
in use. The learning rate rises for a tenth of the steps, falls to a tenth of its peak, and is lower for wider models.
--implementation runs the experts in torch's own operations instead (torch_experts.py), which gives the same losses.
"""

import argparse
import functools
import itertools
import math
import pathlib
import statistics
import time

import tessera
import torch
import torch_experts
from torch import nn
from torch.nn import functional

IMPLEMENTATIONS = {"tessera": tessera.MoE, "eager": torch_experts.TorchMoE, "grouped_mm":
                   functools.partial(torch_experts.TorchMoE, experts_function=torch_experts.grouped_mm_experts)}
SIZES = {"hidden": 96, "layers": 2, "heads": 4, "context": 64, "batch": 16, "experts": 8, "top_k": 2,
         "intermediate": 64}


class Block(nn.Module):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    def __init__(self, hidden: int, heads: int, moe, options: dict):
        super().__init__()
        self.heads = heads
        self.norm, self.experts_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.experts = moe(hidden, **options, losses=tessera.Losses(balance=0.01, z=0.001))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y, router = self.experts(self.experts_norm(x), return_router=True)
        return x + y, router


class Transformer(nn.Module):
    """moe: a class as tessera.MoE; options: its arguments after hidden."""

    def __init__(self, moe, hidden: int, layers: int, heads: int, context: int, **options):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, hidden), nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, moe, options) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, 256, bias=False)

    def forward(self, tokens, targets):
        """Cross entropy per byte, the auxiliary losses, and the rows of each expert [layers, E]."""
        x = self.embedding(tokens) + self.positions.weight[:tokens.shape[1]]
        auxiliary, counts = 0, []
        for block in self.blocks:
            x, router = block(x)
            auxiliary = auxiliary + block.experts.auxiliary_loss(router)
            counts.append(router.counts)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), auxiliary, torch.stack(counts)


def batches(data, context: int, batch: int, generator):
    """Random windows of the text and the same shifted by one."""
    while True:
        starts = torch.randint(len(data) - context - 1, (batch,), generator=generator)
        windows = torch.stack([data[start:start + context + 1] for start in starts]).long()
        yield windows[:, :-1], windows[:, 1:]


def learning_rate(step: int, steps: int, hidden: int) -> float:
    """Of step 1 to `steps`: up to its peak over a tenth of them, then down to a tenth of it along a cosine. The peak is
    3e-3 for models of up to 96 columns and falls as 1/hidden, 1.9e-4 at 1536: one rate for all would throw the wide
    ones off."""
    peak, rise = 3e-3 * min(1.0, 96 / hidden), max(steps // 10, 1)
    if step <= rise:
        return peak * step / rise
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - rise) / max(steps - rise, 1)))


def set_learning_rate(optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


class Pace:
    """Milliseconds of each training step: by events on a GPU, so that nothing waits, by the clock elsewhere."""

    def __init__(self, device: torch.device):
        self._on_gpu, self._marks = device.type == "cuda", []
        self.mark()

    def mark(self) -> None:
        """At the end of a step."""
        if self._on_gpu:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        if self._on_gpu:
            self._marks[-1].synchronize()
            return [start.elapsed_time(end) for start, end in itertools.pairwise(self._marks)]
        return [1e3 * (end - start) for start, end in itertools.pairwise(self._marks)]

    def tokens_per_second(self, tokens: int) -> float:
        """Of steps of so many tokens, by their median time. The first ten, or half of fewer than twenty, do not count:
        they load kernels and fill allocators."""
        steps = self.milliseconds()
        return 1e3 * tokens / statistics.median(steps[min(10, len(steps) // 2):])


@torch.no_grad()
def bits_per_byte(model, data, context: int) -> float:
    windows = data[:(len(data) - 1) // context * context + 1].long()
    tokens, targets = windows[:-1].view(-1, context), windows[1:].view(-1, context)
    losses = [model(t, y)[0] for t, y in zip(tokens.split(16), targets.split(16), strict=True)]
    weights = torch.tensor([float(len(t)) for t in tokens.split(16)])
    return (torch.stack(losses).cpu() * weights).sum().item() / weights.sum().item() / math.log(2)


def train(text: bytes, *, steps: int, router="topk-softmax", implementation="tessera", device="cpu", report=print,
          **changes) -> dict:
    """changes: of SIZES."""
    torch.manual_seed(0)
    sizes = SIZES | changes
    batch, context = sizes.pop("batch"), sizes["context"]
    on_gpu = torch.device(device).type == "cuda"
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    held_out, data = data[:len(data) // 10], data[len(data) // 10:]
    model = Transformer(IMPLEMENTATIONS[implementation], **sizes, router=router).to(device)
    compute = functools.partial(torch.autocast, "cuda" if on_gpu else "cpu", torch.bfloat16, enabled=on_gpu)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    source = batches(data, context, batch, torch.Generator().manual_seed(0))
    with compute():
        before = bits_per_byte(model, held_out, context)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    pace, losses = Pace(torch.device(device)), []
    for step in range(1, steps + 1):
        set_learning_rate(optimizer, learning_rate(step, steps, sizes["hidden"]))
        with compute():
            loss, auxiliary, counts = model(*next(source))
        optimizer.zero_grad()
        (loss + auxiliary).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        pace.mark()
        if step % max(steps // 10, 1) == 0:
            share = counts.float().max(dim=1).values / counts.float().mean(dim=1)
            report(f"step {step}/{steps}  loss {loss.item():.3f}  busiest expert {share.max():.2f} x mean")
    losses, speed = torch.stack(losses).tolist(), pace.tokens_per_second(batch * context)
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    with compute():
        after = bits_per_byte(model, held_out, context)
    in_use = f", at most {peak / 2**20:.0f} MiB in use" if on_gpu else ""
    report(f"{implementation} experts: {speed:.0f} tokens/s{in_use}")
    report(f"held-out bits per byte: {before:.3f} before, {after:.3f} after {steps} steps")
    return {"before": before, "after": after, "losses": losses, "tokens_per_second": speed, "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", nargs="+", type=pathlib.Path, required=True, help="files to learn from")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--router", default="topk-softmax")
    parser.add_argument("--implementation", default="tessera", choices=IMPLEMENTATIONS)
    for name, default in SIZES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    arguments = vars(parser.parse_args())
    train(b"\n".join(path.read_bytes() for path in arguments.pop("text")), **arguments)


if __name__ == "__main__":
    main()

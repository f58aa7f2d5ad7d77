# SPDX-License-Identifier: Apache-2.0
"""A Qwen3 MoE of transformers with two layers, small, and the losses of a few steps of training it."""

import tessera
import torch
import transformers

VOCABULARY = 96


def batches(count: int, rows: int = 4):
    generator = torch.Generator().manual_seed(5)
    starts = torch.randint(3, 40, (count, rows, 1), generator=generator)
    return [(start + 3 * torch.arange(16)) % VOCABULARY for start in starts]


def build(experts: str):
    """experts: "tessera", "eager", or "zeros", whose experts put out nothing."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, tie_word_embeddings=False, pad_token_id=0)
    config._attn_implementation = "eager"
    model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():  # experts that matter
        for name, weight in model.named_parameters():
            if "experts" in name:
                weight.mul_(8)
    if experts == "zeros":
        from transformers.integrations import moe

        def zeros(self, x, ids, weights):
            return 0 * (x + weights.sum() + self.gate_up_proj.sum() + self.down_proj.sum())

        moe.ALL_EXPERTS_FUNCTIONS.register("zeros", zeros)
    tessera.register_huggingface()
    model.set_experts_implementation(experts)
    return model


def train(model, steps: list, optimizer, backward=None) -> list:
    losses = []
    for ids in steps:
        loss = model(input_ids=ids, labels=ids).loss
        backward(loss) if backward else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

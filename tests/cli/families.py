# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every family: arguments of transformers' configurations, by model type and, behind it, a variant."""

COMMON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {**COMMON, "intermediate_size": 24, "num_experts_per_tok": 2}
FINE = {**WIDE, "intermediate_size": 48, "moe_intermediate_size": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
          "layer_types": ["linear_attention", "full_attention"]}
GROUPED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
          "num_key_value_heads": 4}
NEMOTRON = {**{key: size for key, size in FINE.items() if key != "num_hidden_layers"},
            "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
            "layers_block_type": ["mamba", "attention", "moe"],
            "moe_shared_expert_intermediate_size": 24, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
            "n_groups": 1, "chunk_size": 8, "head_dim": 8}
FAMILIES = {
    "afmoe": {**FINE, "num_experts": 4, "num_dense_layers": 1, "head_dim": 8},
    "aria_text": {**WIDE, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 2},
    "deepseek_v2": {**FINE, **LATENT, **GROUPED},
    "deepseek_v3": {**FINE, **LATENT, **GROUPED},
    "dots1": {**FINE, **GROUPED, "head_dim": 8, "layer_types": ["full_attention"] * 2},
    "ernie4_5_moe": {**FINE, "moe_num_experts": 4, "moe_k": 2},
    "flex_olmo": {**WIDE, "num_experts": 4},
    "glm4_moe": {**FINE, **GROUPED, "head_dim": 8},
    "gpt_oss": {**WIDE, "num_local_experts": 4, "head_dim": 8},
    "granitemoe": {**WIDE, "num_local_experts": 4},
    "hunyuan_v1_moe": {**WIDE, "num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "jamba": {**WIDE, "num_experts": 4, "expert_layer_period": 2, "expert_layer_offset": 1},
    "jetmoe": {**WIDE, "num_local_experts": 4, "kv_channels": 8, "num_attention_heads": 4},
    "lfm2_moe": {**FINE, "num_experts": 4, "num_dense_layers": 1, "layer_types": ["full_attention", "conv"]},
    "llama4_text": {**WIDE, "num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 48},
    "minimax": {**WIDE, "num_local_experts": 4, "head_dim": 8},
    "minimax_m2": {**WIDE, "num_local_experts": 4, "head_dim": 8},
    "mixtral": {**WIDE, "num_local_experts": 4},
    "nemotron_h": NEMOTRON,
    "olmoe": {**WIDE, "num_experts": 4},
    "phimoe": {**WIDE, "num_local_experts": 4},
    "qwen2_moe": {**FINE, "num_experts": 4, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {**FINE, "num_experts": 4, "head_dim": 8},
    "qwen3_next": {**FINE, **LINEAR, "num_experts": 4, "head_dim": 8, "shared_expert_intermediate_size": 40},
    "nemotron_h latent": {**NEMOTRON, "moe_latent_size": 12},
    "qwen3_5_moe_text": {**FINE, **LINEAR, "num_experts": 4, "head_dim": 8, "shared_expert_intermediate_size": 40},
}

// SPDX-License-Identifier: Apache-2.0
// The families of models share this: sizes, attention, routers and how their parameters are counted.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "huggingface/config_reader.hpp"
#include "huggingface/model.hpp"

namespace tessera::huggingface::parts {

/// Throws lm::InputError far above any model, so that sums of a few products times the layers stay within 64 bits.
std::int64_t product(std::initializer_list<std::int64_t> factors);
std::int64_t linear(std::int64_t in, std::int64_t out, bool bias = false);
/// gate, up and down projection.
std::int64_t gated_mlp(std::int64_t hidden, std::int64_t intermediate);
/// The activation that hidden_act names.
ActivationKind gated_activation(ConfigReader const& config);

/// Returns what every family has: sizes, embedding, two norms per layer and a last one.
Model common(ConfigReader const& config);

AttentionHeads heads(ConfigReader const& config);
/// Query, key, value and output projection of grouped-query attention.
std::int64_t attention(std::int64_t hidden, AttentionHeads const& heads, bool qkv_bias,
                       bool output_bias);

void check_top_k(ConfigReader const& config, MoeShape const& shape, char const* experts_key);
/// Every layer has experts.
void all_layers(Model& model);
/// All layers but the first `dense` ones, which the field `key` states; there must be others.
void layers_after(ConfigReader const& config, Model& model, std::int64_t dense, char const* key);
/// Routers, experts and dense layers, once model.moe and model.moe_layers are known.
void count_mlps(Model& model, std::int64_t dense_intermediate, bool router_bias);
void note_next_token_layers(ConfigReader const& config, Model& model);
/// The router that norm_topk_prob chooses.
RouterKind softmax_router(ConfigReader const& config);
/// Projections and norms of multi-head latent attention.
void latent_attention(ConfigReader const& config, Model& model);

}  // namespace tessera::huggingface::parts

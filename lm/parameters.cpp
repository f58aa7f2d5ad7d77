// SPDX-License-Identifier: Apache-2.0
#include "lm/parameters.hpp"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "lm/random.hpp"

namespace tessera::lm {

namespace {
constexpr double kEmbeddingStd = 0.04;
}

std::int64_t ParameterLayout::add(std::string name, std::vector<std::int64_t> shape, Role role,
                                  double initial_std) {
  std::int64_t size = 1;
  for (std::int64_t const extent : shape) size *= extent;
  slices_.push_back({std::move(name), std::move(shape), size_, size, role, initial_std});
  return std::exchange(size_, size_ + size);
}

LayerOffsets ParameterLayout::add_layer(ModelConfig const& c, std::int64_t layer) {
  std::string const prefix = fmt::format("model.layers.{}.", layer);
  auto const fan_in = [](std::int64_t width) { return 1 / std::sqrt(static_cast<double>(width)); };
  // Matrices that write to the residual stream start smaller, so that depth does not widen it.
  double const residual = 1 / std::sqrt(2 * static_cast<double>(c.layers));
  auto const weight = [&](std::string const& name, std::int64_t rows, std::int64_t columns,
                          double scale = 1) {
    return add(prefix + name + ".weight", {rows, columns}, Role::weight, scale * fan_in(columns));
  };
  auto const norm = [&](char const* name, std::int64_t width) {
    return add(prefix + name + ".weight", {width}, Role::norm);
  };

  LayerOffsets at;
  at.input_norm = norm("input_layernorm", c.hidden);
  at.w_qkv = weight("self_attn.q_proj", c.heads * c.head_dim, c.hidden);
  weight("self_attn.k_proj", c.kv_heads * c.head_dim, c.hidden);
  weight("self_attn.v_proj", c.kv_heads * c.head_dim, c.hidden);
  at.q_norm = norm("self_attn.q_norm", c.head_dim);
  at.k_norm = norm("self_attn.k_norm", c.head_dim);
  at.w_o = weight("self_attn.o_proj", c.hidden, c.heads * c.head_dim, residual);
  at.moe_norm = norm("post_attention_layernorm", c.hidden);
  at.w_router = weight("mlp.gate", c.experts, c.hidden);
  if (has_selection_bias(c)) {  // as DeepSeek-V3 names it
    at.selection_bias =
        add(prefix + "mlp.gate.e_score_correction_bias", {c.experts}, Role::selection_bias);
  }
  at.w_up = size_;
  for (std::int64_t e = 0; e < c.experts; ++e) {
    weight(fmt::format("mlp.experts.{}.gate_proj", e), c.intermediate, c.hidden);
    weight(fmt::format("mlp.experts.{}.up_proj", e), c.intermediate, c.hidden);
  }
  at.w_down = size_;
  for (std::int64_t e = 0; e < c.experts; ++e) {
    weight(fmt::format("mlp.experts.{}.down_proj", e), c.hidden, c.intermediate, residual);
  }
  return at;
}

ParameterLayout::ParameterLayout(ModelConfig const& config) {
  validate(config);
  add("model.embed_tokens.weight", {ModelConfig::kVocabulary, config.hidden}, Role::weight,
      kEmbeddingStd);
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    layers_.push_back(add_layer(config, layer));
  }
  final_norm_ = add("model.norm.weight", {config.hidden}, Role::norm);
}

std::vector<float> initial_parameters(ParameterLayout const& layout, std::uint64_t seed) {
  std::vector<float> parameters(static_cast<std::size_t>(layout.size()), 0.0f);
  for (NamedSlice const& slice : layout.slices()) {
    for (std::int64_t i = slice.offset; i < slice.offset + slice.size; ++i) {
      if (slice.role == Role::norm) parameters[static_cast<std::size_t>(i)] = 1;
      if (slice.role != Role::weight) continue;
      double const normal =
          random_normal(seed, Stream::initial_weights, static_cast<std::uint64_t>(i));
      parameters[static_cast<std::size_t>(i)] = static_cast<float>(slice.initial_std * normal);
    }
  }
  return parameters;
}

}  // namespace tessera::lm

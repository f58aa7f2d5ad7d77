// SPDX-License-Identifier: Apache-2.0
#include "lm/model.hpp"

#include <algorithm>

#include "lm/cross_entropy.hpp"
#include "lm/embedding.hpp"
#include "lm/error.hpp"
#include "lm/rms_norm.hpp"
#include "lm/simd.hpp"
#include "tessera/balance.hpp"

namespace tessera::lm {

namespace {

constexpr std::int64_t kBlock = 1 << 14;

TESSERA_LM_SIMD void add(std::int64_t count, float const* b, float* a) {
  for (std::int64_t i = 0; i < count; ++i) a[i] += b[i];
}

// a += b
void add(Context const& context, std::span<float const> b, std::span<float> a) {
  auto const count = static_cast<std::int64_t>(a.size());
  context.parallel_for((count + kBlock - 1) / kBlock, [&](std::int64_t block) {
    std::int64_t const first = block * kBlock;
    add(std::min(kBlock, count - first), b.data() + first, a.data() + first);
  });
}

MoeWeights moe_weights(ModelConfig const& config, float const* parameters, LayerOffsets const& at) {
  return {parameters + at.w_router,
          has_selection_bias(config) ? parameters + at.selection_bias : nullptr,
          parameters + at.w_up, parameters + at.w_down};
}

}  // namespace

/// Holds what one call fixes for all layers.
struct Model::Pass {
  float const* parameters;
  std::span<std::uint8_t const> inputs;
  RoundingOptions rounding;
  RouterLosses losses = {};
  bool save = false;  // for backward
  bool moe = true;
};

Model::Model(Context const& context, ModelConfig const& config)
    : context_(context),
      config_(config),
      layout_(config),
      rope_(config.context, config.head_dim, config.rope_theta),
      layers_(static_cast<std::size_t>(config.layers)),
      counts_(static_cast<std::size_t>(config.layers * config.experts)) {
  for (std::int64_t layer = 0; layer < config.layers; ++layer) blocks_.emplace_back(config, layer);
}

AttentionShape Model::attention_shape() const {
  return {sequences_, length_, config_.heads, config_.kv_heads, config_.head_dim};
}

void Model::resize(std::int64_t sequences, std::int64_t length) {
  if (sequences == sequences_ && length == length_) return;
  sequences_ = sequences;
  length_ = length;
  auto const size = [&](std::int64_t width) { return static_cast<std::size_t>(tokens() * width); };
  std::int64_t const d = config_.hidden;
  for (LayerMemory& memory : layers_) {
    for (auto* buffer : {&memory.x, &memory.normed, &memory.u, &memory.moe_normed}) {
      buffer->resize(size(d));
    }
    memory.inverse_rms.resize(size(1));
    memory.moe_inverse_rms.resize(size(1));
    memory.qkv.resize(size(config_.qkv_width()));
    memory.q.resize(size(config_.heads * config_.head_dim));
    memory.k.resize(size(config_.kv_heads * config_.head_dim));
    memory.q_inverse_rms.resize(size(config_.heads));
    memory.k_inverse_rms.resize(size(config_.kv_heads));
    memory.p.resize(static_cast<std::size_t>(attention_shape().probabilities()));
    memory.attended.resize(size(config_.heads * config_.head_dim));
  }
  for (auto* buffer : {&x_, &normed_, &dx_, &d_normed_}) buffer->resize(size(d));
  inverse_rms_.resize(size(1));
  logits_.resize(size(ModelConfig::kVocabulary));
  d_qkv_.resize(size(config_.qkv_width()));
  d_attended_.resize(size(config_.heads * config_.head_dim));
}

double Model::train(std::span<float const> parameters, Batch const& batch,
                    RoundingOptions const& rounding, RouterLosses const& losses,
                    std::span<float> gradients) {
  resize(batch.sequences, batch.length);
  Pass const pass{.parameters = parameters.data(),
                  .inputs = batch.inputs,
                  .rounding = rounding,
                  .losses = losses,
                  .save = true};
  forward(pass);
  double const loss = cross_entropy(context_, batch.targets, logits_.data(), true);
  backward(pass, gradients);
  return loss;
}

void Model::update_selection_bias(double rate, std::span<float> parameters) const {
  for (std::int64_t layer = 0; layer < config_.layers; ++layer) {
    std::vector<std::int32_t> const& counts =
        blocks_[static_cast<std::size_t>(layer)].topk_counts();
    SelectionBiasArgs args;
    args.topk_counts = tensor(counts.data(), {config_.experts});
    args.selection_bias =
        tensor(parameters.data() + layout_.layer(layer).selection_bias, {config_.experts});
    args.rate = static_cast<float>(rate);
    check(tessera::update_selection_bias(context_, args));
  }
}

double Model::evaluate(std::span<float const> parameters, Batch const& batch, bool moe) {
  resize(batch.sequences, batch.length);
  forward({.parameters = parameters.data(), .inputs = batch.inputs, .rounding = {}, .moe = moe});
  return cross_entropy(context_, batch.targets, logits_.data(), false);
}

std::span<float const> Model::next_logits(std::span<float const> parameters,
                                          std::span<std::uint8_t const> tokens) {
  resize(1, static_cast<std::int64_t>(tokens.size()));
  forward({.parameters = parameters.data(), .inputs = tokens, .rounding = {}});
  return std::span<float const>(logits_).last(ModelConfig::kVocabulary);
}

void Model::forward(Pass const& pass) {
  std::int64_t const d = config_.hidden;
  float const* const embedding = pass.parameters + layout_.embedding();
  embedding_fwd(context_, pass.inputs, d, embedding, layers_.front().x.data());
  for (std::int64_t layer = 0; layer < config_.layers; ++layer) {
    bool const last = layer + 1 == config_.layers;
    layer_fwd(pass, layer,
              last ? x_.data() : layers_[static_cast<std::size_t>(layer) + 1].x.data());
  }
  rms_norm_fwd(context_, tokens(), dense_rows<float const>(x_.data(), d),
               pass.parameters + layout_.final_norm(), static_cast<float>(config_.rms_eps),
               dense_rows(normed_.data(), d), inverse_rms_.data());
  linear_fwd(context_, {tokens(), d, ModelConfig::kVocabulary}, normed_.data(), embedding,
             logits_.data());
}

void Model::layer_fwd(Pass const& pass, std::int64_t layer, float* x_out) {
  LayerMemory& memory = layers_[static_cast<std::size_t>(layer)];
  LayerOffsets const& at = layout_.layer(layer);
  std::int64_t const d = config_.hidden;
  attention_block_fwd(pass, memory, at);

  std::span<float> const out(x_out, memory.u.size());
  if (!pass.moe) {
    std::copy(memory.u.begin(), memory.u.end(), out.begin());
    return;
  }
  rms_norm_fwd(context_, tokens(), dense_rows<float const>(memory.u.data(), d),
               pass.parameters + at.moe_norm, static_cast<float>(config_.rms_eps),
               dense_rows(memory.moe_normed.data(), d), memory.moe_inverse_rms.data());
  blocks_[static_cast<std::size_t>(layer)].forward(
      context_, tokens(), pass.rounding, pass.save, memory.moe_normed.data(),
      moe_weights(config_, pass.parameters, at), x_out, counts_.data() + layer * config_.experts,
      workspace_);
  add(context_, memory.u, out);
}

// u = x + W_o attention(...)
void Model::attention_block_fwd(Pass const& pass, LayerMemory& memory, LayerOffsets const& at) {
  ModelConfig const& c = config_;
  std::int64_t const width = c.qkv_width(), q_width = c.heads * c.head_dim,
                     k_width = c.kv_heads * c.head_dim;
  auto const eps = static_cast<float>(c.rms_eps);
  float const* const parameters = pass.parameters;
  rms_norm_fwd(context_, tokens(), dense_rows<float const>(memory.x.data(), c.hidden),
               parameters + at.input_norm, eps, dense_rows(memory.normed.data(), c.hidden),
               memory.inverse_rms.data());
  linear_fwd(context_, {tokens(), c.hidden, width}, memory.normed.data(), parameters + at.w_qkv,
             memory.qkv.data());

  Rows<float> const q{memory.q.data(), c.head_dim, c.heads, q_width};
  Rows<float> const k{memory.k.data(), c.head_dim, c.kv_heads, k_width};
  rms_norm_fwd(context_, tokens() * c.heads, {memory.qkv.data(), c.head_dim, c.heads, width},
               parameters + at.q_norm, eps, q, memory.q_inverse_rms.data());
  rms_norm_fwd(context_, tokens() * c.kv_heads,
               {memory.qkv.data() + q_width, c.head_dim, c.kv_heads, width}, parameters + at.k_norm,
               eps, k, memory.k_inverse_rms.data());
  rope_.rotate(context_, tokens() * c.heads, length_, q);
  rope_.rotate(context_, tokens() * c.kv_heads, length_, k);

  attention_fwd(context_, attention_shape(), {memory.q.data(), q_width}, {memory.k.data(), k_width},
                {memory.qkv.data() + q_width + k_width, width}, memory.p.data(),
                {memory.attended.data(), q_width});
  linear_fwd(context_, {tokens(), q_width, c.hidden}, memory.attended.data(), parameters + at.w_o,
             memory.u.data());
  add(context_, memory.x, memory.u);
}

void Model::backward(Pass const& pass, std::span<float> gradients) {
  std::int64_t const d = config_.hidden;
  LinearShape const output{tokens(), d, ModelConfig::kVocabulary};
  float* const d_embedding = gradients.data() + layout_.embedding();
  linear_wgrad(context_, output, logits_.data(), normed_.data(), d_embedding);
  linear_dgrad(context_, output, logits_.data(), pass.parameters + layout_.embedding(),
               d_normed_.data());
  rms_norm_bwd(context_, tokens(), dense_rows<float const>(x_.data(), d),
               pass.parameters + layout_.final_norm(), inverse_rms_.data(),
               dense_rows<float const>(d_normed_.data(), d), false, dense_rows(dx_.data(), d),
               gradients.data() + layout_.final_norm());
  for (std::int64_t layer = config_.layers - 1; layer >= 0; --layer) {
    layer_bwd(pass, layer, gradients);
  }
  embedding_bwd(context_, pass.inputs, d, dx_.data(), d_embedding);
}

// dx_ is the gradient of the layer's output on entry, of its input on return.
void Model::layer_bwd(Pass const& pass, std::int64_t layer, std::span<float> gradients) {
  LayerMemory& memory = layers_[static_cast<std::size_t>(layer)];
  LayerOffsets const& at = layout_.layer(layer);
  std::int64_t const d = config_.hidden;
  float* const g = gradients.data();
  if (has_selection_bias(config_)) std::fill_n(g + at.selection_bias, config_.experts, 0.0f);
  blocks_[static_cast<std::size_t>(layer)].backward(
      context_, pass.losses, memory.moe_normed.data(), dx_.data(),
      moe_weights(config_, pass.parameters, at), d_normed_.data(),
      {g + at.w_router, g + at.w_up, g + at.w_down}, workspace_);
  rms_norm_bwd(context_, tokens(), dense_rows<float const>(memory.u.data(), d),
               pass.parameters + at.moe_norm, memory.moe_inverse_rms.data(),
               dense_rows<float const>(d_normed_.data(), d), true, dense_rows(dx_.data(), d),
               g + at.moe_norm);
  attention_block_bwd(pass, memory, at, gradients);
}

void Model::attention_block_bwd(Pass const& pass, LayerMemory& memory, LayerOffsets const& at,
                                std::span<float> gradients) {
  ModelConfig const& c = config_;
  std::int64_t const width = c.qkv_width(), q_width = c.heads * c.head_dim,
                     k_width = c.kv_heads * c.head_dim;
  float* const g = gradients.data();
  LinearShape const output{tokens(), q_width, c.hidden};
  linear_wgrad(context_, output, dx_.data(), memory.attended.data(), g + at.w_o);
  linear_dgrad(context_, output, dx_.data(), pass.parameters + at.w_o, d_attended_.data());

  float* const dq = d_qkv_.data();
  float* const dk = dq + q_width;
  attention_bwd(context_, attention_shape(), {memory.q.data(), q_width}, {memory.k.data(), k_width},
                {memory.qkv.data() + q_width + k_width, width}, memory.p.data(),
                {d_attended_.data(), q_width}, {{dq, width}, {dk, width}, {dk + k_width, width}});
  rope_.rotate_back(context_, tokens() * c.heads, length_, {dq, c.head_dim, c.heads, width});
  rope_.rotate_back(context_, tokens() * c.kv_heads, length_, {dk, c.head_dim, c.kv_heads, width});
  rms_norm_bwd(context_, tokens() * c.heads, {memory.qkv.data(), c.head_dim, c.heads, width},
               pass.parameters + at.q_norm, memory.q_inverse_rms.data(),
               {dq, c.head_dim, c.heads, width}, false, {dq, c.head_dim, c.heads, width},
               g + at.q_norm);
  rms_norm_bwd(
      context_, tokens() * c.kv_heads, {memory.qkv.data() + q_width, c.head_dim, c.kv_heads, width},
      pass.parameters + at.k_norm, memory.k_inverse_rms.data(), {dk, c.head_dim, c.kv_heads, width},
      false, {dk, c.head_dim, c.kv_heads, width}, g + at.k_norm);

  LinearShape const projection{tokens(), c.hidden, width};
  linear_wgrad(context_, projection, d_qkv_.data(), memory.normed.data(), g + at.w_qkv);
  linear_dgrad(context_, projection, d_qkv_.data(), pass.parameters + at.w_qkv, d_normed_.data());
  rms_norm_bwd(context_, tokens(), dense_rows<float const>(memory.x.data(), c.hidden),
               pass.parameters + at.input_norm, memory.inverse_rms.data(),
               dense_rows<float const>(d_normed_.data(), c.hidden), true,
               dense_rows(dx_.data(), c.hidden), g + at.input_norm);
}

}  // namespace tessera::lm

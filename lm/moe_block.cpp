// SPDX-License-Identifier: Apache-2.0
#include "lm/moe_block.hpp"

#include "lm/error.hpp"
#include "tessera/balance.hpp"
#include "tessera/router.hpp"

namespace tessera::lm {

namespace {

Buffer workspace_for(std::size_t bytes, std::vector<std::byte>& workspace) {
  if (workspace.size() < bytes) workspace.resize(bytes);
  return {workspace.data(), workspace.size()};
}

}  // namespace

MoeDesc moe_desc(ModelConfig const& config, std::int64_t tokens, RoundingOptions const& rounding,
                 std::int64_t layer, bool training) {
  MoeDesc desc;
  desc.shape = {.tokens = tokens,
                .hidden = config.hidden,
                .intermediate = config.intermediate,
                .experts = config.experts,
                .top_k = config.top_k};
  desc.router = config.router;
  desc.save = training ? SavePolicy::h : SavePolicy::none;
  desc.overwrite_h = training;  // each forward pass has one backward pass
  if (training) {
    desc.router.round = rounding.rounding;
    if (desc.rounds_tokens()) desc.router.tile = rounding.tile;
    if (draws(desc.router)) {
      desc.router.seed = rounding.seed;
      desc.router.step = rounding.step;
      desc.router.layer = static_cast<std::uint32_t>(layer);
    }
  } else if (desc.experts_choose()) {
    desc.router.kind = RouterKind::softmax_topk;
  }
  return desc;
}

MoeBlock::MoeBlock(ModelConfig const& config, std::int64_t layer)
    : config_(config), layer_(layer) {}

ExpertWeights MoeBlock::expert_weights(MoeWeights const& weights) const {
  ExpertWeights experts;
  experts.w_up = tensor(weights.up, {config_.experts, 2 * config_.intermediate, config_.hidden});
  experts.w_down = tensor(weights.down, {config_.experts, config_.hidden, config_.intermediate});
  return experts;
}

void MoeBlock::forward(Context const& context, std::int64_t tokens, RoundingOptions const& rounding,
                       bool save, float const* x, MoeWeights const& weights, float* o,
                       std::int32_t* counts, std::vector<std::byte>& workspace) {
  MoeDesc const desc = moe_desc(config_, tokens, rounding, layer_, save);
  MoeForwardArgs args;
  args.x = tensor(x, {tokens, config_.hidden});
  args.w_router = tensor(weights.router, {config_.experts, config_.hidden});
  if (weights.selection_bias != nullptr) {
    args.selection_bias = tensor(weights.selection_bias, {config_.experts});
  }
  args.weights = expert_weights(weights);
  args.o = tensor(o, {tokens, config_.hidden});
  args.expert_counts = tensor(counts, {config_.experts});
  args.workspace = workspace_for(take(workspace_bytes(context, desc, Pass::forward)), workspace);
  if (save) {
    SavedBytes const saved = take(saved_bytes(desc));
    std::int64_t const width = desc.up_width() * config_.intermediate;
    h_.resize(saved.h / sizeof(float));
    routing_.resize(saved.routing / sizeof(std::int32_t));
    args.h = tensor(h_.data(), {static_cast<std::int64_t>(h_.size()) / width, width});
    args.routing = {routing_.data(), saved.routing};
    logits_.resize(static_cast<std::size_t>(tokens * config_.experts));
    args.logits = tensor(logits_.data(), {tokens, config_.experts});
    topk_counts_.resize(static_cast<std::size_t>(config_.experts));
    args.topk_counts = tensor(topk_counts_.data(), {config_.experts});
    saved_ = desc;
  }
  check(moe_forward(context, desc, args));
}

// aux_dlogits_ = their gradient for the logits that forward saved.
void MoeBlock::router_losses_bwd(Context const& context, RouterLosses const& losses,
                                 std::vector<std::byte>& workspace) {
  std::int64_t const tokens = saved_.shape.tokens;
  aux_dlogits_.resize(logits_.size());
  RouterLossArgs args;
  args.logits = tensor(static_cast<float const*>(logits_.data()), {tokens, config_.experts});
  args.topk_counts =
      tensor(static_cast<std::int32_t const*>(topk_counts_.data()), {config_.experts});
  args.balance = static_cast<float>(losses.balance);
  args.z = static_cast<float>(losses.z);
  args.dlogits = tensor(aux_dlogits_.data(), {tokens, config_.experts});
  args.workspace = workspace_for(take(router_loss_workspace_bytes(context, saved_)), workspace);
  check(router_loss(context, saved_, args));
}

void MoeBlock::backward(Context const& context, RouterLosses const& losses, float const* x,
                        float const* d_o, MoeWeights const& weights, float* dx,
                        MoeGradients const& gradients, std::vector<std::byte>& workspace) {
  std::int64_t const tokens = saved_.shape.tokens;
  std::int64_t const width = saved_.up_width() * config_.intermediate;
  MoeBackwardArgs args;
  args.d_o = tensor(d_o, {tokens, config_.hidden});
  args.x = tensor(x, {tokens, config_.hidden});
  args.h = tensor(h_.data(), {static_cast<std::int64_t>(h_.size()) / width, width});
  args.routing = {routing_.data(), routing_.size() * sizeof(std::int32_t)};
  args.w_router = tensor(weights.router, {config_.experts, config_.hidden});
  args.weights = expert_weights(weights);
  args.dx = tensor(dx, {tokens, config_.hidden});
  args.gradients.dw_router = tensor(gradients.router, {config_.experts, config_.hidden});
  args.gradients.dw_up =
      tensor(gradients.up, {config_.experts, 2 * config_.intermediate, config_.hidden});
  args.gradients.dw_down =
      tensor(gradients.down, {config_.experts, config_.hidden, config_.intermediate});
  if (losses.any()) {
    router_losses_bwd(context, losses, workspace);
    args.aux_dlogits =
        tensor(static_cast<float const*>(aux_dlogits_.data()), {tokens, config_.experts});
  }
  args.workspace = workspace_for(take(workspace_bytes(context, saved_, Pass::backward)), workspace);
  check(moe_backward(context, saved_, args));
}

}  // namespace tessera::lm

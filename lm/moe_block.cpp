// SPDX-License-Identifier: Apache-2.0
#include "lm/moe_block.hpp"

#include "lm/error.hpp"
#include "lm/linear.hpp"
#include "lm/router_balance.hpp"

namespace tessera::lm {

namespace {

Buffer workspace_for(Context const& context, MoeDesc const& desc, Pass pass,
                     std::vector<std::byte>& workspace) {
  std::size_t const bytes = take(workspace_bytes(context, desc, pass));
  if (workspace.size() < bytes) workspace.resize(bytes);
  return {workspace.data(), workspace.size()};
}

}  // namespace

MoeBlock::MoeBlock(ModelConfig const& config, std::int64_t layer)
    : config_(config), layer_(layer) {}

ExpertWeights MoeBlock::expert_weights(MoeWeights const& weights) const {
  ExpertWeights experts;
  experts.w_up = tensor(weights.up, {config_.experts, 2 * config_.intermediate, config_.hidden});
  experts.w_down = tensor(weights.down, {config_.experts, config_.hidden, config_.intermediate});
  return experts;
}

void MoeBlock::forward(Context const& context, std::int64_t tokens, RoundingOptions const& rounding,
                       bool keep, float const* x, MoeWeights const& weights, float* o,
                       std::int32_t* counts, std::vector<std::byte>& workspace) {
  MoeDesc desc;
  desc.shape = {.tokens = tokens,
                .hidden = config_.hidden,
                .intermediate = config_.intermediate,
                .experts = config_.experts,
                .top_k = config_.top_k};
  desc.router.kind = config_.router;
  desc.router.round = rounding.rounding;
  desc.router.tile = rounding.tile;
  desc.router.seed = rounding.seed;
  desc.router.step = rounding.step;
  desc.router.layer = static_cast<std::uint32_t>(layer_);
  desc.save = keep ? SavePolicy::h : SavePolicy::none;

  MoeForwardArgs args;
  args.x = tensor(x, {tokens, config_.hidden});
  args.w_router = tensor(weights.router, {config_.experts, config_.hidden});
  args.weights = expert_weights(weights);
  args.o = tensor(o, {tokens, config_.hidden});
  args.expert_counts = tensor(counts, {config_.experts});
  args.workspace = workspace_for(context, desc, Pass::forward, workspace);
  if (keep) {
    SavedBytes const saved = take(saved_bytes(desc));
    std::int64_t const width = desc.up_width() * config_.intermediate;
    h_.resize(saved.h / sizeof(float));
    routing_.resize(saved.routing / sizeof(std::int32_t));
    args.h = tensor(h_.data(), {static_cast<std::int64_t>(h_.size()) / width, width});
    args.routing = {routing_.data(), saved.routing};
    logits_.resize(static_cast<std::size_t>(tokens * config_.experts));
    args.logits = tensor(logits_.data(), {tokens, config_.experts});
    kept_ = desc;
  }
  check(moe_forward(context, desc, args));
  if (keep) counts_.assign(counts, counts + config_.experts);
}

void MoeBlock::backward(Context const& context, double balance, float const* x, float const* d_o,
                        MoeWeights const& weights, float* dx, MoeGradients const& gradients,
                        std::vector<std::byte>& workspace) {
  std::int64_t const tokens = kept_.shape.tokens;
  std::int64_t const width = kept_.up_width() * config_.intermediate;
  MoeBackwardArgs args;
  args.d_o = tensor(d_o, {tokens, config_.hidden});
  args.x = tensor(x, {tokens, config_.hidden});
  args.h = tensor(static_cast<float const*>(h_.data()),
                  {static_cast<std::int64_t>(h_.size()) / width, width});
  args.routing = {routing_.data(), routing_.size() * sizeof(std::int32_t)};
  args.w_router = tensor(weights.router, {config_.experts, config_.hidden});
  args.weights = expert_weights(weights);
  args.dx = tensor(dx, {tokens, config_.hidden});
  args.gradients.dw_router = tensor(gradients.router, {config_.experts, config_.hidden});
  args.gradients.dw_up =
      tensor(gradients.up, {config_.experts, 2 * config_.intermediate, config_.hidden});
  args.gradients.dw_down =
      tensor(gradients.down, {config_.experts, config_.hidden, config_.intermediate});
  args.workspace = workspace_for(context, kept_, Pass::backward, workspace);
  check(moe_backward(context, kept_, args));
  if (balance == 0) return;
  balance_loss_bwd(context, balance, config_.experts, logits_, counts_);
  LinearShape const router{tokens, config_.hidden, config_.experts};
  linear_wgrad(context, router, logits_.data(), x, gradients.router, true);
  linear_dgrad(context, router, logits_.data(), weights.router, dx, true);
}

}  // namespace tessera::lm

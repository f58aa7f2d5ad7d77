// SPDX-License-Identifier: Apache-2.0
// All calls of a small layer, and everything in their results that could show the effect of an option.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "tests/api/layer.hpp"

namespace tessera::api_test {

inline constexpr std::int64_t kTokens = 26, kHidden = 8, kIntermediate = 6, kExperts = 12,
                              kTopK = 2;

/// Tensors that a call may be given beyond what its desc needs.
using Extras = std::vector<std::string>;

inline bool holds(Extras const& extras, char const* name) {
  return std::find(extras.begin(), extras.end(), name) != extras.end();
}

/// Everything that could show an effect: outputs, gradients, sizes of buffers, and the texts of refusals.
struct Outcome {
  std::string bytes, refusals;

  void add(void const* data, std::size_t size) {
    bytes.append(static_cast<char const*>(data), size);
    bytes.append("|");
  }
  void add(Floats const& values) { add(values.data(), values.size() * sizeof(float)); }
  void add(Expected<std::size_t> const& size) {
    if (!size.ok()) return static_cast<void>(add(size.status()));
    add(&size.value(), sizeof(std::size_t));
  }
  bool add(Status const& status) {
    if (!status.ok()) refusals.append(status.text()).append("\n");
    bytes.append(status.text());
    return status.ok();
  }
};

/// One layer with all tensors that any of these calls could want; equal names have equal values in every layer.
class Calls {
 public:
  /// `grouping`: what the groups of rows are written as, whatever the desc says.
  Calls(Context const& context, MoeDesc const& desc, Extras const& extras, RowGrouping grouping)
      : context_(context), desc_(desc), extras_(extras), grouping_(grouping) {}

  Outcome run() {
    Outcome out;
    for (Pass const pass : {Pass::forward, Pass::backward, Pass::route}) {
      out.add(workspace_bytes(context_, desc_, pass));
    }
    if (auto const bytes = routing_bytes(desc_); bytes.ok()) {
      forward(out, bytes.value());
      route_alone(out);
    }
    return out;
  }

 private:
  [[nodiscard]] bool routed() const { return desc_.router.kind != RouterKind::given; }
  [[nodiscard]] bool grouped() const { return desc_.grouping != RowGrouping::slots; }
  [[nodiscard]] bool extra(char const* name) const { return holds(extras_, name); }

  Floats& floats(std::string const& name, std::int64_t count) {
    Floats& values = floats_[name];
    std::mt19937 generator(static_cast<unsigned>(std::hash<std::string>()(name)));
    values = random_floats(count, 0.6f, generator);
    return values;
  }
  Tensor made(std::string const& name, std::vector<std::int64_t> const& shape) {
    std::int64_t count = 1;
    for (std::int64_t const size : shape) count *= size;
    Tensor out = tensor(floats(name, count).data(), {0});
    out.rank = static_cast<int>(shape.size());
    for (int axis = out.rank - 1, inner = 1; axis >= 0; --axis) {
      out.shape[axis] = shape[static_cast<std::size_t>(axis)];
      out.stride[axis] = inner;
      inner *= static_cast<int>(out.shape[axis]);
    }
    return out;
  }
  Tensor integers(std::string const& name, std::vector<std::int32_t> values) {
    std::vector<std::int32_t>& kept = integers_[name] = std::move(values);
    return tensor(kept.data(), {static_cast<std::int64_t>(kept.size())});
  }
  Buffer buffer(std::string const& name, std::size_t bytes) {
    Floats& values = floats_[name];
    values.assign(bytes / sizeof(float) + 1, 0.0f);
    return {values.data(), bytes};
  }

  Tensor ids() {
    std::vector<std::int32_t> values;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t k = 0; k < desc_.shape.top_k; ++k) {
        values.push_back(static_cast<std::int32_t>((t + 2 * k) % kExperts));
      }
    }
    Tensor out = integers("topk_ids", values);
    if (desc_.shape.variable_experts) return out;
    out.rank = 2;
    out.shape[0] = kTokens, out.shape[1] = desc_.shape.top_k;
    out.stride[0] = desc_.shape.top_k, out.stride[1] = 1;
    return out;
  }
  Tensor groups() {
    std::vector<std::int32_t> offsets;
    for (std::int32_t e = 0; e <= kExperts; ++e) offsets.push_back(2 * e + (e > 3 ? 1 : 0));
    std::vector<std::int32_t> const ends(offsets.begin() + 1, offsets.end());
    if (grouping_ == RowGrouping::ends) return integers("expert_offsets", ends);
    if (grouping_ == RowGrouping::counts) {
      for (std::size_t e = 0; e < ends.size(); ++e) offsets[e] = ends[e] - offsets[e];
      offsets.pop_back();
    }
    return integers("expert_offsets", offsets);
  }
  Tensor token_offsets() {
    std::vector<std::int32_t> offsets;
    for (std::int64_t t = 0; t <= kTokens; ++t) {
      // Every token has its slots but the first, whose last one the second one has.
      offsets.push_back(static_cast<std::int32_t>(t * desc_.shape.top_k - (t == 1 ? 1 : 0)));
    }
    return integers("token_offsets", offsets);
  }

  /// Every third token is padding.
  Tensor token_mask() {
    mask_.assign(kTokens, 1);
    for (std::size_t t = 0; t < mask_.size(); t += 3) mask_[t] = 0;
    return tensor(mask_.data(), {kTokens});
  }

  ExpertWeights weights() {
    std::int64_t const e = kExperts, d = kHidden, n = kIntermediate, width = desc_.up_width() * n;
    bool const separate = desc_.layout.orientation == WeightOrientation::separate;
    bool const transposed = desc_.layout.orientation == WeightOrientation::transposed;
    std::int64_t const up = separate ? n : width;
    ExpertWeights out;
    using Shape = std::vector<std::int64_t>;
    out.w_up = made("w_up", transposed ? Shape{e, d, up} : Shape{e, up, d});
    out.w_down = made("w_down", transposed ? Shape{e, n, d} : Shape{e, d, n});
    if (separate || extra("w_gate")) out.w_gate = made("w_gate", {e, n, d});
    if (desc_.bias || extra("b_up")) out.b_up = made("b_up", {e, up});
    if (desc_.bias || extra("b_down")) out.b_down = made("b_down", {e, d});
    if ((desc_.bias && separate) || extra("b_gate")) out.b_gate = made("b_gate", {e, n});
    return out;
  }

  void forward(Outcome& out, std::size_t routing) {
    MoeForwardArgs args;
    bool const given = !routed() || desc_.router.replay;
    args.x = made("x", {kTokens, kHidden});
    if ((given && !grouped()) || extra("topk_ids")) args.topk_ids = ids();
    if ((!routed() && !grouped()) || extra("topk_weights")) {
      std::int64_t const k = desc_.shape.top_k;
      using Shape = std::vector<std::int64_t>;
      args.topk_weights = made(
          "topk_weights", desc_.shape.variable_experts ? Shape{kTokens * k} : Shape{kTokens, k});
    }
    if (desc_.shape.variable_experts || extra("token_offsets")) {
      args.token_offsets = token_offsets();
    }
    if (routed() || extra("w_router")) args.w_router = made("w_router", {kExperts, kHidden});
    if (extra("b_router")) args.b_router = made("b_router", {kExperts});
    if (extra("selection_bias")) args.selection_bias = made("selection_bias", {kExperts});
    if (grouped() || extra("expert_offsets")) args.expert_offsets = groups();
    if (extra("row_scores")) args.row_scores = made("row_scores", {kTokens});
    if (extra("token_mask")) args.token_mask = token_mask();
    if (extra("x8")) args.x8 = made("x8", {kTokens, kHidden});
    if (extra("x_scale")) args.x_scale = made("x_scale", {kTokens, 1});
    if (extra("h_scale")) args.h_scale = made("h_scale", {1, kTokens});
    args.weights = weights();
    args.o = made("o", {kTokens, kHidden});
    if (desc_.save == SavePolicy::h) {
      args.h = made("h", {desc_.num_slots(), desc_.up_width() * kIntermediate});
    }
    args.routing = buffer("routing", routing);
    auto const workspace = workspace_bytes(context_, desc_, Pass::forward);
    if (!workspace.ok()) return;
    args.workspace = buffer("workspace", workspace.value());
    if (!out.add(moe_forward(context_, desc_, args))) return;
    out.add(floats_["o"]);
    out.add(args.routing.data, routing);
    backward(out, args);
  }

  void backward(Outcome& out, MoeForwardArgs const& forward) {
    MoeBackwardArgs args;
    args.d_o = made("d_o", {kTokens, kHidden});
    args.x = forward.x;
    if (desc_.save == SavePolicy::h) args.h = forward.h;
    args.routing = {forward.routing.data, forward.routing.bytes};
    args.w_router = forward.w_router;
    args.b_router = forward.b_router;
    args.weights = forward.weights;
    args.token_mask = forward.token_mask;
    if (extra("aux_dlogits")) args.aux_dlogits = made("aux_dlogits", {kTokens, kExperts});
    args.dx = made("dx", {kTokens, kHidden});
    args.gradients.dw_down =
        forward.weights.w_down.present() ? made_like("dw_down", forward.weights.w_down) : Tensor{};
    if (routed()) args.gradients.dw_router = made("dw_router", {kExperts, kHidden});
    auto const workspace = workspace_bytes(context_, desc_, Pass::backward);
    if (!workspace.ok()) return;
    args.workspace = buffer("workspace", workspace.value());
    if (!out.add(moe_backward(context_, desc_, args))) return;
    out.add(floats_["dx"]);
    out.add(floats_["dw_down"]);
    out.add(floats_["dw_router"]);
  }
  Tensor made_like(std::string const& name, ConstTensor const& like) {
    return made(name, std::vector<std::int64_t>(like.shape, like.shape + like.rank));
  }

  void route_alone(Outcome& out) {
    if (!routed() || desc_.router.replay) return;
    RouteArgs args;
    args.x = made("x", {kTokens, kHidden});
    args.w_router = made("w_router", {kExperts, kHidden});
    if (extra("b_router")) args.b_router = made("b_router", {kExperts});
    if (extra("selection_bias")) args.selection_bias = made("selection_bias", {kExperts});
    if (extra("token_mask")) args.token_mask = token_mask();
    bool const wide = desc_.ids_dtype == DType::int64;
    std::int64_t const slots = desc_.num_slots(), k = desc_.shape.top_k;
    std::vector<std::int64_t> wide_ids(static_cast<std::size_t>(slots)), wide_offsets(kTokens + 1);
    std::vector<std::int32_t> ids(wide_ids.size()), offsets(wide_offsets.size());
    Floats& scores = floats("scores", slots);
    if (desc_.experts_vary()) {
      args.topk_ids = wide ? tensor(wide_ids.data(), {slots}) : tensor(ids.data(), {slots});
      args.topk_weights = tensor(scores.data(), {slots});
      args.token_offsets =
          wide ? tensor(wide_offsets.data(), {kTokens + 1}) : tensor(offsets.data(), {kTokens + 1});
    } else {
      args.topk_ids =
          wide ? tensor(wide_ids.data(), {kTokens, k}) : tensor(ids.data(), {kTokens, k});
      args.topk_weights = tensor(scores.data(), {kTokens, k});
    }
    auto const workspace = workspace_bytes(context_, desc_, Pass::route);
    if (!workspace.ok()) return;
    args.workspace = buffer("workspace", workspace.value());
    if (!out.add(route(context_, desc_, args))) return;
    out.add(scores);
    out.add(ids.data(), ids.size() * sizeof(ids[0]));
    out.add(wide_ids.data(), wide_ids.size() * sizeof(wide_ids[0]));
  }

  Context const& context_;
  MoeDesc desc_;
  Extras extras_;
  RowGrouping grouping_;
  std::map<std::string, Floats> floats_;
  std::map<std::string, std::vector<std::int32_t>> integers_;
  std::vector<std::uint8_t> mask_;
};

}  // namespace tessera::api_test

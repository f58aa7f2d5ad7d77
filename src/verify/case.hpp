// SPDX-License-Identifier: Apache-2.0
// A layer with its data: what `tessera verify`, `bench` and the tests run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/reference/layer.hpp"
#include "tessera/moe.hpp"

namespace tessera::verify {

/// Says what the routing of the data looks like.
enum class RoutingPattern {
  random,
  balanced,        ///< every expert gets the same number of slots, give or take one
  zipf,            ///< expert e is as popular as 1 / (e+1)^parameter
  shuffled_zipf,   ///< the same popularities, which stand in no order
  one_expert,      ///< every token's first choice is expert 0, the rest spread round robin
  one_token_each,  ///< every expert gets one slot; further slots are sentinels
  empty,           ///< a fraction `parameter` of the experts gets nothing
  file,            ///< ids and weights as given
};

/// True where the pattern is a popularity of every expert.
constexpr bool has_popularities(RoutingPattern pattern) noexcept {
  return pattern == RoutingPattern::zipf || pattern == RoutingPattern::shuffled_zipf;
}

struct RoutingSpec {
  RoutingPattern pattern = RoutingPattern::random;
  double parameter = 0;
  std::string path{};                         ///< file: where it came from
  std::vector<std::int64_t> topk_ids{};       ///< file: by slot
  std::vector<float> topk_weights{};          ///< file: by slot
  std::vector<std::int64_t> token_offsets{};  ///< file: [T+1] where experts per token vary
};

/// Everything that fixes a case; equal cases give equal data on every machine.
struct LayerCase {
  MoeDesc desc;  ///< shape.slots is filled in by make_data() where experts per token vary
  RoutingSpec routing;
  double sentinel_fraction = 0;  ///< of the slots, RouterKind::given
  double padding_fraction = 0;   ///< of the tokens, where a router takes top_k experts for each
  bool repeat_experts = false;   ///< draw a token's experts with replacement, RouterKind::given
  bool router_bias = false;
  bool aux_dlogits = false;  ///< another loss's gradient is added to dlogits
  GradientMode gradient_mode = GradientMode::write;
  std::uint64_t seed = 0;
};

/// Inputs as fp32 values that were rounded to the storage type, and the gradient buffers' first content.
struct LayerData {
  MoeDesc desc;
  GradientMode gradient_mode = GradientMode::write;
  std::vector<float> x, d_o;
  std::vector<std::int64_t> topk_ids;  ///< [P] by slot; empty where a router chooses
  std::vector<float> scores;           ///< [P] by slot; empty with a router
  std::vector<std::int64_t> token_offsets;
  std::vector<std::uint8_t> token_mask;  ///< [T], 0 for padding; or empty
  std::vector<float> w_router, b_router;
  std::vector<float> aux_dlogits;     ///< [T,E] or empty
  std::vector<float> selection_bias;  ///< [E]; routers with a p of their own, else empty
  std::vector<float> w_up, w_gate, w_down, b_up, b_gate, b_down;
};

/// Throws std::invalid_argument with one line where desc and routing contradict each other.
void check_routing(LayerCase const& layer_case);

/// Draws the data. Throws as check_routing() does.
LayerData make_data(LayerCase const& layer_case);

/// Draws x, dO and the routing of `data` anew for layer_case.seed; weights stay. `data` came from make_data() with a
/// case that differs in nothing else.
void redraw_tokens(LayerCase const& layer_case, LayerData& data);

/// Slot ids of the case's routing pattern, sentinels included (also what a router's data is made to prefer).
struct SlotList {
  std::vector<std::int64_t> topk_ids, token_offsets;
};
SlotList make_slots(LayerCase const& layer_case);
/// [E]: how many experts are more popular than each; where popularities stand in order, its number.
std::vector<std::int64_t> popularity_ranks(LayerCase const& layer_case);

/// The value that a gradient buffer called `name` holds at `index` before an accumulating backward.
float initial_gradient(std::string const& name, std::int64_t index) noexcept;

/// True if `token` is padding.
inline bool is_padding(LayerData const& data, std::int64_t token) {
  return !data.token_mask.empty() && data.token_mask[static_cast<std::size_t>(token)] == 0;
}

/// True if a router chooses experts (or experts tokens), rather than the caller.
inline bool router_chooses(MoeDesc const& desc) {
  return desc.router.kind != RouterKind::given && !desc.router.replay;
}

/// Holds what a router chose.
struct RouterChoice {
  std::vector<std::int64_t> topk_ids;       ///< [P] by slot
  std::vector<std::int64_t> token_offsets;  ///< [T+1] where experts per token vary
  std::vector<std::int64_t> unrounded_ids;  ///< [T,K] with token rounding
};

/// The data as the reference reads it; `choice` is what a router chose, else empty.
reference::Inputs reference_inputs(LayerData const& data, RouterChoice choice = {});

/// A router's choice on exact logits, or nothing where ids are given.
RouterChoice exact_choice(LayerData const& data);

}  // namespace tessera::verify

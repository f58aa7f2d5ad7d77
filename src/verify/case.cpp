// SPDX-License-Identifier: Apache-2.0
// x, dO ~ N(0,1); weights / sqrt(fan-in), their tails enlarged where a lost tail would not show; biases of order 1;
// given scores in [0.05, 1], some of them negative.
#include "verify/case.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "tessera/router.hpp"
#include "verify/random_source.hpp"
#include "verify/storage.hpp"

namespace tessera::verify {
namespace {

enum Stream : std::uint64_t {
  kX = 1,
  kDO,
  kGate,
  kUp,
  kDown,
  kBGate,
  kBUp,
  kBDown,
  kScores,
  kRouter,
  kBRouter,
  kSelectionBias,
  kAuxDlogits,
  kPadding
};

std::vector<float> normals(LayerCase const& layer_case, Stream stream, std::int64_t count,
                           double scale, DType dtype) {
  RandomSource random(layer_case.seed, stream);
  std::vector<float> values(count);
  for (float& value : values) value = round_to(dtype, static_cast<float>(random.normal() * scale));
  return values;
}
std::vector<float> normals(LayerCase const& layer_case, Stream stream, std::int64_t count,
                           double scale = 1) {
  return normals(layer_case, stream, count, scale, layer_case.desc.dtype);
}

/// Bits that an fp32 router beside bf16 has beyond those of bf16: lost bits show, and sums stay exact.
constexpr int kRouterBits = 3;
int router_bits(MoeDesc const& desc) {
  return desc.router_storage() == desc.dtype ? 0 : kRouterBits;
}

/// Returns how much larger the last row and column of each weight matrix are. In 16 bits one lost term of a long sum
/// would hide among the roundings; fp32's tolerance sees it anyway, and one dominant term would make it depend on luck.
double tail_scale(DType dtype) { return dtype == DType::fp32 ? 1 : 8; }

/// [experts, rows, columns] for a reduction over columns; the last column stands out, and the last row where asked for.
std::vector<double> matrices(LayerCase const& layer_case, Stream stream, std::int64_t rows,
                             std::int64_t columns, bool last_row_too) {
  auto const values = normals(layer_case, stream, layer_case.desc.shape.experts * rows * columns,
                              1 / std::sqrt(static_cast<double>(columns)));
  double const tail = tail_scale(layer_case.desc.dtype);
  std::vector<double> out(values.begin(), values.end());
  for (std::size_t i = 0; i < out.size(); ++i) {
    auto const at = static_cast<std::int64_t>(i);
    bool const last_row = at / columns % rows == rows - 1;
    if (at % columns == columns - 1 || (last_row && last_row_too)) out[i] *= tail;
  }
  return out;
}

std::vector<double> widened(std::vector<float> const& values) {
  return {values.begin(), values.end()};
}
std::vector<float> narrowed(std::vector<double> const& values) {
  return {values.begin(), values.end()};
}

/// Rounds to multiples of `step`, and to the storage type.
void snap(DType dtype, double step, std::vector<float>& values) {
  for (float& value : values) value = static_cast<float>(std::nearbyint(value / step) * step);
  round_all(dtype, values);
}

void make_weights(LayerCase const& layer_case, LayerData& data) {
  MoeDesc const& desc = data.desc;
  std::int64_t const d = desc.shape.hidden, n = desc.shape.intermediate;
  std::int64_t const experts = desc.shape.experts;
  bool const gated = desc.activation.gated();
  reference::LogicalWeights logical;
  if (gated) logical.gate = matrices(layer_case, kGate, n, d, false);
  logical.up = matrices(layer_case, kUp, n, d, false);
  logical.down = matrices(layer_case, kDown, d, n, true);
  if (desc.bias) {
    if (gated) logical.b_gate = widened(normals(layer_case, kBGate, experts * n));
    logical.b_up = widened(normals(layer_case, kBUp, experts * n));
    logical.b_down = widened(normals(layer_case, kBDown, experts * d));
  }
  if (desc.router.kind != RouterKind::given) {
    double const width = std::sqrt(static_cast<double>(d));
    data.w_router = normals(layer_case, kRouter, experts * d, 1 / width, desc.router_storage());
    snap(desc.router_storage(), std::exp2(-6 - router_bits(desc) - std::ceil(std::log2(width))),
         data.w_router);
  }
  auto const stored = reference::stored_weights(desc, logical);
  data.w_up = narrowed(stored.w_up);
  data.w_gate = narrowed(stored.w_gate);
  data.w_down = narrowed(stored.w_down);
  data.b_up = narrowed(stored.b_up);
  data.b_gate = narrowed(stored.b_gate);
  data.b_down = narrowed(stored.b_down);
}

void make_given_routing(LayerCase const& layer_case, SlotList slots, LayerData& data) {
  data.topk_ids = std::move(slots.topk_ids);
  if (data.desc.shape.variable_experts) data.token_offsets = std::move(slots.token_offsets);
  if (data.desc.router.replay) return;
  if (layer_case.routing.pattern == RoutingPattern::file) {
    data.scores = layer_case.routing.topk_weights;
    return;
  }
  RandomSource random(layer_case.seed, kScores);
  for (std::int64_t const id : data.topk_ids) {
    auto score = static_cast<float>(0.05 + 0.95 * random.uniform());
    if (random.chance(0.125)) score = -score;
    bool const sentinel = id < 0 || id >= data.desc.shape.experts;
    bool const nan = random.chance(0.25);  // a sentinel's score may be anything
    data.scores.push_back(sentinel && nan ? std::numeric_limits<float>::quiet_NaN() : score);
  }
}

/// Every fourth token is the one before it: experts that rank tokens meet ties.
void repeat_tokens(LayerData& data) {
  std::int64_t const d = data.desc.shape.hidden;
  for (std::int64_t t = 3; t < data.desc.shape.tokens; t += 4) {
    std::copy_n(&data.x[(t - 1) * d], d, &data.x[t * d]);
  }
}

/// Makes tokens prefer the pattern's experts. Logits are N(0,1), but experts that get nothing have a bias of -16,
/// popularities enter as their logarithms, and elsewhere x_t gains 6 * w_router[e] for each expert that t should
/// choose (exact for wide enough d). x, w_router and b_router stand on coarse grids, so that logits are exact in
/// fp32: their rounding would be one number that decides a whole row's error.
void make_routed_tokens(LayerCase const& layer_case, SlotList const& slots, LayerData& data) {
  MoeShape const& s = data.desc.shape;
  RoutingSpec const& routing = layer_case.routing;
  bool const by_bias =
      routing.pattern == RoutingPattern::empty || has_popularities(routing.pattern);
  if (layer_case.router_bias || by_bias) {
    data.b_router = normals(layer_case, kBRouter, s.experts, layer_case.router_bias ? 1 : 0,
                            data.desc.router_storage());
  }
  if (has_popularities(routing.pattern)) {
    std::vector<std::int64_t> const ranks = popularity_ranks(layer_case);
    for (std::int64_t e = 0; e < s.experts; ++e) {
      data.b_router[e] -=
          static_cast<float>(routing.parameter * std::log(static_cast<double>(ranks[e] + 1)));
    }
  } else if (routing.pattern == RoutingPattern::empty) {
    std::vector<char> used(s.experts, 0);
    for (std::int64_t const expert : slots.topk_ids) {
      if (expert >= 0 && expert < s.experts) used[expert] = 1;
    }
    for (std::int64_t e = 0; e < s.experts; ++e) data.b_router[e] -= used[e] != 0 ? 0 : 16;
  } else if (routing.pattern != RoutingPattern::random && !data.desc.router.replay) {
    for (std::int64_t j = 0; j < s.tokens * s.top_k; ++j) {
      for (std::int64_t c = 0; c < s.hidden; ++c) {
        data.x[j / s.top_k * s.hidden + c] += 6 * data.w_router[slots.topk_ids[j] * s.hidden + c];
      }
    }
  }
  snap(data.desc.dtype, 1.0 / 32, data.x);
  if (data.desc.rounds_tokens() || data.desc.experts_choose()) repeat_tokens(data);
  snap(data.desc.router_storage(), std::exp2(-5 - router_bits(data.desc)), data.b_router);
  RouterKind const kind = data.desc.router.kind;
  if (layer_case.aux_dlogits) {
    data.aux_dlogits = normals(layer_case, kAuxDlogits, s.tokens * s.experts, 0.1);
  }
  if (data.desc.router.replay) return;
  if (kind == RouterKind::sigmoid_bias || kind == RouterKind::group_limited ||
      kind == RouterKind::sqrtsoftplus) {
    data.selection_bias = normals(layer_case, kSelectionBias, s.experts, 0.05);
  }
}

}  // namespace

void check_routing(LayerCase const& layer_case) {
  MoeShape const& s = layer_case.desc.shape;
  bool const has_logits = layer_case.desc.router.kind != RouterKind::given;
  if (!has_logits && (layer_case.aux_dlogits || layer_case.router_bias)) {
    throw std::invalid_argument(
        "aux-dlogits, router-bias: with router given there are no logits; use another router");
  }
  bool const given = !router_chooses(layer_case.desc);
  MoeDesc const& desc = layer_case.desc;
  bool const top_k = !given && !desc.rounds_tokens() && !desc.experts_choose();
  if (layer_case.padding_fraction > 0 && !top_k) {
    throw std::invalid_argument(
        "padding: for routers that take top_k experts for each token, without token rounding; use "
        "such a router");
  }
  RoutingPattern const pattern = layer_case.routing.pattern;
  if (given) return;
  if (pattern == RoutingPattern::file) {
    throw std::invalid_argument(
        "routing file: ids and weights from a file need router given or replay");
  }
  if (layer_case.sentinel_fraction > 0 || layer_case.repeat_experts) {
    throw std::invalid_argument(
        "sentinels, repeat-experts: a router makes neither; use router given or replay");
  }
  if (layer_case.desc.ids_dtype != DType::int32) {
    throw std::invalid_argument(
        "ids-dtype: of given ids, and a router makes its own; use router given or replay");
  }
  if (pattern == RoutingPattern::one_token_each && s.tokens * s.top_k > s.experts) {
    throw std::invalid_argument(
        "routing one-token-each: tokens*top_k=" + std::to_string(s.tokens * s.top_k) +
        " is above experts=" + std::to_string(s.experts) + "; use router given or fewer tokens");
  }
}

LayerData make_data(LayerCase const& layer_case) {
  check_routing(layer_case);
  LayerData data;
  data.desc = layer_case.desc;
  data.gradient_mode = layer_case.gradient_mode;
  make_weights(layer_case, data);
  redraw_tokens(layer_case, data);
  return data;
}

void redraw_tokens(LayerCase const& layer_case, LayerData& data) {
  SlotList slots = make_slots(layer_case);
  MoeShape& s = data.desc.shape;
  if (s.variable_experts) s.slots = static_cast<std::int64_t>(slots.topk_ids.size());
  data.x = normals(layer_case, kX, s.tokens * s.hidden);
  data.d_o = normals(layer_case, kDO, s.tokens * s.hidden);
  if (data.desc.router.kind != RouterKind::given) make_routed_tokens(layer_case, slots, data);
  data.token_mask.clear();
  if (layer_case.padding_fraction > 0) {
    RandomSource random(layer_case.seed, kPadding);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      bool const padding = random.chance(layer_case.padding_fraction);
      // Any value but 0 means a real token.
      data.token_mask.push_back(padding ? 0 : static_cast<std::uint8_t>(1 + t % 255));
    }
  }
  data.scores.clear();
  if (!router_chooses(data.desc)) make_given_routing(layer_case, std::move(slots), data);
}

float initial_gradient(std::string const& name, std::int64_t index) noexcept {
  RandomSource random(static_cast<std::uint64_t>(index), name.size());
  return static_cast<float>(random.normal());
}

reference::Inputs reference_inputs(LayerData const& data, RouterChoice choice) {
  reference::Inputs inputs;
  inputs.desc = data.desc;
  inputs.desc.router = resolved(data.desc.router);
  inputs.x = widened(data.x);
  bool const chosen = router_chooses(data.desc);
  inputs.topk_ids = chosen ? std::move(choice.topk_ids) : data.topk_ids;
  inputs.token_offsets = chosen ? std::move(choice.token_offsets) : data.token_offsets;
  inputs.unrounded_ids = std::move(choice.unrounded_ids);
  inputs.scores = widened(data.scores);
  inputs.w_router = widened(data.w_router);
  inputs.b_router = widened(data.b_router);
  inputs.selection_bias = widened(data.selection_bias);
  inputs.aux_dlogits = widened(data.aux_dlogits);
  for (std::size_t i = 0; i < inputs.aux_dlogits.size(); ++i) {
    // Those of padding are not read.
    if (is_padding(data, static_cast<std::int64_t>(i) / data.desc.shape.experts)) {
      inputs.aux_dlogits[i] = 0;
    }
  }
  inputs.weights = {widened(data.w_up), widened(data.w_gate), widened(data.w_down),
                    widened(data.b_up), widened(data.b_gate), widened(data.b_down)};
  return inputs;
}

RouterChoice exact_choice(LayerData const& data) {
  MoeDesc const& desc = data.desc;
  if (!router_chooses(desc)) return {};
  reference::Inputs inputs = reference_inputs(data);
  auto const logits = reference::router_logits(inputs);
  std::vector<std::int64_t> topk;
  if (!desc.experts_choose()) {
    topk = reference::select_experts(desc, reference::router_keys(inputs, logits));
  }
  if (!desc.experts_vary()) return {topk, {}, {}};
  inputs.unrounded_ids = topk;
  auto slots = reference::choose_tokens(desc, reference::pair_scores(inputs, logits));
  return {std::move(slots.topk_ids), std::move(slots.token_offsets), std::move(topk)};
}

}  // namespace tessera::verify

// SPDX-License-Identifier: Apache-2.0
// Six dimensions, one table. Greedy pairwise: of several draws, take the one with the most new pairs.
#include "verify/random_cases.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "tessera/moe.hpp"
#include "tessera/router.hpp"
#include "verify/names.hpp"
#include "verify/random_source.hpp"

namespace tessera::verify {
namespace {

enum Dimension { kRouter, kRound, kActivation, kLayout, kDType, kRouting, kDimensions };

/// Index of the chosen value in each dimension's list.
using Choice = std::array<int, kDimensions>;

constexpr RoutingPattern kPatterns[] = {RoutingPattern::random,     RoutingPattern::balanced,
                                        RoutingPattern::zipf,       RoutingPattern::shuffled_zipf,
                                        RoutingPattern::one_expert, RoutingPattern::one_token_each,
                                        RoutingPattern::empty};

constexpr std::array<int, kDimensions> kSizes = {
    std::size(kRouterNames), std::size(kRoundingNames), std::size(kActivationNames),
    std::size(kLayoutNames), std::size(kDTypeNames),    std::size(kPatterns)};

constexpr int kLayoutBlock = 4;

MoeDesc desc_of(Choice const& choice) {
  MoeDesc desc;
  desc.shape = {.tokens = 8, .hidden = 8, .intermediate = 8, .experts = 8, .top_k = 2};
  desc.router.kind = kRouterNames[choice[kRouter]].value;
  desc.router.round = kRoundingNames[choice[kRound]].value;
  desc.activation.kind = kActivationNames[choice[kActivation]].value;
  desc.layout = kLayoutNames[choice[kLayout]].value;
  if (desc.layout.order == GateUpOrder::blocked) desc.layout.block = kLayoutBlock;
  desc.dtype = kDTypeNames[choice[kDType]].value;
  return desc;
}

/// Holds what the library serves, remembered: one question per combination.
class Support {
 public:
  explicit Support(Context const& context) : context_(context) {}
  bool serves(Choice choice) {
    choice[kRouting] = 0;  // a matter of data
    auto const [place, added] = known_.try_emplace(choice, false);
    if (added) {
      place->second = workspace_bytes(context_, desc_of(choice), Pass::forward).ok();
    }
    return place->second;
  }

 private:
  Context const& context_;
  std::map<Choice, bool> known_;
};

using Pair = std::tuple<int, int, int, int>;  // dimension, value, later dimension, value

std::vector<Pair> pairs_of(Choice const& choice) {
  std::vector<Pair> pairs;
  for (int a = 0; a < kDimensions; ++a) {
    for (int b = a + 1; b < kDimensions; ++b) pairs.emplace_back(a, choice[a], b, choice[b]);
  }
  return pairs;
}

/// Every combination that is served, in ascending order, and every pair that occurs in one.
struct Space {
  std::vector<Choice> choices, with_given_ids, with_replay, with_padding, with_expert_choice;
  std::set<Pair> pairs;
  bool column_chunks = false;
};

Space served_space(Context const& context) {
  Support support(context);
  Space space;
  Choice choice{};
  // Counts like an odometer.
  for (bool more = true; more;) {
    if (support.serves(choice)) {
      space.choices.push_back(choice);
      if (kRouterNames[choice[kRouter]].value == RouterKind::given) {
        space.with_given_ids.push_back(choice);
      } else if (kRoundingNames[choice[kRound]].value == Rounding::none) {
        space.with_replay.push_back(choice);
        (desc_of(choice).experts_choose() ? space.with_expert_choice : space.with_padding)
            .push_back(choice);
      }
      for (Pair const& pair : pairs_of(choice)) space.pairs.insert(pair);
    }
    more = false;
    for (int dimension = kDimensions - 1; dimension >= 0 && !more; --dimension) {
      more = ++choice[dimension] < kSizes[dimension];
      if (!more) choice[dimension] = 0;
    }
  }
  MoeDesc const first = desc_of(space.choices.empty() ? Choice{} : space.choices.front());
  MoeDesc replay = first;
  replay.router = {.kind = RouterKind::topk_softmax, .replay = true};
  if (!workspace_bytes(context, replay, Pass::forward).ok()) space.with_replay.clear();
  MoeDesc chunked = first;
  chunked.column_chunk = 1;
  space.column_chunks = workspace_bytes(context, chunked, Pass::forward).ok();
  return space;
}

/// Says what a case is made to contain; they take turns over the small cases.
enum class Feature {
  none,
  no_tokens,
  one_token,
  top_1,
  all_experts,
  sentinels,
  only_sentinels,
  variable_experts,
  int64_ids,
  repeated_experts,
  one_expert_in_all,
  odd_sizes,
  int64_variable_sentinels,
  replay,
  padding,
  expert_choice,
  kCount,
};

bool needs_given_ids(Feature feature) {
  switch (feature) {
    case Feature::sentinels:
    case Feature::only_sentinels:
    case Feature::variable_experts:
    case Feature::int64_ids:
    case Feature::repeated_experts:
    case Feature::int64_variable_sentinels:
      return true;
    default:
      return false;
  }
}

/// The draw with the most uncovered pairs among a few that suit the feature; every other draw starts from an uncovered
/// pair, lest the few combinations with rare values (router given, expert choice) be missed.
Choice draw_choice(Space const& space, std::set<Pair> const& uncovered, Feature feature,
                   RandomSource& random) {
  constexpr int kDraws = 60;
  auto const& choices = needs_given_ids(feature)            ? space.with_given_ids
                        : feature == Feature::replay        ? space.with_replay
                        : feature == Feature::padding       ? space.with_padding
                        : feature == Feature::expert_choice ? space.with_expert_choice
                                                            : space.choices;
  Choice best = choices.front();
  std::int64_t most = -1;
  for (int draw = 0; draw < kDraws; ++draw) {
    Choice choice = choices[random.below(std::ssize(choices))];
    if (draw % 2 == 1 && !uncovered.empty()) {
      auto const pair = std::next(uncovered.begin(), random.below(std::ssize(uncovered)));
      auto const [a, a_value, b, b_value] = *pair;
      choice[a] = a_value;
      choice[b] = b_value;
      if (!std::binary_search(choices.begin(), choices.end(), choice)) continue;
    }
    std::int64_t fresh = 0;
    for (Pair const& pair : pairs_of(choice)) fresh += uncovered.contains(pair) ? 1 : 0;
    if (fresh > most) {
      most = fresh;
      best = choice;
    }
  }
  return best;
}

std::int64_t draw_width(RandomSource& random, std::int64_t most) {
  if (random.chance(0.25)) return std::max<std::int64_t>(64, most / 64 * 64);
  // Rows of whole 16-byte vectors, as fast kernels need them, or any.
  return random.chance(0.35) ? 8 * random.between(1, most / 8) : random.between(1, most);
}

MoeShape draw_shape(Feature feature, bool large, RandomSource& random) {
  MoeShape s;
  s.experts = large ? random.between(32, 96) : random.between(1, 24);
  s.tokens = large ? random.between(512, 1024) : random.between(2, 160);
  s.hidden = draw_width(random, large ? 128 : 192);
  s.intermediate = draw_width(random, large ? 96 : 192);
  s.top_k = random.between(1, std::min<std::int64_t>(s.experts, large ? 6 : 8));
  switch (feature) {
    case Feature::no_tokens:
      s.tokens = 0;
      break;
    case Feature::one_token:
      s.tokens = 1;
      break;
    case Feature::top_1:
      s.top_k = 1;
      break;
    case Feature::one_expert_in_all:
      s.experts = s.top_k = 1;
      break;
    case Feature::all_experts:
      s.experts = random.between(2, 8);
      s.top_k = s.experts;
      break;
    case Feature::odd_sizes:
      s.hidden = 64 + random.between(1, 63);
      s.intermediate = 64 + random.between(1, 63);
      break;
    default:
      break;
  }
  return s;
}

/// Whole 16-byte vectors in d, n and E at once: what the fast kernels of a GPU ask for.
void widen_to_vectors(MoeShape& s) {
  auto const whole = [](std::int64_t size) { return (size + 7) / 8 * 8; };
  s.hidden = whole(s.hidden);
  s.intermediate = whole(s.intermediate);
  s.experts = whole(s.experts);
}

/// Tokens and sizes that the routing pattern and the layout of the choice need.
void fit_shape(LayerCase& layer_case, Feature feature) {
  MoeShape& s = layer_case.desc.shape;
  if (layer_case.routing.pattern == RoutingPattern::one_token_each &&
      router_chooses(layer_case.desc)) {
    s.top_k = std::min(s.top_k, std::max<std::int64_t>(1, s.experts / 2));
    s.tokens = std::min(s.tokens, s.experts / s.top_k);
    layer_case.desc.router.capacity = std::min(layer_case.desc.router.capacity, s.tokens);
  }
  if (layer_case.desc.layout.order == GateUpOrder::blocked) {
    s.intermediate = (s.intermediate + kLayoutBlock - 1) / kLayoutBlock * kLayoutBlock;
  }
  s.variable_experts |=
      feature == Feature::variable_experts || feature == Feature::int64_variable_sentinels;
}

/// An fp32 router beside other experts; tiles that some experts' counts exceed and others do not; replayed ids; expert
/// choice of other capacities; other losses of the logits.
void draw_router(Feature feature, bool large, RandomSource& random, LayerCase& layer_case) {
  Router& router = layer_case.desc.router;
  MoeShape& shape = layer_case.desc.shape;
  bool const routed = router.kind != RouterKind::given, rounded = router.round != Rounding::none;
  if (routed && layer_case.desc.dtype != DType::fp32 && random.chance(0.4)) {
    layer_case.desc.router_dtype = DType::fp32;
  }
  if (rounded) {
    constexpr std::int32_t kTiles[] = {1, 2, 3, 4, 8, 16, 32, 128};
    router.tile = kTiles[random.below(large ? 7 : 8)];
  }
  if (router.kind == RouterKind::expert_choice && feature != Feature::replay &&
      random.chance(0.3)) {
    router.capacity = random.between(shape.tokens > 0 ? 1 : 0, shape.tokens / 2 + shape.tokens % 2);
  }
  if (feature == Feature::replay) {
    router.replay = true;
    layer_case.repeat_experts = random.chance(0.3);
    shape.variable_experts = random.chance(0.3);
  }
  layer_case.aux_dlogits = routed && random.chance(0.2);
}

/// Routers that read normalize_scores.
bool divides_scores(RouterKind kind) {
  return kind == RouterKind::softmax_topk || kind == RouterKind::sigmoid_bias ||
         kind == RouterKind::group_limited || kind == RouterKind::sqrtsoftplus;
}

LayerCase draw_case(Choice const& choice, Feature feature, bool large, RandomSource& random) {
  LayerCase out;
  out.desc = desc_of(choice);
  out.desc.shape = draw_shape(feature, large, random);
  out.desc.bias = random.chance(0.5);
  out.routing.pattern = kPatterns[choice[kRouting]];
  if (has_popularities(out.routing.pattern)) {
    out.routing.parameter = static_cast<double>(random.between(1, 4)) / 2;
  }
  if (out.routing.pattern == RoutingPattern::empty) {
    out.routing.parameter = static_cast<double>(random.between(1, 3)) / 4;
  }
  out.gradient_mode = random.chance(0.4) ? GradientMode::accumulate : GradientMode::write;
  if (out.desc.activation.kind == ActivationKind::clamped_swiglu && random.chance(0.5)) {
    out.desc.activation = {ActivationKind::clamped_swiglu, 1.0f, 2.0f, 0.0f};
  }
  bool const given = out.desc.router.kind == RouterKind::given;
  draw_router(feature, large, random, out);
  if (!given && random.chance(0.3)) out.desc.router.route_scale = 2.5f;
  if (!given) out.router_bias = random.chance(0.5);
  out.desc.router.normalize_scores =
      !given && random.chance(0.5) && divides_scores(out.desc.router.kind);
  if (feature == Feature::sentinels || feature == Feature::int64_variable_sentinels ||
      (!router_chooses(out.desc) && random.chance(0.2))) {
    out.sentinel_fraction = 0.3;
  }
  if (feature == Feature::only_sentinels) out.sentinel_fraction = 1;
  if (feature == Feature::padding) out.padding_fraction = 0.3;
  if (random.chance(0.2)) out.desc.save = SavePolicy::x;
  out.repeat_experts |= feature == Feature::repeated_experts;
  bool const wide = feature == Feature::int64_ids || feature == Feature::int64_variable_sentinels ||
                    random.chance(0.25);
  if (wide && !router_chooses(out.desc)) {
    out.desc.ids_dtype = DType::int64;
  }
  fit_shape(out, feature);
  if (random.chance(0.3)) out.desc.column_chunk = random.between(1, out.desc.shape.hidden);
  out.seed = random.bits() >> 33;  // short enough to type
  if (draws(out.desc.router)) out.desc.router.seed = out.seed;
  return out;
}

/// Every tenth case, of the small ones, quantises its operands.
bool is_low_precision(std::int64_t i) { return i % 10 == 6; }

/// Blocks of 128 or 32, by turns, in bf16; on a GPU, which knows one of these, what its kernels of codes serve
/// (cuda/layer/support.cpp).
void make_low_precision(std::int64_t i, bool on_gpu, Precision precision, LayerCase& layer_case) {
  MoeDesc& desc = layer_case.desc;
  desc.precision = precision;
  desc.pow2_scales = i / 10 % 3 == 2 && desc.precision == Precision::fp8 && !on_gpu;
  auto const widen = [](std::int64_t& size, std::int64_t multiple) {
    size = (size + multiple - 1) / multiple * multiple;
  };
  widen(desc.shape.hidden, on_gpu ? 256 : desc.scale_block());
  widen(desc.shape.intermediate, on_gpu ? 256 : desc.scale_block());
  desc.dtype = DType::bf16;
  desc.column_chunk = 0;
  if (!on_gpu) return;
  desc.activation = {};
  desc.bias = false;
  bool const turned = desc.layout.orientation == WeightOrientation::transposed;
  bool const in_turns =
      desc.layout.order == GateUpOrder::interleaved || desc.layout.order == GateUpOrder::blocked;
  if (turned && in_turns) desc.layout = {};
  if (desc.precision == Precision::mxfp8 && desc.layout.order == GateUpOrder::blocked) {
    desc.layout.block = 32;
  }
}

/// Those that a case is drawn in, the first that is served.
std::vector<Precision> low_precisions(std::int64_t i, bool on_gpu,
                                      std::optional<Precision> precision) {
  if (precision.has_value()) return {*precision};
  if (on_gpu) return {Precision::fp8, Precision::mxfp8};
  return {i / 10 % 3 == 1 ? Precision::mxfp8 : Precision::fp8};
}

}  // namespace

std::vector<RandomCase> random_cases(Context const& context, std::int64_t count, std::uint64_t seed,
                                     std::optional<Precision> precision) {
  Space const space = served_space(context);
  bool const on_gpu = context.device().kind == DeviceKind::cuda;
  std::set<Pair> uncovered = space.pairs;
  RandomSource random(seed, 1);
  std::vector<RandomCase> cases;
  if (space.choices.empty()) return cases;
  std::int64_t num_small = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    bool const large = i % 5 == 4;
    Feature feature =
        large ? Feature::none
              : static_cast<Feature>(num_small++ % static_cast<std::int64_t>(Feature::kCount));
    if (feature == Feature::replay && space.with_replay.empty()) feature = Feature::none;
    if (feature == Feature::padding && space.with_padding.empty()) feature = Feature::none;
    if (feature == Feature::expert_choice && space.with_expert_choice.empty()) {
      feature = Feature::none;
    }
    Choice const choice = draw_choice(space, uncovered, feature, random);
    LayerCase layer_case = draw_case(choice, feature, large, random);
    bool const any_shape = feature != Feature::odd_sizes && feature != Feature::all_experts &&
                           feature != Feature::one_expert_in_all;
    if (on_gpu && any_shape && layer_case.seed % 3 != 0) {
      widen_to_vectors(layer_case.desc.shape);
    }
    if (!space.column_chunks) layer_case.desc.column_chunk = 0;
    // One token per expert and a router leave no room for many tokens.
    bool const still_large = large && layer_case.desc.shape.tokens >= 512;
    if (large && !still_large) layer_case.routing = {}, layer_case.desc.shape.tokens = 512;
    if (precision.has_value() || is_low_precision(i)) {
      LayerCase const native = layer_case;
      for (Precision const drawn : low_precisions(i, on_gpu, precision)) {
        LayerCase quantised = native;
        make_low_precision(i, on_gpu, drawn, quantised);
        // A GPU without kernels for codes has the case in its own precision.
        bool const served = workspace_bytes(context, quantised.desc, Pass::forward).ok();
        if (!precision.has_value() && !served) continue;
        layer_case = quantised;
        break;
      }
    }
    cases.push_back({layer_case, large});
    if (layer_case.desc.quantises()) continue;  // covers no pair
    Choice drawn = choice;
    if (large && !still_large) drawn[kRouting] = 0;
    for (Pair const& pair : pairs_of(drawn)) uncovered.erase(pair);
  }
  return cases;
}

PairCoverage pair_coverage(Context const& context, std::vector<RandomCase> const& cases) {
  Space const space = served_space(context);
  auto const index_in = [](auto const& names, auto const& value) {
    int index = 0;
    while (!(names[index].value == value)) ++index;
    return index;
  };
  std::set<Pair> seen;
  for (RandomCase const& random_case : cases) {
    if (random_case.layer_case.desc.quantises()) continue;
    MoeDesc const& desc = random_case.layer_case.desc;
    WeightLayout layout = desc.layout;
    layout.block = 0;
    auto const pattern = std::find(std::begin(kPatterns), std::end(kPatterns),
                                   random_case.layer_case.routing.pattern);
    Choice const choice = {index_in(kRouterNames, desc.router.kind),
                           index_in(kRoundingNames, desc.router.round),
                           index_in(kActivationNames, desc.activation.kind),
                           index_in(kLayoutNames, layout),
                           index_in(kDTypeNames, desc.dtype),
                           static_cast<int>(pattern - std::begin(kPatterns))};
    for (Pair const& pair : pairs_of(choice)) seen.insert(pair);
  }
  return {std::ssize(space.pairs), std::ssize(seen)};
}

}  // namespace tessera::verify

// SPDX-License-Identifier: Apache-2.0
// Slot ids for each RoutingPattern. Experts of a token differ unless repeats are asked for or unavoidable.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "verify/case.hpp"
#include "verify/random_source.hpp"

namespace tessera::verify {
namespace {

enum Stream : std::uint64_t { kCounts = 101, kExperts = 102, kSentinels = 103, kRanks = 104 };

/// Experts with a popularity each, drawn one by one.
class ExpertDraw {
 public:
  ExpertDraw(LayerCase const& layer_case, RandomSource& random)
      : random_(random), repeat_(layer_case.repeat_experts) {
    std::int64_t const experts = layer_case.desc.shape.experts;
    weight_.assign(experts, 1);
    if (has_popularities(layer_case.routing.pattern)) {
      std::vector<std::int64_t> const ranks = popularity_ranks(layer_case);
      for (std::int64_t e = 0; e < experts; ++e) {
        weight_[e] = std::pow(static_cast<double>(ranks[e] + 1), -layer_case.routing.parameter);
      }
    }
    if (layer_case.routing.pattern == RoutingPattern::empty) remove_experts(layer_case);
    uniform_ = !has_popularities(layer_case.routing.pattern);
    for (std::int64_t e = 0; e < experts; ++e) {
      if (weight_[e] > 0) alive_.push_back(e);
    }
  }

  /// Appends `count` experts of one token.
  void draw(std::int64_t count, std::vector<std::int64_t>& ids) {
    std::size_t const first = ids.size();
    bool const distinct = !repeat_ && count <= static_cast<std::int64_t>(alive_.size());
    for (std::int64_t k = 0; k < count; ++k) {
      std::int64_t expert = draw_one();
      while (distinct && std::find(ids.begin() + first, ids.end(), expert) != ids.end()) {
        expert = next_alive(expert);
      }
      ids.push_back(expert);
    }
  }

 private:
  void remove_experts(LayerCase const& layer_case) {
    auto const experts = static_cast<std::int64_t>(weight_.size());
    auto count = static_cast<std::int64_t>(
        std::lround(layer_case.routing.parameter * static_cast<double>(experts)));
    count = std::clamp<std::int64_t>(count, 0, experts - 1);
    for (std::int64_t removed = 0; removed < count;) {
      std::int64_t const e = random_.below(experts);
      if (weight_[e] == 0) continue;
      weight_[e] = 0;
      ++removed;
    }
  }

  std::int64_t draw_one() {
    if (uniform_) return alive_[random_.below(static_cast<std::int64_t>(alive_.size()))];
    if (prefix_.empty()) {
      prefix_.resize(weight_.size());
      std::partial_sum(weight_.begin(), weight_.end(), prefix_.begin());
    }
    double const point = random_.uniform() * prefix_.back();
    auto const place = std::upper_bound(prefix_.begin(), prefix_.end(), point) - prefix_.begin();
    return std::min<std::int64_t>(place, static_cast<std::int64_t>(weight_.size()) - 1);
  }

  std::int64_t next_alive(std::int64_t expert) const {
    auto const next = std::upper_bound(alive_.begin(), alive_.end(), expert);
    return next == alive_.end() ? alive_.front() : *next;
  }

  RandomSource& random_;
  bool repeat_, uniform_ = true;
  std::vector<double> weight_, prefix_;
  std::vector<std::int64_t> alive_;
};

/// [T+1]; counts vary from none to twice top_k (or all experts) where asked for.
std::vector<std::int64_t> make_token_offsets(LayerCase const& layer_case) {
  MoeShape const& s = layer_case.desc.shape;
  RandomSource random(layer_case.seed, kCounts);
  std::vector<std::int64_t> offsets(1, 0);
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    std::int64_t const count =
        s.variable_experts ? random.between(0, std::min(2 * s.top_k, s.experts)) : s.top_k;
    offsets.push_back(offsets.back() + count);
  }
  return offsets;
}

/// Turns slots into sentinels: E and other ids out of range, single slots and whole tokens.
void add_sentinels(LayerCase const& layer_case, SlotList& slots) {
  if (layer_case.sentinel_fraction <= 0) return;
  RandomSource random(layer_case.seed, kSentinels);
  std::int64_t const experts = layer_case.desc.shape.experts;
  std::int64_t const outside[] = {experts, -1, experts + 7, -2147483647};
  for (std::size_t t = 0; t + 1 < slots.token_offsets.size(); ++t) {
    bool const whole_token = random.chance(layer_case.sentinel_fraction / 4);
    for (std::int64_t j = slots.token_offsets[t]; j < slots.token_offsets[t + 1]; ++j) {
      bool const single = random.chance(layer_case.sentinel_fraction);
      if (single || whole_token) slots.topk_ids[j] = outside[random.below(4)];
    }
  }
}

}  // namespace

std::vector<std::int64_t> popularity_ranks(LayerCase const& layer_case) {
  std::vector<std::int64_t> ranks(layer_case.desc.shape.experts);
  std::iota(ranks.begin(), ranks.end(), std::int64_t{0});
  if (layer_case.routing.pattern != RoutingPattern::shuffled_zipf) return ranks;
  RandomSource random(layer_case.seed, kRanks);
  for (std::size_t left = ranks.size(); left > 1; --left) {
    std::swap(ranks[left - 1], ranks[random.below(static_cast<std::int64_t>(left))]);
  }
  return ranks;
}

SlotList make_slots(LayerCase const& layer_case) {
  MoeShape const& s = layer_case.desc.shape;
  RoutingSpec const& routing = layer_case.routing;
  if (routing.pattern == RoutingPattern::file) return {routing.topk_ids, routing.token_offsets};

  SlotList slots;
  slots.token_offsets = make_token_offsets(layer_case);
  RandomSource random(layer_case.seed, kExperts);
  ExpertDraw draw(layer_case, random);
  std::int64_t spread = 0;  // round robin
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    std::int64_t const count = slots.token_offsets[t + 1] - slots.token_offsets[t];
    switch (routing.pattern) {
      case RoutingPattern::balanced:
        for (std::int64_t k = 0; k < count; ++k) slots.topk_ids.push_back(spread++ % s.experts);
        break;
      case RoutingPattern::one_token_each:
        for (std::int64_t k = 0; k < count; ++k, ++spread) {
          slots.topk_ids.push_back(std::min(spread, s.experts));
        }
        break;
      case RoutingPattern::one_expert:
        for (std::int64_t k = 0; k < count; ++k) {
          bool const first = k == 0 || s.experts == 1;
          slots.topk_ids.push_back(first ? 0 : 1 + spread++ % (s.experts - 1));
        }
        break;
      default:
        draw.draw(count, slots.topk_ids);
    }
  }
  add_sentinels(layer_case, slots);
  return slots;
}

}  // namespace tessera::verify

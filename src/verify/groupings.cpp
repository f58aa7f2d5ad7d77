// SPDX-License-Identifier: Apache-2.0
// Groups elements that are judged together; finds those that are fixed by definition, and those that stand next to a
// kink, where one rounding may choose the other branch of the derivative.
#include <algorithm>
#include <cmath>

#include "cpu/reference/activation.hpp"
#include "verify/tolerance.hpp"

namespace tessera::verify {
namespace {

constexpr std::int64_t kWeightRows = 16;
constexpr std::int64_t kSlots = 64;

/// Groups of `rows` rows within each of `blocks` blocks of [rows_per_block, columns].
Grouping row_groups(std::int64_t blocks, std::int64_t rows_per_block, std::int64_t columns,
                    std::int64_t rows) {
  Grouping grouping;
  for (std::int64_t block = 0; block < blocks; ++block) {
    for (std::int64_t row = 0; row < rows_per_block; row += rows) {
      std::int64_t const end = std::min(row + rows, rows_per_block);
      grouping.group_ends.push_back((block * rows_per_block + end) * columns);
    }
  }
  return grouping;
}

/// `exact` for all elements of experts without rows.
std::vector<char> empty_experts(reference::Metadata const& metadata, std::int64_t per_expert) {
  std::vector<char> exact;
  for (std::size_t e = 0; e + 1 < metadata.expert_offsets.size(); ++e) {
    bool const empty = metadata.expert_offsets[e] == metadata.expert_offsets[e + 1];
    exact.insert(exact.end(), per_expert, empty ? 1 : 0);
  }
  return exact;
}

std::vector<char> tokens_without_rows(LayerData const& data, reference::Metadata const& metadata) {
  std::vector<char> exact;
  for (std::int64_t t = 0; t < data.desc.shape.tokens; ++t) {
    bool any = false;
    for (std::int64_t j = metadata.token_offsets[t]; j < metadata.token_offsets[t + 1]; ++j) {
      any = any || metadata.inverse_permutation[j] >= 0;
    }
    exact.insert(exact.end(), data.desc.shape.hidden, any ? 0 : 1);
  }
  return exact;
}

/// Slots in row order, sentinels after them.
Grouping slot_groups(reference::Metadata const& metadata) {
  Grouping grouping;
  auto const slots = static_cast<std::int64_t>(metadata.inverse_permutation.size());
  grouping.exact.assign(slots, 0);
  grouping.order.assign(metadata.sort_permutation.begin(),
                        metadata.sort_permutation.begin() + metadata.rows());
  for (std::int64_t j = 0; j < slots; ++j) {
    if (metadata.inverse_permutation[j] >= 0) continue;
    grouping.order.push_back(j);
    grouping.exact[j] = 1;
  }
  for (std::int64_t end = kSlots; end < slots; end += kSlots) grouping.group_ends.push_back(end);
  if (slots > 0) grouping.group_ends.push_back(slots);
  return grouping;
}

/// Marks what a (row, i) next to a kink reaches: its token's dx, and row i of its expert's dW and db.
void exempt_kinks(LayerData const& data, reference::Forward const& forward,
                  std::map<std::string, Grouping>& groups) {
  MoeDesc const& desc = data.desc;
  std::int64_t const d = desc.shape.hidden, n = desc.shape.intermediate;
  std::int64_t const up_rows = desc.up_width() * n;
  bool const gated = desc.activation.gated();
  bool const separate = desc.layout.orientation == WeightOrientation::separate;
  bool const transposed = desc.layout.orientation == WeightOrientation::transposed;
  // h differs by a few fp32 roundings of its terms; a clamp's edge also by the rounding of a stored h.
  double margin = std::ldexp(1.0, -18) * std::sqrt(static_cast<double>(d));
  if (desc.dtype != DType::fp32 && desc.activation.kind == ActivationKind::clamped_swiglu) {
    margin = std::ldexp(1.0, -8) * desc.activation.limit;
  }
  auto const mark = [](Grouping& grouping, std::int64_t element) {
    if (grouping.exempt.empty()) grouping.exempt.assign(grouping.group_ends.back(), 0);
    grouping.exempt[element] = 1;
  };
  auto const mark_part = [&](reference::Part part, std::int64_t e, std::int64_t i) {
    bool const own = separate && part == reference::Part::gate;
    std::int64_t const rows = separate ? n : up_rows;
    std::int64_t const row = separate ? i : reference::stored_row(desc, part, i);
    for (std::int64_t c = 0; c < d; ++c) {
      mark(groups.at(own ? "dw_gate" : "dw_up"),
           transposed ? (e * d + c) * rows + row : (e * rows + row) * d + c);
    }
    if (desc.bias) mark(groups.at(own ? "db_gate" : "db_up"), e * rows + row);
  };
  auto const& meta = forward.metadata;
  for (std::int64_t e = 0; e < desc.shape.experts; ++e) {
    for (std::int64_t r = meta.expert_offsets[e]; r < meta.expert_offsets[e + 1]; ++r) {
      for (std::int64_t i = 0; i < n; ++i) {
        double const gate = gated ? forward.h_gate[r * n + i] : 0;
        double const distance =
            reference::distance_to_kink(desc.activation, gate, forward.h_up[r * n + i]);
        if (!(distance < margin)) continue;
        for (std::int64_t c = 0; c < d; ++c) mark(groups.at("dx"), meta.gather_index[r] * d + c);
        if (gated) mark_part(reference::Part::gate, e, i);
        mark_part(reference::Part::up, e, i);
      }
    }
  }
}

/// [T,E]: where dlogits are 0 by definition: the token has no slots, or neither its slots nor its choice hold the
/// expert and no softmax over all experts gave a score.
std::vector<char> untouched_logits(reference::Inputs const& inputs,
                                   reference::Metadata const& metadata) {
  MoeShape const& s = inputs.desc.shape;
  RouterKind const kind = inputs.desc.router.kind;
  bool const over_all = kind == RouterKind::softmax_topk || kind == RouterKind::expert_choice;
  bool const own_p = kind == RouterKind::sigmoid_bias || kind == RouterKind::group_limited ||
                     kind == RouterKind::sqrtsoftplus;
  std::vector<char> exact(s.tokens * s.experts, 1);
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    auto const row = exact.begin() + t * s.experts;
    auto const members = reference::members_of(inputs, metadata, t);
    bool any = false, added = false;
    for (std::int64_t j = metadata.token_offsets[t]; j < metadata.token_offsets[t + 1]; ++j) {
      if (metadata.inverse_permutation[j] < 0) continue;
      std::int64_t const id = inputs.topk_ids[j];
      any = true;
      row[id] = 0;
      added |= std::find(members.begin(), members.end(), id) == members.end();
    }
    if (!any) continue;
    if (over_all || (added && !own_p)) std::fill(row, row + s.experts, 0);
    if (own_p && !inputs.desc.router.normalize_scores) continue;
    for (std::int64_t const e : members) row[e] = 0;
  }
  return exact;
}

void add_router_groups(LayerData const& data, reference::Inputs const& inputs,
                       reference::Metadata const& metadata,
                       std::map<std::string, Grouping>& groups) {
  MoeShape const& s = data.desc.shape;
  groups["logits"] = row_groups(1, s.tokens, s.experts, 1);
  groups["scores"] = slot_groups(metadata);
  // A token's dl is as sure as the differences of its few ds: a group needs as many chosen experts as others need
  // elements.
  std::int64_t const choices = std::max<std::int64_t>(s.top_k, 1);
  std::int64_t const rows = (64 + choices - 1) / choices;
  groups["dlogits"] = row_groups(1, s.tokens, s.experts, rows);
  groups["dw_router"] = row_groups(1, s.experts, s.hidden, kWeightRows);
  groups["db_router"] = row_groups(1, s.experts, 1, s.experts);
  if (!data.aux_dlogits.empty()) return;
  auto const exact = untouched_logits(inputs, metadata);
  groups["dlogits"].exact = exact;
  if (data.gradient_mode == GradientMode::accumulate) return;
  for (std::int64_t e = 0; e < s.experts; ++e) {
    bool untouched = true;
    for (std::int64_t t = 0; t < s.tokens; ++t) untouched &= exact[t * s.experts + e] != 0;
    auto& weights = groups["dw_router"].exact;
    weights.insert(weights.end(), s.hidden, untouched ? 1 : 0);
    groups["db_router"].exact.push_back(untouched ? 1 : 0);
  }
}

}  // namespace

std::map<std::string, Grouping> groupings(LayerData const& data, reference::Inputs const& inputs,
                                          reference::Forward const& forward) {
  MoeDesc const& desc = data.desc;
  MoeShape const& s = desc.shape;
  bool const transposed = desc.layout.orientation == WeightOrientation::transposed;
  bool const separate = desc.layout.orientation == WeightOrientation::separate;
  std::int64_t const up_rows = (separate ? 1 : desc.up_width()) * s.intermediate;
  auto const& metadata = forward.metadata;

  std::map<std::string, Grouping> groups;
  groups["o"] = row_groups(1, s.tokens, s.hidden, 1);
  groups["o"].exact = tokens_without_rows(data, metadata);
  groups["dx"] = groups["o"];
  if (!data.aux_dlogits.empty())
    groups["dx"].exact.clear();  // the router's part reaches every token
  groups["dscores"] = slot_groups(metadata);
  auto const add_weight = [&](char const* name, std::int64_t rows, std::int64_t columns) {
    groups[name] = row_groups(s.experts, rows, columns, kWeightRows);
    groups[name].exact = empty_experts(metadata, rows * columns);
  };
  auto const add_bias = [&](char const* name, std::int64_t rows) {
    groups[name] = row_groups(s.experts, rows, 1, rows);
    groups[name].exact = empty_experts(metadata, rows);
  };
  add_weight("dw_up", transposed ? s.hidden : up_rows, transposed ? up_rows : s.hidden);
  add_weight("dw_gate", s.intermediate, s.hidden);
  add_weight("dw_down", transposed ? s.intermediate : s.hidden,
             transposed ? s.hidden : s.intermediate);
  add_bias("db_up", up_rows);
  add_bias("db_gate", s.intermediate);
  add_bias("db_down", s.hidden);
  if (desc.router.kind != RouterKind::given) add_router_groups(data, inputs, metadata, groups);
  exempt_kinks(data, forward, groups);
  return groups;
}

}  // namespace tessera::verify

// SPDX-License-Identifier: Apache-2.0
#include "verify/tolerance.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "verify/storage.hpp"

namespace tessera::verify {
namespace {

constexpr std::int64_t kMinGroup = 64;
constexpr double kHuge = 1e30;  // stands for an infinite or undefined ratio

/// Squared norm and largest absolute value.
struct Size {
  double norm2 = 0, largest = 0;
  void add(double value) {
    norm2 += value * value;
    largest = std::isnan(value) ? value : std::max(largest, std::abs(value));
  }
  [[nodiscard]] double norm() const { return std::sqrt(norm2); }
};

struct GroupSums {
  Size error, ref;
  std::vector<Size> naive;  ///< one for each sample
};

double ratio(double value, double bound) {
  if (value == 0) return 0;
  double const result = value / bound;
  return result < kHuge ? result : kHuge;  // NaN too
}

template <class... Values>
std::string text(char const* format, Values... values) {
  char buffer[160];
  std::snprintf(buffer, sizeof(buffer), format, values...);
  return buffer;
}

void fail(Comparison& result, std::string reason) {
  if (result.ok) result.reason = std::move(reason);
  result.ok = false;
}

void judge_group(GroupSums const& sums, std::int64_t first, std::int64_t last, double unit,
                 Comparison& result) {
  double naive_norm = 0, naive_largest = 0;
  for (Size const& naive : sums.naive) {
    naive_norm = std::max(naive_norm, naive.norm());
    naive_largest = std::max(naive_largest, naive.largest);
  }
  double const norm_ratio = ratio(sums.error.norm(), 2 * naive_norm + unit * sums.ref.norm());
  double const max_ratio =
      ratio(sums.error.largest, 4 * naive_largest + 2 * unit * sums.ref.largest);
  result.worst_row_ratio = std::max(result.worst_row_ratio, norm_ratio);
  result.worst_element_ratio = std::max(result.worst_element_ratio, max_ratio);
  if (norm_ratio > 1) {
    fail(result, text("places %lld..%lld: error norm is %.3g times what is allowed",
                      static_cast<long long>(first), static_cast<long long>(last - 1), norm_ratio));
  } else if (max_ratio > 1) {
    fail(result, text("places %lld..%lld: largest error is %.3g times what is allowed",
                      static_cast<long long>(first), static_cast<long long>(last - 1), max_ratio));
  }
}

/// Group ends with neighbours joined until each holds kMinGroup elements that are not fixed by definition.
std::vector<std::int64_t> merged(Grouping const& grouping) {
  std::vector<std::int64_t> out;
  std::int64_t place = 0, live = 0;
  for (std::int64_t const end : grouping.group_ends) {
    for (; place < end; ++place) {
      std::int64_t const i = grouping.order.empty() ? place : grouping.order[place];
      live += grouping.exact.empty() || grouping.exact[i] == 0 ? 1 : 0;
    }
    if (live < kMinGroup) continue;
    out.push_back(end);
    live = 0;
  }
  if (place > 0 && out.empty()) out.push_back(place);
  if (place > 0) out.back() = place;  // what is left joins the last group
  return out;
}

}  // namespace

Comparison compare(std::vector<double> const& ref,
                   std::vector<std::vector<float> const*> const& naives,
                   std::vector<float> const& out, Grouping const& grouping, double unit) {
  Comparison result;
  if (out.size() != ref.size()) {
    fail(result, text("%zu elements, the reference has %zu", out.size(), ref.size()));
    result.rel_error = result.worst_row_ratio = kHuge;
    return result;
  }
  Size total_error, total_naive, total_ref;
  std::int64_t place = 0;
  for (std::int64_t const end : merged(grouping)) {
    GroupSums sums{.error = {}, .ref = {}, .naive = std::vector<Size>(naives.size())};
    std::int64_t const first = place;
    for (; place < end; ++place) {
      std::int64_t const i = grouping.order.empty() ? place : grouping.order[place];
      if (!grouping.exempt.empty() && grouping.exempt[i] != 0) continue;
      bool const exact = !grouping.exact.empty() && grouping.exact[i] != 0;
      if (exact && !(static_cast<double>(out[i]) == ref[i])) {
        fail(result, text("element %lld: %.9g where exactly %.9g is due", static_cast<long long>(i),
                          static_cast<double>(out[i]), ref[i]));
        result.worst_row_ratio = kHuge;
      }
      sums.error.add(out[i] - ref[i]);
      sums.ref.add(ref[i]);
      for (std::size_t v = 0; v < naives.size(); ++v) sums.naive[v].add((*naives[v])[i] - ref[i]);
    }
    judge_group(sums, first, end, unit, result);
    total_error.norm2 += sums.error.norm2;
    total_naive.norm2 += sums.naive.front().norm2;
    total_ref.norm2 += sums.ref.norm2;
  }
  result.rel_error = ratio(total_error.norm(), total_ref.norm());
  result.naive_rel_error = ratio(total_naive.norm(), total_ref.norm());
  return result;
}

Comparisons judge(LayerData const& data, reference::Inputs const& inputs,
                  reference::Forward const& forward, ReferenceTensors const& ref,
                  std::vector<Tensors> const& naives, Tensors const& out) {
  auto const groups = groupings(data, inputs, forward);
  double const unit = unit_roundoff(data.desc.dtype);
  double const unit_of_logits = unit_roundoff(data.desc.router_storage());
  Comparisons results;
  for (auto const& [name, values] : out) {
    if (!ref.contains(name)) {
      fail(results[name], "the reference has no such tensor");
      continue;
    }
    std::vector<std::vector<float> const*> of_name;
    for (Tensors const& naive : naives) of_name.push_back(&naive.at(name));
    results[name] = compare(ref.at(name), of_name, values, groups.at(name),
                            name == "logits" ? unit_of_logits : unit);
  }
  return results;
}

}  // namespace tessera::verify

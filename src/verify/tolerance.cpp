// SPDX-License-Identifier: Apache-2.0
#include "verify/tolerance.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "verify/storage.hpp"

namespace tessera::verify {
namespace {

constexpr std::int64_t kLeastGroup = 64;
constexpr double kHuge = 1e30;  // stands for an infinite or undefined ratio

struct GroupSums {
  double error2 = 0, naive2 = 0, ref2 = 0;  // squared norms
  double error_max = 0, naive_max = 0, ref_max = 0;
  void add(double error, double naive, double ref) {
    error2 += error * error;
    naive2 += naive * naive;
    ref2 += ref * ref;
    error_max = std::isnan(error) ? error : std::max(error_max, std::abs(error));
    naive_max = std::max(naive_max, std::abs(naive));
    ref_max = std::max(ref_max, std::abs(ref));
  }
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
  double const norm_ratio =
      ratio(std::sqrt(sums.error2), 2 * std::sqrt(sums.naive2) + unit * std::sqrt(sums.ref2));
  double const max_ratio = ratio(sums.error_max, 4 * sums.naive_max + 2 * unit * sums.ref_max);
  result.worst_row_ratio = std::max(result.worst_row_ratio, norm_ratio);
  if (norm_ratio > 1) {
    fail(result, text("places %lld..%lld: error norm is %.3g times what is allowed",
                      static_cast<long long>(first), static_cast<long long>(last - 1), norm_ratio));
  } else if (max_ratio > 1) {
    fail(result, text("places %lld..%lld: largest error is %.3g times what is allowed",
                      static_cast<long long>(first), static_cast<long long>(last - 1), max_ratio));
  }
}

/// Groups of fewer than kLeastGroup elements joined with their neighbours.
std::vector<std::int64_t> merged(std::vector<std::int64_t> const& ends) {
  std::vector<std::int64_t> out;
  std::int64_t first = 0;
  for (std::int64_t const end : ends) {
    if (end - first < kLeastGroup) continue;
    out.push_back(end);
    first = end;
  }
  if (!ends.empty() && (out.empty() || out.back() != ends.back())) {
    if (out.empty()) {
      out.push_back(ends.back());
    } else {
      out.back() = ends.back();
    }
  }
  return out;
}

}  // namespace

Comparison compare(std::vector<double> const& ref, std::vector<float> const& naive,
                   std::vector<float> const& out, Grouping const& grouping, double unit) {
  Comparison result;
  if (out.size() != ref.size() || naive.size() != ref.size()) {
    fail(result, text("%zu elements, the reference has %zu", out.size(), ref.size()));
    result.rel_error = result.worst_row_ratio = kHuge;
    return result;
  }
  GroupSums total;
  std::int64_t place = 0;
  for (std::int64_t const end : merged(grouping.group_ends)) {
    GroupSums sums;
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
      double const error = out[i] - ref[i], naive_error = naive[i] - ref[i];
      sums.add(error, naive_error, ref[i]);
      total.add(error, naive_error, ref[i]);
    }
    judge_group(sums, first, end, unit, result);
  }
  result.rel_error = ratio(std::sqrt(total.error2), std::sqrt(total.ref2));
  result.naive_rel_error = ratio(std::sqrt(total.naive2), std::sqrt(total.ref2));
  return result;
}

Comparisons judge(LayerData const& data, reference::Inputs const& inputs,
                  reference::Forward const& forward, ReferenceTensors const& ref,
                  Tensors const& naive, Tensors const& out) {
  auto const groups = groupings(data, inputs, forward);
  double const unit = unit_roundoff(data.desc.dtype);
  Comparisons results;
  for (auto const& [name, values] : out) {
    if (!ref.contains(name)) {
      fail(results[name], "the reference has no such tensor");
      continue;
    }
    results[name] = compare(ref.at(name), naive.at(name), values, groups.at(name), unit);
  }
  return results;
}

}  // namespace tessera::verify

// SPDX-License-Identifier: Apache-2.0
// When is a result right? With e = out - ref and e' = naive - ref, in every group of elements:
//   1. norm(e) <= 2 norm(e') + u norm(ref)                  (their ratio: worst_row_ratio)
//   2. max|e|  <= 4 max|e'| + 2u max|ref|
//   3. where the reference is what it is by definition (no rows), out equals it exactly.
// A group is a row of o, dx, dlogits; 16 adjacent rows of one expert's dW; an expert's db; 64 expert-sorted
// slots of ds; neighbours are merged up to 64 elements that 3. leaves free. ref is fp64, naive the textbook in storage
// precision. norm(e') and max|e'| are the largest over several samples of it, each with sums in another order and with
// other errors of its roundings, lest one lucky rounding of a number that decides a whole group forbid what is right.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "verify/tensors.hpp"

namespace tessera::verify {

/// Says how one tensor's elements are grouped, and which of them are special.
struct Grouping {
  std::vector<std::int64_t> order;       ///< element that stands at each place; empty: as stored
  std::vector<std::int64_t> group_ends;  ///< ascending places, the last one the number of elements
  std::vector<char> exact;               ///< by element: fixed by definition; empty: none
  std::vector<char> exempt;  ///< by element: next to a kink of the activation; empty: none
};

struct Comparison {
  double rel_error = 0;            ///< norm(e) / norm(ref), 0 where both are 0
  double naive_rel_error = 0;      ///< the same of the first naive
  double worst_row_ratio = 0;      ///< largest of condition 1's ratios
  double worst_element_ratio = 0;  ///< largest of condition 2's ratios
  bool ok = true;
  std::string reason;  ///< of the first element or group that fails
};

/// Judges `out` by the rule above; `naives` are samples of the textbook's result, `unit` is u.
Comparison compare(std::vector<double> const& ref,
                   std::vector<std::vector<float> const*> const& naives,
                   std::vector<float> const& out, Grouping const& grouping, double unit);

/// The groups of every compared tensor of a layer, by name.
std::map<std::string, Grouping> groupings(LayerData const& data, reference::Inputs const& inputs,
                                          reference::Forward const& forward);

using Comparisons = std::map<std::string, Comparison>;

/// Judges every tensor that `out` holds. A tensor that the reference lacks, or of another size, fails.
Comparisons judge(LayerData const& data, reference::Inputs const& inputs,
                  reference::Forward const& forward, ReferenceTensors const& ref,
                  std::vector<Tensors> const& naives, Tensors const& out);

inline bool all_ok(Comparisons const& comparisons) {
  for (auto const& [name, comparison] : comparisons) {
    if (!comparison.ok) return false;
  }
  return true;
}

}  // namespace tessera::verify

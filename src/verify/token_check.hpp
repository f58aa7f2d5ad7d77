// SPDX-License-Identifier: Apache-2.0
// A few tokens of a layer too large for the reference: its tensors are formulas of the index, so that fp64 values of
// any token can be computed without holding them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/reference/layout.hpp"
#include "tessera/context.hpp"
#include "tessera/shape.hpp"

namespace tessera::verify {

/// A tensor of bf16 values as device::Stream::fill_uniform() makes it.
struct UniformTensor {
  std::uint64_t seed = 0;
  float scale = 0;
  [[nodiscard]] double at(std::int64_t index) const noexcept;
};

/// The layer: tensors in the layout of the desc.
struct UniformLayer {
  MoeDesc desc;
  UniformTensor x, d_o, w_router, w_gate, w_up, w_down, b_gate, b_up, b_down;
  UniformTensor b_router, aux_dlogits;  ///< 0 where the layer has none

  /// Elements of the logical weights: G or U [E,n,d] and its bias [E,n], D [E,d,n].
  [[nodiscard]] double up(reference::Part part, std::int64_t expert, std::int64_t i,
                          std::int64_t c) const;
  [[nodiscard]] double up_bias(reference::Part part, std::int64_t expert, std::int64_t i) const;
  [[nodiscard]] double down(std::int64_t expert, std::int64_t c, std::int64_t i) const;
  /// Where they stand in w_up (w_gate, where separate) and w_down, counted from the start of an expert's matrix.
  [[nodiscard]] std::int64_t up_place(reference::Part part, std::int64_t i, std::int64_t c) const;
  [[nodiscard]] std::int64_t down_place(std::int64_t c, std::int64_t i) const;
  /// [E] of one token.
  [[nodiscard]] std::vector<double> logits(Context const& host, std::int64_t token) const;
};

/// Holds what the library made of one token. Slots without a row have an empty h.
struct TokenResult {
  std::int64_t token = 0;
  std::vector<std::int64_t> ids;            ///< of its slots
  std::vector<std::int64_t> unrounded_ids;  ///< [K] the top-k choice, with token rounding
  std::vector<float> scores;                ///< by slot
  std::vector<std::vector<float>> h;        ///< by slot [gate half | up half], or empty: not kept
  std::vector<float> o;                     ///< [d]
};

/// Returns what is wrong with the token, or "". A router's choice is judged as in verify_case(); scores within 2^-12 of
/// fp64, rows of h and o by norm within 2^-7 of it: two bf16 roundings, well below what any missing term costs. Runs on
/// the threads of `host`.
std::string token_failure(Context const& host, UniformLayer const& layer,
                          TokenResult const& result);

}  // namespace tessera::verify

// SPDX-License-Identifier: Apache-2.0
// These say what becomes of a rank's rows where experts are spread over hosts: which tokens go to which host, the
// message that takes them there, and the sum of what comes back. Element by element, the same on any machine.
#pragma once

#include <cstdint>

#include "core/bf16.hpp"
#include "tessera/hosts.hpp"

namespace tessera::expert_parallel::hosts {

/// Finds for each host the tokens that have an expert there, ascending.
struct ChooseTokens {
  std::int32_t const* gmem_topk_ids = nullptr;  // [T,K]
  std::int64_t tokens = 0;
  std::int32_t top_k = 0, hosts = 0;
  std::int32_t experts = 0;            // of each host
  std::int32_t* gmem_token = nullptr;  // [H,T]: the tokens that go to a host, in front
  std::int32_t* gmem_place =
      nullptr;  // [H,T]: the place of a token among these, -1 where it does not go
  std::int64_t* gmem_counts = nullptr;  // [H]: how many go

  [[nodiscard]] TESSERA_INLINE bool goes(std::int64_t token, std::int32_t host) const noexcept {
    for (std::int32_t k = 0; k < top_k; ++k) {
      std::int32_t const id = gmem_topk_ids[token * top_k + k] - host * experts;
      if (id >= 0 && id < experts) return true;
    }
    return false;
  }
};

/// Makes a message of `rows` rows: those of x, scores, and ids as the host numbers its experts, -1 for others. What is
/// null is left out.
struct PackRows {
  std::int64_t rows = 0, tokens = 0;
  std::int32_t const* gmem_token = nullptr;  // [rows], or null: row r is token r, if there is one
  std::int64_t words = 0;                    // of 16 bytes, of a row of x
  void const* gmem_x = nullptr;              // [T,d]
  float const* gmem_topk_weights = nullptr;  // [T,K]
  std::int32_t const* gmem_topk_ids = nullptr;
  std::int32_t top_k = 0, first_expert = 0, experts = 0;  // the last two: of the host
  void* gmem_rows = nullptr;                              // [rows,d]
  float* gmem_row_weights = nullptr;                      // [rows,K]
  std::int32_t* gmem_row_ids = nullptr;                   // [rows,K]

  /// -1: none, whose row is zeros without experts.
  [[nodiscard]] TESSERA_INLINE std::int64_t token_of(std::int64_t row) const noexcept {
    if (gmem_token != nullptr) return gmem_token[row];
    return row < tokens ? row : -1;
  }
  TESSERA_INLINE void pack_choice(std::int64_t row, std::int64_t token,
                                  std::int32_t k) const noexcept {
    std::int64_t const from = token * top_k + k, to = row * top_k + k;
    if (gmem_row_weights != nullptr) gmem_row_weights[to] = token < 0 ? 0 : gmem_topk_weights[from];
    if (gmem_row_ids == nullptr) return;
    std::int32_t const id = token < 0 ? -1 : gmem_topk_ids[from] - first_expert;
    gmem_row_ids[to] = id >= 0 && id < experts && token >= 0 ? id : -1;
  }
};

/// Adds up partial sums of rows in fp32, hosts ascending, and rounds once.
struct SumPartials {
  std::int64_t tokens = 0, columns = 0;
  std::int32_t hosts = 0, host = 0;  // host: the own one, which has a row for each token
  /// [H,T]: the row of a token in what came from a host, or -1; null: its number.
  std::int32_t const* gmem_place = nullptr;
  void const* gmem_partial[kMaxHosts] = {};  // [host]: [rows,columns]
  void* gmem_sum = nullptr;                  // [T,columns]
  bool fp32 = false;                         // all of them, else bf16

  template <class Element>
  TESSERA_INLINE void sum(std::int64_t token, std::int64_t column) const noexcept {
    float total = 0;
    for (std::int32_t h = 0; h < hosts; ++h) {
      bool const listed = gmem_place != nullptr && h != host;
      std::int64_t const row = listed ? gmem_place[h * tokens + token] : token;
      if (row < 0) continue;
      total += core::to_fp32(static_cast<Element const*>(gmem_partial[h])[row * columns + column]);
    }
    static_cast<Element*>(gmem_sum)[token * columns + column] = core::round_to<Element>(total);
  }
};

}  // namespace tessera::expert_parallel::hosts

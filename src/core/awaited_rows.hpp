// SPDX-License-Identifier: Apache-2.0
// Rows that a kernel on another stream brings while their reader runs (src/cuda/gemm/await_rows.cuh).
#pragma once

#include <cstdint>

namespace tessera::core {

/// Rows of a block that is multiplied or waits as a whole.
inline constexpr std::int32_t kReadyRows = 128;

/// Says which rows of a GEMM's gathered operand are there when it starts, and what says that the others are. Without
/// addresses all are there.
struct AwaitedRows {
  /// [segments]: of a segment's blocks of kReadyRows rows so many come first whose rows are all there.
  std::int32_t const* gmem_ready_blocks = nullptr;
  std::uint32_t const* gmem_arrivals =
      nullptr;  ///< all rows are there when this word is `arrivals`
  std::uint32_t arrivals = 0;
  std::int32_t sms_beside = 0;  ///< SMs that the other kernel keeps when all rows are there
};

}  // namespace tessera::core

// SPDX-License-Identifier: Apache-2.0
#include "cpu/parallel/layer.hpp"

#include <cstring>

namespace tessera::cpu {

void gather_rows(ConstRows x, std::int32_t const* gather_index, std::int64_t row, std::int64_t rows,
                 std::int64_t column, std::int64_t columns, float* out) noexcept {
  for (std::int64_t r = 0; r < rows; ++r) {
    std::memcpy(out + r * columns, x[gather_index[row + r]] + column,
                static_cast<std::size_t>(columns) * sizeof(float));
  }
}

}  // namespace tessera::cpu

// SPDX-License-Identifier: Apache-2.0
// The GEMM libraries that the bound of `bench` may use: BLIS, which is linked, and OpenBLAS and oneDNN, opened where
// they are installed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/tensor.hpp"

namespace tessera::cli {

/// A row-major matrix of `columns` columns, or the transpose of one.
struct GemmOperand {
  void const* data;
  std::int64_t columns;
  bool transposed = false;
};
inline GemmOperand transposed(GemmOperand const& operand) {
  return {operand.data, operand.columns, !operand.transposed};
}

struct GemmLibrary {
  std::string name;
  /// c [m,n] fp32 = a [m,k] b [k,n] of the library's dtype, on the calling thread alone.
  std::function<void(std::int64_t m, std::int64_t n, std::int64_t k, GemmOperand const& a,
                     GemmOperand const& b, float* c)>
      multiply;
};

/// Those that multiply this storage type on this machine; may be empty for bf16.
std::vector<GemmLibrary> gemm_libraries(DType dtype);

}  // namespace tessera::cli

// SPDX-License-Identifier: Apache-2.0
// The GEMMs of all experts as one library call, where a library has one for this machine. oneDNN's matmul takes a
// batch of equal shapes. A call for groups of unequal shapes is in no library that Debian 12 or Ubuntu 24.04 has:
// OpenBLAS has cblas_sgemm_batch from 0.3.29 on, oneDNN a grouped matmul from 3.10 on.
#pragma once

#include <cstdint>
#include <functional>

#include "tessera/tensor.hpp"

namespace tessera::cli {

/// [rows,columns] matrices, row-major and one behind the other in memory; transposed: each read as [columns,rows].
struct MatrixBatch {
  void* data;
  DType dtype;
  std::int64_t rows, columns;
  bool transposed = false;
};
inline MatrixBatch transposed(MatrixBatch const& batch) {
  return {batch.data, batch.dtype, batch.rows, batch.columns, !batch.transposed};
}

/// A call that computes c[e] = a[e] b[e] for every e in [0,batch) on `threads` threads of the library's. Empty where
/// there is no such library, or none for these types. Code for the shape has been generated when it is returned.
std::function<void()> batched_gemm(std::int64_t batch, MatrixBatch const& a, MatrixBatch const& b,
                                   MatrixBatch const& c, std::int32_t threads);

}  // namespace tessera::cli

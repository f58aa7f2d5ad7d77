// SPDX-License-Identifier: Apache-2.0
// One thread waits for rows that a kernel on another stream brings; kernels behind it on this stream read them.
#include "../host/projection_backward.hpp"

namespace tessera::cuda {
namespace {

__global__ void await_rows_plain(core::AwaitedRows const rows) {
  std::uint32_t const volatile* const word = rows.gmem_arrivals;
  while (*word != rows.arrivals) {
  }
  __threadfence();
}

}  // namespace

cudaError_t launch_await_rows_plain(core::AwaitedRows const& rows, cudaStream_t stream) {
  await_rows_plain<<<1, 1, 0, stream>>>(rows);
  return cudaGetLastError();
}

}  // namespace tessera::cuda

// SPDX-License-Identifier: Apache-2.0
// Reads a matrix and drops it: how fast a kernel could be that only reads, by how it reads.
#pragma once

#include "../../src/cuda/arch/load_global.cuh"
#include "../../src/cuda/arch/tma.cuh"
#include "../../src/cuda/host/tensor_map.hpp"
#include "support.cuh"

namespace tessera::bench {

constexpr int kReadSms = 132;  // of an H200: one CTA each

// Reads in boxes of kRows rows x 128 bytes, column by column of a block of rows; kAtOnce boxes are asked for
// together, which is kAtOnce * 128 bytes of every row. kWithRows: with each comes the box of the first kWithRows rows
// of another matrix, as B of a GEMM does. kAhead: boxes in flight.
template <int kRows, int kAtOnce, int kWithRows>
struct ReadBoxes {
  static constexpr int kOwnBytes = kRows * 128, kBytes = kOwnBytes + kWithRows * 128;
  static constexpr int kAhead = (192 << 10) / kBytes / kAtOnce * kAtOnce;
  static_assert(kAhead >= kAtOnce);
};

template <int kRows, int kAtOnce, int kWithRows>
__global__ void __launch_bounds__(32, 1)
    read_boxes(__grid_constant__ CUtensorMap const map, __grid_constant__ CUtensorMap const with,
               int blocks, int block_columns) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Read = ReadBoxes<kRows, kAtOnce, kWithRows>;
  namespace arch = cuda::arch;
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ arch::Mbarrier full[Read::kAhead];
  if (threadIdx.x != 0) return;
  for (auto& barrier : full) arch::mbarrier_init(&barrier, 1);
  arch::mbarrier_fence_init();
  int const mine = (blocks - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
                   static_cast<int>(gridDim.x);
  int const boxes = mine * block_columns;
  auto const arrived = [&](int box) {
    arch::mbarrier_wait(&full[box % Read::kAhead], static_cast<uint32_t>(box / Read::kAhead) & 1);
  };
  for (int box = 0; box < boxes; ++box) {
    if (box % kAtOnce == 0) {
      for (int b = box; b < min(box + kAtOnce, boxes); ++b) {
        if (b >= Read::kAhead) arrived(b - Read::kAhead);
      }
    }
    int const stage = box % Read::kAhead;
    int const block =
        static_cast<int>(blockIdx.x) + box / block_columns * static_cast<int>(gridDim.x);
    arch::mbarrier_arrive_expect_tx(&full[stage], Read::kBytes);
    unsigned char* const smem_box = smem + stage * Read::kBytes;
    int const column = box % block_columns * 64;
    arch::tma_load(smem_box, &map, &full[stage], column, block * kRows);
    if (kWithRows > 0) {
      arch::tma_load(smem_box + Read::kOwnBytes, &with, &full[stage], column, 0);
    }
  }
  for (int box = max(boxes - Read::kAhead, 0); box < boxes; ++box) arrived(box);
#endif
}

// with: (with_rows, columns), read only if kWithRows.
template <int kRows, int kAtOnce, int kWithRows = 0>
cudaError_t launch_read_boxes(bf16 const* gmem_x, int64_t rows, int64_t columns,
                              bf16 const* gmem_with, int64_t with_rows, cudaStream_t stream) {
  using Read = ReadBoxes<kRows, kAtOnce, kWithRows>;
  auto const kernel = read_boxes<kRows, kAtOnce, kWithRows>;
  CUtensorMap map, with;
  cudaError_t error = cuda::host::make_matrix_map(map, gmem_x, rows, columns, columns, kRows);
  if (error != cudaSuccess) return error;
  error = cuda::host::make_matrix_map(with, gmem_with, with_rows, columns, columns,
                                      kWithRows > 0 ? kWithRows : 64);
  if (error != cudaSuccess) return error;
  constexpr int kSmem = Read::kAhead * Read::kBytes;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  if (error != cudaSuccess) return error;
  int const blocks = int((rows + kRows - 1) / kRows);
  kernel<<<std::min(blocks, kReadSms), 32, kSmem, stream>>>(map, with, blocks,
                                                            int((columns + 63) / 64));
  return cudaGetLastError();
}

// The same bytes as one array, 4 loads of 16 bytes in flight per thread; a sum that hardly ever is the one asked
// for is stored, so that the loads stay.
__global__ void __launch_bounds__(512)
    read_rows(uint4 const* gmem_x, int64_t count, uint32_t* gmem_never) {
  constexpr int kInFlight = 4;
  int64_t const step = int64_t{gridDim.x} * 512;
  uint32_t sum = 0;
  for (int64_t i = int64_t{blockIdx.x} * 512 + threadIdx.x; i < count; i += kInFlight * step) {
    uint4 bits[kInFlight];
    TESSERA_UNROLL
    for (int j = 0; j < kInFlight; ++j) {
      bits[j] = cuda::arch::load_streaming_16(gmem_x + i + j * step, i + j * step < count);
    }
    TESSERA_UNROLL
    for (int j = 0; j < kInFlight; ++j) sum ^= bits[j].x ^ bits[j].y ^ bits[j].z ^ bits[j].w;
  }
  if (sum == 0x9e3779b9u) *gmem_never = sum;
}

}  // namespace tessera::bench

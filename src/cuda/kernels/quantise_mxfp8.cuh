// SPDX-License-Identifier: Apache-2.0
// quantise_rows_mxfp8, quantise_weights_mxfp8: bf16 to e4m3 codes with a scale e8m0 for 32 of them
// (docs/numerics.md#fp8-and-mxfp8). dequantise_rows_mxfp8: the way back. Compiled and emulated, never run on hardware.
// Shapes   x (rows,width) to codes and scales (rows,width/32); weights of any layout, twice, to codes in blocks along
//          their rows and along their columns, transposed, with scales in atoms of 128 rows x 4 blocks
// Work     bytes: 3 an element, of weights 3 for either orientation, and 1 a block; memory bound
// Schedule a thread for a block, whose 32 values stay in its registers. Where the block is contiguous in memory a
//          thread reads its 64 bytes; else lanes are neighbours in memory, and a thread reads 32 values one by one
// Numerics the bytes of tessera::quantise() with ScaleRule::rceil, whatever the values; bitwise repeatable: yes
// Requires extents that are multiples of 128; contiguous runs aligned to 16 bytes
#pragma once

#include "../epilogue/mx_block.cuh"
#include "../host/mxfp8.hpp"

namespace tessera::cuda {

constexpr int kMxThreads = 256;
constexpr int64_t kMxBlock = gemm::MxCodes::kColumns;

inline cudaLaunchConfig_t one_thread_for_each(int64_t blocks, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned((blocks + kMxThreads - 1) / kMxThreads));
  config.blockDim = dim3(kMxThreads);
  config.stream = stream;
  return config;
}
__device__ __forceinline__ int64_t own_mx_block() {
  return int64_t{blockIdx.x} * kMxThreads + threadIdx.x;
}

// 32 bf16, `step` elements apart, as packed pairs.
__device__ __forceinline__ void load_mx_block(uint32_t (&pairs)[kMxBlock / 2], uint16_t const* gmem,
                                              int64_t step) {
  if (step == 1) {
    TESSERA_UNROLL
    for (int i = 0; i < kMxBlock / 8; ++i) {
      uint4 const eight = __ldg(reinterpret_cast<uint4 const*>(gmem) + i);
      pairs[4 * i] = eight.x;
      pairs[4 * i + 1] = eight.y;
      pairs[4 * i + 2] = eight.z;
      pairs[4 * i + 3] = eight.w;
    }
    return;
  }
  TESSERA_UNROLL
  for (int i = 0; i < kMxBlock / 2; ++i) {
    uint32_t const low = __ldg(gmem + 2 * i * step), high = __ldg(gmem + (2 * i + 1) * step);
    pairs[i] = low | high << 16;
  }
}
__device__ __forceinline__ void store_mx_codes(uint8_t* gmem, gemm::MxCodes const& codes) {
  reinterpret_cast<uint4*>(gmem)[0] = codes.low;
  reinterpret_cast<uint4*>(gmem)[1] = codes.high;
}

__global__ void __launch_bounds__(kMxThreads)
    quantise_rows_mxfp8(__grid_constant__ QuantiseRowsMxfp8Arguments const p) {
  int64_t const across = p.width / kMxBlock, block = own_mx_block();
  if (block >= p.rows * across) return;
  uint32_t pairs[kMxBlock / 2];
  load_mx_block(
      pairs,
      static_cast<uint16_t const*>(p.gmem_x) + block / across * p.pitch + block % across * kMxBlock,
      1);
  gemm::MxCodes const codes = gemm::mx_codes(pairs);
  store_mx_codes(static_cast<uint8_t*>(p.gmem_codes) + block * kMxBlock, codes);
  static_cast<uint8_t*>(p.gmem_scales)[block] = codes.scale;
}

inline cudaError_t launch_quantise_rows_mxfp8_kernel(QuantiseRowsMxfp8Arguments const& args,
                                                     cudaStream_t stream) {
  if (args.width % kMxTile != 0 || args.pitch % 8 != 0) return cudaErrorInvalidValue;
  int64_t const blocks = args.rows * (args.width / kMxBlock);
  if (blocks == 0) return cudaSuccess;
  cudaLaunchConfig_t const config = one_thread_for_each(blocks, stream);
  return cudaLaunchKernelEx(&config, quantise_rows_mxfp8, args);
}

__global__ void __launch_bounds__(kMxThreads)
    dequantise_rows_mxfp8(__grid_constant__ DequantiseRowsMxfp8Arguments const p) {
  int64_t const block = own_mx_block();
  if (block >= p.rows * (p.width / kMxBlock)) return;
  float const scale = gemm::mx_scale(__ldg(static_cast<uint8_t const*>(p.gmem_scales) + block));
  auto const* const gmem_codes = static_cast<uint4 const*>(p.gmem_codes) + 2 * block;
  auto* const gmem_values = static_cast<uint4*>(p.gmem_values) + 4 * block;
  auto const pairs = [&](uint32_t codes) {
    float4 const v = arch::unpack_e4m3(codes);
    return uint2{arch::pack_bf16(v.x * scale, v.y * scale),
                 arch::pack_bf16(v.z * scale, v.w * scale)};
  };
  TESSERA_UNROLL
  for (int i = 0; i < 2; ++i) {
    uint4 const codes = __ldg(gmem_codes + i);
    uint2 const first = pairs(codes.x), second = pairs(codes.y);
    uint2 const third = pairs(codes.z), last = pairs(codes.w);
    gmem_values[2 * i] = {first.x, first.y, second.x, second.y};
    gmem_values[2 * i + 1] = {third.x, third.y, last.x, last.y};
  }
}

inline cudaError_t launch_dequantise_rows_mxfp8_kernel(DequantiseRowsMxfp8Arguments const& args,
                                                       cudaStream_t stream) {
  if (args.width % kMxTile != 0) return cudaErrorInvalidValue;
  int64_t const blocks = args.rows * (args.width / kMxBlock);
  if (blocks == 0) return cudaSuccess;
  cudaLaunchConfig_t const config = one_thread_for_each(blocks, stream);
  return cudaLaunchKernelEx(&config, dequantise_rows_mxfp8, args);
}

// One orientation. A line is a row of what is multiplied: a row of the weights, or kTurned, a column.
template <bool kTurned>
__global__ void __launch_bounds__(kMxThreads)
    quantise_weights_mxfp8(__grid_constant__ QuantiseWeightsMxfp8Arguments const p) {
  int64_t const lines = kTurned ? p.width : p.rows;
  int64_t const blocks = (kTurned ? p.rows : p.width) / kMxBlock;  // of a line, in a half
  int64_t const index = own_mx_block();
  if (index >= int64_t{p.experts} * p.halves * lines * blocks) return;
  int64_t const matrix = index / (lines * blocks), in_matrix = index % (lines * blocks);
  int64_t const expert = matrix / p.halves;
  int const half = static_cast<int>(matrix % p.halves);
  WeightRows const& w = p.w[half];
  // Neighbouring threads are neighbours in memory.
  bool const is_run = (w.column_stride == 1) != kTurned;
  int64_t const line = is_run ? in_matrix / blocks : in_matrix % lines;
  int64_t const block = is_run ? in_matrix % blocks : in_matrix / lines;
  // A layout's blocks of rows have whole 32 of them.
  int64_t const row = kTurned ? block * kMxBlock : line, column = kTurned ? line : block * kMxBlock;
  auto const* const gmem =
      static_cast<uint16_t const*>(w.gmem) + w.row_offset(expert, row) + column * w.column_stride;
  uint32_t pairs[kMxBlock / 2];
  load_mx_block(pairs, gmem, kTurned ? w.row_stride : w.column_stride);
  gemm::MxCodes const codes = gemm::mx_codes(pairs);
  // Halves stand beside each other in a line that is turned, else behind each other.
  int64_t const all_blocks = kTurned ? p.halves * blocks : blocks;
  int64_t const place = kTurned ? half * blocks + block : block;
  int64_t const out = kTurned ? expert : matrix;
  auto* const gmem_codes = static_cast<uint8_t*>(kTurned ? p.gmem_codes_t : p.gmem_codes);
  auto* const gmem_scales = static_cast<uint8_t*>(kTurned ? p.gmem_scales_t : p.gmem_scales);
  store_mx_codes(gmem_codes + ((out * lines + line) * all_blocks + place) * kMxBlock, codes);
  int64_t const of_matrix = lines * all_blocks;  // atoms without padding
  int64_t const atom = line / 128 * (all_blocks / 4) + place / 4;
  gmem_scales[out * of_matrix + atom * 512 + line % 32 * 16 + line % 128 / 32 * 4 + place % 4] =
      codes.scale;
}

inline cudaError_t launch_quantise_weights_mxfp8_kernel(QuantiseWeightsMxfp8Arguments const& args,
                                                        cudaStream_t stream) {
  if (args.rows % kMxTile != 0 || args.width % kMxTile != 0) return cudaErrorInvalidValue;
  for (int half = 0; half < args.halves; ++half) {
    bool const is_split = args.w[half].block < args.rows && args.w[half].block % kMxBlock != 0;
    if (is_split && args.gmem_codes_t != nullptr) {
      return cudaErrorInvalidValue;
    }
  }
  int64_t const blocks = int64_t{args.experts} * args.halves * args.rows * (args.width / kMxBlock);
  if (blocks == 0) return cudaSuccess;
  cudaLaunchConfig_t const config = one_thread_for_each(blocks, stream);
  cudaError_t error = cudaSuccess;
  if (args.gmem_codes != nullptr) {
    error = cudaLaunchKernelEx(&config, quantise_weights_mxfp8<false>, args);
  }
  if (error == cudaSuccess && args.gmem_codes_t != nullptr) {
    error = cudaLaunchKernelEx(&config, quantise_weights_mxfp8<true>, args);
  }
  return error;
}

}  // namespace tessera::cuda

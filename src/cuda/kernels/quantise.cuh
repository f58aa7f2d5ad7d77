// SPDX-License-Identifier: Apache-2.0
// quantise_rows, quantise_weights: bf16 to e4m3 codes and fp32 scales (docs/numerics.md#fp8-and-mxfp8).
// Shapes   x (T,d) in blocks of 1 x 128, scales (T,d/128); w (E,2,n,d), (E,d,n) in blocks of 128 x 128, scales
//          (E,n/128,d/128,2), (E,d/128,n/128)
// Work     bytes: 3 an element, and 4 a block; memory bound
// Schedule rows: half a warp for a block, 8 elements of it a lane, kRowsInFlight blocks each; largest magnitudes by
//          shuffles. weights: a CTA for a block, 64 elements a thread, which stay in registers
// Numerics the bytes of tessera::quantise(), whatever the values; bitwise repeatable: yes, a maximum has no order
// Requires 16-byte aligned rows of a multiple of 128 elements
#pragma once

#include <cstdint>

#include "../arch/approx_math.cuh"
#include "../arch/convert_e4m3.cuh"
#include "../arch/dynamic_shared.cuh"
#include "../arch/shared_address.cuh"
#include "../arch/warp.cuh"
#include "../host/low_precision.hpp"
#include "core/fp8.hpp"

namespace tessera::cuda {

constexpr int kQuantiseThreads = 256, kQuantiseBlock = 128;
constexpr int kShareElements = 8;  // of a lane: 16 bytes of bf16, 8 of codes
constexpr int kQuantiseWarps = kQuantiseThreads / arch::kWarpThreads;
constexpr int kBlockLanes = kQuantiseBlock / kShareElements;

// The largest magnitude of eight bf16, as bits of fp32.
__device__ __forceinline__ uint32_t largest_of(uint4 share) {
  uint32_t const largest = arch::max_magnitudes_bf16(
      arch::max_magnitudes_bf16(
          arch::max_magnitudes_bf16(arch::max_magnitudes_bf16(0, share.x), share.y), share.z),
      share.w);
  return max(largest << 16, largest & 0xffff0000u);
}

__device__ __forceinline__ core::BlockScale quantise_scale(uint32_t largest, bool pow2) {
  return pow2 ? core::pow2_scale(largest) : core::fp32_scale(largest);
}

__device__ __forceinline__ uint2 codes_of(uint4 share, float r) {
  float2 const v0 = arch::unpack_bf16(share.x), v1 = arch::unpack_bf16(share.y);
  float2 const v2 = arch::unpack_bf16(share.z), v3 = arch::unpack_bf16(share.w);
  return {arch::pack_e4m3(v0.x * r, v0.y * r, v1.x * r, v1.y * r),
          arch::pack_e4m3(v2.x * r, v2.y * r, v3.x * r, v3.y * r)};
}

// Over the lanes of a block.
template <int kLanes>
__device__ __forceinline__ uint32_t fold_largest(uint32_t largest) {
  TESSERA_UNROLL
  for (int half = kLanes / 2; half > 0; half /= 2) {
    largest = max(largest, __shfl_xor_sync(arch::kAllLanes, largest, half));
  }
  return largest;
}

constexpr int kRowsInFlight = 4;  // blocks of a half warp, read before the first is quantised
constexpr int kBlocksOfCta = kQuantiseThreads / kBlockLanes * kRowsInFlight;

__global__ void __launch_bounds__(kQuantiseThreads)
    quantise_rows(__grid_constant__ QuantiseRowsArguments const p) {
  uint32_t const across = uint32_t(p.width / kQuantiseBlock);
  int64_t const blocks = p.rows * across;
  int const lane = static_cast<int>(threadIdx.x) % kBlockLanes;
  // Blocks of a CTA are neighbours.
  int64_t const first = int64_t{blockIdx.x} * kBlocksOfCta + threadIdx.x / kBlockLanes;
  constexpr int kStep = kQuantiseThreads / kBlockLanes;
  uint4 shares[kRowsInFlight] = {};
  TESSERA_UNROLL
  for (int i = 0; i < kRowsInFlight; ++i) {
    int64_t const block = first + i * kStep;
    if (block >= blocks) continue;
    int64_t const row = block / across, column = block % across;
    shares[i] = __ldg(reinterpret_cast<uint4 const*>(static_cast<uint16_t const*>(p.gmem_x) +
                                                     row * p.pitch + column * kQuantiseBlock +
                                                     lane * kShareElements));
  }
  TESSERA_UNROLL
  for (int i = 0; i < kRowsInFlight; ++i) {
    int64_t const block = first + i * kStep;
    core::BlockScale const scale =
        quantise_scale(fold_largest<kBlockLanes>(largest_of(shares[i])), p.pow2);
    if (block < blocks) {
      auto* const gmem_codes = static_cast<uint8_t*>(p.gmem_codes) + block * kQuantiseBlock;
      reinterpret_cast<uint2*>(gmem_codes)[lane] = codes_of(shares[i], scale.inverse);
      if (lane == 0) p.gmem_scales[block] = scale.scale;
    }
    __syncwarp();
  }
}

inline cudaError_t launch_quantise_rows_kernel(QuantiseRowsArguments const& args,
                                               cudaStream_t stream) {
  if (args.width % kQuantiseBlock != 0 || args.pitch % kShareElements != 0) {
    return cudaErrorInvalidValue;
  }
  int64_t const blocks = args.rows * (args.width / kQuantiseBlock);
  if (blocks == 0) return cudaSuccess;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned((blocks + kBlocksOfCta - 1) / kBlocksOfCta));
  config.blockDim = dim3(kQuantiseThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, quantise_rows, args);
}

__global__ void __launch_bounds__(kQuantiseThreads)
    quantise_weights(__grid_constant__ QuantiseWeightsArguments const p) {
  constexpr int kRowsAtOnce = kQuantiseThreads / kBlockLanes;
  constexpr int kShares = kQuantiseBlock / kRowsAtOnce;
  TESSERA_DYNAMIC_SHARED(smem_raw);
  auto* const smem_largest = reinterpret_cast<uint32_t*>(smem_raw);  // of each warp
  // A block of (expert, half, block of rows), and one of columns: those that share a row are neighbours.
  int64_t const across = p.width / kQuantiseBlock, down = p.rows / kQuantiseBlock;
  int64_t const block_row = blockIdx.x / across, block_column = blockIdx.x % across;
  int64_t const matrix = block_row / down;  // expert, half
  int const lane = static_cast<int>(threadIdx.x) % kBlockLanes;
  int64_t const offset = (block_row * kQuantiseBlock + threadIdx.x / kBlockLanes) * p.width +
                         block_column * kQuantiseBlock + lane * kShareElements;
  uint4 shares[kShares];
  uint32_t largest = 0;
  TESSERA_UNROLL
  for (int i = 0; i < kShares; ++i) {
    shares[i] = __ldg(reinterpret_cast<uint4 const*>(static_cast<uint16_t const*>(p.gmem_w) +
                                                     offset + i * kRowsAtOnce * p.width));
    largest = max(largest, largest_of(shares[i]));
  }
  largest = fold_largest<arch::kWarpThreads>(largest);
  if (arch::lane_idx() == 0) smem_largest[threadIdx.x / arch::kWarpThreads] = largest;
  __syncthreads();
  for (int warp = 0; warp < kQuantiseWarps; ++warp) largest = max(largest, smem_largest[warp]);
  core::BlockScale const scale = quantise_scale(largest, p.pow2);
  TESSERA_UNROLL
  for (int i = 0; i < kShares; ++i) {
    auto* const gmem_codes =
        static_cast<uint8_t*>(p.gmem_codes) + offset + i * kRowsAtOnce * p.width;
    *reinterpret_cast<uint2*>(gmem_codes) = codes_of(shares[i], scale.inverse);
  }
  if (threadIdx.x == 0) {
    int64_t const place = (matrix / p.halves * down + block_row % down) * across + block_column;
    p.gmem_scales[place * p.halves + matrix % p.halves] = scale.scale;
  }
}

inline cudaError_t launch_quantise_weights_kernel(QuantiseWeightsArguments const& args,
                                                  cudaStream_t stream) {
  if (args.rows % kQuantiseBlock != 0 || args.width % kQuantiseBlock != 0) {
    return cudaErrorInvalidValue;
  }
  int64_t const blocks = int64_t{args.halves} * args.experts * (args.rows / kQuantiseBlock) *
                         (args.width / kQuantiseBlock);
  if (blocks == 0) return cudaSuccess;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(kQuantiseThreads);
  config.dynamicSmemBytes = kQuantiseWarps * sizeof(uint32_t);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, quantise_weights, args);
}

}  // namespace tessera::cuda

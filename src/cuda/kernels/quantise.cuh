// SPDX-License-Identifier: Apache-2.0
// quantise_rows, quantise_weights: bf16 to e4m3 codes and fp32 scales (docs/numerics.md#fp8-and-mxfp8).
// turn_scales: scales of weights as those of their transpose. dequantise_rows: the way back.
// Shapes   x (T,d) in blocks of 1 x 128, scales (T,d/128); w_up, w_down of any layout in blocks of 128 x 128 to codes
//          (E,2,n,d), (E,d,n) and their transposes, scales (E,n/128,d/128,2), (E,d/128,n/128)
// Work     bytes: 3 an element (4 with a transpose), and 4 a block; memory bound
// Schedule rows: half a warp for a block, 8 elements of it a lane, kRowsInFlight blocks each; largest magnitudes by
//          shuffles. weights: a CTA for a block, 64 elements a thread, which stay in registers; codes are turned in
//          shared memory. Back: 16 codes a thread
// Numerics the bytes of tessera::quantise(), whatever the values; bitwise repeatable: yes, a maximum has no order
// Requires 16-byte aligned rows, or columns of transposed weights, of a multiple of 128 elements
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

constexpr int kQuantiseThreads = 256;
constexpr int kShareElements = 8;  // of a lane: 16 bytes of bf16, 8 of codes
constexpr int kQuantiseWarps = kQuantiseThreads / arch::kWarpThreads;
constexpr int kBlockLanes = kScaleBlock / kShareElements;

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
  uint32_t const across = uint32_t(p.width / kScaleBlock);
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
                                                     row * p.pitch + column * kScaleBlock +
                                                     lane * kShareElements));
  }
  TESSERA_UNROLL
  for (int i = 0; i < kRowsInFlight; ++i) {
    int64_t const block = first + i * kStep;
    core::BlockScale const scale =
        quantise_scale(fold_largest<kBlockLanes>(largest_of(shares[i])), p.pow2);
    if (block < blocks) {
      auto* const gmem_codes = static_cast<uint8_t*>(p.gmem_codes) + block * kScaleBlock;
      reinterpret_cast<uint2*>(gmem_codes)[lane] = codes_of(shares[i], scale.inverse);
      if (lane == 0) p.gmem_scales[block] = scale.scale;
    }
    __syncwarp();
  }
}

inline cudaError_t launch_quantise_rows_kernel(QuantiseRowsArguments const& args,
                                               cudaStream_t stream) {
  if (args.width % kScaleBlock != 0 || args.pitch % kShareElements != 0) {
    return cudaErrorInvalidValue;
  }
  int64_t const blocks = args.rows * (args.width / kScaleBlock);
  if (blocks == 0) return cudaSuccess;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned((blocks + kBlocksOfCta - 1) / kBlocksOfCta));
  config.blockDim = dim3(kQuantiseThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, quantise_rows, args);
}

// A block's lines in the order of memory: its rows, or columns of weights that are stored transposed. Codes leave as
// they lie, from registers, and turned, by way of shared memory.
constexpr int kRowsAtOnce = kQuantiseThreads / kBlockLanes;
constexpr int kShares = kScaleBlock / kRowsAtOnce;
constexpr int kLineWords = kScaleBlock / 4;
constexpr int kTurnedLines = 16;  // that a thread turns: 16 bytes of each of four columns
constexpr int kTurnedShares = kScaleBlock / kTurnedLines;

struct QuantiseWeightsStorage {
  uint32_t largest[kQuantiseWarps];
  alignas(16) uint32_t codes[kScaleBlock * kLineWords];  // word w of line i at place_of_word(i, w)
};

// Threads of a warp write two lines, or read four words of a line in each kTurnedLines: no bank has two of them.
__device__ __forceinline__ int place_of_word(int line, int word) {
  return line * kLineWords + (word ^ line / kTurnedLines * 4);
}

// Words of four lines, each of four columns, become words of four columns.
__device__ __forceinline__ void turn_bytes(uint32_t const (&lines)[4], uint32_t (&columns)[4]) {
  uint32_t const low[2] = {arch::permute_bytes(lines[0], lines[1], 0x5140),
                           arch::permute_bytes(lines[2], lines[3], 0x5140)};
  uint32_t const high[2] = {arch::permute_bytes(lines[0], lines[1], 0x7362),
                            arch::permute_bytes(lines[2], lines[3], 0x7362)};
  columns[0] = arch::low_halves(low[0], low[1]);
  columns[1] = arch::high_halves(low[0], low[1]);
  columns[2] = arch::low_halves(high[0], high[1]);
  columns[3] = arch::high_halves(high[0], high[1]);
}

// This class says where the lines of a block begin, as offsets in elements. Most layouts have them at one distance.
class BlockLines {
 public:
  __device__ __forceinline__ BlockLines(WeightRows const& w, int64_t expert, int64_t first_row,
                                        int64_t first_column)
      : w_(w), first_row_(first_row) {
    int64_t const start = expert * w.expert_stride + first_column * w.column_stride;
    if (w.column_stride != 1) {
      base_ = start + first_row;
      step_ = w.column_stride;
    } else if (first_row + kScaleBlock <= w.block) {
      base_ = start + first_row * w.row_stride;
      step_ = w.row_stride;
    } else {
      base_ = start;
      step_ = 0;
    }
  }
  __device__ __forceinline__ int64_t at(int line) const {
    if (step_ != 0) return base_ + line * step_;
    auto const row = static_cast<uint32_t>(first_row_ + line);
    auto const block = static_cast<uint32_t>(w_.block);
    return base_ + row / block * w_.block_stride + row % block * w_.row_stride;
  }

 private:
  WeightRows const& w_;
  int64_t first_row_;
  int64_t base_, step_;  // a step of 0: a block of rows ends within these
};

// A CTA has a block: neighbours share lines. kTurns: codes are wanted across the lines, too.
template <bool kTurns>
__global__ void __launch_bounds__(kQuantiseThreads)
    quantise_weights(__grid_constant__ QuantiseWeightsArguments const p) {
  TESSERA_DYNAMIC_SHARED(smem_raw);
  auto& smem = *reinterpret_cast<QuantiseWeightsStorage*>(smem_raw);
  auto const across = uint32_t(p.width / kScaleBlock), down = uint32_t(p.rows / kScaleBlock);
  bool const is_transposed = p.w[0].column_stride != 1;
  uint32_t const along_line = is_transposed ? down : across;
  uint32_t const of_lines = blockIdx.x / along_line, along = blockIdx.x % along_line;
  uint32_t const lines_down = is_transposed ? across : down;
  int64_t const matrix = of_lines / lines_down, expert = p.halves == 2 ? matrix / 2 : matrix;
  int const half = p.halves == 2 ? static_cast<int>(matrix % 2) : 0;
  WeightRows const& w = p.w[half];
  int64_t const block = is_transposed ? along : of_lines % lines_down;
  int64_t const block_column = is_transposed ? of_lines % lines_down : along;
  int64_t const first_row = block * kScaleBlock, first_column = block_column * kScaleBlock;
  int const lane = static_cast<int>(threadIdx.x) % kBlockLanes;
  int const first_line = static_cast<int>(threadIdx.x) / kBlockLanes;
  BlockLines const lines(w, expert, first_row, first_column);
  uint4 shares[kShares];
  uint32_t largest = 0;
  TESSERA_UNROLL
  for (int i = 0; i < kShares; ++i) {
    int64_t const at = lines.at(first_line + i * kRowsAtOnce) + lane * kShareElements;
    shares[i] = __ldg(reinterpret_cast<uint4 const*>(static_cast<uint16_t const*>(w.gmem) + at));
  }
  TESSERA_UNROLL
  for (int i = 0; i < kShares; ++i) largest = max(largest, largest_of(shares[i]));
  largest = fold_largest<arch::kWarpThreads>(largest);
  if (arch::lane_idx() == 0) smem.largest[threadIdx.x / arch::kWarpThreads] = largest;
  __syncthreads();
  for (int warp = 0; warp < kQuantiseWarps; ++warp) largest = max(largest, smem.largest[warp]);
  core::BlockScale const scale = quantise_scale(largest, p.pow2);
  // Where the block begins in either orientation of the codes, and from line to line.
  int64_t const pitch = p.width, turned_pitch = p.halves * p.rows;
  auto* const gmem_rows =
      static_cast<uint8_t*>(p.gmem_codes) + (matrix * p.rows + first_row) * pitch + first_column;
  auto* const gmem_columns = static_cast<uint8_t*>(p.gmem_codes_t) +
                             (expert * p.width + first_column) * turned_pitch + half * p.rows +
                             first_row;
  bool const stores_lines = (is_transposed ? p.gmem_codes_t : p.gmem_codes) != nullptr;
  uint8_t* const gmem_line = (is_transposed ? gmem_columns : gmem_rows) +
                             first_line * (is_transposed ? turned_pitch : pitch);
  int64_t const line_step = kRowsAtOnce * (is_transposed ? turned_pitch : pitch);
  TESSERA_UNROLL
  for (int i = 0; i < kShares; ++i) {
    int const line = first_line + i * kRowsAtOnce;
    uint2 const codes = codes_of(shares[i], scale.inverse);
    if (stores_lines) reinterpret_cast<uint2*>(gmem_line + i * line_step)[lane] = codes;
    if constexpr (kTurns) {
      *reinterpret_cast<uint2*>(&smem.codes[place_of_word(line, 2 * lane)]) = codes;
    }
  }
  if (threadIdx.x == 0) {
    if (p.gmem_scales != nullptr) {
      p.gmem_scales[((expert * down + block) * across + block_column) * p.halves + half] =
          scale.scale;
    }
    if (p.gmem_scales_t != nullptr) {
      p.gmem_scales_t[((expert * across + block_column) * p.halves + half) * down + block] =
          scale.scale;
    }
  }
  if constexpr (kTurns) {
    __syncthreads();
    // Eight threads have a column's 128 lines, which are 128 bytes of the other orientation.
    int const share = static_cast<int>(threadIdx.x) % kTurnedShares;
    int const word = static_cast<int>(threadIdx.x) / kTurnedShares;
    uint32_t columns[4][4];  // of four columns, each of four words
    TESSERA_UNROLL
    for (int four = 0; four < 4; ++four) {
      uint32_t words[4], turned[4];
      TESSERA_UNROLL
      for (int i = 0; i < 4; ++i) {
        words[i] = smem.codes[place_of_word(kTurnedLines * share + 4 * four + i, word)];
      }
      turn_bytes(words, turned);
      TESSERA_UNROLL
      for (int i = 0; i < 4; ++i) columns[i][four] = turned[i];
    }
    int64_t const other_pitch = is_transposed ? pitch : turned_pitch;
    uint8_t* const gmem_turned =
        (is_transposed ? gmem_rows : gmem_columns) + 4 * word * other_pitch + kTurnedLines * share;
    TESSERA_UNROLL
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<uint4*>(gmem_turned + i * other_pitch) = {columns[i][0], columns[i][1],
                                                                  columns[i][2], columns[i][3]};
    }
  }
}

inline cudaError_t launch_quantise_weights_kernel(QuantiseWeightsArguments const& args,
                                                  cudaStream_t stream) {
  if (args.rows % kScaleBlock != 0 || args.width % kScaleBlock != 0) {
    return cudaErrorInvalidValue;
  }
  int64_t const blocks =
      int64_t{args.halves} * args.experts * (args.rows / kScaleBlock) * (args.width / kScaleBlock);
  if (blocks == 0) return cudaSuccess;
  bool const is_transposed = args.w[0].column_stride != 1;
  bool const turns = (is_transposed ? args.gmem_codes : args.gmem_codes_t) != nullptr;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(kQuantiseThreads);
  config.dynamicSmemBytes = sizeof(QuantiseWeightsStorage);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, turns ? quantise_weights<true> : quantise_weights<false>,
                            args);
}

// A thread for each scale, in the order in which they are written.
__global__ void __launch_bounds__(kQuantiseThreads)
    turn_scales(__grid_constant__ TurnScalesArguments const p) {
  auto const down = uint32_t(p.down), across = uint32_t(p.across), halves = uint32_t(p.halves);
  uint32_t const to = blockIdx.x * kQuantiseThreads + threadIdx.x;
  if (to >= uint32_t(p.experts) * across * halves * down) return;
  uint32_t const block = to % down, half = to / down % halves;
  uint32_t const column = to / (down * halves) % across, expert = to / (down * halves) / across;
  p.gmem_scales_t[to] = p.gmem_scales[((expert * down + block) * across + column) * halves + half];
}

inline cudaError_t launch_turn_scales_kernel(TurnScalesArguments const& args, cudaStream_t stream) {
  int64_t const scales = args.down * args.across * args.halves * args.experts;
  if (scales == 0) return cudaSuccess;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned((scales + kQuantiseThreads - 1) / kQuantiseThreads));
  config.blockDim = dim3(kQuantiseThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, turn_scales, args);
}

// 16 codes of a block and its scale to 32 bytes of bf16.
constexpr int kWideShare = 16, kSharesInFlight = 2;

// Two bf16 of two codes, the first in the lowest byte of `codes`. The bits of a code, moved, are those of an fp32 that
// is 2^-120 of it, subnormal codes too.
__device__ __forceinline__ uint32_t dequantised_pair(uint32_t codes, float scale) {
  auto const value = [scale](uint32_t code) {
    float const magnitude = __uint_as_float((code & 0x80) << 24 | (code & 0x7f) << 20) * 0x1p120f;
    return magnitude * scale;
  };
  return arch::pack_bf16(value(codes & 0xff), value(codes >> 8 & 0xff));
}

__global__ void __launch_bounds__(kQuantiseThreads)
    dequantise_rows(__grid_constant__ DequantiseRowsArguments const p) {
  auto const of_row = static_cast<uint32_t>(p.width / kWideShare);
  int64_t rows = p.rows;
  if (p.gmem_num_rows != nullptr && *p.gmem_num_rows < rows) rows = *p.gmem_num_rows;
  // Shares of a CTA are neighbours, from `first` of row `first_row` on.
  int64_t const base = int64_t{blockIdx.x} * (kSharesInFlight * kQuantiseThreads);
  int64_t const first_row = base / of_row;
  uint32_t const first = static_cast<uint32_t>(base % of_row) + threadIdx.x;
  uint4 codes[kSharesInFlight] = {};
  float scales[kSharesInFlight] = {};
  TESSERA_UNROLL
  for (int i = 0; i < kSharesInFlight; ++i) {
    uint32_t const at = first + i * kQuantiseThreads, share = at % of_row;
    int64_t const row = first_row + at / of_row;
    if (row >= rows) continue;
    codes[i] = __ldg(static_cast<uint4 const*>(p.gmem_codes) + row * of_row + share);
    int64_t const block = share / (kScaleBlock / kWideShare);
    scales[i] = __ldg(p.gmem_scales + row * p.row_step + block * p.block_step);
  }
  TESSERA_UNROLL
  for (int i = 0; i < kSharesInFlight; ++i) {
    uint32_t const at = first + i * kQuantiseThreads;
    int64_t const row = first_row + at / of_row;
    if (row >= rows) continue;
    auto* const to = static_cast<uint4*>(p.gmem_values) + 2 * (row * of_row + at % of_row);
    uint4 const c = codes[i];
    float const s = scales[i];
    to[0] = {dequantised_pair(c.x, s), dequantised_pair(c.x >> 16, s), dequantised_pair(c.y, s),
             dequantised_pair(c.y >> 16, s)};
    to[1] = {dequantised_pair(c.z, s), dequantised_pair(c.z >> 16, s), dequantised_pair(c.w, s),
             dequantised_pair(c.w >> 16, s)};
  }
}

inline cudaError_t launch_dequantise_rows_kernel(DequantiseRowsArguments const& args,
                                                 cudaStream_t stream) {
  if (args.width % kScaleBlock != 0) return cudaErrorInvalidValue;
  int64_t const shares = args.rows * (args.width / kWideShare);
  if (shares == 0) return cudaSuccess;
  constexpr int64_t kOfCta = int64_t{kSharesInFlight} * kQuantiseThreads;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned((shares + kOfCta - 1) / kOfCta));
  config.blockDim = dim3(kQuantiseThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, dequantise_rows, args);
}

}  // namespace tessera::cuda

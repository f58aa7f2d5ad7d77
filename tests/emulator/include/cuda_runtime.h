// SPDX-License-Identifier: Apache-2.0
// The language of device code, for a compiler of the host.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include <cuda_runtime_api.h>
#include "tests/emulator/emulator.hpp"

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

using std::isfinite;
using std::max;
using std::min;

template <class T>
T __ldcg(T const* from) {
  return *from;
}
template <class T>
T __ldg(T const* from) {
  return *from;
}

// A loop that looks at a counter may end with this.
template <class T>
T atomicAdd(T* word, T value) {
  T const before = *word;
  *word = static_cast<T>(before + value);
  tessera::emulator::changed();
  return before;
}
template <class T>
T atomicXor(T* word, T value) {
  T const before = *word;
  *word = static_cast<T>(before ^ value);
  tessera::emulator::changed();
  return before;
}
template <class T>
T atomicCAS(T* word, T expected, T value) {
  T const before = *word;
  if (before == expected) *word = value;
  tessera::emulator::changed();
  return before;
}
template <class T>
T atomicOr(T* word, T bits) {
  T const before = *word;
  *word = before | bits;
  tessera::emulator::changed();
  return before;
}
inline void __threadfence() {}
inline void __threadfence_system() {}

inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __clz(int bits) { return std::countl_zero(static_cast<unsigned>(bits)); }
inline int __ffs(int bits) {
  return bits == 0 ? 0 : std::countr_zero(static_cast<unsigned>(bits)) + 1;
}
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }

// Behind what the stream has: the first thread of each CTA looks, so that the others need no turns. Stores that a
// kernel has not awaited may land later.
inline void launch_in(cudaStream_t stream, unsigned ctas, unsigned threads,
                      std::size_t shared_bytes, std::function<void()> body, unsigned cluster = 1) {
  if (stream == nullptr) {
    tessera::emulator::launch(ctas, cluster, threads, shared_bytes, std::move(body));
    return;
  }
  std::uint64_t const ahead = stream->launched;
  stream->launched += std::uint64_t{ctas} * threads;
  tessera::emulator::launch(ctas, cluster, threads, shared_bytes, [=, body = std::move(body)] {
    while (threadIdx.x == 0 && stream->ended < ahead) tessera::emulator::yield();
    tessera::emulator::named_barrier(0, static_cast<int>(blockDim.x), true);
    body();
    ++stream->ended;
  });
}
template <class... Params>
cudaError_t cudaLaunchKernelEx(cudaLaunchConfig_t const* config, void (*kernel)(Params...),
                               std::type_identity_t<Params> const&... params) {
  unsigned cluster = tessera::emulator::compiled_cluster(reinterpret_cast<void const*>(kernel));
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      cluster = config->attrs[i].val.clusterDim.x;
    }
  }
  launch_in(
      config->stream, config->gridDim.x, config->blockDim.x, config->dynamicSmemBytes,
      [=] { kernel(params...); }, cluster);
  return cudaSuccess;
}

// `arguments`: an address for each parameter.
template <class... Params>
cudaError_t cudaLaunchKernel(void (*kernel)(Params...), dim3 grid, dim3 block, void** arguments,
                             std::size_t shared_bytes, cudaStream_t stream) {
  auto const read = [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    return std::tuple<Params...>(*static_cast<Params*>(arguments[kIndex])...);
  };
  auto const params = read(std::index_sequence_for<Params...>());
  launch_in(stream, grid.x, block.x, shared_bytes, [=] { std::apply(kernel, params); });
  return cudaSuccess;
}
// All CTAs are resident in any case.
template <class... Params>
cudaError_t cudaLaunchCooperativeKernel(void (*kernel)(Params...), dim3 grid, dim3 block,
                                        void** arguments, std::size_t shared_bytes,
                                        cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}

#define TESSERA_EMULATOR_SITE char const *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncwarp() { tessera::emulator::exchange(0, {.file = "__syncwarp"}); }
inline void __syncthreads() {
  tessera::emulator::named_barrier(0, static_cast<int>(blockDim.x), true);
}
inline int __syncthreads_count(int value) { return tessera::emulator::block_votes(value != 0); }
inline int __syncthreads_or(int value) { return __syncthreads_count(value) != 0 ? 1 : 0; }
template <class T>
T __shfl_sync(unsigned, T value, int lane, TESSERA_EMULATOR_SITE) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = tessera::emulator::exchange(bits, {file, line})[lane & 31];
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
// Among `width` neighbours.
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width, TESSERA_EMULATOR_SITE) {
  int const own = static_cast<int>(threadIdx.x % 32);
  return __shfl_sync(mask, value, own / width * width + lane % width, file, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int by, TESSERA_EMULATOR_SITE) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  return __shfl_sync(mask, value, lane < by ? lane : lane - by, file, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int by, TESSERA_EMULATOR_SITE) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  return __shfl_sync(mask, value, lane + by > 31 ? lane : lane + by, file, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, TESSERA_EMULATOR_SITE) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ bits, file, line);
}
inline unsigned __ballot_sync(unsigned, int value, TESSERA_EMULATOR_SITE) {
  std::uint64_t const* const all = tessera::emulator::exchange(value != 0 ? 1 : 0, {file, line});
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(all[lane]) << lane;
  return votes;
}
inline int __any_sync(unsigned mask, int value, TESSERA_EMULATOR_SITE) {
  return __ballot_sync(mask, value, file, line) != 0;
}
inline int __all_sync(unsigned mask, int value, TESSERA_EMULATOR_SITE) {
  return __ballot_sync(mask, value, file, line) == 0xffffffffu;
}
// Of all lanes. Whole kernels work so while many threads wait for their end.
template <class T, class Fold>
T reduce_lanes(T value, Fold fold) {
  tessera::emulator::changed();
  for (int bits = 16; bits > 0; bits /= 2) {
    value = fold(value, __shfl_xor_sync(0xffffffffu, value, bits));
  }
  return value;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return reduce_lanes(value, [](unsigned a, unsigned b) { return std::max(a, b); });
}
inline int __reduce_min_sync(unsigned, int value) {
  return reduce_lanes(value, [](int a, int b) { return std::min(a, b); });
}
inline int __reduce_add_sync(unsigned, int value) {
  return reduce_lanes(value, [](int a, int b) { return a + b; });
}
inline unsigned __match_any_sync(unsigned, int value, TESSERA_EMULATOR_SITE) {
  auto const mine = static_cast<std::uint64_t>(static_cast<std::uint32_t>(value));
  std::uint64_t const* const all = tessera::emulator::exchange(mine, {file, line});
  unsigned same = 0;
  for (int lane = 0; lane < 32; ++lane) same |= (all[lane] == mine ? 1u : 0u) << lane;
  return same;
}

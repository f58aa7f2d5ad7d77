// SPDX-License-Identifier: Apache-2.0
// The functions of src/cuda/arch/ for emulated kernels. Stands in the place of each of its headers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include <cuda.h>
#include <cuda_runtime.h>
#include "core/fp8.hpp"
#include "tests/emulator/emulator.hpp"

#define TESSERA_UNROLL

namespace tessera::cuda::arch {

// warp.cuh

constexpr int kWarpThreads = 32;
constexpr int kWarpgroupThreads = 128;
constexpr unsigned kAllLanes = 0xffffffffu;

inline int lane_idx() { return static_cast<int>(threadIdx.x) % kWarpThreads; }
inline int warp_idx() {
  return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpThreads, 0);
}
inline int warpgroup_idx() {
  return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0);
}
inline int warp_in_warpgroup() {
  return static_cast<int>(threadIdx.x) % kWarpgroupThreads / kWarpThreads;
}
inline uint32_t forgotten(uint32_t value) { return value; }
inline bool elect_one() {
  __ballot_sync(kAllLanes, 1);
  return lane_idx() == 0;
}

// shared_address.cuh: counted from the CTA's shared memory.

inline uint32_t shared_address(void const* smem) {
  auto const at = static_cast<unsigned char const*>(smem) - emulator::shared_memory();
  if (at < 0 || at >= emulator::kMaxShared) emulator::fail("no address of shared memory");
  return static_cast<uint32_t>(at);
}
inline unsigned char* shared_at(uint32_t address) { return emulator::shared_memory() + address; }

// dynamic_shared.cuh

#define TESSERA_DYNAMIC_SHARED(name) unsigned char* const name = emulator::shared_memory()
#define TESSERA_DYNAMIC_SHARED_ARRAY(type, name) \
  auto* const name = reinterpret_cast<type*>(emulator::shared_memory())

// launch_bounds.cuh

#define TESSERA_LAUNCH_BOUNDS(...)
#define TESSERA_LAUNCH_BOUNDS_CTAS(...)

// static_shared.cuh

#define TESSERA_STATIC_SHARED(name, ...)                      \
  static char const name##_key = 0;                           \
  auto& name = *static_cast<std::add_pointer_t<__VA_ARGS__>>( \
      emulator::static_shared(&name##_key, sizeof(std::type_identity_t<__VA_ARGS__>)))

// clock.cuh: ten for every turn.

inline uint64_t nanoseconds() {
  emulator::yield();
  return 10 * emulator::turns();
}
inline void sleep_ns(uint32_t) { emulator::yield(); }

// approx_math.cuh

// As coarse as the instructions may be, and like them at the ends of the range (PTX ISA): +-1 at infinity; where the
// instruction says ftz, subnormals are 0.

// Relative error below 2^-11, always towards 0: 11 bits of the fraction stay.
inline float tanh_approx(float x) {
  return __uint_as_float(__float_as_uint(std::tanh(x)) & ~0xfffu);
}
inline float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}
inline float exp2_approx(float x) { return flushed(std::exp2(flushed(x))); }
inline float rcp_approx(float x) { return flushed(1.0f / flushed(x)); }
// From an approximation that is one unit in the last place off, as the instruction's may be.
inline float reciprocal(float x) {
  float const near = std::nextafter(rcp_approx(x), 0.0f);
  return std::fma(near, std::fma(-x, near, 1.0f), near);
}
inline uint32_t round_to_bf16(float x) {
  uint32_t const bits = __float_as_uint(x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t pack_bf16(float low, float high) {
  return round_to_bf16(low) | round_to_bf16(high) << 16;
}
inline uint32_t permute_bytes(uint32_t first, uint32_t second, uint32_t selector) {
  uint64_t const bytes = first | uint64_t{second} << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return result;
}
inline uint32_t low_halves(uint32_t first, uint32_t second) {
  return (first & 0xffffu) | second << 16;
}
inline uint32_t high_halves(uint32_t first, uint32_t second) {
  return first >> 16 | (second & 0xffff0000u);
}
inline float2 unpack_bf16(uint32_t packed) {
  return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
}

// convert_e4m3.cuh

inline uint32_t pack_e4m3(float v0, float v1, float v2, float v3) {
  auto const code = [](float v) { return uint32_t{core::round_to<core::E4m3>(v).bits}; };
  return code(v0) | code(v1) << 8 | code(v2) << 16 | code(v3) << 24;
}
inline float4 unpack_e4m3(uint32_t codes) {
  auto const value = [&](int i) {
    return core::to_fp32(core::E4m3{static_cast<std::uint8_t>(codes >> 8 * i)});
  };
  return {value(0), value(1), value(2), value(3)};
}
inline float max_magnitude(float largest, float value) {
  float const magnitude = std::fabs(value);
  if (largest != largest || magnitude != magnitude) return __uint_as_float(0x7fffffffu);
  return magnitude > largest ? magnitude : largest;
}
inline uint32_t max_magnitudes_bf16(uint32_t largest, uint32_t pair) {
  return std::max(largest & 0xffffu, pair & 0x7fffu) |
         std::max(largest & 0xffff0000u, pair & 0x7fff0000u);
}
inline uint32_t larger_magnitudes_bf16(uint32_t first, uint32_t second) {
  uint32_t larger = 0;
  for (int shift : {0, 16}) {
    uint32_t const a = first >> shift & 0xffffu, b = second >> shift & 0xffffu;
    uint32_t const magnitude = std::max(a & 0x7fffu, b & 0x7fffu);
    larger |= (magnitude > 0x7f80u ? 0x7fffu : magnitude | ((a ^ b) & 0x8000u)) << shift;
  }
  return larger;
}

// mbarrier.cuh

using Mbarrier = uint64_t;

inline void mbarrier_init(Mbarrier* barrier, uint32_t arrivals) {
  emulator::init(barrier, arrivals);
}
inline void mbarrier_fence_init() {}
inline void mbarrier_arrive(Mbarrier* barrier) { emulator::arrive(barrier, 0); }
inline void mbarrier_arrive_expect_tx(Mbarrier* barrier, uint32_t bytes) {
  emulator::arrive(barrier, bytes);
}
inline bool mbarrier_try_wait(Mbarrier* barrier, uint32_t parity) {
  emulator::yield();
  return emulator::is_over(barrier, parity);
}
inline bool mbarrier_test_wait(Mbarrier* barrier, uint32_t parity) {
  return mbarrier_try_wait(barrier, parity);
}
inline void mbarrier_wait(Mbarrier* barrier, uint32_t parity) { emulator::wait(barrier, parity); }

// named_barrier.cuh, setmaxnreg.cuh, proxy_fence.cuh, dependent_launch.cuh

inline void named_barrier_sync(int id, int threads) { emulator::named_barrier(id, threads, true); }
inline void named_barrier_arrive(int id, int threads) {
  emulator::named_barrier(id, threads, false);
}
template <int kCount>
void release_registers() {}
template <int kCount>
void acquire_registers() {}
inline void fence_proxy_async_shared() { emulator::fenced_shared(); }
inline void fence_proxy_async_global() {}
inline void let_next_kernel_start() { emulator::let_next_grid_start(); }
inline void wait_for_previous_kernel() { emulator::wait_for_previous_grids(); }

// signal.cuh: who looks at a word lets others run.

template <class T>
T look(T const* word) {
  emulator::yield();
  return *word;
}
template <class T>
void store(T* word, T value) {
  *word = value;
  emulator::changed();
}
inline uint32_t load_acquire_sys(uint32_t const* word) { return look(word); }
inline uint32_t load_acquire_gpu(uint32_t const* word) { return look(word); }
inline uint32_t load_relaxed_sys(uint32_t const* word) { return look(word); }
inline uint64_t load_relaxed_sys(uint64_t const* word) { return look(word); }
inline void store_release_sys(uint32_t* word, uint32_t value) { store(word, value); }
inline void store_release_gpu(uint32_t* word, uint32_t value) { store(word, value); }
inline void store_relaxed_sys(uint32_t* word, uint32_t value) { store(word, value); }
inline void store_relaxed_sys(uint64_t* word, uint64_t value) { store(word, value); }
inline uint32_t count_acq_rel_gpu(uint32_t* word, uint32_t increment) {
  return atomicAdd(word, increment);
}
inline uint32_t count_relaxed_gpu(uint32_t* word, uint32_t increment) {
  return atomicAdd(word, increment);
}
inline void store_relaxed_2(void* to, uint16_t value) { store(static_cast<uint16_t*>(to), value); }
inline uint2 load_relaxed_8(void const* from) { return look(static_cast<uint2 const*>(from)); }
inline uint4 load_relaxed_16(void const* from) { return look(static_cast<uint4 const*>(from)); }
inline uint64_t count_relaxed_gpu(uint64_t* word, uint64_t increment) {
  return atomicAdd(word, increment);
}
inline void add_release_gpu(uint32_t* word, uint32_t increment) { atomicAdd(word, increment); }
inline void fence_acq_rel_gpu() {}
inline void fence_acq_rel_sys() {}

// load_global.cuh, store_global.cuh, load_shared.cuh, store_shared.cuh, stmatrix.cuh

template <class T>
T load_wanted(void const* from, bool wanted) {
  T value = {};
  if (wanted) std::memcpy(&value, from, sizeof value);
  return value;
}
inline uint4 load_streaming_16(void const* from, bool wanted) {
  return load_wanted<uint4>(from, wanted);
}
inline float load_bf16(void const* from, bool wanted) {
  return __uint_as_float(uint32_t{load_wanted<uint16_t>(from, wanted)} << 16);
}
inline uint32_t load_4(void const* from, bool wanted) {
  return load_wanted<uint32_t>(from, wanted);
}
inline void prefetch_l2(void const*) {}
inline void store_streaming_16(void* to, uint4 bits) { std::memcpy(to, &bits, sizeof bits); }
inline void store_streaming_8(void* to, uint2 bits) { std::memcpy(to, &bits, sizeof bits); }
inline void store_streaming_16(void* to, uint4 bits, bool wanted) {
  if (wanted) store_streaming_16(to, bits);
}
inline void store_streaming_8(void* to, uint2 bits, bool wanted) {
  if (wanted) store_streaming_8(to, bits);
}
inline void store_4(void* to, float value, bool wanted) {
  if (wanted) std::memcpy(to, &value, sizeof value);
}
template <class T>
void store_shared(uint32_t smem, T const& value) {
  std::memcpy(shared_at(smem), &value, sizeof value);
  emulator::wrote_shared(shared_at(smem), sizeof value);
}
inline void store_shared_4(uint32_t smem, float value) { store_shared(smem, value); }
inline void store_shared_4(uint32_t smem, float value, bool wanted) {
  if (wanted) store_shared_4(smem, value);
}
inline void store_shared_8(uint32_t smem, float first, float second) {
  store_shared_4(smem, first);
  store_shared_4(smem + 4, second);
}
inline void store_shared_8(uint32_t smem, uint2 bits) { store_shared(smem, bits); }
inline void store_shared_16(uint32_t smem, uint4 bits) { store_shared(smem, bits); }

inline float load_shared_4(uint32_t smem) {
  float value;
  std::memcpy(&value, shared_at(smem), sizeof value);
  return value;
}
inline uint2 load_shared_8(uint32_t smem) {
  uint2 bits;
  std::memcpy(&bits, shared_at(smem), sizeof bits);
  return bits;
}
inline uint4 load_shared_16(uint32_t smem) {
  uint4 bits;
  std::memcpy(&bits, shared_at(smem), sizeof bits);
  return bits;
}
// Matrix i: lane 8i + r has the address of its row r, lane l holds columns 2(l%4) + {0,1} of row l/4.
inline void stmatrix_x4(uint32_t smem_row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  std::uint64_t const* const rows = emulator::exchange(smem_row, {__FILE__, __LINE__});
  uint32_t const matrices[4] = {m0, m1, m2, m3};
  int const lane = lane_idx();
  for (int i = 0; i < 4; ++i) {
    auto const row = static_cast<uint32_t>(rows[8 * i + lane / 4]);
    store_shared(row + 4 * (lane % 4), matrices[i]);
  }
  __syncwarp();
}
inline void ldmatrix_x4(uint32_t smem_row, uint32_t& m0, uint32_t& m1, uint32_t& m2, uint32_t& m3) {
  std::uint64_t const* const rows = emulator::exchange(smem_row, {__FILE__, __LINE__});
  uint32_t* const matrices[4] = {&m0, &m1, &m2, &m3};
  int const lane = lane_idx();
  for (int i = 0; i < 4; ++i) {
    auto const row = static_cast<uint32_t>(rows[8 * i + lane / 4]);
    std::memcpy(matrices[i], shared_at(row) + 4 * (lane % 4), 4);
  }
  __syncwarp();
}
// Row r of a matrix in shared memory is its column r.
inline void ldmatrix_x4_transposed(uint32_t smem_row, uint32_t& m0, uint32_t& m1, uint32_t& m2,
                                   uint32_t& m3) {
  std::uint64_t const* const rows = emulator::exchange(smem_row, {__FILE__, __LINE__});
  uint32_t* const matrices[4] = {&m0, &m1, &m2, &m3};
  int const lane = lane_idx();
  for (int i = 0; i < 4; ++i) {
    uint16_t values[2];
    for (int column = 0; column < 2; ++column) {
      auto const row = static_cast<uint32_t>(rows[8 * i + 2 * (lane % 4) + column]);
      std::memcpy(&values[column], shared_at(row) + 2 * (lane / 4), 2);
    }
    *matrices[i] = values[0] | uint32_t{values[1]} << 16;
  }
  __syncwarp();
}
inline void stmatrix_x4_transposed(uint32_t smem_row, uint32_t m0, uint32_t m1, uint32_t m2,
                                   uint32_t m3) {
  std::uint64_t const* const rows = emulator::exchange(smem_row, {__FILE__, __LINE__});
  uint32_t const matrices[4] = {m0, m1, m2, m3};
  int const lane = lane_idx();
  for (int i = 0; i < 4; ++i) {
    for (int column = 0; column < 2; ++column) {
      auto const row = static_cast<uint32_t>(rows[8 * i + 2 * (lane % 4) + column]);
      auto const value = static_cast<uint16_t>(matrices[i] >> 16 * column);
      store_shared(row + 2 * (lane / 4), value);
    }
  }
  __syncwarp();
}

// cp_async.cuh

inline void cp_async_16(uint32_t smem_dst, void const* gmem_src, int bytes) {
  unsigned char* const to = shared_at(smem_dst);
  emulator::copy_later([=] {
    if (bytes > 0) std::memcpy(to, gmem_src, static_cast<size_t>(bytes));
    std::memset(to + bytes, 0, static_cast<size_t>(16 - bytes));
    emulator::copied_shared(to, 16);
  });
}
inline void cp_async_16_with_policy(uint32_t smem_dst, void const* gmem_src, uint64_t) {
  cp_async_16(smem_dst, gmem_src, 16);
}
template <int kBytes>
void cp_async_whole(uint32_t smem_dst, void const* gmem_src) {
  if (reinterpret_cast<uintptr_t>(gmem_src) % kBytes != 0 || smem_dst % kBytes != 0) {
    emulator::fail("a copy of 4 or 8 bytes that is not aligned");
  }
  unsigned char* const to = shared_at(smem_dst);
  emulator::copy_later([=] {
    std::memcpy(to, gmem_src, kBytes);
    emulator::copied_shared(to, kBytes);
  });
}
inline void cp_async_4(uint32_t smem_dst, void const* gmem_src) {
  cp_async_whole<4>(smem_dst, gmem_src);
}
inline void cp_async_8(uint32_t smem_dst, void const* gmem_src) {
  cp_async_whole<8>(smem_dst, gmem_src);
}
inline void cp_async_arrive(Mbarrier* barrier) { emulator::arrive_behind_copies(barrier); }
inline void cp_async_commit() { emulator::commit_copies(); }
template <int kPending>
void cp_async_wait() {
  emulator::wait_copies(kPending);
}

// tma.cuh: boxes of rows of 128 bytes, or 64, swizzled.

// visit(address, row of the box, columns that exist) for every row; the address is null for rows that do not exist.
template <class Visit>
void visit_box(CUtensorMap const& map, int const (&at)[5], Visit visit) {
  int const inner = static_cast<int>(map.box[0]);
  auto const exists = [](int64_t c, uint64_t extent) {
    return c >= 0 && static_cast<uint64_t>(c) < extent;
  };
  int columns = 0;
  while (columns < inner && exists(int64_t{at[0]} + columns, map.extent[0])) ++columns;
  if (at[0] < 0) emulator::fail("a box left of its matrix");
  uint32_t row = 0;
  uint32_t i[5] = {};
  for (i[4] = 0; i[4] < map.box[4]; ++i[4]) {
    for (i[3] = 0; i[3] < map.box[3]; ++i[3]) {
      for (i[2] = 0; i[2] < map.box[2]; ++i[2]) {
        for (i[1] = 0; i[1] < map.box[1]; ++i[1], ++row) {
          uint64_t address = map.base + static_cast<uint64_t>(at[0]) * map.element_bytes;
          bool is_inside = true;
          for (int dimension = 1; dimension < 5; ++dimension) {
            int64_t const c = int64_t{at[dimension]} + i[dimension];
            is_inside = is_inside && exists(c, map.extent[dimension]);
            address += static_cast<uint64_t>(c) * map.stride_bytes[dimension];
          }
          visit(is_inside ? reinterpret_cast<unsigned char*>(address) : nullptr, row, columns);
        }
      }
    }
  }
}
inline uint32_t row_bytes_of(CUtensorMap const& map) {
  uint32_t const bytes = map.box[0] * map.element_bytes;
  if (bytes != 128 && bytes != 64) emulator::fail("a box whose rows are neither 128 bytes nor 64");
  return bytes;
}
// Where what lies `bytes` behind the start of a box does, in chunks of 16 bytes.
inline uint32_t swizzled(uint32_t address, uint32_t bytes) {
  uint32_t const at = address + bytes;
  return at ^ (at >> 7 & 7) << 4;
}

// Loads into CTA `cta` of the cluster; the bytes count for barrier `full` of CTA `counting`.
inline void tma_load_box(unsigned cta, unsigned counting, void* smem_dst, CUtensorMap const* map,
                         Mbarrier* full, int c0, int c1, int c2, int c3, int c4) {
  uint32_t const to = shared_address(smem_dst);
  unsigned char* const shared = emulator::shared_memory_of(cta);
  CUtensorMap const m = *map;
  uint32_t const row_bytes = row_bytes_of(m);
  uint32_t bytes = m.element_bytes;
  for (uint32_t const extent : m.box) bytes *= extent;
  emulator::load_later_in(counting, full, bytes, [=] {
    emulator::landed_shared(shared + to, bytes);
    visit_box(m, {c0, c1, c2, c3, c4}, [&](unsigned char const* from, uint32_t row, int columns) {
      unsigned char whole[128] = {};
      if (from != nullptr) std::memcpy(whole, from, static_cast<size_t>(columns) * m.element_bytes);
      for (uint32_t at = 0; at < row_bytes; at += 16) {
        std::memcpy(shared + swizzled(to, row * row_bytes + at), whole + at, 16);
      }
    });
  });
}
template <class... Coordinates>
void tma_load(void* smem_dst, CUtensorMap const* map, Mbarrier* full, Coordinates... at) {
  int const c[5] = {at...};
  unsigned const own = emulator::cluster_rank();
  tma_load_box(own, own, smem_dst, map, full, c[0], c[1], c[2], c[3], c[4]);
}
template <class... Coordinates>
void tma_load_multicast(void* smem_dst, CUtensorMap const* map, Mbarrier* full, uint16_t cta_mask,
                        Coordinates... at) {
  int const c[5] = {at...};
  for (unsigned cta = 0; cta_mask >> cta != 0; ++cta) {
    if ((cta_mask >> cta & 1) == 0) continue;
    tma_load_box(cta, cta, smem_dst, map, full, c[0], c[1], c[2], c[3], c[4]);
  }
}
// put(to, from, bytes) for every row of the box that exists.
template <class Put>
void tma_store_box(CUtensorMap const* map, void const* smem_src, int c0, int c1, int c2, int c3,
                   Put put) {
  uint32_t const from = shared_address(smem_src);
  unsigned char const* const shared = emulator::shared_memory();
  CUtensorMap const m = *map;
  uint32_t const row_bytes = row_bytes_of(m);
  size_t box_bytes = m.element_bytes;
  for (uint32_t const extent : m.box) box_bytes *= extent;
  emulator::reads_shared_async(shared + from, box_bytes);
  auto const rows = std::make_shared<std::vector<unsigned char>>();
  emulator::store_later(
      [=] {
        visit_box(m, {c0, c1, c2, c3, 0}, [&](unsigned char*, uint32_t row, int) {
          for (uint32_t bytes = 0; bytes < row_bytes; bytes += 16) {
            unsigned char const* const at = shared + swizzled(from, row * row_bytes + bytes);
            rows->insert(rows->end(), at, at + 16);
          }
        });
      },
      [=] {
        visit_box(m, {c0, c1, c2, c3, 0}, [&](unsigned char* to, uint32_t row, int columns) {
          if (to == nullptr) return;
          put(to, rows->data() + size_t{row} * row_bytes,
              static_cast<size_t>(columns) * m.element_bytes);
        });
      });
}
inline void tma_store(CUtensorMap const* map, void const* smem_src, int c0, int c1, int c2,
                      int c3) {
  tma_store_box(map, smem_src, c0, c1, c2, c3,
                [](unsigned char* to, unsigned char const* from, size_t bytes) {
                  std::memcpy(to, from, bytes);
                });
}
inline void tma_store(CUtensorMap const* map, void const* smem_src, int c0, int c1, int c2, int c3,
                      uint64_t) {
  tma_store(map, smem_src, c0, c1, c2, c3);
}
inline void tma_reduce_add(CUtensorMap const* map, void const* smem_src, int c0, int c1, int c2,
                           int c3) {
  if (map->element_bytes != 4) emulator::fail("additions of bf16 are not emulated");
  tma_store_box(map, smem_src, c0, c1, c2, c3,
                [](unsigned char* to, unsigned char const* from, size_t bytes) {
                  for (size_t at = 0; at < bytes; at += 4) {
                    float old, more;
                    std::memcpy(&old, to + at, 4);
                    std::memcpy(&more, from + at, 4);
                    old += more;
                    std::memcpy(to + at, &old, 4);
                  }
                });
}
inline uint64_t l2_evict_first() { return 0; }
inline uint64_t l2_evict_normal() { return 0; }
inline void tma_prefetch_map(CUtensorMap const*) {}
inline void tma_store_commit() { emulator::commit_stores(); }
template <int kPending>
void tma_store_wait_read() {
  emulator::wait_stores(kPending, true);
}

// bulk_copy.cuh

inline void bulk_load(void* smem_dst, void const* gmem_src, uint32_t bytes, Mbarrier* full) {
  emulator::load_later(full, bytes, [=] { std::memcpy(smem_dst, gmem_src, bytes); });
}
inline void bulk_store(void* gmem_dst, void const* smem_src, uint32_t bytes) {
  auto const values = std::make_shared<std::vector<unsigned char>>(bytes);
  emulator::store_later([=] { std::memcpy(values->data(), smem_src, bytes); },
                        [=] { std::memcpy(gmem_dst, values->data(), bytes); });
}
template <int kPending>
void bulk_store_wait() {
  emulator::wait_stores(kPending, false);
}

// wgmma.cuh

inline uint64_t wgmma_descriptor_k_major(uint32_t smem) {
  return uint64_t{1024 / 16} << 32 | smem >> 4;
}
inline uint64_t wgmma_descriptor_k_major(void const* smem) {
  return wgmma_descriptor_k_major(shared_address(smem));
}
constexpr uint64_t kWgmmaDescriptorK16 = 32 / 16;
template <int kGroupBytes = 1024, int kBoxBytes = 8192>
uint64_t wgmma_descriptor_rows_major(void const* smem) {
  return uint64_t{kGroupBytes / 16} << 32 | uint64_t{kBoxBytes / 16} << 16 |
         shared_address(smem) >> 4;
}
constexpr uint64_t kWgmmaRowsMajorK16 = 2048 / 16;
inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::commit_multiplications(); }
template <int kPending>
void wgmma_wait() {
  emulator::wait_multiplications(kPending);
}
template <bool kTransposeA, bool kTransposeB>
void wgmma_m64n128k16(float (&d0)[64], uint64_t a, uint64_t b, int accumulate) {
  emulator::multiply_later(d0, nullptr, a, b, kTransposeA, kTransposeB, accumulate != 0);
}
template <bool kTransposeA, bool kTransposeB>
void wgmma_m64n256k16(float (&d0)[64], float (&d1)[64], uint64_t a, uint64_t b, int accumulate) {
  emulator::multiply_later(d0, d1, a, b, kTransposeA, kTransposeB, accumulate != 0);
}
inline void wgmma_m64n256k16(float (&d0)[64], float (&d1)[64], uint32_t const (&a)[4], uint64_t b) {
  emulator::multiply_later(d0, d1, a, b);
}

// wgmma_e4m3.cuh

inline void wgmma_e4m3_m64n128k32(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  emulator::multiply_e4m3_later(d, nullptr, a, b, accumulate != 0);
}
inline void wgmma_e4m3_m64n256k32(float (&d0)[64], float (&d1)[64], uint64_t a, uint64_t b,
                                  int accumulate) {
  emulator::multiply_e4m3_later(d0, d1, a, b, accumulate != 0);
}

// cluster.cuh, cluster_load.cuh

inline uint32_t cluster_cta_rank() { return emulator::cluster_rank(); }
inline void cluster_sync() { emulator::cluster_barrier(); }
inline void mbarrier_arrive_cluster(Mbarrier* barrier, uint32_t rank) {
  emulator::arrive_in(rank, barrier);
}
inline void mbarrier_wait_cluster(Mbarrier* barrier, uint32_t parity) {
  emulator::wait(barrier, parity);
}
inline void st_async(int4* smem_dst, Mbarrier* barrier, uint32_t rank, int4 value) {
  unsigned char* const to = emulator::shared_memory_of(rank) + shared_address(smem_dst);
  emulator::load_later_in(rank, barrier, sizeof value,
                          [=] { std::memcpy(to, &value, sizeof value); });
}
inline int4 load_from_cta(void const* smem_source, uint32_t rank) {
  int4 value;
  std::memcpy(&value, emulator::shared_memory_of(rank) + shared_address(smem_source), sizeof value);
  return value;
}

}  // namespace tessera::cuda::arch

#include "tests/emulator/mma.hpp"

// SPDX-License-Identifier: Apache-2.0
// Shared memory of a GEMM CTA; its size comes only from sizeof. Tiles are 128-byte swizzled:
// 16-byte chunk c of row r lies at r*128 + ((c ^ (r & 7)) << 4).
#pragma once

#include <cuda_bf16.h>

#include "../arch/dynamic_shared.cuh"
#include "../arch/mbarrier.cuh"
#include "config.hpp"

namespace tessera::cuda::gemm {

using bf16 = __nv_bfloat16;

// Names the type of an array of an operand's elements.
template <Element kElement>
struct ElementType;
template <>
struct ElementType<Element::kBf16> {
  using Type = bf16;
};
template <>
struct ElementType<Element::kE4m3> {
  using Type = uint8_t;
};

constexpr int kMaxSegments = 640;  // what 4 stages of 48 KB and 4 slabs leave of 227 KB
constexpr int kWorkSlots = 4;      // work tiles announced ahead of the slowest reader
constexpr int kLoadBuffers = 2;

template <GemmConfig kGemm>
struct SharedStorage {
  using A = typename ElementType<kGemm.a.element>::Type;
  using B = typename ElementType<kGemm.b.element>::Type;
  alignas(1024) A a[kGemm.stages][kGemm.tile.m * kGemm.tile.k];  // (PIPE,TILE_M,TILE_K)
  alignas(1024) B b[kGemm.b_buffers()]
                   [kGemm.b_terms() * kGemm.tile.n * kGemm.tile.k];  // (PIPE,TERM,TILE_N,TILE_K)
  alignas(
      1024) bf16 slabs[kGemm.consumer_warpgroups][kGemm.epilogue.slabs][kSubtileM * kSlabColumns];
  arch::Mbarrier full[kGemm.stages];
  arch::Mbarrier empty[kGemm.stages];
  arch::Mbarrier work_full[kWorkSlots];
  arch::Mbarrier work_empty[kWorkSlots];  // used in CTA 0 of the cluster
  arch::Mbarrier loads[4 * kGemm.consumer_warpgroups]
                      [kLoadBuffers];  // of epilogues that read, per warp
  alignas(16) int4 work[kWorkSlots];
  int segment_offsets[kMaxSegments + 1];
  arch::Mbarrier resident_full[kGemm.resident_k_tiles() + 1];  // of the k_tiles of a resident B
  arch::Mbarrier resident_empty[kGemm.resident_k_tiles() + 1];
  arch::Mbarrier draw;  // schedules_apart: loads have come to where the next tile is drawn
};

template <GemmConfig kGemm>
__device__ __forceinline__ SharedStorage<kGemm>& shared_storage() {
  static_assert(sizeof(SharedStorage<kGemm>) <= kSharedMemoryBytes);
  TESSERA_DYNAMIC_SHARED(smem_raw);
  return *reinterpret_cast<SharedStorage<kGemm>*>(smem_raw);
}

}  // namespace tessera::cuda::gemm

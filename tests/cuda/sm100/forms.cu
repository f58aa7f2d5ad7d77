// SPDX-License-Identifier: Apache-2.0
// Every wrapper of src/cuda/arch/sm100, used once for one CTA and, where there is such a form, for a pair: each has to
// assemble for sm_100a without a spill, and to become the instruction that it is meant to be (sass_test.py). These
// kernels compute nothing and are never launched.
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/arch/cluster.cuh"
#include "cuda/arch/dynamic_shared.cuh"
#include "cuda/arch/sm100/cluster_launch_control.cuh"
#include "cuda/arch/sm100/pair_tma.cuh"
#include "cuda/arch/sm100/relay.cuh"
#include "cuda/arch/sm100/tcgen05_alloc.cuh"
#include "cuda/arch/sm100/tcgen05_commit.cuh"
#include "cuda/arch/sm100/tcgen05_cp.cuh"
#include "cuda/arch/sm100/tcgen05_descriptor.hpp"
#include "cuda/arch/sm100/tcgen05_fence.cuh"
#include "cuda/arch/sm100/tcgen05_ld.cuh"
#include "cuda/arch/sm100/tcgen05_mma.cuh"
#include "cuda/arch/sm100/tcgen05_st.cuh"
#include "cuda/arch/warp.cuh"

namespace tessera::cuda {

using namespace arch;

struct Shared {
  alignas(1024) unsigned char a[128 * 128];
  alignas(1024) unsigned char b[256 * 128];
  alignas(128) unsigned char a_scales[512];
  alignas(128) unsigned char b_scales[512];
  LaunchAnswer answer;
  Mbarrier full, done, answered;
  uint32_t tensor;
};

// Warp 4 allocates, multiplies and frees; warps 0 to 3 load what they write, and what was multiplied.
template <int kCtas, class Multiply>
__device__ __forceinline__ void run(uint32_t* out, Multiply multiply) {
  TESSERA_DYNAMIC_SHARED(raw);
  auto& smem = *reinterpret_cast<Shared*>(raw);
  int const warp = warp_idx();
  if (threadIdx.x == 0) {
    mbarrier_init(&smem.full, 1);
    mbarrier_init(&smem.done, 1);
    mbarrier_fence_init();
  }
  if (warp == 4) {
    tcgen05_alloc<kCtas>(&smem.tensor, 512);
    tcgen05_relinquish<kCtas>();
  }
  tcgen05_fence_before();
  if constexpr (kCtas == 2) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  tcgen05_fence_after();
  uint32_t const tensor = smem.tensor;
  if (warp == 4) {
    mbarrier_wait(&smem.full, 0);
    tcgen05_fence_after();
    if (elect_one()) {
      multiply(smem, tensor);
      tcgen05_commit<kCtas>(&smem.done);
    }
    __syncwarp();
  } else {
    uint32_t const lanes = tensor + tensor_lane(32 * warp);
    uint32_t r[32];
    TESSERA_UNROLL
    for (int i = 0; i < 32; ++i) r[i] = threadIdx.x + i;
    tcgen05_st_rows(lanes + 256, r);
    tcgen05_wait_st();
    mbarrier_wait(&smem.done, 0);
    tcgen05_fence_after();
    uint32_t fragments[32];
    tcgen05_ld_rows(r, lanes);
    tcgen05_ld_fragments(fragments, lanes + tensor_lane(16));
    tcgen05_wait_ld();
    TESSERA_UNROLL
    for (int i = 0; i < 32; ++i) out[threadIdx.x * 32 + i] = r[i] ^ fragments[i];
  }
  tcgen05_fence_before();
  if constexpr (kCtas == 2) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  tcgen05_fence_after();
  if (warp == 4) tcgen05_free<kCtas>(tensor, 512);
}

template <int kCtas>
__global__ void __launch_bounds__(160, 1) multiply_bf16(uint32_t* out) {
  run<kCtas>(out, [](Shared& smem, uint32_t tensor) {
    constexpr uint32_t kInstruction =
        Bf16Mma{.m = 128 * kCtas, .n = 256, .b_major = MmaMajor::kRows}.bits();
    uint64_t const a = k_major_tile(shared_address(smem.a)).bits();
    uint64_t const b = rows_major_boxes(shared_address(smem.b)).bits();
    TESSERA_UNROLL
    for (uint32_t k = 0; k < 4; ++k) {
      tcgen05_mma_bf16<kCtas>(tensor, plus(a, k * kKMajorStepBytes),
                              plus(b, k * kRowsMajorStepBytes), kInstruction, k);
    }
  });
}
template __global__ void multiply_bf16<1>(uint32_t*);
template __global__ void multiply_bf16<2>(uint32_t*);

template <int kCtas>
__global__ void __launch_bounds__(160, 1) multiply_mxf8(uint32_t* out) {
  run<kCtas>(out, [](Shared& smem, uint32_t tensor) {
    uint32_t const a_scales = tensor + 256, b_scales = tensor + 260;
    tcgen05_cp_scales<kCtas>(a_scales, scale_atom(shared_address(smem.a_scales)).bits());
    tcgen05_cp_scales<kCtas>(b_scales, scale_atom(shared_address(smem.b_scales)).bits());
    uint64_t const a = k_major_tile(shared_address(smem.a)).bits();
    uint64_t const b = k_major_tile(shared_address(smem.b)).bits();
    TESSERA_UNROLL
    for (int k = 0; k < 4; ++k) {
      Mxf8Mma const instruction{.m = 128 * kCtas, .n = 128, .a_scale_byte = k, .b_scale_byte = k};
      tcgen05_mma_mxf8<kCtas>(tensor, plus(a, k * kKMajorStepBytes), plus(b, k * kKMajorStepBytes),
                              instruction.bits(), a_scales, b_scales, k);
    }
  });
}
template __global__ void multiply_mxf8<1>(uint32_t*);
template __global__ void multiply_mxf8<2>(uint32_t*);

struct LoadParams {
  CUtensorMap a, b;
};

__global__ void __launch_bounds__(64, 1)
    load_for_pair(__grid_constant__ LoadParams const p, uint32_t* out) {
  TESSERA_DYNAMIC_SHARED(raw);
  auto& smem = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    mbarrier_init(&smem.full, 3);
    mbarrier_fence_init();
  }
  cluster_sync();
  if (warp_idx() == 0) {
    if (elect_one()) {
      if (cluster_cta_rank() == 0) mbarrier_arrive_expect_tx(&smem.full, 2 * sizeof smem.a);
      tma_load_for_pair(smem.a, &p.a, &smem.full, 0, 0);
      tma_load_to_pair(smem.b, &p.b, &smem.full, 0, 0);
      tma_gather_for_pair(smem.a, &p.a, &smem.full, 0, 1, 3, 5, 7);
      relay_arrive(&smem.full, 0);
    }
    __syncwarp();
  } else if (cluster_cta_rank() == 0) {
    pair_wait(&smem.full, 0);
    out[threadIdx.x] = smem.a[threadIdx.x];
  }
  cluster_sync();
}

__global__ void __launch_bounds__(32, 1) take_launch(int* out) {
  TESSERA_DYNAMIC_SHARED(raw);
  auto& smem = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    mbarrier_init(&smem.answered, 1);
    mbarrier_fence_init();
  }
  __syncwarp();
  if (elect_one()) {
    mbarrier_arrive_expect_tx(&smem.answered, sizeof smem.answer);
    cluster_launch_request(&smem.answer, &smem.answered);
  }
  __syncwarp();
  mbarrier_wait(&smem.answered, 0);
  out[threadIdx.x] = cluster_launch_taken(&smem.answer);
}

}  // namespace tessera::cuda

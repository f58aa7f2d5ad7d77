// SPDX-License-Identifier: Apache-2.0
// The functions of src/cuda/arch/sm100/ for emulated kernels. Stands in the place of each of its .cuh headers;
// tcgen05_descriptor.hpp is itself, so that the words are those of the kernels.
#pragma once

#include "cuda/arch/sm100/tcgen05_descriptor.hpp"
#include "tests/emulator/arch.cuh"
#include "tests/emulator/sm100/tensor_memory.hpp"

namespace tessera::cuda::arch {

template <int kCtas>
void tcgen05_alloc(uint32_t* smem_address, uint32_t columns) {
  emulator::tensor_alloc(kCtas, smem_address, columns);
}
template <int kCtas>
void tcgen05_relinquish() {
  emulator::tensor_relinquish(kCtas);
}
template <int kCtas>
void tcgen05_free(uint32_t tensor, uint32_t columns) {
  emulator::tensor_free(kCtas, tensor, columns);
}

template <int kCtas>
void tcgen05_mma_bf16(uint32_t tensor_d, uint64_t a, uint64_t b, uint32_t instruction,
                      uint32_t accumulate) {
  emulator::tensor_multiply(kCtas, emulator::MmaKind::bf16, {tensor_d, a, b, instruction},
                            accumulate != 0);
}
template <int kCtas>
void tcgen05_mma_mxf8(uint32_t tensor_d, uint64_t a, uint64_t b, uint32_t instruction,
                      uint32_t tensor_a_scales, uint32_t tensor_b_scales, uint32_t accumulate) {
  emulator::tensor_multiply(kCtas, emulator::MmaKind::mxf8,
                            {tensor_d, a, b, instruction, tensor_a_scales, tensor_b_scales},
                            accumulate != 0);
}
template <int kCtas>
void tcgen05_cp_scales(uint32_t tensor, uint64_t atom) {
  emulator::tensor_copy_scales(kCtas, tensor, atom);
}
template <int kCtas>
void tcgen05_commit(Mbarrier* barrier) {
  emulator::tensor_commit(kCtas, barrier);
}

inline void tcgen05_ld_rows(uint32_t (&r)[32], uint32_t tensor) {
  emulator::tensor_load_rows(r, tensor);
}
inline void tcgen05_ld_fragments(uint32_t (&r)[32], uint32_t tensor) {
  emulator::tensor_load_fragments(r, tensor);
}
inline void tcgen05_st_rows(uint32_t tensor, uint32_t const (&r)[32]) {
  emulator::tensor_store_rows(tensor, r);
}
inline void tcgen05_wait_ld() { emulator::tensor_wait_loads(); }
inline void tcgen05_wait_st() { emulator::tensor_wait_stores(); }
inline void tcgen05_fence_before() { emulator::tensor_fence_before(); }
inline void tcgen05_fence_after() { emulator::tensor_fence_after(); }

inline void relay_arrive(Mbarrier* barrier, uint32_t rank) {
  emulator::tensor_relay(rank, barrier);
}
inline void pair_wait(Mbarrier* barrier, uint32_t parity) { emulator::wait(barrier, parity); }

template <class... Coordinates>
void tma_load_for_pair(void* smem_dst, CUtensorMap const* map, Mbarrier* full, Coordinates... at) {
  int const c[5] = {at...};
  unsigned const own = emulator::cluster_rank();
  tma_load_box(own, 0, smem_dst, map, full, c[0], c[1], c[2], c[3], c[4]);
}
inline void tma_load_to_pair(void* smem_dst, CUtensorMap const* map, Mbarrier* full, int c0,
                             int c1) {
  for (unsigned cta = 0; cta < 2; ++cta) {
    tma_load_box(cta, 0, smem_dst, map, full, c0, c1, 0, 0, 0);
  }
}

}  // namespace tessera::cuda::arch

// SPDX-License-Identifier: Apache-2.0
// Tensor memory and tcgen05 of an emulated sm_100a. Stands on tests/emulator/; arch.cuh here is what kernels call.
//
// Emulated: 128 lanes x 512 columns for each CTA, NaNs until written; a queue of multiplications, copies of scales and
// commits for each warp that issues, which goes on late, a multiplication in two turns (operands are read, D is
// written); operands of one CTA or a pair, found by the bits of their descriptors alone (decode.hpp); commit's
// arrivals in both CTAs; loads that write their registers at the wait.
// Checked: which columns a CTA owns, and that it owns none at its end; one cta_group in a grid; which lanes a warp may
// reach; that lanes agree; that one lane issues. For every 32 lanes x 32 columns, that the multiplication whose result
// is loaded, overwritten or freed is known to be complete, and so the loads of what is overwritten or freed: a warp
// knows what reached it by wait::ld | fence::before | arrival .. wait | fence::after, and by commit .. wait |
// fence::after (knowledge.hpp), by way of other warps too: a stage that commit freed, that is filled again and
// announced, is known to have been multiplied. The same for scales that tcgen05.cp overwrites, column by column, and
// that no multiplication reads before a copy ahead of it has written them. That shared memory which TMA or a
// multiplication reads has been fenced by the thread that wrote it; what cp.async wrote, by who issues the
// multiplication, or by a relay of the CTA.
// Not checked: the other half of a relay, which is pair_wait(), weak memory besides, time. Sums are in the order of
// k, in fp32; that of hardware is not known. Knowledge is a warp's: a missing __syncwarp() goes unnoticed.
#pragma once

#include <cstdint>

#include "tests/emulator/emulator.hpp"
#include "tests/emulator/sm100/decode.hpp"

namespace tessera::emulator {

// All for the thread that runs. `ctas`: the cta_group.
void tensor_alloc(int ctas, std::uint32_t* to, std::uint32_t columns);
void tensor_relinquish(int ctas);
void tensor_free(int ctas, std::uint32_t tensor, std::uint32_t columns);

struct MmaWords {
  std::uint32_t d;
  std::uint64_t a, b;
  std::uint32_t instruction;
  std::uint32_t a_scales = 0, b_scales = 0;  // mxf8
};
void tensor_multiply(int ctas, MmaKind kind, MmaWords const& words, bool accumulates);
void tensor_copy_scales(int ctas, std::uint32_t tensor, std::uint64_t atom);
void tensor_commit(int ctas, Barrier* barrier);

void tensor_load_rows(std::uint32_t (&r)[32], std::uint32_t tensor);
void tensor_load_fragments(std::uint32_t (&r)[32], std::uint32_t tensor);
void tensor_store_rows(std::uint32_t tensor, std::uint32_t const (&r)[32]);
void tensor_wait_loads();
void tensor_wait_stores();
void tensor_fence_before();
void tensor_fence_after();
// Arrives in CTA `rank`, behind the fence of a relay.
void tensor_relay(unsigned rank, Barrier* barrier);

}  // namespace tessera::emulator

# SPDX-License-Identifier: Apache-2.0
"""Errors in kernels of sm_100a that emulator_sm100_test has to notice: each in a copy of the sources, compiled and run.

The words that each must cause are the emulator's where it reports the mistake (tensor_memory.hpp), and the test's where
only a wrong result shows it. `--quick` takes two.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import mutant_runner  # noqa: E402

# The source that is compiled again, by the words that its tests begin with.
SOURCES = {"UpProjectionDgrad": "up_projection_dgrad_test.cpp", "Up": "up_projection_fwd_test.cpp",
           "DownProjectionDgrad": "down_projection_dgrad_test.cpp", "Down": "down_projection_fwd_test.cpp",
           "ProjectionWgrad": "projection_wgrad_test.cpp"}
WORDS, STORE = "cuda/arch/sm100/tcgen05_descriptor.hpp", "cuda/epilogue/store_rows.cuh"
LOOP, ROWS = "cuda/gemm/sm100/mainloop.cuh", "cuda/gemm/sm100/accumulators.cuh"
SLABS, ROLES = "cuda/gemm/sm100/slabs.cuh", "cuda/gemm/sm100/roles.cuh"
PAIR, ACT = "cuda/gemm/sm100/pair_loads.cuh", "cuda/epilogue/activation_rows.cuh"
GRAD = "cuda/epilogue/activation_gradient_rows.cuh"
PAIR_OF_COLUMNS, WGRAD = "cuda/epilogue/activation_gradient_pair.cuh", "cuda/epilogue/wgrad_rows.cuh"
WRONG = ", not its bits"
# (name, file, text that stands there once, what stands there instead, a part of what the test then says, tests)
MUTANTS = [
    # descriptors
    ("an operand has the version of Hopper", WORDS, "kVersion = 1;", "kVersion = 0;", "version 0", "*AllRows*"),
    ("leading and stride bytes of rows-major boxes are exchanged", WORDS, ".leading_bytes = 8192};",
     ".leading_bytes = 1024, .stride_bytes = 8192};", WRONG, "*RowsMajor*"),
    ("a rows-major B is said to be K-major", LOOP, ".b_major = StageOperand<kGemm.b.major>::kMma",
     ".b_major = arch::MmaMajor::kK", WRONG, "*RowsMajor*"),
    ("a rows-major B has the k step of K-major", LOOP, "s * B::kStep", "s * arch::kKMajorStepBytes", WRONG,
     "*RowsMajor*"),
    ("half of the columns are multiplied", LOOP, ".n = kGemm.tile.n,", ".n = kGemm.tile.n / 2,",
     "nothing was written there", "*Turn"),
    # operands
    ("the last step of k is left out", LOOP, "step < kGemm.tile.k / kStepK", "step < kGemm.tile.k / kStepK - 1", WRONG,
     "*AllRows*"),
    ("A does not step along k", LOOP, "arch::plus(a, s * A::kStep)", "arch::plus(a, 0 * s)", WRONG,
     "*AllRows*"),
    # barriers
    ("a stage is freed before it has been read", LOOP,
     "arch::tcgen05_commit<kGemm.cluster_m()>(&smem.empty[state.stage]);",
     "arch::mbarrier_arrive(&smem.empty[state.stage]);", WRONG, "*Turn"),
    ("a tile is announced a k_tile early", LOOP, "if (is_last) arch::tcgen05",
     "if (k_tile == max(k_tiles - 2, 0)) arch::tcgen05", "is not known to be complete", "*Turn"),
    ("the accumulator's parity is that of its end", LOOP, "turn.phase ^ 1", "turn.phase", "waits for an mbarrier",
     "*AllRows*"),
    ("an accumulator is free when three warps have loaded it", ROLES, "&smem.acc_empty[i], kEpilogueWarps",
     "&smem.acc_empty[i], (kEpilogueWarps - 1)", "is not known to be", "*Turn"),
    ("an accumulator is freed before its last load", STORE, "half == 1 && slab == slabs - 1",
     "half == 0 && slab == slabs - 1", "is not known to be", "*Turn"),
    ("a warp without rows frees no accumulator", ROLES, "    } else {\n      rows.release();\n    }", "    }",
     "waits for an mbarrier", "*Turn"),
    ("the accumulators' phase turns with every tile", ROWS, "phase ^= index == 0 ? 1 : 0;", "phase ^= 1;",
     "nothing was written there", "*Turn"),
    ("a tile is read by one warp more than there are", ROLES, "tile_readers(kGemm)",
     "tile_readers(kGemm) + 1", "waits for an mbarrier", "*Turn"),
    # order
    ("registers are read before they are loaded", STORE, "rows.loaded();", "", "loads without a wait::ld", "*AllRows*"),
    ("no fence behind the wait for a tile", ROWS, "arch::tcgen05_fence_after();", "", "is not known to be complete",
     "*AllRows*"),
    ("no fence ahead of the arrival for an accumulator", ROWS, "arch::tcgen05_fence_before();", "",
     "is not known to be done", "*Turn"),
    ("no fence behind the wait for an accumulator", LOOP, "arch::tcgen05_fence_after();  //", "//",
     "is not known to be done", "*Turn"),
    ("a slab is stored without a proxy fence", SLABS, "arch::fence_proxy_async_shared();", "", "has not fenced",
     "*AllRows*"),
    ("a slab is filled before it has been read", SLABS, "this->template wait_read<Base::kSlabs - 1>();", "", WRONG,
     "*Turn"),
    # tensor memory
    ("the first step of a tile adds", LOOP, "is_first && step == 0 ? 0 : 1", "1", "adds to what nobody has written",
     "*AllRows*"),
    ("accumulators overlap", LOOP, "turn.index * kGemm.tile.n", "turn.index * 128", "is not known to be", "*Turn"),
    ("a warp loads the lanes of another one", ROWS, "arch::warp_in_warpgroup() * kWarpSlabRows",
     "(arch::warp_in_warpgroup() ^ 1) * kWarpSlabRows", "by a warp that reaches lanes", "*AllRows*"),
    ("all lanes issue", LOOP, "if (arch::elect_one()) {", "if (true) {", "several lanes of a warp issue", "*AllRows*"),
    ("tensor memory is never freed", ROLES,
     "if (warp == multiply_warp(kGemm)) {\n    arch::tcgen05_free", "if (false) {\n    arch::tcgen05_free",
     "the CTA ends with 512 columns", "*AllRows*"),
    ("tensor memory is freed before the last loads", ROLES,
     "  sync_ctas<kGemm>();\n  arch::tcgen05_fence_after();\n  if (warp",
     "  arch::tcgen05_fence_after();\n  if (warp", "tcgen05.dealloc", "*AllRows*"),
    ("columns are asked for that are no power of two", ROWS, "return columns;", "return columns - 32;",
     "no power of two", "*AllRows*"),
    ("the right to allocate is given up first", ROLES,
     "arch::tcgen05_alloc<kGemm.cluster_m()>(&smem.tensor,",
     "arch::tcgen05_relinquish<kGemm.cluster_m()>();\n    arch::tcgen05_alloc<kGemm.cluster_m()>(&smem.tensor,",
     "behind relinquish", "*AllRows*"),
    # pairs of CTAs
    ("both CTAs load each other's half of B", PAIR, "rank * kGemm.b_groups_per_cta()",
     "(1 - rank) * kGemm.b_groups_per_cta()", WRONG, "*AllRows*"),
    ("both CTAs load the rows of the first", PAIR, "full, k, tile.row);",
     "full, k, tile.row - int(arch::cluster_cta_rank()) * (tile.end - tile.row > 0 ? 128 : 0));", WRONG,
     "*AllRows*"),
    ("the bytes of one CTA are expected", PAIR, "2 * kGemm.a_tile_bytes() + kGemm.b_tile_bytes()",
     "kGemm.a_tile_bytes() + kGemm.b_tile_bytes() / 2", "nobody can go on", "*InPairs*"),
    ("both CTAs expect the bytes of both", PAIR,
     "if (arch::cluster_cta_rank() == 0) {\n    arch::mbarrier_arrive_expect_tx(full, 2",
     "if (true) {\n    arch::mbarrier_arrive_expect_tx(full, 2", "more arrivals than a barrier awaits", "*InPairs*"),
    ("CTA 1 reports its rows to its own barrier", PAIR,
     "arch::tma_load_for_pair(smem.a[stage], &p.a, full, k, tile.row)",
     "arch::tma_load(smem.a[stage], &p.a, full, k, tile.row)", "waits for an mbarrier", "*AllRows*"),
    ("a pair multiplies half of its rows", LOOP, ".m = kGemm.tile.m * kGemm.cluster_m()", ".m = kGemm.tile.m",
     "nothing was written there", "*InPairs*"),
    ("stages are given back to CTA 0 alone", LOOP,
     "arch::tcgen05_commit<kGemm.cluster_m()>(&smem.empty[state.stage]);",
     "arch::tcgen05_commit<1>(&smem.empty[state.stage]);", "cta_group 1 and 2", "*InPairs*"),
    ("accumulators are free when CTA 0 has loaded them", ROLES, "kEpilogueWarps * kGemm.cluster_m()", "kEpilogueWarps",
     "is not known to be", "*InPairs*"),
    ("CTA 1 frees its own accumulators", ROWS, "arch::mbarrier_arrive_cluster(empty, 0);",
     "arch::mbarrier_arrive(empty);", "waits for an mbarrier", "*InPairs*"),
    ("a CTA of a pair ends before the other", ROLES,
     "  sync_ctas<kGemm>();\n  arch::tcgen05_fence_after();\n  if (warp",
     "  __syncthreads();\n  arch::tcgen05_fence_after();\n  if (warp", "tcgen05.dealloc", "*InPairs*"),
    ("both CTAs multiply", ROLES, "arch::cluster_cta_rank() == 0) multiply_tiles", "true) multiply_tiles",
     "nobody can go on", "*InPairs*"),
    # relays of pairs that gather
    ("a relay arrives in its own CTA", PAIR, "arch::relay_arrive(&smem.full[state.stage], 0)",
     "arch::relay_arrive(&smem.full[state.stage], arch::cluster_cta_rank())", "waits for an mbarrier",
     "Up*GathersRowsInPairs"),
    ("a relay is ahead of what is gathered", PAIR, "arch::mbarrier_wait(&smem.gathered[state.stage], state.phase);", "",
     "more arrivals", "Up*GathersRowsInPairs"),
    ("a relay has no fence", PAIR, "arch::relay_arrive(&smem.full[state.stage], 0)",
     "arch::mbarrier_arrive_cluster(&smem.full[state.stage], 0)", "that cp.async wrote", "Up*GathersRowsInPairs"),
    ("a stage waits for one relay", "cuda/gemm/sm100/storage.cuh", "relays(c) ? 3 :", "relays(c) ? 2 :",
     "that cp.async wrote", "Up*GathersRowsInPairs"),
    ("gathering threads report to the stage", PAIR, "return &smem.gathered[stage];", "return &smem.full[stage];",
     "more arrivals", "Up*GathersRowsInPairs"),
    ("the bytes of half of B are expected", PAIR, "&smem.full[stage], kGemm.b_tile_bytes()",
     "&smem.full[stage], kGemm.b_tile_bytes() / 2", "nobody can go on", "Up*GathersRowsInPairs"),
    ("both CTAs have the features of the first", "cuda/gemm/work_queue.cuh",
     "tile.row = message.y + rank * kGemm.tile.m",
     "tile.row = message.y + 0 * rank", WRONG, "ProjectionWgrad*InPairs"),
    # halves of k
    ("a pair multiplies the gate half twice", PAIR, "k_tile >= p.k_half_tiles ? 1 : 0", "false ? 1 : 0", WRONG,
     "UpProjectionDgrad*ExpertsOfAnyRows"),
    ("both halves of k have the weights of gate", PAIR, "full, k, k_half, group", "full, k, 0, group", WRONG,
     "UpProjectionDgrad*ExpertsOfAnyRows"),
    # epilogue
    ("all experts have the bias of the first", STORE, "segment * p_.bias.segment_stride",
     "0 * segment * p_.bias.segment_stride", WRONG, "*Bias*"),
    ("rows are stored one further on", STORE, "p_.ragged_extent + row - tile.end",
     "p_.ragged_extent + row + 1 - tile.end", WRONG, "*Pairs*"),
    ("gathered rows are not fenced", LOOP, "arch::fence_proxy_async_shared();", "", "that cp.async wrote",
     "Up*Gathers*"),
    ("a stage does not wait for all that gather", ROLES, "full_arrivals(kGemm)", "1", "more arrivals",
     "Up*Gathers*"),
    ("a is of the up columns alone", ACT, "place(group, 0, part)", "place(group, 1, part)", "a has other bits",
     "Up*WithoutH"),
    ("a comes of h before it is rounded", ACT, "arch::unpack_bf16(pair(gate, c))",
     "float2{__uint_as_float(gate[c]), __uint_as_float(gate[c + 1])}", "a has other bits", "Up*WithoutH"),
    ("h alone never frees its accumulators", ACT, "if (!p_.stores_a && half", "if (false && half",
     "waits for an mbarrier", "Up*HAlone"),
    ("both halves of h are its first", ACT, "slabs_.store(&p_.h, column, half,", "slabs_.store(&p_.h, column, 0,",
     "h has other bits", "Up*PairsWithoutAnExpert"),
    ("up has the bias of gate", ACT, "add_bias(up, 1,", "add_bias(up, 0,", "a has other bits", "Up*Biases*"),
    ("accumulators are freed before a is loaded", ACT, "if (part == 1 && group == groups - 1",
     "if (part == 0 && group == groups - 1", "is not known to be", "Up*ExpertsOfAnyRows"),
    # the activation's gradient
    ("h is loaded over dh that is stored", GRAD,
     "have been read\n        slabs_.template wait_read<0>();", "have been read", "has other bits",
     "DownProjectionDgrad*Turn"),
    ("h is not awaited", GRAD, "slabs_.wait(block);", "", "has other bits", "DownProjectionDgrad*Turn"),
    ("a third block has the h of the first", GRAD, "arch::elect_one()) load(block + 1);",
     "arch::elect_one()) load(block - 1);", "has other bits", "DownProjectionDgrad*Turn"),
    ("a buffer's parity never turns", SLABS, "phase_ ^= 1u << buffer;", "", "waits for an mbarrier",
     "DownProjectionDgrad*Turn"),
    ("a buffer does not wait for the up half", SLABS, "= kBufferSlabs * kWarpSlabRows * kStageRowBytes",
     "= kWarpSlabRows * kStageRowBytes", "waits for an mbarrier", "DownProjectionDgrad*Turn"),
    ("ds of a tile is one sum", GRAD, "tile.end, ds);\n        ds = 0.0f;", "tile.end, ds);", "ds has other bits",
     "DownProjectionDgrad*ExpertsOfAnyRows"),
    ("ds has the score in it", PAIR_OF_COLUMNS, "ds = fmaf(t_left, low.a, ds);", "ds = fmaf(s * t_left, low.a, ds);",
     "ds has other bits", "DownProjectionDgrad*AllRows*"),
    ("ds of rows past the expert is stored", GRAD, "p_.gmem_partials != nullptr && own < end",
     "p_.gmem_partials != nullptr", "ds ", "DownProjectionDgrad*PairsWithoutAnExpert"),
    ("a row has the score of another slot", GRAD, "p_.gmem_scores[p_.gmem_permutation[own]]", "p_.gmem_scores[own]",
     "dg has other bits", "DownProjectionDgrad*AllRows*"),
    ("du is stored over dg", GRAD, "slab_of(block, half), column, half,", "slab_of(block, half), column, 0,",
     "has other bits", "DownProjectionDgrad*AllRows*"),
    ("up is read for gate", GRAD, "uint4 g = slabs_.get(slab_g, chunk)", "uint4 g = slabs_.get(slab_u, chunk)",
     "dg has other bits", "DownProjectionDgrad*AllRows*"),
    ("a' has half of its columns", GRAD, "slabs_.put(slab_a, part * kPartChunks + c, a[c]);",
     "slabs_.put(slab_a, c, a[c]);", "a' has other bits", "DownProjectionDgrad*AllRows*"),
    ("accumulators are freed ahead of a block's second half", GRAD, "part == 1 && block == blocks_ - 1",
     "part == 0 && block == blocks_ - 1", "is not known to be", "DownProjectionDgrad*Turn"),
    # weight gradients
    ("the last rows of an expert are left out", LOOP, "last_steps_of<kGemm>(tile) :",
     "max(1, last_steps_of<kGemm>(tile) - 1) :", WRONG, "ProjectionWgrad*AnyRows"),
    ("a rows-major A is said to be K-major", LOOP, ".a_major = StageOperand<kGemm.a.major>::kMma",
     ".a_major = arch::MmaMajor::kK", WRONG, "ProjectionWgrad*AnyRows"),
    ("eight i of the transpose are exchanged", WGRAD, "(eights + lane / 16) * 8", "(eights + 1 - lane / 16) * 8",
     WRONG, "ProjectionWgrad*AnyRows"),
    ("the second fragment is the first", ROWS, "half * kWarpSlabRows / 2", "0 * half", WRONG,
     "ProjectionWgrad*AnyRows"),
    ("32 i of fp32 are stored over the first", WGRAD, "at.i + part * kLoaded", "at.i", WRONG,
     "ProjectionWgrad*AnyRows"),
    ("old values are not awaited", WGRAD, "slabs_.wait(group);", "", WRONG, "ProjectionWgrad*AddsToWhatWasThere"),
    ("fp32 replaces what it is added to", WGRAD, "if (p_.accumulates) {\n        arch::tma_reduce_add",
     "if (false) {\n        arch::tma_reduce_add", WRONG, "ProjectionWgrad*AddsToWhatWasThere"),
    ("experts without rows wait for what they add to", WGRAD,
     "bool const skips = p_.accumulates && tile.begin == tile.end;", "bool const skips = false;",
     "waits for an mbarrier", "ProjectionWgrad*AddsToWhatWasThere"),
    ("old values lie over a slab that is stored", WGRAD, "const {\n    slabs_.template wait_read<0>();", "const {",
     WRONG, "ProjectionWgrad*AddsToWhatWasThere"),
    ("nobody asks for a group behind one that nobody wants", WGRAD,
     "if (!kFp32 && adds(tile)) load_next(tile, row, group);", "", "waits for an mbarrier", "ProjectionWgrad*AHalf*"),
    ("a slab is filled before TMA has read it", WGRAD, "slabs_.template wait_read<1>();\n      turn_ ^= 1;",
     "turn_ ^= 1;", WRONG, "ProjectionWgrad*Turn"),
    ("groups have slabs by their number", WGRAD, "slabs_.slab(turn_)", "slabs_.slab_of(group, 0)", WRONG,
     "ProjectionWgrad*OneGroupInATile"),
    ("chunks of a row are not swizzled", SLABS, "(chunk ^ (row & 7)) << 4", "chunk << 4", WRONG, "*AllRows*"),
]
QUICK = ("the last step of k is left out", "no fence behind the wait for a tile")


def outcome(args, mutant):
    tests = mutant[5] if mutant[5][0].isupper() else f"DownProjectionFwd{mutant[5]}"
    source = next(source for start, source in SOURCES.items() if tests.startswith(start))
    return mutant_runner.outcome(args, mutant, source, tests)


if __name__ == "__main__":
    sys.exit(mutant_runner.main(MUTANTS, QUICK, outcome))

# SPDX-License-Identifier: Apache-2.0
"""Errors in emulated kernels that emulator_test has to notice: each in a copy of the sources, compiled and run.

What a GPU's memory may reorder is none of them: fences do nothing here (emulator.hpp). All of them take many minutes;
`--quick` takes one of every kind, with the tests that notice it.
"""
import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

# Against mutants that never end, and nothing else: a mutant takes up to five minutes where twenty other programs run.
LIMIT_S = 3000

# What is compiled again for a mutant of these sources, here or in the tree, and the tests that are run.
COMPILED = {
    "expert_parallel/unfused/route.cu": ("expert_parallel/unfused/route.cu", "UnfusedExchange.*"),
    "expert_parallel/unfused/dispatch.cu": ("expert_parallel/unfused/dispatch.cu", "UnfusedExchange.*"),
    "expert_parallel/unfused/combine.cu": ("expert_parallel/unfused/combine.cu", "UnfusedExchange.*"),
    "expert_parallel/exchange/row_tables.cuh": ("expert_parallel/unfused/route.cu", "UnfusedExchange.*"),
    "expert_parallel/fused/saved_pass.cuh": ("forward_instances.cpp", "FusedForward.*"),
    "expert_parallel/unfused/copy_rows.cuh": ("expert_parallel/unfused/combine.cu", "UnfusedExchange.*"),
    "expert_parallel/": ("forward_instances.cpp", "FusedForward.*"),
    "cuda/gemm/ring.cuh": ("forward_instances.cpp", "FusedForward.*"),
    "cuda/epilogue/activation_math.cuh": ("activation_test.cpp", "Activation.*"),
    "cuda/host/gemm_params.hpp": ("e4m3_operand_test.cpp", "E4m3Operand.*"),
    "cuda/plain/dot.cuh": ("e4m3_operand_test.cpp", "E4m3Operand.*"),
    "cuda/epilogue/store_held.cuh": ("down_projection_fwd_e4m3_test.cpp", "DownProjectionFwdE4m3.*"),
    "cuda/kernels/down_projection_fwd_e4m3.cuh": ("down_projection_fwd_e4m3_test.cpp", "DownProjectionFwdE4m3.*"),
    "cuda/kernels/quantise.cuh": ("quantise_test.cpp", "Quantise.*"),
    "cuda/gemm/sm90/mainloop_scaled.cuh": ("up_projection_fwd_e4m3_test.cpp", "UpProjectionFwdE4m3.*"),
    "cuda/gemm/sm90/held_tile.cuh": ("up_projection_fwd_e4m3_test.cpp", "UpProjectionFwdE4m3.*"),
    "cuda/gemm/produce/gather_scaled.cuh": ("up_projection_fwd_e4m3_test.cpp", "UpProjectionFwdE4m3.*"),
    "cuda/epilogue/activation_e4m3.cuh": ("up_projection_fwd_e4m3_test.cpp", "UpProjectionFwdE4m3.*"),
    "cuda/gemm/": ("gemm_test.cpp", "-FusedForward.*:UnfusedExchange.*"),
    "cuda/epilogue/wgrad_store.cuh": ("projection_wgrad_test.cpp", "ProjectionWgrad.*"),
    "cuda/epilogue/chunk_sum.cuh": ("router_wgrad_test.cpp", "RouterWgrad.*"),
    "cuda/epilogue/": ("gemm_test.cpp", "-FusedForward.*:UnfusedExchange.*"),
    "cuda/kernels/projection_wgrad.cuh": ("projection_wgrad_test.cpp", "ProjectionWgrad.*"),
    "cuda/kernels/router_loss.cuh": ("router_loss_test.cpp", "*RouterLoss.*"),
    "cuda/kernels/router_wgrad.cuh": ("router_wgrad_test.cpp", "RouterWgrad.*"),
}
# (name, file, text that stands there once, what stands there instead, a part of what the test then says). Where kernels
# of another folder are to notice it than the file's own, a sixth element is the key of COMPILED that names them.
# Where the part names a test, that test alone is run.
MUTANTS = [
    ("a task begins without its rows", "expert_parallel/fused/schedule_tasks.cuh",
     "pass.wait_count(needs.counter, needs.count, needs.site, announce_sent);", "",
     "nan, not"),
    ("a task is loaded before it may be", "expert_parallel/fused/load_task.cuh",
     "arch::mbarrier_wait(&smem_.schedule.loadable, phase_);", "",
     "nan, not"),
    ("a stage is given back before it was multiplied", "cuda/gemm/sm90/mainloop.cuh",
     "arch::wgmma_wait<1>();", "arch::wgmma_wait<3>();", ", not ", "expert_parallel/"),
    ("a lent stage is never given back", "expert_parallel/fused/last_task.cuh",
     "{ up_.settle(); }", "{}",
     "waits for an mbarrier"),
    ("a stage less is lent than is taken", "expert_parallel/fused/load_task.cuh",
     "down_ ? 0 : lent_to_up(kKind);", "down_ ? 0 : lent_to_up(kKind) - 1;", "waits for an mbarrier"),
    ("a is announced when it has been read", "expert_parallel/fused/last_task.cuh",
     "if (arch::lane_idx() == 0) arch::bulk_store_wait<0>();",
     "if (arch::lane_idx() == 0) arch::tma_store_wait_read<0>();", ", not "),
    ("lanes decide alone whether they complete", "expert_parallel/fused/last_task.cuh",
     "__any_sync(arch::kAllLanes, !there)", "!there",
     "lanes of a warp meet in different places"),
    ("a stage has one arrival too many", "expert_parallel/fused/load_task.cuh",
     "arch::mbarrier_arrive_expect_tx(full,",
     "arch::mbarrier_arrive(full);\n  arch::mbarrier_arrive_expect_tx(full,",
     "more arrivals than a barrier awaits"),
    ("counters of the next pass are not cleared", "expert_parallel/fused/forward.cuh",
     "clear_next_bank<kForwardThreads>(p.exchange, pass.epoch);", "", "pass"),
    ("both CTAs of a pair load the same half of their rows", "expert_parallel/fused/load_task.cuh",
     "tile.row + cta * gemm::kSubtileM", "tile.row", ", not "),
    ("both CTAs of a pair load the same half of their weights", "expert_parallel/fused/load_task.cuh",
     "kShared.b_groups() + group", "kShared.b_groups()", ", not "),
    ("a stage is given back to one CTA of the pair", "cuda/gemm/ring.cuh",
     "if (thread < kGemm.cluster.ctas) arch", "if (thread < 1) arch", "waits for an mbarrier"),
    ("a CTA of a pair ends before the other", "expert_parallel/fused/forward.cuh",
     "arch::cluster_sync();  // this CTA's", "__syncthreads();  // this CTA's", "has ended"),
    ("rows of two sources lie on each other", "expert_parallel/fused/set_up.cuh",
     "rows_ahead(p.shape, counts, expert, p.rank, source)",
     "rows_ahead(p.shape, counts, expert, p.rank, p.rank) + 0 * source", ", not "),
    ("a slot of results goes to the next choice", "expert_parallel/fused/push_rows.cuh",
     "origin.x) - token * p.shape.max_top_k", "origin.x + 1) % p.shape.max_top_k", ", not "),
    ("a quarter of y takes the place of another", "expert_parallel/fused/push_rows.cuh",
     "if (quarter == held + 1)", "if (quarter == 3 - held)", ", not "),
    ("the last rows of y are not stored", "expert_parallel/fused/push_rows.cuh",
     "next_ < kPieces; }", "next_ + 1 < kPieces; }", ", not "),
    ("a down is left where the next task has no rows of the warp", "expert_parallel/fused/forward.cuh",
     "      last.finish();\n      up.settle();", "      up.settle();",
     "waits for an mbarrier"),
    ("the halves of h lie on each other", "expert_parallel/fused/push_rows.cuh",
     "column + pass_.shape().intermediate : column", "column : column", "h differ"),
    ("gate columns have the biases of up columns", "expert_parallel/fused/forward.cuh",
     "add_bias(acc[0], 2 * group, biases.up[0]", "add_bias(acc[0], 2 * group, biases.up[1]",
     "FAILED  ] FusedForward.AddsBiases"),
    ("all of a down's columns have the biases of its first half", "expert_parallel/fused/forward.cuh",
     "column + kHalf, columns);", "column, columns);", "FAILED  ] FusedForward.AddsBiases"),
    ("an up is announced with the last of its h", "expert_parallel/fused/last_task.cuh",
     "if (!is_h && !push_.pending())", "if (!push_.pending())", "FAILED  ] FusedForward.Saves"),
    ("rows of h lie as those of the pool", "expert_parallel/fused/saved_pass.cuh",
     "expert.first_row + (tile.row - expert.first_block * kPlain.tile.m) + row_of_tile",
     "tile.row + row_of_tile", "h differ"),
    ("h is saved beyond its capacity", "expert_parallel/fused/saved_pass.cuh",
     "saved.gmem_h == nullptr || row >= saved.capacity", "saved.gmem_h == nullptr", "h differ"),
    ("every warp saves the same rows of the tables", "expert_parallel/fused/saved_pass.cuh",
     "* kCommunicationWarps + warp;", "* kCommunicationWarps;", "origins differ"),
    ("rows beyond the limit are not reported", "expert_parallel/fused/saved_pass.cuh",
     "!saved.may_overflow && thread == 0", "false", "FusedForward.MoreRowsThanTheLimitAreReported"),
    ("a token is added up before it is complete", "expert_parallel/fused/slot_sums.cuh",
     "group.there = group.choice.owner < 0;", "group.there = true;", "nan, not"),
    ("a token is added up when its first choice is there", "expert_parallel/fused/slot_sums.cuh",
     "missing >> score_lane_ & choices", "missing >> score_lane_ & 1u", "nan, not"),
    ("a sum is made before its results are there", "expert_parallel/fused/partial_combine.cuh",
     "if (missing == 0) return;", "return;", ", not "),
    ("a sum has all of its scores from the first choice", "expert_parallel/fused/partial_combine.cuh",
     "terms[first + i].score", "terms[0].score", ", not "),
    ("a token of several sums has them in one slot", "expert_parallel/fused/partial_combine.cuh",
     "p_.window.slot(token.token, first)", "p_.window.slot(token.token, 0)", ", not "),
    ("words of blocks are not renewed", "expert_parallel/fused/forward.cuh",
     "if (renews_words(pass.epoch))", "if (false)", "nan, not"),
    ("a wait that fails is not reported", "expert_parallel/exchange/wait.cuh",
     "raise(site, peer, wanted, seen, by);", "", "FAILED  ] FusedForward.ARankThatDoesNotComeIsReported"),
    ("a rank that gave up is trusted at the end", "expert_parallel/exchange/wait.cuh",
     "if (ranks != 0 &&", "if (false &&", "rank 1 says: "),
    ("the first down of a block says that it is done", "expert_parallel/fused/sent_tasks.cuh",
     "before + 1 == static_cast<std::uint32_t>(pass_.shape().down_tiles())", "before == 0", "nan, not"),
    ("lists are said to be there by the first slice", "expert_parallel/exchange/route.cuh",
     "if (before + 1 != gridDim.x) return false;",
     "if (before != 0) return false;", "pass"),
    ("x is said to be there before it was copied", "expert_parallel/exchange/route.cuh",
     "beside.finish();", "", "nan, not"),
    ("x is said to be there once it left shared memory", "expert_parallel/fused/copy_x.cuh",
     "arch::bulk_store_wait<0>();", "arch::tma_store_wait_read<0>();", "nan, not"),
    ("pieces of x are loaded over those that are not stored yet", "expert_parallel/fused/copy_x.cuh",
     "arch::tma_store_wait_read<1>();", "", ", not "),
    ("of x the first two batches are copied", "expert_parallel/fused/copy_x.cuh",
     "load(batch + 1);", "", "waits for an mbarrier"),
    ("a stage of a GEMM is given back before it was multiplied", "cuda/gemm/sm90/mainloop.cuh",
     "arch::wgmma_wait<1>();", "arch::wgmma_wait<3>();", "h row"),
    ("a resident B is never given back", "cuda/gemm/sm90/mainloop.cuh",
     "if (last_of_run(tile)) release_resident<kGemm>(smem, k_tile - 1);", "", "waits for an mbarrier"),
    ("loads do not say that the next tile may be drawn", "cuda/gemm/produce/tma.cuh",
     "arch::mbarrier_arrive(&smem_.draw);", ";", "waits for an mbarrier"),
    ("all tiles of weights ask for as little as the last one", "cuda/gemm/tile_extent.cuh",
     "(kGemm.partial_last() && tile.n_tile == p.n_tiles - 1);", "(kGemm.partial_last() && tile.n_tile >= 0);", " row "),
    ("half of a last tile is multiplied where more is there", "cuda/gemm/tile_extent.cuh",
     "p.b_groups <= kGemm.b_groups() / 2;", "p.b_groups <= kGemm.b_groups();", "y row"),
    ("the next tile is announced before it was drawn", "cuda/gemm/scheduler.cuh",
     "arch::sleep_ns(kDrawSleepNs);\n        draw();\n      }\n      found = announce_drawn();",
     "arch::sleep_ns(kDrawSleepNs);\n      }\n      found = announce_drawn();\n      if (draws_late(k_tiles)) draw();",
     "a tile counter is left"),
    ("a deferred epilogue takes its second half too late", "cuda/gemm/sm90/deferred.cuh",
     "if (piece == kDeferredPieces / 2) fill", "if (piece == kDeferredPieces / 2 + 1) fill", "h row"),
    ("the second GEMM does not wait for the first", "cuda/gemm/handover.cuh",
     "arch::load_acquire_gpu(p_.gmem_handover) < kHandedOver", "false", "y row"),
    ("one warp hands over for all", "cuda/gemm/handover.cuh",
     "kHandedOver - warps + 1", "kHandedOver", "y row"),
    ("the low half of dlogits is left out", "cuda/gemm/sm90/outer_product.cuh",
     "a[2 + half] = has ?", "a[2 + half] = false ?", "UpProjectionDgrad.AddsTheRoutersPart"),
    ("the second term of the router's row is left out", "cuda/gemm/sm90/outer_product.cuh",
     "v_in_two ? u[half] : 0.0f", "0.0f", "UpProjectionDgrad.AddsTheFp32RoutersPart"),
    ("all terms of B are loaded as the first", "cuda/gemm/produce/load_tile.cuh",
     "k * kGemm.b_terms() + term * kGemm.tile.k", "k * kGemm.b_terms()", "RouterLogits.Fp32Weights"),
    ("all terms of B are multiplied as the first", "cuda/gemm/sm90/mainloop.cuh",
     "+ step / kSteps * kTermStep", "", "RouterLogits.Fp32Weights"),
    ("rows of e4m3 lie as far apart as those of bf16", "cuda/host/gemm_params.hpp",
     "kBytes = gemm::bytes_of(kGemm.a.stored);", "kBytes = 2;", "E4m3Operand.GemmDecodesOnLoad"),
    ("a plain twin leaves out a value that it decodes", "cuda/plain/dot.cuh",
     "for (int64_t c = 0; c < count; ++c) sum = fmaf(widen(x[c])",
     "for (int64_t c = 1; c < count; ++c) sum = fmaf(widen(x[c])", "E4m3Operand.PlainTwinDecodesOnLoad"),
    ("a row has the scale of the next one", "cuda/gemm/produce/gather_scaled.cuh",
     "tile.row + thread(), tile.end - 1)", "tile.row + thread() + 1, tile.end - 1)", "FAILED  ] UpProjectionFwdE4m3"),
    ("all k_tiles of B have the scales of the first", "cuda/gemm/produce/gather_scaled.cuh",
     "scales.gmem_b + first + 2 * k_tile", "scales.gmem_b + first", "FAILED  ] UpProjectionFwdE4m3"),
    ("up has gate's scale of the weights", "cuda/gemm/sm90/mainloop_scaled.cuh",
     "{upper * b.y, lower * b.y}", "{upper * b.x, lower * b.x}", "FAILED  ] UpProjectionFwdE4m3"),
    ("a partial sum is added before it is there", "cuda/gemm/sm90/mainloop_scaled.cuh",
     "arch::wgmma_wait<0>();", "arch::wgmma_wait<1>();", "FAILED  ] UpProjectionFwdE4m3"),
    ("a stage is multiplied before it is full", "cuda/gemm/sm90/mainloop_scaled.cuh",
     "k_tile + 1 < k_tiles && is_full<kGemm>(smem, state);", "true;", "FAILED  ] UpProjectionFwdE4m3"),
    ("slabs are filled before they were read", "cuda/gemm/sm90/mainloop_scaled.cuh",
     "arch::mbarrier_wait(&smem.stored[warp], phase);", "", "FAILED  ] UpProjectionFwdE4m3"),
    ("slabs are read before they were filled", "cuda/gemm/sm90/mainloop_scaled.cuh",
     "arch::mbarrier_wait(&smem.held[warp], phases >> consumer & 1);", "", "FAILED  ] UpProjectionFwdE4m3"),
    ("the second consumer's rows wait for the first one's phase", "cuda/gemm/sm90/mainloop_scaled.cuh",
     "phases ^= 1u << consumer;", "phases ^= 3u;", "FAILED  ] UpProjectionFwdE4m3"),
    ("the second column group multiplies the first one's weights", "cuda/gemm/sm90/mainloop_scaled.cuh",
     "b + group * kGroupStep", "b", "FAILED  ] UpProjectionFwdE4m3"),
    ("rows that are held lose a swizzle", "cuda/gemm/sm90/held_tile.cuh",
     "((lane / 16 ^ lane % 8) << 4)", "(lane / 16 << 4)", "FAILED  ] UpProjectionFwdE4m3"),
    ("the largest magnitude of half a block is its scale", "cuda/gemm/sm90/held_tile.cuh",
     "for (int bit : {1, 2, 8})", "for (int bit : {1, 2})", "FAILED  ] UpProjectionFwdE4m3"),
    ("the largest magnitude of a leaves out a pair", "cuda/epilogue/activation_e4m3.cuh",
     "i = 0; i < kPairs; ++i) {\n        largest = arch::max_magnitude(",
     "i = 1; i < kPairs; ++i) {\n        largest = arch::max_magnitude(",
     "FAILED  ] UpProjectionFwdE4m3"),
    ("the slabs of y lie on each other", "cuda/epilogue/store_held.cuh",
     "gmem + slab * kSlabColumns", "gmem", "y row"),
    ("scales of a lie as rows without padding", "cuda/kernels/down_projection_fwd_e4m3.cuh",
     ".a_k_step = padded_scale_rows(args.rows)", ".a_k_step = args.rows", "y row"),
    ("the largest magnitude of half a row's block is its scale", "cuda/kernels/quantise.cuh",
     "for (int half = kLanes / 2;", "for (int half = kLanes / 4;", "FAILED  ] Quantise"),
    ("a block of weights has the scale of its first rows", "cuda/kernels/quantise.cuh",
     "warp < kQuantiseWarps;", "warp < 1;", "FAILED  ] Quantise"),
    ("codes of a row past its expert are stored", "cuda/epilogue/activation_e4m3.cuh",
     "return row < end_ ?", "return row <= end_ ?", "FAILED  ] UpProjectionFwdE4m3"),
    ("a scale of a row past its expert is stored", "cuda/epilogue/activation_e4m3.cuh",
     "if (row < end_ &&", "if (row <= end_ &&", "FAILED  ] UpProjectionFwdE4m3"),
    ("columns that are kept lose a swizzle", "cuda/gemm/sm90/deferred.cuh",
     "kSecondColumn * kColumnBytes | 4 << 4", "kSecondColumn * kColumnBytes", "ProjectionWgrad.AlongHidden",
     "cuda/kernels/projection_wgrad.cuh"),
    ("what bf16 is added to is left out", "cuda/epilogue/wgrad_store.cuh",
     "add_staged(acc, g, smem);", ";", "ProjectionWgrad.AddsToBf16InLentStages"),
    ("a kernel that lets the next one start keeps its lent stages", "cuda/kernels/projection_wgrad.cuh",
     "    Epilogue::settle();\n    count_tile();", "    count_tile();", "waits for an mbarrier"),
    ("a score is left out of dh", "cuda/epilogue/activation_gradient.cuh",
     "up.x, s * t_left)", "up.x, t_left)", "DownProjectionDgrad.InLentStages"),
    ("the square of a gate overflows before the slope of its sigmoid is 0", "cuda/epilogue/activation_math.cuh",
     "fmaf(part * x, 1.5f * kScale * kCubic * x, slope)",
     "fmaf(part, 1.5f * kScale * kCubic * square, slope)", "nan, not"),
    ("alpha phi overflows before the rest of its sigmoid is 0", "cuda/epilogue/activation_math.cuh",
     "alpha * (1.0f - sigmoid), phi,", "alpha * phi, 1.0f - sigmoid,", "nan, not"),
    ("a gradient times up overflows before a slope of 0", "cuda/epilogue/activation_math.cuh",
     "da * slope * u, da * phi", "da * u * slope, da * phi", ", not "),
    ("a gradient times a clamped up overflows before a slope of 0", "cuda/epilogue/activation_math.cuh",
     "da * (g > act.limit ? 0.0f : slope) * up,", "da * up * (g > act.limit ? 0.0f : slope),", ", not "),
    ("the slope of relu2 overflows before a gradient of 0", "cuda/epilogue/activation_math.cuh",
     "half + half, 0.0f", "da * (positive + positive), 0.0f", "nan, not"),
    ("all sequences have the costs of the first", "cuda/kernels/router_loss.cuh",
     "p.gmem_sequence_cost + own * int64_t{p.experts}", "p.gmem_sequence_cost + 0 * own",
     "FAILED  ] Kinds/RouterLoss.IsThatOfFp64"),
    ("padding has losses", "cuda/kernels/router_loss.cuh",
     "if (place < real) {", "if (place < p.tokens) {", "FAILED  ] Kinds/RouterLoss.LeavesPaddingOut"),
    ("dlogits of padding are left as they were", "cuda/kernels/router_loss.cuh",
     "row.clear(token);", ";", "FAILED  ] Kinds/RouterLoss.LeavesPaddingOut"),
    ("chunks are added up before all are there", "cuda/epilogue/chunk_sum.cuh",
     "while (arch::load_acquire_gpu(p_.gmem_arrived) < parts)", "while (false)",
     "FAILED  ] RouterWgrad.InChunksOfTokens"),
    ("parts of a chunk are never counted", "cuda/epilogue/chunk_sum.cuh",
     "    is_counted_ = false;", "", "FAILED  ] RouterWgrad.InChunksOfTokens"),
    ("all terms of dlogits are added up as the first", "cuda/epilogue/chunk_sum.cuh",
     "block + term * own_blocks", "block + 0 * term", "FAILED  ] RouterWgrad.InChunksOfTokens"),
    ("real tokens have the chunks of all tokens", "cuda/kernels/router_wgrad.cuh",
     ".gmem_expert_offsets = args.gmem_chunk_offsets,", ".gmem_expert_offsets = nullptr,",
     "FAILED  ] RouterWgrad.OfRealTokensInTheChunksThatTheyHaveAlone"),
    ("a NaN becomes 0", "cuda/epilogue/activation_math.cuh",
     "return x < 0.0f ? 0.0f : x;", "return x > 0.0f ? x : 0.0f;", "DoesAtInfinityWhatIsDocumented"),
    ("a tail of the error function is that of the other sign", "cuda/epilogue/activation_math.cuh",
     "return x < 0.0f ? tail", "return x > 0.0f ? tail", ", not "),
    ("a gelu loses its cube", "cuda/epilogue/activation_math.cuh",
     "times_sigmoid(x, kScale * fmaf(kCubic * x * x, x, x))", "times_sigmoid(x, kScale * x)", ", not "),
    ("tables are made before the lists are there", "expert_parallel/unfused/route.cu",
     "if (thread < exchange.shape.ranks) {", "if (false) {", "differ at"),
    ("tables are made from the lists of the pass before", "expert_parallel/exchange/row_tables.cuh",
     "list_entry(parity(epoch), from", "list_entry(parity(epoch + 1), from", "differ at"),
    ("rows come without the scores of their pairs", "expert_parallel/unfused/route.cu",
     "if (!route_and_plan<true>(", "if (!route_and_plan<false>(", "scores differ"),
    ("rows are pulled before they lie in their windows", "expert_parallel/unfused/dispatch.cu",
     "if (thread < exchange.shape.ranks) {", "if (false) {", "rows differ"),
    ("second rows are pulled before they lie in their windows", "expert_parallel/unfused/dispatch.cu",
     "waiter.for_second_rows(thread)", "true", "second rows differ"),
    ("second rows are said to be there with the first", "expert_parallel/unfused/dispatch.cu",
     ": exchange.window.second_staged_word(exchange.rank)", ": exchange.window.staged_word(exchange.rank)",
     "nothing changes any more"),
    ("a row is stored for the first choice of its token alone", "expert_parallel/unfused/dispatch.cu",
     "std::int32_t row = next_;", "std::int32_t row = -1;", "rows differ"),
    ("dispatch loads chunks over those that are not stored yet", "expert_parallel/unfused/dispatch.cu",
     "arch::tma_store_wait_read<1>();", "", "rows differ"),
    ("a token's next row is any later one", "expert_parallel/exchange/row_tables.cuh",
     "of_choice <= own || of_choice >= least", "of_choice <= own", "origins differ"),
    ("a rank looks at its own row limit alone", "expert_parallel/exchange/row_tables.cuh",
     ".for_row_limit(rank, row_limit)", ".for_row_limit(exchange.rank, row_limit)", "FAILED  ] UnfusedExchange"),
    ("every row is the first of its token", "expert_parallel/exchange/row_tables.cuh",
     "!once || words.z % 256 == 0", "true", "origins differ"),
    ("second rows are those of x", "expert_parallel/unfused/dispatch.cu",
     "is_second ? exchange.window.second_x_row(token)", "false ? exchange.window.second_x_row(token)",
     "second rows differ"),
    ("counters of the next unfused pass are not cleared", "expert_parallel/unfused/dispatch.cu",
     "clear_next_bank<kThreads>(exchange, epoch);", "", "nothing changes any more"),
    ("more rows are pulled than the limit allows", "expert_parallel/unfused/dispatch.cu",
     "min(std::int64_t{all_rows}, p.capacity)", "all_rows",
     "FAILED  ] UnfusedExchange.MoreRowsThanTheLimitAreReported"),
    ("unfused passes do not renew words of blocks", "expert_parallel/unfused/dispatch.cu",
     "if (renews_words(epoch))", "if (false)", "blocks_are"),
    ("saved tables are without scores", "expert_parallel/unfused/dispatch.cu",
     "p.saved.gmem_scores[i] = p.tables.gmem_scores[i];", "", "scores differ"),
    ("more rows are pushed than the limit allows", "expert_parallel/unfused/combine.cu",
     "min(std::int64_t{p.tables.gmem_expert_offsets[exchange.local_experts]}, p.capacity)",
     "p.tables.gmem_expert_offsets[exchange.local_experts]",
     "FAILED  ] UnfusedExchange.MoreRowsThanTheLimitAreReported"),
    ("a row goes to the slot of the first choice", "expert_parallel/unfused/combine.cu",
     "window.slot(token, choice)", "window.slot(token, choice * 0)", "the window"),
    ("a row goes back with the gradient of another score", "expert_parallel/unfused/combine.cu",
     "= p.gmem_dscores[row];", "= p.gmem_dscores[row / 2];", "the window"),
    ("the first CTA says that all rows are back", "expert_parallel/unfused/combine.cu",
     "before, 0) + 1 == gridDim.x", "before, 0) == 0", "the window"),
    ("a pass ends before all owners have acknowledged it", "expert_parallel/unfused/combine.cu",
     "waiter.for_epoch(exchange.window.ack_word(peer), epoch, Site::ack, peer)", "peer >= 0",
     "the window"),
    ("an owner whose rows exceed its limit is trusted at the end", "expert_parallel/unfused/combine.cu",
     "waiter.report_given_up();", "", "FAILED  ] UnfusedExchange.MoreRowsThanTheLimitAreReported"),
    ("pairs without a row have gradients of scores", "expert_parallel/unfused/combine.cu",
     "gmem_slot_of_pair[pair] < 0 ? 0 :", "gmem_slot_of_pair[pair] < -1 ? 0 :", "dscores differ"),
    ("rows are said to be back when they have left shared memory", "expert_parallel/unfused/copy_rows.cuh",
     "arch::bulk_store_wait<0>();", "arch::tma_store_wait_read<0>();", "the window"),
    ("chunks are loaded over those that are not stored yet", "expert_parallel/unfused/copy_rows.cuh",
     "arch::bulk_store_wait<1>();", "", "the window"),
]

# One of every kind, and the tests that notice it: waits, stages, banks of counters, pairs of CTAs, values, GEMMs, their
# handover, scales, activations, and what unfused kernels pull and push.
QUICK = {
    "a task begins without its rows": "FusedForward.GivesTheBits*",
    "a lent stage is never given back": "FusedForward.GivesTheBits*",
    "counters of the next pass are not cleared": "FusedForward.GivesTheBits*",
    "a stage is given back to one CTA of the pair": "FusedForward.GivesTheBits*",
    "gate columns have the biases of up columns": "FusedForward.AddsBiases",
    "a stage of a GEMM is given back before it was multiplied": "Projections.SortedRows*",
    "the second GEMM does not wait for the first": "Projections.*",
    "up has gate's scale of the weights": "UpProjectionFwdE4m3.LongRowsOfK",
    "the square of a gate overflows before the slope of its sigmoid is 0": "Activation.*",
    "rows come without the scores of their pairs": "UnfusedExchange.*",
    "rows are pulled before they lie in their windows": "UnfusedExchange.*",
    "pairs without a row have gradients of scores": "UnfusedExchange.*",
}


def mutate(tree, scratch, file, old, new):
    """A tree of links in which one file is a changed copy."""
    copy = scratch / "tree"
    shutil.copytree(tree, copy, symlinks=True)
    path = copy / file
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        sys.exit(f"{file} has {text.count(old)} times: {old}")
    path.unlink()
    path.write_text(text.replace(old, new), encoding="utf-8")
    return copy


def outcome(args, mutant):
    """What the test says of a mutant, and whether that is what it should say, and the seconds that it took."""
    start = time.monotonic()
    name, file, old, new, notice, *noticed_by = mutant
    kernels = noticed_by[0] if noticed_by else file
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        tree = mutate(pathlib.Path(args.tree), scratch, file, old, new)
        here = pathlib.Path(__file__).parent
        root = here.parent.parent
        program = scratch / "test"
        source, tests = next(how for place, how in COMPILED.items()
                             if kernels == place or place.endswith("/") and kernels.startswith(place))
        if args.quick:
            tests = QUICK[name]
        elif named := re.search(r"\b[A-Z]\w+\.[A-Z]\w+", notice):
            tests = f"*{named[0]}*"
        objects = [o for o in args.objects.split(",") if source not in o]
        subprocess.run([args.compiler, "-std=c++20", "-O1", "-w", "-Wno-psabi", "-fno-strict-aliasing",
                        *(f"-I{path}" for path in (tree, here / "include", root, root / "src", root / "include")),
                        "-x", "c++", str((tree if source.endswith(".cu") else here) / source), "-x", "none",
                        *objects, *args.libraries.split(","), "-lpthread", "-o", str(program)], check=True)
        try:
            run = subprocess.run([str(program), f"--gtest_filter={tests}"], capture_output=True, text=True,
                                 timeout=LIMIT_S, check=False, env={**os.environ, "GTEST_FAIL_FAST": "1"})
        except subprocess.TimeoutExpired:
            return name, False, f"had not ended after {LIMIT_S} s\n", time.monotonic() - start
        return name, run.returncode == 1 and notice in run.stdout, run.stdout, time.monotonic() - start


def main():
    parser = argparse.ArgumentParser()
    for flag in ("--compiler", "--tree", "--objects", "--libraries"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--quick", action="store_true", help="one of every kind")
    args = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if not args.quick or mutant[0] in QUICK]
    if args.quick and len(mutants) != len(QUICK):
        sys.exit("a mutant of --quick is not there")
    missed = 0
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for name, noticed, says, seconds in pool.map(lambda mutant: outcome(args, mutant), mutants):
            print(f"{'noticed ' if noticed else 'MISSED  '} {seconds:4.0f} s  {name}", flush=True)
            if not noticed:
                missed += 1
                print(says[-3000:])
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

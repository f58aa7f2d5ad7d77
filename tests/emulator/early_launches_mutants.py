# SPDX-License-Identifier: Apache-2.0
"""Mutants of launches that start early and do not wait, which mutants_test.py has beside its own."""

EARLY = "early_launches_test.cpp"  # the key of mutants_test.COMPILED
WAIT = "  arch::wait_for_previous_kernel();\n"

MUTANTS = [
    ("tokens that share warps are routed before they have logits", "cuda/kernels/route.cuh",
     "  }\n" + WAIT, "  }\n", "EarlyLaunches.OfManyTokens", EARLY),
    ("a token of a warp is routed before it has logits", "cuda/kernels/route.cuh",
     "// metadata\n" + WAIT, "// metadata\n", "EarlyLaunches.OfManyExperts", EARLY),
    ("slots are ranked before they are chosen", "cuda/kernels/metadata.cuh",
     "// metadata_scatter\n" + WAIT, "// metadata_scatter\n", "EarlyLaunches.OfSlotsThatMetadataRanks", EARLY),
    ("rows are given out before slots are ranked", "cuda/kernels/metadata.cuh",
     "// up_projection_fwd, which waits\n" + WAIT, "", "EarlyLaunches.OfManyTokens", EARLY),
    ("rows are given out before slots are chosen", "cuda/kernels/metadata.cuh",
     "which wait\n" + WAIT, "which wait\n", "EarlyLaunches.OfFewTokens", EARLY),
    ("experts begin before they have rows", "cuda/kernels/up_projection_fwd.cuh",
     "  " + WAIT, "", "EarlyLaunches.OfManyTokens", EARLY),
    ("rows of dx are made before those of dh", "cuda/kernels/up_projection_dgrad.cuh",
     "if (p.waits_first) arch::wait_for_previous_kernel();", "", "UpProjectionDgrad.RunsThroughBothHalves"),
    ("sums begin before they have rows", "cuda/kernels/aggregate.cuh",
     WAIT + "  auto const parts", "  auto const parts", "Aggregate.RowsOfTheKernelAhead"),
    ("sums of a ring begin before they have rows", "cuda/kernels/aggregate.cuh",
     WAIT + "  aggregate_in_ring", "  aggregate_in_ring", "Aggregate.RowsOfTheKernelAhead"),
    ("pairs are ranked before they have members", "cuda/kernels/rank_pairs.cuh",
     WAIT, "", "EarlyLaunches.OfRanksBehindTheChoice", EARLY),
    ("pairs are ranked before they have logits", "cuda/kernels/route_and_rank.cuh",
     WAIT, "", "EarlyLaunches.OfRanksBesideTheChoice", EARLY),
]

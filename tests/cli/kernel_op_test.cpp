// SPDX-License-Identifier: Apache-2.0
// Names of kernels as a C++ demangler writes them.
#include "cli/kernel_op.hpp"

#include <gtest/gtest.h>

#include <string>

namespace tessera::cli {
namespace {

TEST(KernelOp, OfFastKernels) {
  EXPECT_EQ(op_of_kernel("void tessera::cuda::aggregate_beside<tessera::cuda::AggregateEightSlots, "
                         "__nv_bfloat16>(tessera::cuda::AggregateBesideArguments)"),
            "aggregate");
  EXPECT_EQ(op_of_kernel("tessera::cuda::metadata_rank(tessera::cuda::MetadataArguments)"),
            "metadata");
  EXPECT_EQ(op_of_kernel("void tessera::cuda::projection_wgrad<C>(P)"), "projection_wgrad");
}

// Replayed without its first kernel, choose_tokens would count on from the replay before, and write beyond its arrays.
TEST(KernelOp, OfEveryKernelOfChooseTokens) {
  for (char const* const kernel :
       {"route_and_rank<tessera::cuda::RouteAndRankConfig, 4, 32>",
        "rank_pairs<tessera::cuda::RankPairsConfig>", "mask_ranks<tessera::cuda::RankPairsConfig>",
        "choose_tokens_keep<tessera::cuda::ChooseTokensConfig>",
        "choose_tokens_emit<tessera::cuda::ChooseTokensConfig>"}) {
    EXPECT_EQ(op_of_kernel(std::string("void tessera::cuda::") + kernel +
                           "(tessera::cuda::ChooseTokensArguments)"),
              "choose_tokens");
  }
}

TEST(KernelOp, OfPlainTwins) {
  EXPECT_EQ(op_of_kernel("void tessera::cuda::(anonymous namespace)::up_projection_fwd_plain<"
                         "(tessera::ActivationKind)0, __nv_bfloat16>(tessera::cuda::Arguments)"),
            "up_projection_fwd");
  EXPECT_EQ(op_of_kernel("tessera::cuda::(anonymous namespace)::metadata_plain_scan("
                         "tessera::cuda::MetadataArguments)"),
            "metadata");
  EXPECT_EQ(op_of_kernel("void tessera::cuda::(anonymous namespace)::wgrad_plain<float>(A)"),
            "wgrad");
}

}  // namespace
}  // namespace tessera::cli

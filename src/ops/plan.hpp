// SPDX-License-Identifier: Apache-2.0
// The workspace of every pass: which arrays it holds and how large they are. Queries and calls build the same
// plan.
#pragma once

#include "core/token_rounding.hpp"
#include "core/workspace.hpp"
#include "tessera/context.hpp"
#include "tessera/moe.hpp"

namespace tessera::ops {

/// Logits -> ids, weights; ids -> tables.
struct RoutePlan {
  core::Region<float> logits;               ///< [T,E]
  core::Region<std::int32_t> chunk_counts;  ///< of metadata()
  core::Region<std::uint32_t> ranks;        ///< [E,T], where experts take tokens
  core::Region<core::ExpertPairs> pairs;    ///< [E], where experts take tokens
};

struct ForwardPlan {
  RoutePlan route;
  core::Region<std::byte>
      routing;            ///< the tables, where the caller saves none (route: where it needs them)
  core::StorageRegion a;  ///< [P,n]; absent where operands are quantised
  core::StorageRegion y;  ///< [P,d], or a chunk of its columns
  core::Region<float> expert;  ///< where operands are quantised: one expert's weights
  core::Region<float> scratch;
  std::int64_t floats_per_thread = 0;
  std::size_t bytes = 0;
};

struct BackwardPlan {
  core::StorageRegion dh;  ///< [P,w*n], in the place of h recomputed; absent: the caller's, or h
  core::StorageRegion
      a_or_dx;  ///< a_scaled [P,n], then dx rows [P,d or a chunk], then x^ [T,d]: never alive at once
  core::Region<float> expert;   ///< where operands are quantised: one expert's weights
  core::Region<float> dscores;  ///< [P], with a router
  core::Region<float> dlogits;  ///< [T,E], with a router
  core::Region<float> scratch;
  std::int64_t floats_per_thread = 0;
  std::size_t bytes = 0;
};

ForwardPlan plan_forward(Context const& context, MoeDesc const& desc) noexcept;
ForwardPlan plan_route(Context const& context, MoeDesc const& desc) noexcept;
/// pass: backward, backward_input or backward_weights.
BackwardPlan plan_backward(Context const& context, MoeDesc const& desc, Pass pass) noexcept;

}  // namespace tessera::ops

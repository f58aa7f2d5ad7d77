// SPDX-License-Identifier: Apache-2.0
// Groups of the group-limited router: how many, and how many a token keeps.
#pragma once

#include <cstdint>

#include "tessera/shape.hpp"

namespace tessera::core {

struct RouterGroups {
  std::int64_t groups = 1;
  std::int64_t top_groups = 1;
};

/// Returns what desc.router asks for; a 0 there is replaced: groups by the largest divisor of E up to 8 that leaves at
/// least 2 experts per group (else 1), top_groups by the least number >= groups/2 whose experts hold K.
inline RouterGroups router_groups(MoeDesc const& desc) noexcept {
  std::int64_t const experts = desc.shape.experts;
  RouterGroups out{desc.router.groups, desc.router.top_groups};
  if (out.groups == 0) {
    out.groups = 1;
    for (std::int64_t divisor = 2; divisor <= 8; ++divisor) {
      if (experts % divisor == 0 && experts / divisor >= 2) out.groups = divisor;
    }
  }
  if (out.top_groups == 0) {
    out.top_groups = (out.groups + 1) / 2;
    while (out.top_groups < out.groups &&
           out.top_groups * (experts / out.groups) < desc.shape.top_k) {
      ++out.top_groups;
    }
  }
  return out;
}

}  // namespace tessera::core

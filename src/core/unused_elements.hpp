// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/router_math.hpp"
#include "tessera/routing.hpp"
#include "tessera/shape.hpp"

namespace tessera::core {

/// Returns the elements of a routing buffer that belong to no table: up to three ahead of saved logits, which begin at
/// 16 bytes. Whoever makes the tables writes 0 there, so that equal calls leave equal bytes.
inline std::span<std::int32_t> unused_elements(MoeDesc const& desc,
                                               RoutingView const& tables) noexcept {
  if (tables.logits == nullptr) return {};
  // The table ahead of them: chosen_p, which would stand between, is saved only where logits are not.
  assert(!saves_chosen_p(desc));
  std::int32_t* const first = tables.topk_ids + desc.num_slots();
  auto* const last = reinterpret_cast<std::int32_t*>(tables.logits);
  return {first, static_cast<std::size_t>(last - first)};
}

}  // namespace tessera::core

// SPDX-License-Identifier: Apache-2.0
// Auxiliary losses of a router's logits.
#pragma once

#include <cstdint>

#include "cpu/parallel/layer.hpp"

namespace tessera::cpu {

/// What router_loss reads and writes.
struct RouterLoss {
  ConstRows logits;             ///< [T,E]
  float const* cost = nullptr;  ///< [E]: C_e = balance E f_e / (S sum f)
  float z = 0;                  ///< z / S
  float d_loss = 1;
  /// [2, router_loss_blocks]: load balancing and z of each block of tokens
  float* partial_losses = nullptr;
  MutableRows dlogits = {};  ///< [T,E]; null data: not wanted
};

/// Needs router_loss_scratch floats per thread.
void router_loss(MoeDesc const& desc, RouterLoss const& args, Threads const& threads) noexcept;
std::int64_t router_loss_blocks(std::int64_t tokens) noexcept;
std::int64_t router_loss_scratch(MoeDesc const& desc) noexcept;

}  // namespace tessera::cpu

// SPDX-License-Identifier: Apache-2.0
// Auxiliary losses of a router's logits.
#pragma once

#include <cstdint>

#include "cpu/parallel/layer.hpp"

namespace tessera::cpu {

/// Holds what router_loss reads and writes.
struct RouterLoss {
  ConstRows logits;             ///< [T,E]
  float const* cost = nullptr;  ///< [E]: C_e = balance E f_e / (S sum f)
  std::int32_t const* order =
      nullptr;            ///< [T]: `real` real tokens, then padding; null: all tokens are real
  std::int64_t real = 0;  ///< T without a mask
  float const* sequence_cost = nullptr;       ///< [B,E] C_be, or null
  std::int32_t const* sequence_of = nullptr;  ///< [T], with it: the sequence of a token
  float z = 0;                                ///< z / S
  float d_loss = 1;
  /// [3, router_loss_blocks]: load balancing, z and sequences, of each block of tokens
  float* partial_losses = nullptr;
  MutableRows dlogits = {};  ///< [T,E]; null data: not wanted
};

/// Needs router_loss_scratch floats per thread.
void router_loss(MoeDesc const& desc, RouterLoss const& args, Threads const& threads) noexcept;
std::int64_t router_loss_blocks(std::int64_t tokens) noexcept;
std::int64_t router_loss_scratch(MoeDesc const& desc) noexcept;

}  // namespace tessera::cpu

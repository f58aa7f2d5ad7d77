// SPDX-License-Identifier: Apache-2.0
// The windows of a pass: this rank's, and that of any rank.
#pragma once

#include "expert_parallel/exchange/exchange.hpp"
#include "expert_parallel/transport/peer.cuh"

namespace tessera::expert_parallel {

__device__ inline OwnWindow own_window(ExchangeArguments const& p) {
  return OwnWindow(p.windows, p.rank);
}
template <class Rank>
__device__ Peer peer_of(ExchangeArguments const& p, Rank rank) {
  return Peer(p.windows, rank);
}

}  // namespace tessera::expert_parallel

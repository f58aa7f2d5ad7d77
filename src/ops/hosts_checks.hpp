// SPDX-License-Identifier: Apache-2.0
// These checks say what calls of experts over several hosts (tessera/hosts.hpp) may ask for, before a message goes
// to another rank, which would wait for the next one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/hosts.hpp"

namespace tessera::ops {

inline std::int64_t rows_of_step(HostsDesc const& d) noexcept {
  return d.max_rows != 0 ? d.max_rows
                         : std::int64_t{d.within.ranks} * d.within.max_tokens * d.within.top_k;
}
inline std::int64_t up_rows(HostsDesc const& d) noexcept {
  return (d.within.activation.gated() ? 2 : 1) * d.within.intermediate;
}
inline std::int64_t experts_of_rank(HostsDesc const& d) noexcept {
  return d.within.experts / d.within.ranks;
}

/// Checks a description: error invalid_argument.
Status check_hosts(HostsDesc const& d) noexcept;

/// Says of a pass that was checked how many tokens it has, and where its saved memory begins; null: it saves nothing.
struct CheckedPass {
  std::int64_t tokens;
  std::byte* saved;
};

/// Check a pass of a valid description whose tensors lie on `device`: shapes, types, addresses, overlap, and the memory
/// that is saved. Errors: invalid_argument; unsupported: biases with another activation than clamped_swiglu.
Expected<CheckedPass> check_hosts_forward(HostsDesc const& d, Device device,
                                          HostsForwardArgs const& args) noexcept;
Expected<CheckedPass> check_hosts_backward(HostsDesc const& d, Device device,
                                           HostsBackwardArgs const& args) noexcept;

}  // namespace tessera::ops

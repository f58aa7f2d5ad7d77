// SPDX-License-Identifier: Apache-2.0
// A kernel leaves this behind when a wait for a peer has lasted too long: who waited where, for what.
#pragma once

#include <cstdint>

#include "expert_parallel/plan/protocol.hpp"
#include "tessera/status.hpp"

namespace tessera::expert_parallel {

/// In host memory that the device writes. Only the first fault of a rank is kept.
struct Fault {
  std::uint32_t raised;   ///< 0: none; written last
  std::uint32_t claimed;  ///< 0 until a thread writes its own
  Site site;
  std::int32_t rank, cta;
  std::int32_t peer;  ///< whose word it is; -1: of this GPU
  std::uint32_t epoch, expected, seen;
  std::uint32_t aborted_by;  ///< a rank + 1 that gave up first, 0: none
};

/// Returns ok, or device_error with the fault in one line. A kernel may be writing the fault meanwhile.
inline Status fault_status(Fault const& fault, double limit_seconds) noexcept {
  if (__atomic_load_n(&fault.raised, __ATOMIC_ACQUIRE) == 0) return {};
  if (fault.aborted_by != 0) {
    return Status::error(StatusCode::device_error,
                         "rank %d left pass %u at %s: rank %u had given up; rebuild the group",
                         fault.rank, fault.epoch, site_name(fault.site), fault.aborted_by - 1);
  }
  if (fault.site == Site::rows) {
    return Status::error(StatusCode::device_error,
                         "rank %d has %u rows in pass %u, and memory for %u: rebuild the group, "
                         "with more",
                         fault.rank, fault.seen, fault.epoch, fault.expected);
  }
  return Status::error(
      StatusCode::device_error,
      "rank %d waited %.3g s at %s in pass %u (CTA %d): the word of rank %d is %u, "
      "expected %u; a rank has died or launched other passes: rebuild the group",
      fault.rank, limit_seconds, site_name(fault.site), fault.epoch, fault.cta,
      fault.peer < 0 ? fault.rank : fault.peer, fault.seen, fault.expected);
}

}  // namespace tessera::expert_parallel

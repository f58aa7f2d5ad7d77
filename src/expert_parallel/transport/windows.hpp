// SPDX-License-Identifier: Apache-2.0
// The windows of all ranks as the GPU of one of them addresses them: a value among the parameters of kernels, which
// reach what lies in a window through Peer and OwnWindow (peer.cuh) alone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "tessera/expert_parallel.hpp"

namespace tessera::expert_parallel {

class Windows {
 public:
  Windows() = default;
  /// [rank], null for ranks that there are not. Memory: void or char.
  template <class Memory>
  explicit Windows(std::array<Memory*, kMaxRanks> const& addresses) {
    for (std::size_t r = 0; r < addresses.size(); ++r) {
      windows_[r] = static_cast<char*>(addresses[r]);
    }
  }

 private:
  friend class Peer;
  friend class OwnWindow;
  char* windows_[kMaxRanks] = {};
};

/// True if the window of each rank has an address on the GPUs of all others. It has while a group is of one host; what
/// hands out windows refuses any other group: Engine and ProcessWindows where a GPU does not reach another one,
/// adopt_window where an address is null.
inline constexpr bool kAllAddressed = true;

/// A kernel does one of these for a rank whose window has no address here. Neither way is built.
enum class OtherWay {
  kSent,   ///< Who cannot load a row is sent it: its source puts it into the reader's window.
  kStaged  ///< What would be stored there is staged in the own window, then put.
};
/// True if a kernel may ask for an address. Where windows have none, the compiler stops here and says what is missing.
consteval bool has_way(OtherWay way, bool all_addressed = kAllAddressed) {
  if (all_addressed) return true;
  switch (way) {
    case OtherWay::kSent:
      throw "a rank without an address here: its rows have to be sent to this rank's window";
    case OtherWay::kStaged:
      throw "a rank without an address here: stage what goes there in the own window, then put it";
  }
  return false;
}

}  // namespace tessera::expert_parallel

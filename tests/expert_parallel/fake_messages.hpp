// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "expert_parallel/transport/nccl_library.hpp"

namespace tessera::expert_parallel {

/// Ends a communicator for messages; false if it is none.
bool leave_messages(NcclComm comm, bool aborts);

}  // namespace tessera::expert_parallel

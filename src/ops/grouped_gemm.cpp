// SPDX-License-Identifier: Apache-2.0
#include "tessera/grouped_gemm.hpp"

namespace tessera {

Status grouped_gemm(Context const&, GroupedGemmArgs const&, Stream) noexcept {
  return Status::unsupported(
      "grouped_gemm: this version serves whole layers only; use moe_forward and moe_backward");
}

}  // namespace tessera

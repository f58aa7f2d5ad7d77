// SPDX-License-Identifier: Apache-2.0
// The implementation that serves a call, and why the others do not.
#pragma once

#include <string>
#include <vector>

#include "tessera/context.hpp"
#include "tessera/export.hpp"
#include "tessera/moe.hpp"
#include "tessera/shape.hpp"
#include "tessera/status.hpp"

namespace tessera {

/// A way to run layers: "cpu", "cuda".
struct BackendInfo {
  char const* name = "";
  bool built = false;      ///< part of this build
  bool available = false;  ///< usable on this machine
  std::string detail;      ///< devices and instruction sets, or why it is not available
};

/// All backends Tessera knows, built or not.
TESSERA_EXPORT Expected<std::vector<BackendInfo>> backends() noexcept;

/// One implementation that was considered for an op.
struct Candidate {
  std::string name;  ///< e.g. "cpu/parallel"
  bool chosen = false;
  std::string reason;  ///< why it was refused, or what it does: tiles, threads, instruction set
};

struct OpExplanation {
  std::string op;                                   ///< e.g. "up_projection_fwd"
  std::int64_t gemm_m = 0, gemm_n = 0, gemm_k = 0;  ///< per expert at mean load; 0 if not a GEMM
  double flops = 0;
  double bytes = 0;  ///< each array moved once
  std::vector<Candidate> candidates;
};

/// Returns what a call with this description would run, op by op. Errors: those of workspace_bytes().
TESSERA_EXPORT Expected<std::vector<OpExplanation>> explain(Context const& context,
                                                            MoeDesc const& desc,
                                                            Pass pass) noexcept;

}  // namespace tessera

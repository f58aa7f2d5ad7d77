// SPDX-License-Identifier: Apache-2.0
// The library's results for a case, by way of its public API and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/context.hpp"
#include "verify/memory.hpp"
#include "verify/tensors.hpp"

namespace tessera::verify {

/// Holds what one run of all entry points leaves.
struct CandidateResult {
  Tensors tensors;
  reference::Metadata metadata;  ///< token_offsets only where experts per token vary
  RouterChoice choice;           ///< with a router
  std::vector<float>
      h;  ///< rows 0..R-1; where operands are quantised: every saved byte, and the scales of h
  std::vector<std::string> failures;  ///< broken rules that show without a reference
  std::size_t saved_bytes = 0;        ///< allocated and kept from forward to backward
  std::size_t transient_bytes = 0;    ///< largest workspace
};

/// Forward for training and for inference; backward, split backward, backward without every other gradient; on a GPU
/// forward and backward by graph replay.
/// Between forward and backward all but x, h and the routing tables is filled with NaN and freed; weights
/// move to other addresses. Errors: those of the library.
Expected<CandidateResult> run_candidate(Context const& context, LayerData const& data,
                                        std::uint32_t poison, Alignment alignment);

/// Names of the parts in which two results differ by a bit; empty where they are equal.
std::string differing_parts(CandidateResult const& a, CandidateResult const& b);

}  // namespace tessera::verify

// SPDX-License-Identifier: Apache-2.0
// One case against the reference: results, metadata, saved bytes, repeatability.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cpu/reference/token_rounding.hpp"
#include "tessera/context.hpp"
#include "verify/candidate.hpp"
#include "verify/tolerance.hpp"

namespace tessera::verify {

struct CaseResult {
  bool ok = false;
  MoeDesc desc;
  std::int64_t routed_rows = 0;  ///< R
  Comparisons tensors;
  Tensors outputs;                      ///< what was judged
  std::size_t saved_bytes = 0;          ///< allocated between forward and backward
  std::size_t saved_bytes_formula = 0;  ///< what the shape says
  std::size_t transient_peak_bytes = 0;
  bool bitwise_repeat = false;  ///< other thread count, other poison, same bits
  /// With MoeDesc::quantises(), by tensor: 20 log10(|ref| / |ref - out|) in dB, of the result and of the recipe.
  std::map<std::string, double> sqnr_db, recipe_sqnr_db;
  std::vector<std::string> failures;  ///< a line each; empty where ok
};

/// Runs the case on `context`, repeats it on `repeat_context` and judges both. Errors: those of the library,
/// before or during the run (an unsupported case, say); invalid_argument for contradictory data options.
/// With MoeDesc::quantises() the recipe in fp64 takes the place of the naive path (verify/low_precision.hpp).
Expected<CaseResult> verify_case(Context const& context, Context const& repeat_context,
                                 LayerCase const& layer_case);

/// Judges one run of `data` by the reference: adds failures, the tensors' errors and R to `result`. The logits of
/// padding in `run`, which mean nothing, become the reference's.
void judge_run(Context const& context, LayerData const& data, CandidateResult& run,
               CaseResult& result);

/// Padding that has an expert, or is not 0 in o, dx, dscores or dlogits.
std::vector<std::string> padding_failures(LayerData const& data, CandidateResult const& run);

/// b*T*d + b*w*P*n (SavePolicy::h; with MoeDesc::quantises() 33/32 for b, P of the scales of h in fp8 rounded up to 4)
/// + 16P + 4(E+1) [+ 4(T+1) experts per token vary] [+ 4P ids of a router]
/// [+ 4TE softmax_topk, expert_choice and token rounding; else + 4P where its p is of one expert alone]
/// [+ 4TK token rounding].
std::size_t saved_bytes_formula(MoeDesc const& desc);

/// Broken invariants of routing tables, compared exactly with the reference's.
std::vector<std::string> metadata_failures(reference::Metadata const& ref,
                                           reference::Metadata const& out);

/// Lists where token rounding or expert choice kept something else than its rules say, given the scores of all pairs.
std::vector<std::string> slot_failures(MoeDesc const& desc, reference::PairScores const& pairs,
                                       RouterChoice const& choice);

/// Lists where a router's choice is not the reference's, up to swaps of keys that differ by rounding only. Tokens where
/// `token_mask` is 0 are left out.
std::vector<std::string> selection_failures(MoeDesc const& desc, std::vector<double> const& keys,
                                            std::vector<std::int64_t> const& topk_ids,
                                            std::vector<std::uint8_t> const& token_mask = {});

}  // namespace tessera::verify

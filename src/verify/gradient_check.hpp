// SPDX-License-Identifier: Apache-2.0
// Gradients of a layer too large for the reference: those of a few tokens, of one hidden unit and of one expert's row
// of w_router, in fp64 from the formulas of token_check.hpp and from what forward left (h, choice, scores), which is
// judged there.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "verify/token_check.hpp"

namespace tessera::verify {

/// Holds what backward made of the token of a TokenResult.
struct TokenGradients {
  std::vector<float> dx;       ///< [d]
  std::vector<float> dscores;  ///< [K]
  std::vector<float> dlogits;  ///< [E] with a router, else empty
};

/// Returns what is wrong with them, or "": dscores against the size of the products that they add up, dlogits (from
/// dscores as they are) within 2^-9 by norm, dx within 2^-7.
std::string token_gradient_failure(Context const& host, UniformLayer const& layer,
                                   TokenResult const& forward, TokenGradients const& gradients);

/// Weight gradients of hidden unit i of one expert, and what they are sums over: the expert's rows.
struct UnitGradients {
  std::int64_t expert = 0, i = 0;
  std::vector<std::int64_t> tokens;            ///< [M_e]
  std::vector<float> scores, h_gate, h_up;     ///< [M_e]; h_gate is empty where not gated
  std::vector<float> dw_gate, dw_up, dw_down;  ///< [d] each
};
/// Returns what is wrong with them, or "": each within 2^-7 by norm.
std::string unit_gradient_failure(Context const& host, UniformLayer const& layer,
                                  UnitGradients const& gradients);

/// dw_router and db_router of one expert from its dlogits.
struct RouterRow {
  std::int64_t expert = 0;
  std::vector<float> dlogits;      ///< [T]
  std::vector<float> dw_router;    ///< [d]
  std::optional<float> db_router;  ///< where the router has a bias
};
std::string router_row_failure(Context const& host, UniformLayer const& layer,
                               RouterRow const& row);

}  // namespace tessera::verify

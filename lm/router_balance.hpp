// SPDX-License-Identifier: Apache-2.0
// Load balancing of a router's choices (the loss of Switch Transformers), p = softmax(l) over all E experts,
// f_e the rows of expert e, constants here, S = sum f_e:
//   L = alpha * E * sum_e (f_e / S) (1/T) sum_t p_te             alpha where all experts are used alike
//   dl_te = p_te (C_e - sum_j C_j p_tj),  C_e = alpha * E * f_e / (T S)
#pragma once

#include <cstdint>
#include <span>

#include "tessera/context.hpp"

namespace tessera::lm {

double balance_loss(double alpha, std::int64_t experts, std::span<float const> logits,
                    std::span<std::int32_t const> counts);

/// Turns logits [T,E] into dl.
void balance_loss_bwd(Context const& context, double alpha, std::int64_t experts,
                      std::span<float> logits, std::span<std::int32_t const> counts);

}  // namespace tessera::lm

// SPDX-License-Identifier: Apache-2.0
// Keeping the experts in use: auxiliary losses of a router's logits, the update of its selection bias, and
// statistics of the load.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "tessera/context.hpp"
#include "tessera/export.hpp"
#include "tessera/shape.hpp"
#include "tessera/status.hpp"
#include "tessera/tensor.hpp"

namespace tessera {

/// Three losses of the logits l [T,E] that moe_forward wrote, and their gradient:
///
///     load balancing  balance * E * sum_e (f_e / sum f) * (1/S) sum_t p_te    = balance where the load is balanced
///     z-loss          z * (1/S) * sum_t logsumexp_e(l_te)^2
///     of sequences    sequence_balance * the mean over sequences b of E * sum_e (f_be / sum_e f_be) *
///                     (1/T_b) sum_{t in b} p_te, f_be the tokens of b whose topk_ids hold e (DeepSeek-V3)
///
/// p = softmax(l), or p_e / (sum p + 1e-20) for routers whose p belongs to one expert; f are constants. S is
/// scope_tokens. For a loss over many micro-batches or ranks give the sums of f and tokens over all of them; each adds
/// its own tokens' terms. Hugging Face's load-balancing loss is top_k times larger.
struct RouterLossArgs {
  ConstTensor logits = {};  ///< [T,E] fp32
  /// [E] int32, int64 or fp32 (means, shares): f; needed unless balance is 0. They may be given then, too, are checked
  /// and change no bit: a schedule may set the coefficient to 0 in some steps.
  ConstTensor topk_counts = {};
  std::int64_t scope_tokens = 0;  ///< S; 0: T, without padding
  float balance = 0;
  float z = 0;
  float d_loss = 1;       ///< gradient of the whole loss with respect to these two
  Tensor losses = {};     ///< optional [2] fp32: load balancing, z
  Tensor dlogits = {};    ///< optional [T,E] fp32: what MoeBackwardArgs::aux_dlogits takes
  Buffer workspace = {};  ///< router_loss_workspace_bytes()

  /// Optional [T] uint8: tokens of 0 are padding. They have no loss, dlogits of 0, no place in a sequence's f or T_b,
  /// and their logits may be anything; all else has the bits of the call without these rows.
  ConstTensor token_mask = {};
  float sequence_balance = 0;
  ConstTensor topk_ids =
      {};  ///< [T,K] int32 or int64, with sequence_balance; ids outside [0,E) count for none
  ConstTensor sequence_offsets =
      {};  ///< [B+1] int32 or int64, the same: first token of each sequence, T at last
  Tensor sequence_loss =
      {};  ///< optional [1] fp32; 0 without sequences that have tokens, which the mean leaves out
};

/// Bytes of workspace of router_loss, from desc's shape, the context's threads and B, 0 without sequence_balance.
TESSERA_EXPORT Expected<std::size_t> router_loss_workspace_bytes(
    Context const& context, MoeDesc const& desc, std::int64_t sequences = 0) noexcept;

/// Computes the losses and their gradient in fp32, with sums of fixed order, on CPU and GPU with the same bits. Both
/// are 0 for T = 0. Of `desc` it reads tokens, experts and the router's kind. Errors: invalid_argument for tensors that
/// do not fit, router given, coefficients that are not finite, or a count that is negative or not finite. On a GPU one
/// such count makes all counts read as 0, sequence_offsets that decrease or leave [0,T] are clamped, and
/// check_device_values() reports it.
TESSERA_EXPORT Status router_loss(Context const& context, MoeDesc const& desc,
                                  RouterLossArgs const& args, Stream stream = {}) noexcept;

/// Balancing without a loss, once per optimizer step: bias_e += rate * sign(mean(f) - f_e), sign(0) = 0.
struct SelectionBiasArgs {
  ConstTensor topk_counts = {};  ///< [E] int32, int64 or fp32: f, over all micro-batches and ranks
  Tensor selection_bias = {};    ///< [E] fp32, updated in place
  float rate = 1e-3f;
  bool subtract_mean = false;  ///< the mean of the updates, so that the biases' sum stays
};

/// Updates the bias; nothing changes where all counts are 0. Errors: invalid_argument for tensors that do not fit, a
/// rate that is not finite, or a count that is negative or not finite (on a GPU as above). sum f of fp32 counts
/// is an fp64 sum: counts that are equal are found equal to their mean.
TESSERA_EXPORT Status update_selection_bias(Context const& context, SelectionBiasArgs const& args,
                                            Stream stream = {}) noexcept;

/// Says how evenly rows spread over experts.
struct LoadStatistics {
  std::int64_t rows = 0;   ///< sum of M_e
  std::int64_t empty = 0;  ///< experts without rows
  std::int64_t most = 0, fewest = 0;
  double max_over_mean = 0;  ///< 1 when balanced, E when one expert has all; 0 without rows
  double coefficient_of_variation = 0;  ///< standard deviation over mean; 0 without rows
};

/// Statistics of M_e, any range of integers.
template <class Counts>
LoadStatistics load_statistics(Counts const& rows_per_expert) noexcept {
  LoadStatistics out;
  double squares = 0, experts = 0;
  for (auto const value : rows_per_expert) {
    auto const rows = static_cast<std::int64_t>(value);
    out.fewest = experts == 0 ? rows : std::min(out.fewest, rows);
    out.most = std::max(out.most, rows);
    out.rows += rows;
    out.empty += rows == 0 ? 1 : 0;
    squares += static_cast<double>(rows) * static_cast<double>(rows);
    experts += 1;
  }
  if (out.rows == 0) return out;
  double const mean = static_cast<double>(out.rows) / experts;
  out.max_over_mean = static_cast<double>(out.most) / mean;
  out.coefficient_of_variation = std::sqrt(std::max(0.0, squares / experts - mean * mean)) / mean;
  return out;
}

}  // namespace tessera

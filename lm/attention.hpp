// SPDX-License-Identifier: Apache-2.0
// Causal attention of each head, over queries and keys that are normalised and rotated already:
//   p_ij = softmax over j <= i of (q_i . k_j / sqrt(D))        o_i = sum_j p_ij v_j
//   dp_ij = do_i . v_j     ds_ij = p_ij (dp_ij - sum_j p_ij dp_ij) / sqrt(D)
//   dq_i = sum_j ds_ij k_j     dk_j = sum_i ds_ij q_i     dv_j = sum_i p_ij do_i
// Query head h reads key and value head h / (H/G); dk and dv sum over the H/G heads that share one.
#pragma once

#include <cstdint>
#include <vector>

#include "lm/linear.hpp"
#include "tessera/context.hpp"

namespace tessera::lm {

struct AttentionShape {
  std::int64_t batch, length;  ///< sequences, tokens of each
  std::int64_t heads, kv_heads, head_dim;

  [[nodiscard]] std::int64_t probabilities() const { return batch * heads * length * length; }
};

/// q [T,H*D], k and v [T,G*D], all with row strides; p [batch,H,length,length] is saved for backward
/// (only j <= i, and the zeros up to the end of a block of queries, are written); o [T,H*D].
void attention_fwd(Context const& context, AttentionShape const& shape, Matrix<float const> q,
                   Matrix<float const> k, Matrix<float const> v, float* p, Matrix<float> o);

struct AttentionGradients {
  Matrix<float> dq, dk, dv;
};

void attention_bwd(Context const& context, AttentionShape const& shape, Matrix<float const> q,
                   Matrix<float const> k, Matrix<float const> v, float const* p,
                   Matrix<float const> d_o, AttentionGradients const& gradients);

}  // namespace tessera::lm

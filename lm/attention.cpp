// SPDX-License-Identifier: Apache-2.0
// Queries go in blocks: a block multiplies only with the keys up to its last query, which spares most of
// the masked half.
#include "lm/attention.hpp"

#include <algorithm>
#include <cmath>

#include "lm/simd.hpp"

namespace tessera::lm {

namespace {

constexpr std::int64_t kQueryBlock = 32;

// The rows of sequence `batch` and the columns of head `head`.
template <class Element>
Matrix<Element> head_of(Matrix<Element> m, AttentionShape const& s, std::int64_t batch,
                        std::int64_t head) {
  m.data += batch * s.length * m.row_stride + head * s.head_dim;
  return m;
}

template <class Element>
Matrix<Element> from_row(Matrix<Element> m, std::int64_t row) {
  m.data += row * m.row_stride;
  return m;
}

// Softmax over the first `visible` values; zeros from there to `width`.
TESSERA_LM_SIMD void softmax_row(std::int64_t visible, std::int64_t width, float* p) {
  float largest = p[0];
  for (std::int64_t j = 1; j < visible; ++j) largest = p[j] > largest ? p[j] : largest;
  for (std::int64_t j = 0; j < visible; ++j) p[j] = exp_of_negative(p[j] - largest);
  float const inverse = 1 / lane_sum(visible, [&](std::int64_t j) { return p[j]; });
  for (std::int64_t j = 0; j < visible; ++j) p[j] *= inverse;
  std::fill(p + visible, p + width, 0.0f);
}

// dp becomes ds; masked entries have p = 0.
TESSERA_LM_SIMD void softmax_row_bwd(std::int64_t width, float scale, float const* p, float* dp) {
  float const dot = lane_sum(width, [&](std::int64_t j) { return p[j] * dp[j]; });
  for (std::int64_t j = 0; j < width; ++j) dp[j] = scale * p[j] * (dp[j] - dot);
}

// One block of queries of one head.
struct QueryBlock {
  std::int64_t first, count;
  std::int64_t keys;  // visible to its last query
};

template <class Body>
void for_query_blocks(std::int64_t length, Body const& body) {
  for (std::int64_t first = 0; first < length; first += kQueryBlock) {
    std::int64_t const count = std::min(kQueryBlock, length - first);
    body(QueryBlock{first, count, first + count});
  }
}

float score_scale(AttentionShape const& s) { return 1 / std::sqrt(static_cast<float>(s.head_dim)); }

}  // namespace

void attention_fwd(Context const& context, AttentionShape const& s, Matrix<float const> q,
                   Matrix<float const> k, Matrix<float const> v, float* p, Matrix<float> o) {
  std::int64_t const shared = s.heads / s.kv_heads;
  context.parallel_for(s.batch * s.heads, [&](std::int64_t task) {
    std::int64_t const batch = task / s.heads, head = task % s.heads;
    auto const q_head = head_of(q, s, batch, head);
    auto const k_head = head_of(k, s, batch, head / shared);
    auto const v_head = head_of(v, s, batch, head / shared);
    auto const o_head = head_of(o, s, batch, head);
    Matrix<float> const p_head{p + task * s.length * s.length, s.length};
    for_query_blocks(s.length, [&](QueryBlock block) {
      auto const p_block = from_row(p_head, block.first);
      gemm(block.count, block.keys, s.head_dim, score_scale(s), from_row(q_head, block.first),
           k_head.transposed(), 0, p_block);
      for (std::int64_t i = 0; i < block.count; ++i) {
        softmax_row(block.first + i + 1, block.keys, p_block.data + i * s.length);
      }
      gemm(block.count, s.head_dim, block.keys, 1, {p_block.data, s.length}, v_head, 0,
           from_row(o_head, block.first));
    });
  });
}

void attention_bwd(Context const& context, AttentionShape const& s, Matrix<float const> q,
                   Matrix<float const> k, Matrix<float const> v, float const* p,
                   Matrix<float const> d_o, AttentionGradients const& gradients) {
  std::int64_t const shared = s.heads / s.kv_heads;
  std::int64_t const tasks = s.batch * s.kv_heads;
  std::vector<float> scratch(static_cast<std::size_t>(tasks * kQueryBlock * s.length));
  context.parallel_for(tasks, [&](std::int64_t task) {
    std::int64_t const batch = task / s.kv_heads, kv_head = task % s.kv_heads;
    auto const k_head = head_of(k, s, batch, kv_head);
    auto const v_head = head_of(v, s, batch, kv_head);
    auto const dk = head_of(gradients.dk, s, batch, kv_head);
    auto const dv = head_of(gradients.dv, s, batch, kv_head);
    Matrix<float> const ds{scratch.data() + task * kQueryBlock * s.length, s.length};
    for (std::int64_t j = 0; j < s.length; ++j) {
      std::fill_n(dk.data + j * dk.row_stride, s.head_dim, 0.0f);
      std::fill_n(dv.data + j * dv.row_stride, s.head_dim, 0.0f);
    }
    for (std::int64_t head = kv_head * shared; head < (kv_head + 1) * shared; ++head) {
      auto const q_head = head_of(q, s, batch, head);
      auto const do_head = head_of(d_o, s, batch, head);
      auto const dq_head = head_of(gradients.dq, s, batch, head);
      Matrix<float const> const p_head{p + (batch * s.heads + head) * s.length * s.length,
                                       s.length};
      for_query_blocks(s.length, [&](QueryBlock block) {
        auto const q_block = from_row(q_head, block.first);
        auto const p_block = from_row(p_head, block.first);
        auto const do_block = from_row(do_head, block.first);
        gemm(block.count, block.keys, s.head_dim, 1, do_block, v_head.transposed(), 0, ds);
        for (std::int64_t i = 0; i < block.count; ++i) {
          softmax_row_bwd(block.keys, score_scale(s), p_block.data + i * s.length,
                          ds.data + i * s.length);
        }
        Matrix<float const> const ds_block{ds.data, s.length};
        gemm(block.count, s.head_dim, block.keys, 1, ds_block, k_head, 0,
             from_row(dq_head, block.first));
        gemm(block.keys, s.head_dim, block.count, 1, ds_block.transposed(), q_block, 1, dk);
        gemm(block.keys, s.head_dim, block.count, 1, p_block.transposed(), do_block, 1, dv);
      });
    }
  });
}

}  // namespace tessera::lm

// SPDX-License-Identifier: Apache-2.0
// o_t = sum over choices of s * slot, in the order of the choices, each awaited: the end of the fused kernel.
// The bits are those of aggregate (src/cuda/kernels).
#pragma once

#include "cuda/arch/load_global.cuh"
#include "dist/kernels/forward_pass.cuh"

namespace tessera::dist {

// Tokens of the CTA's slice, a warp each.
class SlotSums {
 public:
  __device__ explicit SlotSums(Pass const& pass)
      : pass_(pass), p_(pass.p.exchange), lane_(arch::lane_idx()) {}

  __device__ void run(int warp, int warps) {
    TokenSlice const slice =
        token_slice(p_.tokens, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    Choice ahead = choice(slice.begin + warp, slice.end);
    for (int token = slice.begin + warp; token < slice.end; token += warps) {
      Choice const own = ahead;
      ahead = choice(token + warps, slice.end);  // read a token before it is needed
      if (own.owner >= 0) {
        pass_.wait_epoch(p_.window.block_done_word(own.owner, own.block), Site::block_done,
                         own.owner);
      }
      __syncwarp();
      unsigned const choices = __ballot_sync(block::kAllLanes, own.owner >= 0);
      for (int first = 0; first < p_.shape.hidden; first += kBlocks * kBlockColumns) {
        add_up(token, first, choices, own.score);
      }
    }
  }

 private:
  static constexpr int kBlockColumns = 8 * arch::kWarpThreads;
  static constexpr int kBlocks = 2;  // of columns at a time
  static constexpr int kAtOnce = 8;  // choices whose loads are in flight

  // Of lane j: choice j of a token.
  struct Choice {
    int owner = -1;  // none
    std::uint32_t block = 0;
    float score = 0;
  };
  __device__ Choice choice(int token, int end) const {
    int const pair = token * p_.shape.max_top_k + lane_;
    if (token >= end || lane_ >= p_.shape.max_top_k) return {};
    int const id = p_.gmem_topk_ids[pair];
    Choice const own = {p_.shape.owner(id), *pair_word(p_, pair), pass_.p.gmem_scores[pair]};
    return is_expert(p_, id) ? own : Choice{};
  }

  __device__ void add_up(int token, int first, unsigned choices, float score) const {
    char const* const slots = p_.windows[p_.rank] + p_.window.slot(token, 0);
    std::int64_t const pitch = 2 * std::int64_t{p_.shape.hidden};
    float sum[kBlocks][8] = {};
    for (unsigned left = choices; left != 0;) {
      int choice[kAtOnce];
      uint4 bits[kBlocks][kAtOnce];
      TESSERA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        choice[i] = __ffs(static_cast<int>(left)) - 1;  // -1: no more
        left &= left - 1;
        TESSERA_UNROLL
        for (int b = 0; b < kBlocks; ++b) {
          int const column = first + b * kBlockColumns + 8 * lane_;
          bits[b][i] = arch::load_streaming_16(slots + choice[i] * pitch + 2 * column,
                                               choice[i] >= 0 && column < p_.shape.hidden);
        }
      }
      TESSERA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        if (choice[i] < 0) break;
        float const s = __shfl_sync(block::kAllLanes, score, choice[i]);
        TESSERA_UNROLL
        for (int b = 0; b < kBlocks; ++b) {
          std::uint32_t const pairs[4] = {bits[b][i].x, bits[b][i].y, bits[b][i].z, bits[b][i].w};
          TESSERA_UNROLL
          for (int pair = 0; pair < 4; ++pair) {
            float2 const value = arch::unpack_bf16(pairs[pair]);
            sum[b][2 * pair] = fmaf(s, value.x, sum[b][2 * pair]);
            sum[b][2 * pair + 1] = fmaf(s, value.y, sum[b][2 * pair + 1]);
          }
        }
      }
    }
    TESSERA_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      int const column = first + b * kBlockColumns + 8 * lane_;
      if (column >= p_.shape.hidden) break;
      *reinterpret_cast<uint4*>(pass_.p.gmem_o + std::int64_t{token} * p_.shape.hidden + column) = {
          arch::pack_bf16(sum[b][0], sum[b][1]), arch::pack_bf16(sum[b][2], sum[b][3]),
          arch::pack_bf16(sum[b][4], sum[b][5]), arch::pack_bf16(sum[b][6], sum[b][7])};
    }
  }

  Pass const& pass_;
  ExchangeArguments const& p_;
  int lane_;
};

}  // namespace tessera::dist

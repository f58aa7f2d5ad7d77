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
    // Loads in flight are what counts: the fewer choices a token has, the more columns at once.
    int const top_k = p_.shape.max_top_k;
    if (top_k <= 2) {
      add_tokens<8, 2>(warp, warps);
    } else if (top_k <= 4) {
      add_tokens<4, 4>(warp, warps);
    } else {
      add_tokens<2, 8>(warp, warps);
    }
  }

 private:
  static constexpr int kBlockColumns = 8 * arch::kWarpThreads;

  // Of lane g * max_top_k + j: choice j of the g-th token of a group.
  struct Choice {
    int owner = -1;  // none
    std::int32_t block = 0;
    float score = 0;
  };

  // Awaited at once: one round trip for all. Larger groups gain nothing, and tokens that are complete wait.
  __device__ int group_tokens() const { return min(arch::kWarpThreads / p_.shape.max_top_k, 4); }

  // A warp's tokens are `warps` apart.
  template <int kBlocks, int kAtOnce>
  __device__ void add_tokens(int warp, int warps) {
    TokenSlice const slice =
        token_slice(p_.tokens, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    int const top_k = p_.shape.max_top_k;
    int const group = group_tokens();
    Choice ahead = choice(slice.begin + warp, warps, slice.end);
    for (int first = slice.begin + warp; first < slice.end; first += group * warps) {
      Choice const own = ahead;
      ahead = choice(first + group * warps, warps, slice.end);  // read before they are needed
      if (own.owner >= 0) {
        pass_.wait_epoch(p_.window.block_done_word(own.owner, own.block), Site::block_done,
                         own.owner);
      }
      __syncwarp();
      unsigned const routed = __ballot_sync(block::kAllLanes, own.owner >= 0);
      for (int g = 0; g < group && first + g * warps < slice.end; ++g) {
        unsigned const choices = routed >> (g * top_k) & ((2u << (top_k - 1)) - 1);
        for (int column = 0; column < p_.shape.hidden; column += kBlocks * kBlockColumns) {
          add_up<kBlocks, kAtOnce>(first + g * warps, column, choices, own.score, g * top_k);
        }
      }
    }
  }

  // Of the group whose first token is `first`.
  __device__ Choice choice(int first, int warps, int end) const {
    int const top_k = p_.shape.max_top_k;
    int const token = first + lane_ / top_k * warps;
    if (token >= end || lane_ >= group_tokens() * top_k) return {};
    int const pair = token * top_k + lane_ % top_k;
    int const id = p_.gmem_topk_ids[pair];
    if (!is_expert(p_, id)) return {};
    auto const index = static_cast<std::int32_t>(*pair_word(p_, pair));
    return {p_.shape.owner(id), pass_.block_of(id, index), pass_.p.gmem_scores[pair]};
  }

  // kBlocks blocks of columns from `first` of a token, whose choices are those of the lanes from `lane` on; the loads
  // of kAtOnce choices are in flight.
  template <int kBlocks, int kAtOnce>
  __device__ void add_up(int token, int first, unsigned choices, float score, int lane) const {
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
        float const s = __shfl_sync(block::kAllLanes, score, lane + choice[i]);
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

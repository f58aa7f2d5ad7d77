// SPDX-License-Identifier: Apache-2.0
// The end of the fused kernel: o_t = sum over choices of s * slot, in the order of the choices, each awaited.
// The bits are those of aggregate (src/cuda/kernels). partial combine: where another rank has several of a token's
// choices, their sum stands in the slot of the first of them (partial_combine.cuh). A warp looks at two groups of
// tokens and takes those first whose results have all come.
//   piece   512 to 2048 columns of two to eight choices of a token: 8 KB
//   ring    two pieces of every warp, where the stages were: 128 KB of an SM in flight, by cp.async. Every lane reads
//           what it has asked for itself, so that nobody waits for anybody
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "cuda/arch/named_barrier.cuh"
#include "cuda/arch/tma.cuh"
#include "expert_parallel/exchange/weighted_sum.cuh"
#include "expert_parallel/fused/forward_pass.cuh"

namespace tessera::expert_parallel {

// Tokens of the CTA's slice, those of a warp kConsumerWarps apart.
template <Transfer kTransfer>
class SlotSums {
 public:
  static constexpr int kPieces = 2;  // three are no faster, one is slower by 0.5%
  static constexpr int kPieceBytes = 8192;
  static constexpr int kBytes = kConsumerWarps * kPieces * kPieceBytes;  // of the stages
  static_assert(kBytes + kConsumerWarps * sizeof(SumStorage) <=
                sizeof(gemm::SharedStorage<kPlain>::a) + sizeof(gemm::SharedStorage<kPlain>::b));

  __device__ SlotSums(Pass const& pass, int warp)
      : pass_(pass),
        p_(pass.p.exchange),
        warp_(warp),
        lane_(arch::lane_idx()),
        top_k_(p_.shape.max_top_k),
        slice_(token_slice(p_.tokens, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x))),
        ring_(reinterpret_cast<unsigned char*>(&pass.smem.gemm.a) + warp * kPieces * kPieceBytes +
              16 * lane_) {}

  // Call it when all consumer warps have ended their tasks.
  __device__ void run() {
    // The fewer choices a token has, the more columns at once.
    if (top_k_ <= 2) {
      add_tokens<8, 2>();
    } else if (top_k_ <= 4) {
      add_tokens<4, 4>();
    } else {
      add_tokens<2, 8>();
    }
  }

 private:
  static constexpr bool kPartialCombine = kTransfer == Transfer::partial_combine;
  static constexpr int kBlockColumns = 8 * arch::kWarpThreads;
  static constexpr int kBlockBytes = 2 * kBlockColumns;

  // Lane g * max_top_k + j has choice j of the g-th token of a group.
  struct Choice {
    int owner = -1;          // none
    std::int32_t block = 0;  // of its owner; of a sum ~token
    float score = 0;
  };
  struct Group {
    int first = 0;      // of its tokens, which are kConsumerWarps apart
    unsigned left = 0;  // bit g: its g-th token has not been taken
    Choice choice;
    bool there = true;  // the result of this lane's choice
  };
  struct Piece {
    int token = -1;  // none: there are no more
    int column = 0;
    unsigned choices = 0;
    bool first = false, last = false;  // of its columns
    float score = 0;                   // of lane score_lane + j: of choice j
    int score_lane = 0;
  };

  template <int kBlocks, int kAtOnce>
  __device__ void add_tokens() {
    static_assert(kBlocks * kAtOnce * kBlockBytes == kPieceBytes);
    column_ = p_.shape.hidden;
    own_ = group_at(slice_.begin + warp_);
    ahead_ = group_at(own_.first + group_tokens() * kConsumerWarps);
    Piece pieces[kPieces];  // the oldest first
    TESSERA_UNROLL
    for (int i = 0; i + 1 < kPieces; ++i) {
      pieces[i] = next<kBlocks, kAtOnce>();
      load<kBlocks, kAtOnce>(pieces[i], i);
    }
    float sum[kBlocks][8];
    for (int slot = 0;; slot = slot + 1 < kPieces ? slot + 1 : 0) {
      pieces[kPieces - 1] = next<kBlocks, kAtOnce>();
      load<kBlocks, kAtOnce>(pieces[kPieces - 1], slot > 0 ? slot - 1 : kPieces - 1);
      if (pieces[0].token < 0) return;
      arch::cp_async_wait<kPieces - 1>();
      add<kBlocks, kAtOnce>(pieces[0], slot, sum);
      TESSERA_UNROLL
      for (int i = 0; i + 1 < kPieces; ++i) pieces[i] = pieces[i + 1];
    }
  }

  // One look for all of them. Groups of four are 0.2 to 0.3% slower at FlashDMoE, T 8192.
  __device__ int group_tokens() const { return min(p_.by_top_k.quotient(arch::kWarpThreads), 8); }

  // Returns which token of its group this lane's choice is of.
  __device__ int turn_of_lane() const { return p_.by_top_k.quotient(lane_); }

  __device__ Group group_at(int first) const {
    int const tokens = (slice_.end - first + kConsumerWarps - 1) / kConsumerWarps;
    int const count = max(min(tokens, group_tokens()), 0);
    Group group = {first, (1u << count) - 1, choice(first), true};
    group.there = group.choice.owner < 0;
    return group;
  }
  // Returns this lane's choice of the group whose first token is `first`.
  __device__ Choice choice(int first) const {
    int const token = first + turn_of_lane() * kConsumerWarps;
    bool const has_choice = token < slice_.end && lane_ < group_tokens() * top_k_;
    Choice choice;
    bool adds_up = false;
    if (has_choice) {
      int const pair = token * top_k_ + lane_ - turn_of_lane() * top_k_;
      int const id = p_.gmem_topk_ids[pair];
      if (is_expert(p_, id)) {
        auto const index = static_cast<std::int32_t>(*pair_word(p_, pair));
        int const owner = p_.owner(id);
        adds_up = kPartialCombine && owner != p_.rank &&
                  id - owner * p_.local_experts < p_.partial_experts;
        choice = {owner, pass_.block_of(id, index), p_.gmem_scores[pair]};
      }
    }
    if (kPartialCombine) {
      __syncwarp();
      take_sum(choice, adds_up, token);
    }
    return choice;
  }
  // With the first of several choices that another rank adds up comes their sum, weighted already, and with the others
  // nothing.
  __device__ void take_sum(Choice& choice, bool adds_up, int token) const {
    int const key = adds_up ? turn_of_lane() * kMaxRanks + choice.owner : -1;
    unsigned const same = __match_any_sync(arch::kAllLanes, key);
    if (!adds_up || __popc(same) == 1) return;
    bool const is_first = lane_ == __ffs(static_cast<int>(same)) - 1;
    choice = is_first ? Choice{choice.owner, ~token, 1.0f} : Choice{};
  }

  // The next piece, once its token is complete.
  template <int kBlocks, int kAtOnce>
  __device__ Piece next() {
    Piece piece;
    piece.first = rest_ == 0;
    if (piece.first) {
      column_ += kBlocks * kBlockColumns;
      if (column_ >= p_.shape.hidden) {
        if (!next_token()) return {};
        column_ = 0;
      }
      rest_ = routed_;
    }
    piece.token = token_;
    piece.column = column_;
    TESSERA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      piece.choices |= rest_ & (0u - rest_);
      rest_ &= rest_ - 1;
    }
    piece.last = rest_ == 0;
    piece.score = score_;
    piece.score_lane = score_lane_;
    return piece;
  }
  // Any token of the two groups at hand that is complete; where there is none, the first one, which is awaited.
  __device__ bool next_token() {
    while (own_.left == 0) {
      if (own_.first >= slice_.end) return false;
      own_ = ahead_;
      ahead_ = group_at(own_.first + group_tokens() * kConsumerWarps);
    }
    if (take(own_) || take(ahead_)) return true;
    int const awaited = __ffs(static_cast<int>(own_.left)) - 1;
    if (turn_of_lane() == awaited && !own_.there) {
      pass_.wait_epoch(word_of(own_.choice), site(own_.choice), own_.choice.owner);
      own_.there = true;
    }
    __syncwarp();
    return take(own_);
  }
  __device__ bool take(Group& group) {
    if (group.left == 0) return false;
    if (!group.there) {
      OwnWindow const own = own_window(p_);
      group.there = reached(own.acquire(word_of(group.choice)), pass_.epoch);
    }
    __syncwarp();
    unsigned const choices = (2u << (top_k_ - 1)) - 1;  // of the first token
    unsigned const missing = __ballot_sync(arch::kAllLanes, !group.there);
    unsigned const routed = __ballot_sync(arch::kAllLanes, group.choice.owner >= 0);
    for (unsigned left = group.left; left != 0; left &= left - 1) {
      int const g = __ffs(static_cast<int>(left)) - 1;
      score_lane_ = g * top_k_;
      if ((missing >> score_lane_ & choices) != 0) continue;
      token_ = group.first + g * kConsumerWarps;
      routed_ = routed >> score_lane_ & choices;
      score_ = group.choice.score;
      group.left &= ~(1u << g);
      return true;
    }
    return false;
  }
  __device__ static bool is_sum(Choice const& choice) {
    return kPartialCombine && choice.block < 0;
  }
  __device__ static Site site(Choice const& choice) {
    return is_sum(choice) ? Site::partial_done : Site::block_done;
  }
  __device__ std::int64_t word_of(Choice const& choice) const {
    return is_sum(choice) ? p_.window.partial_done_word(choice.owner, ~choice.block)
                          : p_.window.block_done_word(choice.owner, choice.block);
  }

  // A group of cp.async, of no copies where there is no piece.
  template <int kBlocks, int kAtOnce>
  __device__ void load(Piece const& piece, int slot) const {
    std::uint32_t to = arch::shared_address(ring_ + slot * kPieceBytes);
    std::int64_t const pitch = 2 * std::int64_t{p_.shape.hidden};
    int const column = piece.column + 8 * lane_;
    // Nobody reads slots again, so their lines in L2 are evicted first, and not those that have still to be written
    // out. FlashDMoE's layer, whose rows go direct, takes up to 0.4% longer by it.
    std::uint64_t const policy =
        kTransfer == Transfer::direct ? arch::l2_evict_normal() : arch::l2_evict_first();
    unsigned left = piece.choices;
    TESSERA_UNROLL
    for (int i = 0; i < kAtOnce; ++i, left &= left - 1) {
      OwnWindow const own = own_window(p_);
      char const* const from = own.place(p_.window.slot(piece.token, 0)) +
                               (__ffs(static_cast<int>(left)) - 1) * pitch + 2 * column;
      TESSERA_UNROLL
      for (int b = 0; b < kBlocks; ++b, to += kBlockBytes) {
        if (left != 0 && column + b * kBlockColumns < p_.shape.hidden) {
          arch::cp_async_16_with_policy(to, from + b * kBlockBytes, policy);
        }
      }
    }
    arch::cp_async_commit();
  }

  template <int kBlocks, int kAtOnce>
  __device__ void add(Piece const& piece, int slot, float (&sum)[kBlocks][8]) const {
    if (piece.first) {
      TESSERA_UNROLL
      for (auto& block : sum) {
        for (float& value : block) value = 0;
      }
    }
    int const column = piece.column + 8 * lane_;
    unsigned left = piece.choices;
    TESSERA_UNROLL
    for (int i = 0; i < kAtOnce; ++i, left &= left - 1) {
      if (left == 0) break;
      float const s = __shfl_sync(arch::kAllLanes, piece.score,
                                  piece.score_lane + __ffs(static_cast<int>(left)) - 1);
      TESSERA_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        uint4 const bits = *reinterpret_cast<uint4 const*>(ring_ + slot * kPieceBytes +
                                                           (i * kBlocks + b) * kBlockBytes);
        add_weighted(sum[b], s, bits);
      }
    }
    if (!piece.last) return;
    TESSERA_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      if (column + b * kBlockColumns >= p_.shape.hidden) break;
      *reinterpret_cast<uint4*>(pass_.p.gmem_o + std::int64_t{piece.token} * p_.shape.hidden +
                                column + b * kBlockColumns) = rounded_sum(sum[b]);
    }
  }

  Pass const& pass_;
  ExchangeArguments const& p_;
  int warp_, lane_, top_k_;
  TokenSlice slice_;
  unsigned char* ring_;  // of this lane
  Group own_, ahead_;
  // The token at hand, and which of its choices are left of its columns from column_ on.
  int token_ = 0, column_ = 0;
  unsigned routed_ = 0, rest_ = 0;
  float score_ = 0;  // of lane score_lane_ + j: of choice j
  int score_lane_ = 0;
};

}  // namespace tessera::expert_parallel

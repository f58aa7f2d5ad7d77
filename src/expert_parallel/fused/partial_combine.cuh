// SPDX-License-Identifier: Apache-2.0
// Transfer::partial_combine: the owner sends back one sum for a token of another rank that has several rows here.
// Communication warps that have nothing left to pull make the sums, and at the end of the pass all warps do.
//   part_t = bf16(sum over the token's choices j on this owner, in their order, of s_tj * y_tj)
//   y      [rows of the pool, d] bf16, where x was (push_rows.cuh) -> the slot of the first of these choices, on the
//          token's source -> partial_done
// Schedule  rows are drawn, and of them the last ones of their tokens taken, so tokens come in the order of the blocks.
//           4 KB of a token in flight, in 32 registers of a lane: 1024 columns of two rows, 512 of four, 256 of six
// Ahead     a number is drawn two draws before it is needed, entries are read one draw, places and scores one token
//           before, into shared memory
// Waits     the blocks of the token's rows [down_tiles]
// Signals   for several tokens behind one fence, during the loads of the next token; for all of them before a wait
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "expert_parallel/exchange/weighted_sum.cuh"
#include "expert_parallel/fused/pull_rows.cuh"

namespace tessera::expert_parallel {

// Shared memory holds what is known of the token at hand, and of the next one: registers are for its rows, of
// which a lane has 16 * kLoads bytes in flight.
template <int kLoads>
class PartialCombine {
 public:
  __device__ PartialCombine(Pass const& pass, SumStorage& smem)
      : pass_(pass),
        p_(pass.p.exchange),
        smem_(smem),
        lane_(arch::lane_idx()),
        cursor_(p_.shape, pass.counts(), pass.plan(), pass.smem.list_begin, p_.rank) {}

  // A communication warp begins with the draw of its own number, a warp that helps later with any.
  static constexpr int kAnyDraw = -1;
  __device__ void run(int first_draw) {
    if (__any_sync(arch::kAllLanes, pass_.failed())) return;  // places may not have come
    draw();
    if (first_draw == kAnyDraw) {
      first_draw = drawn();
      draw();
    }
    read(first_draw);
    bool more = find_next();
    while (more) {
      find_terms();
      await();
      more = find_next();
      add();
    }
    signal_all();
  }

 private:
  static constexpr int kBytes = 16 * arch::kWarpThreads;  // of a load of all lanes
  static constexpr int kSignalAt = SumStorage::kMaxUnsignalled;
  static constexpr std::uint32_t kPollNs = 500;
  static constexpr int kRows = SumStorage::kRowsOfDraw;

  __device__ void draw() {
    if (lane_ != 0) return;
    drawn_ = arch::count_relaxed_gpu(pass_.local_word(p_.local.sum_draws(pass_.epoch)), 1u);
  }
  __device__ int drawn() const {
    return static_cast<int>(gridDim.x) * kCommunicationWarps +
           static_cast<int>(__shfl_sync(arch::kAllLanes, drawn_, 0));
  }
  // Returns the end of the rows of experts whose results are added up.
  __device__ int end() const {
    ExpertPlan const& last = pass_.smem.plan[p_.partial_experts - 1];
    return last.first_row + last.rows;
  }
  // Says whether this lane has a row of the draw ahead.
  __device__ bool has_row() const { return lane_ < kRows && first_ahead_ + lane_ < end(); }
  // Lane j reads row j of a draw into the half of the storage that is not taken from.
  __device__ void read(int draw) {
    first_ahead_ = draw * kRows;
    if (has_row()) {
      PoolRow const row = cursor_.at(first_ahead_ + lane_);
      std::int64_t const at = p_.window.list_entry(parity(pass_.epoch), row.source, row.entry);
      smem_.source[half_ ^ 1][lane_] = row.source;
      arch::cp_async_16(arch::shared_address(&smem_.entries[half_ ^ 1][lane_]),
                        own_window(p_).place(at), 16);
    }
    arch::cp_async_commit();
  }

  // The next token, whose places and scores are on their way. False: there are no more.
  __device__ bool find_next() {
    while (left_ == 0) {
      if (first_ahead_ >= end()) return false;
      arch::cp_async_wait<0>();
      half_ ^= 1;
      bool asked = false;
      if (has_row()) {
        bool const ends_sum = smem_.entries[half_][lane_].z / 256 % 256 != 0;  // RouteEntry
        asked = ends_sum && smem_.source[half_][lane_] != p_.rank;
      }
      left_ = __ballot_sync(arch::kAllLanes, asked);
      int const next = drawn();
      draw();
      read(next);
      __syncwarp();
    }
    int const from = __ffs(static_cast<int>(left_)) - 1;
    left_ &= left_ - 1;
    uint4 const entry = smem_.entries[half_][from];
    int const source = smem_.source[half_][from];
    int const token = p_.token_of(entry.x);
    std::int64_t const placed = placed_pairs(source, token);
    if (lane_ == 0) smem_.ahead = {entry.y, token, source};
    if (lane_ <= p_.shape.max_top_k / 2) {
      arch::cp_async_16(arch::shared_address(&smem_.placed[2 * lane_]),
                        own_window(p_).place(placed / 16 * 16 + 16 * lane_), 16);
    }
    arch::cp_async_commit();
    return true;
  }
  // Returns where the places of all choices of a token lie in the window.
  __device__ std::int64_t placed_pairs(int source, int token) const {
    return p_.window.placed_pair(parity(pass_.epoch), source,
                                 std::int64_t{token} * p_.shape.max_top_k);
  }

  // The next token becomes the one at hand: its rows and scores, in the order of the choices.
  __device__ void find_terms() {
    arch::cp_async_wait<0>();
    __syncwarp();
    SumStorage::Token const token = smem_.ahead;
    std::uint32_t const lane = arch::forgotten(lane_);
    PlacedPair const placed = smem_.placed[placed_pairs(token.source, token.token) / 8 % 2 + lane];
    PairPlace const place = PairPlace::of(placed.place);
    bool const adds = (token.choices >> lane & 1) != 0 && place.expert < p_.partial_experts;
    unsigned const added = __ballot_sync(arch::kAllLanes, adds);
    if (lane == 0) smem_.now = {added, token.token, token.source};
    if (adds) {
      smem_.terms[__popc(added & ((1u << lane) - 1))] = {pool_row_of(pass_, place, token.source),
                                                         placed.score};
    }
    __syncwarp();
  }

  // Lane i waits for the block of row i.
  __device__ void await() {
    auto const lane = static_cast<int>(arch::forgotten(lane_));
    bool const waits = lane < __popc(smem_.now.choices);
    std::int64_t const word =
        p_.local.down_tiles(pass_.epoch, waits ? smem_.terms[lane].row / kPlain.tile.m : 0);
    auto const tiles = static_cast<std::uint32_t>(p_.shape.down_tiles());
    bool const there = !waits || arch::load_acquire_gpu(pass_.local_word(word)) == tiles;
    unsigned const missing = __ballot_sync(arch::kAllLanes, !there);
    __syncwarp();
    if (missing == 0) return;
    signal_all();
    for (unsigned left = missing; left != 0; left &= left - 1) {
      int const from = __ffs(static_cast<int>(left)) - 1;
      pass_.wait_count(__shfl_sync(arch::kAllLanes, word, from), tiles, Site::down_tiles,
                       [] { arch::sleep_ns(kPollNs); });
    }
  }

  __device__ void add() {
    SumStorage::Token const token = smem_.now;
    int const first = __ffs(static_cast<int>(token.choices)) - 1;
    char* const to = peer_of(p_, token.source)
                         .store_if_local<OtherWay::kStaged>(p_.window.slot(token.token, first));
    int const rows = __popc(token.choices);
    if (rows <= 2) {
      add_rows<kLoads / 2, 2>(rows, to);
    } else if (rows <= 4) {
      add_rows<kLoads / 4, 4>(rows, to);
    } else {
      add_rows<1, 3 * kLoads / 4>(rows, to);
    }
    if (lane_ == 0) smem_.unsignalled[unsignalled_] = smem_.now;
    ++unsignalled_;
    __syncwarp();  // the terms have been read
  }

  // Adds up to kAtOnce rows at a time, kBlocks * 256 columns of them; if kBlocks is 1, more rows after them.
  template <int kBlocks, int kAtOnce>
  __device__ void add_rows(int rows, char* to) {
    for (int begin = 0; begin < row_bytes(); begin += kBlocks * kBytes) {
      int const at = begin + 16 * lane_;
      float sum[kBlocks][8] = {};
      int first = 0;
      do {
        // Set to zero: registers that conditional loads alone write would stay occupied between two tokens, too.
        uint4 part[kAtOnce][kBlocks] = {};
        TESSERA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i >= rows) continue;
          std::int64_t const row = smem_.terms[first + i].row;
          char const* const gmem = p_.gmem_pool + row * row_bytes() + at;
          TESSERA_UNROLL
          for (int b = 0; b < kBlocks; ++b) {
            if (at + b * kBytes < row_bytes()) {
              part[i][b] = __ldcg(reinterpret_cast<uint4 const*>(gmem + b * kBytes));
            }
          }
        }
        if (begin == 0 && first == 0 && unsignalled_ >= kSignalAt) signal_all();
        TESSERA_UNROLL
        for (int b = 0; b < kBlocks; ++b) {
          TESSERA_UNROLL
          for (int i = 0; i < kAtOnce; ++i) {
            if (first + i < rows) add_weighted(sum[b], smem_.terms[first + i].score, part[i][b]);
          }
          if (kBlocks > 1 && at + b * kBytes < row_bytes()) store(sum[b], to + at + b * kBytes);
        }
        first += kAtOnce;
      } while (kBlocks == 1 && first < rows);
      if (kBlocks == 1 && at < row_bytes()) store(sum[0], to + at);
    }
  }
  __device__ int row_bytes() const { return 2 * p_.shape.hidden; }
  __device__ static void store(float const (&sum)[8], char* to) {
    *reinterpret_cast<uint4*>(to) = rounded_sum(sum);
  }

  __device__ void signal_all() {
    if (unsignalled_ == 0) return;
    __syncwarp();
    arch::fence_acq_rel_sys();  // for what all lanes have stored
    if (lane_ < unsignalled_) {
      SumStorage::Token const sum = smem_.unsignalled[lane_];
      Peer const to = peer_of(p_, sum.source);
      to.signal(p_.window.partial_done_word(p_.rank, sum.token), pass_.epoch);
    }
    __syncwarp();
    unsignalled_ = 0;
  }

  Pass const& pass_;
  ExchangeArguments const& p_;
  SumStorage& smem_;
  int lane_;
  RowCursor cursor_;
  std::uint32_t drawn_ = 0;  // of lane 0: the draw after the next
  int first_ahead_ = 0;      // the next draw's first row
  int half_ = 0;             // of the storage, with the rows of the draw at hand
  unsigned left_ = 0;        // of these rows, whose tokens are still to be had
  int unsignalled_ = 0;      // tokens whose sums have been stored
};

}  // namespace tessera::expert_parallel

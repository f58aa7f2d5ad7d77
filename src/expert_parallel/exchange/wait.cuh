// SPDX-License-Identifier: Apache-2.0
// A wait ends when its word has come, after a time limit, or when another rank has given up. Who gives up signals it to
// all ranks before it does anything else, and leaves a Fault for the host.
#pragma once

#include <cuda_runtime.h>

#include "cuda/arch/clock.cuh"
#include "cuda/arch/signal.cuh"
#include "cuda/arch/warp.cuh"
#include "expert_parallel/exchange/peers.cuh"

namespace tessera::expert_parallel {

namespace arch = cuda::arch;

__device__ inline std::uint32_t* word_of(char* base, std::int64_t offset) {
  return reinterpret_cast<std::uint32_t*>(base + offset);
}

// {pair, source} of a row of the pool. The source is kStays where the row's result goes nowhere yet.
constexpr std::uint32_t kStays = ~0u;
__device__ inline uint2* row_origin(ExchangeArguments const& p, std::int64_t row) {
  return reinterpret_cast<uint2*>(p.gmem_local + p.local.row_origin + 8 * row);
}

class Waiter {
 public:
  __device__ Waiter(ExchangeArguments const& p, std::uint32_t epoch) : p_(p), epoch_(epoch) {}

  /// Waits for a word of this rank's window that `peer` writes. False: the pass is lost.
  __device__ bool for_epoch(std::int64_t offset, std::uint32_t epoch, Site site, int peer) const {
    OwnWindow const own = own_window(p_);
    return wait([&] { return own.acquire(offset); },
                [&](std::uint32_t seen) { return reached(seen, epoch); }, epoch, site, peer);
  }
  /// Waits until second_x of `peer` lies in its window. Not every pass has one, so the word may be of any earlier pass.
  __device__ bool for_second_rows(int peer) const {
    OwnWindow const own = own_window(p_);
    std::int64_t const word = p_.window.second_staged_word(peer);
    return wait([&] { return own.acquire(word); },
                [&](std::uint32_t seen) { return seen == epoch_; }, epoch_, Site::staged, peer);
  }
  /// Waits for what ranks have written into this rank's window for this pass. A converged warp calls it: lane r waits
  /// for rank r, if it does; all lanes leave at once.
  __device__ bool for_lists(bool waits) const {
    int const peer = waits ? arch::lane_idx() : p_.rank;
    OwnWindow const own = own_window(p_);
    std::int64_t const word = p_.window.publish_word(peer);
    return wait<true>([&] { return own.acquire(word); },
                      [&](std::uint32_t seen) { return !waits || reached(seen, epoch_); }, epoch_,
                      Site::publish, peer);
  }
  /// Waits for a counter of this GPU.
  __device__ bool for_count(std::int64_t offset, std::uint32_t count, Site site) const {
    std::uint32_t const* const word = word_of(p_.gmem_local, offset);
    return wait([&] { return arch::load_acquire_gpu(word); },
                [&](std::uint32_t seen) { return seen == count; }, count, site, -1);
  }
  /// The same for a converged warp, which does something else between two looks.
  template <class Meanwhile>
  __device__ bool for_count(std::int64_t offset, std::uint32_t count, Site site,
                            Meanwhile meanwhile) const {
    std::uint32_t const* const word = word_of(p_.gmem_local, offset);
    auto const look = [&] {
      meanwhile();
      return arch::load_acquire_gpu(word);
    };
    return wait<true>(look, [&](std::uint32_t seen) { return seen == count; }, count, site, -1);
  }
  /// Waits for c[source][expert] of this pass.
  __device__ bool for_rows(int source, int expert, std::int32_t& rows) const {
    return for_count_word(p_.window.count_word(parity(epoch_), source, expert), source, rows,
                          [&](std::uint32_t seen) { return reached(seen, epoch_); });
  }
  /// Waits for the rows that a rank has memory for in this pass. Not every pass has them: the word may be of any
  /// earlier pass of this parity.
  __device__ bool for_row_limit(int rank, std::int32_t& rows) const {
    return for_count_word(p_.window.row_limit_word(parity(epoch_), rank), rank, rows,
                          [&](std::uint32_t seen) { return seen == epoch_; });
  }

  /// Reports a rank that has given up, at the end of a pass whose words have all come: that rank does not stop and may
  /// have sent void rows, and waits look at the abort words seldom. A converged warp that waits for nothing calls it.
  __device__ void report_given_up() const {
    int const rank = arch::lane_idx();
    int const by = rank < p_.shape.ranks ? abort_word(rank) : 0;
    unsigned const ranks = __ballot_sync(arch::kAllLanes, by != 0);
    if (ranks != 0 && rank == first_of(ranks)) raise(Site::ended, -1, 0, 0, by);
  }

  /// For a thread that cannot go on though every word has come. Other ranks notice at the end of their passes.
  __device__ void give_up(Site site, std::uint32_t expected, std::uint32_t seen) const {
    raise(site, -1, expected, seen, 0);
    signal_all(p_.rank + 1);
  }

 private:
  template <class Enough>
  __device__ bool for_count_word(std::int64_t offset, int source, std::int32_t& rows,
                                 Enough enough) const {
    OwnWindow const own = own_window(p_);
    auto const look = [&] {
      CountWord const seen = CountWord::of(own.look_8(offset));
      rows = seen.rows;
      return seen.epoch;
    };
    return wait(look, enough, epoch_, Site::counted, source);
  }

  // kWarp: by a converged warp, whose lanes wait for words of their own, until all have what they wait for. If each
  // left by itself, the compiler would take the warp for divided from then on, and keep what its k loops count in
  // registers of every lane.
  template <bool kWarp = false, class Look, class Enough>
  __device__ bool wait(Look look, Enough enough, std::uint32_t wanted, Site site, int peer) const {
    constexpr int kSpinsPerLook = 1024;  // at the clock and at the abort words
    // A peer that does not send also stops waits for counters of this GPU. These wait longer, as they cannot name it.
    std::uint64_t const limit_ns = p_.limit_ns + (peer < 0 ? p_.limit_ns / 8 : 0);
    std::uint64_t begin = 0;
    for (int spin = 1;; ++spin) {
      std::uint32_t const seen = look();
      bool const is_enough = enough(seen);
      if (kWarp ? __all_sync(arch::kAllLanes, is_enough) : is_enough) {
        if (p_.jitter_ns != 0) pause(static_cast<std::uint32_t>(site));
        return true;
      }
      if (spin % kSpinsPerLook != 0) continue;
      std::uint64_t const now = arch::nanoseconds();
      if (begin == 0) begin = now;
      int by = aborted_by();
      bool const is_late = now - begin > limit_ns;
      if (kWarp ? !__any_sync(arch::kAllLanes, by != 0 || is_late) : by == 0 && !is_late) continue;
      if (kWarp) {  // lanes have not looked at the same time
        unsigned const signalled = __ballot_sync(arch::kAllLanes, by != 0);
        if (signalled != 0) by = __shfl_sync(arch::kAllLanes, by, first_of(signalled));
      }
      if (!is_enough) {
        raise(site, peer, wanted, seen, by);
        signal_all(by != 0 ? by : p_.rank + 1);
      }
      return false;
    }
  }

  // Pauses for a different time at each call, so that CTAs, roles and ranks come in any order.
  __device__ void pause(std::uint32_t site) const {
    std::uint64_t const begin = arch::nanoseconds();
    std::uint32_t draw = static_cast<std::uint32_t>(begin) ^ (blockIdx.x * 0x9e3779b9u) ^
                         (site * 0x85ebca6bu) ^ (epoch_ * 0xc2b2ae35u);
    draw = (draw ^ draw >> 15) * 0x2c1b3c6du;
    draw ^= draw >> 13;
    while (arch::nanoseconds() - begin < draw % p_.jitter_ns) {
    }
  }

  __device__ static int first_of(unsigned lanes) { return __ffs(static_cast<int>(lanes)) - 1; }

  // Returns 0, or 1 + the rank that gave up first as far as `rank` knows. The word is never cleared: a group that has
  // lost a pass is made anew.
  __device__ int abort_word(int rank) const {
    return static_cast<int>(own_window(p_).look(p_.window.abort_word(rank)));
  }
  __device__ int aborted_by() const {
    for (int r = 0; r < p_.shape.ranks; ++r) {
      if (int const by = abort_word(r); by != 0) return by;
    }
    return 0;
  }
  // Whoever gives up signals it to all peers, as the rank whose word it has seen may not have reached them. Later
  // signals to a peer, of this thread or of one that gives up because of the own window's word, come behind the fence:
  // who acquires such a signal sees the abort word.
  __device__ void signal_all(int by) const {
    auto const store = [&](int rank) {
      peer_of(p_, rank).signal(p_.window.abort_word(p_.rank), static_cast<std::uint32_t>(by));
    };
    for (int r = 0; r < p_.shape.ranks; ++r) {
      if (r != p_.rank) store(r);
    }
    arch::fence_acq_rel_sys();
    store(p_.rank);
  }

  __device__ void raise(Site site, int peer, std::uint32_t expected, std::uint32_t seen,
                        int by) const {
    Fault& fault = *p_.fault;
    if (atomicCAS(&fault.claimed, 0u, 1u) != 0) return;
    fault.site = site;
    fault.rank = p_.rank;
    fault.cta = static_cast<int>(blockIdx.x);
    fault.peer = peer;
    fault.epoch = epoch_;
    fault.expected = expected;
    fault.seen = seen;
    fault.aborted_by = by == p_.rank + 1 ? 0u : static_cast<std::uint32_t>(by);
    __threadfence_system();
    arch::store_relaxed_sys(&fault.raised, 1u);
  }

  ExchangeArguments const& p_;
  std::uint32_t epoch_;
};

}  // namespace tessera::expert_parallel

// SPDX-License-Identifier: Apache-2.0
// What an emulated sm_100a keeps account of, for tensor_memory.cpp alone: cells, who wrote and read them, and what each
// warp knows to be over.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <unordered_map>

#include "tests/emulator/sm100/multiply.hpp"
#include "tests/emulator/state.hpp"

namespace tessera::emulator {

constexpr int kMaxWarps = 16, kPair = 2;
constexpr int kUnit = 32;  // lanes, and columns, of what is accounted for together
constexpr int kRowUnits = kLanes / kUnit, kColumnUnits = kColumns / kUnit;

// How much of what the warps of a cluster did is known to be over: what a warp issued, and its own loads and stores.
using Clock = std::array<std::uint64_t, std::size_t{2} * kMaxWarps * kPair>;
inline void merge(Clock& into, Clock const& from) {
  for (std::size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], from[i]);
}

struct Unit {
  bool owned = false;
  int writer = -1;  // its place in a Clock; -1: nobody
  std::uint64_t written = 0;
  std::uint32_t shape = 0;                        // of the multiplication that wrote
  std::array<std::uint64_t, kMaxWarps> loaded{};  // last access, by warp of the CTA
};

struct PendingLoad {
  std::uint32_t* r;
  bool fragments;
  int lane, column;
};
struct PendingStore {
  int lane, column;
  std::array<std::uint32_t, kUnit> values;
};

struct WarpState {
  Clock known{}, pending{}, published{};
  std::uint64_t issued = 0;    // multiplications and copies
  std::uint64_t accesses = 0;  // loads and stores, of the warp
  int issuing_lane = -1;
  std::deque<std::function<void()>> queue;  // what is left to do of what was issued, in order
  std::vector<PendingLoad> loads[kWarp];
  std::vector<PendingStore> stores[kWarp];
};

// The last generic write: by a thread, or by cp.async.
struct Writer {
  Thread const* thread = nullptr;
  std::uint64_t number = 0;
  bool copied = false;
};

struct TensorCta {
  Cells cells;
  Unit units[kRowUnits][kColumnUnits];
  WarpState warps[kMaxWarps];
  // The last multiplication that reads scales, of the warp that issues; whether a copy has written them.
  std::uint64_t scales_read[kColumns] = {};
  bool scales_copied[kColumns] = {};
  std::uint64_t relayed = 0;  // writes before this one a relay of the CTA has published
  bool relinquished = false;
  std::uint32_t granted = 0;       // columns of the last allocation
  std::map<int, int> allocations;  // first column -> columns
  int count = 0;                   // of allocations so far
  // The generic writes to chunks of 16 bytes of shared memory.
  std::vector<Writer> chunks = std::vector<Writer>(kMaxShared / 16);
};

struct BarrierClock {
  Clock open{}, over[2] = {};
};

class TensorWatcher final : public Watcher {
 public:
  TensorWatcher() { watcher = this; }

  void begins() override {
    ctas_.clear();
    barriers_.clear();
    fences_.clear();
    groups_.clear();
    bases_.clear();
    writes_ = 0;
    for (auto const& cta : world.ctas) ctas_[cta.get()] = std::make_unique<TensorCta>();
  }

  TensorCta& of(Cta const& cta) { return *ctas_.at(&cta); }
  // A CTA of more warps may not use tensor memory, and there is no account of what they know.
  static bool has_account(Cta const& cta) { return cta.warps.size() <= kMaxWarps; }
  static void require_account(Cta const& cta) {
    if (!has_account(cta)) fail("tcgen05 in a CTA of more warps than are emulated");
  }
  WarpState& own_warp() {
    Cta const& cta = *world.running->cta;
    require_account(cta);
    return of(cta).warps[warp_of(*world.running)];
  }
  static std::size_t warp_of(Thread const& t) { return t.index / kWarp; }
  static int rank_of(Cta const& cta) { return static_cast<int>(cta.index % cta.grid->cluster); }
  // Of what a warp issued; one more: of its loads and stores.
  static std::size_t clock_of(Cta const& cta, std::size_t warp) {
    return 2 * (static_cast<std::size_t>(rank_of(cta)) * kMaxWarps + warp);
  }
  static std::size_t own_clock() { return clock_of(*world.running->cta, warp_of(*world.running)); }

  // What a warp has been told at barriers it passes on, too: fences order the tcgen05 instructions of a warp, and one
  // that only loads operands has none.
  void arrives(void const* barrier) override {
    if (!has_account(*world.running->cta)) return;
    WarpState const& own = own_warp();
    merge(barriers_[barrier].open, own.published);
    merge(barriers_[barrier].open, own.pending);
  }
  void completes(void const* barrier, unsigned parity) override {
    auto const found = barriers_.find(barrier);
    if (found != barriers_.end()) found->second.over[parity] = found->second.open;
  }
  void waited(void const* barrier, unsigned parity) override {
    if (!has_account(*world.running->cta)) return;
    auto const found = barriers_.find(barrier);
    if (found != barriers_.end()) merge(own_warp().pending, found->second.over[parity]);
  }
  // By commit, which nobody runs.
  void carry(void const* barrier, Clock const& clock) { merge(barriers_[barrier].open, clock); }

  void wrote(void const* at, std::size_t bytes) override {
    mark(at, bytes, {world.running, ++writes_});
  }
  void landed(void const* at, std::size_t bytes) override { mark(at, bytes, {}); }
  void copied(void const* at, std::size_t bytes) override {
    mark(at, bytes, {nullptr, ++writes_, true});
  }
  void fenced() override { fences_[world.running] = writes_; }
  void relays() { of(*world.running->cta).relayed = writes_; }
  std::uint64_t last_fence() const {
    auto const found = fences_.find(world.running);
    return found != fences_.end() ? found->second : 0;
  }
  void reads_async(void const* at, std::size_t bytes) override {
    std::string const what = unfenced(at, bytes, last_fence());
    if (!what.empty()) fail(what);
  }
  // What is wrong with an async read of shared memory, whose issuer had fenced `fence_of_issuer` writes: a thread
  // fences its own; what cp.async wrote, who has waited for it does, the issuer or a relay.
  std::string unfenced(void const* at, std::size_t bytes, std::uint64_t fence_of_issuer) {
    TensorCta* const cta = cta_with(at);
    if (cta == nullptr) return "";
    std::size_t const first = chunk_of(at);
    for (std::size_t i = first; i < first + (bytes + 15) / 16; ++i) {
      Writer const& w = cta->chunks[i];
      if (w.copied && std::max(fence_of_issuer, cta->relayed) < w.number) {
        return "an async read of shared memory at " + std::to_string(i * 16) +
               " that cp.async wrote, and that neither the reader nor a relay has fenced";
      }
      auto const fence = w.thread != nullptr ? fences_.find(w.thread) : fences_.end();
      if (w.thread != nullptr && (fence == fences_.end() || fence->second < w.number)) {
        return "an async read of shared memory at " + std::to_string(i * 16) + " that thread " +
               std::to_string(w.thread->index) +
               " wrote and has not fenced (fence_proxy_async_shared)";
      }
    }
    return "";
  }

  void ends(Cta& cta) override {
    auto const found = ctas_.find(&cta);
    if (found == ctas_.end()) return;
    for (auto const& [first, columns] : found->second->allocations) {
      fail("the CTA ends with " + std::to_string(columns) +
           " columns of tensor memory allocated, from " + std::to_string(first) + " on");
    }
  }

  // One cta_group in a grid.
  void group(int ctas) {
    Grid const& grid = *world.running->cta->grid;
    int& used = groups_.try_emplace(&grid, ctas).first->second;
    if (used != ctas) fail("tcgen05 instructions with cta_group 1 and 2 in one kernel");
    if (static_cast<int>(grid.cluster) % ctas != 0) fail("cta_group 2 in a grid without clusters");
    if (grid.cluster > kPair) fail("tcgen05 in clusters of more than two is not emulated");
    require_account(*world.running->cta);
  }
  // Both CTAs of a pair get the same base for their n-th allocation; which, a draw decides.
  int base(int count, std::uint32_t columns) {
    auto& bases = bases_[world.ctas[world.running->cta->cluster_begin].get()];
    if (static_cast<std::size_t>(count) == bases.size()) {
      TensorCta const& own = of(*world.running->cta);
      std::vector<int> fits;
      for (int first = 0; first + static_cast<int>(columns) <= kColumns; first += kUnit) {
        bool free = true;
        for (int u = 0; u < static_cast<int>(columns) / kUnit; ++u) {
          free = free && !own.units[0][first / kUnit + u].owned;
        }
        if (free) fits.push_back(first);
      }
      bases.push_back(fits.empty() ? -1 : fits[world.random() % fits.size()]);
    }
    return bases[static_cast<std::size_t>(count)];
  }

 private:
  TensorCta* cta_with(void const* at) {
    for (auto const& [cta, tensor] : ctas_) {
      auto const offset = static_cast<unsigned char const*>(at) - cta->shared;
      if (offset >= 0 && offset < kMaxShared) {
        base_ = cta->shared;
        return tensor.get();
      }
    }
    return nullptr;
  }
  std::size_t chunk_of(void const* at) const {
    return static_cast<std::size_t>(static_cast<unsigned char const*>(at) - base_) / 16;
  }
  void mark(void const* at, std::size_t bytes, Writer const& writer) {
    TensorCta* const cta = cta_with(at);
    if (cta == nullptr) return;
    std::size_t const first = chunk_of(at);
    for (std::size_t i = first; i < first + (bytes + 15) / 16; ++i) cta->chunks[i] = writer;
  }

  std::unordered_map<Cta const*, std::unique_ptr<TensorCta>> ctas_;
  std::unordered_map<void const*, BarrierClock> barriers_;
  std::unordered_map<Thread const*, std::uint64_t> fences_;  // the last write that it has fenced
  std::unordered_map<Grid const*, int> groups_;
  std::unordered_map<Cta const*, std::vector<int>> bases_;
  std::uint64_t writes_ = 0;
  unsigned char* base_ = nullptr;
};
}  // namespace tessera::emulator

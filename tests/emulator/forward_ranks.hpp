// SPDX-License-Identifier: Apache-2.0
// Passes of the fused forward kernel of several emulated ranks, and what each token's experts give one after the other.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "expert_parallel/fused/forward_pass.cuh"
#include "expert_parallel/plan/choose_transfer.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/exchange_ranks.hpp"
#include "tests/emulator/memory.hpp"
#include "tests/expert_parallel/exchange.hpp"

namespace tessera::expert_parallel::fused {

using emulator::Bits;
using emulator::dot;
using emulator::fill;
using emulator::Memory;
using emulator::round;
using emulator::widen;

struct Case {
  ExchangeShape shape;
  ActivationKind activation = ActivationKind::swiglu;
  int ctas = 2;
  int lag = -1;
  bool saves = false;  // what backward needs
  bool may_overflow = true;
  bool biased = false;
};

// .. of one rank.
struct Saved {
  unfused::Rows wanted;
  unfused::Tables tables;
  std::int64_t capacity;  // rows that its memory holds
  bool has_h;
  Memory<Bits> h;
  std::uint64_t host_rows = 0;

  // More memory than is needed, as much, a row less, none.
  Saved(Exchange const& exchange, int rank, std::int64_t h_columns, std::uint64_t seed)
      : wanted(unfused::wanted_rows(exchange, rank)),
        tables(exchange.shape),
        capacity(std::array{exchange.shape.max_rows(), rows(),
                            std::max<std::int64_t>(rows() - 1, 0), std::int64_t{0}}[seed % 4]),
        has_h(seed % 5 != 0),
        h(exchange.shape.max_rows() * h_columns) {}
  std::int64_t rows() const { return static_cast<std::int64_t>(wanted.origins.size()); }
  std::int64_t held() const { return std::min(rows(), capacity); }
};

// All ranks of an exchange.
class Ranks {
 public:
  // Whose first pass is `first_epoch`.
  explicit Ranks(Case const& c, std::uint32_t first_epoch = 1)
      : case_(c),
        s_(c.shape),
        w_up_(halves() * s_.experts * s_.intermediate * s_.hidden),
        w_down_(std::int64_t{s_.experts} * s_.hidden * s_.intermediate),
        b_up_(halves() * s_.experts * s_.intermediate),
        b_down_(std::int64_t{s_.experts} * s_.hidden) {
    fill(w_up_.get(), static_cast<std::int64_t>(w_up_.size()), 11, 0.25f);
    fill(w_down_.get(), static_cast<std::int64_t>(w_down_.size()), 12, 0.25f);
    fill(b_up_.get(), static_cast<std::int64_t>(b_up_.size()), 13, 1.0f);
    fill(b_down_.get(), static_cast<std::int64_t>(b_down_.size()), 14, 1.0f);
    for (int r = 0; r < s_.ranks; ++r) {
      ranks_.push_back(std::make_unique<Rank>(s_, c.ctas, first_epoch));
    }
  }

  // One pass; what went wrong.
  std::string pass(Exchange const& exchange, std::uint64_t seed, emulator::Schedule const& schedule,
                   std::uint32_t jitter_ns = 0) {
    prepare(exchange, seed);
    for (int r = 0; r < s_.ranks; ++r) {
      if (launch(r, exchange.tokens(r), jitter_ns, kNoLimit) != cudaSuccess) {
        return "not launched";
      }
    }
    std::string const fault = emulator::run(schedule);
    if (!fault.empty()) return fault;
    for (int r = 0; r < s_.ranks; ++r) {
      if (!status(r).ok()) return status(r).text();
    }
    return wrong_results(exchange);
  }

  // A pass of which rank 0 has little time: what is wrong on ranks that call it good.
  std::string hasty_pass(Exchange const& exchange, std::uint64_t seed,
                         emulator::Schedule const& schedule, std::uint64_t limit_ns) {
    prepare(exchange, seed);
    for (int r = 0; r < s_.ranks; ++r) {
      EXPECT_EQ(launch(r, exchange.tokens(r), 0, r == 0 ? limit_ns : kNoLimit), cudaSuccess);
    }
    std::string const fault = emulator::run(schedule);
    return fault.empty() ? wrong_results(exchange) : fault;
  }
  // Whether the kernel copies x in the pass of this seed: every pattern is run both ways.
  static bool copies_x(ExchangeShape const& shape, std::uint64_t seed) {
    return (seed % 2 == 0) == (shape.transfer == Transfer::direct);
  }
  Status status(int rank) const {
    return fault_status(ranks_[static_cast<std::size_t>(rank)]->fault, 1);
  }

  // What rank 0 says to rank 1 when it gives up.
  void give_up() {
    Rank& other = *ranks_[1];
    std::uint32_t const word = 1;
    std::memcpy(other.window.get() + other.layout.abort_word(0), &word, sizeof word);
  }

  // The next pass, for which rank `lost` does not come: what the others report.
  std::vector<std::string> without(int lost, emulator::Schedule const& schedule) {
    for (int r = 0; r < s_.ranks; ++r) {
      if (r != lost) EXPECT_EQ(launch(r, 0, 0, 1'000'000), cudaSuccess);
    }
    EXPECT_EQ(emulator::run(schedule), "");
    std::vector<std::string> texts;
    for (int r = 0; r < s_.ranks; ++r) {
      if (r != lost) texts.emplace_back(status(r).text());
    }
    return texts;
  }

 private:
  static constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 40;
  static constexpr int kGap = 8;  // between rows of the caller's x
  static constexpr std::uint32_t kTicket = 77;

  struct Rank {
    WindowLayout layout;
    LocalLayout local_layout;
    Memory<char> window, local;
    Memory<std::uint32_t> epoch;
    Memory<Bits> x, pool, a, o;
    std::vector<std::int32_t> ids;
    std::vector<float> scores;
    std::unique_ptr<Saved> saved;
    Fault fault = {};

    Rank(ExchangeShape const& s, int ctas, std::uint32_t first_epoch)
        : layout(s),
          local_layout(s, ctas),
          window(layout.bytes, 0),
          local(local_layout.bytes, 0),
          epoch(1),
          x(s.max_tokens * std::int64_t{s.hidden + kGap}),
          pool(s.pool_rows() * s.hidden),
          a(s.pool_rows() * s.intermediate),
          o(std::int64_t{s.max_tokens} * s.hidden) {
      epoch[0] = first_epoch;
    }
  };

  void prepare(Exchange const& exchange, std::uint64_t seed) {
    copies_x_ = copies_x(s_, seed);
    for (int r = 0; r < s_.ranks; ++r) {
      Rank& rank = *ranks_[static_cast<std::size_t>(r)];
      rank.ids = exchange.ids[static_cast<std::size_t>(r)];
      rank.scores.clear();
      std::mt19937_64 rng(seed * 64 + static_cast<std::uint64_t>(r));
      for (std::size_t i = 0; i < rank.ids.size(); ++i) {
        rank.scores.push_back(static_cast<float>(rng() % 1000) / 1000.0f + 0.1f);
      }
      copy_x(rank, exchange.tokens(r), seed * 128 + static_cast<std::uint64_t>(r));
      std::memset(rank.window.get() + rank.layout.slots, 0xff,
                  static_cast<std::size_t>(rank.layout.bytes - rank.layout.slots));
      std::memset(rank.o.get(), 0xff, rank.o.size() * sizeof(Bits));
      if (case_.saves) {
        rank.saved = std::make_unique<Saved>(exchange, r, halves() * s_.intermediate,
                                             seed + static_cast<std::uint64_t>(r));
      }
    }
  }
  // With the caller, with gaps between rows; and in the window, unless the kernel copies it there.
  void copy_x(Rank& rank, std::int32_t tokens, std::uint64_t seed) {
    std::memset(rank.x.get(), 0xff, rank.x.size() * sizeof(Bits));
    std::memset(rank.window.get() + rank.layout.x, 0xff,
                static_cast<std::size_t>(std::int64_t{2} * s_.max_tokens * s_.hidden));
    for (std::int32_t t = 0; t < tokens; ++t) {
      Bits* const row = rank.x.get() + t * x_pitch();
      fill(row, s_.hidden, seed * 1024 + static_cast<std::uint64_t>(t), 1.0f);
      if (copies_x_) continue;
      std::memcpy(rank.window.get() + rank.layout.x_row(t), row,
                  static_cast<std::size_t>(s_.hidden) * sizeof(Bits));
    }
  }
  // Of ranks that have not reported anything.
  std::string wrong_results(Exchange const& exchange) {
    for (int r = 0; r < s_.ranks; ++r) {
      for (int t = 0; status(r).ok() && t < exchange.tokens(r); ++t) {
        std::string const wrong = compare(r, t);
        if (!wrong.empty()) return wrong;
      }
      if (!case_.saves || !status(r).ok()) continue;
      std::string const wrong = wrong_saved(r);
      if (!wrong.empty()) return "rank " + std::to_string(r) + ": " + wrong;
    }
    return "";
  }
  // What a rank has saved, and what it has left as it was.
  std::string wrong_saved(int rank) const {
    Saved const& saved = *ranks_[static_cast<std::size_t>(rank)]->saved;
    unfused::Tables const wanted(s_);
    Memory<Bits> const h(static_cast<std::int64_t>(saved.h.size()));
    std::transform(
        saved.wanted.offsets.begin(), saved.wanted.offsets.end(), wanted.offsets.get(),
        [&](std::int32_t offset) { return std::min<std::int64_t>(offset, saved.held()); });
    for (std::int64_t row = 0; row < saved.held(); ++row) {
      RowOrigin const from = saved.wanted.origins[static_cast<std::size_t>(row)];
      Rank const& source = *ranks_[static_cast<std::size_t>(from.source)];
      wanted.origins[row] = from;
      wanted.scores[row] = source.scores[static_cast<std::size_t>(from.pair)];
      if (!saved.has_h) continue;
      Bits const* const x = source.x.get() + from.pair / s_.max_top_k * x_pitch();
      std::int32_t const e = source.ids[static_cast<std::size_t>(from.pair)];
      std::int64_t const columns = halves() * s_.intermediate;
      for (std::int64_t i = 0; i < columns; ++i) {
        h[row * columns + i] = element(x, w_up_, b_up_, e * columns + i, s_.hidden);
      }
    }
    auto const rows = static_cast<std::int32_t>(saved.rows());
    bool const all_fit = std::all_of(ranks_.begin(), ranks_.end(), [](auto const& one) {
      return one->saved->rows() <= one->saved->capacity;
    });
    if (saved.host_rows != RoutedWord{rows, all_fit, kTicket}.word()) return "the host's word";
    std::string wrong = unfused::compare("offsets", saved.tables.offsets.get(), wanted.offsets);
    if (wrong.empty())
      wrong = unfused::compare("origins", saved.tables.origins.get(), wanted.origins);
    if (wrong.empty()) wrong = unfused::compare("scores", saved.tables.scores.get(), wanted.scores);
    return wrong.empty() ? unfused::compare("h", saved.h.get(), h) : wrong;
  }

  std::int64_t halves() const { return s_.gated ? 2 : 1; }
  std::int64_t x_pitch() const { return s_.hidden + kGap; }

  cudaError_t launch(int rank, int tokens, std::uint32_t jitter_ns, std::uint64_t limit_ns) {
    Rank& r = *ranks_[static_cast<std::size_t>(rank)];
    std::array<char*, kMaxRanks> windows = {};
    for (std::size_t p = 0; p < ranks_.size(); ++p) windows[p] = ranks_[p]->window.get();
    ExchangeArguments exchange{.shape = s_,
                               .window = r.layout,
                               .local = r.local_layout,
                               .rank = rank,
                               .windows = Windows(windows),
                               .gmem_local = r.local.get(),
                               .gmem_epoch = r.epoch.get(),
                               .fault = &r.fault,
                               .limit_ns = limit_ns,
                               .jitter_ns = jitter_ns,
                               .tokens = tokens,
                               .gmem_topk_ids = r.ids.data(),
                               .gmem_scores = r.scores.data(),
                               .gmem_pool = reinterpret_cast<char*>(r.pool.get())};
    std::int64_t const first = std::int64_t{rank} * s_.local_experts();
    std::int64_t const matrix = std::int64_t{s_.intermediate} * s_.hidden;
    SavedPass saved = {};
    if (r.saved != nullptr) {
      saved = {.tables = r.saved->tables.addresses(),
               .capacity = r.saved->capacity,
               .may_overflow = case_.may_overflow,
               .gmem_h = r.saved->has_h ? reinterpret_cast<char*>(r.saved->h.get()) : nullptr,
               .host = {&r.saved->host_rows, kTicket}};
    }
    return launch_forward({.exchange = exchange,
                           .activation = {.kind = case_.activation},
                           .gmem_w_up = w_up_.get() + halves() * first * matrix,
                           .gmem_w_down = w_down_.get() + first * matrix,
                           .gmem_b_up = bias(b_up_, halves() * first * s_.intermediate),
                           .gmem_b_down = bias(b_down_, first * s_.hidden),
                           .gmem_a = r.a.get(),
                           .gmem_x = copies_x_ ? r.x.get() : nullptr,
                           .x_pitch = x_pitch(),
                           .gmem_o = r.o.get(),
                           .lag = case_.lag,
                           .saved = saved},
                          case_.ctas, nullptr);
  }

  Bits const* bias(Memory<Bits> const& values, std::int64_t first) const {
    return case_.biased ? values.get() + first : nullptr;
  }

  float activate(float g, float u) const {
    using cuda::gemm::ActivationFunction;
    Activation const by{.kind = case_.activation};
    switch (by.kind) {
      case ActivationKind::swiglu:
        return ActivationFunction<ActivationKind::swiglu>::forward(by, g, u);
      case ActivationKind::clamped_swiglu:
        return ActivationFunction<ActivationKind::clamped_swiglu>::forward(by, g, u);
      default:
        return ActivationFunction<ActivationKind::relu2>::forward(by, g, u);
    }
  }

  // A row times a column of weights, and the column's bias, rounded.
  Bits element(Bits const* row, Memory<Bits> const& w, Memory<Bits> const& b, std::int64_t column,
               int count) const {
    float const sum = dot(row, w.get() + column * count, count);
    return round(case_.biased ? sum + widen(b.get()[column]) : sum);
  }

  // act(x_t w_up[e]^T + b_up[e]) w_down[e]^T + b_down[e], rounded.
  std::vector<float> result(Bits const* row, std::int32_t e) const {
    int const d = s_.hidden, n = s_.intermediate;
    std::vector<Bits> a(static_cast<std::size_t>(n));
    std::vector<float> y(static_cast<std::size_t>(d));
    for (int i = 0; i < n; ++i) {
      std::int64_t const gate = halves() * e * n + i;
      float const g = widen(element(row, w_up_, b_up_, gate, d));
      float const u = s_.gated ? widen(element(row, w_up_, b_up_, gate + n, d)) : g;
      a[static_cast<std::size_t>(i)] = round(activate(g, u));
    }
    for (int i = 0; i < d; ++i) {
      y[static_cast<std::size_t>(i)] =
          widen(element(a.data(), w_down_, b_down_, std::int64_t{e} * d + i, n));
    }
    return y;
  }

  // Choices are added in their order. partial combine: several on another rank are one term, rounded, where the first
  // one is.
  std::string compare(int rank, int token) const {
    Rank const& r = *ranks_[static_cast<std::size_t>(rank)];
    int const d = s_.hidden;
    std::int32_t const* const ids = r.ids.data() + std::int64_t{token} * s_.max_top_k;
    float const* const scores = r.scores.data() + std::int64_t{token} * s_.max_top_k;
    std::vector<float> sum(static_cast<std::size_t>(d), 0.0f);
    auto const add = [d](std::vector<float>& to, float score, std::vector<float> const& y) {
      for (int i = 0; i < d; ++i) {
        float& value = to[static_cast<std::size_t>(i)];
        value = std::fmaf(score, y[static_cast<std::size_t>(i)], value);
      }
    };
    auto const adds_up = [&](int j) { return ids[j] % s_.local_experts() < s_.partial_experts(); };
    for (int k = 0; k < s_.max_top_k; ++k) {
      if (ids[k] < 0 || ids[k] >= s_.experts) continue;
      std::vector<int> with;  // choices on the same rank
      for (int j = 0; j < s_.max_top_k; ++j) {
        bool const is_expert = ids[j] >= 0 && ids[j] < s_.experts;
        if (is_expert && adds_up(j) && s_.owner(ids[j]) == s_.owner(ids[k])) with.push_back(j);
      }
      Bits const* const row = r.x.get() + token * x_pitch();
      bool const parted = adds_up(k) && s_.owner(ids[k]) != rank && with.size() > 1;
      if (!parted) {
        add(sum, scores[k], result(row, ids[k]));
      } else if (with.front() == k) {
        std::vector<float> part(static_cast<std::size_t>(d), 0.0f);
        for (int const j : with) add(part, scores[j], result(row, ids[j]));
        for (float& value : part) value = widen(round(value));
        add(sum, 1, part);
      }
    }
    for (int i = 0; i < d; ++i) {
      Bits const got = r.o[std::int64_t{token} * d + i];
      Bits const wanted = round(sum[static_cast<std::size_t>(i)]);
      if (got == wanted) continue;
      return "rank " + std::to_string(rank) + " token " + std::to_string(token) + " column " +
             std::to_string(i) + ": " + std::to_string(widen(got)) + ", not " +
             std::to_string(widen(wanted));
    }
    return "";
  }

  Case case_;
  ExchangeShape s_;
  bool copies_x_ = false;  // in this pass
  Memory<Bits> w_up_, w_down_, b_up_, b_down_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace tessera::expert_parallel::fused

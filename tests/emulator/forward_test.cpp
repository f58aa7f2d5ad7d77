// SPDX-License-Identifier: Apache-2.0
// The fused forward kernel of several ranks, from the sources that GPUs get, in many schedules: bit for bit what each
// token's experts give one after the other, whatever the number of ranks, CTAs and passes before.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "dist/choose_transfer.hpp"
#include "dist/kernels/forward_pass.cuh"
#include "tests/dist/exchange.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/exchange_ranks.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::dist {
namespace {

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
  bool keeps = false;  // what backward needs
  bool may_overflow = true;
};

// .. of one rank.
struct Kept {
  separate::Rows wanted;
  separate::Tables tables;
  std::int64_t capacity;  // rows that there is room for
  bool has_h;
  Memory<Bits> h;
  std::uint64_t host_rows = 0;

  // More room than is needed, as much, a row less, none.
  Kept(Exchange const& exchange, int rank, std::int64_t h_columns, std::uint64_t seed)
      : wanted(separate::wanted_rows(exchange, rank)),
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
        w_down_(std::int64_t{s_.experts} * s_.hidden * s_.intermediate) {
    fill(w_up_.get(), static_cast<std::int64_t>(w_up_.size()), 11, 0.25f);
    fill(w_down_.get(), static_cast<std::int64_t>(w_down_.size()), 12, 0.25f);
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
    std::unique_ptr<Kept> kept;
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
      place_x(rank, exchange.tokens(r), seed * 128 + static_cast<std::uint64_t>(r));
      std::memset(rank.window.get() + rank.layout.slots, 0xff,
                  static_cast<std::size_t>(rank.layout.bytes - rank.layout.slots));
      std::memset(rank.o.get(), 0xff, rank.o.size() * sizeof(Bits));
      if (case_.keeps) {
        rank.kept = std::make_unique<Kept>(exchange, r, halves() * s_.intermediate,
                                           seed + static_cast<std::uint64_t>(r));
      }
    }
  }
  // With the caller, with gaps between rows; and in the window, unless the kernel copies it there.
  void place_x(Rank& rank, std::int32_t tokens, std::uint64_t seed) {
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
      if (!case_.keeps || !status(r).ok()) continue;
      std::string const wrong = wrong_kept(r);
      if (!wrong.empty()) return "rank " + std::to_string(r) + ": " + wrong;
    }
    return "";
  }
  // What a rank has kept, and what it has left as it was.
  std::string wrong_kept(int rank) const {
    Kept const& kept = *ranks_[static_cast<std::size_t>(rank)]->kept;
    separate::Tables const wanted(s_);
    Memory<Bits> const h(static_cast<std::int64_t>(kept.h.size()));
    std::transform(
        kept.wanted.offsets.begin(), kept.wanted.offsets.end(), wanted.offsets.get(),
        [&](std::int32_t offset) { return std::min<std::int64_t>(offset, kept.held()); });
    for (std::int64_t row = 0; row < kept.held(); ++row) {
      RowOrigin const from = kept.wanted.origins[static_cast<std::size_t>(row)];
      Rank const& source = *ranks_[static_cast<std::size_t>(from.source)];
      wanted.origins[row] = from;
      wanted.scores[row] = source.scores[static_cast<std::size_t>(from.pair)];
      if (!kept.has_h) continue;
      Bits const* const x = source.x.get() + from.pair / s_.max_top_k * x_pitch();
      std::int32_t const e = source.ids[static_cast<std::size_t>(from.pair)];
      std::int64_t const columns = halves() * s_.intermediate;
      for (std::int64_t i = 0; i < columns; ++i) {
        Bits const* const up = w_up_.get() + (e * columns + i) * s_.hidden;
        h[row * columns + i] = round(dot(x, up, s_.hidden));
      }
    }
    auto const rows = static_cast<std::int32_t>(kept.rows());
    bool const all_fit = std::all_of(ranks_.begin(), ranks_.end(), [](auto const& one) {
      return one->kept->rows() <= one->kept->capacity;
    });
    if (kept.host_rows != RoutedWord{rows, all_fit, kTicket}.word()) return "the host's word";
    std::string wrong = separate::compare("offsets", kept.tables.offsets.get(), wanted.offsets);
    if (wrong.empty())
      wrong = separate::compare("origins", kept.tables.origins.get(), wanted.origins);
    if (wrong.empty()) wrong = separate::compare("scores", kept.tables.scores.get(), wanted.scores);
    return wrong.empty() ? separate::compare("h", kept.h.get(), h) : wrong;
  }

  std::int64_t halves() const { return s_.gated ? 2 : 1; }
  std::int64_t x_pitch() const { return s_.hidden + kGap; }

  cudaError_t launch(int rank, int tokens, std::uint32_t jitter_ns, std::uint64_t limit_ns) {
    Rank& r = *ranks_[static_cast<std::size_t>(rank)];
    ExchangeArguments exchange{.shape = s_,
                               .window = r.layout,
                               .local = r.local_layout,
                               .rank = rank,
                               .windows = {},
                               .gmem_local = r.local.get(),
                               .gmem_epoch = r.epoch.get(),
                               .fault = &r.fault,
                               .limit_ns = limit_ns,
                               .jitter_ns = jitter_ns,
                               .tokens = tokens,
                               .gmem_topk_ids = r.ids.data(),
                               .gmem_scores = r.scores.data(),
                               .gmem_pool = reinterpret_cast<char*>(r.pool.get())};
    for (int p = 0; p < s_.ranks; ++p) {
      exchange.windows[p] = ranks_[static_cast<std::size_t>(p)]->window.get();
    }
    std::int64_t const first = std::int64_t{rank} * s_.local_experts();
    std::int64_t const matrix = std::int64_t{s_.intermediate} * s_.hidden;
    KeptPass kept = {};
    if (r.kept != nullptr) {
      kept = {.tables = r.kept->tables.addresses(),
              .capacity = r.kept->capacity,
              .may_overflow = case_.may_overflow,
              .gmem_h = r.kept->has_h ? reinterpret_cast<char*>(r.kept->h.get()) : nullptr,
              .host = {&r.kept->host_rows, kTicket}};
    }
    return launch_forward({.exchange = exchange,
                           .activation = {.kind = case_.activation},
                           .gmem_w_up = w_up_.get() + halves() * first * matrix,
                           .gmem_w_down = w_down_.get() + first * matrix,
                           .gmem_a = r.a.get(),
                           .gmem_x = copies_x_ ? r.x.get() : nullptr,
                           .x_pitch = x_pitch(),
                           .gmem_o = r.o.get(),
                           .lag = case_.lag,
                           .kept = kept},
                          case_.ctas, nullptr);
  }

  float activate(float g, float u) const {
    Activation const activation{.kind = case_.activation};
    return case_.activation == ActivationKind::swiglu
               ? cuda::block::ActivationFunction<ActivationKind::swiglu>::forward(activation, g, u)
               : cuda::block::ActivationFunction<ActivationKind::relu2>::forward(activation, g, u);
  }

  // act(x_t w_up[e]^T) w_down[e]^T, rounded.
  std::vector<float> result(Bits const* row, std::int32_t e) const {
    int const d = s_.hidden, n = s_.intermediate;
    std::vector<Bits> a(static_cast<std::size_t>(n));
    std::vector<float> y(static_cast<std::size_t>(d));
    for (int i = 0; i < n; ++i) {
      Bits const* const up = w_up_.get() + (halves() * e * n + i) * d;
      float const g = widen(round(dot(row, up, d)));
      float const u = s_.gated ? widen(round(dot(row, up + std::int64_t{n} * d, d))) : g;
      a[static_cast<std::size_t>(i)] = round(activate(g, u));
    }
    for (int i = 0; i < d; ++i) {
      y[static_cast<std::size_t>(i)] =
          widen(round(dot(a.data(), w_down_.get() + (std::int64_t{e} * d + i) * n, n)));
    }
    return y;
  }

  // Choices are added in their order. dedup: several on another rank are one term, rounded, where the first one is.
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
    auto const adds_up = [&](int j) { return ids[j] % s_.local_experts() < s_.added_experts(); };
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
  Memory<Bits> w_up_, w_down_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

ExchangeShape shape(std::int32_t ranks, std::int32_t tokens, std::int32_t hidden,
                    std::int32_t intermediate, std::int32_t experts, std::int32_t top_k,
                    Transfer transfer, bool gated = true) {
  return {.ranks = ranks,
          .max_tokens = tokens,
          .hidden = hidden,
          .intermediate = intermediate,
          .experts = experts,
          .max_top_k = top_k,
          .transfer = transfer,
          .gated = gated};
}

constexpr emulator::Schedule kSchedules[] = {{.seed = 1},
                                             {.seed = 2, .burst = 64},
                                             {.seed = 3, .copies = 512},
                                             {.seed = 4, .burst = 8, .copies = 2, .lazy = 0.5}};

// A pass of every pattern, one behind the other on the same memory.
void expect_right(Case const& c, std::uint32_t jitter_ns = 0) {
  Ranks ranks(c);
  std::vector<Pattern> patterns(std::begin(kPatterns), std::end(kPatterns));
  patterns.push_back(Pattern::repeats);
  std::uint64_t seed = 0;
  for (Pattern const pattern : patterns) {
    ++seed;
    ASSERT_EQ(ranks.pass(draw_exchange(c.shape, pattern, seed), seed,
                         kSchedules[seed % std::size(kSchedules)], jitter_ns),
              "")
        << c.shape.ranks << " ranks, " << c.ctas << " CTAs, lag " << c.lag << ", transfer "
        << static_cast<int>(c.shape.transfer) << ", pass " << seed;
  }
}

TEST(FusedForward, GivesTheBitsOfEachExpertAlone) {
  for (std::int32_t const ranks : {1, 2, 4}) {
    for (Transfer const transfer : kTransfers) {
      if (ranks == 1 && transfer == Transfer::dedup) continue;  // nothing is added up
      expect_right({.shape = shape(ranks, 24, 128, 64, 4, 2, transfer)});
    }
  }
}

TEST(FusedForward, AnyNumberOfCtasAndAnyLag) {
  for (Transfer const transfer : kTransfers) {
    for (int const ctas : {2, 9}) {
      expect_right(
          {.shape = shape(2, 17, 64, 64, 6, 3, transfer), .ctas = ctas, .lag = ctas == 2 ? 0 : 1});
    }
  }
}

TEST(FusedForward, ShapesThatFillNoTile) {
  for (Transfer const transfer : kTransfers) {
    expect_right({.shape = shape(2, 9, 200, 72, 6, 3, transfer, false),
                  .activation = ActivationKind::relu2});
  }
  expect_right({.shape = shape(2, 5, 328, 136, 2, 1, Transfer::direct)});
}

TEST(FusedForward, SeveralBlocksAndTilesOfAnExpert) {
  for (Transfer const transfer : kTransfers) {
    expect_right({.shape = shape(2, 20, 520, 200, 4, 2, transfer), .ctas = 4});
    expect_right({.shape = shape(2, 150, 64, 64, 2, 1, transfer)});
  }
}

TEST(FusedForward, KeepsWhatBackwardNeeds) {
  for (Transfer const transfer : {Transfer::direct, Transfer::once}) {
    std::int32_t const ranks = transfer == Transfer::once ? 3 : 1;
    expect_right({.shape = shape(ranks, 16, 64, 64, 6, 2, transfer), .keeps = true});
    expect_right({.shape = shape(2, 9, 72, 328, 6, 3, transfer, false),
                  .activation = ActivationKind::relu2,
                  .keeps = true});
    expect_right({.shape = shape(2, 20, 136, 200, 4, 2, transfer), .ctas = 4, .keeps = true});
  }
  expect_right({.shape = shape(2, 150, 64, 64, 2, 1, Transfer::direct), .lag = 1, .keeps = true});
  expect_right({.shape = shape(2, 17, 64, 64, 6, 3, Transfer::once), .ctas = 9, .keeps = true},
               50'000);
}

// Where nobody said that rows may be left out.
TEST(FusedForward, MoreRowsThanRoomAreReported) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    Case const c = {.shape = shape(2, 12, 64, 64, 4, 2, kTransfers[seed % 2]),
                    .keeps = true,
                    .may_overflow = false};
    Ranks ranks(c);
    // Capacities: Kept. Of seed 0 both ranks have room.
    std::string const text =
        ranks.pass(draw_exchange(c.shape, Pattern::random, seed), seed, kSchedules[seed]);
    if (seed == 0) {
      EXPECT_EQ(text, "");
    } else {
      EXPECT_NE(text.find(seed == 1 ? "had given up" : "memory for"), std::string::npos) << text;
    }
  }
}

// Of x, by the kernel: five a row, of which the last has 16 bytes.
TEST(FusedForward, RowsOfSeveralPieces) {
  for (Transfer const transfer : {Transfer::direct, Transfer::once}) {
    expect_right({.shape = shape(1, 40, 4104, 64, 2, 1, transfer)});
  }
}

// Stores of x that arrive long after they were read from shared memory.
TEST(FusedForward, RowsThatArriveLate) {
  for (Transfer const transfer : {Transfer::direct, Transfer::once}) {
    Case const c = {.shape = shape(2, 24, 64, 64, 4, 2, transfer)};
    std::uint64_t const seed = transfer == Transfer::once ? 1 : 2;
    ASSERT_TRUE(Ranks::copies_x(c.shape, seed));
    ASSERT_EQ(Ranks(c).pass(draw_exchange(c.shape, Pattern::random, seed), seed,
                            {.seed = seed, .burst = 64, .copies = 2000}),
              "");
  }
}

// Two tiles of three blocks: pairs that share weights, in either direction, and pairs that share rows. B has whole
// groups of 64 rows, as halves of it are shared only then.
TEST(FusedForward, PairsOfEveryKind) {
  expect_right({.shape = shape(1, 330, 320, 192, 1, 1, Transfer::direct), .ctas = 4});
}

// Words of blocks that no pass has had for 2^31 passes.
TEST(FusedForward, BlocksThatWereNeverDoneAreNotDone) {
  for (Transfer const transfer : kTransfers) {
    Case const c = {.shape = shape(2, 40, 64, 64, 4, 2, transfer)};
    Ranks ranks(c, (std::uint32_t{1} << 31) - 1);
    for (std::uint64_t pass = 0; pass < 5; ++pass) {
      Exchange exchange = draw_exchange(c.shape, Pattern::random, pass);
      if (pass < 2) {
        for (auto& ids : exchange.ids) std::fill(ids.begin(), ids.end(), -1);
      }
      ASSERT_EQ(ranks.pass(exchange, pass + 1, kSchedules[pass % std::size(kSchedules)]), "")
          << "transfer " << static_cast<int>(transfer) << ", pass " << pass;
    }
  }
}

// One CTA is no pair; and sums leave no row of each pair to go back.
TEST(FusedForward, WhatIsNotServedIsNotLaunched) {
  for (Case const& c : {Case{.shape = shape(1, 8, 64, 64, 2, 1, Transfer::direct), .ctas = 1},
                        Case{.shape = shape(2, 8, 64, 64, 2, 1, Transfer::dedup), .keeps = true}}) {
    EXPECT_EQ(Ranks(c).pass(draw_exchange(c.shape, Pattern::random, 1), 1, kSchedules[0]),
              "not launched");
  }
}

TEST(FusedForward, DelaysAtEveryWait) {
  for (Transfer const transfer : kTransfers) {
    expect_right({.shape = shape(2, 20, 64, 64, 4, 2, transfer), .ctas = 2}, 200'000);
  }
}

TEST(FusedForward, ARankThatGivesUpSendsNothingWrong) {
  int given_up = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Case const c = {.shape = shape(2, 24, 64, 64, 4, 2, kTransfers[seed % 3])};
    Ranks ranks(c);
    emulator::Schedule const schedule = {.seed = seed, .burst = 1 + static_cast<int>(seed % 64)};
    Exchange const exchange = draw_exchange(c.shape, Pattern::random, seed);
    ASSERT_EQ(ranks.hasty_pass(exchange, seed, schedule, 1 << seed % 20), "") << "seed " << seed;
    given_up += ranks.status(0).ok() ? 0 : 1;
  }
  EXPECT_GE(given_up, 5);
}

// What it sends until it ends may be void, and with few tokens others hardly wait.
TEST(FusedForward, WhatARankThatGaveUpSentIsNotTrusted) {
  for (Transfer const transfer : kTransfers) {
    Case const c = {.shape = shape(2, 3, 64, 64, 4, 2, transfer)};
    Ranks ranks(c);
    ranks.give_up();
    std::string const text =
        ranks.pass(draw_exchange(c.shape, Pattern::random, 1), 1, kSchedules[0]);
    EXPECT_NE(text.find("rank 0 had given up"), std::string::npos) << "rank 1 says: " << text;
  }
}

TEST(FusedForward, ARankThatDoesNotComeIsReported) {
  Case const c = {.shape = shape(3, 8, 64, 64, 3, 1, Transfer::direct)};
  Ranks ranks(c);
  EXPECT_EQ(ranks.pass(draw_exchange(c.shape, Pattern::random, 1), 1, kSchedules[0]), "");
  for (std::string const& text : ranks.without(2, kSchedules[0])) {
    EXPECT_TRUE(text.find("the word of rank 2 is 0, expected 2") != std::string::npos ||
                text.find("had given up") != std::string::npos)
        << text;
  }
}

// The word of rank 0 has reached rank 1 alone: from that one the others learn who gave up first.
TEST(FusedForward, WhoLeavesTellsAllRanks) {
  Ranks ranks({.shape = shape(4, 8, 64, 64, 4, 1, Transfer::direct)});
  ranks.give_up();
  for (std::string const& text : ranks.without(0, kSchedules[0])) {
    EXPECT_NE(text.find("rank 0 had given up"), std::string::npos) << text;
  }
}

// Sums on their owner: of two rows, of up to four, of more, of more than eight, each with columns that do not fill a
// warp's loads.
TEST(FusedForward, SumsOfAnyNumberOfRows) {
  expect_right({.shape = shape(4, 6, 1160, 64, 12, 4, Transfer::dedup)});
  expect_right({.shape = shape(2, 9, 584, 64, 12, 7, Transfer::dedup), .ctas = 4});
  expect_right({.shape = shape(2, 5, 296, 64, 32, 24, Transfer::dedup)});
}

// Sums take tokens in groups: of six, two and one where they have five, twelve and all of 32 choices, with more tokens
// for a warp than two groups have.
TEST(FusedForward, AnyNumberOfChoices) {
  for (Transfer const transfer : {Transfer::direct, Transfer::once}) {
    expect_right({.shape = shape(1, 230, 64, 64, 6, 5, transfer), .ctas = 2});
    expect_right({.shape = shape(2, 70, 64, 64, 14, 12, transfer), .ctas = 2});
    expect_right({.shape = shape(1, 20, 64, 64, 32, 32, transfer), .ctas = 2});
  }
}

}  // namespace
}  // namespace tessera::dist

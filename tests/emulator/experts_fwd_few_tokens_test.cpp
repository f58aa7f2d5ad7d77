// SPDX-License-Identifier: Apache-2.0
// The experts of few tokens in one launch, from the sources that GPUs get: bit for bit the sums of their definition, in
// every schedule, by few CTAs and by more than there are jobs.
#include "cuda/kernels/experts_fwd_few_tokens.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <ostream>
#include <string>
#include <vector>

#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::cuda {

struct FewTokensCase {
  std::vector<int> rows;  // of each expert
  int hidden, intermediate;
  ActivationKind activation = ActivationKind::swiglu;
  bool bias = false, interleaved = false, stores_h = true;
  int ctas = 2;
  bool in_place = false, weighted = true, varies = true;
  bool nan = false;  // in the first row of x, with a sign
};

void PrintTo(FewTokensCase const& c, std::ostream* out) {
  *out << "rows " << ::testing::PrintToString(c.rows) << " d " << c.hidden << " n "
       << c.intermediate << " kind " << static_cast<int>(c.activation) << " ctas " << c.ctas
       << (c.bias ? " bias" : "") << (c.interleaved ? " in turns" : "")
       << (c.in_place ? " in place" : "") << (c.varies ? "" : " top 2");
}

namespace {

using emulator::Bits;
using emulator::fill;
using emulator::Memory;
using emulator::round;
using emulator::widen;

struct SmallRings {
  static constexpr FewTokensConfig config{.warps = 2, .stages = 2, .stage_k = 64};
};
struct LongRings {
  static constexpr FewTokensConfig config{.warps = 1, .stages = 4, .stage_k = 128};
};

// Products in the order of the kernel: of 16 those of elements 4q and 4q + 1 for q of 0 to 3, then 4q + 2 and 4q + 3.
float dot_of_steps(Bits const* x, Bits const* w, int count) {
  float sum = 0;
  for (int first = 0; first < count; first += 16) {
    for (int i = 0; i < 16; ++i) {
      int const k = first + i % 8 / 2 * 4 + i / 8 * 2 + i % 2;
      if (k < count) sum += widen(x[k]) * widen(w[k]);
    }
  }
  return sum;
}

class Experts {
 public:
  explicit Experts(FewTokensCase const& c)
      : c_(c),
        gated_(Activation{.kind = c.activation}.gated()),
        halves_(gated_ ? 2 : 1),
        experts_(static_cast<int>(c.rows.size())),
        offsets_(experts_ + 1),
        w_up_(std::int64_t{experts_} * halves_ * c.intermediate * c.hidden),
        b_up_(std::int64_t{experts_} * halves_ * c.intermediate),
        w_down_(std::int64_t{experts_} * c.hidden * c.intermediate),
        b_down_(std::int64_t{experts_} * c.hidden) {
    offsets_[0] = 0;
    for (int e = 0; e < experts_; ++e) {
      offsets_[e + 1] = offsets_[e] + c.rows[static_cast<std::size_t>(e)];
    }
    rows_ = offsets_[experts_];
    // A capacity behind the rows, which nobody reads or writes.
    capacity_ = rows_ + 3;
    fill(w_up_.get(), static_cast<std::int64_t>(w_up_.size()), 1, 0.5f);
    fill(b_up_.get(), static_cast<std::int64_t>(b_up_.size()), 2, 1.0f);
    fill(w_down_.get(), static_cast<std::int64_t>(w_down_.size()), 3, 0.5f);
    fill(b_down_.get(), static_cast<std::int64_t>(b_down_.size()), 4, 1.0f);
    fill(x_.get(), kTokens * kMostColumns, 5, 1.0f);
    for (int r = 0; r < kMostRows; ++r) index_[r] = r < rows_ ? (5 * r + 2) % kTokens : -1;
    make_slots();
    if (c.nan) x_[index_[0] * std::int64_t{kMostColumns}] = 0xffff;
  }

  // Runs all launches of a call, twice; says what is wrong, or nothing.
  template <class Config>
  std::string run(emulator::Schedule const& schedule) {
    for (int time = 0; time < 2; ++time) {
      // Nobody may rely on what an earlier call has left. Whoever makes the tables clears a, and y in its workspace.
      fill_with(0xffff, h_, o_);
      fill_with(0, a_);
      fill_with(c_.in_place ? 0xffff : 0, y_);
      if (launch_experts_fwd_few_tokens_config<Config>(arguments(), c_.ctas, nullptr) !=
          cudaSuccess) {
        return "launch";
      }
      std::string fault = emulator::run(schedule);
      if (fault.empty()) fault = compare();
      if (fault.empty()) fault = compare_y();
      if (!fault.empty()) return fault;
    }
    return {};
  }

 private:
  static constexpr int kTokens = 6, kMostRows = 80, kMostColumns = 320, kPadding = 8;

  void make_slots() {
    int slot = 0;
    token_offsets_[0] = 0;
    for (int t = 0; t < kTokens; ++t) {
      int const count = c_.varies ? std::vector{3, 0, 11, 1, 0, 2}[static_cast<std::size_t>(t)] : 2;
      for (int i = 0; i < count; ++i, ++slot) {
        inverse_[slot] = rows_ == 0 || slot % 4 == 1 ? -1 : (7 * slot + 3) % rows_;
        scores_[slot] = 0.25f + 0.125f * static_cast<float>(slot % 5);
      }
      token_offsets_[t + 1] = slot;
    }
  }

  WeightRows half(Memory<Bits> const& memory, int which, std::int64_t columns) const {
    bool const turns = c_.interleaved && gated_;
    std::int64_t const n = c_.intermediate;
    return {.gmem = memory.get() + (turns ? which * columns : which * n * columns),
            .expert_stride = halves_ * n * columns,
            .row_stride = turns ? 2 * columns : columns,
            .column_stride = 1,
            .block = n};
  }

  ExpertsFwdArguments arguments() const {
    std::int64_t const d = c_.hidden, n = c_.intermediate;
    ExpertsFwdArguments out = {};
    out.up.x = {.gmem = x_.get(), .rows = kTokens, .pitch = kMostColumns};
    out.up.gmem_gather_index = index_.get();
    out.up.gmem_expert_offsets = offsets_.get();
    for (int which = 0; which < halves_; ++which) {
      out.up.w_up[which] = half(w_up_, which, d);
      if (c_.bias) out.up.b_up[which] = half(b_up_, which, 1);
    }
    out.up.activation = {.kind = c_.activation};
    out.up.gmem_h = c_.stores_h ? h_.get() : nullptr;
    out.up.gmem_a = a_.get();
    out.up.rows = capacity_;
    out.up.hidden = d;
    out.up.intermediate = n;
    out.up.experts = experts_;
    out.down.gmem_a = a_.get();
    out.down.gmem_expert_offsets = offsets_.get();
    out.down.w_down = {.gmem = w_down_.get(),
                       .expert_stride = d * n,
                       .row_stride = n,
                       .column_stride = 1,
                       .block = d};
    if (c_.bias) {
      out.down.b_down = {.gmem = b_down_.get(),
                         .expert_stride = d,
                         .row_stride = 1,
                         .column_stride = 0,
                         .block = d};
    }
    out.down.gmem_y = y_.get();
    out.down.rows = capacity_;
    out.down.hidden = d;
    out.down.intermediate = n;
    out.down.experts = experts_;
    out.aggregate = {.gmem_y = y_.get(),
                     .gmem_scores = c_.weighted ? scores_.get() : nullptr,
                     .gmem_inverse_permutation = inverse_.get(),
                     .gmem_token_offsets = c_.varies ? token_offsets_.get() : nullptr,
                     .gmem_o = o_.get(),
                     .o_pitch = d + kPadding,
                     .adds_to_o = false,
                     .tokens = kTokens,
                     .hidden = d,
                     .top_k = 2};
    out.has_aggregate = !c_.in_place;
    out.gmem_ticket = ticket_.get();
    return out;
  }

  int expert_of(int row) const {
    int expert = 0;
    while (row >= offsets_[expert + 1]) ++expert;
    return expert;
  }

  Bits a_at(std::int64_t at) const { return static_cast<Bits>(~a_[at]); }
  // Rows of o itself are as they are.
  Bits y_at(std::int64_t at) const { return static_cast<Bits>(c_.in_place ? y_[at] : ~y_[at]); }

  std::string compare_y() const {
    std::int64_t const d = c_.hidden, n = c_.intermediate;
    std::vector<Bits> a(static_cast<std::size_t>(n));
    for (int r = 0; r < rows_; ++r) {
      int const e = expert_of(r);
      for (int i = 0; i < c_.intermediate; ++i) a[static_cast<std::size_t>(i)] = a_at(r * n + i);
      for (int i = 0; i < c_.hidden; ++i) {
        std::int64_t const column = e * d + i;
        float const sum = dot_of_steps(a.data(), w_down_.get() + column * n, c_.intermediate);
        Bits const wanted = round(sum + (c_.bias ? widen(b_down_[column]) : 0.0f));
        if (y_at(r * d + i) != wanted) return where("y", r, i);
      }
    }
    if (!is_untouched(y_, rows_ * d, c_.in_place ? 0xffff : 0)) {
      return "y behind the last row is written";
    }
    if (c_.in_place) return {};
    for (int t = 0; t < kTokens; ++t) {
      for (int i = 0; i < c_.hidden; ++i) {
        float sum = 0;
        for (int slot = token_offsets_[t]; slot < token_offsets_[t + 1]; ++slot) {
          if (inverse_[slot] < 0) continue;
          float const value = widen(y_at(inverse_[slot] * d + i));
          sum = std::fma(c_.weighted ? scores_[slot] : 1.0f, value, sum);
        }
        if (o_[t * (d + kPadding) + i] != round(sum)) return where("o", t, i);
      }
    }
    return {};
  }

  std::string compare() const {
    std::int64_t const d = c_.hidden, n = c_.intermediate;
    for (int r = 0; r < rows_; ++r) {
      Bits const* const x = x_.get() + index_[r] * std::int64_t{kMostColumns};
      int const e = expert_of(r);
      for (int i = 0; i < c_.intermediate; ++i) {
        Bits h[2] = {};
        for (int which = 0; which < halves_; ++which) {
          WeightRows const w = half(w_up_, which, d), b = half(b_up_, which, 1);
          float const sum =
              dot_of_steps(x, static_cast<Bits const*>(w.gmem) + w.row_offset(e, i), c_.hidden);
          Bits const bias = static_cast<Bits const*>(b.gmem)[b.row_offset(e, i)];
          h[which] = round(sum + (c_.bias ? widen(bias) : 0.0f));
          std::int64_t const at = (std::int64_t{r} * halves_ + which) * n + i;
          if (c_.stores_h && h_[at] != h[which])
            return where("h", r, static_cast<int>(which * n) + i);
        }
        float const a = gemm::activate({.kind = c_.activation}, widen(h[0]), widen(h[1]));
        if (a_at(r * n + i) != round(a)) return where("a", r, i);
      }
    }
    if (!is_untouched(a_, rows_ * n, 0)) return "a behind the last row is written";
    if (!is_untouched(h_, c_.stores_h ? rows_ * halves_ * n : 0, 0xffff)) return "h is written";
    if (ticket_[0] != 0) return "the counter is left at " + std::to_string(ticket_[0]);
    return {};
  }

  template <class... Memories>
  static void fill_with(Bits bits, Memories const&... memories) {
    (std::fill_n(memories.get(), memories.size(), bits), ...);
  }
  static bool is_untouched(Memory<Bits> const& memory, std::int64_t from, Bits wanted) {
    return std::all_of(memory.get() + from, memory.get() + memory.size(),
                       [&](Bits bits) { return bits == wanted; });
  }
  static std::string where(char const* what, int row, int column) {
    return std::string(what) + " of row " + std::to_string(row) + " column " +
           std::to_string(column);
  }

  FewTokensCase c_;
  bool gated_;
  int halves_, experts_, rows_ = 0, capacity_ = 0;
  Memory<std::int32_t> offsets_;
  Memory<Bits> w_up_, b_up_, w_down_, b_down_;
  Memory<Bits> x_{kTokens * kMostColumns}, h_{2 * kMostRows * kMostColumns},
      a_{kMostRows * kMostColumns}, y_{kMostRows * kMostColumns},
      o_{kTokens * (kMostColumns + kPadding)};
  Memory<std::int32_t> index_{kMostRows}, inverse_{64}, token_offsets_{kTokens + 1}, ticket_{1, 0};
  Memory<float> scores_{64};
};

std::vector<FewTokensCase> const& cases() {
  using Kind = ActivationKind;
  static std::vector<FewTokensCase> const all = {
      {.rows = {1, 0, 2, 0, 3}, .hidden = 64, .intermediate = 32},
      {.rows = {0, 9, 17, 0, 1}, .hidden = 40, .intermediate = 24, .bias = true, .ctas = 3},
      {.rows = {2, 8},
       .hidden = 72,
       .intermediate = 40,
       .activation = Kind::geglu,
       .bias = true,
       .interleaved = true,
       .stores_h = false},
      {.rows = {1, 5},
       .hidden = 24,
       .intermediate = 56,
       .activation = Kind::relu2,
       .bias = true,
       .varies = false},
      {.rows = {3, 0, 4},
       .hidden = 8,
       .intermediate = 8,
       .activation = Kind::gelu,
       .ctas = 1,
       .weighted = false},
      {.rows = {4, 3},
       .hidden = 88,
       .intermediate = 16,
       .activation = Kind::clamped_swiglu,
       .bias = true,
       .ctas = 4},
      {.rows = {2, 1, 1},
       .hidden = 48,
       .intermediate = 48,
       .activation = Kind::reglu,
       .in_place = true},
      {.rows = {0, 0}, .hidden = 48, .intermediate = 16},
      {.rows = {1}, .hidden = 32, .intermediate = 8, .ctas = 9},
      {.rows = {7, 2}, .hidden = 200, .intermediate = 136, .activation = Kind::silu},
  };
  return all;
}

class ExpertsFwdFewTokensOf : public ::testing::TestWithParam<FewTokensCase> {};

TEST_P(ExpertsFwdFewTokensOf, AreThoseOfTheDefinition) {
  for (emulator::Schedule const& schedule : emulator::kSchedules) {
    SCOPED_TRACE(schedule.seed);
    Experts experts(GetParam());
    EXPECT_EQ(experts.run<SmallRings>(schedule), "");
    EXPECT_EQ(experts.run<LongRings>(schedule), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, ExpertsFwdFewTokensOf, ::testing::ValuesIn(cases()));

TEST(ExpertsFwdFewTokens, AsALayerHasThem) {
  Experts experts({.rows = {3, 0, 1, 8}, .hidden = 312, .intermediate = 264, .bias = true});
  EXPECT_EQ(experts.run<::tessera::cuda::ExpertsFwdFewTokens>(emulator::kSchedules[0]), "");
}

// No value of a or y is the NaN 0xffff, whose inverse, 0, says that a value is not there.
TEST(ExpertsFwdFewTokens, WaitForNoNaN) {
  Experts experts({.rows = {2, 0, 3}, .hidden = 48, .intermediate = 24, .nan = true});
  EXPECT_EQ(experts.run<SmallRings>(emulator::kSchedules[2]), "");
}

TEST(ExpertsFwdFewTokens, MoreExpertsThanThreads) {
  std::vector<int> rows(70, 0);
  rows[3] = rows[33] = rows[69] = 1;
  Experts experts({.rows = rows, .hidden = 16, .intermediate = 8});
  EXPECT_EQ(experts.run<SmallRings>(emulator::kSchedules[1]), "");
}

}  // namespace
}  // namespace tessera::cuda

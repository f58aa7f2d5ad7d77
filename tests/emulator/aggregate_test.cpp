// SPDX-License-Identifier: Apache-2.0
// aggregate from the sources that GPUs get: sums of slots in their order, bit for bit, for any numbers of slots.
#include "cuda/kernels/aggregate.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "tests/emulator/emulator.hpp"
#include "tests/emulator/late.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::cuda {

struct AggregateCase {
  int tokens, hidden, top_k;
  std::vector<int> slots{};  // of tokens, in turns; empty: top_k, without offsets
  double sentinels = 0;
  bool weighted = true, adds = false;
  int o_padding = 0;
  bool some_add = false;  // of those that add, two tokens in three do
};

void PrintTo(AggregateCase const& c, std::ostream* out) {
  *out << "T " << c.tokens << " d " << c.hidden << " K " << c.top_k << " slots "
       << ::testing::PrintToString(c.slots) << (c.weighted ? "" : " plain")
       << (c.adds ? " adds" : "") << (c.some_add ? " for some" : "");
}

namespace {

using emulator::Bits;
using emulator::Memory;

template <int kSlots>
struct FewTokens : AggregateRing {
  static constexpr int kManyItems = 1;
  static constexpr int item_slots(int) { return kSlots; }
};

float widen(float value) { return value; }
float widen(Bits value) { return emulator::widen(value); }
template <class Value>
Value rounded(float value) {
  if constexpr (std::is_same_v<Value, float>) {
    return value;
  } else {
    return emulator::round(value);
  }
}

// Element is what the kernel has, Value what the host has of it.
template <class Element>
struct Problem {
  using Value = std::conditional_t<std::is_same_v<Element, float>, float, Bits>;

  explicit Problem(AggregateCase const& c)
      : shape(c), pitch(c.hidden + c.o_padding), o(c.tokens * pitch), before(c.tokens * pitch) {
    std::mt19937_64 random(static_cast<std::uint64_t>(c.tokens * 1000 + c.hidden));
    std::uniform_real_distribution<float> draw(-1, 1);
    auto const at = [&](int t) { return static_cast<std::size_t>(t) % c.slots.size(); };
    for (int t = 0; t < c.tokens; ++t) {
      offsets.push_back(offsets.back() + (c.slots.empty() ? c.top_k : c.slots[at(t)]));
      adds.push_back(c.some_add && t % 3 == 1 ? 0 : static_cast<std::uint8_t>(1 + t % 200));
    }
    auto const slots = static_cast<std::size_t>(offsets.back());
    for (std::size_t i = 0; i < slots; ++i) {
      bool const sentinel = draw(random) < 2 * c.sentinels - 1;
      // Rows in another order than slots.
      inverse.push_back(sentinel ? -1 : static_cast<std::int32_t>((i * 7 + 3) % slots));
      scores.push_back(sentinel ? std::numeric_limits<float>::quiet_NaN() : draw(random));
    }
    y = std::make_unique<Memory<Value>>(static_cast<std::int64_t>(slots) * c.hidden);
    for (std::size_t i = 0; i < y->size(); ++i) y->get()[i] = rounded<Value>(draw(random));
    for (std::size_t i = 0; i < before.size(); ++i) {
      before.get()[i] = i % 5 == 0 ? rounded<Value>(-0.0f) : rounded<Value>(draw(random));
    }
  }

  AggregateArguments arguments() const {
    return {.gmem_y = y->get(),
            .gmem_scores = shape.weighted ? scores.data() : nullptr,
            .gmem_inverse_permutation = inverse.data(),
            .gmem_token_offsets = shape.slots.empty() ? nullptr : offsets.data(),
            .gmem_o = o.get(),
            .o_pitch = pitch,
            .adds_to_o = shape.adds,
            .gmem_adds = shape.some_add ? adds.data() : nullptr,
            .tokens = shape.tokens,
            .hidden = shape.hidden,
            .top_k = shape.top_k};
  }

  Value expected(int t, int column) const {
    float sum = 0;
    if (shape.adds && adds[static_cast<std::size_t>(t)] != 0)
      sum += widen(before[t * pitch + column]);
    for (int slot = offsets[static_cast<std::size_t>(t)];
         slot < offsets[static_cast<std::size_t>(t) + 1]; ++slot) {
      auto const i = static_cast<std::size_t>(slot);
      if (inverse[i] < 0) continue;
      float const value = widen((*y)[std::int64_t{inverse[i]} * shape.hidden + column]);
      sum = std::fma(shape.weighted ? scores[i] : 1.0f, value, sum);
    }
    return rounded<Value>(sum);
  }

  // Returns what is wrong after a launch, or nothing.
  std::string run(std::function<cudaError_t(AggregateArguments const&)> const& launch,
                  emulator::Schedule const& schedule) {
    std::memcpy(o.get(), before.get(), o.size() * sizeof(Value));
    if (launch(arguments()) != cudaSuccess) return "launch";
    std::string const fault = emulator::run(schedule);
    if (!fault.empty()) return fault;
    for (int t = 0; t < shape.tokens; ++t) {
      for (int column = 0; column < pitch; ++column) {
        std::int64_t const at = t * pitch + column;
        Value const wanted = column < shape.hidden ? expected(t, column) : before[at];
        if (std::memcmp(&o[at], &wanted, sizeof wanted) == 0) continue;
        return "token " + std::to_string(t) + " column " + std::to_string(column) + " is " +
               std::to_string(widen(o[at])) + ", not " + std::to_string(widen(wanted));
      }
    }
    return {};
  }

  AggregateCase shape;
  std::int64_t pitch;
  Memory<Value> o, before;
  std::unique_ptr<Memory<Value>> y;
  std::vector<std::int32_t> offsets{0}, inverse;
  std::vector<std::uint8_t> adds{};
  std::vector<float> scores;
};

template <class Config, class Element>
void expect_ring(AggregateCase const& c, std::size_t number) {
  SCOPED_TRACE(::testing::PrintToString(c));
  Problem<Element> problem(c);
  auto const& schedule = emulator::kSchedules[number % 4];
  EXPECT_EQ(problem.run(
                [](AggregateArguments const& args) {
                  return launch_aggregate_ring_config<Config, Element>(args, nullptr);
                },
                schedule),
            "");
}

// Twice beside another kernel: the counter is left as the next launch expects it.
void expect_library(AggregateCase const& c, std::size_t number) {
  SCOPED_TRACE(::testing::PrintToString(c));
  Problem<__nv_bfloat16> problem(c);
  std::uint32_t counter = 0;
  auto const alone = [](AggregateArguments const& args) {
    return launch_aggregate<__nv_bfloat16>(args, nullptr);
  };
  auto const beside = [&](AggregateArguments const& args) {
    return launch_aggregate_beside<__nv_bfloat16>({args, &counter}, 1, nullptr);
  };
  EXPECT_EQ(problem.run(alone, emulator::kSchedules[number % 4]), "");
  for (std::size_t pass = 1; pass < 3; ++pass) {
    EXPECT_EQ(problem.run(beside, emulator::kSchedules[(number + pass) % 4]), "");
    EXPECT_EQ(counter, 0u);
  }
}

// Tokens with none, one, the usual number, more than a ring, than lanes and than two windows of slots.
std::vector<AggregateCase> varying_cases() {
  return {
      {.tokens = 1, .hidden = 8, .top_k = 8, .slots = {1}},
      {.tokens = 1, .hidden = 264, .top_k = 8, .slots = {0}},
      {.tokens = 23, .hidden = 264, .top_k = 8, .slots = {8}},
      {.tokens = 37, .hidden = 520, .top_k = 8, .slots = {8, 9, 7, 8, 8, 10, 0, 8}},
      {.tokens = 41, .hidden = 264, .top_k = 8, .slots = {0, 1, 40, 0, 0, 9, 16, 17, 31, 33, 8}},
      {.tokens = 29,
       .hidden = 328,
       .top_k = 5,
       .slots = {0, 0, 0, 0, 0, 0, 3, 70, 32, 24},
       .sentinels = 0.3,
       .o_padding = 8},
      {.tokens = 67,
       .hidden = 40,
       .top_k = 8,
       .slots = {7, 9, 8, 12, 1},
       .sentinels = 0.1,
       .weighted = false,
       .adds = true,
       .o_padding = 16,
       .some_add = true},
      {.tokens = 19, .hidden = 256, .top_k = 6, .slots = {5, 11}, .sentinels = 1.1, .adds = true},
      {.tokens = 50, .hidden = 16, .top_k = 8, .slots = {0}},
  };
}

TEST(Aggregate, VaryingSlots) {
  std::size_t number = 0;
  for (AggregateCase const& c : varying_cases()) {
    if (!c.adds) {
      expect_ring<AggregateRing, __nv_bfloat16>(c, number);
      expect_ring<FewTokens<32>, __nv_bfloat16>(c, number + 1);
      expect_ring<FewTokens<300>, __nv_bfloat16>(c, number + 2);
      expect_ring<FewTokens<32>, float>(c, number + 3);
    }
    expect_library(c, number++);
  }
}

// As the library chooses, through its launchers.
TEST(Aggregate, AnyTopK) {
  std::size_t number = 0;
  for (int const top_k : {1, 2, 3, 4, 8, 10, 35}) {
    for (bool const varies : {false, true}) {
      AggregateCase c{.tokens = 21,
                      .hidden = 264,
                      .top_k = top_k,
                      .sentinels = 0.1,
                      .weighted = number % 3 != 0,
                      .adds = number % 4 == 1,
                      .some_add = number % 8 == 5};
      if (varies) c.slots = {top_k, top_k + 1, top_k - 1, top_k};
      expect_library(c, number++);
    }
  }
}

// The kernel of a fixed number of slots waits for them, and so does the ring.
TEST(Aggregate, RowsOfTheKernelAhead) {
  for (std::vector<int> const& slots : {std::vector<int>{}, {4, 5}}) {
    Problem<__nv_bfloat16> problem({.tokens = 40, .hidden = 264, .top_k = 4, .slots = slots});
    for (emulator::Schedule const& schedule : emulator::kSchedules) {
      Memory<Bits> coming(static_cast<std::int64_t>(problem.y->size()));
      EXPECT_EQ(problem.run(
                    [&](AggregateArguments args) {
                      emulator::write_late(nullptr, *problem.y, coming);
                      args.gmem_y = coming.get();
                      return launch_aggregate<__nv_bfloat16>(args, nullptr);
                    },
                    schedule),
                "");
    }
  }
}

TEST(Aggregate, RingRefusesToAddToO) {
  Problem<float> problem({.tokens = 5, .hidden = 8, .top_k = 4, .slots = {4, 5}, .adds = true});
  EXPECT_EQ((launch_aggregate_ring_config<AggregateRing, float>(problem.arguments(), nullptr)),
            cudaErrorInvalidValue);
}

}  // namespace
}  // namespace tessera::cuda

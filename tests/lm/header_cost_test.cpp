// SPDX-License-Identifier: Apache-2.0
// The cost of a header of n tensors, in comparisons of names and bytes asked of the allocator instead of time: twice
// the tensors may cost little more than twice as much. A reader that compares every name with every other is seen to
// fail.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lm/safetensors.hpp"

namespace {

std::uint64_t comparisons = 0, allocated = 0;

}  // namespace

// What std::string compares by; the C library's own is not called in this program.
extern "C" int memcmp(void const* a, void const* b, std::size_t bytes) noexcept {
  ++comparisons;
  auto const* const x = static_cast<unsigned char const*>(a);
  auto const* const y = static_cast<unsigned char const*>(b);
  for (std::size_t i = 0; i < bytes; ++i) {
    if (x[i] != y[i]) return x[i] < y[i] ? -1 : 1;
  }
  return 0;
}

void* operator new(std::size_t bytes) {
  allocated += bytes;
  if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace tessera::lm {
namespace {

constexpr std::int64_t kTensors = 4000;

std::vector<TensorEntry> entries(std::int64_t tensors) {
  std::vector<TensorEntry> made;
  for (std::int64_t i = 0; i < tensors; ++i) {
    auto const begin = static_cast<std::uint64_t>(4 * i);
    // Names of one length: a comparison of others would end before their letters.
    made.push_back({"w" + std::to_string(100'000 + i), "F32", {1}, begin, begin + 4});
  }
  return made;
}

struct Cost {
  double comparisons, bytes;
};

Cost cost_of(std::function<void()> const& work) {
  comparisons = allocated = 0;
  work();
  return {static_cast<double>(comparisons), static_cast<double>(allocated)};
}

/// How much more `work(2n)` costs than `work(n)`.
Cost growth(std::function<void(std::int64_t)> const& work) {
  Cost const once = cost_of([&] { work(kTensors); }), twice = cost_of([&] { work(2 * kTensors); });
  return {twice.comparisons / std::max(once.comparisons, 1.0), twice.bytes / once.bytes};
}

// n log n from 4000 to 8000 is 2.17; containers that double may add a half.
constexpr double kLinear = 2.6;

TEST(HeaderCost, OfReadingIsLinear) {
  Cost const grown = growth([](std::int64_t tensors) {
    std::string const header = safetensors_header({}, entries(tensors));
    Cost const reading = cost_of([&] {
      EXPECT_EQ(
          parse_safetensors_header(header, static_cast<std::uint64_t>(4 * tensors)).tensors.size(),
          static_cast<std::size_t>(tensors));
    });
    EXPECT_GT(reading.comparisons,
              static_cast<double>(tensors));  // names are compared, and counted
  });
  EXPECT_LT(grown.comparisons, kLinear);
  EXPECT_LT(grown.bytes, kLinear);
}

TEST(HeaderCost, OfWritingIsLinear) {
  Cost const grown = growth([](std::int64_t tensors) {
    auto const made = entries(tensors);
    cost_of([&] { EXPECT_FALSE(safetensors_header({}, made).empty()); });
  });
  EXPECT_LT(grown.comparisons, kLinear);
  EXPECT_LT(grown.bytes, kLinear);
}

TEST(HeaderCost, OfComparingEveryNameWithEveryOtherIsSeen) {
  Cost const grown = growth([](std::int64_t tensors) {
    std::string const header = safetensors_header({}, entries(tensors));
    cost_of([&] {
      EXPECT_EQ(nlohmann::ordered_json::parse(header).size(), static_cast<std::size_t>(tensors));
    });
  });
  EXPECT_GT(grown.comparisons, 3.5);
}

}  // namespace
}  // namespace tessera::lm

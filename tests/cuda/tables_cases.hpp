// SPDX-License-Identifier: Apache-2.0
// Calls of metadata, and the tables by their definition: for tests on a GPU and of emulated kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

namespace tessera::routing_test {

struct TablesCase {
  char const* name;
  std::int64_t tokens;
  std::int32_t top_k, experts;
  double sentinels = 0;
  bool varies = false;  // 0 .. 2K slots per token
  bool int64_ids = false;
  std::int32_t only_expert = -1;  // all slots go there
};

struct Tables {
  std::vector<std::int32_t> expert_offsets, sort_permutation, gather_index, inverse_permutation,
      words;
};

// The words of the kernels behind, which read none where there is no slot: so many that three CTAs clear them beside
// the tables of one block. Then one that is none of them, elements of the tables that belong to none, and one more.
constexpr std::int32_t kClearedWords = 9001, kUnused = 3, kNotCleared = 77;
constexpr std::int32_t kWords = kClearedWords + 1 + kUnused + 1;

struct Slots {
  std::vector<std::int64_t> ids;
  std::vector<std::int32_t> token_offsets;
};

inline Slots make_slots(TablesCase const& c) {
  std::mt19937_64 random(99);
  Slots slots;
  slots.token_offsets.push_back(0);
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    auto const count = c.varies ? std::int32_t(random() % std::uint64_t(2 * c.top_k + 1)) : c.top_k;
    slots.token_offsets.push_back(slots.token_offsets.back() + count);
    for (std::int32_t k = 0; k < count; ++k) {
      bool const sentinel = double(random() % 10000) < 10000 * c.sentinels;
      std::int64_t const outside[] = {-1, c.experts, std::int64_t{1} << 31,
                                      -(std::int64_t{1} << 31)};
      std::int64_t id =
          c.only_expert >= 0 ? c.only_expert : std::int64_t(random() % std::uint64_t(c.experts));
      if (sentinel) id = outside[random() % (c.int64_ids ? 4 : 2)];
      slots.ids.push_back(id);
    }
  }
  return slots;
}

// The definition, walked slot by slot.
inline Tables host_tables(TablesCase const& c, Slots const& slots) {
  std::size_t const count = slots.ids.size();
  Tables out;
  out.expert_offsets.assign(std::size_t(c.experts) + 1, 0);
  auto const valid = [&](std::int64_t id) { return id >= 0 && id < c.experts; };
  for (std::int64_t id : slots.ids) {
    if (valid(id)) ++out.expert_offsets[std::size_t(id) + 1];
  }
  for (std::int32_t e = 0; e < c.experts; ++e) {
    out.expert_offsets[std::size_t(e) + 1] += out.expert_offsets[std::size_t(e)];
  }
  out.words.assign(kWords, 0);
  out.words[kClearedWords] = out.words.back() = kNotCleared;
  out.sort_permutation.assign(count, -1);
  out.gather_index.assign(count, 0);
  out.inverse_permutation.assign(count, -1);
  std::vector<std::int32_t> next(out.expert_offsets.begin(), out.expert_offsets.end() - 1);
  std::int32_t token = 0;
  for (std::size_t j = 0; j < count; ++j) {
    if (!valid(slots.ids[j])) continue;
    while (slots.token_offsets[std::size_t(token) + 1] <= std::int64_t(j)) ++token;
    auto const row = std::size_t(next[std::size_t(slots.ids[j])]++);
    out.inverse_permutation[j] = std::int32_t(row);
    out.sort_permutation[row] = std::int32_t(j);
    out.gather_index[row] = token;
  }
  return out;
}

// Prints where tables differ first.
inline bool agree(Tables const& a, Tables const& b) {
  auto const same = [](char const* name, std::vector<std::int32_t> const& x,
                       std::vector<std::int32_t> const& y) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (x[i] == y[i]) continue;
      std::printf("%s[%zu] = %d, not %d\n", name, i, x[i], y[i]);
      return false;
    }
    return true;
  };
  return same("expert_offsets", a.expert_offsets, b.expert_offsets) &&
         same("sort_permutation", a.sort_permutation, b.sort_permutation) &&
         same("gather_index", a.gather_index, b.gather_index) &&
         same("inverse_permutation", a.inverse_permutation, b.inverse_permutation) &&
         (a.sort_permutation.empty() || same("words", a.words, b.words));
}

}  // namespace tessera::routing_test

// SPDX-License-Identifier: Apache-2.0
// How many cases are drawn at random, and from which seed: `.ci/run night` asks for more than the deep tier, and for
// other ones every night.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace tessera::emulator {

struct RandomCases {
  std::uint32_t seed, count;
};

// TESSERA_RANDOM_SEED and TESSERA_RANDOM_CASES, or else what is given; prints both.
inline RandomCases random_cases(RandomCases otherwise) {
  auto const read = [](char const* name, std::uint32_t value) {
    char const* const text = std::getenv(name);
    return text != nullptr ? static_cast<std::uint32_t>(std::strtoul(text, nullptr, 10)) : value;
  };
  RandomCases const out{read("TESSERA_RANDOM_SEED", otherwise.seed),
                        read("TESSERA_RANDOM_CASES", otherwise.count)};
  std::printf("%u cases from TESSERA_RANDOM_SEED=%u\n", out.count, out.seed);
  return out;
}

}  // namespace tessera::emulator

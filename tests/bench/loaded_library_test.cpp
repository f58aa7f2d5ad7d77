// SPDX-License-Identifier: Apache-2.0
// Builds that a benchmark compares have one soname. The loader must not take the second for the first.
#include "bench/loaded_library.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

namespace tessera::bench {
namespace {

int number_of(void* build) { return reinterpret_cast<int (*)()>(dlsym(build, "number"))(); }

TEST(LoadedLibrary, BuildsOfOneSonameAreApart) {
  void* const first = load_build(std::string(BUILDS) + "/1/libnumbered_build.so");
  std::filesystem::current_path(std::string(BUILDS) + "/2");
  void* const second = load_build("libnumbered_build.so");
  EXPECT_EQ(number_of(first), 1);
  EXPECT_EQ(number_of(second), 2);
}

}  // namespace
}  // namespace tessera::bench

// SPDX-License-Identifier: Apache-2.0
#include "tests/lm/support.hpp"

#include <stdlib.h>  // mkdtemp

#include <fstream>
#include <iterator>

#include "lm/random.hpp"

namespace tessera::lm {

namespace fs = std::filesystem;

std::vector<std::uint8_t> random_text(std::int64_t size, std::uint64_t seed) {
  std::vector<std::uint8_t> text;
  for (std::int64_t i = 0; i < size; ++i) {
    std::uint64_t const bits = random_bits(seed, Stream::sampling, static_cast<std::uint64_t>(i));
    bool const repeats = i > 0 && bits % 4 == 0;
    text.push_back(repeats ? text.back() : static_cast<std::uint8_t>('a' + bits / 4 % 26));
  }
  return text;
}

TemporaryFolder::TemporaryFolder() {
  std::string name = (fs::temp_directory_path() / "tessera_lm_XXXXXX").string();
  path_ = ::mkdtemp(name.data());
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void write_text(fs::path const& path, std::string const& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

std::string read_text(fs::path const& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace tessera::lm

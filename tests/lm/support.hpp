// SPDX-License-Identifier: Apache-2.0
// What the tests of the language model share.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "lm/config.hpp"
#include "lm/corpus.hpp"
#include "lm/error.hpp"
#include "tessera/context.hpp"

namespace tessera::lm {

inline Context cpu_context(std::int32_t threads) {
  return take(Context::create({.device = {}, .num_threads = threads}));
}

inline ModelConfig small_config() {
  return {.hidden = 32,
          .intermediate = 16,
          .layers = 2,
          .heads = 4,
          .kv_heads = 2,
          .head_dim = 8,
          .context = 40,
          .experts = 5,
          .top_k = 2};
}

/// Bytes with something to learn: letters that tend to repeat.
std::vector<std::uint8_t> random_text(std::int64_t size, std::uint64_t seed);

inline std::vector<float> to_vector(std::span<float const> values) {
  return {values.begin(), values.end()};
}

/// A folder of its own, gone with the object.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(TemporaryFolder const&) = delete;
  TemporaryFolder& operator=(TemporaryFolder const&) = delete;
  [[nodiscard]] std::filesystem::path const& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

void write_text(std::filesystem::path const& path, std::string const& text);
std::string read_text(std::filesystem::path const& path);

}  // namespace tessera::lm

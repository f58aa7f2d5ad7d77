// SPDX-License-Identifier: Apache-2.0
// A checkpoint rewritten with its experts in another layout, or back under Hugging Face's names. No bit of a
// weight changes; the memory taken is that of one expert, whatever the size of the checkpoint; the new folder
// appears whole or not at all.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/shape.hpp"

namespace tessera::huggingface {

struct ConvertOptions {
  std::filesystem::path from;
  std::filesystem::path to;                   ///< must not exist, or be an empty folder
  std::optional<WeightLayout> layout;         ///< nothing: as Hugging Face stores the model
  std::uint64_t shard_bytes = 5'000'000'000;  ///< where shards are cut anew
  std::atomic<bool> const* stop = nullptr;    ///< ends the conversion; nothing is left
  std::function<void(std::uint64_t done, std::uint64_t total)> report = {};  ///< bytes written
};

struct ConvertSummary {
  bool stopped = false;
  std::string from_layout, to_layout;
  std::size_t moe_layers = 0;
  std::size_t tensors = 0;  ///< in the new checkpoint
  std::uint64_t bytes = 0;  ///< of tensors
  std::vector<std::string> files;
  std::vector<std::string> left_behind;  ///< what else was in `from` and did not come along
};

/// Throws lm::InputError (nothing to convert, quantised weights, a folder in the way) and lm::EnvironmentError
/// (disk full).
ConvertSummary convert(ConvertOptions const& options);

}  // namespace tessera::huggingface

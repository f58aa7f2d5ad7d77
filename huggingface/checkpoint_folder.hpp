// SPDX-License-Identifier: Apache-2.0
// A folder with a checkpoint: model.safetensors, or model.safetensors.index.json and its shards, and what else
// lies there. Headers are read and checked; tensors stay on the disk until they are asked for.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lm/safetensors.hpp"

namespace tessera::huggingface {

/// A tensor and the file that holds it.
struct StoredTensor {
  std::size_t file = 0;  ///< index in CheckpointFolder::files
  lm::TensorEntry const* entry = nullptr;
};

class CheckpointFolder {
 public:
  /// Throws lm::InputError for a folder without a whole checkpoint: no weights, a shard that is missing or does
  /// not hold what the index says, a tensor twice, an index that names files elsewhere.
  explicit CheckpointFolder(std::filesystem::path const& folder);

  [[nodiscard]] std::filesystem::path const& path() const noexcept { return path_; }
  /// Weight files by name, in ascending order.
  [[nodiscard]] std::vector<std::string> const& file_names() const noexcept { return names_; }
  [[nodiscard]] lm::SafetensorsFile const& file(std::size_t i) const { return files_[i]; }
  /// The index as it stands; nothing for a single file.
  [[nodiscard]] std::optional<std::string> const& index_text() const noexcept { return index_; }
  /// All tensors, file by file, in the order of their data.
  [[nodiscard]] std::vector<StoredTensor> const& tensors() const noexcept { return tensors_; }
  [[nodiscard]] StoredTensor const* find(std::string const& name) const;

  void read(StoredTensor const& tensor, std::uint64_t offset, std::span<std::byte> bytes) {
    files_[tensor.file].read_bytes(*tensor.entry, offset, bytes);
  }

  /// Files beside the weights that belong to the model, and those that do not come along: weights of other
  /// formats, other safetensors files, folders.
  [[nodiscard]] std::vector<std::string> const& companions() const noexcept { return companions_; }
  [[nodiscard]] std::vector<std::string> const& left_behind() const noexcept {
    return left_behind_;
  }

 private:
  void read_index();
  void open(std::string const& name);
  void list_others();

  std::filesystem::path path_;
  std::vector<std::string> names_;
  std::deque<lm::SafetensorsFile> files_;
  std::optional<std::string> index_;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, std::size_t, std::less<>> positions_;  // of names in tensors_
  std::vector<std::string> companions_, left_behind_;
};

}  // namespace tessera::huggingface

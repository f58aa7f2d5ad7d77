// SPDX-License-Identifier: Apache-2.0
// A folder that appears whole or not at all.
#pragma once

#include <cstdint>
#include <filesystem>

namespace tessera::huggingface {

/// Made beside its target under another name; gone again unless it takes its place.
class NewFolder {
 public:
  /// Throws lm::InputError where something but an empty folder is in the way, or nothing can be made there.
  explicit NewFolder(std::filesystem::path target);
  ~NewFolder();
  NewFolder(NewFolder const&) = delete;
  NewFolder& operator=(NewFolder const&) = delete;

  [[nodiscard]] std::filesystem::path const& path() const noexcept { return path_; }
  /// Throws lm::EnvironmentError where the disk has less space than that.
  void require_space(std::uint64_t bytes) const;
  /// Renames it to its target. Throws lm::EnvironmentError.
  void take_place();

 private:
  std::filesystem::path target_, path_;
};

}  // namespace tessera::huggingface

// SPDX-License-Identifier: Apache-2.0
// Files that are either the old ones or the new ones, never half of each.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace tessera::lm {

/// A file being written beside `target`; gone again unless it is renamed into place. Throws EnvironmentError.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path const& target);
  ~AtomicFile();
  AtomicFile(AtomicFile const&) = delete;
  AtomicFile& operator=(AtomicFile const&) = delete;

  void write(std::span<std::byte const> bytes);
  /// Flushes to the disk first.
  void rename_into_place();

 private:
  [[noreturn]] void fail() const;

  std::filesystem::path target_, path_;
  int descriptor_ = -1;
  bool renamed_ = false;
};

/// Makes renames in `folder` last.
void flush_folder(std::filesystem::path const& folder);

/// Writes the pieces, one after the other, into a temporary file beside `path`, flushes it to the disk and
/// renames it over `path`. Throws EnvironmentError; `path` is then as it was.
void write_atomically(std::filesystem::path const& path,
                      std::span<std::span<std::byte const> const> pieces);
void write_atomically(std::filesystem::path const& path, std::string_view text);

/// The whole file. Throws InputError if it cannot be read or holds more than `max_bytes`.
std::string read_file(std::filesystem::path const& path, std::size_t max_bytes);

/// Creates the folder (and its parents) unless it exists. Throws InputError.
void make_folder(std::filesystem::path const& folder);

/// make_folder(), and tries that files can be made in it. Throws InputError.
void make_writable_folder(std::filesystem::path const& folder);

/// While it lives, no other one can be had for the same folder, not by another process either. It goes with a
/// folder that is renamed. Holds nothing where the file system has no locks or the folder may not be read.
class FolderLock {
 public:
  FolderLock() = default;
  /// Throws InputError where the folder is locked or not there.
  explicit FolderLock(std::filesystem::path const& folder);
  ~FolderLock();
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&& other) noexcept;

 private:
  int descriptor_ = -1;
};

}  // namespace tessera::lm

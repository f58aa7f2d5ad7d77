// SPDX-License-Identifier: Apache-2.0
#include "lm/files.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>
#include <utility>

#include "lm/error.hpp"

namespace tessera::lm {

namespace fs = std::filesystem;

namespace {

// True if the folder still has its name.
bool is_named(int descriptor, fs::path const& folder) {
  struct stat opened{}, named{};
  return ::fstat(descriptor, &opened) == 0 && ::stat(folder.c_str(), &named) == 0 &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

}  // namespace

AtomicFile::AtomicFile(fs::path const& target)
    : target_(target),
      path_(target.parent_path() / fmt::format(".{}.{}", target.filename().string(), ::getpid())),
      descriptor_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {
  if (descriptor_ < 0) fail();
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!renamed_) ::unlink(path_.c_str());
}

void AtomicFile::write(std::span<std::byte const> bytes) {
  while (!bytes.empty()) {
    ssize_t const written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail();
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void AtomicFile::rename_into_place() {
  if (::fsync(descriptor_) != 0) fail();
  if (::close(std::exchange(descriptor_, -1)) != 0) fail();
  if (::rename(path_.c_str(), target_.c_str()) != 0) fail();
  renamed_ = true;
  flush_folder(target_.parent_path());
}

void AtomicFile::fail() const {
  throw EnvironmentError(
      fmt::format("{}: cannot be written: {}", target_.string(), std::strerror(errno)));
}

void flush_folder(fs::path const& folder) {
  fs::path const named = folder.empty() ? fs::path(".") : folder;
  if (int const opened = ::open(named.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); opened >= 0) {
    ::fsync(opened);
    ::close(opened);
  }
}

void write_atomically(fs::path const& path, std::span<std::span<std::byte const> const> pieces) {
  AtomicFile file(path);
  for (auto const piece : pieces) file.write(piece);
  file.rename_into_place();
}

void write_atomically(fs::path const& path, std::string_view text) {
  std::span<std::byte const> const piece = std::as_bytes(std::span(text));
  write_atomically(path, std::span(&piece, 1));
}

std::string read_file(fs::path const& path, std::size_t max_bytes) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) {
    throw InputError(fmt::format("{}: {}", path.string(),
                                 fs::exists(path, error) ? "not a file" : "no such file"));
  }
  std::ifstream file(path, std::ios::binary);
  std::string text;
  char buffer[1 << 16];
  while (file.read(buffer, sizeof buffer), file.gcount() > 0) {
    text.append(buffer, static_cast<std::size_t>(file.gcount()));
    if (text.size() > max_bytes) {
      throw InputError(fmt::format("{}: larger than {} bytes", path.string(), max_bytes));
    }
  }
  if (!file.eof()) {
    throw InputError(fmt::format("{}: cannot be read: {}", path.string(), std::strerror(errno)));
  }
  return text;
}

void make_folder(fs::path const& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error || !fs::is_directory(folder)) {
    throw InputError(fmt::format("{}: cannot be created as a folder: {}; choose another --out",
                                 folder.string(),
                                 error ? error.message() : std::string("something else is there")));
  }
}

void make_writable_folder(fs::path const& folder) {
  make_folder(folder);
  try {
    AtomicFile const probe(folder / "probe");
  } catch (EnvironmentError const& failure) {
    throw InputError(fmt::format("{}; choose another --out", failure.what()));
  }
}

FolderLock::FolderLock(fs::path const& folder) {
  constexpr int kTries = 10;  // an end also where every look gives the folder another inode
  for (int tries = 1;; ++tries) {
    FolderLock opened;
    opened.descriptor_ = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (opened.descriptor_ < 0) {
      if (errno == EACCES) return;
      throw InputError(fmt::format("{}: cannot be opened as a folder: {}; choose another --out",
                                   folder.string(), std::strerror(errno)));
    }
    int failure = 0;
    while ((failure = ::flock(opened.descriptor_, LOCK_EX | LOCK_NB)) != 0 && errno == EINTR) {
    }
    if (failure != 0) {
      if (errno != EWOULDBLOCK) return;  // ENOLCK, EOPNOTSUPP, ..: there are no locks here
      throw InputError(
          fmt::format("{}: another run is writing there; choose another --out", folder.string()));
    }
    // Another run may have renamed it between the two calls.
    if (tries < kTries && !is_named(opened.descriptor_, folder)) continue;
    *this = std::move(opened);
    return;
  }
}

FolderLock::~FolderLock() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

FolderLock::FolderLock(FolderLock&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)) {}

FolderLock& FolderLock::operator=(FolderLock&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

}  // namespace tessera::lm

// SPDX-License-Identifier: Apache-2.0
// A file in memory, for parsers that read files.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace tessera::fuzz {

class FileOf {
 public:
  FileOf(std::uint8_t const* data, std::size_t size) : descriptor_(::memfd_create("fuzz", 0)) {
    if (descriptor_ < 0 || ::write(descriptor_, data, size) != static_cast<ssize_t>(size))
      std::abort();
  }
  ~FileOf() { ::close(descriptor_); }
  FileOf(FileOf const&) = delete;
  FileOf& operator=(FileOf const&) = delete;
  [[nodiscard]] std::filesystem::path path() const {
    return "/proc/self/fd/" + std::to_string(descriptor_);
  }

 private:
  int descriptor_;
};

}  // namespace tessera::fuzz

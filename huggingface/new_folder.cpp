// SPDX-License-Identifier: Apache-2.0
#include "huggingface/new_folder.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <system_error>
#include <utility>

#include "lm/error.hpp"
#include "lm/files.hpp"

namespace tessera::huggingface {

namespace fs = std::filesystem;

NewFolder::NewFolder(fs::path target) : target_(std::move(target)) {
  if (!target_.has_filename()) target_ = target_.parent_path();  // a trailing slash
  std::error_code error;
  bool const empty = fs::is_directory(target_, error) && fs::is_empty(target_, error);
  if (fs::exists(target_, error) && !empty) {
    throw lm::InputError(
        fmt::format("{}: something is there already; choose another --to", target_.string()));
  }
  fs::path const parent = target_.parent_path();
  error.clear();
  if (!parent.empty()) fs::create_directories(parent, error);
  // A name that is taken is what another program left: nothing of it may come along.
  std::string const name = fmt::format(".{}.{}", target_.filename().string(), ::getpid());
  for (int number = 0; !error && path_.empty(); ++number) {
    fs::path const path = parent / (number == 0 ? name : fmt::format("{}-{}", name, number));
    if (fs::create_directory(path, error)) path_ = path;
    if (std::error_code ignored; error && fs::exists(fs::symlink_status(path, ignored))) {
      error.clear();
    }
  }
  if (error) {
    throw lm::InputError(fmt::format("{}: cannot be created: {}; choose another --to",
                                     target_.string(), error.message()));
  }
}

NewFolder::~NewFolder() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

void NewFolder::require_space(std::uint64_t bytes) const {
  std::error_code error;
  fs::space_info const space = fs::space(path_, error);
  if (error || space.available >= bytes) return;
  throw lm::EnvironmentError(
      fmt::format("{}: {:.1f} GB are needed, {:.1f} GB are free on that disk", target_.string(),
                  static_cast<double>(bytes) * 1e-9, static_cast<double>(space.available) * 1e-9));
}

void NewFolder::take_place() {
  std::error_code error;
  fs::rename(path_, target_, error);
  if (error) {
    throw lm::EnvironmentError(
        fmt::format("{}: cannot be put into place: {}", target_.string(), error.message()));
  }
  lm::flush_folder(target_.parent_path());
  path_.clear();
}

}  // namespace tessera::huggingface

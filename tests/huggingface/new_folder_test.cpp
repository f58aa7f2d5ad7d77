// SPDX-License-Identifier: Apache-2.0
#include "huggingface/new_folder.hpp"

#include <gtest/gtest.h>
#include <stdlib.h>  // mkdtemp
#include <unistd.h>

#include <fstream>
#include <string>

namespace tessera::huggingface {
namespace {

namespace fs = std::filesystem;

TEST(NewFolder, TakesNothingOverThatWasLeftThere) {
  std::string parent = (fs::temp_directory_path() / "tessera_folder_XXXXXX").string();
  ASSERT_NE(::mkdtemp(parent.data()), nullptr);
  fs::path const work = fs::path(parent) / (".to." + std::to_string(::getpid()));
  fs::create_directory(work);
  std::ofstream(work / "stale") << "x";
  std::ofstream(work.string() + "-1") << "a file";
  {
    NewFolder folder(fs::path(parent) / "to");
    EXPECT_TRUE(fs::is_empty(folder.path()));
    folder.take_place();
  }
  EXPECT_TRUE(fs::is_empty(fs::path(parent) / "to"));
  EXPECT_TRUE(fs::exists(work / "stale"));
  {
    NewFolder const unused(fs::path(parent) / "below" / "other");
  }
  EXPECT_TRUE(fs::is_empty(fs::path(parent) / "below"));
  fs::remove_all(parent);
}

}  // namespace
}  // namespace tessera::huggingface

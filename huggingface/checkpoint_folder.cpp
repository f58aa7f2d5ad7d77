// SPDX-License-Identifier: Apache-2.0
#include "huggingface/checkpoint_folder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <system_error>

#include "lm/checkpoint.hpp"
#include "lm/error.hpp"
#include "lm/files.hpp"
#include "lm/json.hpp"

namespace tessera::huggingface {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr std::size_t kMaxIndexBytes = 1 << 28;

// Weights in formats that this program does not read.
constexpr char const* kOtherWeights[] = {".bin", ".pt",      ".pth", ".gguf",
                                         ".h5",  ".msgpack", ".onnx"};

bool is_weights(fs::path const& name) {
  return name.extension() == ".safetensors" ||
         std::find(std::begin(kOtherWeights), std::end(kOtherWeights), name.extension()) !=
             std::end(kOtherWeights);
}

}  // namespace

CheckpointFolder::CheckpointFolder(fs::path const& folder) : path_(folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    throw lm::InputError(fmt::format("{}: no such folder; a checkpoint is a folder with {} or {}",
                                     folder.string(), lm::kModelFile, lm::kIndexFile));
  }
  bool const single = fs::exists(folder / lm::kModelFile, error),
             sharded = fs::exists(folder / lm::kIndexFile, error);
  if (single == sharded) {
    throw lm::InputError(fmt::format("{}: has {} {} {} {}; a checkpoint has one of them",
                                     folder.string(), single ? "both" : "neither", lm::kModelFile,
                                     single ? "and" : "nor", lm::kIndexFile));
  }
  single ? open(lm::kModelFile) : read_index();
  list_others();
}

void CheckpointFolder::read_index() {
  fs::path const path = path_ / lm::kIndexFile;
  index_ = lm::read_file(path, kMaxIndexBytes);
  json const index = lm::parse_json(*index_, path.string());
  auto const map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || map == index.end() || !map->is_object() || map->empty()) {
    throw lm::InputError(
        fmt::format("{}: weight_map is missing, empty or not an object", path.string()));
  }
  std::map<std::string, std::string> shard_of;
  std::vector<std::string> shards;
  for (auto const& [tensor, shard] : map->items()) {
    bool const plain = shard.is_string() && !shard.get_ref<std::string const&>().empty() &&
                       shard.get_ref<std::string const&>().find('/') == std::string::npos;
    if (!plain) {
      throw lm::InputError(fmt::format("{}: tensor {} is not mapped to a file of this folder",
                                       path.string(), lm::printable(tensor)));
    }
    shard_of[tensor] = shard.get<std::string>();
    shards.push_back(shard_of[tensor]);
  }
  std::sort(shards.begin(), shards.end());
  shards.erase(std::unique(shards.begin(), shards.end()), shards.end());
  for (std::string const& shard : shards) open(shard);
  for (auto const& [tensor, shard] : shard_of) {
    StoredTensor const* const found = find(tensor);
    if (found == nullptr || names_[found->file] != shard) {
      throw lm::InputError(fmt::format("{}: tensor {} is not in {} as the index says",
                                       path.string(), lm::printable(tensor), lm::printable(shard)));
    }
  }
  if (shard_of.size() != tensors_.size()) {
    throw lm::InputError(fmt::format("{}: names {} tensors, the shards hold {}", path.string(),
                                     shard_of.size(), tensors_.size()));
  }
}

void CheckpointFolder::open(std::string const& name) {
  files_.emplace_back(path_ / name);
  names_.push_back(name);
  for (lm::TensorEntry const& entry : files_.back().tensors()) {
    if (!positions_.emplace(entry.name, tensors_.size()).second) {
      throw lm::InputError(fmt::format("{}: tensor {} is in an earlier shard, too",
                                       (path_ / name).string(), lm::printable(entry.name)));
    }
    tensors_.push_back({files_.size() - 1, &entry});
  }
}

StoredTensor const* CheckpointFolder::find(std::string const& name) const {
  auto const found = positions_.find(name);
  return found == positions_.end() ? nullptr : &tensors_[found->second];
}

void CheckpointFolder::list_others() {
  std::error_code error;
  for (fs::directory_entry const& entry : fs::directory_iterator(path_, error)) {
    std::string const name = entry.path().filename().string();
    if (name == lm::kIndexFile || std::find(names_.begin(), names_.end(), name) != names_.end()) {
      continue;
    }
    bool const comes = entry.is_regular_file(error) && !is_weights(entry.path());
    (comes ? companions_ : left_behind_).push_back(name);
  }
  std::sort(companions_.begin(), companions_.end());
  std::sort(left_behind_.begin(), left_behind_.end());
}

}  // namespace tessera::huggingface

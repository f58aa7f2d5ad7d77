// SPDX-License-Identifier: Apache-2.0
#include "huggingface/quantised.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>

#include "lm/error.hpp"
#include "lm/files.hpp"
#include "lm/json.hpp"

namespace tessera::huggingface {

namespace fs = std::filesystem;

namespace {

constexpr std::size_t kMaxConfigBytes = 1 << 20;

[[noreturn]] void refuse(fs::path const& folder, std::string const& format,
                         std::string const& evidence) {
  throw lm::InputError(
      fmt::format("{}: {} weights ({}): their scales belong to blocks of rows and columns, which "
                  "another layout "
                  "would tear apart; convert the model's BF16 version",
                  folder.string(), format, evidence));
}

struct ScaleName {
  std::string_view suffix;
  char const* format;
};

// Says how formats name what stands beside, or instead of, a weight.
constexpr ScaleName kScaleNames[] = {
    {"_blocks", "MXFP4"},      {".weight_scale_inv", "FP8"},    {".weight_scale", "FP8"},
    {".qweight", "quantised"}, {".weight_packed", "quantised"}, {".absmax", "quantised"},
};

}  // namespace

void refuse_quantised(CheckpointFolder const& checkpoint) {
  for (StoredTensor const& tensor : checkpoint.tensors()) {
    std::string const& name = tensor.entry->name;
    if (tensor.entry->dtype.starts_with("F8_")) {
      refuse(checkpoint.path(), "FP8",
             fmt::format("{} is {}", lm::printable(name, 120), tensor.entry->dtype));
    }
    for (ScaleName const& scale : kScaleNames) {
      if (name.ends_with(scale.suffix)) {
        refuse(checkpoint.path(), scale.format, "it has " + lm::printable(name, 120));
      }
    }
  }
  fs::path const path = checkpoint.path() / "config.json";
  std::error_code error;
  if (!fs::exists(path, error)) return;
  auto const config = lm::parse_json(lm::read_file(path, kMaxConfigBytes), path.string(), 64);
  auto const found = config.is_object() ? config.find("quantization_config") : config.end();
  if (!config.is_object() || found == config.end() || found->is_null()) return;
  std::string const method = found->is_object() && found->contains("quant_method")
                                 ? lm::json_string(*found, "quant_method")
                                 : "unnamed";
  refuse(checkpoint.path(), "quantised",
         fmt::format("quant_method {} in config.json", lm::printable(method)));
}

}  // namespace tessera::huggingface

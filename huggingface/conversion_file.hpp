// SPDX-License-Identifier: Apache-2.0
// tessera_conversion.json, left beside a converted checkpoint: what the weights were before, file by file, so that
// the way back gives the same bytes.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "huggingface/expert_groups.hpp"

namespace tessera::huggingface {

inline constexpr char const* kConversionFile = "tessera_conversion.json";

struct Conversion {
  struct File {
    std::string name;
    std::string header;  ///< as it stands in the file
  };
  ExpertForm now;     ///< the checkpoint beside this file
  ExpertForm before;  ///< Hugging Face's
  std::optional<std::string> index;
  std::vector<File> files;
};

std::string to_text(Conversion const& conversion);

/// The conversion file of `folder`, if it has one. Throws lm::InputError for one that is not well-formed.
std::optional<Conversion> load_conversion(std::filesystem::path const& folder);

}  // namespace tessera::huggingface

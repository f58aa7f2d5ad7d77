// SPDX-License-Identifier: Apache-2.0
// The plan of a conversion: every file of the new checkpoint, its header, and where each tensor comes from.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "huggingface/checkpoint_folder.hpp"
#include "huggingface/conversion_file.hpp"
#include "huggingface/convert.hpp"
#include "huggingface/expert_groups.hpp"

namespace tessera::huggingface {

/// A tensor of the new checkpoint.
struct Output {
  lm::TensorEntry entry;
  std::optional<ExpertTensor> expert;  ///< made from a group
  std::string source = {};             ///< else copied from the tensor of that name
};

struct OutputFile {
  std::string name;
  std::string header;
  std::vector<Output> tensors;  ///< in the order of their data
};

struct ConversionPlan {
  ExpertForm form;
  std::vector<OutputFile> files;
  std::optional<std::string> index, conversion;  ///< texts of these two files
};

/// Returns the form of the checkpoint as it is now: converted before, or Hugging Face's.
ExpertForm source_form(CheckpointFolder const& checkpoint,
                       std::optional<Conversion> const& conversion);

/// Plans the new checkpoint; `options` says its layout and where files are cut. Throws lm::InputError for experts that
/// the layout has no place for, and for a checkpoint that its conversion file does not describe any more.
ConversionPlan plan_conversion(CheckpointFolder const& checkpoint, ExpertGroups const& groups,
                               std::optional<Conversion> const& conversion,
                               ConvertOptions const& options);

}  // namespace tessera::huggingface

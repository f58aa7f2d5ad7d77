// SPDX-License-Identifier: Apache-2.0
// Statements of config.json about a checkpoint's experts, compared with what the files hold.
#pragma once

#include "huggingface/checkpoint_folder.hpp"
#include "huggingface/expert_groups.hpp"

namespace tessera::huggingface {

/// Compares experts, hidden and intermediate sizes, dtype, shared experts and the layers that have experts, each where
/// config.json (or the text_config in it) states it. Throws lm::InputError with the field, both values and a remedy;
/// also where config.json is missing or no JSON object.
void check_against_config(CheckpointFolder const& checkpoint, ExpertGroups const& groups);

}  // namespace tessera::huggingface

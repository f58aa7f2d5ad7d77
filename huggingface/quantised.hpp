// SPDX-License-Identifier: Apache-2.0
// Checkpoints whose weights are not numbers of their own.
#pragma once

#include "huggingface/checkpoint_folder.hpp"

namespace tessera::huggingface {

/// Throws lm::InputError with the reason for FP8, MXFP4 and other quantised checkpoints: their scales belong to
/// blocks of rows and columns, which another layout would tear apart.
void refuse_quantised(CheckpointFolder const& checkpoint);

}  // namespace tessera::huggingface

// SPDX-License-Identifier: Apache-2.0
// A run's folder. config.json and model.safetensors are a Hugging Face checkpoint; training_state.safetensors
// alone holds all that resuming needs, so that a run stopped between two writes is still whole.
#pragma once

#include <filesystem>
#include <vector>

#include "lm/config.hpp"
#include "lm/parameters.hpp"
#include "lm/training_state.hpp"

namespace tessera::lm {

inline constexpr char const* kConfigFile = "config.json";
inline constexpr char const* kModelFile = "model.safetensors";
inline constexpr char const* kIndexFile = "model.safetensors.index.json";  ///< of a model in shards
inline constexpr char const* kStateFile = "training_state.safetensors";

struct LoadedModel {
  ModelConfig config;
  std::vector<float> parameters;  ///< by ParameterLayout(config)
};

void save_model(std::filesystem::path const& folder, ModelConfig const& config,
                std::span<float const> parameters);
/// Throws InputError for a checkpoint that is not whole. Allocates no more than the files hold.
LoadedModel load_model(std::filesystem::path const& folder);

void save_state(std::filesystem::path const& folder, TrainingState const& state);
/// Throws InputError, as load_model.
TrainingState load_state(std::filesystem::path const& folder);

}  // namespace tessera::lm

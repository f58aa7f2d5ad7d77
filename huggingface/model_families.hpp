// SPDX-License-Identifier: Apache-2.0
// Families of models that are read by their fields alone; model.cpp lists them beside its own.
#pragma once

#include "huggingface/config_reader.hpp"
#include "huggingface/model.hpp"

namespace tessera::huggingface::parts {

Model afmoe(ConfigReader const& config);
Model aria_text(ConfigReader const& config);
Model deepseek_v2(ConfigReader const& config);
Model granitemoe(ConfigReader const& config);
Model hunyuan_v1_moe(ConfigReader const& config);
Model minimax(ConfigReader const& config);
Model minimax_m2(ConfigReader const& config);

}  // namespace tessera::huggingface::parts

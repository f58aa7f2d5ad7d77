// SPDX-License-Identifier: Apache-2.0
// Argument structs of the public API, filled from a case's data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "verify/memory.hpp"
#include "verify/tensors.hpp"

namespace tessera::verify {

ExpertWeights weight_arguments(LayerData const& data, Memory& memory);

/// Routing inputs, weights and x; no outputs.
MoeForwardArgs forward_inputs(LayerData const& data, Memory& memory, ConstTensor const& x);

/// The tensors, besides routing tables, that forward leaves for backward; what a layer does not save is absent.
struct SavedTensors {
  Tensor h, x8, x_scale, h_scale;
};
SavedTensors saved_tensors(MoeDesc const& desc, Memory& memory);

/// One gradient that backward can write.
struct GradientOutput {
  std::string name;
  DType dtype = DType::fp32;
  std::vector<std::int64_t> shape;
  bool of_weights = false;  ///< written by moe_backward_weights, else by moe_backward_input
};

/// All gradients that the layer of `data` has.
std::vector<GradientOutput> gradient_outputs(LayerData const& data);

/// The member of `args` that `name` stands for.
Tensor& gradient_argument(MoeBackwardArgs& args, std::string const& name);

/// Writes what the buffer holds before backward: initial_gradient() when accumulating, else it stays poisoned.
void initialise_gradient(LayerData const& data, GradientOutput const& output, Tensor const& tensor);

}  // namespace tessera::verify

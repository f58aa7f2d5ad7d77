// SPDX-License-Identifier: Apache-2.0
// Expert weights and their gradients: checked against the desc, then seen as strided matrices.
#pragma once

#include "core/tensor_check.hpp"
#include "cpu/parallel/layer.hpp"
#include "tessera/moe.hpp"

namespace tessera::ops {

void check_weights(MoeDesc const& desc, ExpertWeights const& weights,
                   core::TensorCheck& check) noexcept;
/// Any gradient may be absent.
void check_gradients(MoeDesc const& desc, ExpertGradients const& gradients,
                     core::TensorCheck& check) noexcept;

cpu::UpMatrices<float const> up_matrices(MoeDesc const& desc,
                                         ExpertWeights const& weights) noexcept;
cpu::DownMatrices<float const> down_matrices(MoeDesc const& desc,
                                             ExpertWeights const& weights) noexcept;
cpu::UpBiases<float const> up_biases(MoeDesc const& desc, ExpertWeights const& weights) noexcept;
cpu::DownBiases<float const> down_biases(ExpertWeights const& weights) noexcept;

cpu::UpMatrices<float> up_matrices(MoeDesc const& desc, ExpertGradients const& gradients) noexcept;
cpu::DownMatrices<float> down_matrices(MoeDesc const& desc,
                                       ExpertGradients const& gradients) noexcept;
cpu::UpBiases<float> up_biases(MoeDesc const& desc, ExpertGradients const& gradients) noexcept;
cpu::DownBiases<float> down_biases(ExpertGradients const& gradients) noexcept;

/// A checked [rows, columns] tensor as rows.
inline cpu::ConstRows rows_of(ConstTensor const& tensor) noexcept {
  return {static_cast<float const*>(tensor.data),
          tensor.shape[0] > 1 ? tensor.stride[0] : tensor.shape[1]};
}
inline cpu::MutableRows rows_of(Tensor const& tensor) noexcept {
  return {static_cast<float*>(tensor.data),
          tensor.shape[0] > 1 ? tensor.stride[0] : tensor.shape[1]};
}

}  // namespace tessera::ops

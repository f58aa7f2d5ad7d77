// SPDX-License-Identifier: Apache-2.0
// Expert weights and their gradients: checked against the desc, then seen as strided matrices.
#pragma once

#include "core/tensor_check.hpp"
#include "cpu/parallel/layer.hpp"
#include "tessera/moe.hpp"

namespace tessera::ops {

void visit_weights(MoeDesc const& desc, ExpertWeights const& weights,
                   core::TensorVisitor& visitor) noexcept;
/// Codes that take the place of weights; refused where they do not. `forward`, `backward`: which passes read them.
void visit_weight_codes(MoeDesc const& desc, WeightCodes const& codes, bool forward, bool backward,
                        core::TensorVisitor& visitor) noexcept;
/// Any gradient may be absent; those present are all of core::gradient_dtype.
void visit_gradients(MoeDesc const& desc, ExpertGradients const& gradients,
                     core::TensorVisitor& visitor) noexcept;

// T: the storage type of the desc. Templates of float and Bf16.
template <class T>
cpu::UpMatrices<T const> up_matrices(MoeDesc const& desc, ExpertWeights const& weights) noexcept;
template <class T>
cpu::DownMatrices<T const> down_matrices(MoeDesc const& desc,
                                         ExpertWeights const& weights) noexcept;
template <class T>
cpu::UpBiases<T const> up_biases(MoeDesc const& desc, ExpertWeights const& weights) noexcept;
template <class T>
cpu::DownBiases<T const> down_biases(ExpertWeights const& weights) noexcept;

template <class T>
cpu::UpMatrices<T> up_matrices(MoeDesc const& desc, ExpertGradients const& gradients) noexcept;
template <class T>
cpu::DownMatrices<T> down_matrices(MoeDesc const& desc, ExpertGradients const& gradients) noexcept;
template <class T>
cpu::UpBiases<T> up_biases(MoeDesc const& desc, ExpertGradients const& gradients) noexcept;
template <class T>
cpu::DownBiases<T> down_biases(ExpertGradients const& gradients) noexcept;

/// A checked [rows, columns] tensor as rows.
template <class T = float>
cpu::Rows<T const> rows_of(ConstTensor const& tensor) noexcept {
  return {static_cast<T const*>(tensor.data),
          tensor.shape[0] > 1 ? tensor.stride[0] : tensor.shape[1]};
}
template <class T = float>
cpu::Rows<T> rows_of(Tensor const& tensor) noexcept {
  return {static_cast<T*>(tensor.data), tensor.shape[0] > 1 ? tensor.stride[0] : tensor.shape[1]};
}

/// Calls run(T{}) with a value of the storage type of a checked desc.
template <class Run>
void with_storage(DType dtype, Run&& run) noexcept {
  dtype == DType::bf16 ? run(cpu::Bf16{}) : run(float{});
}
/// Calls run(T{}, W{}), W being what the router is stored in.
template <class Run>
void with_router_storage(MoeDesc const& desc, Run&& run) noexcept {
  with_storage(desc.dtype, [&]<class T>(T x) {
    desc.router_storage() == desc.dtype ? run(x, T{}) : run(x, float{});
  });
}

}  // namespace tessera::ops

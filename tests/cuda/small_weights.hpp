// SPDX-License-Identifier: Apache-2.0
// A small layer of any layout of its weights, and where an element of them lies.
#pragma once

#include "cuda/layer/arguments.hpp"

namespace tessera::cuda {

constexpr std::int64_t kExperts = 3, kHidden = 5, kIntermediate = 8;

inline MoeDesc desc_of(WeightLayout const& layout, ActivationKind activation) {
  MoeDesc desc;
  desc.shape = {.tokens = 4,
                .hidden = kHidden,
                .intermediate = kIntermediate,
                .experts = kExperts,
                .top_k = 2};
  desc.dtype = DType::bf16;
  desc.layout = layout;
  desc.activation.kind = activation;
  desc.bias = true;
  return desc;
}

/// Elements from the start of `tensor` to element (expert, row, column) of `rows`.
inline std::int64_t place(WeightRows const& rows, ConstTensor const& tensor, std::int64_t expert,
                          std::int64_t row, std::int64_t column) {
  auto const start = static_cast<char const*>(rows.gmem) - static_cast<char const*>(tensor.data);
  return start / static_cast<std::int64_t>(dtype_bytes(tensor.dtype)) +
         rows.row_offset(expert, row) + column * rows.column_stride;
}

}  // namespace tessera::cuda

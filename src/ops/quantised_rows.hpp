// SPDX-License-Identifier: Apache-2.0
// x8 and h as codes, which a layer that quantises saves, and the shapes of their scales.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/tensor_check.hpp"
#include "cpu/parallel/low_precision.hpp"
#include "tessera/low_precision.hpp"

namespace tessera::ops {

/// Type and shape of the scales of a saved tensor.
struct ScaleShape {
  DType dtype = DType::fp32;
  std::int64_t rows = 0, columns = 0;
};
inline ScaleShape x_scale_shape(MoeDesc const& desc) noexcept {
  DType const dtype = desc.precision == Precision::mxfp8 ? DType::e8m0 : DType::fp32;
  return {dtype, desc.shape.tokens, desc.shape.hidden / desc.scale_block()};
}
inline ScaleShape h_scale_shape(MoeDesc const& desc) noexcept {
  std::int64_t const blocks = desc.up_width() * desc.shape.intermediate / desc.scale_block();
  if (desc.precision == Precision::mxfp8) return {DType::e8m0, desc.num_slots(), blocks};
  return {DType::fp32, blocks, padded_scale_rows(desc.num_slots())};
}
inline std::size_t tensor_bytes(ScaleShape const& shape) noexcept {
  return dtype_bytes(shape.dtype) * static_cast<std::size_t>(shape.rows * shape.columns);
}

/// Visits what forward saves beside h (`h` false: h is not saved), as an output or an input; refused where nothing is
/// quantised.
template <class AnyTensor>
void visit_saved_scales(MoeDesc const& desc, AnyTensor const& x8, AnyTensor const& x_scale,
                        AnyTensor const& h_scale, bool x, bool h,
                        core::TensorVisitor& visitor) noexcept {
  auto const add = [&](char const* name, AnyTensor const& tensor, bool is_saved,
                       ScaleShape const& shape) {
    if (!is_saved) {
      return visitor.absent(name, tensor,
                            desc.quantises() ? "this pass has no use for it"
                                             : "only precision fp8 and mxfp8 save it");
    }
    if constexpr (std::is_same_v<AnyTensor, Tensor>) {
      visitor.output(name, tensor, shape.dtype, {shape.rows, shape.columns});
    } else {
      visitor.input(name, tensor, shape.dtype, {shape.rows, shape.columns});
    }
    visitor.contiguous(name, tensor);
  };
  MoeShape const& s = desc.shape;
  x = x && desc.quantises();
  h = h && desc.quantises();
  add("x8", x8, x, {DType::fp8_e4m3, s.tokens, s.hidden});
  add("x_scale", x_scale, x, x_scale_shape(desc));
  add("h_scale", h_scale, h, h_scale_shape(desc));
}

/// Checked tensors as the ops read and write them; null where they are absent.
inline cpu::QuantisedRows x8_rows(MoeDesc const& desc, void const* codes,
                                  void const* scales) noexcept {
  std::int64_t const blocks = desc.shape.hidden / desc.scale_block();
  return {static_cast<core::E4m3*>(const_cast<void*>(codes)),
          desc.shape.hidden,
          {const_cast<void*>(scales), blocks, 1, 0, 0}};
}
inline cpu::QuantisedRows h8_rows(MoeDesc const& desc, void const* codes,
                                  void const* scales) noexcept {
  std::int64_t const width = desc.up_width() * desc.shape.intermediate;
  cpu::ScaleView view{const_cast<void*>(scales), width / desc.scale_block(), 1, 0, 0};
  if (desc.precision != Precision::mxfp8) {
    view.row_stride = 1;
    view.column_stride = padded_scale_rows(desc.num_slots());
  }
  return {static_cast<core::E4m3*>(const_cast<void*>(codes)), width, view};
}

}  // namespace tessera::ops

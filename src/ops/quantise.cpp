// SPDX-License-Identifier: Apache-2.0
// quantise, dequantise: what fits together, then one matrix after another
#include "ops/low_precision.hpp"

#include "core/tensor_check.hpp"
#include "cpu/parallel/quantise.hpp"
#include "ops/weights.hpp"

namespace tessera {
namespace {

using Int = long long;  // for %lld
using core::E4m3;

constexpr std::int64_t kNone = -1;  // there is no such dimension

bool in_range(std::int32_t value, std::int32_t last) noexcept {
  return value >= 0 && value <= last;
}

Status check_block(QuantiseBlock block, ScaleLayout layout) noexcept {
  if (!in_range(static_cast<std::int32_t>(block), 4) ||
      !in_range(static_cast<std::int32_t>(layout), 2)) {
    return Status::invalid("block=%d, layout=%d: not values of their enums; see low_precision.hpp",
                           static_cast<int>(block), static_cast<int>(layout));
  }
  if (layout == ScaleLayout::columns && block != QuantiseBlock::row_128) {
    return Status::invalid("layout=columns with block=%d: only row_128 has it; take matrix",
                           static_cast<int>(block));
  }
  if (layout == ScaleLayout::atoms && !ops::is_mxfp8(block)) {
    return Status::invalid("layout=atoms with block=%d: only blocks of 32 have it; take matrix",
                           static_cast<int>(block));
  }
  return {};
}

/// A matrix, or one for each expert.
struct Matrices {
  std::int64_t experts = kNone, rows = 0, width = 0;
  [[nodiscard]] std::int64_t count() const noexcept { return experts == kNone ? 1 : experts; }
};

Expected<Matrices> matrices_of(char const* name, ConstTensor const& tensor,
                               QuantiseBlock block) noexcept {
  if (tensor.rank != 2 && tensor.rank != 3) {
    return Status::invalid("%s: rank %d; [rows,width] or [E,rows,width] is needed", name,
                           tensor.rank);
  }
  bool const many = tensor.rank == 3;
  Matrices const out{many ? tensor.shape[0] : kNone, tensor.shape[tensor.rank - 2],
                     tensor.shape[tensor.rank - 1]};
  for (int axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.shape[axis] < 0 || tensor.shape[axis] > 0x7fffffff) {
      return Status::invalid("%s: an extent is %lld; it must be in [0, 2^31)", name,
                             static_cast<Int>(tensor.shape[axis]));
    }
  }
  cpu::BlockExtent const extent = cpu::extent_of(block);
  TESSERA_TRY(ops::check_extent("rows", out.rows, extent.rows));
  TESSERA_TRY(ops::check_extent("width", out.width, extent.columns));
  return out;
}

/// Rows that are multiplied and blocks along k, of ScaleLayout::atoms.
struct AtomExtent {
  std::int64_t rows, blocks;
};
AtomExtent atom_extent(QuantiseBlock block, Matrices const& m) noexcept {
  if (block == QuantiseBlock::column_32) return {m.width, m.rows / 32};
  return {m.rows, m.width / 32};
}

/// The scales of one matrix, as [rows, columns]; columns is kNone for atoms, which have one dimension.
struct ScaleShape {
  std::int64_t rows = 0, columns = 0;
  [[nodiscard]] std::int64_t elements() const noexcept {
    return columns == kNone ? rows : rows * columns;
  }
};
ScaleShape scale_shape(QuantiseBlock block, ScaleLayout layout, Matrices const& m) noexcept {
  cpu::BlockExtent const extent = cpu::extent_of(block);
  switch (layout) {
    case ScaleLayout::columns:
      return {m.width / 128, padded_scale_rows(m.rows)};
    case ScaleLayout::atoms: {
      auto const [rows, blocks] = atom_extent(block, m);
      return {scale_atom_bytes(rows, blocks), kNone};
    }
    case ScaleLayout::matrix:
      break;
  }
  return {m.rows / extent.rows, m.width / extent.columns};
}

cpu::ScaleView scale_view(QuantiseBlock block, ScaleLayout layout, Matrices const& m,
                          void* data) noexcept {
  switch (layout) {
    case ScaleLayout::columns:
      return {data, 1, padded_scale_rows(m.rows), 0, 0};
    case ScaleLayout::atoms:
      return {data, 0, 0, atom_extent(block, m).blocks, 0};
    case ScaleLayout::matrix:
      break;
  }
  return {data, m.width / cpu::extent_of(block).columns, 1, 0, 0};
}

/// Calls check(name, tensor, dtype, shape) with the dimension of experts in front, where there is one.
template <class Check>
void with_experts(std::int64_t experts, Check&& check, std::int64_t rows, std::int64_t columns) {
  if (experts == kNone) return columns == kNone ? check({rows}) : check({rows, columns});
  return columns == kNone ? check({experts, rows}) : check({experts, rows, columns});
}

DType scale_dtype(QuantiseBlock block) noexcept {
  return ops::is_mxfp8(block) ? DType::e8m0 : DType::fp32;
}
std::int64_t scale_bytes(QuantiseBlock block) noexcept { return ops::is_mxfp8(block) ? 1 : 4; }

Status check(Context const& context, QuantiseArgs const& args, Matrices const& m) noexcept {
  core::TensorCheck check{context.device()};
  DType const dtype = args.values.dtype == DType::bf16 ? DType::bf16 : DType::fp32;
  using Shape = std::initializer_list<std::int64_t>;
  ScaleShape const scales = scale_shape(args.block, args.layout, m);
  with_experts(
      m.experts, [&](Shape shape) { check.input("values", args.values, dtype, shape); }, m.rows,
      m.width);
  auto const output = [&](char const* name, Tensor const& tensor, DType type) {
    return [&check, name, &tensor, type](Shape shape) {
      check.output(name, tensor, type, shape);
      check.contiguous(name, tensor);
    };
  };
  with_experts(m.experts, output("codes", args.codes, DType::fp8_e4m3), m.rows, m.width);
  if (args.codes_transposed.present()) {
    with_experts(m.experts, output("codes_transposed", args.codes_transposed, DType::fp8_e4m3),
                 m.width, m.rows);
  }
  with_experts(m.experts, output("scales", args.scales, scale_dtype(args.block)), scales.rows,
               scales.columns);
  return check.finish();
}

template <class T>
void run(Context const& context, QuantiseArgs const& args, Matrices const& m) noexcept {
  ConstTensor const& values = args.values;
  std::int64_t const elements = m.rows * m.width;
  std::int64_t const scales = scale_shape(args.block, args.layout, m).elements();
  std::int64_t const pitch = m.rows > 1 ? values.stride[values.rank - 2] : m.width;
  for (std::int64_t e = 0; e < m.count(); ++e) {
    cpu::MatrixView<T const> const view{
        static_cast<T const*>(values.data) + (m.count() > 1 ? e * values.stride[0] : 0), pitch, 1};
    void* const scale =
        ops::place<std::byte>(args.scales.data, e * scales * scale_bytes(args.block));
    cpu::quantise(cpu::QuantiseMatrix<T>{.block = args.block,
                                         .rule = args.rule,
                                         .rows = m.rows,
                                         .width = m.width,
                                         .values = {view},
                                         .codes = ops::place<E4m3>(args.codes.data, e * elements),
                                         .code_pitch = m.width,
                                         .transposed = ops::place<E4m3>(args.codes_transposed.data,
                                                                        e * elements),
                                         .transposed_pitch = m.rows,
                                         .scales = scale_view(args.block, args.layout, m, scale)},
                  context.thread_pool());
  }
}

}  // namespace

Status quantise(Context const& context, QuantiseArgs const& args) noexcept {
  TESSERA_TRY(ops::check_quantising_device(context));
  TESSERA_TRY(check_block(args.block, args.layout));
  TESSERA_TRY(ops::check_rule(args.block, args.rule));
  auto const m = matrices_of("values", args.values, args.block);
  if (!m.ok()) return m.status();
  TESSERA_TRY(check(context, args, m.value()));
  ops::clear(args.scales);
  ops::with_storage(args.values.dtype, [&]<class T>(T) { run<T>(context, args, m.value()); });
  return {};
}

Status dequantise(Context const& context, DequantiseArgs const& args) noexcept {
  TESSERA_TRY(ops::check_quantising_device(context));
  TESSERA_TRY(check_block(args.block, args.layout));
  auto const of_codes = matrices_of("codes", args.codes, args.block);
  if (!of_codes.ok()) return of_codes.status();
  Matrices const& m = of_codes.value();
  ScaleShape const scales = scale_shape(args.block, args.layout, m);
  core::TensorCheck check{context.device()};
  using Shape = std::initializer_list<std::int64_t>;
  auto const input = [&](char const* name, ConstTensor const& tensor, DType type) {
    return [&check, name, &tensor, type](Shape shape) {
      check.input(name, tensor, type, shape);
      check.contiguous(name, tensor);
    };
  };
  with_experts(m.experts, input("codes", args.codes, DType::fp8_e4m3), m.rows, m.width);
  with_experts(m.experts, input("scales", args.scales, scale_dtype(args.block)), scales.rows,
               scales.columns);
  DType const dtype = args.values.dtype == DType::bf16 ? DType::bf16 : DType::fp32;
  with_experts(
      m.experts,
      [&](Shape shape) {
        check.output("values", args.values, dtype, shape);
        check.contiguous("values", args.values);
      },
      m.rows, m.width);
  TESSERA_TRY(check.finish());

  std::int64_t const elements = m.rows * m.width;
  ops::with_storage(dtype, [&]<class T>(T) {
    for (std::int64_t e = 0; e < m.count(); ++e) {
      void* const scale = ops::place<std::byte>(const_cast<void*>(args.scales.data),
                                                e * scales.elements() * scale_bytes(args.block));
      cpu::dequantise(
          cpu::DequantiseMatrix<T>{
              .block = args.block,
              .rows = m.rows,
              .width = m.width,
              .codes = static_cast<E4m3 const*>(args.codes.data) + e * elements,
              .scales = scale_view(args.block, args.layout, m, scale),
              .values = static_cast<T*>(args.values.data) + e * elements},
          context.thread_pool());
    }
  });
  return {};
}

}  // namespace tessera

// SPDX-License-Identifier: Apache-2.0
// quantise_weights: expert weights of any layout to codes that the low-precision GEMMs read
#include "core/tensor_check.hpp"
#include "cpu/parallel/low_precision.hpp"
#include "cuda/layer/backend.hpp"
#include "ops/low_precision.hpp"
#include "ops/support.hpp"
#include "ops/weights.hpp"

namespace tessera {
namespace {

using core::E4m3;
using cpu::up_rows;

Status check(Context const& context, MoeDesc const& desc, ExpertWeights const& weights,
             ScaleRule rule, QuantisedWeights const& out) noexcept {
  std::int64_t const experts = desc.shape.experts, d = desc.shape.hidden,
                     n = desc.shape.intermediate, w = desc.up_width();
  MoeDesc without_bias = desc;
  without_bias.bias = without_bias.weight_codes = false;
  core::TensorCheck check{context.device()};
  ops::visit_weights(without_bias, {weights.w_up, weights.w_gate, weights.w_down, {}, {}, {}},
                     check);
  auto const output = [&](char const* name, Tensor const& tensor, DType dtype,
                          std::initializer_list<std::int64_t> shape) {
    check.output(name, tensor, dtype, shape);
    check.contiguous(name, tensor);
  };
  bool const mxfp8 = ops::is_mxfp8(rule);
  DType const code = DType::fp8_e4m3, scale = mxfp8 ? DType::e8m0 : DType::fp32;
  output("up", out.up, code, {experts, w, n, d});
  output("down", out.down, code, {experts, d, n});
  if (mxfp8) {
    output("up_scales", out.up_scales, scale, {experts, w, scale_atom_bytes(n, d / 32)});
    output("down_scales", out.down_scales, scale, {experts, scale_atom_bytes(d, n / 32)});
  } else {
    output("up_scales", out.up_scales, scale, {experts, n / 128, d / 128, w});
    output("down_scales", out.down_scales, scale, {experts, d / 128, n / 128});
  }
  auto const transposed = [&](char const* name, char const* scales_name, Tensor const& codes,
                              Tensor const& scales, std::int64_t rows, std::int64_t width) {
    if (codes.present()) output(name, codes, code, {experts, rows, width});
    if (!mxfp8) {
      check.absent(scales_name, scales, "the transpose of fp8-block has the scales of its blocks");
    } else if (codes.present()) {
      output(scales_name, scales, scale, {experts, scale_atom_bytes(rows, width / 32)});
    } else {
      check.absent(scales_name, scales, "the transposed codes are absent");
    }
  };
  transposed("up_transposed", "up_transposed_scales", out.up_transposed, out.up_transposed_scales,
             d, w * n);
  transposed("down_transposed", "down_transposed_scales", out.down_transposed,
             out.down_transposed_scales, n, d);
  return check.finish();
}

/// One [rows, width] part of a weight: into codes [rows,width], and into `rows` columns of the transposed ones.
template <class T>
struct WeightPart {
  cpu::GroupedRows<T const> values;
  std::int64_t rows = 0, width = 0;
  E4m3* codes = nullptr;
  E4m3* transposed = nullptr;
  std::int64_t transposed_pitch = 0;
  cpu::ScaleView scales;             ///< fp8-block: of both; mxfp8: of the codes
  cpu::ScaleView transposed_scales;  ///< mxfp8
};

template <class T>
void quantise_part(WeightPart<T> const& part, ScaleRule rule, core::ThreadPool& pool) noexcept {
  cpu::QuantiseMatrix<T> matrix{.block = QuantiseBlock::square_128,
                                .rule = rule,
                                .rows = part.rows,
                                .width = part.width,
                                .values = part.values,
                                .codes = part.codes,
                                .code_pitch = part.width,
                                .transposed = part.transposed,
                                .transposed_pitch = part.transposed_pitch,
                                .scales = part.scales};
  if (!ops::is_mxfp8(rule)) return cpu::quantise(matrix, pool);
  matrix.block = QuantiseBlock::row_32;
  matrix.transposed = nullptr;
  cpu::quantise(matrix, pool);
  if (part.transposed == nullptr) return;
  matrix.block = QuantiseBlock::column_32;
  matrix.codes = nullptr;
  matrix.transposed = part.transposed;
  matrix.scales = part.transposed_scales;
  cpu::quantise(matrix, pool);
}

template <class T>
void quantise_expert(Context const& context, MoeDesc const& desc, ExpertWeights const& weights,
                     ScaleRule rule, QuantisedWeights const& out, std::int64_t e) noexcept {
  std::int64_t const d = desc.shape.hidden, n = desc.shape.intermediate, w = desc.up_width();
  bool const mxfp8 = ops::is_mxfp8(rule);
  auto const up = ops::up_matrices<T>(desc, weights);
  auto const code = [](Tensor const& tensor, std::int64_t element) {
    return ops::place<E4m3>(tensor.data, element);
  };
  for (std::int64_t part = 0; part < w; ++part) {
    bool const gate = w == 2 && part == 0;
    WeightPart<T> todo{.values = up_rows<T>(desc, up, e, gate),
                       .rows = n,
                       .width = d,
                       .codes = code(out.up, (e * w + part) * n * d),
                       .transposed = code(out.up_transposed, e * d * w * n + part * n),
                       .transposed_pitch = w * n,
                       .scales = {},
                       .transposed_scales = {}};
    if (mxfp8) {
      todo.scales = {code(out.up_scales, (e * w + part) * scale_atom_bytes(n, d / 32)), 0, 0,
                     d / 32, 0};
      todo.transposed_scales = {code(out.up_transposed_scales, e * scale_atom_bytes(d, w * n / 32)),
                                0, 0, w * n / 32, part * (n / 32)};
    } else {
      std::int64_t const blocks = n / 128 * (d / 128);
      todo.scales = {static_cast<float*>(out.up_scales.data) + e * blocks * w + part, d / 128 * w,
                     w, 0, 0};
    }
    quantise_part(todo, rule, context.thread_pool());
  }
  WeightPart<T> todo{.values = {ops::down_matrices<T>(desc, weights).of(e)},
                     .rows = d,
                     .width = n,
                     .codes = code(out.down, e * d * n),
                     .transposed = code(out.down_transposed, e * n * d),
                     .transposed_pitch = d,
                     .scales = {},
                     .transposed_scales = {}};
  if (mxfp8) {
    todo.scales = {code(out.down_scales, e * scale_atom_bytes(d, n / 32)), 0, 0, n / 32, 0};
    todo.transposed_scales = {code(out.down_transposed_scales, e * scale_atom_bytes(n, d / 32)), 0,
                              0, d / 32, 0};
  } else {
    todo.scales = {static_cast<float*>(out.down_scales.data) + e * (d / 128) * (n / 128), n / 128,
                   1, 0, 0};
  }
  quantise_part(todo, rule, context.thread_pool());
}

Status quantise_on_cuda(Context const& context, MoeDesc desc, ExpertWeights const& weights,
                        ScaleRule rule, QuantisedWeights const& out, Stream stream) noexcept {
  if (ops::is_mxfp8(rule)) {
    return Status::unsupported(
        "rule=%d on cuda: there quantise_weights makes blocks of 128, whose rules are fp32 and "
        "pow2, "
        "and layers of precision mxfp8 make their codes; take one of these, or a context of the "
        "CPU",
        static_cast<int>(rule));
  }
  desc.precision = Precision::fp8;
  desc.pow2_scales = rule == ScaleRule::pow2;
  TESSERA_TRY(ops::check_supported(context, desc));
  TESSERA_TRY(check(context, desc, weights, rule, out));
  return cuda::quantise_weights(*context.cuda(), desc, weights, out, stream);
}

}  // namespace

Status quantise_weights(Context const& context, MoeDesc const& given, ExpertWeights const& weights,
                        ScaleRule rule, QuantisedWeights const& out, Stream stream) noexcept {
  TESSERA_TRY(
      ops::check_rule(ops::is_mxfp8(rule) ? QuantiseBlock::row_32 : QuantiseBlock::row_128, rule));
  MoeDesc desc = given;
  desc.weight_codes = false;
  if (context.cuda() != nullptr) return quantise_on_cuda(context, desc, weights, rule, out, stream);
  TESSERA_TRY(ops::check_supported(desc));
  std::int64_t const multiple = ops::is_mxfp8(rule) ? 32 : 128;
  TESSERA_TRY(ops::check_extent("hidden", desc.shape.hidden, multiple));
  TESSERA_TRY(ops::check_extent("intermediate", desc.shape.intermediate, multiple));
  TESSERA_TRY(check(context, desc, weights, rule, out));
  if (ops::is_mxfp8(rule)) {
    for (Tensor const* scales : {&out.up_scales, &out.down_scales, &out.up_transposed_scales,
                                 &out.down_transposed_scales}) {
      ops::clear(*scales);
    }
  }
  ops::with_storage(desc.dtype, [&]<class T>(T) {
    for (std::int64_t e = 0; e < desc.shape.experts; ++e) {
      quantise_expert<T>(context, desc, weights, rule, out, e);
    }
  });
  return {};
}

}  // namespace tessera

// SPDX-License-Identifier: Apache-2.0
// value^ = code * scale of what a product reads, along what it sums over: x^, a^, dO^, dh^ by rows; weights in blocks.
#include "cpu/parallel/low_precision.hpp"

#include <algorithm>

#include "cpu/parallel/activation.hpp"

namespace tessera::cpu {
namespace {

using core::E4m3;

/// Most rows of an expert that a task has.
constexpr std::int64_t kTaskRows = 128;

/// Scratch of a task: rows of each of these, then the GEMM's.
struct Scratch {
  float *input, *h, *dh, *a, *da, *a_scaled, *a_row, *scores, *dots, *gemm;
  Scratch(float* base, MoeDesc const& desc) noexcept {
    std::int64_t const d = desc.shape.hidden, n = desc.shape.intermediate;
    std::int64_t const width = desc.up_width() * n;
    auto const take = [&base](std::int64_t floats) {
      float* const at = base;
      base += floats;
      return at;
    };
    input = take(kTaskRows * std::max(d, width));
    h = take(kTaskRows * width);
    dh = take(kTaskRows * width);
    a = take(kTaskRows * n);
    da = take(kTaskRows * n);
    a_scaled = take(kTaskRows * n);
    a_row = take(n);
    scores = take(kTaskRows);
    dots = take(kTaskRows);
    gemm = base;
  }
};

/// One expert's weights and biases as products read them: gate before up.
struct Expert {
  float *up, *down, *b_up, *b_down;  ///< [w*n,d], [d,n], [w*n], [d]
  Expert(float* base, MoeDesc const& desc) noexcept {
    std::int64_t const d = desc.shape.hidden, n = desc.shape.intermediate;
    std::int64_t const width = desc.up_width() * n;
    up = base;
    down = up + width * d;
    b_up = down + d * n;
    b_down = b_up + width;
  }
};

QuantiseBlock row_block(MoeDesc const& desc) noexcept {
  return desc.precision == Precision::mxfp8 ? QuantiseBlock::row_32 : QuantiseBlock::row_128;
}

/// The scales from row `row` on.
ScaleView from_row(MoeDesc const& desc, ScaleView scales, std::int64_t row) noexcept {
  std::int64_t const bytes = desc.precision == Precision::mxfp8 ? 1 : 4;
  scales.data = static_cast<std::byte*>(scales.data) + row * scales.row_stride * bytes;
  return scales;
}

/// Rows in the place of themselves, quantised and dequantised; their codes and scales too where `kept` has a place.
void quantise_rows(MoeDesc const& desc, float* values, std::int64_t rows, std::int64_t width,
                   QuantisedRows const& kept = {}, std::int64_t row = 0) noexcept {
  bool const keeps = kept.codes != nullptr;
  quantise(QuantiseMatrix<float>{.block = row_block(desc),
                                 .rule = scale_rule(desc),
                                 .rows = rows,
                                 .width = width,
                                 .values = {{values, width, 1}},
                                 .codes = keeps ? kept.codes + row * kept.pitch : nullptr,
                                 .code_pitch = kept.pitch,
                                 .scales = keeps ? from_row(desc, kept.scales, row) : ScaleView{},
                                 .dequantised = values,
                                 .dequantised_pitch = width});
}

void quantise_row(MoeDesc const& desc, Bf16 const* values, std::int64_t width,
                  float* dequantised) noexcept {
  quantise(QuantiseMatrix<Bf16>{.block = row_block(desc),
                                .rule = scale_rule(desc),
                                .rows = 1,
                                .width = width,
                                .values = {{values, width, 1}},
                                .dequantised = dequantised,
                                .dequantised_pitch = width});
}

void dequantise_rows(MoeDesc const& desc, QuantisedRows const& from, std::int64_t row,
                     std::int64_t rows, float* values) noexcept {
  dequantise(DequantiseMatrix<float>{.block = row_block(desc),
                                     .rows = rows,
                                     .width = from.pitch,
                                     .codes = from.codes + row * from.pitch,
                                     .scales = from_row(desc, from.scales, row),
                                     .values = values});
}

/// A weight as products read it that sum along its rows (forward), or down its columns.
void load_weight(MoeDesc const& desc, GroupedRows<Bf16 const> const& values, std::int64_t rows,
                 std::int64_t width, bool along_rows, float* out, core::ThreadPool& pool) noexcept {
  QuantiseBlock const block = desc.precision != Precision::mxfp8 ? QuantiseBlock::square_128
                              : along_rows                       ? QuantiseBlock::row_32
                                                                 : QuantiseBlock::column_32;
  quantise(QuantiseMatrix<Bf16>{.block = block,
                                .rule = scale_rule(desc),
                                .rows = rows,
                                .width = width,
                                .values = values,
                                .dequantised = out,
                                .dequantised_pitch = width},
           pool);
}

/// body(i, c): column i of [gate | up] stands in column c of what the layer's w_up, h and dh have.
template <class Body>
void for_each_column(MoeDesc const& desc, Body&& body) noexcept {
  HColumns const at = h_columns(desc);
  std::int64_t const n = desc.shape.intermediate;
  for (std::int64_t first = 0, base = 0; first < n; first += at.run, base += at.run_pitch) {
    for (std::int64_t i = 0; i < at.run; ++i) {
      body(first + i, base + at.gate_first + i * at.stride);
      if (desc.activation.gated()) body(n + first + i, base + at.up_first + i * at.stride);
    }
  }
}

/// Codes of one [rows,width] matrix, and the scales of its blocks of 128 x 128: of a row, or a block of rows, and of a
/// column the strides in elements.
struct CodesView {
  E4m3 const* codes;
  std::int64_t row_stride, column_stride;
  float const* scales;
  std::int64_t scale_row_stride, scale_column_stride;
};

/// Makes of codes what load_weight() makes of the weights that they were made of.
void load_codes(CodesView const& from, std::int64_t rows, std::int64_t width, float* out,
                core::ThreadPool& pool) noexcept {
  constexpr std::int64_t kBlock = 128;
  pool.run(
      rows / kBlock,
      [&](std::int64_t block, int) {
        float const* const scales = from.scales + block * from.scale_row_stride;
        for (std::int64_t r = block * kBlock; r < (block + 1) * kBlock; ++r) {
          E4m3 const* const codes = from.codes + r * from.row_stride;
          for (std::int64_t c = 0; c < width; ++c) {
            out[r * width + c] = to_fp32(codes[c * from.column_stride]) *
                                 scales[c / kBlock * from.scale_column_stride];
          }
        }
      },
      rows * width);
}

/// Gate (part 0) or up of w_up, [n,d], and w_down, [d,n]: forward's codes, or those of the transpose.
CodesView up_codes(Layer<Bf16> const& layer, std::int64_t expert, std::int64_t part,
                   bool along_rows) noexcept {
  WeightCodes const& c = layer.weight_codes;
  std::int64_t const d = layer.hidden(), n = layer.intermediate(), w = layer.desc.up_width();
  auto const* const scales =
      static_cast<float const*>(c.up_scales.data) + expert * (n / 128) * (d / 128) * w + part;
  auto const* const codes =
      static_cast<E4m3 const*>(along_rows ? c.up.data : c.up_transposed.data) + expert * w * n * d;
  if (along_rows) return {codes + part * n * d, d, 1, scales, d / 128 * w, w};
  return {codes + part * n, 1, w * n, scales, d / 128 * w, w};
}
CodesView down_codes(Layer<Bf16> const& layer, std::int64_t expert, bool along_rows) noexcept {
  WeightCodes const& c = layer.weight_codes;
  std::int64_t const d = layer.hidden(), n = layer.intermediate();
  auto const* const scales =
      static_cast<float const*>(c.down_scales.data) + expert * (d / 128) * (n / 128);
  auto const* const codes =
      static_cast<E4m3 const*>(along_rows ? c.down.data : c.down_transposed.data) + expert * d * n;
  if (along_rows) return {codes, n, 1, scales, n / 128, 1};
  return {codes, 1, d, scales, n / 128, 1};
}

void load_up(Layer<Bf16> const& layer, std::int64_t expert, bool along_rows, Expert const& out,
             core::ThreadPool& pool) noexcept {
  std::int64_t const d = layer.hidden(), n = layer.intermediate();
  for (std::int64_t part = 0; part < layer.desc.up_width(); ++part) {
    if (layer.desc.weight_codes) {
      load_codes(up_codes(layer, expert, part, along_rows), n, d, out.up + part * n * d, pool);
      continue;
    }
    bool const gate = layer.desc.activation.gated() && part == 0;
    load_weight(layer.desc, up_rows<Bf16>(layer.desc, layer.w_up, expert, gate), n, d, along_rows,
                out.up + part * n * d, pool);
  }
  auto const& b = layer.b_up;
  if (b.gate == nullptr) return;
  Bf16 const* const gate = b.gate + expert * b.gate_expert_stride;
  for_each_column(layer.desc, [&](std::int64_t i, std::int64_t c) {
    bool const of_up = layer.w_up.separate && c >= n;
    out.b_up[i] = to_fp32(of_up ? b.up[expert * b.up_expert_stride + c - n] : gate[c]);
  });
}

void load_down(Layer<Bf16> const& layer, std::int64_t expert, bool along_rows, Expert const& out,
               core::ThreadPool& pool) noexcept {
  std::int64_t const d = layer.hidden(), n = layer.intermediate();
  if (layer.desc.weight_codes) {
    load_codes(down_codes(layer, expert, along_rows), d, n, out.down, pool);
  } else {
    load_weight(layer.desc, {layer.w_down.of(expert)}, d, n, along_rows, out.down, pool);
  }
  if (layer.b_down.data == nullptr) return;
  for (std::int64_t c = 0; c < d; ++c) out.b_down[c] = to_fp32(layer.b_down.of(expert)[c]);
}

/// body(row, rows, scratch) for all rows of an expert.
template <class Body>
void for_each_task(Layer<Bf16> const& layer, std::int64_t expert, Threads const& threads,
                   Body&& body) noexcept {
  std::int64_t const first = layer.first_row(expert), rows = layer.num_rows(expert);
  threads.pool.run((rows + kTaskRows - 1) / kTaskRows,
                   [&](std::int64_t task, int slot) {
                     std::int64_t const begin = task * kTaskRows;
                     body(first + begin, std::min(kTaskRows, rows - begin),
                          Scratch(threads.scratch(slot), layer.desc));
                   },
                   rows * layer.hidden() * layer.intermediate());
}

/// hb of some rows into scratch.h, from x8 or, where that is null, from x.
void hidden_rows(Layer<Bf16> const& layer, Expert const& expert, Rows<Bf16 const> x,
                 QuantisedRows const& x8, std::int64_t row, std::int64_t rows,
                 Scratch const& scratch) noexcept {
  std::int64_t const d = layer.hidden(), width = layer.up_columns();
  for (std::int64_t r = 0; r < rows; ++r) {
    std::int64_t const token = layer.routing.gather_index[row + r];
    float* const out = scratch.input + r * d;
    x8.codes != nullptr ? dequantise_rows(layer.desc, x8, token, 1, out)
                        : quantise_row(layer.desc, x[token], d, out);
  }
  gemm(rows, width, d, left_operand(ConstMatrix{scratch.input, d, 1}),
       right_operand(ConstMatrix{expert.up, d, 1}.transposed()),
       result(Matrix{scratch.h, width, 1}), scratch.gemm);
  bool const biased = layer.b_up.gate != nullptr;
  for (std::int64_t r = 0; r < rows; ++r) {
    float* const h = scratch.h + r * width;
    for (std::int64_t i = 0; i < width; ++i) {
      h[i] = to_fp32(round_to<Bf16>(biased ? h[i] + expert.b_up[i] : h[i]));
    }
  }
}

/// The desc of a layer whose h has its halves one behind the other.
MoeDesc with_halves(MoeDesc desc) noexcept {
  desc.layout = {};
  return desc;
}

}  // namespace

std::int64_t quantised_scratch(MoeDesc const& desc) noexcept {
  std::int64_t const d = desc.shape.hidden, n = desc.shape.intermediate;
  std::int64_t const width = desc.up_width() * n;
  std::int64_t const gemms =
      std::max({gemm_scratch_floats(kTaskRows, width, d), gemm_scratch_floats(kTaskRows, d, n),
                gemm_scratch_floats(kTaskRows, n, d), gemm_scratch_floats(kTaskRows, d, width)});
  return kTaskRows * (std::max(d, width) + 2 * width + 3 * n + 2) + n + gemms;
}

std::int64_t quantised_expert_floats(MoeDesc const& desc) noexcept {
  std::int64_t const d = desc.shape.hidden, n = desc.shape.intermediate, w = desc.up_width();
  return (w + 1) * n * d + w * n + d;
}

void quantised_forward(Layer<Bf16> const& layer, QuantisedForward const& args,
                       Threads const& threads) noexcept {
  MoeDesc const desc = with_halves(layer.desc);
  std::int64_t const d = layer.hidden(), n = layer.intermediate(), width = layer.up_columns();
  if (args.x8.codes != nullptr) {
    quantise(QuantiseMatrix<Bf16>{.block = row_block(desc),
                                  .rule = scale_rule(desc),
                                  .rows = layer.tokens(),
                                  .width = d,
                                  .values = {args.x.matrix()},
                                  .codes = args.x8.codes,
                                  .code_pitch = d,
                                  .scales = args.x8.scales},
             threads.pool);
  }
  Expert const expert(args.expert, desc);
  for (std::int64_t e = 0; e < layer.experts(); ++e) {
    if (layer.num_rows(e) == 0) continue;
    load_up(layer, e, true, expert, threads.pool);
    load_down(layer, e, true, expert, threads.pool);
    for_each_task(layer, e, threads,
                  [&](std::int64_t row, std::int64_t rows, Scratch const& scratch) {
                    hidden_rows(layer, expert, args.x, args.x8, row, rows, scratch);
                    activation_forward(desc, rows, scratch.h, scratch.a);
                    if (args.h8.codes != nullptr) {
                      quantise_rows(desc, scratch.h, rows, width, args.h8, row);
                    }
                    quantise_rows(desc, scratch.a, rows, n);
                    gemm(rows, d, n, left_operand(ConstMatrix{scratch.a, n, 1}),
                         right_operand(ConstMatrix{expert.down, n, 1}.transposed()),
                         result(MatrixView<Bf16>{args.y + row * d, d, 1},
                                layer.b_down.data == nullptr ? nullptr : layer.b_down.of(e)),
                         scratch.gemm);
                  });
  }
}

void quantised_down_dgrad(Layer<Bf16> const& layer, QuantisedDownDgrad const& args,
                          Threads const& threads) noexcept {
  MoeDesc const desc = with_halves(layer.desc);
  std::int64_t const d = layer.hidden(), n = layer.intermediate(), width = layer.up_columns();
  RoutingView const& routing = layer.routing;
  // Slots without a row are not reached by any task; their gradient is 0 by definition.
  if (args.dscores != nullptr) std::fill_n(args.dscores, layer.slots(), 0.0f);
  bool const recompute = args.h8.codes == nullptr;
  Expert const expert(args.expert, desc);
  auto const of_rows = [&](std::int64_t row, std::int64_t rows, Scratch const& scratch) {
    if (recompute) {
      hidden_rows(layer, expert, {}, args.x8, row, rows, scratch);
      quantise_rows(desc, scratch.h, rows, width);
    } else {
      dequantise_rows(desc, args.h8, row, rows, scratch.h);
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      quantise_row(desc, args.d_o[routing.gather_index[row + r]], d, scratch.input + r * d);
      scratch.scores[r] = routing.scores[routing.sort_permutation[row + r]];
    }
    gemm(rows, n, d, left_operand(ConstMatrix{scratch.input, d, 1}),
         right_operand(ConstMatrix{expert.down, n, 1}), result(Matrix{scratch.da, n, 1}),
         scratch.gemm);
    activation_backward(desc, ActivationBackward<float>{.rows = rows,
                                                        .h = scratch.h,
                                                        .da_unscaled = scratch.da,
                                                        .scores = scratch.scores,
                                                        .dh = scratch.dh,
                                                        .a_scaled = scratch.a_scaled,
                                                        .da_dot_a = scratch.dots,
                                                        .a_row = scratch.a_row});
    round_values(scratch.a_scaled, rows * n, args.a_scaled + row * n);
    for (std::int64_t r = 0; r < rows; ++r) {
      Bf16* const dh = args.dh + (row + r) * width;
      for_each_column(layer.desc, [&](std::int64_t i, std::int64_t c) {
        dh[c] = round_to<Bf16>(scratch.dh[r * width + i]);
      });
      if (args.dscores == nullptr) continue;
      float const from_bias =
          layer.b_down.data == nullptr ? 0.0f : dot(scratch.input + r * d, expert.b_down, d);
      args.dscores[routing.sort_permutation[row + r]] = scratch.dots[r] + from_bias;
    }
  };
  for (std::int64_t e = 0; e < layer.experts(); ++e) {
    if (layer.num_rows(e) == 0) continue;
    load_down(layer, e, false, expert, threads.pool);
    if (recompute) load_up(layer, e, true, expert, threads.pool);
    for_each_task(layer, e, threads, of_rows);
  }
}

void quantised_up_dgrad(Layer<Bf16> const& layer, Bf16 const* dh, Bf16* dx_rows, float* memory,
                        Threads const& threads) noexcept {
  std::int64_t const d = layer.hidden(), width = layer.up_columns();
  Expert const expert(memory, layer.desc);
  for (std::int64_t e = 0; e < layer.experts(); ++e) {
    if (layer.num_rows(e) == 0) continue;
    load_up(layer, e, false, expert, threads.pool);
    for_each_task(layer, e, threads,
                  [&](std::int64_t row, std::int64_t rows, Scratch const& scratch) {
                    for (std::int64_t r = 0; r < rows; ++r) {
                      for_each_column(layer.desc, [&](std::int64_t i, std::int64_t c) {
                        scratch.input[r * width + i] = to_fp32(dh[(row + r) * width + c]);
                      });
                    }
                    quantise_rows(layer.desc, scratch.input, rows, width);
                    gemm(rows, d, width, left_operand(ConstMatrix{scratch.input, width, 1}),
                         right_operand(ConstMatrix{expert.up, d, 1}),
                         result(MatrixView<Bf16>{dx_rows + row * d, d, 1}), scratch.gemm);
                  });
  }
}

void dequantise_x(MoeDesc const& desc, QuantisedRows const& x8, Bf16* x,
                  Threads const& threads) noexcept {
  dequantise(DequantiseMatrix<Bf16>{.block = row_block(desc),
                                    .rows = desc.shape.tokens,
                                    .width = desc.shape.hidden,
                                    .codes = x8.codes,
                                    .scales = x8.scales,
                                    .values = x},
             threads.pool);
}

}  // namespace tessera::cpu

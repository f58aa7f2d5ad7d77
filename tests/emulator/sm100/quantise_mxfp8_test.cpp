// SPDX-License-Identifier: Apache-2.0
// The quantisers of MXFP8 from the source that GPUs get: the bytes of tessera::quantise(), quantise_weights() and
// dequantise() on the CPU, of every bf16 value and of weights in any layout.
#include <gtest/gtest.h>

#include <cstring>
#include <initializer_list>

#include "cuda/instances/sm100/quantise_mxfp8.cu"
#include "tessera/tessera.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::cuda {
namespace {

using emulator::Bits;
using emulator::Memory;
using Bytes = Memory<std::uint8_t>;

Context const& cpu() {
  static Context const context = std::move(Context::create()).value();
  return context;
}

// Bytes of a kernel and of the CPU, and what lies behind them, which nobody writes.
class Both {
 public:
  explicit Both(std::int64_t count) : count_(count), gpu(count + 64), cpu(count) {}
  void expect_equal(char const* what) const {
    for (std::int64_t i = 0; i < count_; ++i) ASSERT_EQ(gpu[i], cpu[i]) << what << " " << i;
    for (std::int64_t i = count_; i < count_ + 64; ++i) ASSERT_EQ(gpu[i], 0xff) << what;
  }

 private:
  std::int64_t count_;

 public:
  Bytes gpu, cpu;
};

// Every bf16 value stands in a block of its own, among values that are none larger, and in one beside its successors.
TEST(QuantiseMxfp8, RowsAndTheWayBackHaveTheBytesOfTheCpu) {
  constexpr std::int64_t kRows = 1024, kWidth = 2048 + 128, kPitch = kWidth + 8;
  Memory<Bits> x(kRows * kPitch);
  for (std::int64_t r = 0; r < kRows; ++r) {
    for (std::int64_t c = 0; c < kWidth; ++c) {
      auto const largest = static_cast<Bits>(r * 64 + c / 32 % 64);
      float const part = static_cast<float>((r * 31 + c * 17) % 129 - 64) / 65.0f;
      bool const is_alone = c >= 2048 ? false : c % 32 == r % 32;
      x[r * kPitch + c] = c >= 2048  ? static_cast<Bits>(r * 64 + c % 64)
                          : is_alone ? largest
                                     : emulator::round(emulator::widen(largest) * part);
    }
  }
  Both codes(kRows * kWidth), scales(kRows * kWidth / 32), values(kRows * kWidth * 2);
  ASSERT_EQ(launch_quantise_rows_mxfp8({.gmem_x = x.get(),
                                        .rows = kRows,
                                        .width = kWidth,
                                        .pitch = kPitch,
                                        .gmem_codes = codes.gpu.get(),
                                        .gmem_scales = scales.gpu.get()},
                                       nullptr),
            cudaSuccess);
  ASSERT_EQ(emulator::run({.seed = 1}), "");
  auto const of = [](void* data, DType dtype, std::int64_t width) {
    return tensor(data, dtype, {kRows, width}, {});
  };
  Tensor of_x = of(x.get(), DType::bf16, kWidth);
  of_x.stride[0] = kPitch;
  Tensor const of_codes = of(codes.cpu.get(), DType::fp8_e4m3, kWidth);
  Tensor const of_scales = of(scales.cpu.get(), DType::e8m0, kWidth / 32);
  Status status = quantise(cpu(), {.block = QuantiseBlock::row_32,
                                   .rule = ScaleRule::rceil,
                                   .values = of_x,
                                   .codes = of_codes,
                                   .scales = of_scales});
  ASSERT_TRUE(status.ok()) << status.text();
  codes.expect_equal("code");
  scales.expect_equal("scale");

  ASSERT_EQ(launch_dequantise_rows_mxfp8({.gmem_codes = codes.cpu.get(),
                                          .gmem_scales = scales.cpu.get(),
                                          .rows = kRows,
                                          .width = kWidth,
                                          .gmem_values = values.gpu.get()},
                                         nullptr),
            cudaSuccess);
  ASSERT_EQ(emulator::run({.seed = 2}), "");
  status = dequantise(cpu(), {.block = QuantiseBlock::row_32,
                              .codes = of_codes,
                              .scales = of_scales,
                              .values = of(values.cpu.get(), DType::bf16, kWidth)});
  ASSERT_TRUE(status.ok()) << status.text();
  auto const* const have = reinterpret_cast<Bits const*>(values.gpu.get());
  auto const* const want = reinterpret_cast<Bits const*>(values.cpu.get());
  for (std::int64_t i = 0; i < kRows * kWidth; ++i) {
    float const a = emulator::widen(have[i]), b = emulator::widen(want[i]);
    ASSERT_TRUE(have[i] == want[i] || (a != a && b != b)) << i << ": " << a << " for " << b;
  }
}

constexpr std::int64_t kE = 2, kN = 128, kD = 256;

void check_weights(WeightLayout const& layout, std::initializer_list<std::int64_t> up_shape,
                   std::initializer_list<std::int64_t> down_shape, WeightRows const (&up)[2],
                   WeightRows const& down) {
  MoeDesc desc;
  desc.shape = {.tokens = 1, .hidden = kD, .intermediate = kN, .experts = kE, .top_k = 1};
  desc.dtype = DType::bf16;
  desc.layout = layout;
  Memory<Bits> w_up(kE * 2 * kN * kD), w_down(kE * kD * kN);
  emulator::fill(w_up.get(), static_cast<std::int64_t>(w_up.size()), 5, 1.0f);
  emulator::fill(w_down.get(), static_cast<std::int64_t>(w_down.size()), 6, 1.0f);
  for (std::int64_t i = 0; i < kE * 2 * kN * kD; i += 37) {  // blocks of their own sizes
    w_up[i] = emulator::round(emulator::widen(w_up[i]) * static_cast<float>(1 << i % 5));
  }
  Both codes(kE * 2 * kN * kD), codes_t(kE * 2 * kN * kD), down_codes(kE * kD * kN),
      down_codes_t(kE * kD * kN);
  Both scales(kE * 2 * kN * kD / 32), scales_t(kE * 2 * kN * kD / 32),
      down_scales(kE * kD * kN / 32), down_scales_t(kE * kD * kN / 32);
  auto const rows_of = [](WeightRows rows, Memory<Bits> const& w) {
    rows.gmem = w.get() + reinterpret_cast<std::uintptr_t>(rows.gmem) / 2;
    return rows;
  };
  ASSERT_EQ(launch_quantise_weights_mxfp8({.w = {rows_of(up[0], w_up), rows_of(up[1], w_up)},
                                           .rows = kN,
                                           .width = kD,
                                           .halves = 2,
                                           .experts = kE,
                                           .gmem_codes = codes.gpu.get(),
                                           .gmem_scales = scales.gpu.get(),
                                           .gmem_codes_t = codes_t.gpu.get(),
                                           .gmem_scales_t = scales_t.gpu.get()},
                                          nullptr),
            cudaSuccess);
  ASSERT_EQ(launch_quantise_weights_mxfp8({.w = {rows_of(down, w_down), {}},
                                           .rows = kD,
                                           .width = kN,
                                           .halves = 1,
                                           .experts = kE,
                                           .gmem_codes = down_codes.gpu.get(),
                                           .gmem_scales = down_scales.gpu.get(),
                                           .gmem_codes_t = down_codes_t.gpu.get(),
                                           .gmem_scales_t = down_scales_t.gpu.get()},
                                          nullptr),
            cudaSuccess);
  ASSERT_EQ(emulator::run({.seed = 3}), "");
  auto const code = [](Both const& b, std::initializer_list<std::int64_t> shape) {
    return tensor(static_cast<void*>(b.cpu.get()), DType::fp8_e4m3, shape, {});
  };
  auto const scale = [](Both const& b, std::initializer_list<std::int64_t> shape) {
    return tensor(static_cast<void*>(b.cpu.get()), DType::e8m0, shape, {});
  };
  QuantisedWeights const out{
      .up = code(codes, {kE, 2, kN, kD}),
      .up_transposed = code(codes_t, {kE, kD, 2 * kN}),
      .down = code(down_codes, {kE, kD, kN}),
      .down_transposed = code(down_codes_t, {kE, kN, kD}),
      .up_scales = scale(scales, {kE, 2, scale_atom_bytes(kN, kD / 32)}),
      .down_scales = scale(down_scales, {kE, scale_atom_bytes(kD, kN / 32)}),
      .up_transposed_scales = scale(scales_t, {kE, scale_atom_bytes(kD, 2 * kN / 32)}),
      .down_transposed_scales = scale(down_scales_t, {kE, scale_atom_bytes(kN, kD / 32)})};
  ExpertWeights weights;
  weights.w_up = tensor(static_cast<void*>(w_up.get()), DType::bf16, up_shape, {});
  weights.w_down = tensor(static_cast<void*>(w_down.get()), DType::bf16, down_shape, {});
  Status const status = quantise_weights(cpu(), desc, weights, ScaleRule::rceil, out);
  ASSERT_TRUE(status.ok()) << status.text();
  codes.expect_equal("up");
  scales.expect_equal("scale of up");
  codes_t.expect_equal("up, transposed");
  scales_t.expect_equal("scale of up, transposed");
  down_codes.expect_equal("down");
  down_scales.expect_equal("scale of down");
  down_codes_t.expect_equal("down, transposed");
  down_scales_t.expect_equal("scale of down, transposed");
}

// gmem: where a half begins, in bytes.
void const* at(std::int64_t element) { return reinterpret_cast<void const*>(element * 2); }

constexpr WeightRows kDown{
    .expert_stride = kD * kN, .row_stride = kN, .column_stride = 1, .block = kD};
constexpr WeightRows kDownTransposed{
    .expert_stride = kD * kN, .row_stride = 1, .column_stride = kD, .block = kD};

TEST(QuantiseMxfp8, WeightsHaveTheBytesOfTheCpu) {
  WeightRows rows{.expert_stride = 2 * kN * kD, .row_stride = kD, .column_stride = 1, .block = kN};
  WeightRows up[2] = {rows, rows};
  up[1].gmem = at(kN * kD);
  check_weights({}, {kE, 2 * kN, kD}, {kE, kD, kN}, up, kDown);
}

TEST(QuantiseMxfp8, RowsOfGateAndUpInTurns) {
  WeightRows rows{
      .expert_stride = 2 * kN * kD, .row_stride = 2 * kD, .column_stride = 1, .block = kN};
  WeightRows up[2] = {rows, rows};
  up[1].gmem = at(kD);
  check_weights({.order = GateUpOrder::interleaved}, {kE, 2 * kN, kD}, {kE, kD, kN}, up, kDown);
}

TEST(QuantiseMxfp8, TransposedWeights) {
  WeightRows rows{
      .expert_stride = 2 * kN * kD, .row_stride = 1, .column_stride = 2 * kN, .block = kN};
  WeightRows up[2] = {rows, rows};
  up[0].gmem = at(kN);  // up comes first
  check_weights({GateUpOrder::up_first, WeightOrientation::transposed}, {kE, kD, 2 * kN},
                {kE, kN, kD}, up, kDownTransposed);
}

TEST(QuantiseMxfp8, TransposedColumnsInTurns) {
  WeightRows rows{
      .expert_stride = 2 * kN * kD, .row_stride = 2, .column_stride = 2 * kN, .block = kN};
  WeightRows up[2] = {rows, rows};
  up[1].gmem = at(1);
  check_weights({GateUpOrder::interleaved, WeightOrientation::transposed}, {kE, kD, 2 * kN},
                {kE, kN, kD}, up, kDownTransposed);
}

TEST(QuantiseMxfp8, RefusesPartsOfATile) {
  QuantiseRowsMxfp8Arguments rows = {};
  rows.rows = 1;
  rows.width = rows.pitch = 96;
  EXPECT_EQ(launch_quantise_rows_mxfp8(rows, nullptr), cudaErrorInvalidValue);
  DequantiseRowsMxfp8Arguments back = {};
  back.rows = 1;
  back.width = 64;
  EXPECT_EQ(launch_dequantise_rows_mxfp8(back, nullptr), cudaErrorInvalidValue);
  QuantiseWeightsMxfp8Arguments weights = {};
  weights.rows = 192;
  weights.width = 128;
  weights.halves = weights.experts = 1;
  EXPECT_EQ(launch_quantise_weights_mxfp8(weights, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace tessera::cuda

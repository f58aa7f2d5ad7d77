// SPDX-License-Identifier: Apache-2.0
// grouped_gemm on a GPU through the public API. Values are -1, 0 or 1, so that every sum is exact in bf16 and any
// kernel gives the same: sizes of the fast kernels and of the plain ones, empty experts, rows of no expert.
#include <cuda_bf16.h>

#include <random>

#include "device_buffer.cuh"
#include "tessera/tessera.hpp"

namespace tessera::cuda_test {
namespace {

int failures = 0;

void expect(bool holds, char const* what) {
  if (holds) return;
  ++failures;
  std::printf("%s\n", what);
}

struct Case {
  std::vector<std::int64_t> counts;
  std::int64_t tail, gemm_m, gemm_n;  // rows of no expert; columns of a and of b, or c
  bool transpose_b, bias, wide_offsets;
};

std::vector<float> draw(std::int64_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& value : out) value = static_cast<float>(static_cast<int>(engine() % 3) - 1);
  return out;
}

std::vector<__nv_bfloat16> stored(std::vector<float> const& values) {
  std::vector<__nv_bfloat16> out;
  for (float const value : values) out.push_back(__float2bfloat16(value));
  return out;
}

// Compares a device tensor with exact values.
bool equal(DeviceBuffer const& got, std::vector<float> const& expected) {
  auto const bytes = got.bytes();
  auto const* const values = reinterpret_cast<__nv_bfloat16 const*>(bytes.data());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (__bfloat162float(values[i]) != expected[i]) return false;
  }
  return true;
}

// The operands of both kinds: rows of a and b sorted by expert, then `tail` rows of NaN.
struct Rows {
  explicit Rows(Case const& c) {
    offsets.push_back(0);
    for (std::int64_t const count : c.counts) offsets.push_back(offsets.back() + count);
    routed = offsets.back();
    rows = routed + c.tail;
  }
  std::vector<float> drawn(std::int64_t columns, unsigned seed) const {
    std::vector<float> values = draw(rows * columns, seed);
    for (std::int64_t i = routed * columns; i < rows * columns; ++i) values[i] = NAN;
    return values;
  }
  DeviceBuffer on_device(bool wide) const {
    if (wide) return DeviceBuffer(offsets);
    return DeviceBuffer(std::vector<std::int32_t>(offsets.begin(), offsets.end()));
  }
  std::vector<std::int64_t> offsets;
  std::int64_t routed = 0, rows = 0;
};

Device const kDevice{DeviceKind::cuda, 0};

void run(Context const& context, GroupedGemmArgs args, char const* what) {
  std::size_t const bytes = grouped_gemm_workspace_bytes(context, args).value();
  DeviceBuffer const workspace(bytes);
  args.workspace = {workspace.as<void>(), bytes};
  Status const status = grouped_gemm(context, args);
  if (!status.ok()) std::printf("%s: %s\n", what, status.text());
  expect(status.ok(), what);
  require(cudaDeviceSynchronize(), what);
}

ConstTensor offsets_of(DeviceBuffer const& buffer, Case const& c) {
  return tensor(buffer.as<void const>(), c.wide_offsets ? DType::int64 : DType::int32,
                {static_cast<std::int64_t>(c.counts.size()) + 1}, kDevice);
}

// c[r,j] = sum_k a[r,k] b[e][j,k] + bias[e][j]; zeros beyond the last expert.
void varlen_m(Context const& context, Case const& c) {
  Rows const rows(c);
  std::int64_t const experts = static_cast<std::int64_t>(c.counts.size()), k = c.gemm_m,
                     n = c.gemm_n;
  auto const a = rows.drawn(k, 1), b = draw(experts * n * k, 2), bias = draw(experts * n, 3);
  std::vector<float> expected(static_cast<std::size_t>(rows.rows * n));
  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int64_t r = rows.offsets[e]; r < rows.offsets[e + 1]; ++r) {
      for (std::int64_t j = 0; j < n; ++j) {
        float sum = c.bias ? bias[e * n + j] : 0;
        for (std::int64_t i = 0; i < k; ++i) {
          sum += a[r * k + i] * b[e * n * k + (c.transpose_b ? i * n + j : j * k + i)];
        }
        expected[r * n + j] = sum;
      }
    }
  }
  DeviceBuffer const gmem_a(stored(a)), gmem_b(stored(b)), gmem_bias(stored(bias)),
      gmem_offsets(rows.on_device(c.wide_offsets)), gmem_c(2 * expected.size());
  GroupedGemmArgs args{.transpose_b = c.transpose_b};
  args.a = tensor(gmem_a.as<void const>(), DType::bf16, {rows.rows, k}, kDevice);
  args.b = c.transpose_b ? tensor(gmem_b.as<void const>(), DType::bf16, {experts, k, n}, kDevice)
                         : tensor(gmem_b.as<void const>(), DType::bf16, {experts, n, k}, kDevice);
  if (c.bias) args.bias = tensor(gmem_bias.as<void const>(), DType::bf16, {experts, n}, kDevice);
  args.expert_offsets = offsets_of(gmem_offsets, c);
  args.c = tensor(gmem_c.as<void>(), DType::bf16, {rows.rows, n}, kDevice);
  run(context, args, "varlen_m");
  expect(equal(gmem_c, expected), "varlen_m: wrong values");
}

// c[e][i,j] = sum_r a[r,i] b[r,j], once written and once added to that.
void varlen_k(Context const& context, Case const& c) {
  Rows const rows(c);
  std::int64_t const experts = static_cast<std::int64_t>(c.counts.size()), m = c.gemm_m,
                     n = c.gemm_n;
  auto const a = rows.drawn(m, 4), b = rows.drawn(n, 5);
  std::vector<float> expected(static_cast<std::size_t>(experts * m * n));
  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int64_t r = rows.offsets[e]; r < rows.offsets[e + 1]; ++r) {
      for (std::int64_t i = 0; i < m; ++i) {
        for (std::int64_t j = 0; j < n; ++j)
          expected[(e * m + i) * n + j] += a[r * m + i] * b[r * n + j];
      }
    }
  }
  DeviceBuffer const gmem_a(stored(a)), gmem_b(stored(b)),
      gmem_offsets(rows.on_device(c.wide_offsets)), gmem_c(2 * expected.size());
  GroupedGemmArgs args{.kind = GroupedGemmKind::varlen_k};
  args.a = tensor(gmem_a.as<void const>(), DType::bf16, {rows.rows, m}, kDevice);
  args.b = tensor(gmem_b.as<void const>(), DType::bf16, {rows.rows, n}, kDevice);
  args.expert_offsets = offsets_of(gmem_offsets, c);
  args.c = tensor(gmem_c.as<void>(), DType::bf16, {experts, m, n}, kDevice);
  run(context, args, "varlen_k");
  expect(equal(gmem_c, expected), "varlen_k: wrong values");
  args.mode = GradientMode::accumulate;
  run(context, args, "varlen_k, accumulate");
  for (float& value : expected) value *= 2;
  expect(equal(gmem_c, expected), "varlen_k, accumulate: wrong values");
}

int run_all() {
  if (!has_device()) return kSkipped;
  auto const context = Context::create({kDevice});
  if (!context.ok()) {
    std::printf("%s\n", context.status().text());
    return kSkipped;
  }
  for (Case const& c : {Case{{130, 0, 1, 127, 0}, 9, 64, 128, false, true, false},
                        Case{{130, 0, 1, 127, 0}, 9, 64, 128, true, false, true},
                        Case{{0, 3, 17}, 2, 20, 12, false, true, true},
                        Case{{0, 3, 17}, 0, 20, 12, true, true, false},
                        Case{{0, 0}, 5, 64, 128, false, false, false}}) {
    varlen_m(context.value(), c);
    varlen_k(context.value(), c);
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda_test

int main() { return tessera::cuda_test::run_all(); }

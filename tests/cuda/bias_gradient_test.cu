// SPDX-License-Identifier: Apache-2.0
// bias_gradient on a GPU: the kernel and its plain twin against sums of small integers, which no order of adding
// changes, and of other values against each other, bit for bit: sorted, gathered and weighted rows, one and two halves,
// bf16 and fp32, added to and replaced, experts without rows, gradients that lie apart.
// A program of its own, without a test framework: it also runs where only the CUDA runtime is.
// Exit 0 passed, 1 failed, 77 skipped (no GPU).
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <vector>

#include "cuda/host/bias_gradient.hpp"
#include "tests/cuda/device_buffer.cuh"

namespace {

using tessera::cuda::BiasGradientArguments;
using tessera::cuda::launch_bias_gradient;
using tessera::cuda::launch_bias_gradient_plain;
using tessera::cuda_test::DeviceBuffer;
using tessera::cuda_test::has_device;
using tessera::cuda_test::kSkipped;
using tessera::cuda_test::require;

struct Case {
  char const* name;
  std::vector<int32_t> rows;  // of each expert
  int64_t columns;
  int halves = 1;
  bool gathered = false;  // .. and weighted
  bool is_fp32 = false;
  bool accumulates = false;
  int64_t stride = 1;  // of db
};

std::vector<Case> cases() {
  std::vector<int32_t> const uneven = {70, 0, 1, 513, 129};
  return {{"sorted", uneven, 136},
          {"two halves", uneven, 72, 2},
          {"gathered and weighted", uneven, 264, 1, true},
          {"fp32, added to", uneven, 64, 2, true, true, true},
          {"bf16, added to", uneven, 200, 1, false, false, true},
          {"fp32", {3000}, 8, 1, true, true},
          {"every second element", uneven, 128, 1, false, false, false, 2}};
}

// Small enough for bf16, and for sums that fp32 holds exactly.
int value(int64_t index) { return static_cast<int>(index * 7919 % 17) - 8; }

constexpr int64_t kTokens = 400;

struct Rows {
  std::vector<int32_t> offsets = {0}, index, permutation;
  std::vector<float> scores;  // by slot
};

Rows rows_of(Case const& c) {
  Rows out;
  for (int32_t const rows : c.rows) out.offsets.push_back(out.offsets.back() + rows);
  int32_t const rows = out.offsets.back();
  for (int32_t r = 0; r < rows; ++r) {
    out.index.push_back(static_cast<int32_t>((int64_t{11} * r + 5) % kTokens));
    out.permutation.push_back(rows - 1 - r);
    out.scores.push_back(static_cast<float>(r % 3 + 1));
  }
  return out;
}

constexpr float kBefore = 3.0f;

// db after the call, where every element was kBefore.
template <class Gradient>
std::vector<Gradient> gradients_of(Case const& c, bool fast, float scale) {
  auto const experts = static_cast<int32_t>(c.rows.size());
  Rows const table = rows_of(c);
  int64_t const rows = table.offsets.back(), width = c.halves * c.columns;
  int64_t const left_rows = c.gathered ? kTokens : rows;
  std::vector<__nv_bfloat16> left;
  for (int64_t i = 0; i < left_rows * width; ++i) {
    left.push_back(__float2bfloat16_rn(scale * static_cast<float>(value(i))));
  }
  std::vector<Gradient> const before(static_cast<size_t>(experts * width * c.stride),
                                     Gradient(kBefore));
  DeviceBuffer const gmem_left(left), gmem_offsets(table.offsets), gmem_index(table.index),
      gmem_permutation(table.permutation), gmem_scores(table.scores), gmem_db(before);
  BiasGradientArguments args{};
  args.left = {gmem_left.as<void>(), left_rows, width};
  args.gmem_expert_offsets = gmem_offsets.as<int32_t>();
  if (c.gathered) {
    args.gmem_gather_index = gmem_index.as<int32_t>();
    args.gmem_scores = gmem_scores.as<float>();
    args.gmem_sort_permutation = gmem_permutation.as<int32_t>();
  }
  args.halves = c.halves;
  for (int half = 0; half < c.halves; ++half) {
    args.db[half] = {.gmem = gmem_db.as<Gradient>() + half * c.columns * c.stride,
                     .expert_stride = width * c.stride,
                     .row_stride = c.stride,
                     .block = c.columns};
  }
  args.is_fp32 = c.is_fp32;
  args.accumulates = c.accumulates;
  args.columns = c.columns;
  args.experts = experts;
  require(fast ? launch_bias_gradient(args, nullptr) : launch_bias_gradient_plain(args, nullptr),
          c.name);
  require(cudaDeviceSynchronize(), c.name);
  return gmem_db.values<Gradient>();
}

template <class Gradient>
int64_t wrong_of(Case const& c, bool fast) {
  auto const after = gradients_of<Gradient>(c, fast, 1.0f);
  Rows const table = rows_of(c);
  int64_t const width = c.halves * c.columns;
  int64_t wrong = 0;
  for (size_t e = 0; e < c.rows.size(); ++e) {
    for (int64_t i = 0; i < width; ++i) {
      int64_t sum = c.accumulates ? static_cast<int64_t>(kBefore) : 0;
      for (int32_t r = table.offsets[e]; r < table.offsets[e + 1]; ++r) {
        auto const row = static_cast<size_t>(r);
        int64_t const weight = c.gathered ? table.permutation[row] % 3 + 1 : 1;
        sum += weight * value((c.gathered ? table.index[row] : r) * width + i);
      }
      auto const wanted = Gradient(static_cast<float>(sum));
      auto const at = static_cast<size_t>((static_cast<int64_t>(e) * width + i) * c.stride);
      wrong += float(after[at]) != float(wanted);
      if (c.stride > 1) wrong += float(after[at + 1]) != kBefore;
    }
  }
  return wrong;
}

// Elements of which the kernel and its twin have other bits, where the order of adding shows.
template <class Gradient>
int64_t different_of(Case const& c) {
  auto const fast = gradients_of<Gradient>(c, true, 0.37f);
  auto const plain = gradients_of<Gradient>(c, false, 0.37f);
  int64_t different = 0;
  for (size_t i = 0; i < fast.size(); ++i) different += float(fast[i]) != float(plain[i]);
  return different;
}

}  // namespace

int main() {
  if (!has_device()) return kSkipped;
  int failures = 0;
  auto const expect_none = [&](Case const& c, char const* what, int64_t count) {
    std::printf("%-24s %-12s %s\n", c.name, what, count == 0 ? "ok" : "WRONG");
    failures += count != 0;
  };
  for (Case const& c : cases()) {
    for (bool const fast : {true, false}) {
      expect_none(c, fast ? "kernel" : "plain",
                  c.is_fp32 ? wrong_of<float>(c, fast) : wrong_of<__nv_bfloat16>(c, fast));
    }
    expect_none(c, "equal bits",
                c.is_fp32 ? different_of<float>(c) : different_of<__nv_bfloat16>(c));
  }
  return failures == 0 ? 0 : 1;
}

// SPDX-License-Identifier: Apache-2.0
// A GEMM that starts in the tail of the one whose rows it reads (src/cuda/gemm/handover.cuh) against the same two one
// after the other: equal bits, in poisoned memory again and again, for experts of any length.
#include <algorithm>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "layer.cuh"
#include "src/cuda/host/projection.hpp"
#include "src/cuda/host/projection_backward.hpp"

namespace tessera::cuda_test {
namespace {

using cuda::WeightRows;

struct Case {
  char const* name;
  int64_t hidden, intermediate;
  std::vector<int32_t> rows;  // of each expert
};

std::vector<Case> cases() {
  auto const alike = [](size_t experts, int32_t rows) {
    return std::vector<int32_t>(experts, rows);
  };
  std::vector<int32_t> all_to_last = alike(12, 0), all_to_first = alike(12, 0), uneven;
  all_to_first.front() = all_to_last.back() = 9000;
  for (int32_t e = 0; e < 97; ++e) uneven.push_back(e * e * 7 % 401);
  return {
      {"one expert", 512, 256, alike(1, 20000)},
      {"two experts", 256, 256, alike(2, 12000)},
      {"a wave and a tile", 1024, 256, alike(19, 896)},
      {"a tile of its own each", 256, 128, alike(133, 128)},
      {"fewer tiles than SMs", 512, 256, alike(5, 130)},
      {"all to the first expert", 384, 256, all_to_first},
      {"all to the last expert", 384, 256, all_to_last},
      {"uneven, some empty", 384, 192, uneven},
      {"B that stays in half", 512, 512, alike(6, 2100)},
      {"long n", 256, 640, alike(24, 700)},
      {"no multiple of 64", 200, 328, uneven},
      {"many experts", 128, 64, alike(640, 40)},
      {"few rows, short d", 16, 168, {0, 61, 3, 0, 40, 0, 19, 0}},
      {"no rows", 128, 64, alike(9, 0)},
  };
}

WeightRows rows_of(DeviceBuffer const& buffer, int64_t rows, int64_t columns, int64_t first,
                   int64_t all_rows) {
  return {.gmem = buffer.as<__nv_bfloat16>() + first * columns,
          .expert_stride = all_rows * columns,
          .row_stride = columns,
          .column_stride = 1,
          .block = rows};
}

void poison(std::initializer_list<DeviceBuffer const*> buffers) {
  for (DeviceBuffer const* buffer : buffers) {
    require(cudaMemsetAsync(buffer->as<void>(), kPoison, buffer->size(), nullptr), "poison");
  }
}

// What both passes of a case share.
struct Experts {
  explicit Experts(Case const& c)
      : experts(static_cast<int32_t>(c.rows.size())),
        rows(std::accumulate(c.rows.begin(), c.rows.end(), int64_t{0})),
        capacity(std::max<int64_t>(rows, 64)),
        offsets([&] {
          std::vector<int32_t> out{0};
          for (int32_t const r : c.rows) out.push_back(out.back() + r);
          return out;
        }()),
        identity([&] {
          std::vector<int32_t> out(static_cast<size_t>(capacity));
          std::iota(out.begin(), out.end(), 0);
          return out;
        }()),
        words(std::vector<int32_t>(3, 0)) {}

  int32_t* counter(int i) const { return words.as<int32_t>() + i; }
  uint32_t* handover() const {
    require(cudaMemsetAsync(counter(2), 0, sizeof(uint32_t), nullptr), "handover");
    return words.as<uint32_t>() + 2;
  }

  int32_t experts;
  int64_t rows, capacity;
  DeviceBuffer offsets, identity, words;
};

int sm_count() {
  int count = 0;
  require(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0), "SMs");
  return count;
}

// run() launches both and returns what the second wrote: first one after the other, then handed over.
template <class First, class Second, class Run>
void compare(std::string const& name, Experts const& e, First& first, Second& second, Run&& run) {
  constexpr int kRepeats = 12;
  Bytes const expected = run();
  int different = 0;
  for (int i = 0; i < kRepeats; ++i) {
    first.gmem_handover = second.gmem_handover = e.handover();
    different += run() == expected ? 0 : 1;
  }
  if (different != 0) std::printf("%s: %d of %d differ\n", name.c_str(), different, kRepeats);
  EXPECT(different == 0);
}

void run_forward(Case const& c, bool gathers, bool stores_h) {
  Experts const e(c);
  int64_t const d = c.hidden, n = c.intermediate;
  DeviceBuffer const x(values(e.capacity * d, 1)), w_up(values(e.experts * 2 * n * d, 2)),
      w_down(values(e.experts * n * d, 3));
  DeviceBuffer const h(2 * static_cast<size_t>(e.capacity * 2 * n)),
      a(2 * static_cast<size_t>(e.capacity * n)), y(2 * static_cast<size_t>(e.capacity * d));
  cuda::UpProjectionFwdArguments up{
      .x = {x.as<void>(), e.capacity, d},
      .gmem_gather_index = gathers ? e.identity.as<int32_t>() : nullptr,
      .gmem_expert_offsets = e.offsets.as<int32_t>(),
      .w_up = {rows_of(w_up, n, d, 0, 2 * n), rows_of(w_up, n, d, n, 2 * n)},
      .b_up = {},
      .activation = {.kind = ActivationKind::swiglu},
      .gmem_h = stores_h ? h.as<void>() : nullptr,
      .gmem_a = a.as<void>(),
      .rows = e.capacity,
      .hidden = d,
      .intermediate = n,
      .experts = e.experts,
      .gmem_tile_counter = e.counter(0)};
  cuda::DownProjectionFwdArguments down{.gmem_a = a.as<void>(),
                                        .gmem_expert_offsets = e.offsets.as<int32_t>(),
                                        .w_down = rows_of(w_down, d, n, 0, d),
                                        .b_down = {},
                                        .gmem_y = y.as<void>(),
                                        .rows = e.capacity,
                                        .hidden = d,
                                        .intermediate = n,
                                        .experts = e.experts,
                                        .gmem_tile_counter = e.counter(1)};
  auto const run = [&] {
    poison({&h, &a, &y});
    require(cuda::launch_up_projection_fwd(up, sm_count(), nullptr), "up_projection_fwd");
    require(cuda::launch_down_projection_fwd(down, sm_count(), nullptr), "down_projection_fwd");
    synchronize(nullptr);
    return y.bytes();
  };
  compare(std::string(c.name) + ", forward" + (gathers ? ", gathered" : ""), e, up, down, run);
}

void run_backward(Case const& c, bool is_fp32, bool accumulates) {
  Experts const e(c);
  int64_t const d = c.hidden, n = c.intermediate;
  auto const element = static_cast<size_t>(is_fp32 ? 4 : 2);
  DeviceBuffer const d_o(values(e.capacity * d, 4)), w_down(values(e.experts * n * d, 5)),
      h(values(e.capacity * 2 * n, 6));
  DeviceBuffer const scores(std::vector<float>(static_cast<size_t>(e.capacity), 0.6f));
  DeviceBuffer const dh(2 * static_cast<size_t>(e.capacity * 2 * n)),
      a_scaled(2 * static_cast<size_t>(e.capacity * n)),
      partials(4 * static_cast<size_t>(e.capacity * cuda::score_groups(n))),
      dw(element * static_cast<size_t>(e.experts * n * d));
  cuda::DownProjectionDgradArguments dgrad{.d_o = {d_o.as<void>(), e.capacity, d},
                                           .gmem_gather_index = e.identity.as<int32_t>(),
                                           .gmem_expert_offsets = e.offsets.as<int32_t>(),
                                           .w_down = rows_of(w_down, d, n, 0, d),
                                           .gmem_scores = scores.as<float>(),
                                           .gmem_sort_permutation = e.identity.as<int32_t>(),
                                           .gmem_h = h.as<void>(),
                                           .activation = {.kind = ActivationKind::swiglu},
                                           .gmem_dh = dh.as<void>(),
                                           .gmem_a_scaled = a_scaled.as<void>(),
                                           .gmem_ds_partials = partials.as<float>(),
                                           .rows = e.capacity,
                                           .hidden = d,
                                           .intermediate = n,
                                           .experts = e.experts,
                                           .gmem_tile_counter = e.counter(0)};
  cuda::DownProjectionWgradArguments wgrad;
  wgrad.left = {d_o.as<void>(), e.capacity, d};
  wgrad.gmem_gather_index = e.identity.as<int32_t>();
  wgrad.gmem_expert_offsets = e.offsets.as<int32_t>();
  wgrad.gmem_right = a_scaled.as<void>();
  wgrad.halves = 1;
  // w_down is (E,d,n): its n rows of d are columns.
  wgrad.dw[0] = {.gmem = dw.as<void>(),
                 .expert_stride = n * d,
                 .row_stride = 1,
                 .column_stride = n,
                 .block = n};
  wgrad.is_fp32 = is_fp32;
  wgrad.accumulates = accumulates;
  wgrad.rows = e.capacity;
  wgrad.hidden = d;
  wgrad.intermediate = n;
  wgrad.experts = e.experts;
  wgrad.gmem_tile_counter = e.counter(1);
  auto const run = [&] {
    poison({&dh, &a_scaled, &partials});
    require(cudaMemsetAsync(dw.as<void>(), accumulates ? 0 : kPoison, dw.size(), nullptr), "dw");
    require(cuda::launch_down_projection_dgrad(dgrad, sm_count(), nullptr),
            "down_projection_dgrad");
    require(cuda::launch_down_projection_wgrad(wgrad, sm_count(), nullptr),
            "down_projection_wgrad");
    synchronize(nullptr);
    return dw.bytes();
  };
  compare(std::string(c.name) + ", backward" + (is_fp32 ? ", fp32" : "") +
              (accumulates ? ", added" : ""),
          e, dgrad, wgrad, run);
}

bool runs_fast_kernels() {
  int major = 0, minor = 0;
  require(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "major");
  require(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), "minor");
  if (major == 9 && minor == 0) return true;
  std::printf(
      "skipped: GEMM kernels are for compute capability 9.0, this GPU has %d.%d; run on a Hopper "
      "GPU\n",
      major, minor);
  return false;
}

int run() {
  if (!has_device() || !runs_fast_kernels()) return kSkipped;
  for (Case const& c : cases()) {
    run_forward(c, true, true);
    run_forward(c, false, false);
    run_backward(c, false, false);
    run_backward(c, false, true);
    run_backward(c, true, false);
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda_test

int main() { return tessera::cuda_test::run(); }

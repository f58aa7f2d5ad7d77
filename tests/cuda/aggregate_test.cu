// SPDX-License-Identifier: Apache-2.0
// aggregate on a GPU: the kernel against its plain twin (same bits) and both against fp64 on the host.
// A program of its own, without a test framework: it also runs where only the CUDA runtime is.
// Exit 0 passed, 1 failed, 77 skipped (no GPU).
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <type_traits>
#include <vector>

#include "cuda/host/aggregate.hpp"
#include "tests/cuda/device_buffer.cuh"

namespace {

using tessera::cuda::AggregateArguments;
using tessera::cuda::launch_aggregate;
using tessera::cuda::launch_aggregate_plain;
using tessera::cuda_test::DeviceBuffer;
using tessera::cuda_test::has_device;
using tessera::cuda_test::kPoison;
using tessera::cuda_test::kSkipped;
using tessera::cuda_test::require;

struct Case {
  char const* name;
  int64_t tokens, top_k, hidden;
  bool weighted = true;
  double sentinels = 0;              // fraction of the slots
  bool varies = false;               // 0 .. 2K slots per token, by token_offsets
  bool adds = false;                 // to what o holds
  int64_t adds_every = 0;            // of so many tokens to the o of one; 0: of all
  int64_t o_padding = 0;             // elements between rows of o
  int64_t checked_tokens = 1 << 20;  // against fp64, from either end
};

// Element `index` of y before rounding: uniform in [-1,1), from its index alone (splitmix64).
__host__ __device__ float y_value(uint64_t index) {
  uint64_t bits = (index + 1) * 0x9e3779b97f4a7c15u;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  bits ^= bits >> 31;
  return static_cast<float>(bits >> 40) * 0x1p-23f - 1.0f;
}

template <class Element>
__host__ __device__ Element to_element(float value) {
  if constexpr (std::is_same_v<Element, float>)
    return value;
  else
    return __float2bfloat16_rn(value);
}
float widen(float value) { return value; }
float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class Element>
__global__ void fill_y(Element* gmem_y, int64_t elements) {
  int64_t const step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
    gmem_y[i] = to_element<Element>(y_value(i));
  }
}

// What o holds before a call that adds to it.
__host__ __device__ float o_value(int64_t token, int64_t column) {
  return y_value((uint64_t{1} << 40) + uint64_t(token) * 65537 + uint64_t(column));
}
template <class Element>
__global__ void fill_o(Element* gmem_o, int64_t hidden, int64_t pitch) {
  for (int64_t c = threadIdx.x; c < hidden; c += blockDim.x) {
    gmem_o[blockIdx.x * pitch + c] = to_element<Element>(o_value(blockIdx.x, c));
  }
}

bool adds_to_o(Case const& c, int64_t token) {
  return c.adds && (c.adds_every == 0 || token % c.adds_every == 0);
}

struct Routing {
  std::vector<int32_t> token_offsets, inverse_permutation;
  std::vector<float> scores;
  int64_t rows = 0;  // R; P is inverse_permutation.size()
};

Routing make_routing(Case const& c) {
  std::mt19937_64 random(12345);
  Routing routing;
  routing.token_offsets.push_back(0);
  for (int64_t t = 0; t < c.tokens; ++t) {
    auto const slots =
        static_cast<int32_t>(c.varies ? int64_t(random() % uint64_t(2 * c.top_k + 1)) : c.top_k);
    routing.token_offsets.push_back(routing.token_offsets.back() + slots);
  }
  auto const slots = static_cast<size_t>(routing.token_offsets.back());
  std::uniform_real_distribution<float> uniform(0, 1);
  routing.inverse_permutation.assign(slots, -1);
  std::vector<size_t> valid;
  for (size_t j = 0; j < slots; ++j) {
    bool const sentinel = uniform(random) < c.sentinels;
    if (!sentinel) valid.push_back(j);
    routing.scores.push_back(sentinel ? std::numeric_limits<float>::quiet_NaN()
                                      : 0.05f + 0.95f * uniform(random));
  }
  std::shuffle(valid.begin(), valid.end(), random);
  for (size_t slot : valid) routing.inverse_permutation[slot] = int32_t(routing.rows++);
  return routing;
}

// One row of o in fp64, and what an fp32 sum in any order may be off by; `dropped` leaves slots out.
struct ReferenceRow {
  std::vector<double> value, bound;
};

template <class Element>
ReferenceRow reference_row(Case const& c, Routing const& routing, int64_t token, int dropped = 0) {
  ReferenceRow row{std::vector<double>(c.hidden), std::vector<double>(c.hidden)};
  int64_t const begin = routing.token_offsets[token], end = routing.token_offsets[token + 1];
  for (int64_t i = 0; adds_to_o(c, token) && i < c.hidden; ++i) {
    row.value[i] = widen(to_element<Element>(o_value(token, i)));
    row.bound[i] = std::abs(row.value[i]) * double(end - begin) * 0x1p-23;
  }
  for (int64_t slot = begin; slot < end - dropped; ++slot) {
    int64_t const r = routing.inverse_permutation[slot];
    if (r < 0) continue;
    double const score = c.weighted ? routing.scores[slot] : 1.0;
    for (int64_t i = 0; i < c.hidden; ++i) {
      double const term = score * widen(to_element<Element>(y_value(r * c.hidden + i)));
      row.value[i] += term;
      row.bound[i] += std::abs(term) * double(end - begin) * 0x1p-23;
    }
  }
  double const unit = std::is_same_v<Element, float> ? 0x1p-23 : 0x1p-8;
  for (int64_t i = 0; i < c.hidden; ++i) row.bound[i] += unit * std::abs(row.value[i]);
  return row;
}

template <class Element>
bool accepts(Element const* o, ReferenceRow const& reference) {
  for (size_t i = 0; i < reference.value.size(); ++i) {
    double const error = std::abs(widen(o[i]) - reference.value[i]);
    if (!(error <= reference.bound[i])) return false;
  }
  return true;
}

// Compares every element with fp64; also that a lost slot would have been noticed.
template <class Element>
bool check_reference(Case const& c, Routing const& routing, Element const* o) {
  for (int64_t token = 0; token < c.tokens; ++token) {
    if (token >= c.checked_tokens && token < c.tokens - c.checked_tokens) continue;
    Element const* row = o + token * (c.hidden + c.o_padding);
    if (!accepts(row, reference_row<Element>(c, routing, token))) {
      std::printf("  token %lld differs from fp64\n", static_cast<long long>(token));
      return false;
    }
    int64_t const last = int64_t{routing.token_offsets[token + 1]} - 1;
    bool const has_last =
        last >= routing.token_offsets[token] && routing.inverse_permutation[last] >= 0;
    if (has_last && accepts(row, reference_row<Element>(c, routing, token, 1))) {
      std::printf("  token %lld: a lost slot would pass\n", static_cast<long long>(token));
      return false;
    }
  }
  return true;
}

template <class Element>
bool padding_untouched(Case const& c, std::vector<unsigned char> const& o) {
  size_t const row = size_t(c.hidden + c.o_padding) * sizeof(Element);
  for (size_t t = 0; t < size_t(c.tokens); ++t) {
    auto const begin = o.begin() + t * row + size_t(c.hidden) * sizeof(Element);
    if (!std::all_of(begin, o.begin() + (t + 1) * row, [](auto b) { return b == kPoison; })) {
      return false;
    }
  }
  return true;
}

template <class Element>
bool run(Case const& c) {
  Routing const routing = make_routing(c);
  size_t const slots = routing.inverse_permutation.size();
  DeviceBuffer const y(slots * c.hidden * sizeof(Element));  // rows from R on stay poisoned
  fill_y<<<1024, 256>>>(y.as<Element>(), routing.rows * c.hidden);
  require(cudaGetLastError(), "fill_y");
  DeviceBuffer const scores(routing.scores), offsets(routing.token_offsets);
  DeviceBuffer const inverse(routing.inverse_permutation);
  std::vector<uint8_t> adds;
  for (int64_t t = 0; t < c.tokens; ++t) adds.push_back(adds_to_o(c, t) ? 1 : 0);
  DeviceBuffer const device_adds(adds);
  DeviceBuffer o(size_t(c.tokens) * (c.hidden + c.o_padding) * sizeof(Element));

  AggregateArguments const args{
      .gmem_y = y.as<void>(),
      .gmem_scores = c.weighted ? scores.as<float>() : nullptr,
      .gmem_inverse_permutation = inverse.as<int32_t>(),
      .gmem_token_offsets = c.varies ? offsets.as<int32_t>() : nullptr,
      .gmem_o = o.as<void>(),
      .o_pitch = c.hidden + c.o_padding,
      .adds_to_o = c.adds,
      .gmem_adds = c.adds_every != 0 ? device_adds.as<uint8_t>() : nullptr,
      .tokens = c.tokens,
      .hidden = c.hidden,
      .top_k = int32_t(c.top_k),
  };
  auto const result = [&](auto&& launch, char const* what) {
    o.poison();
    if (c.adds) {
      fill_o<<<unsigned(c.tokens), 128>>>(o.as<Element>(), c.hidden, c.hidden + c.o_padding);
      require(cudaGetLastError(), "fill_o");
    }
    require(launch(args, cudaStream_t{}), what);
    require(cudaDeviceSynchronize(), what);
    return o.bytes();
  };
  auto const plain = result(launch_aggregate_plain<Element>, "aggregate_plain");
  bool ok = check_reference(c, routing, reinterpret_cast<Element const*>(plain.data()));
  bool const served =
      c.hidden * sizeof(Element) % 16 == 0 && c.o_padding * sizeof(Element) % 16 == 0;
  if (served) {
    auto const kernel = result(launch_aggregate<Element>, "aggregate");
    if (kernel != plain) std::printf("  kernel and plain twin differ\n"), ok = false;
    if (result(launch_aggregate<Element>, "aggregate") != kernel) {
      std::printf("  two runs differ\n"), ok = false;
    }
    if (!padding_untouched<Element>(c, kernel)) std::printf("  wrote between rows\n"), ok = false;
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
      constexpr int kSms = 7;
      DeviceBuffer const counter(std::vector<uint32_t>{0});
      auto const beside = [&](AggregateArguments const& arguments, cudaStream_t stream) {
        require(cudaDeviceSynchronize(), "what the launch ahead makes");
        return tessera::cuda::launch_aggregate_beside<Element>({arguments, counter.as<uint32_t>()},
                                                               kSms, stream);
      };
      // The second finds the counter as the first left it.
      for (int i = 0; i < 2; ++i) {
        if (result(beside, "aggregate_beside") == kernel) continue;
        std::printf("  aggregate_beside differs\n"), ok = false;
      }
    }
  } else if (launch_aggregate<Element>(args, nullptr) != cudaErrorInvalidValue) {
    std::printf("  rows that are no multiple of 16 bytes were not refused\n"), ok = false;
  }
  std::printf("%s %s %s\n", ok ? "passed" : "FAILED", c.name,
              std::is_same_v<Element, float> ? "fp32" : "bf16");
  return ok;
}

constexpr Case kCases[] = {
    {.name = "no tokens", .tokens = 0, .top_k = 8, .hidden = 256},
    {.name = "one token", .tokens = 1, .top_k = 1, .hidden = 8},
    {.name = "d not a multiple of 64", .tokens = 301, .top_k = 4, .hidden = 1000},
    {.name = "d of one slice and one vector", .tokens = 65, .top_k = 2, .hidden = 264},
    {.name = "rows not a multiple of 16 bytes", .tokens = 33, .top_k = 3, .hidden = 101},
    {.name = "plain sum", .tokens = 500, .top_k = 8, .hidden = 768, .weighted = false},
    {.name = "some sentinels", .tokens = 500, .top_k = 8, .hidden = 512, .sentinels = 0.3},
    {.name = "only sentinels", .tokens = 100, .top_k = 4, .hidden = 512, .sentinels = 1.1},
    {.name = "ten slots", .tokens = 200, .top_k = 10, .hidden = 512},
    {.name = "sixteen slots", .tokens = 200, .top_k = 16, .hidden = 512, .sentinels = 0.1},
    {.name = "more slots than lanes", .tokens = 40, .top_k = 77, .hidden = 320},
    {.name = "varying slots",
     .tokens = 600,
     .top_k = 6,
     .hidden = 384,
     .sentinels = 0.1,
     .varies = true},
    {.name = "varying slots, up to 40, added to o",
     .tokens = 301,
     .top_k = 20,
     .hidden = 776,
     .weighted = false,
     .sentinels = 0.1,
     .varies = true,
     .adds = true,
     .o_padding = 8},
    {.name = "varying slots, several tokens a warp",
     .tokens = 20011,
     .top_k = 8,
     .hidden = 1288,
     .sentinels = 0.02,
     .varies = true,
     .checked_tokens = 200},
    {.name = "varying slots, none most of the time",
     .tokens = 60001,
     .top_k = 5,
     .hidden = 264,
     .sentinels = 0.7,
     .varies = true,
     .checked_tokens = 500},
    {.name = "two slots", .tokens = 300, .top_k = 2, .hidden = 1536},
    {.name = "two slots, sentinels, a part of one vector",
     .tokens = 65,
     .top_k = 2,
     .hidden = 776,
     .sentinels = 0.3,
     .o_padding = 8},
    {.name = "pitched o", .tokens = 100, .top_k = 4, .hidden = 256, .o_padding = 64},
    {.name = "added to o",
     .tokens = 200,
     .top_k = 8,
     .hidden = 264,
     .weighted = false,
     .sentinels = 0.2,
     .adds = true,
     .o_padding = 8},
    {.name = "added to o, two slots",
     .tokens = 65,
     .top_k = 2,
     .hidden = 1288,
     .weighted = false,
     .sentinels = 0.2,
     .adds = true},
    {.name = "added to o of some tokens",
     .tokens = 200,
     .top_k = 8,
     .hidden = 1544,
     .weighted = false,
     .sentinels = 0.1,
     .varies = true,
     .adds = true,
     .adds_every = 3},
    {.name = "added to o of some tokens, two slots, rows not a multiple of 16 bytes",
     .tokens = 35,
     .top_k = 2,
     .hidden = 101,
     .weighted = false,
     .adds = true,
     .adds_every = 2},
    {.name = "added to o, rows not a multiple of 16 bytes",
     .tokens = 33,
     .top_k = 3,
     .hidden = 101,
     .weighted = false,
     .adds = true},
};
constexpr Case kBeyond32Bits = {.name = "R*d > 2^31",
                                .tokens = 80000,
                                .top_k = 8,
                                .hidden = 4096,
                                .sentinels = 0.05,
                                .checked_tokens = 16};

}  // namespace

int main() {
  if (!has_device()) return kSkipped;
  bool ok = true;
  for (Case const& c : kCases) ok = run<float>(c) & run<__nv_bfloat16>(c) & ok;
  ok = run<__nv_bfloat16>(kBeyond32Bits) & ok;
  std::printf(ok ? "all passed\n" : "some FAILED\n");
  return ok ? 0 : 1;
}

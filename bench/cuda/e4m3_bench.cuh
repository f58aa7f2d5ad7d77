// SPDX-License-Identifier: Apache-2.0
// Shapes, quantisers, sums of products in blocks, comparison of bytes and of codes, and candidates that are timed in
// turns: both benchmarks of e4m3 operands use them. Kernels run in random order and the host never waits in between.
//   PROGRAM [--config NAME[,NAME]] [--iters N] [--json FILE]
#pragma once

#include <functional>

#include "../../src/core/fp8.hpp"
#include "support.cuh"

namespace tessera::bench {

using core::E4m3;

constexpr int kBlock = 128;

struct Shape {
  char const* name;
  int tokens, hidden, intermediate, experts, top_k;
};
constexpr Shape kShapes[] = {{"tiny", 777, 512, 256, 7, 2},
                             {"7B-n256", 24576, 1536, 256, 128, 8},
                             {"Qwen3-30B", 32768, 2048, 768, 128, 8},
                             {"Qwen3-235B", 32768, 4096, 1536, 128, 8}};

__device__ inline float dot_of_block(E4m3 const* x, E4m3 const* w) {
  float partial = 0;
  for (int k = 0; k < kBlock; ++k)
    partial = fmaf(core::to_fp32(x[k]), core::to_fp32(w[k]), partial);
  return partial;
}
__device__ inline int expert_of(int const* offsets, int row) {
  int expert = 0;
  while (row >= offsets[expert + 1]) ++expert;
  return expert;
}

static __global__ void checksum(uint32_t const* gmem, int64_t words, unsigned long long* gmem_sum) {
  unsigned long long sum = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words;
       i += int64_t{gridDim.x} * blockDim.x) {
    sum += (gmem[i] + 1ull) * (0x9e3779b97f4a7c15ull * (uint64_t(i) * 2 + 1));
  }
  atomicAdd(gmem_sum, sum);
}

inline float widen(bf16 value) { return __bfloat162float(value); }

template <class T>
std::vector<T> read(T const* gmem, int64_t count) {
  std::vector<T> host(static_cast<size_t>(count));
  TESSERA_CUDA(cudaMemcpy(host.data(), gmem, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

// Codes and scales, a scale for each 128, are those that the CPU makes of the values.
inline bool codes_are_right(std::vector<bf16> const& values, std::vector<uint8_t> const& codes,
                            std::vector<float> const& scales) {
  for (size_t c0 = 0; c0 < values.size(); c0 += kBlock) {
    uint32_t largest = 0;
    for (size_t c = c0; c < c0 + kBlock; ++c) {
      largest = std::max(largest, core::fp32_bits(widen(values[c])) & 0x7fffffffu);
    }
    core::BlockScale const scale = core::fp32_scale(largest);
    if (core::fp32_bits(scale.scale) != core::fp32_bits(scales[c0 / kBlock])) return false;
    for (size_t c = c0; c < c0 + kBlock; ++c) {
      if (core::quantise(widen(values[c]), scale).bits != codes[c]) return false;
    }
  }
  return true;
}

// x (rows,width) to codes and scales.
inline void quantise_rows(bf16 const* gmem_x, int64_t rows, int64_t width, uint8_t* gmem_codes,
                          float* gmem_scales) {
  TESSERA_CUDA(cuda::launch_quantise_rows_kernel({.gmem_x = gmem_x,
                                                  .rows = rows,
                                                  .width = width,
                                                  .pitch = width,
                                                  .gmem_codes = gmem_codes,
                                                  .gmem_scales = gmem_scales},
                                                 nullptr));
}

// Contiguous weights (E,halves,rows,width), as the kernel takes them; where codes go is left to the caller.
inline cuda::QuantiseWeightsArguments weights_to_quantise(bf16 const* gmem_w, int halves,
                                                          int64_t rows, int64_t width,
                                                          int experts) {
  return {.w = {cuda::contiguous_half(gmem_w, halves, 0, rows, width),
                halves == 2 ? cuda::contiguous_half(gmem_w, halves, 1, rows, width)
                            : cuda::WeightRows{}},
          .rows = rows,
          .width = width,
          .halves = halves,
          .experts = experts,
          .gmem_codes = nullptr,
          .gmem_scales = nullptr};
}

struct Candidate {
  char const* name;
  double flops, bytes;
  std::function<void()> launch;
  std::vector<float> ms;
};

inline void time_in_turns(std::vector<Candidate>& candidates, int iters) {
  constexpr int kWarmUp = 20;
  std::vector<Timer> timers(candidates.size() * (kWarmUp + iters));
  std::vector<size_t> order(candidates.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::mt19937 random(1);
  for (int i = 0; i < kWarmUp + iters; ++i) {
    std::shuffle(order.begin(), order.end(), random);
    for (size_t const c : order) timers[i * order.size() + c].record(candidates[c].launch);
  }
  for (int i = kWarmUp; i < kWarmUp + iters; ++i) {
    for (size_t c = 0; c < order.size(); ++c) {
      candidates[c].ms.push_back(timers[i * order.size() + c].ms());
    }
  }
}

inline void report(Shape const& s, char const* pass, std::vector<Candidate>& candidates, int iters,
                   bool checked, std::string& rows) {
  time_in_turns(candidates, iters);
  TESSERA_CUDA(cudaDeviceSynchronize());
  std::printf("after timing: %s\n",
              read_command("nvidia-smi -i 0 --query-gpu=clocks.sm,power.draw --format=csv,noheader")
                  .c_str());
  for (Candidate const& c : candidates) {
    Quantiles const q = quantiles(c.ms);
    double const tflops = c.flops / (double(q.median) * 1e9);
    double const tbps = c.bytes / (double(q.median) * 1e9);
    std::printf("  %-26s %8.4f ms (%.4f to %.4f) %7.1f TFLOP/s %5.2f TB/s\n", c.name, q.median,
                q.p10, q.p90, tflops, tbps);
    char text[512];
    std::snprintf(text, sizeof text,
                  "%s\n  {\"config\": \"%s\", \"shape\": [%d, %d, %d, %d, %d], \"gpus\": 1, "
                  "\"routing\": \"random\", \"pass\": \"%s\", \"variant\": \"%s\", "
                  "\"ms\": %.4f, \"ms_p10\": %.4f, \"ms_p90\": %.4f, \"tflops\": %.1f, "
                  "\"tbps\": %.3f, \"checked\": %s}",
                  rows.empty() ? "" : ",", s.name, s.tokens, s.hidden, s.intermediate, s.experts,
                  s.top_k, pass, c.name, q.median, q.p10, q.p90, tflops, tbps,
                  checked ? "true" : "false");
    rows += text;
  }
  std::fflush(stdout);
}

// bench_shape(shape, iters, sms, rows): checks and reports; false if something was wrong.
inline int run(int argc, char** argv, bool (*bench_shape)(Shape const&, int, int, std::string&)) {
  std::string configs = "tiny,Qwen3-30B,Qwen3-235B", json, command;
  int iters = 60;
  for (int i = 0; i < argc; ++i) command += (i ? " " : "") + std::string(argv[i]);
  for (int i = 1; i < argc; i += 2) {
    std::string const flag = argv[i];
    if (i + 1 == argc || (flag != "--config" && flag != "--iters" && flag != "--json")) {
      std::fprintf(stderr, "unknown option or no value: %s\n", argv[i]);
      return 2;
    }
    if (flag == "--config") configs = argv[i + 1];
    if (flag == "--iters") iters = std::atoi(argv[i + 1]);
    if (flag == "--json") json = argv[i + 1];
  }
  int sms = 0;
  TESSERA_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  std::string rows;
  bool good = true;
  for (Shape const& s : kShapes) {
    if (("," + configs + ",").find("," + std::string(s.name) + ",") == std::string::npos) continue;
    good = bench_shape(s, iters, sms, rows) && good;
  }
  if (!json.empty()) {
    write_results(
        json, command,
        "median of " + std::to_string(iters) +
            " after 20 warm-ups, kernels interleaved in random order, uniform random data",
        rows);
  }
  return good && !rows.empty() ? 0 : 1;
}

}  // namespace tessera::bench

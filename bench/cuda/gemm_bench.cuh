// SPDX-License-Identifier: Apache-2.0
// What the benchmarks of single GEMM kernels share: shapes, options, interleaved timing against a
// cuBLAS batched GEMM of the balanced shape, results as JSON.
//
//   PROGRAM --tiny                     small awkward shapes, checks only
//   PROGRAM [--config NAME[,NAME]|all] [--routing random|balanced] [--only SUBSTRING|=NAME]
//           [--iters N] [--rest MS] [--json FILE]
//   PROGRAM --once --config NAME --only SUBSTRING      a single launch each, for profilers
#pragma once

#include <cublas_v2.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include "support.cuh"

namespace tessera::bench {

struct Shape {
  char const* name;
  int tokens, hidden, intermediate, experts, top_k;
  int64_t rows() const { return int64_t{tokens} * top_k; }
};

inline std::vector<Shape> named_shapes() {
  return {{"1.4B-n256", 40960, 768, 256, 128, 8},   {"7B-n256", 24576, 1536, 256, 128, 8},
          {"7B-n512", 24576, 1536, 512, 64, 4},     {"7B-n1024", 24576, 1536, 1024, 32, 2},
          {"30B-n256", 32768, 4096, 256, 256, 16},  {"30B-n1024", 32768, 4096, 1024, 64, 4},
          {"120B-n512", 32768, 4096, 512, 256, 16}, {"Qwen3Next", 32768, 2048, 512, 512, 10},
          {"Qwen3-30B", 32768, 2048, 768, 128, 8},  {"OLMoE", 32768, 2048, 1024, 64, 8}};
}

// Awkward ones: one tile, ragged, sparse, tails of d and n, no rows.
inline std::vector<Shape> tiny_shapes() {
  return {{"one tile", 128, 256, 128, 1, 1},    {"k loop", 96, 512, 128, 1, 1},
          {"two experts", 300, 256, 128, 2, 1}, {"ragged", 777, 320, 256, 7, 2},
          {"sparse", 40, 256, 128, 70, 2},      {"n tail", 500, 320, 200, 5, 3},
          {"d tail", 410, 328, 136, 6, 2},      {"deep", 3000, 704, 384, 33, 4},
          {"no rows", 0, 256, 128, 4, 2}};
}

constexpr int kCanaryRows = 128;
constexpr int kSets = 2;  // rotated, so that no launch finds its inputs in L2

struct BenchOptions {
  bool tiny = false;
  bool once = false;
  std::string config, routing, only, json, command;
  int iters = 60;
  int rest_ms = 0;  // idle time before each launch: 0 sustains the load, 10 shows burst clocks

  bool selects(std::string const& variant) const {
    return only.starts_with('=') ? variant == only.substr(1)
                                 : variant.find(only) != std::string::npos;
  }
  bool selects_config(std::string const& name) const {
    return config == "all" || ("," + config + ",").find("," + name + ",") != std::string::npos;
  }
};

inline int sm_count() {
  int count = 0;
  TESSERA_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  return count;
}

// A kernel to be timed; launch(set) runs it on one of kSets copies of the data.
struct Candidate {
  std::string name;
  bool checked;
  std::function<void(int set)> launch;
  std::vector<float> ms;
};

// C[e] (m x n) = A[e] (m x k) * B[e]^T (n x k), all row-major bf16 and contiguous.
inline void cublas_batched(cublasHandle_t handle, int64_t m, int64_t n, int64_t k, int batch,
                           bf16 const* a, bf16 const* b, bf16* c) {
  float const one = 1;
  float const zero = 0;
  cublasStatus_t const status = cublasGemmStridedBatchedEx(
      handle, CUBLAS_OP_T, CUBLAS_OP_N, int(n), int(m), int(k), &one, b, CUDA_R_16BF, int(k), n * k,
      a, CUDA_R_16BF, int(k), m * k, &zero, c, CUDA_R_16BF, int(n), m * n, batch,
      CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  if (status != CUBLAS_STATUS_SUCCESS) std::fprintf(stderr, "cuBLAS status %d\n", int(status));
}

struct Ceilings {
  double bf16_tflops_8k, copy_tbps;
};

inline Ceilings measure_ceilings(cublasHandle_t handle) {
  constexpr int64_t kSize = 8192;
  DeviceBuffer<bf16> a(kSize * kSize), b(kSize * kSize), c(kSize * kSize);
  fill_uniform<<<4096, 256>>>(a.get(), a.count(), 1, 1.0f);
  fill_uniform<<<4096, 256>>>(b.get(), b.count(), 2, 1.0f);
  Timer timer;
  std::vector<float> gemm, copy;
  DeviceBuffer<bf16> from(int64_t{1} << 30), to(int64_t{1} << 30);
  for (int i = 0; i < 30; ++i) {
    timer.record(
        [&] { cublas_batched(handle, kSize, kSize, kSize, 1, a.get(), b.get(), c.get()); });
    if (i >= 10) gemm.push_back(timer.ms());
    timer.record(
        [&] { cudaMemcpyAsync(to.get(), from.get(), from.count() * 2, cudaMemcpyDeviceToDevice); });
    if (i >= 10) copy.push_back(timer.ms());
  }
  return {2.0 * kSize * kSize * kSize / (quantiles(gemm).median * 1e9),
          4.0 * double(from.count()) / (quantiles(copy).median * 1e9)};
}

// The order is random and the host never waits in between: near the power limit a kernel's clock depends
// on what ran just before it, so no candidate may keep a place, or a predecessor, of its own.
inline void time_interleaved(std::vector<Candidate>& candidates, int iters, int rest_ms) {
  int const warmup = rest_ms ? 3 : 20;
  size_t const count = candidates.size();
  std::vector<Timer> timers(count * (warmup + iters));
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  std::mt19937 random(1);
  for (int i = 0; i < warmup + iters; ++i) {
    std::shuffle(order.begin(), order.end(), random);
    for (size_t const c : order) {
      if (rest_ms) {
        TESSERA_CUDA(cudaDeviceSynchronize());
        std::this_thread::sleep_for(std::chrono::milliseconds(rest_ms));
      }
      timers[i * count + c].record([&] { candidates[c].launch(i % kSets); });
    }
  }
  for (int i = warmup; i < warmup + iters; ++i) {
    for (size_t c = 0; c < count; ++c) candidates[c].ms.push_back(timers[i * count + c].ms());
  }
}

// Rows of one kernel's results, as bench/results/ keeps them.
class BenchReport {
 public:
  BenchReport(BenchOptions const& options, char const* kernel, cublasHandle_t handle)
      : options_(options), kernel_(kernel), ceilings_(measure_ceilings(handle)) {
    std::printf("ceilings: %.1f TFLOP/s (8192^3 bf16), copy %.3f TB/s\n", ceilings_.bf16_tflops_8k,
                ceilings_.copy_tbps);
  }

  // candidates[0] is the cuBLAS call.
  void add(Shape const& s, char const* routing, double flops,
           std::vector<Candidate> const& candidates) {
    std::string const state = read_command(
        "nvidia-smi -i 0 --query-gpu=clocks.sm,clocks.mem,power.draw --format=csv,noheader");
    float const bound = quantiles(candidates[0].ms).median;
    std::printf("  after timing: %s\n  %-28s %8s %8s %8s %7s %6s\n", state.c_str(), "", "ms", "p10",
                "p90", "TFLOP/s", "ratio");
    for (Candidate const& c : candidates) {
      Quantiles const q = quantiles(c.ms);
      double const tflops = flops / (double(q.median) * 1e9);
      std::printf("  %-28s %8.4f %8.4f %8.4f %7.1f %6.3f\n", c.name.c_str(), q.median, q.p10, q.p90,
                  tflops, bound / q.median);
      bool const blas = &c == candidates.data();
      char text[640];
      std::snprintf(
          text, sizeof text,
          "%s\n  {\"config\": \"%s\", \"shape\": [%d, %d, %d, %d, %d], \"dtype\": \"bf16\", "
          "\"gpus\": 1, \"routing\": \"%s\", \"round\": \"none\", \"pass\": \"%s\", \"impl\": "
          "\"%s\", \"variant\": \"%s\", \"ms\": %.4f, \"ms_p10\": %.4f, \"ms_p90\": %.4f, "
          "\"tflops\": %.1f, \"bound_ms\": %.4f, \"ratio\": %.4f, \"checked\": %s}",
          rows_.empty() ? "" : ",", s.name, s.tokens, s.hidden, s.intermediate, s.experts, s.top_k,
          routing, kernel_, blas ? "cublas-bmm" : "tessera", blas ? "" : c.name.c_str(), q.median,
          q.p10, q.p90, tflops, bound, bound / q.median, c.checked ? "true" : "false");
      rows_ += text;
    }
    std::fflush(stdout);
  }

  void write() const {
    if (options_.json.empty()) return;
    char ceilings[80];
    std::snprintf(ceilings, sizeof ceilings, "\"bf16_tflops_8k\": %.1f, \"copy_tbps\": %.3f",
                  ceilings_.bf16_tflops_8k, ceilings_.copy_tbps);
    write_results(options_.json, options_.command,
                  "median of " + std::to_string(options_.iters) +
                      " after 20 warm-ups, candidates interleaved in random order, two sets of "
                      "buffers rotated, uniform random data",
                  rows_, ceilings);
  }

 private:
  BenchOptions options_;
  char const* kernel_;
  Ceilings ceilings_;
  std::string rows_;
};

// bench_shape(shape, balanced, handle, report) for every selected shape and routing.
template <typename BenchShape>
void bench_selected(BenchOptions const& options, char const* kernel, cublasHandle_t handle,
                    BenchShape bench_shape) {
  BenchReport report(options, kernel, handle);
  for (Shape const& s : named_shapes()) {
    if (!options.selects_config(s.name)) continue;
    for (bool balanced : {false, true}) {
      if (options.once && balanced) continue;
      if (!options.routing.empty() && (options.routing == "balanced") != balanced) continue;
      bench_shape(s, balanced, handle, report);
    }
  }
  report.write();
}

// Times the candidates, of which the first is the cuBLAS call; with --once launches each and returns.
inline void time_and_report(BenchOptions const& options, Shape const& s, char const* routing,
                            double flops, std::vector<Candidate>& candidates, BenchReport& report) {
  if (options.once) {
    for (Candidate const& c : candidates) c.launch(1);
    TESSERA_CUDA(cudaDeviceSynchronize());
    return;
  }
  time_interleaved(candidates, options.iters, options.rest_ms);
  report.add(s, routing, flops, candidates);
}

// False after an error, which was printed.
inline bool parse_options(BenchOptions& options, int argc, char** argv) {
  for (int i = 0; i < argc; ++i) options.command += (i ? " " : "") + std::string(argv[i]);
  for (int i = 1; i < argc; ++i) {
    std::string const flag = argv[i];
    bool const has_value = i + 1 < argc;
    if (flag == "--tiny") {
      options.tiny = true;
    } else if (flag == "--once") {
      options.once = true;
    } else if (flag == "--config" && has_value) {
      options.config = argv[++i];
    } else if (flag == "--routing" && has_value) {
      options.routing = argv[++i];
    } else if (flag == "--only" && has_value) {
      options.only = argv[++i];
    } else if (flag == "--json" && has_value) {
      options.json = argv[++i];
    } else if (flag == "--rest" && has_value) {
      options.rest_ms = std::atoi(argv[++i]);
    } else if (flag == "--iters" && has_value) {
      options.iters = std::atoi(argv[++i]);
    } else {
      std::fprintf(stderr, "unknown option %s\n", flag.c_str());
      return false;
    }
  }
  return true;
}

// main() of a program: the checks of --tiny, check_tiny(options, handle), or bench_shape(options, shape, balanced,
// handle, report) for every selected shape and routing. configs: those of a run without --config.
template <typename CheckTiny, typename BenchShape>
int gemm_main(int argc, char** argv, char const* kernel, char const* configs, CheckTiny check_tiny,
              BenchShape bench_shape) {
  BenchOptions options;
  options.config = configs;
  if (!parse_options(options, argc, argv)) return 2;
  cublasHandle_t handle;
  if (cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS) return 1;
  if (options.tiny) return check_tiny(options, handle);
  bench_selected(options, kernel, handle,
                 [&](auto&&... arguments) { bench_shape(options, arguments...); });
  cublasDestroy(handle);
  return 0;
}

}  // namespace tessera::bench

// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd against cuBLAS: every variant is checked against the plain twin (and that
// against fp64 on the host), then timed, interleaved with a batched GEMM of the balanced shape
// E x (T*K/E) x 2n x d in the same process. ratio = cuBLAS ms / our ms; ours also applies swiglu,
// stores a, and takes whatever rows the routing gives.
//
//   up_projection_fwd --tiny                     small awkward shapes, checks only
//   up_projection_fwd [--config NAME] [--routing random|balanced] [--only SUBSTRING]
//                     [--iters N] [--rest MS] [--json FILE]
//   up_projection_fwd --once --config NAME --only SUBSTRING      a single launch each, for profilers
#include <cublas_v2.h>

#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "../../src/cuda/plain/up_projection_fwd.hpp"
#include "support.cuh"
#include "up_projection_variants.cuh"

namespace tessera::bench {
namespace {

struct Shape {
  char const* name;
  int tokens, hidden, intermediate, experts, top_k;
  int64_t rows() const { return int64_t{tokens} * top_k; }
  double flops() const { return 4.0 * double(rows()) * intermediate * hidden; }
};

struct Options {
  bool tiny = false;
  bool once = false;
  std::string config, routing, only, json, command;
  int iters = 60;
  int rest_ms = 0;  // idle time before each launch: 0 sustains the load, 10 shows burst clocks

  // --only SUBSTRING, or =NAME
  bool selects(Variant const& v) const {
    std::string const name = v.name;
    return only.starts_with('=') ? name == only.substr(1) : name.find(only) != std::string::npos;
  }
};

constexpr int kCanaryRows = 128;
constexpr int kSets = 2;  // rotated, so that no launch finds its inputs in L2

struct Problem {
  Problem(Shape s, Routing r)
      : shape(s),
        routing(std::move(r)),
        rows(int64_t(routing.gather_index.size())),
        capacity(rows + kCanaryRows),
        expert_offsets(routing.expert_offsets),
        gather_index(routing.gather_index),
        tile_counter(std::vector<int>{0}) {
    for (int set = 0; set < kSets; ++set) {
      x.emplace_back(std::make_unique<DeviceBuffer<bf16>>(int64_t{s.tokens} * s.hidden));
      sorted.emplace_back(std::make_unique<DeviceBuffer<bf16>>(capacity * s.hidden));
      w_up.emplace_back(
          std::make_unique<DeviceBuffer<bf16>>(int64_t{2} * s.experts * s.intermediate * s.hidden));
      h.emplace_back(std::make_unique<DeviceBuffer<bf16>>(capacity * 2 * s.intermediate));
      a.emplace_back(std::make_unique<DeviceBuffer<bf16>>(capacity * s.intermediate));
      // Both sets hold the same values: one reference serves them.
      fill_uniform<<<4096, 256>>>(x[set]->get(), x[set]->count(), 1, 1.0f);
      fill_uniform<<<4096, 256>>>(w_up[set]->get(), w_up[set]->count(), 2, 0x1p-4f);
      sorted[set]->poison();
      permute_rows<<<4096, 256>>>(reinterpret_cast<uint4*>(sorted[set]->get()),
                                  reinterpret_cast<uint4 const*>(x[set]->get()), gather_index.get(),
                                  rows, s.hidden / 8);
    }
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  UpProjectionArguments arguments(Variant const& v, int set) const {
    bool const gathers = v.gemm.a_loader == ALoader::kGather;
    return {.gmem_x = gathers ? x[set]->get() : sorted[set]->get(),
            .x_rows = gathers ? shape.tokens : capacity,
            .gather_index = gathers ? gather_index.get() : nullptr,
            .gmem_w_up = w_up[set]->get(),
            .gmem_h = h[set]->get(),
            .gmem_a = a[set]->get(),
            .rows = capacity,
            .expert_offsets = expert_offsets.get(),
            .tile_counter = tile_counter.get(),
            .experts = shape.experts,
            .hidden = shape.hidden,
            .intermediate = shape.intermediate};
  }

  Shape shape;
  Routing routing;
  int64_t rows, capacity;
  DeviceBuffer<int> expert_offsets, gather_index, tile_counter;
  std::vector<std::unique_ptr<DeviceBuffer<bf16>>> x, sorted, w_up, h, a;
};

// fp32 h and a from the plain twin, themselves compared with fp64 on a few rows.
class Reference {
 public:
  explicit Reference(Problem const& p)
      : problem_(p), h_(p.rows * 2 * p.shape.intermediate), a_(p.rows * p.shape.intermediate) {
    h_.poison();
    a_.poison();
    TESSERA_CUDA(cuda::plain::up_projection_fwd({.gmem_x = p.x[0]->get(),
                                                 .gather_index = p.gather_index.get(),
                                                 .gmem_w_up = p.w_up[0]->get(),
                                                 .expert_offsets = p.expert_offsets.get(),
                                                 .experts = p.shape.experts,
                                                 .hidden = p.shape.hidden,
                                                 .intermediate = p.shape.intermediate,
                                                 .gmem_h = h_.get(),
                                                 .gmem_a = a_.get()},
                                                p.rows, nullptr));
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  // Largest relative error of the twin on sampled rows, h and a together.
  double error_against_fp64() const {
    Shape const& s = problem_.shape;
    int64_t const n = s.intermediate;
    double worst = 0;
    std::vector<bf16> x(s.hidden), w(2 * n * s.hidden);
    std::vector<float> h(2 * n), a(n);
    for (int sample = 0; sample < 4 && problem_.rows > 0; ++sample) {
      int64_t const row = sample * (problem_.rows - 1) / 3;
      auto const& offsets = problem_.routing.expert_offsets;
      int64_t const e =
          std::upper_bound(offsets.begin(), offsets.end(), int(row)) - offsets.begin() - 1;
      fetch(x, problem_.x[0]->get() + int64_t{problem_.routing.gather_index[row]} * s.hidden);
      fetch(w, problem_.w_up[0]->get() + e * 2 * n * s.hidden);
      fetch(h, h_.get() + row * 2 * n);
      fetch(a, a_.get() + row * n);
      double difference = 0;
      double norm = 0;
      auto const add = [&](double got, double want) {
        difference += (got - want) * (got - want);
        norm += want * want;
      };
      for (int64_t i = 0; i < n; ++i) {
        double gate = 0;
        double up = 0;
        for (int64_t c = 0; c < s.hidden; ++c) {
          gate += double(__bfloat162float(x[c])) * double(__bfloat162float(w[i * s.hidden + c]));
          up +=
              double(__bfloat162float(x[c])) * double(__bfloat162float(w[(n + i) * s.hidden + c]));
        }
        add(h[i], gate);
        add(h[n + i], up);
        add(a[i], gate / (1 + std::exp(-gate)) * up);
      }
      worst = std::max(worst, std::isfinite(difference) ? std::sqrt(difference / norm) : 1.0);
    }
    return worst;
  }

  bool accepts(int set, Sigmoid sigmoid, std::string& note) const {
    Shape const& s = problem_.shape;
    float const product_scale = sigmoid == Sigmoid::kTanh ? 0x1p-12f : 0.0f;
    Deviation const h = compare(problem_.h[set]->get(), h_.get(), nullptr, 2 * s.intermediate, 0);
    Deviation const a =
        compare(problem_.a[set]->get(), a_.get(), h_.get(), s.intermediate, product_scale);
    char text[160];
    std::snprintf(text, sizeof text,
                  "h row %.1e elem %.2f bad %u canary %u; a row %.1e elem %.2f bad %u canary %u",
                  h.worst_row_e7 * 1e-7, h.worst_element * 1e-3, h.bad_elements, h.bad_canaries,
                  a.worst_row_e7 * 1e-7, a.worst_element * 1e-3, a.bad_elements, a.bad_canaries);
    note = text;
    return h.ok(2.5e-3) && a.ok(4e-3);
  }

 private:
  template <typename T>
  static void fetch(std::vector<T>& host, T const* gmem) {
    TESSERA_CUDA(cudaMemcpy(host.data(), gmem, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
  }

  Deviation compare(bf16 const* out, float const* ref, float const* gate_up, int64_t columns,
                    float product_scale) const {
    DeviceBuffer<Deviation> result(1);
    TESSERA_CUDA(cudaMemset(result.get(), 0, sizeof(Deviation)));
    compare_rows<<<unsigned(problem_.capacity), 256>>>(out, ref, gate_up, problem_.rows, columns,
                                                       1e-4f, product_scale, result.get());
    Deviation host{};
    TESSERA_CUDA(cudaMemcpy(&host, result.get(), sizeof host, cudaMemcpyDeviceToHost));
    return host;
  }

  Problem const& problem_;
  DeviceBuffer<float> h_, a_;
};

struct Candidate {
  std::string name;
  bool checked;
  std::function<void(int set)> launch;
  std::vector<float> ms;
};

Candidate make_candidate(Variant const& v, Problem const& p) {
  int clusters = 0;
  TESSERA_CUDA(v.resident(clusters));
  std::vector<UpProjectionParams> params(kSets);
  for (int set = 0; set < kSets; ++set) {
    TESSERA_CUDA(v.make_params(params[set], p.arguments(v, set)));
  }
  return {.name = v.name,
          .checked = false,
          .launch = [=](int set) { TESSERA_CUDA(v.launch(params[set], clusters, nullptr)); },
          .ms = {}};
}

// Both sets hold the same inputs, so two runs must give the same bits.
bool run_and_check(Candidate& c, Variant const& v, Problem const& p, Reference const& reference) {
  p.h[0]->poison();
  p.a[0]->poison();
  p.h[1]->poison();
  p.a[1]->poison();
  c.launch(0);
  c.launch(1);
  cudaError_t const error = cudaDeviceSynchronize();
  std::string note = cudaGetErrorString(error);
  if (error == cudaSuccess) {
    bool const repeats = same_bits(*p.h[0], *p.h[1]) && same_bits(*p.a[0], *p.a[1]);
    c.checked = reference.accepts(0, v.sigmoid, note) && repeats;
    if (!repeats) note += "; a second run differs";
  }
  std::printf("  %-4s %-28s %s\n", c.checked ? "ok" : "BAD", c.name.c_str(), note.c_str());
  std::fflush(stdout);
  if (error != cudaSuccess) std::exit(1);
  return c.checked;
}

// The comparison must reject a wrong row and a missing one.
bool comparison_rejects_mutants(Problem const& p, Reference const& reference) {
  std::string note;
  int64_t const pitch = int64_t{2} * p.shape.intermediate;
  bf16* const h = p.h[0]->get();
  TESSERA_CUDA(cudaMemcpy(h + pitch, h, pitch * sizeof(bf16), cudaMemcpyDeviceToDevice));
  bool const swapped = reference.accepts(0, Sigmoid::kTanh, note);
  TESSERA_CUDA(cudaMemset(h + pitch, 0, pitch * sizeof(bf16)));
  bool const zeroed = reference.accepts(0, Sigmoid::kTanh, note);
  return !swapped && !zeroed;
}

int check_tiny(Options const& options) {
  Shape const shapes[] = {{"one tile", 128, 256, 128, 1, 1},    {"k loop", 96, 512, 128, 1, 1},
                          {"two experts", 300, 256, 128, 2, 1}, {"ragged", 777, 320, 256, 7, 2},
                          {"sparse", 40, 256, 128, 70, 2},      {"n tail", 500, 320, 200, 5, 3},
                          {"deep", 3000, 704, 384, 33, 4},      {"no rows", 0, 256, 128, 4, 2}};
  int failures = 0;
  for (Shape const& s : shapes) {
    Problem const p(s, Routing::random(s.tokens, s.experts, s.top_k, 7));
    Reference const reference(p);
    double const twin = reference.error_against_fp64();
    std::printf("%s (%d,%d,%d,%d,%d): twin against fp64 %.1e\n", s.name, s.tokens, s.hidden,
                s.intermediate, s.experts, s.top_k, twin);
    if (twin > 1e-5) ++failures;
    for (Variant const& v : all_variants()) {
      if (!options.selects(v)) continue;
      Candidate c = make_candidate(v, p);
      if (!run_and_check(c, v, p, reference)) ++failures;
    }
    if (s.tokens > 1 && !comparison_rejects_mutants(p, reference)) {
      std::printf("  BAD  the comparison accepts mutants\n");
      ++failures;
    }
  }
  std::printf("tiny: %d failures\n", failures);
  return failures ? 1 : 0;
}

void cublas_batched(cublasHandle_t handle, Problem const& p, int set) {
  Shape const& s = p.shape;
  int64_t const m = s.rows() / s.experts;
  int64_t const n = int64_t{2} * s.intermediate;
  int64_t const k = s.hidden;
  float const one = 1;
  float const zero = 0;
  // Column-major view: h^T (2n x m) = w_up (k x 2n, transposed) * x^T (k x m), per expert.
  cublasStatus_t const status = cublasGemmStridedBatchedEx(
      handle, CUBLAS_OP_T, CUBLAS_OP_N, int(n), int(m), int(k), &one, p.w_up[set]->get(),
      CUDA_R_16BF, int(k), n * k, p.sorted[set]->get(), CUDA_R_16BF, int(k), m * k, &zero,
      p.h[set]->get(), CUDA_R_16BF, int(n), m * n, s.experts, CUBLAS_COMPUTE_32F,
      CUBLAS_GEMM_DEFAULT);
  if (status != CUBLAS_STATUS_SUCCESS) std::fprintf(stderr, "cuBLAS status %d\n", int(status));
}

struct Ceilings {
  double bf16_tflops_8k, copy_tbps;
};

Ceilings measure_ceilings(cublasHandle_t handle) {
  constexpr int64_t kSize = 8192;
  Shape const square{"8k", int(kSize), int(kSize), int(kSize / 2), 1, 1};
  Problem const p(square, Routing::random(int(kSize), 1, 1, 1));
  Timer timer;
  std::vector<float> gemm, copy;
  DeviceBuffer<bf16> from(int64_t{1} << 30), to(int64_t{1} << 30);
  for (int i = 0; i < 30; ++i) {
    timer.record([&] { cublas_batched(handle, p, i % kSets); });
    if (i >= 10) gemm.push_back(timer.ms());
    timer.record(
        [&] { cudaMemcpyAsync(to.get(), from.get(), from.count() * 2, cudaMemcpyDeviceToDevice); });
    if (i >= 10) copy.push_back(timer.ms());
  }
  return {2.0 * kSize * kSize * kSize / (quantiles(gemm).median * 1e9),
          4.0 * double(from.count()) / (quantiles(copy).median * 1e9)};
}

// The order rotates and the host never waits in between: near the power limit a kernel's clock depends
// on what ran just before it, so no candidate may keep a place of its own.
void time_interleaved(std::vector<Candidate>& candidates, int iters, int rest_ms) {
  int const warmup = rest_ms ? 3 : 20;
  size_t const count = candidates.size();
  std::vector<Timer> timers(count * (warmup + iters));
  for (int i = 0; i < warmup + iters; ++i) {
    for (size_t place = 0; place < count; ++place) {
      size_t const c = (place + i) % count;
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

void append_row(std::string& rows, Shape const& s, char const* routing, Candidate const& c,
                float bound_ms) {
  Quantiles const q = quantiles(c.ms);
  bool const blas = c.name == "cublas-bmm";
  char text[640];
  std::snprintf(
      text, sizeof text,
      "%s\n  {\"config\": \"%s\", \"shape\": [%d, %d, %d, %d, %d], \"dtype\": \"bf16\", \"gpus\": "
      "1, "
      "\"routing\": \"%s\", \"round\": \"none\", \"pass\": \"up_projection_fwd\", \"impl\": "
      "\"%s\", "
      "\"variant\": \"%s\", \"ms\": %.4f, \"ms_p10\": %.4f, \"ms_p90\": %.4f, \"tflops\": %.1f, "
      "\"bound_ms\": %.4f, \"ratio\": %.4f, \"checked\": %s}",
      rows.empty() ? "" : ",", s.name, s.tokens, s.hidden, s.intermediate, s.experts, s.top_k,
      routing, blas ? "cublas-bmm" : "tessera", blas ? "" : c.name.c_str(), q.median, q.p10, q.p90,
      s.flops() / (double(q.median) * 1e9), bound_ms, bound_ms / q.median,
      c.checked ? "true" : "false");
  rows += text;
}

void bench_shape(Shape const& s, bool balanced, cublasHandle_t handle, Options const& options,
                 std::string& rows) {
  char const* const routing = balanced ? "balanced" : "random";
  Problem const p(s, balanced ? Routing::balanced(s.tokens, s.experts, s.top_k, 11)
                              : Routing::random(s.tokens, s.experts, s.top_k, 11));
  Reference const reference(p);
  std::printf("%s %s: twin against fp64 %.1e\n", s.name, routing, reference.error_against_fp64());
  std::vector<Candidate> candidates;
  candidates.push_back({"cublas-bmm", true, [&](int set) { cublas_batched(handle, p, set); }, {}});
  for (Variant const& v : all_variants()) {
    if (!options.selects(v)) continue;
    Candidate c = make_candidate(v, p);
    if (run_and_check(c, v, p, reference)) candidates.push_back(std::move(c));
  }
  if (options.once) {
    for (Candidate const& c : candidates) c.launch(1);
    TESSERA_CUDA(cudaDeviceSynchronize());
    return;
  }
  time_interleaved(candidates, options.iters, options.rest_ms);
  std::string const state =
      read_command("nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.draw --format=csv,noheader");
  float const bound = quantiles(candidates[0].ms).median;
  std::printf("  after timing: %s\n  %-28s %8s %8s %8s %7s %6s\n", state.c_str(), "", "ms", "p10",
              "p90", "TFLOP/s", "ratio");
  for (Candidate const& c : candidates) {
    Quantiles const q = quantiles(c.ms);
    std::printf("  %-28s %8.4f %8.4f %8.4f %7.1f %6.3f\n", c.name.c_str(), q.median, q.p10, q.p90,
                s.flops() / (double(q.median) * 1e9), bound / q.median);
    append_row(rows, s, routing, c, bound);
  }
  std::fflush(stdout);
}

void write_json(Options const& options, Ceilings ceilings, std::string const& rows) {
  cudaDeviceProp device{};
  TESSERA_CUDA(cudaGetDeviceProperties(&device, 0));
  std::string const driver =
      read_command("nvidia-smi --query-gpu=driver_version --format=csv,noheader");
  std::string const clocks =
      read_command("nvidia-smi --query-gpu=clocks.sm,clocks.mem --format=csv,noheader,nounits");
  std::string const date = read_command("date +%F");
  FILE* const file = std::fopen(options.json.c_str(), "w");
  if (file == nullptr) return;
  std::fprintf(
      file,
      "{\"command\": \"%s\", \"commit\": \"%s\", \"device\": \"%s\", \"driver\": \"%s\", "
      "\"clocks_mhz\": [%s], \"date\": \"%s\",\n \"protocol\": \"median of %d after 20 "
      "warm-ups, candidates interleaved in rotating order, two sets of buffers rotated, uniform "
      "random data\","
      "\n \"ceilings\": {\"bf16_tflops_8k\": %.1f, \"copy_tbps\": %.3f},\n \"rows\": [%s\n]}\n",
      options.command.c_str(), std::getenv("COMMIT") ? std::getenv("COMMIT") : "", device.name,
      driver.c_str(), clocks.c_str(), date.c_str(), options.iters, ceilings.bf16_tflops_8k,
      ceilings.copy_tbps, rows.c_str());
  std::fclose(file);
}

int run(Options const& options) {
  if (options.tiny) return check_tiny(options);
  Shape const shapes[] = {{"7B-n256", 24576, 1536, 256, 128, 8},
                          {"30B-n1024", 32768, 4096, 1024, 64, 4},
                          {"Qwen3Next", 32768, 2048, 512, 512, 10}};
  cublasHandle_t handle;
  if (cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS) return 1;
  Ceilings ceilings{};
  if (!options.once) {
    ceilings = measure_ceilings(handle);
    std::printf("ceilings: %.1f TFLOP/s (8192^3 bf16), copy %.3f TB/s\n", ceilings.bf16_tflops_8k,
                ceilings.copy_tbps);
  }
  std::string rows;
  for (Shape const& s : shapes) {
    if (!options.config.empty() && options.config != s.name) continue;
    for (bool balanced : {false, true}) {
      if (options.once && balanced) continue;
      if (!options.routing.empty() && (options.routing == "balanced") != balanced) continue;
      bench_shape(s, balanced, handle, options, rows);
    }
  }
  if (!options.json.empty()) write_json(options, ceilings, rows);
  cublasDestroy(handle);
  return 0;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  tessera::bench::Options options;
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
      return 2;
    }
  }
  return tessera::bench::run(options);
}

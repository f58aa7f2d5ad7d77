// SPDX-License-Identifier: Apache-2.0
// The router's three GEMMs: the library's choice against other configurations, each compared with its plain twin,
// then timed in random order. Beside them what they cannot beat: x read once, in the boxes that they read it in and in
// whole rows. With an fp32 router the library's choice multiplies the bf16 terms of its values (host/split_fp32.hpp),
// and what splits them is timed apart. Each candidate is a graph of kRepeats calls over rotating buffers larger than
// L2, divided: launches included, gaps of an eager stream not.
//
//   router [--config NAME] [--rounds N] [--json FILE]
#include <cstring>
#include <functional>
#include <memory>

#include "../../src/cuda/host/split_fp32.hpp"
#include "../../src/cuda/kernels/router_dgrad.cuh"
#include "../../src/cuda/kernels/router_logits.cuh"
#include "../../src/cuda/kernels/router_wgrad.cuh"
#include "../../src/cuda/tuning/gemm_backward.hpp"
#include "read_probe.cuh"
#include "support.cuh"

namespace tessera::bench {
namespace {

using cuda::gemm::GemmConfig;
using cuda::gemm::Major;
using cuda::gemm::Schedule;

constexpr int kSets = 2, kRepeats = 8, kWarmUps = 5, kSms = kReadSms;

struct Shape {
  char const* name;
  int tokens, hidden, intermediate, experts, top_k;
  int64_t elements() const { return int64_t{tokens} * hidden; }
  int64_t pairs() const { return int64_t{tokens} * experts; }
  int64_t weights() const { return int64_t{experts} * hidden; }
};

constexpr Shape kShapes[] = {
    {"1.4B-n256", 40960, 768, 256, 128, 8},   {"7B-n256", 24576, 1536, 256, 128, 8},
    {"7B-n1024", 24576, 1536, 1024, 32, 2},   {"30B-n256", 32768, 4096, 256, 256, 16},
    {"30B-n1024", 32768, 4096, 1024, 64, 4},  {"Qwen3-30B", 32768, 2048, 768, 128, 8},
    {"Qwen3Next", 32768, 2048, 512, 512, 10}, {"OLMoE", 32768, 2048, 1024, 64, 8},
};

enum class Router : int8_t { kBf16, kFp32 };

struct Problem {
  Problem(Shape const& s, Router router)
      : shape(s),
        is_fp32(router == Router::kFp32),
        w_router(s.weights() * dgrad_terms()),
        w_fp32(is_fp32 ? s.weights() : 0),
        logits_terms(is_fp32 ? s.experts * cuda::router_terms_pitch(s.hidden) : 0),
        partials(cuda::router_wgrad_partials(s.tokens, s.hidden, wgrad_terms() * s.experts)),
        never(1),
        counter(std::vector<int32_t>{0}),
        arrived(std::vector<uint32_t>{0}) {
    if (is_fp32) {
      fill(w_fp32, 7, 0.05f);
      TESSERA_CUDA(split_weights(nullptr));
      TESSERA_CUDA(cuda::launch_split_fp32_plain(
          cuda::split_weights_for_dgrad(w_fp32.get(), s.hidden, s.experts, s.hidden,
                                        w_router.get()),
          nullptr));
    } else {
      fill(w_router, 7, 0.05f);
    }
    for (int set = 0; set < kSets; ++set) {
      x.push_back(std::make_unique<DeviceBuffer<bf16>>(s.elements()));
      dx.push_back(std::make_unique<DeviceBuffer<bf16>>(s.elements()));
      dlogits.push_back(std::make_unique<DeviceBuffer<bf16>>(s.pairs() * dgrad_terms()));
      wgrad_dlogits.push_back(
          std::make_unique<DeviceBuffer<bf16>>(is_fp32 ? s.pairs() * wgrad_terms() : 0));
      dl_fp32.push_back(std::make_unique<DeviceBuffer<float>>(is_fp32 ? s.pairs() : 0));
      logits.push_back(std::make_unique<DeviceBuffer<float>>(s.pairs()));
      dw.push_back(std::make_unique<DeviceBuffer<float>>(s.weights()));
      fill(*x[set], 1 + set, 1.0f);
      if (is_fp32) {
        fill(*dl_fp32[set], 11 + set, 1.0f);
        TESSERA_CUDA(split_dlogits(set, nullptr));
      } else {
        fill(*dlogits[set], 11 + set, 1.0f);
      }
    }
    TESSERA_CUDA(cudaDeviceSynchronize());
  }
  template <class T>
  static void fill(DeviceBuffer<T> const& buffer, uint64_t seed, float scale) {
    fill_uniform<<<4096, 256>>>(buffer.get(), buffer.count(), seed, scale);
  }

  int dgrad_terms() const { return is_fp32 ? cuda::kDgradTerms : 1; }
  int wgrad_terms() const { return is_fp32 ? cuda::kWgradTerms : 1; }
  // The terms that the GEMMs of an fp32 router multiply.
  cudaError_t split_weights(cudaStream_t stream) const {
    return cuda::launch_split_fp32_plain(
        cuda::split_for_logits(w_fp32.get(), shape.hidden, shape.experts, shape.hidden,
                               logits_terms.get()),
        stream);
  }
  cudaError_t split_dlogits(int set, cudaStream_t stream) const {
    cudaError_t const error = cuda::launch_split_fp32_plain(
        cuda::split_dlogits_for_dgrad(dl_fp32[set]->get(), shape.tokens, shape.experts,
                                      dlogits[set]->get()),
        stream);
    if (error != cudaSuccess) return error;
    return cuda::launch_split_fp32_plain(
        cuda::split_dlogits_for_wgrad(dl_fp32[set]->get(), shape.tokens, shape.experts,
                                      wgrad_dlogits[set]->get()),
        stream);
  }

  cuda::RouterLogitsArguments logits_of(int set) const {
    return {.x = {x[set]->get(), shape.tokens, shape.hidden},
            .w_router = {is_fp32 ? static_cast<void const*>(w_fp32.get()) : w_router.get(),
                         shape.experts, shape.hidden},
            .gmem_b_router = nullptr,
            .gmem_logits = logits[set]->get(),
            .hidden = shape.hidden,
            .experts = shape.experts,
            .is_fp32 = is_fp32,
            .gmem_terms = is_fp32 ? logits_terms.get() : nullptr};
  }
  cuda::RouterDgradArguments dgrad_of(int set) const {
    return {.gmem_dlogits = dlogits[set]->get(),
            .w_router = {w_router.get(), int64_t{shape.experts} * dgrad_terms(), shape.hidden},
            .gmem_dx = dx[set]->get(),
            .dx_pitch = shape.hidden,
            .tokens = shape.tokens,
            .hidden = shape.hidden,
            .experts = shape.experts,
            .gmem_tile_counter = counter.get(),
            .terms = dgrad_terms()};
  }
  cuda::RouterWgradArguments wgrad_of(int set) const {
    return {.gmem_dlogits = is_fp32 ? wgrad_dlogits[set]->get() : dlogits[set]->get(),
            .x = {x[set]->get(), shape.tokens, shape.hidden},
            .gmem_dw_router = dw[set]->get(),
            .dw_pitch = shape.hidden,
            .is_fp32 = true,
            .accumulates = false,
            .gmem_partials = partials.get(),
            .gmem_arrived = arrived.get(),
            .hidden = shape.hidden,
            .experts = shape.experts,
            .gmem_tile_counter = counter.get(),
            .terms = wgrad_terms()};
  }

  Shape shape;
  bool is_fp32;  // the router; then w_router and dlogits are the terms of router_dgrad
  DeviceBuffer<bf16> w_router;      // (E,d), (E,3,d)
  DeviceBuffer<float> w_fp32;       // (E,d)
  DeviceBuffer<bf16> logits_terms;  // split_for_logits()
  DeviceBuffer<float> partials;
  DeviceBuffer<uint32_t> never;
  DeviceBuffer<int32_t> counter;
  DeviceBuffer<uint32_t> arrived;
  std::vector<std::unique_ptr<DeviceBuffer<bf16>>> x, dx, dlogits, wgrad_dlogits;
  std::vector<std::unique_ptr<DeviceBuffer<float>>> logits, dw, dl_fp32;
};

// Configurations beside the library's.
template <int kM, int kN, int kStages, Schedule kSchedule>
struct LogitsConfig {
  static constexpr bool lets_next = false;
  static constexpr GemmConfig gemm{.tile = {kM, kN, 64},
                                   .stages = kStages,
                                   .schedule = kSchedule,
                                   .tail = cuda::gemm::Tail::kShort,
                                   .epilogue = {.slabs = 1},
                                   .order = {.draw = cuda::gemm::Draw::kStride}};
};
template <int kM, int kN, int kStages, Schedule kSchedule, int kSlabs>
struct DgradConfig {
  static constexpr GemmConfig gemm{.tile = {kM, kN, 64},
                                   .stages = kStages,
                                   .schedule = kSchedule,
                                   .b = {.major = Major::kRows},
                                   .epilogue = {.slabs = kSlabs}};
};

struct Candidate {
  Problem const* problem;
  char const *op, *variant;
  double bytes;
  std::function<cudaError_t(int set, cudaStream_t)> launch;
  std::function<double(Problem const&)>
      error;  // largest, over the size of sum and matrix; empty: none to check
  std::vector<float> ms{};
  cudaGraphExec_t replay = nullptr;
};

// A sum of n products of size one is of size sqrt(n), and so are its roundings: errors are measured against the sum
// plus the root mean square of all sums.
template <class T>
__global__ void largest_error(T const* gmem_out, float const* gmem_ref, int64_t count,
                              float root_mean_square, float* gmem_largest) {
  float worst = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    float const ref = gmem_ref[i], delta = fabsf(float(gmem_out[i]) - ref);
    float const error = delta / (root_mean_square + fabsf(ref));
    worst = fmaxf(worst, error == error ? error : INFINITY);
  }
  for (int half = 16; half > 0; half /= 2) {
    worst = fmaxf(worst, __shfl_xor_sync(0xffffffffu, worst, half));
  }
  // Not negative, so the order of the bits is that of the values.
  if (threadIdx.x % 32 == 0) {
    atomicMax(reinterpret_cast<int*>(gmem_largest), __float_as_int(worst));
  }
}

__global__ void add_squares(float const* gmem, int64_t count, double* gmem_sum) {
  double sum = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    sum += double(gmem[i]) * gmem[i];
  }
  atomicAdd(gmem_sum, sum);
}

__global__ void widen_all(bf16 const* gmem_from, float* gmem_to, int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    gmem_to[i] = __bfloat162float(gmem_from[i]);
  }
}

template <class T>
T value_at(DeviceBuffer<T> const& buffer) {
  T host;
  TESSERA_CUDA(cudaMemcpy(&host, buffer.get(), sizeof host, cudaMemcpyDeviceToHost));
  return host;
}

// What a plain twin makes, and its size.
struct Expected {
  explicit Expected(int64_t count) : values(count) {}
  void measure() {
    DeviceBuffer<double> sum(std::vector<double>{0});
    add_squares<<<1024, 256>>>(values.get(), values.count(), sum.get());
    root_mean_square = float(std::sqrt(value_at(sum) / double(values.count())));
  }
  template <class T>
  double error_of(DeviceBuffer<T> const& out) const {
    DeviceBuffer<float> largest(std::vector<float>{0});
    largest_error<<<2048, 256>>>(out.get(), values.get(), out.count(), root_mean_square,
                                 largest.get());
    return value_at(largest);
  }
  DeviceBuffer<float> values;
  float root_mean_square = 0;
};

// Of set 0.
struct Reference {
  explicit Reference(Problem const& p)
      : logits(p.shape.pairs()), dx(p.shape.elements()), dw(p.shape.weights()) {
    auto keep = [](DeviceBuffer<float> const& to, DeviceBuffer<float> const& from) {
      TESSERA_CUDA(
          cudaMemcpy(to.get(), from.get(), size_t(to.count()) * 4, cudaMemcpyDeviceToDevice));
    };
    TESSERA_CUDA(cuda::launch_router_logits_plain(p.logits_of(0), nullptr));
    keep(logits.values, *p.logits[0]);
    TESSERA_CUDA(cuda::launch_router_dgrad_plain(p.dgrad_of(0), nullptr));
    widen_all<<<2048, 256>>>(p.dx[0]->get(), dx.values.get(), dx.values.count());
    TESSERA_CUDA(cuda::launch_router_wgrad_plain(p.wgrad_of(0), nullptr));
    keep(dw.values, *p.dw[0]);
    for (Expected* const expected : {&logits, &dx, &dw}) expected->measure();
  }
  Expected logits, dx, dw;
};

std::vector<Candidate> candidates_of(Problem const& p, Reference const& ref) {
  Shape const& s = p.shape;
  double const x = 2.0 * double(s.elements()), w = 2.0 * double(s.weights());
  double const pairs = double(s.pairs());
  auto const of_logits = [&](Problem const& q) { return ref.logits.error_of(*q.logits[0]); };
  auto const of_dx = [&](Problem const& q) { return ref.dx.error_of(*q.dx[0]); };
  auto const of_dw = [&](Problem const& q) { return ref.dw.error_of(*q.dw[0]); };
  std::vector<Candidate> out;
  auto const logits = [&](char const* variant, auto launch) {
    out.push_back({&p, "router_logits", variant, x + w + 4 * pairs,
                   [&p, launch](int set, cudaStream_t stream) {
                     return launch(p.logits_of(set), kSms, stream);
                   },
                   of_logits});
  };
  auto const dgrad = [&](char const* variant, auto launch) {
    out.push_back({&p, "router_dgrad", variant, x + w + 2 * pairs,
                   [&p, launch](int set, cudaStream_t stream) {
                     return launch(p.dgrad_of(set), kSms, stream);
                   },
                   of_dx});
  };
  constexpr auto kPingPong = Schedule::kPingPong;
  constexpr auto kCooperative = Schedule::kCooperative;
  using cuda::launch_router_dgrad_config;
  using cuda::launch_router_logits_config;
  logits("chosen", cuda::launch_router_logits);
  logits("64x128", launch_router_logits_config<LogitsConfig<64, 128, 8, kPingPong>>);
  logits("128x128 cooperative",
         launch_router_logits_config<LogitsConfig<128, 128, 6, kCooperative>>);
  logits("192x128", launch_router_logits_config<LogitsConfig<192, 128, 5, kPingPong>>);
  dgrad("chosen", cuda::launch_router_dgrad);
  dgrad("128x256, 4 slabs", launch_router_dgrad_config<DgradConfig<128, 256, 3, kCooperative, 4>>);
  dgrad("128x128", launch_router_dgrad_config<DgradConfig<128, 128, 6, kPingPong, 2>>);
  out.push_back({&p, "router_wgrad", "chosen", x + w + 2 * pairs,
                 [&p](int set, cudaStream_t stream) {
                   return cuda::launch_router_wgrad(p.wgrad_of(set), kSms, stream);
                 },
                 of_dw});
  auto const read = [&](char const* variant, auto launch) {
    out.push_back({&p,
                   "x",
                   variant,
                   x,
                   [&p, launch](int set, cudaStream_t stream) {
                     return launch(p.x[set]->get(), p.shape.tokens, p.shape.hidden,
                                   p.w_router.get(), p.shape.experts, stream);
                   },
                   {}});
  };
  read("boxes of 128 rows", launch_read_boxes<128, 1>);
  read("128 rows, w_router", launch_read_boxes<128, 1, 128>);
  read("128 rows, 64 of w_router", launch_read_boxes<128, 1, 64>);
  read("128 rows, 32 of w_router", launch_read_boxes<128, 1, 32>);
  read("boxes of 128 rows, 4 at once", launch_read_boxes<128, 4>);
  read("boxes of 64 rows, 4 at once", launch_read_boxes<64, 4>);
  out.push_back({&p,
                 "x",
                 "in order",
                 x,
                 [&p](int set, cudaStream_t stream) {
                   read_rows<<<4 * kSms, 512, 0, stream>>>(
                       reinterpret_cast<uint4 const*>(p.x[set]->get()), p.shape.elements() / 8,
                       p.never.get());
                   return cudaGetLastError();
                 },
                 {}});
  return out;
}

// The library's choice with an fp32 router, and what splits its values for the GEMMs: bytes are those of the terms.
std::vector<Candidate> fp32_candidates_of(Problem const& p, Reference const& ref) {
  Shape const& s = p.shape;
  double const x = 2.0 * double(s.elements()), w = double(s.weights()), pairs = double(s.pairs());
  constexpr char const* kChosen = "fp32 router";  // which outlives this function
  double const w_terms = 2.0 * cuda::kMaxTerms * w;
  return {
      {&p, "router_logits", kChosen, x + w_terms + 4 * pairs,
       [&p](int set, cudaStream_t stream) {
         return cuda::launch_router_logits(p.logits_of(set), kSms, stream);
       },
       [&](Problem const& q) { return ref.logits.error_of(*q.logits[0]); }},
      {&p, "router_dgrad", kChosen, x + 2.0 * cuda::kDgradTerms * (w + pairs),
       [&p](int set, cudaStream_t stream) {
         return cuda::launch_router_dgrad(p.dgrad_of(set), kSms, stream);
       },
       [&](Problem const& q) { return ref.dx.error_of(*q.dx[0]); }},
      {&p, "router_wgrad", kChosen, x + 4 * w + 2.0 * cuda::kWgradTerms * pairs,
       [&p](int set, cudaStream_t stream) {
         return cuda::launch_router_wgrad(p.wgrad_of(set), kSms, stream);
       },
       [&](Problem const& q) { return ref.dw.error_of(*q.dw[0]); }},
      {&p,
       "w_router",
       "split for logits",
       4 * w + w_terms,
       [&p](int, cudaStream_t stream) { return p.split_weights(stream); },
       {}},
      {&p,
       "dlogits",
       "split for both gradients",
       8 * pairs + 2.0 * (cuda::kDgradTerms + cuda::kWgradTerms) * pairs,
       [&p](int set, cudaStream_t stream) { return p.split_dlogits(set, stream); },
       {}},
  };
}

// dx is rounded to bf16, by either. fp32 sums differ by their order, and the tensor core cuts its sum off every 16
// products where fmaf rounds each: of 16384 products, 6e-5 at most. A product that is missing is 2e-2.
bool passes(Candidate const& c) {
  Problem const& p = *c.problem;
  p.logits[0]->poison();
  p.dx[0]->poison();
  p.dw[0]->poison();
  p.partials.poison();
  TESSERA_CUDA(c.launch(0, nullptr));
  TESSERA_CUDA(cudaDeviceSynchronize());
  if (!c.error) return true;
  double const limit = std::strcmp(c.op, "router_dgrad") == 0 ? 0x1p-7 : 0x1p-12;
  double const error = c.error(p);
  if (error <= limit) return true;
  std::printf("%s %s %s: error %.2e, limit %.2e\n", p.shape.name, c.op, c.variant, error, limit);
  return false;
}

cudaGraphExec_t graph_of(Candidate const& c, cudaStream_t stream) {
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  TESSERA_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kRepeats; ++i) TESSERA_CUDA(c.launch(i % kSets, stream));
  TESSERA_CUDA(cudaStreamEndCapture(stream, &graph));
  TESSERA_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  TESSERA_CUDA(cudaGraphDestroy(graph));
  return replay;
}

void time_all(std::vector<Candidate>& candidates, int rounds) {
  cudaStream_t stream;
  cudaEvent_t begin, end;
  TESSERA_CUDA(cudaStreamCreate(&stream));
  TESSERA_CUDA(cudaEventCreate(&begin));
  TESSERA_CUDA(cudaEventCreate(&end));
  for (Candidate& c : candidates) c.replay = graph_of(c, stream);
  std::mt19937 random(1);
  std::vector<size_t> order(candidates.size());
  std::iota(order.begin(), order.end(), size_t{0});
  for (int round = -kWarmUps; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (size_t const next : order) {
      TESSERA_CUDA(cudaEventRecord(begin, stream));
      TESSERA_CUDA(cudaGraphLaunch(candidates[next].replay, stream));
      TESSERA_CUDA(cudaEventRecord(end, stream));
      TESSERA_CUDA(cudaEventSynchronize(end));
      float elapsed = 0;
      TESSERA_CUDA(cudaEventElapsedTime(&elapsed, begin, end));
      if (round >= 0) candidates[next].ms.push_back(elapsed / kRepeats);
    }
  }
  for (Candidate& c : candidates) TESSERA_CUDA(cudaGraphExecDestroy(c.replay));
  TESSERA_CUDA(cudaEventDestroy(begin));
  TESSERA_CUDA(cudaEventDestroy(end));
  TESSERA_CUDA(cudaStreamDestroy(stream));
}

std::string bench_shape(Shape const& s, int rounds) {
  Problem const p(s, Router::kBf16), p_fp32(s, Router::kFp32);
  Reference const ref(p), ref_fp32(p_fp32);
  std::vector<Candidate> candidates = candidates_of(p, ref);
  for (Candidate& c : fp32_candidates_of(p_fp32, ref_fp32)) candidates.push_back(std::move(c));
  std::vector<bool> checked;
  for (Candidate const& c : candidates) checked.push_back(passes(c));
  time_all(candidates, rounds);
  std::string rows;
  for (size_t i = 0; i < candidates.size(); ++i) {
    Candidate const& c = candidates[i];
    Quantiles const t = quantiles(c.ms);
    std::printf("%-10s %-14s %-28s %8.2f us %6.2f TB/s%s\n", s.name, c.op, c.variant,
                1e3 * t.median, c.bytes / (double(t.median) * 1e9), checked[i] ? "" : "  WRONG");
    char row[512];
    std::snprintf(
        row, sizeof row,
        "%s\n  {\"config\": \"%s\", \"shape\": [%d, %d, %d, %d, %d], \"dtype\": \"bf16\", "
        "\"gpus\": 1, \"pass\": \"%s\", \"impl\": \"tessera\", \"variant\": \"%s\", \"ms\": %.5f, "
        "\"ms_p10\": %.5f, \"ms_p90\": %.5f, \"tbps\": %.3f, \"checked\": %s}",
        i == 0 ? "" : ",", s.name, s.tokens, s.hidden, s.intermediate, s.experts, s.top_k, c.op,
        c.variant, t.median, t.p10, t.p90, c.bytes / (double(t.median) * 1e9),
        !c.error     ? "null"
        : checked[i] ? "true"
                     : "false");
    rows += row;
  }
  std::fflush(stdout);
  return rows;
}

void write_json(std::string const& path, std::string const& command, int rounds,
                std::string const& rows) {
  write_results(path, command,
                "median of " + std::to_string(rounds) +
                    " replays, in random order, of a graph of " + std::to_string(kRepeats) +
                    " calls over " + std::to_string(kSets) +
                    " rotating sets; tbps: every array once",
                rows);
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  std::string command, json, config, rows;
  int rounds = 30;
  for (int i = 0; i < argc; ++i) command += (i ? " " : "") + std::string(argv[i]);
  for (int i = 1; i < argc; ++i) {
    std::string const flag = argv[i];
    bool const has_value = i + 1 < argc;
    if (flag == "--json" && has_value) {
      json = argv[++i];
    } else if (flag == "--config" && has_value) {
      config = argv[++i];
    } else if (flag == "--rounds" && has_value && std::atoi(argv[i + 1]) > 0) {
      rounds = std::atoi(argv[++i]);
    } else {
      std::fprintf(stderr, "unknown option %s\n", flag.c_str());
      return 2;
    }
  }
  for (tessera::bench::Shape const& s : tessera::bench::kShapes) {
    if (!config.empty() && config != s.name) continue;
    rows += (rows.empty() ? "" : ",") + tessera::bench::bench_shape(s, rounds);
  }
  if (rows.empty()) {
    std::fprintf(stderr, "--config %s: not one of this program's\n", config.c_str());
    return 2;
  }
  if (!json.empty()) tessera::bench::write_json(json, command, rounds, rows);
  return rows.find("\"checked\": false") == std::string::npos ? 0 : 1;
}

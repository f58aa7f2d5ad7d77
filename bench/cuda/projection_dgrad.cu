// SPDX-License-Identifier: Apache-2.0
// down_projection_dgrad and up_projection_dgrad against cuBLAS: every variant is checked against one cuBLAS
// GEMM per expert with fp32 results (and the activation's gradient in exact arithmetic), then timed,
// interleaved with a batched GEMM of the balanced shape in the same process. ratio = cuBLAS ms / our ms.
// Options: gemm_bench.cuh.
#include "../../src/core/activation_math.hpp"
#include "../../src/cuda/kernels/down_projection_dgrad.cuh"
#include "../../src/cuda/kernels/up_projection_dgrad.cuh"
#include "gradient_bench.cuh"

namespace tessera::bench {
namespace {

using cuda::DownProjectionDgradArguments;
using cuda::UpProjectionDgradArguments;
using cuda::gemm::Boxes;
using cuda::gemm::BStorage;
using cuda::gemm::EpilogueMode;
using cuda::gemm::GemmConfig;
using cuda::gemm::Halves;
using cuda::gemm::Loader;
using cuda::gemm::Major;
using cuda::gemm::Schedule;
using cuda::gemm::Sharing;

// One named type per configuration: a kernel template cannot take the value itself.
#define TESSERA_DOWN(type, ...)                                          \
  struct type {                                                          \
    static constexpr ActivationKind activation = ActivationKind::swiglu; \
    static constexpr bool interleaved = false;                           \
    static constexpr GemmConfig gemm{__VA_ARGS__};                       \
  }
#define TESSERA_UP(type, ...)                      \
  struct type {                                    \
    static constexpr bool router_part = false;     \
    static constexpr GemmConfig gemm{__VA_ARGS__}; \
  }
// clang-format off
TESSERA_DOWN(Down128x128, .tile = {128, 128, 64}, .stages = 4, .schedule = Schedule::kPingPong, .a = {.loader = Loader::kGather}, .b = {.major = Major::kRows, .boxes = Boxes::kTile}, .epilogue = {.slabs = 5});
TESSERA_DOWN(Down128x128C2, .tile = {128, 128, 64}, .stages = 4, .schedule = Schedule::kPingPong, .a = {.loader = Loader::kGather}, .b = {.major = Major::kRows, .boxes = Boxes::kTile}, .cluster = {.ctas = 2, .sharing = Sharing::kMulticast}, .epilogue = {.slabs = 5});
TESSERA_DOWN(Down128x128Any, .tile = {128, 128, 64}, .stages = 4, .schedule = Schedule::kPingPong, .a = {.loader = Loader::kGather}, .b = {.major = Major::kRows}, .epilogue = {.slabs = 5});
TESSERA_DOWN(Down128x256, .tile = {128, 256, 64}, .stages = 3, .a = {.loader = Loader::kGather}, .b = {.major = Major::kRows, .boxes = Boxes::kTile}, .epilogue = {.slabs = 5});
TESSERA_DOWN(Down128x256Lent, .tile = {128, 256, 64}, .stages = 4, .a = {.loader = Loader::kGather}, .b = {.major = Major::kRows, .boxes = Boxes::kTile}, .epilogue = {.mode = EpilogueMode::kLent, .slabs = 1, .lent_stages = 4});
TESSERA_DOWN(Down128x256C2, .tile = {128, 256, 64}, .stages = 3, .a = {.loader = Loader::kGather}, .b = {.major = Major::kRows, .boxes = Boxes::kTile}, .cluster = {.ctas = 2, .sharing = Sharing::kMulticast}, .epilogue = {.slabs = 5});
TESSERA_UP(Up128x256, .stages = 4, .b = {.major = Major::kRows, .halves = Halves::kAlongK});
TESSERA_UP(Up128x256Deferred, .b = {.major = Major::kRows, .halves = Halves::kAlongK}, .epilogue = {.mode = EpilogueMode::kDeferred});
TESSERA_UP(Up128x128Resident, .tile = {128, 128, 64}, .stages = 4, .schedule = Schedule::kPingPong, .b = {.major = Major::kRows, .halves = Halves::kAlongK}, .b_stages = {.storage = BStorage::kResident, .k_tiles = 8, .run_tiles = 6});
TESSERA_UP(Up192x128, .tile = {192, 128, 64}, .stages = 4, .schedule = Schedule::kPingPong, .b = {.major = Major::kRows, .halves = Halves::kAlongK});
TESSERA_UP(Up128x128, .tile = {128, 128, 64}, .stages = 6, .schedule = Schedule::kPingPong, .b = {.major = Major::kRows, .halves = Halves::kAlongK});
// clang-format on

struct Problem {
  Problem(Shape s, Routing r)
      : shape(s),
        routing(std::move(r)),
        rows(routing.expert_offsets.back()),
        capacity(rows + kCanaryRows),
        expert_offsets(routing.expert_offsets),
        gather_index(routing.gather_index),
        permutation(permutation_of(int(rows))),
        tile_counter(std::vector<int>{0}),
        scores(capacity),
        d_o(int64_t{s.tokens} * s.hidden),
        d_o_rows(rows * s.hidden),
        h(capacity * 2 * s.intermediate),
        dh_in(capacity * 2 * s.intermediate),
        w_down(int64_t{s.experts} * s.hidden * s.intermediate),
        w_up(int64_t{s.experts} * 2 * s.hidden * s.intermediate) {
    fill_uniform<<<4096, 256>>>(d_o.get(), d_o.count(), 1, 1.0f);
    h.poison();
    dh_in.poison();
    fill_uniform<<<4096, 256>>>(h.get(), rows * 2 * s.intermediate, 2, 3.0f);
    fill_uniform<<<4096, 256>>>(dh_in.get(), rows * 2 * s.intermediate, 3, 1.0f);
    fill_uniform<<<4096, 256>>>(w_down.get(), w_down.count(), 4, 0x1p-3f);
    fill_uniform<<<4096, 256>>>(w_up.get(), w_up.count(), 5, 0x1p-3f);
    permute_rows<<<4096, 256>>>(reinterpret_cast<uint4*>(d_o_rows.get()),
                                reinterpret_cast<uint4 const*>(d_o.get()), gather_index.get(), rows,
                                s.hidden / 8);
    std::vector<float> host(static_cast<size_t>(capacity));
    for (size_t i = 0; i < host.size(); ++i) host[i] = 0.05f + float(i * 37 % 101) * 0.009f;
    TESSERA_CUDA(cudaMemcpy(scores.get(), host.data(), host.size() * 4, cudaMemcpyHostToDevice));
    for (int set = 0; set < kSets; ++set) {
      dh.emplace_back(std::make_unique<DeviceBuffer<bf16>>(capacity * 2 * s.intermediate));
      a.emplace_back(std::make_unique<DeviceBuffer<bf16>>(capacity * s.intermediate));
      dx.emplace_back(std::make_unique<DeviceBuffer<bf16>>(capacity * s.hidden));
      partials.emplace_back(
          std::make_unique<DeviceBuffer<float>>(capacity * cuda::score_groups(s.intermediate)));
    }
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  // Row r holds slot (r * 7) % rows, or r where 7 divides the number of rows.
  static std::vector<int> permutation_of(int rows) {
    std::vector<int> out(static_cast<size_t>(rows));
    for (int r = 0; r < rows; ++r) {
      out[static_cast<size_t>(r)] = rows % 7 ? int(int64_t{r} * 7 % rows) : r;
    }
    return out;
  }

  DownProjectionDgradArguments down(int set) const {
    int64_t const d = shape.hidden, n = shape.intermediate;
    return {.d_o = {d_o.get(), shape.tokens, d},
            .gmem_gather_index = gather_index.get(),
            .gmem_expert_offsets = expert_offsets.get(),
            .w_down = {.gmem = w_down.get(),
                       .expert_stride = d * n,
                       .row_stride = n,
                       .column_stride = 1,
                       .block = d},
            .gmem_scores = scores.get(),
            .gmem_sort_permutation = permutation.get(),
            .gmem_h = h.get(),
            .activation = {},
            .gmem_dh = dh[set]->get(),
            .gmem_a_scaled = a[set]->get(),
            .gmem_ds_partials = partials[set]->get(),
            .rows = capacity,
            .hidden = d,
            .intermediate = n,
            .experts = shape.experts,
            .gmem_tile_counter = tile_counter.get()};
  }

  UpProjectionDgradArguments up(int set) const {
    int64_t const d = shape.hidden, n = shape.intermediate;
    auto const half = [&](int64_t first) {
      return cuda::WeightRows{.gmem = w_up.get() + first * d,
                              .expert_stride = 2 * n * d,
                              .row_stride = d,
                              .column_stride = 1,
                              .block = n};
    };
    return {.gmem_dh = dh_in.get(),
            .gmem_expert_offsets = expert_offsets.get(),
            .w_up = {half(0), half(n)},
            .gated = true,
            .gmem_dx_rows = dx[set]->get(),
            .rows = capacity,
            .hidden = d,
            .intermediate = n,
            .experts = shape.experts,
            .gmem_tile_counter = tile_counter.get()};
  }

  void poison(int set) const {
    dh[set]->poison();
    a[set]->poison();
    dx[set]->poison();
    partials[set]->poison();
  }

  Shape shape;
  Routing routing;
  int64_t rows, capacity;
  DeviceBuffer<int> expert_offsets, gather_index, permutation, tile_counter;
  DeviceBuffer<float> scores;
  DeviceBuffer<bf16> d_o, d_o_rows, h, dh_in, w_down, w_up;
  std::vector<std::unique_ptr<DeviceBuffer<bf16>>> dh, a, dx;
  std::vector<std::unique_ptr<DeviceBuffer<float>>> partials;
};

// From t = dO w_down: what the kernel stores, and the size of the terms of ds.
__global__ void differentiate(float const* t, bf16 const* h, float const* scores,
                              int const* permutation, int n, int groups, float* dh, float* a,
                              float* ds, float* ds_terms) {
  int64_t const row = blockIdx.x;
  float const s = scores[permutation[row]];
  core::Gated<core::Silu> const act;
  for (int group = 0; group < groups; ++group) {
    int const i = group * 128 + int(threadIdx.x);
    __shared__ float sums[2][128];
    sums[0][threadIdx.x] = sums[1][threadIdx.x] = 0;
    if (i < n) {
      float const value = t[row * n + i];
      float const g = __bfloat162float(h[row * 2 * n + i]);
      float const u = __bfloat162float(h[row * 2 * n + n + i]);
      auto const gradient = act.backward(g, u, s * value);
      dh[row * 2 * n + i] = gradient.dg;
      dh[row * 2 * n + n + i] = gradient.du;
      a[row * n + i] = s * gradient.a;
      sums[0][threadIdx.x] = value * gradient.a;
      sums[1][threadIdx.x] = fabsf(value * g * u);
    }
    __syncthreads();
    for (int half = 64; half > 0; half /= 2) {
      if (int(threadIdx.x) < half) {
        sums[0][threadIdx.x] += sums[0][threadIdx.x + half];
        sums[1][threadIdx.x] += sums[1][threadIdx.x + half];
      }
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      ds[row * groups + group] = sums[0][0];
      ds_terms[row * groups + group] = sums[1][0];
    }
    __syncthreads();
  }
}

class Reference {
 public:
  Reference(Problem const& p, cublasHandle_t handle)
      : problem_(p),
        groups_(cuda::score_groups(p.shape.intermediate)),
        dh_(p.rows * 2 * p.shape.intermediate),
        a_(p.rows * p.shape.intermediate),
        ds_(p.rows * groups_),
        ds_terms_(p.rows * groups_),
        dx_(p.rows * p.shape.hidden) {
    int64_t const d = p.shape.hidden, n = p.shape.intermediate;
    DeviceBuffer<float> t(p.rows * n);
    for (int e = 0; e < p.shape.experts; ++e) {
      int64_t const begin = p.routing.expert_offsets[e],
                    count = p.routing.expert_offsets[e + 1] - begin;
      if (count == 0) continue;
      cublas_gemm(handle, n, count, d, {p.w_down.get() + e * d * n, CUBLAS_OP_N, n, 0},
                  {p.d_o_rows.get() + begin * d, CUBLAS_OP_N, d, 0}, t.get() + begin * n,
                  CUDA_R_32F, n, 0, 1);
      cublas_gemm(handle, d, count, 2 * n, {p.w_up.get() + e * 2 * d * n, CUBLAS_OP_N, d, 0},
                  {p.dh_in.get() + begin * 2 * n, CUBLAS_OP_N, 2 * n, 0}, dx_.get() + begin * d,
                  CUDA_R_32F, d, 0, 1);
    }
    if (p.rows > 0) {
      differentiate<<<unsigned(p.rows), 128>>>(t.get(), p.h.get(), p.scores.get(),
                                               p.permutation.get(), int(n), int(groups_), dh_.get(),
                                               a_.get(), ds_.get(), ds_terms_.get());
    }
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  bool accepts_down(int set, std::string& note) const {
    Problem const& p = problem_;
    int64_t const n = p.shape.intermediate, tail = p.capacity - p.rows;
    bool ok = accepts("dh", p.dh[set]->get(), dh_.get(), nullptr, dh_.count(), 0x1p-7f, 0.01f, 3e-3,
                      note);
    ok &= accepts("a", p.a[set]->get(), a_.get(), nullptr, a_.count(), 0x1p-7f, 0.003f, 3e-3, note);
    ok &= accepts("ds", p.partials[set]->get(), ds_.get(), ds_terms_.get(), ds_.count(), 0.0f,
                  1e-3f, 1e-3, note);
    bool const canaries = is_poisoned(p.dh[set]->get() + p.rows * 2 * n, tail * 2 * n) &&
                          is_poisoned(p.a[set]->get() + p.rows * n, tail * n) &&
                          is_poisoned(p.partials[set]->get() + p.rows * groups_, tail * groups_);
    if (!canaries) note += "canary";
    return ok && canaries;
  }

  bool accepts_up(int set, std::string& note) const {
    Problem const& p = problem_;
    int64_t const d = p.shape.hidden, tail = p.capacity - p.rows;
    bool const ok = accepts("dx", p.dx[set]->get(), dx_.get(), nullptr, dx_.count(), 0x1p-8f, 1e-4f,
                            2.5e-3, note);
    bool const canaries = is_poisoned(p.dx[set]->get() + p.rows * d, tail * d);
    if (!canaries) note += "canary";
    return ok && canaries;
  }

 private:
  Problem const& problem_;
  int64_t groups_;
  DeviceBuffer<float> dh_, a_, ds_, ds_terms_, dx_;
};

struct Variant {
  char const* name;
  bool is_down;
  int most_k_tiles;  // 0: any
  void (*launch)(Problem const&, int set);
};

// kSorted: dO already in expert order.
template <class Config, bool kSorted = false>
Variant down(char const* name) {
  return {
      name, true, 0, [](Problem const& p, int set) {
        DownProjectionDgradArguments args = p.down(set);
        if (kSorted) {
          args.d_o = {p.d_o_rows.get(), p.rows, p.shape.hidden};
          args.gmem_gather_index = nullptr;
        }
        TESSERA_CUDA(cuda::launch_down_projection_dgrad_config<Config>(args, sm_count(), nullptr));
      }};
}
template <class Config>
Variant up(char const* name) {
  return {name, false, Config::gemm.resident_k_tiles(), [](Problem const& p, int set) {
            TESSERA_CUDA(
                cuda::launch_up_projection_dgrad_config<Config>(p.up(set), sm_count(), nullptr));
          }};
}

std::vector<Variant> all_variants() {
  return {down<Down128x128>("down-128x128-pingpong"),
          down<Down128x128C2>("down-128x128-c2-pingpong"),
          down<Down128x128Any>("down-128x128-any-pingpong"),
          down<Down128x256>("down-128x256"),
          down<Down128x256Lent>("down-128x256-lent"),
          down<Down128x256C2>("down-128x256-c2"),
          down<Down128x256, true>("down-128x256-sorted"),
          up<Up128x256>("up-128x256"),
          up<Up128x256Deferred>("up-128x256-deferred"),
          up<Up128x128Resident>("up-128x128-resident"),
          up<Up192x128>("up-192x128-pingpong"),
          up<Up128x128>("up-128x128-pingpong")};
}

bool serves(Variant const& v, Shape const& s) {
  bool const whole = s.intermediate % 64 == 0 && s.hidden % 64 == 0;
  int64_t const k_tiles = 2 * ((int64_t{s.intermediate} + 63) / 64);
  if (v.most_k_tiles > 0 && k_tiles > v.most_k_tiles) return false;
  return (whole && s.rows() > 0) || !v.is_down ||
         std::string(v.name).find("any") != std::string::npos;
}

// Both sets hold the same inputs, so two runs must give the same bits.
bool run_and_check(Variant const& v, Problem const& p, Reference const& reference) {
  p.poison(0);
  p.poison(1);
  v.launch(p, 0);
  v.launch(p, 1);
  cudaError_t const error = cudaDeviceSynchronize();
  std::string note;
  bool ok = false;
  if (error == cudaSuccess) {
    bool const repeats = same_bits(*p.dh[0], *p.dh[1]) && same_bits(*p.a[0], *p.a[1]) &&
                         same_bits(*p.dx[0], *p.dx[1]);
    ok = (v.is_down ? reference.accepts_down(0, note) : reference.accepts_up(0, note)) && repeats;
    if (!repeats) note += "; a second run differs";
  } else {
    note = cudaGetErrorString(error);
  }
  std::printf("  %-4s %-28s %s\n", ok ? "ok" : "BAD", v.name, note.c_str());
  std::fflush(stdout);
  if (error != cudaSuccess) std::exit(1);
  return ok;
}

// The comparison must reject a wrong row and a missing one.
bool comparison_rejects_mutants(Problem const& p, Reference const& reference) {
  std::string note;
  int64_t const pitch = 2 * p.shape.intermediate;
  bf16* const dh = p.dh[0]->get();
  TESSERA_CUDA(cudaMemcpy(dh + pitch, dh, pitch * sizeof(bf16), cudaMemcpyDeviceToDevice));
  bool const swapped = reference.accepts_down(0, note);
  TESSERA_CUDA(cudaMemset(dh + pitch, 0, pitch * sizeof(bf16)));
  bool const zeroed = reference.accepts_down(0, note);
  return !swapped && !zeroed;
}

int check_tiny(BenchOptions const& options, cublasHandle_t handle) {
  int failures = 0;
  for (Shape const& s : tiny_shapes()) {
    Problem const p(s, Routing::random(s.tokens, s.experts, s.top_k, 7));
    Reference const reference(p, handle);
    std::printf("%s (%d,%d,%d,%d,%d)\n", s.name, s.tokens, s.hidden, s.intermediate, s.experts,
                s.top_k);
    for (Variant const& v : all_variants()) {
      if (options.selects(v.name) && serves(v, s) && !run_and_check(v, p, reference)) ++failures;
    }
    if (s.tokens > 1) {
      all_variants()[2].launch(p, 0);
      if (comparison_rejects_mutants(p, reference)) continue;
      std::printf("  BAD  the comparison accepts mutants\n");
      ++failures;
    }
  }
  std::printf("tiny: %d failures\n", failures);
  return failures ? 1 : 0;
}

void bench_shape(BenchOptions const& options, Shape const& s, bool balanced, cublasHandle_t handle,
                 BenchReport& report) {
  char const* const routing = balanced ? "balanced" : "random";
  Problem const p(s, balanced ? Routing::balanced(s.tokens, s.experts, s.top_k, 11)
                              : Routing::random(s.tokens, s.experts, s.top_k, 11));
  Reference const reference(p, handle);
  std::printf("%s %s\n", s.name, routing);
  int64_t const d = s.hidden, n = s.intermediate, count = s.rows() / s.experts;
  for (bool is_down : {true, false}) {
    std::vector<Candidate> candidates;
    candidates.push_back(
        {is_down ? "cublas-bmm down" : "cublas-bmm up",
         true,
         [&, is_down](int set) {
           if (is_down) {
             cublas_gemm(handle, n, count, d, {p.w_down.get(), CUBLAS_OP_N, n, n * d},
                         {p.d_o_rows.get(), CUBLAS_OP_N, d, count * d}, p.a[set]->get(),
                         CUDA_R_16BF, n, count * n, s.experts);
           } else {
             cublas_gemm(handle, d, count, 2 * n, {p.w_up.get(), CUBLAS_OP_N, d, 2 * n * d},
                         {p.dh_in.get(), CUBLAS_OP_N, 2 * n, count * 2 * n}, p.dx[set]->get(),
                         CUDA_R_16BF, d, count * d, s.experts);
           }
         },
         {}});
    for (Variant const& v : all_variants()) {
      if (v.is_down != is_down || !options.selects(v.name) || !serves(v, s)) continue;
      if (!run_and_check(v, p, reference)) continue;
      candidates.push_back(
          {v.name, true, [&p, launch = v.launch](int set) { launch(p, set); }, {}});
    }
    time_and_report(options, s, routing, (is_down ? 2.0 : 4.0) * double(s.rows()) * double(n * d),
                    candidates, report);
  }
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  return tessera::bench::gemm_main(argc, argv, "dgrad", "all", tessera::bench::check_tiny,
                                   tessera::bench::bench_shape);
}

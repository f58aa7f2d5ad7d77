// SPDX-License-Identifier: Apache-2.0
// down_projection_fwd against cuBLAS: every variant is checked against one cuBLAS GEMM per expert with
// fp32 results, then timed, interleaved with a batched GEMM of the balanced shape
// E x (T*K/E) x d x n in the same process. ratio = cuBLAS ms / our ms.
// Options: gemm_bench.cuh.
#include "../../src/cuda/kernels/down_projection_fwd.cuh"
#include "gemm_bench.cuh"

namespace tessera::bench {
namespace {

using cuda::DownProjectionFwdArguments;
using cuda::gemm::BStorage;
using cuda::gemm::EpilogueMode;
using cuda::gemm::GemmConfig;
using cuda::gemm::Schedule;

struct Variant {
  char const* name;
  int most_k_tiles;  // 0: any
  cudaError_t (*launch)(DownProjectionFwdArguments const&, int sm_count, cudaStream_t);

  bool serves(Shape const& s) const {
    return most_k_tiles == 0 || s.intermediate <= 64 * most_k_tiles;
  }
};

// One named type per configuration: a kernel template cannot take the value itself.
#define TESSERA_VARIANT(type, ...)                 \
  struct type {                                    \
    static constexpr GemmConfig gemm{__VA_ARGS__}; \
  }
// clang-format off
TESSERA_VARIANT(C128x128C1Pp, .tile = {128, 128, 64}, .stages = 6, .schedule = Schedule::kPingPong);
TESSERA_VARIANT(C192x128C1Pp, .tile = {192, 128, 64}, .stages = 4, .schedule = Schedule::kPingPong);
TESSERA_VARIANT(C128x256C1, .stages = 4);
TESSERA_VARIANT(C128x256Slabs, .stages = 3, .epilogue = {.slabs = 4});
TESSERA_VARIANT(Resident64x256, .tile = {64, 256, 64}, .stages = 8, .schedule = Schedule::kPingPong, .b_stages = {.storage = BStorage::kResident, .k_tiles = 4, .run_tiles = 12});
TESSERA_VARIANT(Resident128x128, .tile = {128, 128, 64}, .stages = 4, .schedule = Schedule::kPingPong, .b_stages = {.storage = BStorage::kResident, .k_tiles = 8, .run_tiles = 6});
TESSERA_VARIANT(C128x256Deferred, .epilogue = {.mode = EpilogueMode::kDeferred});
// clang-format on

template <class Config>
Variant variant(char const* name) {
  return {.name = name,
          .most_k_tiles = Config::gemm.resident_k_tiles(),
          .launch = &cuda::launch_down_projection_fwd_config<Config>};
}

std::vector<Variant> all_variants() {
  return {variant<C128x128C1Pp>("128x128-c1-pingpong"),
          variant<C192x128C1Pp>("192x128-c1-pingpong"),
          variant<C128x256C1>("128x256-c1"),
          variant<C128x256Slabs>("128x256-slabs"),
          variant<C128x256Deferred>("128x256-deferred"),
          variant<Resident64x256>("64x256-resident"),
          variant<Resident128x128>("128x128-resident")};
}

struct Problem {
  Problem(Shape s, Routing r)
      : shape(s),
        routing(std::move(r)),
        rows(routing.expert_offsets.back()),
        capacity(rows + kCanaryRows),
        expert_offsets(routing.expert_offsets),
        tile_counter(std::vector<int>{0}),
        b_down(int64_t{s.experts} * s.hidden) {
    fill_uniform<<<4096, 256>>>(b_down.get(), b_down.count(), 3, 1.0f);
    for (int set = 0; set < kSets; ++set) {
      a.emplace_back(std::make_unique<DeviceBuffer<bf16>>(capacity * s.intermediate));
      w_down.emplace_back(
          std::make_unique<DeviceBuffer<bf16>>(int64_t{s.experts} * s.intermediate * s.hidden));
      y.emplace_back(std::make_unique<DeviceBuffer<bf16>>(capacity * s.hidden));
      // Both sets hold the same values: one reference serves them.
      a[set]->poison();
      fill_uniform<<<4096, 256>>>(a[set]->get(), rows * s.intermediate, 1, 1.0f);
      fill_uniform<<<4096, 256>>>(w_down[set]->get(), w_down[set]->count(), 2, 0x1p-3f);
    }
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  DownProjectionFwdArguments arguments(int set, bool bias) const {
    int64_t const d = shape.hidden;
    int64_t const n = shape.intermediate;
    return {.gmem_a = a[set]->get(),
            .gmem_expert_offsets = expert_offsets.get(),
            .w_down = {.gmem = w_down[set]->get(),
                       .expert_stride = d * n,
                       .row_stride = n,
                       .column_stride = 1,
                       .block = d},
            .b_down = {.gmem = bias ? b_down.get() : nullptr,
                       .expert_stride = d,
                       .row_stride = 1,
                       .column_stride = 1,
                       .block = d},
            .gmem_y = y[set]->get(),
            .rows = capacity,
            .hidden = d,
            .intermediate = n,
            .experts = shape.experts,
            .gmem_tile_counter = tile_counter.get()};
  }

  Shape shape;
  Routing routing;
  int64_t rows, capacity;
  DeviceBuffer<int> expert_offsets, tile_counter;
  DeviceBuffer<bf16> b_down;
  std::vector<std::unique_ptr<DeviceBuffer<bf16>>> a, w_down, y;
};

// out[r, :] += bias[segment of r, :]
__global__ void add_bias(float* out, bf16 const* bias, int begin, int end, int columns) {
  for (int64_t row = begin + blockIdx.x; row < end; row += gridDim.x) {
    for (int c = int(threadIdx.x); c < columns; c += int(blockDim.x)) {
      out[row * columns + c] += __bfloat162float(bias[c]);
    }
  }
}

// fp32 y, one library GEMM per expert.
class Reference {
 public:
  Reference(Problem const& p, cublasHandle_t handle, bool bias)
      : problem_(p), y_(p.rows * p.shape.hidden) {
    y_.poison();
    float const one = 1;
    float const zero = 0;
    int const d = p.shape.hidden;
    int const n = p.shape.intermediate;
    for (int e = 0; e < p.shape.experts; ++e) {
      int const begin = p.routing.expert_offsets[e];
      int const end = p.routing.expert_offsets[e + 1];
      if (begin == end) continue;
      cublasStatus_t const status = cublasGemmEx(
          handle, CUBLAS_OP_T, CUBLAS_OP_N, d, end - begin, n, &one,
          p.w_down[0]->get() + int64_t{e} * d * n, CUDA_R_16BF, n,
          p.a[0]->get() + int64_t{begin} * n, CUDA_R_16BF, n, &zero, y_.get() + int64_t{begin} * d,
          CUDA_R_32F, d, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
      if (status != CUBLAS_STATUS_SUCCESS) std::fprintf(stderr, "cuBLAS status %d\n", int(status));
      if (bias) {
        add_bias<<<256, 256>>>(y_.get(), p.b_down.get() + int64_t{e} * d, begin, end, d);
      }
    }
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  bool accepts(int set, std::string& note) const {
    DeviceBuffer<Deviation> result(1);
    TESSERA_CUDA(cudaMemset(result.get(), 0, sizeof(Deviation)));
    compare_rows<<<unsigned(problem_.capacity), 256>>>(problem_.y[set]->get(), y_.get(), nullptr,
                                                       problem_.rows, problem_.shape.hidden, 1e-4f,
                                                       0, result.get());
    Deviation y{};
    TESSERA_CUDA(cudaMemcpy(&y, result.get(), sizeof y, cudaMemcpyDeviceToHost));
    char text[100];
    std::snprintf(text, sizeof text, "y row %.1e elem %.2f bad %u canary %u", y.worst_row_e7 * 1e-7,
                  y.worst_element * 1e-3, y.bad_elements, y.bad_canaries);
    note = text;
    return y.ok(2.5e-3);
  }

 private:
  Problem const& problem_;
  DeviceBuffer<float> y_;
};

Candidate make_candidate(Variant const& v, Problem const& p, bool bias) {
  std::vector<DownProjectionFwdArguments> arguments;
  for (int set = 0; set < kSets; ++set) arguments.push_back(p.arguments(set, bias));
  return {.name = v.name,
          .checked = false,
          .launch = [=, launch = v.launch](
                        int set) { TESSERA_CUDA(launch(arguments[set], sm_count(), nullptr)); },
          .ms = {}};
}

// Both sets hold the same inputs, so two runs must give the same bits.
bool run_and_check(Candidate& c, Problem const& p, Reference const& reference) {
  p.y[0]->poison();
  p.y[1]->poison();
  c.launch(0);
  c.launch(1);
  cudaError_t const error = cudaDeviceSynchronize();
  std::string note = cudaGetErrorString(error);
  if (error == cudaSuccess) {
    bool const repeats = same_bits(*p.y[0], *p.y[1]);
    c.checked = reference.accepts(0, note) && repeats;
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
  int64_t const pitch = p.shape.hidden;
  bf16* const y = p.y[0]->get();
  TESSERA_CUDA(cudaMemcpy(y + pitch, y, pitch * sizeof(bf16), cudaMemcpyDeviceToDevice));
  bool const swapped = reference.accepts(0, note);
  TESSERA_CUDA(cudaMemset(y + pitch, 0, pitch * sizeof(bf16)));
  bool const zeroed = reference.accepts(0, note);
  return !swapped && !zeroed;
}

int check_tiny(BenchOptions const& options, cublasHandle_t handle) {
  int failures = 0;
  for (Shape const& s : tiny_shapes()) {
    Problem const p(s, Routing::random(s.tokens, s.experts, s.top_k, 7));
    for (bool bias : {false, true}) {
      Reference const reference(p, handle, bias);
      std::printf("%s (%d,%d,%d,%d,%d) %s\n", s.name, s.tokens, s.hidden, s.intermediate, s.experts,
                  s.top_k, bias ? "with bias" : "");
      for (Variant const& v : all_variants()) {
        if (!options.selects(v.name) || !v.serves(s)) continue;
        Candidate c = make_candidate(v, p, bias);
        if (!run_and_check(c, p, reference)) ++failures;
      }
      if (s.tokens > 1 && !comparison_rejects_mutants(p, reference)) {
        std::printf("  BAD  the comparison accepts mutants\n");
        ++failures;
      }
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
  Reference const reference(p, handle, false);
  std::printf("%s %s\n", s.name, routing);
  std::vector<Candidate> candidates;
  candidates.push_back({"cublas-bmm",
                        true,
                        [&](int set) {
                          cublas_batched(handle, s.rows() / s.experts, s.hidden, s.intermediate,
                                         s.experts, p.a[set]->get(), p.w_down[set]->get(),
                                         p.y[set]->get());
                        },
                        {}});
  for (Variant const& v : all_variants()) {
    if (!options.selects(v.name) || !v.serves(s)) continue;
    Candidate c = make_candidate(v, p, false);
    if (run_and_check(c, p, reference)) candidates.push_back(std::move(c));
  }
  time_and_report(options, s, routing, 2.0 * double(s.rows()) * s.intermediate * s.hidden,
                  candidates, report);
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  return tessera::bench::gemm_main(argc, argv, "down_projection_fwd", "all",
                                   tessera::bench::check_tiny, tessera::bench::bench_shape);
}

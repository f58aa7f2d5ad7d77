// SPDX-License-Identifier: Apache-2.0
// down_projection_wgrad and up_projection_wgrad against cuBLAS: every variant is checked against one cuBLAS
// GEMM per expert with fp32 results, then timed, interleaved with a batched GEMM of the balanced shape in the
// same process. ratio = cuBLAS ms / our ms.
// Options: gemm_bench.cuh.
#include "../../src/cuda/kernels/projection_wgrad.cuh"
#include "gradient_bench.cuh"

namespace tessera::bench {
namespace {

using cuda::WgradArguments;
using cuda::gemm::Boxes;
using cuda::gemm::BStorage;
using cuda::gemm::EpilogueConfig;
using cuda::gemm::EpilogueMode;
using cuda::gemm::GemmConfig;
using cuda::gemm::Loader;
using cuda::gemm::Major;
using cuda::gemm::Ragged;
using cuda::gemm::Schedule;
using cuda::gemm::TileShape;

constexpr EpilogueConfig kSlabs{.slabs = 4};
constexpr EpilogueConfig kLent{.mode = EpilogueMode::kLent, .slabs = 1, .lent_stages = 2};
constexpr EpilogueConfig kPaced{.mode = EpilogueMode::kDeferred, .slabs = 4};

constexpr GemmConfig config(int stages, EpilogueConfig epilogue = {}, Boxes boxes = Boxes::kTile,
                            TileShape tile = {128, 256, 64},
                            Schedule schedule = Schedule::kCooperative) {
  return {.tile = tile,
          .stages = stages,
          .schedule = schedule,
          .ragged = Ragged::kK,
          .a = {.loader = Loader::kGather, .major = Major::kRows},
          .b = {.major = Major::kRows, .boxes = boxes},
          .b_stages = {.storage = epilogue == kPaced ? BStorage::kBehind : BStorage::kRing},
          .epilogue = epilogue};
}

// One named type per configuration: a kernel template cannot take the value itself.
#define TESSERA_VARIANT(type, major, is_fp32, ...)          \
  struct type {                                             \
    static constexpr Major d_major = major;                 \
    static constexpr bool fp32 = is_fp32;                   \
    static constexpr GemmConfig gemm = config(__VA_ARGS__); \
  }
// clang-format off
TESSERA_VARIANT(DownWide, Major::kRows, false, 4);
TESSERA_VARIANT(DownWideFp32, Major::kRows, true, 4);
TESSERA_VARIANT(UpWide, Major::kK, false, 4);
TESSERA_VARIANT(UpWideFp32, Major::kK, true, 4);
TESSERA_VARIANT(DownSlabs, Major::kRows, false, 3, kSlabs);
TESSERA_VARIANT(DownSlabsFp32, Major::kRows, true, 3, kSlabs);
TESSERA_VARIANT(UpSlabs, Major::kK, false, 3, kSlabs);
TESSERA_VARIANT(UpSlabsFp32, Major::kK, true, 3, kSlabs);
TESSERA_VARIANT(DownLent, Major::kRows, false, 4, kLent);
TESSERA_VARIANT(UpLent, Major::kK, false, 4, kLent);
TESSERA_VARIANT(DownPacedFp32, Major::kRows, true, 4, kPaced);
TESSERA_VARIANT(UpPacedFp32, Major::kK, true, 4, kPaced);
TESSERA_VARIANT(UpPingPong, Major::kK, false, 6, {}, Boxes::kTile, {128, 128, 64}, Schedule::kPingPong);
TESSERA_VARIANT(DownAny, Major::kRows, false, 4, {}, Boxes::kAny);
TESSERA_VARIANT(UpAny, Major::kK, false, 4, {}, Boxes::kAny);
// clang-format on

// dW of one variant: down (E,d,n) or up (E,2n,d), bf16 or fp32; `fresh` is what was there before.
struct Problem {
  Problem(Shape s, Routing r)
      : shape(s),
        routing(std::move(r)),
        rows(routing.expert_offsets.back()),
        capacity(rows + kCanaryRows),
        expert_offsets(routing.expert_offsets),
        gather_index(routing.gather_index),
        tile_counter(std::vector<int>{0}),
        left(int64_t{s.tokens} * s.hidden),
        left_rows(rows * s.hidden),
        right(capacity * 2 * s.intermediate) {
    fill_uniform<<<4096, 256>>>(left.get(), left.count(), 1, 1.0f);
    right.poison();
    permute_rows<<<4096, 256>>>(reinterpret_cast<uint4*>(left_rows.get()),
                                reinterpret_cast<uint4 const*>(left.get()), gather_index.get(),
                                rows, s.hidden / 8);
    for (int set = 0; set < kSets; ++set) {
      dw.emplace_back(std::make_unique<DeviceBuffer<float>>(elements()));
    }
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  int64_t elements() const {
    return int64_t{shape.experts} * 2 * shape.hidden * shape.intermediate;
  }

  // (R, halves*n) without gaps; rows past R stay NaN.
  void fill_right(int halves) const {
    right.poison();
    fill_uniform<<<4096, 256>>>(right.get(), rows * halves * shape.intermediate, 2, 1.0f);
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  WgradArguments arguments(int set, bool is_down, bool is_fp32, bool accumulates) const {
    int64_t const d = shape.hidden, n = shape.intermediate;
    auto* const base = reinterpret_cast<char*>(dw[set]->get());
    int64_t const element = is_fp32 ? 4 : 2;
    WgradArguments out{.left = {left.get(), shape.tokens, d},
                       .gmem_gather_index = gather_index.get(),
                       .gmem_expert_offsets = expert_offsets.get(),
                       .gmem_right = right.get(),
                       .halves = is_down ? 1 : 2,
                       .dw = {},
                       .is_fp32 = is_fp32,
                       .accumulates = accumulates,
                       .rows = capacity,
                       .hidden = d,
                       .intermediate = n,
                       .experts = shape.experts,
                       .gmem_tile_counter = tile_counter.get()};
    for (int half = 0; half < out.halves; ++half) {
      out.dw[half] = {.gmem = base + half * n * d * element,
                      .expert_stride = out.halves * n * d,
                      .row_stride = is_down ? 1 : d,
                      .column_stride = is_down ? n : 1,
                      .block = n};
    }
    return out;
  }

  Shape shape;
  Routing routing;
  int64_t rows, capacity;
  DeviceBuffer<int> expert_offsets, gather_index, tile_counter;
  DeviceBuffer<bf16> left, left_rows, right;
  std::vector<std::unique_ptr<DeviceBuffer<float>>> dw;
};

struct Variant {
  char const* name;
  bool is_down, is_fp32, accumulates;
  cudaError_t (*launch)(WgradArguments const&, int sm_count, cudaStream_t);
};

template <class Config>
Variant variant(char const* name, bool accumulates = false) {
  return {name, Config::d_major == Major::kRows, Config::fp32, accumulates,
          &cuda::launch_projection_wgrad_config<Config>};
}

std::vector<Variant> all_variants() {
  return {variant<DownWide>("down-128x256"),
          variant<DownAny>("down-128x256-any"),
          variant<DownAny>("down-128x256-any-add", true),
          variant<DownWideFp32>("down-128x256-fp32"),
          variant<DownWideFp32>("down-128x256-fp32-add", true),
          variant<DownSlabs>("down-128x256-slabs"),
          variant<DownSlabsFp32>("down-128x256-slabs-fp32-add", true),
          variant<UpSlabs>("up-128x256-slabs"),
          variant<UpSlabsFp32>("up-128x256-slabs-fp32-add", true),
          variant<DownLent>("down-128x256-lent"),
          variant<DownLent>("down-128x256-lent-add", true),
          variant<DownPacedFp32>("down-128x256-paced-fp32-add", true),
          variant<UpLent>("up-128x256-lent"),
          variant<UpLent>("up-128x256-lent-add", true),
          variant<UpPacedFp32>("up-128x256-paced-fp32-add", true),
          variant<UpWide>("up-128x256"),
          variant<UpAny>("up-128x256-any"),
          variant<UpAny>("up-128x256-any-add", true),
          variant<UpPingPong>("up-128x128-pingpong"),
          variant<UpWideFp32>("up-128x256-fp32"),
          variant<UpWideFp32>("up-128x256-fp32-add", true)};
}

bool contains(Variant const& v, char const* part) {
  return std::string(v.name).find(part) != std::string::npos;
}

bool serves(Variant const& v, Shape const& s) {
  return s.intermediate % 64 == 0 || contains(v, "any");
}

__global__ void add(float* out, float const* old, int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    out[i] += old[i];
  }
}

__global__ void fill_old(float* fp32, bf16* rounded, int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    float const value = float(i % 255 - 127) * 0x1p-3f;  // exact in bf16
    if (fp32 != nullptr) fp32[i] = value;
    if (rounded != nullptr) rounded[i] = __float2bfloat16(value);
  }
}

class Reference {
 public:
  Reference(Problem const& p, bool is_down, bool with_old, cublasHandle_t handle)
      : problem_(p), count_(p.elements() / (is_down ? 2 : 1)), dw_(count_) {
    int64_t const d = p.shape.hidden, n = p.shape.intermediate;
    TESSERA_CUDA(cudaMemset(dw_.get(), 0, count_ * sizeof(float)));
    for (int e = 0; e < p.shape.experts; ++e) {
      int64_t const begin = p.routing.expert_offsets[e],
                    rows = p.routing.expert_offsets[e + 1] - begin;
      if (rows == 0) continue;
      bf16 const* const left = p.left_rows.get() + begin * d;
      if (is_down) {
        cublas_gemm(handle, n, d, rows, {p.right.get() + begin * n, CUBLAS_OP_N, n, 0},
                    {left, CUBLAS_OP_T, d, 0}, dw_.get() + e * d * n, CUDA_R_32F, n, 0, 1);
      } else {
        cublas_gemm(handle, d, 2 * n, rows, {left, CUBLAS_OP_N, d, 0},
                    {p.right.get() + begin * 2 * n, CUBLAS_OP_T, 2 * n, 0},
                    dw_.get() + e * 2 * d * n, CUDA_R_32F, d, 0, 1);
      }
    }
    if (with_old) {
      DeviceBuffer<float> old(count_);
      fill_old<<<1024, 256>>>(old.get(), nullptr, count_);
      add<<<1024, 256>>>(dw_.get(), old.get(), count_);
    }
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  bool matches(int set, bool is_fp32, std::string& note) const {
    float* const out = problem_.dw[set]->get();
    float const floor = 2e-4f * std::sqrt(float(problem_.rows) / float(problem_.shape.experts) + 1);
    return is_fp32 ? accepts("dw", out, dw_.get(), nullptr, count_, 1e-5f, floor, 1e-4, note)
                   : accepts("dw", reinterpret_cast<bf16*>(out), dw_.get(), nullptr, count_,
                             0x1p-8f, floor, 2.5e-3, note);
  }

 private:
  Problem const& problem_;
  int64_t count_;
  DeviceBuffer<float> dw_;
};

void prepare(Problem const& p, Variant const& v, int set) {
  p.dw[set]->poison();
  if (!v.accumulates) return;
  float* const out = p.dw[set]->get();
  int64_t const count = p.elements() / (v.is_down ? 2 : 1);
  fill_old<<<1024, 256>>>(v.is_fp32 ? out : nullptr,
                          v.is_fp32 ? nullptr : reinterpret_cast<bf16*>(out), count);
}

bool same_results(Problem const& p, Variant const& v) {
  int64_t const bytes = p.elements() / (v.is_down ? 2 : 1) * (v.is_fp32 ? 4 : 2);
  DeviceBuffer<unsigned> differences(std::vector<unsigned>{0});
  count_differences<<<4096, 256>>>(reinterpret_cast<uint16_t const*>(p.dw[0]->get()),
                                   reinterpret_cast<uint16_t const*>(p.dw[1]->get()), bytes / 2,
                                   differences.get());
  unsigned host = 1;
  TESSERA_CUDA(cudaMemcpy(&host, differences.get(), sizeof host, cudaMemcpyDeviceToHost));
  return host == 0;
}

// Both sets hold the same inputs, so two runs must give the same bits.
bool run_and_check(Variant const& v, Problem const& p, Reference const& reference) {
  for (int set = 0; set < kSets; ++set) {
    prepare(p, v, set);
    TESSERA_CUDA(
        v.launch(p.arguments(set, v.is_down, v.is_fp32, v.accumulates), sm_count(), nullptr));
  }
  cudaError_t const error = cudaDeviceSynchronize();
  std::string note = cudaGetErrorString(error);
  bool ok = false;
  if (error == cudaSuccess) {
    note.clear();
    bool const repeats = same_results(p, v);
    ok = reference.matches(0, v.is_fp32, note) && repeats;
    if (!repeats) note += "; a second run differs";
  }
  std::printf("  %-4s %-28s %s\n", ok ? "ok" : "BAD", v.name, note.c_str());
  std::fflush(stdout);
  if (error != cudaSuccess) std::exit(1);
  return ok;
}

int check_tiny(BenchOptions const& options, cublasHandle_t handle) {
  int failures = 0;
  for (Shape const& s : tiny_shapes()) {
    Problem const p(s, Routing::random(s.tokens, s.experts, s.top_k, 7));
    std::printf("%s (%d,%d,%d,%d,%d)\n", s.name, s.tokens, s.hidden, s.intermediate, s.experts,
                s.top_k);
    for (bool is_down : {true, false}) {
      p.fill_right(is_down ? 1 : 2);
      Reference const fresh(p, is_down, false, handle), added(p, is_down, true, handle);
      for (Variant const& v : all_variants()) {
        if (v.is_down != is_down || !options.selects(v.name) || !serves(v, s)) continue;
        if (!run_and_check(v, p, v.accumulates ? added : fresh)) ++failures;
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
  std::printf("%s %s\n", s.name, routing);
  int64_t const d = s.hidden, n = s.intermediate, count = s.rows() / s.experts;
  for (bool is_down : {true, false}) {
    p.fill_right(is_down ? 1 : 2);
    Reference const fresh(p, is_down, false, handle), added(p, is_down, true, handle);
    std::vector<Candidate> candidates;
    candidates.push_back(
        {is_down ? "cublas-bmm down" : "cublas-bmm up",
         true,
         [&, is_down](int set) {
           bf16 const* const left = p.left_rows.get();
           if (is_down) {
             cublas_gemm(handle, n, d, count, {p.right.get(), CUBLAS_OP_N, n, count * n},
                         {left, CUBLAS_OP_T, d, count * d}, p.dw[set]->get(), CUDA_R_16BF, n, d * n,
                         s.experts);
           } else {
             cublas_gemm(handle, d, 2 * n, count, {left, CUBLAS_OP_N, d, count * d},
                         {p.right.get(), CUBLAS_OP_T, 2 * n, count * 2 * n}, p.dw[set]->get(),
                         CUDA_R_16BF, d, 2 * d * n, s.experts);
           }
         },
         {}});
    for (Variant const& v : all_variants()) {
      if (v.is_down != is_down || !options.selects(v.name) || !serves(v, s)) continue;
      if (!run_and_check(v, p, v.accumulates ? added : fresh)) continue;
      candidates.push_back({v.name,
                            true,
                            [&p, v](int set) {
                              TESSERA_CUDA(
                                  v.launch(p.arguments(set, v.is_down, v.is_fp32, v.accumulates),
                                           sm_count(), nullptr));
                            },
                            {}});
    }
    time_and_report(options, s, routing, (is_down ? 2.0 : 4.0) * double(s.rows()) * double(n * d),
                    candidates, report);
  }
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  return tessera::bench::gemm_main(argc, argv, "wgrad", "all", tessera::bench::check_tiny,
                                   tessera::bench::bench_shape);
}

// SPDX-License-Identifier: Apache-2.0
// What the persistent kernel costs the GEMM inside it, and what it gains: up_projection_fwd with a stage
// less, with communication warps that poll, with rows pulled beside it, and with rows pulled under it
// that its loads wait for (dispatch and up projection in one kernel). Every variant gives the bits of the
// plain kernel, on every GPU.
//
//   budget [--gpus 1|2] [--iters N] [--out FILE] [--commit HASH]
//
// With two GPUs, which run at once, half of the rows are the peer's; with one, all are its own.
#include <barrier>
#include <functional>
#include <memory>
#include <thread>

#include "../cuda/support.cuh"
#include "arguments.hpp"
#include "budget_kernel.cuh"
#include "results.hpp"

namespace tessera::bench {
namespace {

struct Shape {
  char const* name;
  int tokens, hidden, intermediate, local_experts, rows_of_expert;
  int rows() const { return local_experts * rows_of_expert; }
  double flops() const { return 4.0 * rows() * hidden * intermediate; }
};
// Per GPU of two, balanced.
constexpr Shape kShapes[] = {{"Qwen3-30B", 8192, 2048, 768, 64, 1024},
                             {"FlashDMoE-swiglu", 8192, 2048, 2048, 16, 1024},
                             {"DSv3", 8192, 7168, 2048, 128, 512}};

template <int kStages>
struct Config {
  static constexpr gemm::GemmConfig gemm{.stages = kStages,
                                         .b = {.halves = gemm::Halves::kAlongRows},
                                         .epilogue = {.mode = gemm::EpilogueMode::kDeferred}};
  static constexpr ActivationKind activation = ActivationKind::swiglu;
  static constexpr bool interleaved = false;
};

struct Variant {
  char const* name;
  Beside beside;
  bool pulls;
  void (*kernel)(BudgetParams const);
  int smem_bytes;
  cudaError_t (*make)(cuda::UpProjectionFwdParams&, cuda::UpProjectionFwdArguments const&);
};
template <int kStages, Beside kBeside>
Variant variant(char const* name) {
  using C = Config<kStages>;
  return {name,
          kBeside,
          has_ring(kBeside),
          up_projection_beside<C, kBeside>,
          int(sizeof(BudgetStorage<C, has_ring(kBeside)>)),
          &cuda::make_up_projection_fwd_params<C>};
}
std::vector<Variant> variants() {
  return {variant<4, Beside::kNothing>("plain"),
          variant<3, Beside::kNothing>("3-stages"),
          variant<4, Beside::kSpin>("4-stages-spin"),
          variant<3, Beside::kSpin>("3-stages-spin"),
          variant<3, Beside::kPull>("3-stages-pull-beside"),
          variant<3, Beside::kDispatch>("3-stages-dispatch"),
          variant<3, Beside::kPullAlone>("pull-alone")};
}

__global__ void fill_pool(Rows const rows, char* pool) {
  int const chunks = rows.row_bytes / 16;
  for (int row = int(blockIdx.x); row < rows.rows; row += int(gridDim.x)) {
    auto const* const from = reinterpret_cast<uint4 const*>(rows.source(row));
    auto* const to = reinterpret_cast<uint4*>(pool + int64_t{row} * rows.row_bytes);
    for (int c = int(threadIdx.x); c < chunks; c += int(blockDim.x)) to[c] = from[c];
  }
}

// One GPU's share of a shape.
class Gpu {
 public:
  Gpu(int rank, Shape const& shape)
      : rank_(rank),
        shape_(shape),
        x(int64_t{shape.tokens} * shape.hidden),
        pool_(int64_t{shape.rows()} * shape.hidden),
        w_up_(int64_t{2} * shape.local_experts * shape.intermediate * shape.hidden),
        a_(int64_t{shape.rows()} * shape.intermediate),
        wanted_(a_.count()),
        arrived_(std::max(shape.rows() / 128, 132)),
        offsets_(offsets(shape)),
        tile_counter_(std::vector<int>{0}) {
    fill_uniform<<<4096, 256>>>(x.get(), x.count(), uint64_t(1 + rank), 1.0f);
    fill_uniform<<<4096, 256>>>(w_up_.get(), w_up_.count(), 11, 0x1p-4f);
    TESSERA_CUDA(cudaMemset(arrived_.get(), 0, arrived_.count() * 4));
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  void connect(Gpu const* const* gpus, int count) {
    rows_ = {{reinterpret_cast<char const*>(gpus[0]->x.get()),
              reinterpret_cast<char const*>(gpus[count - 1]->x.get())},
             shape_.tokens,
             shape_.hidden * 2,
             shape_.rows(),
             shape_.rows_of_expert,
             rank_,
             count};
  }

  // Once per launch: those that pull count rows up.
  BudgetParams params(Variant const& v) {
    int64_t const d = shape_.hidden;
    int64_t const n = shape_.intermediate;
    auto const half = [&](int which) {
      return cuda::WeightRows{.gmem = w_up_.get() + which * n * d,
                              .expert_stride = 2 * n * d,
                              .row_stride = d,
                              .column_stride = 1,
                              .block = n};
    };
    cuda::UpProjectionFwdArguments args = {};
    args.x = {.gmem = pool_.get(), .rows = shape_.rows(), .pitch = d};
    args.gmem_expert_offsets = offsets_.get();
    args.w_up[0] = half(0);
    args.w_up[1] = half(1);
    args.gmem_a = a_.get();
    args.rows = shape_.rows();
    args.hidden = d;
    args.intermediate = n;
    args.experts = shape_.local_experts;
    args.gmem_tile_counter = tile_counter_.get();
    BudgetParams p = {};
    TESSERA_CUDA(v.make(p.up, args));
    p.rows = rows_;
    p.gmem_pool = reinterpret_cast<char*>(pool_.get());
    p.gmem_arrived = arrived_.get();
    p.arrived_before = pulls_ * 128;
    if (v.pulls) ++pulls_;
    return p;
  }

  static void launch(Variant const& v, BudgetParams const& p) {
    TESSERA_CUDA(
        cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v.smem_bytes));
    TESSERA_CUDA(
        cuda::host::launch_clusters(v.kernel, {384, 1, v.smem_bytes}, 132, 1 << 20, p, nullptr));
  }

  void prepare_reference(Variant const& plain) {
    fill_pool<<<4096, 256>>>(rows_, reinterpret_cast<char*>(pool_.get()));
    launch(plain, params(plain));
    TESSERA_CUDA(cudaMemcpy(wanted_.get(), a_.get(), a_.count() * 2, cudaMemcpyDeviceToDevice));
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  // Poison what the variant has to write.
  void poison(Variant const& v) {
    a_.poison();
    if (v.pulls) pool_.poison();
    if (v.beside == Beside::kPull) {  // races with its own GEMM: the rows must be there before
      fill_pool<<<4096, 256>>>(rows_, reinterpret_cast<char*>(pool_.get()));
    }
    TESSERA_CUDA(cudaDeviceSynchronize());
  }
  bool is_right(Variant const& v) {
    TESSERA_CUDA(cudaDeviceSynchronize());
    if (v.beside == Beside::kPullAlone) {  // judged by what the plain kernel makes of it
      Variant const plain = variants().front();
      launch(plain, params(plain));
    }
    return same_bits(a_, wanted_);
  }

 private:
  static std::vector<int> offsets(Shape const& s) {
    std::vector<int> all;
    for (int e = 0; e <= s.local_experts; ++e) all.push_back(e * s.rows_of_expert);
    return all;
  }
  int rank_;
  Shape shape_;

 public:
  DeviceBuffer<bf16> x;

 private:
  DeviceBuffer<bf16> pool_, w_up_, a_, wanted_;
  DeviceBuffer<uint32_t> arrived_;
  DeviceBuffer<int> offsets_, tile_counter_;
  Rows rows_ = {};
  uint32_t pulls_ = 0;
};

struct Options {
  int gpus = 2, iters = 40;
  std::string command, out, commit;
};

// ms of every variant, the slower GPU of each launch; empty where the bits are wrong.
std::vector<std::vector<float>> measure(Shape const& shape, Options const& options) {
  std::vector<Variant> const all = variants();
  std::vector<std::unique_ptr<Gpu>> gpus(size_t(options.gpus));
  std::vector<std::vector<float>> ms(all.size());
  std::vector<char> right(all.size(), 1);
  std::vector<float> latest(size_t(options.gpus));
  std::barrier sync(options.gpus);
  auto const rank_main = [&](int rank) {
    TESSERA_CUDA(cudaSetDevice(rank));
    gpus[size_t(rank)] = std::make_unique<Gpu>(rank, shape);
    sync.arrive_and_wait();
    Gpu& gpu = *gpus[size_t(rank)];
    std::vector<Gpu const*> list;
    for (auto const& g : gpus) list.push_back(g.get());
    gpu.connect(list.data(), options.gpus);
    gpu.prepare_reference(all.front());
    sync.arrive_and_wait();
    Timer timer;
    for (int i = -10; i < options.iters; ++i) {
      for (size_t c = 0; c < all.size(); ++c) {
        size_t const v = (c + size_t(i + 10)) % all.size();
        if (i == -10) gpu.poison(all[v]);
        BudgetParams const p = gpu.params(all[v]);
        sync.arrive_and_wait();
        timer.record([&] { Gpu::launch(all[v], p); });
        latest[size_t(rank)] = timer.ms();
        if (i == -10 && !gpu.is_right(all[v])) right[v] = 0;
        sync.arrive_and_wait();
        if (rank == 0 && i >= 0) ms[v].push_back(*std::max_element(latest.begin(), latest.end()));
      }
    }
    sync.arrive_and_wait();
    gpus[size_t(rank)].reset();
  };
  std::vector<std::thread> threads;
  for (int rank = 1; rank < options.gpus; ++rank) threads.emplace_back(rank_main, rank);
  rank_main(0);
  for (std::thread& t : threads) t.join();
  for (size_t v = 0; v < all.size(); ++v) {
    if (!right[v]) ms[v].clear();
  }
  return ms;
}

int run(Options const& options) {
  for (int rank = 0; rank < options.gpus; ++rank) {
    TESSERA_CUDA(cudaSetDevice(rank));
    if (options.gpus == 2) TESSERA_CUDA(cudaDeviceEnablePeerAccess(1 - rank, 0));
  }
  std::string rows;
  int failures = 0;
  for (Shape const& s : kShapes) {
    auto const ms = measure(s, options);
    std::printf("%s, %d rows, %d GPUs: ms, TFLOP/s, plain / ms\n", s.name, s.rows(), options.gpus);
    std::vector<Variant> const all = variants();
    for (size_t v = 0; v < all.size(); ++v) {
      if (ms[v].empty()) {
        std::printf("  %-22s WRONG BITS\n", all[v].name);
        ++failures;
        continue;
      }
      Quantiles const q = quantiles(ms[v]);
      float const plain = ms[0].empty() ? 0 : quantiles(ms[0]).median;
      bool const gemm = all[v].beside != Beside::kPullAlone;
      std::printf("  %-22s %.4f %6.1f %.3f\n", all[v].name, q.median,
                  gemm ? s.flops() / q.median / 1e9 : 0.0, plain / q.median);
      char text[512];
      std::snprintf(
          text, sizeof text,
          "%s\n  {\"config\": \"%s\", \"shape\": [%d, %d, %d, %d, %d], \"dtype\": "
          "\"bf16\", \"gpus\": %d, \"routing\": \"balanced\", \"pass\": "
          "\"up_projection_fwd\", \"impl\": \"tessera\", \"variant\": \"%s\", \"ms\": "
          "%.4f, \"ms_p10\": %.4f, \"ms_p90\": %.4f, \"tflops\": %.1f, \"checked\": true}",
          rows.empty() ? "" : ",", s.name, s.tokens, s.hidden, s.intermediate, 2 * s.local_experts,
          s.rows() / s.tokens, options.gpus, all[v].name, q.median, q.p10, q.p90,
          gemm ? s.flops() / q.median / 1e9 : 0.0);
      rows += text;
    }
    std::fflush(stdout);
  }
  if (!options.out.empty()) {
    int const written = write_results(
        options.out,
        {.command = options.command,
         .commit = options.commit,
         .protocol =
             "median of " + std::to_string(options.iters) +
             " after 10 warm-ups, slower GPU of each launch, variants interleaved in "
             "rotating order, uniform random data; shapes per GPU with rows/tokens in place "
             "of top_k",
         .gpus = options.gpus,
         .rows = rows});
    if (written != 0) return written;
  }
  return failures ? 1 : 0;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  tessera::bench::Options options;
  options.command = tessera::bench::command_line("build-cuda/bin/bench_dist_budget", argc, argv);
  tessera::bench::Arguments arguments(argc, argv);
  while (arguments.next()) {
    bool const known =
        arguments.takes("--gpus", options.gpus) || arguments.takes("--iters", options.iters) ||
        arguments.takes("--out", options.out) || arguments.takes("--commit", options.commit);
    if (!known) return arguments.refuse();
  }
  if (options.gpus != 1 && options.gpus != 2) {
    std::fprintf(stderr, "--gpus %d: 1 or 2\n", options.gpus);
    return 2;
  }
  return tessera::bench::run(options);
}

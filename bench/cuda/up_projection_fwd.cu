// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd against cuBLAS: every variant is checked against the plain twin (and that
// against fp64 on the host), then timed, interleaved with a batched GEMM of the balanced shape
// E x (T*K/E) x 2n x d in the same process. ratio = cuBLAS ms / our ms; ours also applies swiglu,
// stores a, and takes whatever rows the routing gives.
// Options: gemm_bench.cuh.
#include "../../src/cuda/plain/up_projection_fwd.hpp"
#include "gemm_bench.cuh"
#include "up_projection_variants.cuh"

namespace tessera::bench {
namespace {

constexpr float kSigmoidError = 0x1p-12f;  // epilogue/activation_math.cuh

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

  UpProjectionFwdArguments arguments(Variant const& v, int set) const {
    bool const gathers = v.gemm.a.loader == Loader::kGather;
    int64_t const d = shape.hidden;
    int64_t const n = shape.intermediate;
    auto const half = [&](int which) {
      return cuda::WeightRows{.gmem = w_up[set]->get() + which * n * d,
                              .expert_stride = 2 * n * d,
                              .row_stride = d,
                              .column_stride = 1,
                              .block = n};
    };
    return {.x = {.gmem = gathers ? x[set]->get() : sorted[set]->get(),
                  .rows = gathers ? shape.tokens : capacity,
                  .pitch = d},
            .gmem_gather_index = gathers ? gather_index.get() : nullptr,
            .gmem_expert_offsets = expert_offsets.get(),
            .w_up = {half(0), half(1)},
            .activation = {},
            .gmem_h = h[set]->get(),
            .gmem_a = a[set]->get(),
            .rows = capacity,
            .hidden = d,
            .intermediate = n,
            .experts = shape.experts,
            .gmem_tile_counter = tile_counter.get()};
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

  bool accepts(int set, std::string& note) const {
    Shape const& s = problem_.shape;
    Deviation const h = compare(problem_.h[set]->get(), h_.get(), nullptr, 2 * s.intermediate, 0);
    Deviation const a =
        compare(problem_.a[set]->get(), a_.get(), h_.get(), s.intermediate, kSigmoidError);
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

Candidate make_candidate(Variant const& v, Problem const& p) {
  std::vector<UpProjectionFwdArguments> arguments;
  for (int set = 0; set < kSets; ++set) arguments.push_back(p.arguments(v, set));
  return {.name = v.name,
          .checked = false,
          .launch = [=, launch = v.launch](
                        int set) { TESSERA_CUDA(launch(arguments[set], sm_count(), nullptr)); },
          .ms = {}};
}

// Both sets hold the same inputs, so two runs must give the same bits.
bool run_and_check(Candidate& c, Problem const& p, Reference const& reference) {
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
  int64_t const pitch = int64_t{2} * p.shape.intermediate;
  bf16* const h = p.h[0]->get();
  TESSERA_CUDA(cudaMemcpy(h + pitch, h, pitch * sizeof(bf16), cudaMemcpyDeviceToDevice));
  bool const swapped = reference.accepts(0, note);
  TESSERA_CUDA(cudaMemset(h + pitch, 0, pitch * sizeof(bf16)));
  bool const zeroed = reference.accepts(0, note);
  return !swapped && !zeroed;
}

int check_tiny(BenchOptions const& options, cublasHandle_t) {
  int failures = 0;
  for (Shape const& s : tiny_shapes()) {
    Problem const p(s, Routing::random(s.tokens, s.experts, s.top_k, 7));
    Reference const reference(p);
    double const twin = reference.error_against_fp64();
    std::printf("%s (%d,%d,%d,%d,%d): twin against fp64 %.1e\n", s.name, s.tokens, s.hidden,
                s.intermediate, s.experts, s.top_k, twin);
    if (twin > 1e-5) ++failures;
    for (Variant const& v : all_variants()) {
      if (!options.selects(v.name) || !v.serves(s.intermediate)) continue;
      Candidate c = make_candidate(v, p);
      if (!run_and_check(c, p, reference)) ++failures;
    }
    if (s.tokens > 1 && !comparison_rejects_mutants(p, reference)) {
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
  Reference const reference(p);
  std::printf("%s %s: twin against fp64 %.1e\n", s.name, routing, reference.error_against_fp64());
  std::vector<Candidate> candidates;
  candidates.push_back({"cublas-bmm",
                        true,
                        [&](int set) {
                          cublas_batched(handle, s.rows() / s.experts, 2 * s.intermediate, s.hidden,
                                         s.experts, p.sorted[set]->get(), p.w_up[set]->get(),
                                         p.h[set]->get());
                        },
                        {}});
  for (Variant const& v : all_variants()) {
    if (!options.selects(v.name) || !v.serves(s.intermediate)) continue;
    Candidate c = make_candidate(v, p);
    if (run_and_check(c, p, reference)) candidates.push_back(std::move(c));
  }
  time_and_report(options, s, routing, 4.0 * double(s.rows()) * s.intermediate * s.hidden,
                  candidates, report);
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  return tessera::bench::gemm_main(argc, argv, "up_projection_fwd", "7B-n256,30B-n1024,Qwen3Next",
                                   tessera::bench::check_tiny, tessera::bench::bench_shape);
}

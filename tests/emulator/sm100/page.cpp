// SPDX-License-Identifier: Apache-2.0
// Prints the tables of docs/kernels/blackwell.md (page_test.py puts them there): what the configurations of kernels say
// of tiles, memory, threads and barriers, and how long each kernel should take by FLOPs and bytes at published rates.
#include <algorithm>
#include <cstdio>
#include <initializer_list>
#include <string>

#include "cli/bench_configs.hpp"
#include "cuda/kernels/down_projection_dgrad_sm100.cuh"
#include "cuda/kernels/down_projection_fwd_sm100.cuh"
#include "cuda/kernels/projection_wgrad_sm100.cuh"
#include "cuda/kernels/up_projection_dgrad_sm100.cuh"
#include "cuda/kernels/up_projection_fwd_sm100.cuh"
#include "cuda/tuning/sm100.hpp"
#include "tessera/work.hpp"

namespace tessera::cuda {
namespace {

using gemm::GemmConfig;

// NVIDIA's datasheets of HGX B200, per GPU: dense bf16 and HBM3e.
constexpr double kPublishedFlops = 2.25e15, kPublishedBytes = 8e12;
constexpr int kPublishedSms = 148;

struct Row {
  char const* kernel;
  GemmConfig gemm;
  int ctas;
  unsigned a_bytes, b_bytes;  // of a tile
  bool gathers;
  std::size_t shared_bytes;
  std::uint32_t tensor_columns;
  int threads, full, work_empty;
  bool relays;
};

template <class Config>
constexpr Row row(char const* kernel) {
  constexpr GemmConfig kGemm = Config::gemm;
  static_assert(gemm::valid_in_tensor_memory(kGemm));
  return {kernel,
          kGemm,
          kGemm.cluster_m(),
          kGemm.a_tile_bytes(),
          kGemm.b_tile_bytes(),
          kGemm.gathers(),
          sizeof(gemm::SharedStorage<kGemm>),
          gemm::tensor_columns<kGemm>(),
          gemm::threads_in_tensor_memory(kGemm),
          gemm::full_arrivals(kGemm),
          gemm::tile_readers(kGemm),
          gemm::relays(kGemm)};
}

constexpr auto kSwiglu = ActivationKind::swiglu;
using gemm::Major;
constexpr Row kRows[] = {
    row<UpProjectionFwdSm100Gathered<kSwiglu, Major::kK>>("up_projection_fwd, gathers"),
    row<UpProjectionFwdSm100GatheredPair<kSwiglu, Major::kK>>("up_projection_fwd, gathers"),
    row<UpProjectionFwdSm100<kSwiglu, Major::kK>>("up_projection_fwd"),
    row<UpProjectionFwdSm100Pair<kSwiglu, Major::kK>>("up_projection_fwd"),
    row<DownProjectionFwdSm100<Major::kK>>("down_projection_fwd"),
    row<DownProjectionFwdSm100Pair<Major::kK>>("down_projection_fwd"),
    row<DownProjectionDgradSm100<kSwiglu, Major::kRows>>("down_projection_dgrad"),
    row<DownProjectionDgradSm100Pair<kSwiglu, Major::kRows>>("down_projection_dgrad"),
    row<UpProjectionDgradSm100<Major::kRows>>("up_projection_dgrad"),
    row<UpProjectionDgradSm100Pair<Major::kRows>>("up_projection_dgrad"),
    row<ProjectionWgradSm100<Major::kK, false>>("projection_wgrad, bf16"),
    row<ProjectionWgradSm100Pair<Major::kK, false>>("projection_wgrad, bf16"),
    row<ProjectionWgradSm100<Major::kK, true>>("projection_wgrad, fp32"),
    row<ProjectionWgradSm100Pair<Major::kK, true>>("projection_wgrad, fp32"),
};

void print_configurations() {
  std::printf("## configurations\n");
  std::printf(
      "| kernel | by | tile | stages | bytes of a stage | slabs of a warp | shared memory |"
      " threads | columns of tensor memory |\n|---|---|---|--:|--:|--:|--:|--:|--:|\n");
  for (Row const& r : kRows) {
    int const ctas = r.ctas;
    std::printf("| %s | %s | %d x %d x %d | %d | %u | %d | %zu | %d | %u |\n", r.kernel,
                ctas == 2 ? "pair" : "one CTA", r.gemm.tile.m * ctas, r.gemm.tile.n, r.gemm.tile.k,
                r.gemm.stages, r.a_bytes + r.b_bytes / ctas, r.gemm.epilogue.slabs, r.shared_bytes,
                r.threads, r.tensor_columns);
  }
}

void print_barriers() {
  std::printf("## barriers\n");
  std::printf(
      "| kernel | by | `full` | bytes of `full` | `gathered` | `acc_empty` |"
      " `work_empty` |\n|---|---|--:|--:|--:|--:|--:|\n");
  for (Row const& r : kRows) {
    int const ctas = r.ctas;
    auto const a = r.gathers ? 0u : r.a_bytes * static_cast<unsigned>(ctas);
    std::printf("| %s | %s | %d | %u | %s | %d | %d |\n", r.kernel, ctas == 2 ? "pair" : "one CTA",
                r.full, a + r.b_bytes, r.relays ? "128" : "", gemm::kEpilogueWarps * ctas,
                r.work_empty);
  }
}

double whole(double count, double part) {
  return static_cast<double>(static_cast<std::int64_t>((count + part - 1) / part));
}

// Seconds of the multiplications: whole tiles, which clusters of all SMs take in turn.
double seconds_of_tiles(Row const& r, double tiles, double k) {
  int const ctas = r.ctas;
  double const tile =
      2.0 * r.gemm.tile.m * ctas * r.gemm.tile.n * whole(k, r.gemm.tile.k) * r.gemm.tile.k;
  double const clusters = kPublishedSms / ctas;
  return whole(tiles, clusters) * tile / (kPublishedFlops * ctas / kPublishedSms);
}

struct Prediction {
  work::OpWork work;
  Row const* row;
  double tiles, k;
};

Row const& row_of(std::string const& kernel, bool pair) {
  return *std::find_if(std::begin(kRows), std::end(kRows),
                       [&](Row const& r) { return kernel == r.kernel && (r.ctas == 2) == pair; });
}

void print_predictions() {
  std::printf("## predictions\n");
  std::printf(
      "| layer | kernel | by | GFLOP | MB | by FLOPs, us | by bytes, us | predicted, us |\n"
      "|---|---|---|--:|--:|--:|--:|--:|\n");
  for (char const* const name : {"7B-n256", "30B-n1024", "Qwen3-30B", "OLMoE", "DSv3"}) {
    auto const& config = *std::find_if(std::begin(cli::kBenchConfigs), std::end(cli::kBenchConfigs),
                                       [&](auto const& c) { return std::string(name) == c.name; });
    MoeDesc desc;
    desc.shape = config.shape;
    desc.dtype = DType::bf16;
    auto const slots = static_cast<double>(desc.num_slots());
    auto const d = static_cast<double>(desc.shape.hidden),
               n = static_cast<double>(desc.shape.intermediate);
    auto const experts = static_cast<double>(desc.shape.experts), rows = slots / experts;
    bool const pair = takes_pairs_sm100(desc.num_slots(), static_cast<int>(experts), kPublishedSms);
    bool const wgrad_pair = wgrad_takes_pairs_sm100(desc.shape.hidden, kPublishedSms);
    auto const tiles = [&](Row const& r, double columns) {
      return experts * whole(rows, r.gemm.tile.m * r.ctas) * whole(columns, r.gemm.tile.n);
    };
    // A weight gradient's tiles are features of x or dO by those of h or a, in halves that fill no common tile.
    auto const wgrad = [&](work::OpWork const& work, double halves) {
      Row const& r = row_of("projection_wgrad, bf16", wgrad_pair);
      double const m_tiles = whole(d, r.gemm.tile.m * r.ctas);
      return Prediction{work, &r, experts * m_tiles * whole(halves * n, r.gemm.tile.n), rows};
    };
    Row const& up = row_of("up_projection_fwd, gathers", pair);
    Row const& down = row_of("down_projection_fwd", pair);
    Row const& down_dgrad = row_of("down_projection_dgrad", pair);
    Row const& up_dgrad = row_of("up_projection_dgrad", pair);
    for (Prediction const& p :
         {Prediction{work::up_projection_fwd(desc, slots), &up, tiles(up, 2 * n), d},
          Prediction{work::down_projection_fwd(desc, slots), &down, tiles(down, d), n},
          Prediction{work::down_projection_dgrad(desc, slots), &down_dgrad, tiles(down_dgrad, n),
                     d},
          Prediction{work::up_projection_dgrad(desc, slots), &up_dgrad, tiles(up_dgrad, d), 2 * n},
          wgrad(work::down_projection_wgrad(desc, slots), 1),
          wgrad(work::up_projection_wgrad(desc, slots), 2)}) {
      double const by_flops = seconds_of_tiles(*p.row, p.tiles, p.k);
      double const by_bytes = p.work.bytes() / kPublishedBytes;
      std::printf("| %s | %s | %s | %.0f | %.0f | %.0f | %.0f | %.0f |\n", name, p.work.op,
                  p.row->ctas == 2 ? "pairs" : "one CTA", p.work.flops * 1e-9,
                  p.work.bytes() * 1e-6, by_flops * 1e6, by_bytes * 1e6,
                  std::max(by_flops, by_bytes) * 1e6);
    }
  }
}

}  // namespace
}  // namespace tessera::cuda

int main() {
  tessera::cuda::print_configurations();
  tessera::cuda::print_barriers();
  tessera::cuda::print_predictions();
}

// SPDX-License-Identifier: Apache-2.0
#include "cli/cluster_rates.hpp"

#include <fmt/format.h>

#include "cli/commands.hpp"

namespace tessera::cli {
namespace {

// before-runs: dense and attention are what cuBLAS and flash attention 2 reached in other programs, link is the bus
// bandwidth of NCCL's all-reduce on two and four H200, network is 400 Gb/s less a tenth.
//
// first-run: the kernels of a step of 12 layers of 7B-n256, 6 sequences, two H200 (kFirstRunFile), whose routing had
// collapsed: what is not experts does not depend on it. From the row no-experts, times by 154.998/158.729, as its
// profiled steps took longer:
//   attention    46.9 ms for 1.299e13 FLOP
//   dense        37.0 ms for 2.809e13 FLOP, without the 11.5 ms of the router's GEMMs, which ran in fp32
//   copies       6.04 ms, what is left of the step after all other kinds, for 14 bytes of 1.927e9 parameters
//   optimizer    21.1 ms for 36 bytes of 1.002e9 parameters; clipping has had less to do since
//   link         reduce-scatters 20.4 ms for 4.01e9 bytes, all-gathers 17.8 ms for 3.85e9 bytes: beside other kernels
//   logits_rows  top-k, counts and losses of the router 3.0 ms, at the rate of elementwise kernels
//   slowdown     4.6 of 158.7 ms without a kernel
// From the row tessera, times by 190.554/196.427: elementwise 17.8 ms for 4.61e10 bytes.
//
// balanced-run: the same point with routing that had learnt, cuDNN's attention, the router's GEMMs in TF32 and clipping
// in AdamW (kBalancedFile). From the row tessera-layer, times by 156.902/162.968, bytes and FLOP as above:
//   attention    26.4 ms; dense 39.0 ms; elementwise 16.4 ms; optimizer 21.6 ms; copies 4.74 ms
//   link         reduce-scatters 27.3 ms, all-gathers 22.3 ms, in which ranks also wait for each other
//   slowdown     7.6 of 163.0 ms without a kernel
// logits_rows: top-k, counts, losses and GEMMs of the router 4.5 ms in the row tessera.
// An H100 was not measured so: FLOP/s are 630/650 of an H200's, bytes/s 2.4/3.4.
constexpr double kFlops = 630.0 / 650.0, kBytes = 2.4 / 3.4;

constexpr RateSet kSets[] = {
    {.name = "before-runs",
     .gpus = {{"h200", 139 * kGib, 650e12, 390e12, 3.4e12, 3.4e12, 3.4e12, 340e9, 45e9},
              {"h100", 78 * kGib, 630e12, 380e12, 2.4e12, 2.4e12, 2.4e12, 340e9, 45e9}},
     .file = nullptr,
     .attention = "flash attention 2",
     .slowdown = 1.03,
     .logits_rows = 0,
     .router_gemms = false,
     .norm_of_experts = true,
     .layer_h100 = false},
    {.name = "first-run",
     .gpus = {{"h200", 139 * kGib, 758e12, 277e12, 2.59e12, 4.47e12, 1.71e12, 205e9, 45e9},
              {"h100", 78 * kGib, 758e12 * kFlops, 277e12 * kFlops, 2.59e12 * kBytes,
               4.47e12 * kBytes, 1.71e12 * kBytes, 205e9, 45e9}},
     .file = kFirstRunFile,
     .attention = "flash attention 2",
     .slowdown = 1.03,
     .logits_rows = 52,
     .router_gemms = false,
     .norm_of_experts = false,
     .layer_h100 = true},
    {.name = "balanced-run",
     .gpus = {{"h200", 139 * kGib, 721e12, 491e12, 2.82e12, 5.69e12, 1.67e12, 158e9, 45e9},
              {"h100", 78 * kGib, 721e12 * kFlops, 491e12 * kFlops, 2.82e12 * kBytes,
               5.69e12 * kBytes, 1.67e12 * kBytes, 158e9, 45e9}},
     .file = kBalancedFile,
     .attention = "cuDNN's attention",
     .slowdown = 1.049,
     .logits_rows = 83,
     .router_gemms = true,
     .norm_of_experts = false,
     .layer_h100 = true},
};

constexpr char kPythonFile[] = "bench/results/archive/h200/2026-11-21-python-experts.json";
constexpr char kNotKept[] = "a run beside Tessera's that was not kept";
constexpr char kTraffic[] = "inferred from memory traffic beside torch-grouped-mm's";

// tessera and sonicmoe: whole layers, their routers included.
constexpr ExpertsTime kTimes[] = {
    {"7B-n256", 1536, 256, 128, 8, 24576, "tessera", 2.59, 2.86, kLayerFile, true},
    {"7B-n256", 1536, 256, 128, 8, 24576, "sonicmoe", 2.96, 0, kLayerFile, true},
    {"7B-n256", 1536, 256, 128, 8, 24576, "liger-triton", 5.35, 0, kNotKept, false},
    {"7B-n256", 1536, 256, 128, 8, 24576, "scattermoe", 6.51, 0, kTraffic, false},
    {"7B-n256", 1536, 256, 128, 8, 24576, "torch-grouped-mm", 9.55, 0, kNotKept, false},
    {"7B-n256", 1536, 256, 128, 8, 24576, "hf-grouped-mm", 12.8, 0, kTraffic, false},
    {"Qwen3-30B", 2048, 768, 128, 8, 32768, "tessera", 11.35, 11.69, kLayerFile, true},
    {"Qwen3-30B", 2048, 768, 128, 8, 32768, "sonicmoe", 12.67, 0, kLayerFile, true},
    {"Qwen3-30B", 2048, 768, 128, 8, 32768, "torch-grouped-mm", 25.33, 0, kPythonFile, true},
    {"Qwen3-30B", 2048, 768, 128, 8, 32768, "hf-grouped-mm", 34.04, 0, kPythonFile, true},
    {"1.4B-n256", 768, 256, 128, 8, 40960, "tessera", 2.31, 2.64, kLayerFile, true},
    {"1.4B-n256", 768, 256, 128, 8, 40960, "sonicmoe", 2.62, 0, kLayerFile, true},
    {"7B-n512", 1536, 512, 64, 4, 24576, "tessera", 2.35, 2.48, kLayerFile, true},
    {"7B-n512", 1536, 512, 64, 4, 24576, "sonicmoe", 2.71, 0, kLayerFile, true},
    {"7B-n1024", 1536, 1024, 32, 2, 24576, "tessera", 2.21, 2.28, kLayerFile, true},
    {"7B-n1024", 1536, 1024, 32, 2, 24576, "sonicmoe", 2.57, 0, kLayerFile, true},
    {"OLMoE", 2048, 1024, 64, 8, 32768, "tessera", 14.38, 14.95, kLayerFile, true},
    {"OLMoE", 2048, 1024, 64, 8, 32768, "sonicmoe", 15.91, 0, kLayerFile, true},
    {"Qwen3Next", 2048, 512, 512, 10, 32768, "tessera", 10.94, 11.69, kLayerFile, true},
    {"Qwen3Next", 2048, 512, 512, 10, 32768, "sonicmoe", 12.58, 0, kLayerFile, true},
    {"30B-n256", 4096, 256, 256, 16, 32768, "tessera", 17.25, 18.40, kLayerFile, true},
    {"30B-n256", 4096, 256, 256, 16, 32768, "sonicmoe", 19.59, 0, kLayerFile, true},
    {"30B-n1024", 4096, 1024, 64, 4, 32768, "tessera", 14.49, 15.04, kLayerFile, true},
    {"30B-n1024", 4096, 1024, 64, 4, 32768, "sonicmoe", 16.22, 0, kLayerFile, true},
    {"120B-n512", 4096, 512, 256, 16, 32768, "tessera", 32.40, 33.39, kLayerFile, true},
    {"120B-n512", 4096, 512, 256, 16, 32768, "sonicmoe", 34.99, 0, kLayerFile, true},
};

}  // namespace

std::span<RateSet const> rate_sets() { return kSets; }

RateSet const& rate_set(std::string const& name) {
  std::string known;
  for (RateSet const& set : kSets) {
    if (name == set.name) return set;
    known += std::string(known.empty() ? "" : " ") + set.name;
  }
  throw CommandError(fmt::format("--rates {}: not known; choose one of: {}", name, known));
}

GpuRates const& gpu_rates(RateSet const& set, std::string const& name) {
  std::string known;
  for (GpuRates const& gpu : set.gpus) {
    if (name == gpu.name) return gpu;
    known += std::string(known.empty() ? "" : " ") + gpu.name;
  }
  throw CommandError(fmt::format("--gpu {}: has no rates; choose one of: {}", name, known));
}

std::span<ExpertsTime const> experts_times() { return kTimes; }

}  // namespace tessera::cli

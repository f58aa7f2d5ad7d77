// SPDX-License-Identifier: Apache-2.0
// Rates of GPUs and links, from which cluster.hpp predicts training steps. Every number says where it is from, and
// stands nowhere else.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace tessera::cli {

/// Rates of one GPU: FLOP/s, and bytes/s of what is read and written.
struct GpuRates {
  char const* name;
  double memory;  ///< bytes that a process can use
  double dense;   ///< FLOP/s of projections and of the head, bf16
  double
      attention;  ///< FLOP/s of causal attention, forward and backward; the masked half is not counted
  double elementwise;  ///< norms, rotary, residuals, softmax of the head
  double copies;       ///< copies of sharding, as far as other kernels do not cover them
  double optimizer;    ///< AdamW and clipping
  double link;         ///< NCCL within a host, without multicast: bytes that one rank sends
  double network;      ///< bytes that one GPU sends to other hosts
};

/// One state of knowledge. Predictions of an older one stay reproducible.
struct RateSet {
  char const* name;
  GpuRates gpus[2];
  /// Results of the program that the parts beside the experts come from; null: assumed.
  char const* file;
  char const* attention;  ///< whose kernels
  double slowdown;        ///< a step over the sum of its parts: gaps, SMs that NCCL holds
  /// Passes over fp32 logits [T,E] that take as long as the model's own router; 0: not counted.
  double logits_rows;
  bool router_gemms;     ///< its GEMMs are among them
  bool norm_of_experts;  ///< what experts read is counted twice among what a layer saves
  bool layer_h100;       ///< experts on an H100 from its own measurement
};

/// The sets by age, the newest last.
std::span<RateSet const> rate_sets();
/// Throws CommandError naming the sets.
RateSet const& rate_set(std::string const& name);
/// Throws CommandError naming the GPUs.
GpuRates const& gpu_rates(RateSet const& set, std::string const& name);

/// Forward and backward of one layer's experts of `tokens` tokens.
struct ExpertsTime {
  char const* config;
  std::int64_t hidden, intermediate, experts, top_k, tokens;
  char const* impl;
  double h200_ms;
  double h100_ms;      ///< 0: not measured
  char const* source;  ///< of h200_ms
  bool measured;       ///< in a results file, which is the source
};

std::span<ExpertsTime const> experts_times();

inline constexpr double kGib = 1024.0 * 1024.0 * 1024.0;
inline constexpr double kExpertsFixedMs = 0.10;  ///< of a layer whatever T: launches, the last wave
inline constexpr double kForwardShare = 0.36;    ///< of a layer's time, both passes together
inline constexpr double kStragglers[] = {1.02, 1.06};  ///< a step over several hosts takes so often

inline constexpr char kFirstRunFile[] =
    "bench/results/archive/h200x2/2026-11-27-end-to-end-first-run.json";
inline constexpr char kBalancedFile[] =
    "bench/results/archive/h200x2/2026-11-27-end-to-end-r0.json";
inline constexpr char kLayerFile[] = "bench/results/archive/h200/2026-11-24-layer-sonicmoe.json";
inline constexpr char kLayerH100File[] = "bench/results/archive/h100/2026-11-24-layer-over-h.json";

}  // namespace tessera::cli

// SPDX-License-Identifier: Apache-2.0
// Time and memory of a training step of bench/end_to_end on a cluster, calculated from cluster_rates.hpp. There are no
// other formulas: bench/end_to_end/predict.py calls the program.
//
//   step = slowdown * (L * (max(forward, gather) + max(backward, gather + reduce)) + head + optimizer
//                      + gather + reduce)
//   peak = 16 P/N + 10 p + T * saved + loss + 3 GiB
//
// P parameters of the model, p of a layer, N ranks that share a copy of the state, L layers, T tokens of a GPU, g GPUs
// of one of H hosts. gather and reduce are those of a layer; the last two of a step are covered by nothing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/cluster_rates.hpp"

namespace tessera::cli {

/// A decoder whose layers all have grouped-query attention and experts, as bench/end_to_end/model.py builds it.
struct TrainingModel {
  std::int64_t layers = 0, hidden = 0, heads = 0, kv_heads = 0, head_size = 0, intermediate = 0,
               experts = 0, top_k = 0, vocabulary = 0;
  bool tied = false;  ///< the head is the embedding

  [[nodiscard]] double expert_parameters() const noexcept;  ///< of a layer
  [[nodiscard]] double layer_parameters() const noexcept;
  [[nodiscard]] double parameters() const noexcept;
};

enum class Sharding {
  hsdp,  ///< within a host, gradients summed between hosts
  fsdp   ///< over all GPUs
};

struct Cluster {
  std::int64_t hosts = 1;
  std::int64_t gpus = 1;  ///< of a host
  Sharding sharding = Sharding::hsdp;
  bool expert_parallel = false;  ///< experts are spread over the GPUs of a host instead of gathered

  [[nodiscard]] double ranks() const noexcept { return static_cast<double>(hosts * gpus); }
};

/// The batch of one GPU.
struct Batch {
  std::int64_t sequences = 1;
  std::int64_t context = 4096;
  bool recompute = false;      ///< blocks run again in backward
  bool keep_gathered = false;  ///< layers stay gathered between forward and backward

  [[nodiscard]] double tokens() const noexcept { return static_cast<double>(sequences * context); }
};

/// Bytes at the peak of one GPU.
struct PeakBytes {
  double state = 0;     ///< parameters, gradients and two moments in fp32, sharded
  double gathered = 0;  ///< two layers in bf16, or all, bf16 gradients and an fp32 buffer of one
  double saved = 0;     ///< from forward to backward
  double exchange = 0;  ///< rows of experts that other GPUs sent
  double loss = 0;      ///< logits of 4096 rows three times, gradients of the head
  double runtime = 0;   ///< CUDA and NCCL

  [[nodiscard]] double total() const noexcept {
    return state + gathered + saved + exchange + loss + runtime;
  }
};

/// Seconds. Those of layers are of all layers, forward and backward without recomputation.
struct StepTerms {
  double experts = 0, attention = 0, projections = 0, elementwise = 0, router = 0, exchange = 0;
  double head = 0, optimizer = 0;
  double gather = 0, reduce = 0;  ///< of one layer
};

struct Prediction {
  double seconds = 0;
  StepTerms terms;
  PeakBytes peak;
};

/// Holds what is known of one implementation's experts at the model's shape.
struct Experts {
  std::string impl;
  double ms = 0;           ///< of a layer of `tokens` tokens
  double slower = 1;       ///< so many times that on this GPU
  double tokens = 0;       ///< of the measurement
  bool measured = false;   ///< at this shape and on this GPU
  std::string source;      ///< file, or what was assumed
  bool own_router = true;  ///< else the model's router runs beside it
};

class ClusterModel {
 public:
  ClusterModel(TrainingModel const& model, Cluster const& cluster, RateSet const& set,
               GpuRates const& gpu)
      : model_(model), cluster_(cluster), set_(set), gpu_(gpu) {}

  /// A layer without experts, behind the model's router: x itself stands in their place, and zeros for gradients, as
  /// bench/end_to_end/experts.py has it.
  [[nodiscard]] static Experts no_experts();

  /// All implementations with a time at the model's shape; at other shapes Tessera's alone, as fast per FLOP as at
  /// the measured shape that is nearest.
  [[nodiscard]] std::vector<Experts> experts() const;

  [[nodiscard]] Prediction predict(Experts const& experts, Batch const& batch) const;
  [[nodiscard]] PeakBytes peak(std::string const& impl, Batch const& batch) const;

  /// The most sequences of a GPU whose peak is within its memory; 0: none.
  [[nodiscard]] std::int64_t largest(std::string const& impl, Batch batch) const;

  /// Bytes that a layer saves of a token from forward to backward, all of it and its experts alone.
  [[nodiscard]] double saved_by_layer(std::string const& impl) const;
  [[nodiscard]] double saved_by_experts(std::string const& impl) const;

 private:
  [[nodiscard]] double sharded() const;   // parameters of one GPU
  [[nodiscard]] double gathered() const;  // parameters of a layer that FSDP gathers
  void exchanges(StepTerms& terms, double tokens) const;
  [[nodiscard]] Experts known(ExpertsTime const& time, std::string const& impl, double work) const;

  TrainingModel model_;
  Cluster cluster_;
  RateSet const& set_;
  GpuRates const& gpu_;
};

}  // namespace tessera::cli

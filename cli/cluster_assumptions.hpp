// SPDX-License-Identifier: Apache-2.0
// The list that a prediction for a cluster prints with it: where each rate is from, and what is taken for granted.
#pragma once

#include <string>
#include <vector>

#include "cli/cluster.hpp"

namespace tessera::cli {

struct Assumption {
  char const* of;
  char const* basis;  ///< measured, scaled (from a measurement of another GPU), or assumed
  std::string text;
  std::string source;  ///< results file; empty where nothing was measured
};

std::vector<Assumption> assumptions_of(TrainingModel const& model, Cluster const& cluster,
                                       RateSet const& set, GpuRates const& gpu);

/// A figure of others that may stand beside a prediction.
struct Published {
  char const* what;
  double tokens_per_day, tokens_per_s_per_gpu;
  char const* not_named;
};
inline constexpr Published kPublished = {"SonicMoE's paper, a 7B model under FSDP-2 on 64 H100",
                                         213e9, 38520,
                                         "layers, heads, vocabulary, sequence length or batch"};

/// True if the cluster is one of 64 H100.
bool has_published(Cluster const& cluster, GpuRates const& gpu);

}  // namespace tessera::cli

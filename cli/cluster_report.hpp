// SPDX-License-Identifier: Apache-2.0
// The text and the JSON that `tessera plan --cluster` prints.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/cluster.hpp"
#include "cli/output.hpp"

namespace tessera::cli {

/// An implementation with its batch and what is predicted of it.
struct ClusterRow {
  Experts experts;
  Batch batch;
  std::int64_t largest = 0;
  bool fits = false;
  double saved = 0;  ///< bytes of a token in a layer
  Prediction prediction;

  [[nodiscard]] double tokens_per_s() const { return batch.tokens() / prediction.seconds; }
};

/// Holds the rows, and what they share.
struct ClusterPlan {
  TrainingModel model;
  Cluster cluster;
  RateSet const* set = nullptr;
  GpuRates const* gpu = nullptr;
  Batch batch;  ///< sequences = 0: each implementation has its largest
  std::vector<ClusterRow> rows;

  [[nodiscard]] char const* regime() const {
    return batch.recompute ? "R2" : batch.sequences == 0 ? "R1" : "R0";
  }
  [[nodiscard]] double per_day(ClusterRow const& row) const {
    return row.tokens_per_s() * cluster.ranks() * 86400;
  }
};

Json cluster_plan_json(ClusterPlan const& plan);
std::string cluster_plan_text(ClusterPlan const& plan);

/// One line for a first row that does not fit: what it needs, what there is, and the largest batch or the remedy.
std::string too_large(ClusterPlan const& plan);

}  // namespace tessera::cli

// SPDX-License-Identifier: Apache-2.0
// `tessera plan --cluster HOSTSxGPUS`: time, tokens/s and memory of training a whole model.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cli/cluster.hpp"
#include "cli/commands.hpp"
#include "huggingface/model.hpp"
#include "tessera/shape.hpp"

namespace tessera::cli {

/// The group of the flags below.
inline constexpr char kClusterGroup[] = "Cluster";

class ClusterFlags {
 public:
  /// Declares the flags on `command`, which must outlive neither this object nor the parse.
  void add_to(CLI::App& command);

  [[nodiscard]] static bool given(CLI::App const& command);

  /// Throws CommandError where a flag of --cluster was given without it.
  void refuse_without_cluster(CLI::App const& command) const;

  /// Prints the plan of the model of config.json or, without one, of `shape` and the flags. kCheckFailed where the
  /// batch does not fit. Throws CommandError for values that are malformed, missing or contradict each other.
  int plan(std::optional<huggingface::Model> const& config, MoeShape const& shape,
           CLI::App const& command, bool json) const;

 private:
  [[nodiscard]] Cluster cluster(std::int64_t experts) const;
  [[nodiscard]] TrainingModel model(std::optional<huggingface::Model> const& config,
                                    MoeShape const& shape, CLI::App const& command) const;
  [[nodiscard]] TrainingModel model_of_flags(MoeShape const& shape, CLI::App const& command) const;

  std::string cluster_, gpu_ = "h100", sharding_ = "fsdp", impl_, rates_;
  std::int64_t layers_ = 0, heads_ = 0, kv_heads_ = 0, head_size_ = 0, vocabulary_ = 0;
  std::int64_t sequences_ = 0, context_ = 4096;
  bool tied_ = false, recompute_ = false, keep_gathered_ = false, expert_parallel_ = false;
};

}  // namespace tessera::cli

// SPDX-License-Identifier: Apache-2.0
#include "cli/cluster_layout.hpp"

#include "tessera/expert_parallel.hpp"

namespace tessera::cli {
namespace {

double reach(std::int64_t experts, std::int64_t top_k, std::int64_t hosts) {
  double elsewhere = 1;
  for (std::int64_t i = 0; i < top_k; ++i) {
    elsewhere *=
        static_cast<double>(experts - experts / hosts - i) / static_cast<double>(experts - i);
  }
  return 1 - elsewhere;
}

}  // namespace

ExpertsLayout experts_layout(TrainingModel const& model, Cluster const& cluster, double tokens) {
  auto const hosts = static_cast<double>(cluster.hosts), gpus = static_cast<double>(cluster.gpus);
  ExpertsLayout layout{.tokens = tokens};
  layout.within_host_bytes = 8 * model.expert_parameters() / gpus * (hosts - 1) / hosts;
  layout.divisible = model.experts % (cluster.hosts * cluster.gpus) == 0 &&
                     model.top_k <= model.experts / cluster.hosts && cluster.gpus <= kMaxRanks;
  double const token = 4 * (hosts - 1) * reach(model.experts, model.top_k, cluster.hosts) * 2 *
                       static_cast<double>(model.hidden);
  layout.over_hosts_bytes = token * tokens;
  layout.equal_tokens = layout.within_host_bytes / token;
  return layout;
}

}  // namespace tessera::cli

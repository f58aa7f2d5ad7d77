// SPDX-License-Identifier: Apache-2.0
// Places the experts of a layer when there are several hosts: all of them within each host, their state sharded over
// the hosts, or spread over the GPUs of all hosts. What a GPU sends to other hosts decides, in a layer and step:
//
//   within a host   8 (3 d n E / g) (H-1)/H       weights gathered twice in bf16, gradients reduced in fp32
//   over hosts      4 (H-1) reach 2 d T           x and o, d_o and dx of a token, once for each host
//
// reach is the chance that a token has an expert on a given host, 1 - C(E-E/H, K) / C(E, K), for uniform routing.
#pragma once

#include "cli/cluster.hpp"

namespace tessera::cli {

/// One layer of a training step; what a GPU sends to other hosts.
struct ExpertsLayout {
  double tokens = 0;  ///< of a GPU
  double within_host_bytes = 0;
  double over_hosts_bytes = 0;
  double equal_tokens = 0;  ///< where both are the same
  bool divisible = false;   ///< experts can be spread over all GPUs: tessera.ExpertParallel's rules

  [[nodiscard]] bool over_hosts() const noexcept {
    return divisible && over_hosts_bytes < within_host_bytes;
  }
  [[nodiscard]] char const* advice() const noexcept {
    return over_hosts() ? "over-hosts" : "within-host";
  }
};

/// Lays out the experts of a cluster with several hosts. tokens: of a GPU.
ExpertsLayout experts_layout(TrainingModel const& model, Cluster const& cluster, double tokens);

}  // namespace tessera::cli

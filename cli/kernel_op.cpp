// SPDX-License-Identifier: Apache-2.0
#include "cli/kernel_op.hpp"

#include <algorithm>
#include <string_view>

namespace tessera::cli {

std::string op_of_kernel(std::string const& kernel) {
  constexpr std::string_view kUnnamed = "(anonymous namespace)::", kPlain = "_plain";
  std::string name = kernel;
  for (auto at = name.find(kUnnamed); at != std::string::npos; at = name.find(kUnnamed)) {
    name.erase(at, kUnnamed.size());
  }
  name.resize(std::min(name.find_first_of("<("), name.size()));
  std::size_t const last = name.find_last_of(": ");
  if (last != std::string::npos) name.erase(0, last + 1);
  // The first kernels of choose_tokens: those behind them count on from what they leave, so that a replay begins there.
  if (name == "route_and_rank" || name == "rank_pairs" || name == "mask_ranks") {
    return "choose_tokens";
  }
  for (std::string const op :
       {"router_logits", "router_dlogits", "router_dgrad", "router_wgrad", "route", "choose_tokens",
        "metadata", "up_projection_fwd", "down_projection_fwd", "down_projection_dgrad",
        "up_projection_dgrad", "down_projection_wgrad", "up_projection_wgrad", "aggregate"}) {
    if (name.starts_with(op)) return op;
  }
  if (name.ends_with(kPlain)) name.resize(name.size() - kPlain.size());
  return name;
}

}  // namespace tessera::cli

// SPDX-License-Identifier: Apache-2.0
// Routing from a JSON file: {"topk_ids": [[0, 3], [1, 2]], "topk_weights": [[0.5, 0.5], [0.9, 0.1]]}.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::cli {

/// Slots by token. Rows of unequal length make experts per token vary.
struct RoutingTable {
  std::int64_t tokens = 0;
  std::int64_t top_k = 1;  ///< length of a row, or of the longest one
  bool variable_experts = false;
  std::vector<std::int64_t> topk_ids;
  std::vector<float> topk_weights;
  std::vector<std::int64_t> token_offsets;  ///< [T+1]
};

/// Throws CommandError, one line, for anything but a well-formed table.
RoutingTable parse_routing(std::string_view text);
RoutingTable read_routing_file(std::string const& path);

}  // namespace tessera::cli

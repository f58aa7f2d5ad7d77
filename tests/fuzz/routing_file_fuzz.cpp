// SPDX-License-Identifier: Apache-2.0
// A routing file either parses into a consistent table or is refused with one line.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "cli/commands.hpp"
#include "cli/routing_file.hpp"

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  try {
    auto const table = tessera::cli::parse_routing({reinterpret_cast<char const*>(data), size});
    std::size_t const slots = table.topk_ids.size();
    bool const consistent =
        table.topk_weights.size() == slots && table.top_k >= 1 &&
        table.token_offsets.size() == static_cast<std::size_t>(table.tokens) + 1 &&
        table.token_offsets.back() == static_cast<std::int64_t>(slots) &&
        (table.variable_experts || static_cast<std::int64_t>(slots) == table.tokens * table.top_k);
    if (!consistent) std::abort();
  } catch (tessera::cli::CommandError const& error) {
    if (*error.what() == '\0') std::abort();
  }
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
// Routing tables, stable: row(j) = expert_offsets[id_j] + #{j' < j : id_j' = id_j}.
//
// Three passes: ids per expert in each chunk of slots; one exclusive scan over (expert, chunk), experts
// outermost; every chunk then hands out its rows in slot order. No atomics, so rows never move.
#include <algorithm>

#include "cpu/parallel/ops.hpp"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kChunkSlots = 4096;

struct SlotReader {
  SlotIds const& ids;
  std::int64_t slots_per_token;  // 0: a plain list
  [[nodiscard]] std::int64_t id(std::int64_t slot) const noexcept {
    std::int64_t const at =
        slots_per_token == 0 ? slot : slot / slots_per_token * ids.pitch + slot % slots_per_token;
    return ids.dtype == DType::int64 ? static_cast<std::int64_t const*>(ids.data)[at]
                                     : static_cast<std::int32_t const*>(ids.data)[at];
  }
};

/// Turns counts [chunk][expert] into the first row of each chunk's share and writes expert_offsets.
std::int64_t scan(std::int64_t experts, std::int64_t chunks, std::int32_t* counts,
                  std::int32_t* expert_offsets) noexcept {
  std::int32_t next = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    expert_offsets[e] = next;
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
      std::int32_t const count = counts[chunk * experts + e];
      counts[chunk * experts + e] = next;
      next += count;
    }
  }
  expert_offsets[experts] = next;
  return next;
}

}  // namespace

std::int64_t metadata_chunks(std::int64_t slots) noexcept {
  return (slots + kChunkSlots - 1) / kChunkSlots;
}

void metadata(MoeDesc const& desc, SlotIds const& ids, RoutingView const& routing,
              std::int32_t* chunk_counts, Threads const& threads) noexcept {
  std::int64_t const experts = desc.shape.experts, slots = desc.num_slots();
  std::int64_t const chunks = metadata_chunks(slots);
  SlotReader const reader{ids, desc.experts_vary() ? 0 : desc.shape.top_k};
  auto const valid = [&](std::int64_t id) { return id >= 0 && id < experts; };
  auto const chunk_end = [&](std::int64_t chunk) {
    return std::min(slots, (chunk + 1) * kChunkSlots);
  };

  threads.pool.run(chunks, [&](std::int64_t chunk, int) {
    std::int32_t* const counts = chunk_counts + chunk * experts;
    std::fill_n(counts, experts, 0);
    for (std::int64_t slot = chunk * kChunkSlots; slot < chunk_end(chunk); ++slot) {
      std::int64_t const id = reader.id(slot);
      if (valid(id)) ++counts[id];
    }
  });
  std::int64_t const rows = scan(experts, chunks, chunk_counts, routing.expert_offsets);
  threads.pool.run(chunks, [&](std::int64_t chunk, int) {
    std::int32_t* const next_row = chunk_counts + chunk * experts;
    std::int64_t token = 0;
    if (routing.token_offsets != nullptr) {  // the token that owns this chunk's first slot
      std::int32_t const* const offsets = routing.token_offsets;
      auto const first = static_cast<std::int32_t>(chunk * kChunkSlots);
      token = std::upper_bound(offsets, offsets + desc.shape.tokens + 1, first) - offsets - 1;
    }
    for (std::int64_t slot = chunk * kChunkSlots; slot < chunk_end(chunk); ++slot) {
      std::int64_t const id = reader.id(slot);
      if (!valid(id)) {
        routing.inverse_permutation[slot] = -1;
        continue;
      }
      if (routing.token_offsets != nullptr) {
        while (routing.token_offsets[token + 1] <= slot) ++token;
      } else {
        token = slot / desc.shape.top_k;
      }
      std::int32_t const row = next_row[id]++;
      routing.sort_permutation[row] = static_cast<std::int32_t>(slot);
      routing.gather_index[row] = static_cast<std::int32_t>(token);
      routing.inverse_permutation[slot] = row;
    }
  });
  std::fill(routing.sort_permutation + rows, routing.sort_permutation + slots, -1);
  std::fill(routing.gather_index + rows, routing.gather_index + slots, 0);
}

void grouped_metadata(MoeDesc const& desc, RoutingView const& routing) noexcept {
  std::int64_t const rows = routing.expert_offsets[desc.shape.experts];
  for (std::int64_t r = 0; r < desc.num_slots(); ++r) {
    auto const row = static_cast<std::int32_t>(r);
    routing.sort_permutation[r] = r < rows ? row : -1;
    routing.gather_index[r] = r < rows ? row : 0;
    routing.inverse_permutation[r] = r < rows ? row : -1;
  }
}

}  // namespace tessera::cpu

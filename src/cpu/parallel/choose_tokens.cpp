// SPDX-License-Identifier: Apache-2.0
// Token rounding and expert choice: expert e keeps its m_e pairs of highest rank.
//   token rounding  m_e by core/token_rounding.hpp; members of the top-k choice rank above others
//   expert choice   m_e = capacity, or ceil(T*K/E) of the T tokens that are eligible; no members: pairs rank by p
// Ranks stand as [E,T]; a pair that is not kept becomes 0. Then slots are emitted by token and expert. The order of
// pairs is total, so what is kept does not depend on how it is found.
#include <algorithm>
#include <functional>

#include "cpu/parallel/ops.hpp"

namespace tessera::cpu {
namespace {

/// Counts the pairs of one expert, and sums what nr_s compares; `chosen` has space for T.
core::ExpertPairs inspect(Router const& router, std::uint32_t const* ranks, std::int64_t tokens,
                          std::uint32_t* chosen) noexcept {
  core::ExpertPairs pairs;
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (core::is_member(ranks[t])) {
      ++pairs.members;
    } else if (ranks[t] != 0) {
      ++pairs.eligible;
    }
  }
  std::int64_t const rem =
      router.round == Rounding::nr_s ? core::beyond_tile(pairs.members, router.tile) : 0;
  if (rem == 0) return pairs;
  // Equal ranks have equal scores: which of them is summed does not matter.
  auto const sum_first = [&](bool members, std::int64_t count, auto before) {
    auto* const end = std::copy_if(ranks, ranks + tokens, chosen, [members](std::uint32_t rank) {
      return rank != 0 && core::is_member(rank) == members;
    });
    auto* const last = chosen + std::min<std::int64_t>(count, end - chosen);
    if (last != end) std::nth_element(chosen, last, end, before);
    std::uint64_t sum = 0;
    for (auto* rank = chosen; rank != last; ++rank) {
      sum += core::fixed_point_score(core::score_of_rank(*rank));
    }
    return sum;
  };
  pairs.weakest = sum_first(true, rem, std::less<>());
  pairs.best = sum_first(false, router.tile - rem, std::greater<>());
  return pairs;
}

/// Clears the ranks of all but the best `count` pairs; `order` has space for T.
void keep_best(std::int64_t count, std::int64_t members, std::uint32_t* ranks, std::int64_t tokens,
               std::uint64_t* order) noexcept {
  // Members rank first: only one of the two classes is cut.
  bool const cuts_members = count < members;
  std::int64_t const from_class = cuts_members ? count : count - members;
  std::uint64_t* end = order;
  for (std::int64_t t = 0; t < tokens; ++t) {
    bool const in_class = core::is_member(ranks[t]) == cuts_members;
    if (in_class && ranks[t] != 0) {
      *end++ = std::uint64_t{~ranks[t]} << 32 | static_cast<std::uint64_t>(t);
    } else if (cuts_members) {
      ranks[t] = 0;
    }
  }
  if (end - order <= from_class) return;
  std::nth_element(order, order + from_class, end);
  for (auto* lost = order + from_class; lost != end; ++lost) {
    ranks[static_cast<std::uint32_t>(*lost)] = 0;
  }
}

/// token_offsets from the kept pairs.
void count_slots(MoeDesc const& desc, std::uint32_t const* ranks, std::int32_t* token_offsets,
                 Threads const& threads) noexcept {
  std::int64_t const experts = desc.shape.experts, tokens = desc.shape.tokens;
  std::int64_t const blocks = (tokens + kRouterTokens - 1) / kRouterTokens;
  token_offsets[0] = 0;
  threads.pool.run(blocks, [&](std::int64_t block, int) {
    std::int64_t const first = block * kRouterTokens, end = std::min(tokens, first + kRouterTokens);
    std::fill(token_offsets + first + 1, token_offsets + end + 1, 0);
    for (std::int64_t e = 0; e < experts; ++e) {
      for (std::int64_t t = first; t < end; ++t) {
        token_offsets[t + 1] += ranks[e * tokens + t] != 0 ? 1 : 0;
      }
    }
  });
  for (std::int64_t t = 0; t < tokens; ++t) token_offsets[t + 1] += token_offsets[t];
}

void emit_slots(MoeDesc const& desc, std::uint32_t const* ranks, RoutingView const& routing,
                Threads const& threads) noexcept {
  std::int64_t const experts = desc.shape.experts, tokens = desc.shape.tokens;
  std::int64_t const blocks = (tokens + kRouterTokens - 1) / kRouterTokens;
  threads.pool.run(blocks, [&](std::int64_t block, int) {
    std::int64_t const first = block * kRouterTokens, end = std::min(tokens, first + kRouterTokens);
    std::int32_t next[kRouterTokens];
    std::copy(routing.token_offsets + first, routing.token_offsets + end, next);
    for (std::int64_t e = 0; e < experts; ++e) {
      for (std::int64_t t = first; t < end; ++t) {
        std::uint32_t const rank = ranks[e * tokens + t];
        if (rank == 0) continue;
        std::int32_t const slot = next[t - first]++;
        routing.topk_ids[slot] = static_cast<std::int32_t>(e);
        routing.scores[slot] = desc.router.route_scale * core::score_of_rank(rank);
      }
    }
  });
  std::int64_t const used = routing.token_offsets[tokens], slots = desc.num_slots();
  std::fill(routing.topk_ids + used, routing.topk_ids + slots, -1);
  std::fill(routing.scores + used, routing.scores + slots, 0.0f);
}

}  // namespace

std::int64_t choose_tokens_scratch(MoeDesc const& desc) noexcept { return 2 * desc.shape.tokens; }

void choose_tokens(MoeDesc const& desc, std::uint32_t* ranks, core::ExpertPairs* pairs,
                   RoutingView const& routing, Threads const& threads) noexcept {
  std::int64_t const experts = desc.shape.experts, tokens = desc.shape.tokens;
  threads.pool.run(experts, [&](std::int64_t e, int slot) {
    auto* const scratch = reinterpret_cast<std::uint32_t*>(threads.scratch(slot));
    pairs[e] = inspect(desc.router, ranks + e * tokens, tokens, scratch);
    pairs[e].takes =
        desc.experts_choose()
            ? core::expert_takes(desc.router.capacity, pairs[e].eligible, desc.shape.top_k, experts)
            : 0;
  });
  if (desc.rounds_tokens()) core::round_experts(desc.router, experts, pairs);
  threads.pool.run(experts, [&](std::int64_t e, int slot) {
    auto* const scratch = reinterpret_cast<std::uint64_t*>(threads.scratch(slot));
    keep_best(pairs[e].takes, pairs[e].members, ranks + e * tokens, tokens, scratch);
  });
  count_slots(desc, ranks, routing.token_offsets, threads);
  emit_slots(desc, ranks, routing, threads);
}

}  // namespace tessera::cpu

// SPDX-License-Identifier: Apache-2.0
// Configurations of the aggregate kernel. Bytes in flight hide the memory latency: 4.8 TB/s times about
// 1 us over 132 SMs is 36 KiB per SM, and one warp holds slots_in_flight * slices * 512 bytes.
// Measured: bench/results/archive/h200/2026-11-21-aggregate.json (before: -aggregate-16-slots.json) and
// 2026-11-22-aggregate-slices.json beside it.
#pragma once

namespace tessera::cuda {

struct AggregateConfig {
  int slots_in_flight;  // rows whose loads are issued before the first is used
  int slices = 1;       // of a row, side by side, by one warp: it reads the token's indices once
  int warps;            // per CTA
  int ctas_per_sm;      // at least; with warps it sets the register budget that the loads live in

  constexpr int threads() const { return 32 * warps; }
  bool operator==(AggregateConfig const&) const = default;
};

consteval bool valid(AggregateConfig c) {
  if (c.slots_in_flight < 1 || 32 % c.slots_in_flight) throw "slots_in_flight: divides 32";
  if (c.slices < 1 || c.slots_in_flight * c.slices > 16) {
    throw "slots_in_flight * slices: 4 registers each, at most 16";
  }
  if (c.warps < 1 || c.warps > 32) throw "warps: 1 to 32 per CTA";
  if (c.warps * c.ctas_per_sm > 64) throw "ctas_per_sm: an SM holds 64 warps";
  return true;
}

// One or two rows per token: three slices of them, as a warp holds its 3 KiB only while it waits for rows, and waits
// for their indices as long.
struct AggregateTwoSlots {
  static constexpr AggregateConfig config{
      .slots_in_flight = 2, .slices = 3, .warps = 8, .ctas_per_sm = 4};
};
// Few rows per token: more warps, each with fewer bytes in flight.
struct AggregateFourSlots {
  static constexpr AggregateConfig config{.slots_in_flight = 4, .warps = 8, .ctas_per_sm = 6};
};
// The usual top-k, 8 slots at a time: 32 warps of 4 KiB, 64 registers a thread.
struct AggregateEightSlots {
  static constexpr AggregateConfig config{.slots_in_flight = 8, .warps = 8, .ctas_per_sm = 4};
};

// Numbers of slots vary: 8 rows in a ring, which is full all the time, so that 28 warps of 72 registers have as many
// bytes in flight as 32 that wait for indices in between.
struct AggregateRing {
  static constexpr AggregateConfig config{.slots_in_flight = 8, .warps = 4, .ctas_per_sm = 7};
  // An item has about so many slots, of one token at least. A warp begins it with two loads one behind the other ahead
  // of its rows; but the more slots it has, the less evenly the warps end.
  // Measured: bench/results/archive/h200/2026-11-30-aggregate-varying.json
  static constexpr int item_slots(int top_k) { return top_k <= 8 ? 16 : 32; }
  // Items have fewer tokens rather than being fewer than this, twice the warps of 132 SMs.
  static constexpr int kManyItems = 8192;
};

/// Says that tokens whose numbers of slots vary about this one are added up in a ring. With one or two slots it gains
/// a hundredth, so that these have the kernel of a fixed number.
constexpr bool has_aggregate_ring(int top_k) {
  return top_k > AggregateTwoSlots::config.slots_in_flight;
}

/// Returns what `launch` returns for the configuration of this many slots per token.
template <class Launch>
auto with_aggregate_config(int top_k, Launch launch) {
  if (top_k <= AggregateTwoSlots::config.slots_in_flight) return launch(AggregateTwoSlots{});
  if (top_k <= AggregateFourSlots::config.slots_in_flight) return launch(AggregateFourSlots{});
  return launch(AggregateEightSlots{});
}

}  // namespace tessera::cuda

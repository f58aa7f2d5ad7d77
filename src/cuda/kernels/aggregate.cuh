// SPDX-License-Identifier: Apache-2.0
// aggregate: o_t = rnd([o_t +] sum over slots j of token t, ascending, of s_j * y[inverse_permutation[j]]).
// Shapes   y (R,d), o (T,d) bf16 or fp32; s (P) fp32 or absent (then 1); inverse_permutation (P);
//          slots of t are [t*K, (t+1)*K), or [token_offsets[t], token_offsets[t+1])
// Work     2*R*d FLOP (R*d without scores); bytes R*d + T*d (up to 2*T*d where it adds to o) elements and 8*P (4*P);
//          memory bound
// Schedule a warp per (token, `slices` slices of 32 lanes * 16 bytes), those of a token side by side
//   lanes      load 32 slots' rows and scores, one each, and hand them round by shuffle
//   per group  issue slots_in_flight row loads of 16 bytes per lane, then add them in slot order
//   ring       with token_offsets and K > 2, where o adds nothing: a warp per (some tokens side by side, a slice),
//              whose slots follow each other: each row that is added makes room for the load of the one
//              slots_in_flight after it, of whichever token; 32 slots' rows and scores are on their way while those
//              before them are used
//   beside     warps draw tokens
// Numerics fp32 fma in ascending slot order from 0 or o, one rounding; a sentinel (row < 0) changes no sum, whatever
//          its score; a token without rows gives +0; bitwise repeatable: yes
// Requires 16-byte aligned bases and rows, T * warps of a token < 2^31; offsets are 64-bit, R*d may exceed 2^31; with
//          token_offsets P + 64 < 2^31
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "../arch/dependent_launch.cuh"
#include "../arch/load_global.cuh"
#include "../arch/shared_address.cuh"
#include "../arch/warp.cuh"
#include "../host/aggregate.hpp"
#include "../host/launch.hpp"
#include "../tuning/aggregate.hpp"
#include "../warp/aggregate_vector.cuh"

namespace tessera::cuda {

template <class Element>
constexpr int kAggregateSlice = arch::kWarpThreads * AggregateVector<Element>::kElements;
// A warp has so many columns at a time.
template <class Config, class Element>
constexpr int kAggregateColumns = Config::config.slices * kAggregateSlice<Element>;

// Adds one group of slots, held by lanes [first, first + slots_in_flight), to this lane's sums.
template <class Config, class Element>
__device__ __forceinline__ void add_group(
    float (&sum)[Config::config.slices][AggregateVector<Element>::kElements],
    AggregateArguments const& p, int lane_row, float lane_score, int first, int64_t column) {
  constexpr int kSlots = Config::config.slots_in_flight, kSlices = Config::config.slices;
  int rows[kSlots];
  uint4 values[kSlots][kSlices];
  TESSERA_UNROLL
  for (int i = 0; i < kSlots; ++i) {
    rows[i] = __shfl_sync(arch::kAllLanes, lane_row, first + i);
    auto const* gmem_row = static_cast<Element const*>(p.gmem_y) + int64_t{rows[i]} * p.hidden;
    TESSERA_UNROLL
    for (int s = 0; s < kSlices; ++s) {
      int64_t const c = column + s * kAggregateSlice<Element>;
      values[i][s] = arch::load_streaming_16(gmem_row + c, rows[i] >= 0 && c < p.hidden);
    }
  }
  TESSERA_UNROLL
  for (int i = 0; i < kSlots; ++i) {
    float const score = __shfl_sync(arch::kAllLanes, lane_score, first + i);
    if (rows[i] >= 0) {
      TESSERA_UNROLL
      for (int s = 0; s < kSlices; ++s) AggregateVector<Element>::add(sum[s], values[i][s], score);
    }
  }
}

// A warp's part of a token.
template <class Config, class Element>
__device__ __forceinline__ void aggregate_part(AggregateArguments const& p, int64_t token,
                                               uint32_t part) {
  using Vector = AggregateVector<Element>;
  constexpr int kSlices = Config::config.slices;
  int const lane = arch::lane_idx();
  int64_t const column =
      int64_t{part} * kAggregateColumns<Config, Element> + lane * Vector::kElements;

  bool const varies = p.gmem_token_offsets != nullptr;
  int64_t const begin = varies ? p.gmem_token_offsets[token] : token * p.top_k;
  int64_t const end = varies ? p.gmem_token_offsets[token + 1] : begin + p.top_k;
  auto* const gmem_o = static_cast<Element*>(p.gmem_o) + token * p.o_pitch + column;
  bool const adds_to_o = p.adds_to_o && (p.gmem_adds == nullptr || p.gmem_adds[token] != 0);
  float sum[kSlices][Vector::kElements] = {};
  TESSERA_UNROLL
  for (int s = 0; s < kSlices; ++s) {
    int const c = s * kAggregateSlice<Element>;
    if (adds_to_o && column + c < p.hidden) {
      Vector::add(sum[s], *reinterpret_cast<uint4 const*>(gmem_o + c), 1.0f);
    }
  }
  for (int64_t slot = begin; slot < end; slot += arch::kWarpThreads) {
    int row = -1;
    float score = 1;
    if (slot + lane < end) {
      row = p.gmem_inverse_permutation[slot + lane];
      if (p.gmem_scores != nullptr) score = p.gmem_scores[slot + lane];
    }
    for (int first = 0; first < arch::kWarpThreads && slot + first < end;
         first += Config::config.slots_in_flight) {
      add_group<Config, Element>(sum, p, row, score, first, column);
    }
  }
  TESSERA_UNROLL
  for (int s = 0; s < kSlices; ++s) {
    int const c = s * kAggregateSlice<Element>;
    if (column + c < p.hidden) *reinterpret_cast<uint4*>(gmem_o + c) = Vector::round(sum[s]);
  }
}

// Warps that share a token.
template <class Config, class Element>
__host__ __device__ constexpr int64_t aggregate_parts(int64_t hidden) {
  constexpr int kColumns = kAggregateColumns<Config, Element>;
  return (hidden + kColumns - 1) / kColumns;
}

// The ring serves fewer columns: 32 bits count the bytes of a row.
constexpr int64_t kAggregateMostColumns = int64_t{1} << 29;
// An item has no more tokens: lanes hold their offsets, the end, that none follows, and the end again.
constexpr int64_t kAggregateMostTokens = arch::kWarpThreads - 3;

// So many tokens side by side are an item of a warp, for each of their parts: so few that there are enough items.
template <class Config, class Element>
int aggregate_item_tokens(AggregateArguments const& p) {
  int64_t const most = Config::item_slots(p.top_k) / (p.top_k > 0 ? p.top_k : 1);
  int64_t const few = p.tokens * aggregate_parts<Config, Element>(p.hidden) / Config::kManyItems;
  int64_t const tokens = most < few ? most : few;
  return static_cast<int>(std::clamp<int64_t>(tokens, 1, kAggregateMostTokens));
}
template <class Config, class Element>
int64_t aggregate_items(AggregateArguments const& p, int item_tokens) {
  return (p.tokens + item_tokens - 1) / item_tokens * aggregate_parts<Config, Element>(p.hidden);
}

// A slot's row, negative where there is none, and score, of each lane.
struct AggregateSlot {
  int row;
  float score;
};
__device__ __forceinline__ AggregateSlot load_slot(AggregateArguments const& p, int slot, int end) {
  AggregateSlot loaded{-1, 1.0f};
  if (slot < end) {
    loaded.row = p.gmem_inverse_permutation[slot];
    if (p.gmem_scores != nullptr) loaded.score = p.gmem_scores[slot];
  }
  return loaded;
}

// A warp's item: some tokens side by side, none behind the last item. A row is loaded where the one slots_in_flight
// before it was just added.
template <class Config, class Element>
__device__ __forceinline__ void aggregate_in_ring(AggregateArguments const& p, int item_tokens,
                                                  uint32_t item) {
  using Vector = AggregateVector<Element>;
  constexpr int kSlots = Config::config.slots_in_flight, kLanes = arch::kWarpThreads;
  constexpr int kNoSlot = -1, kLastLane = kLanes - 1;
  static_assert(Config::config.slices == 1, "a ring of rows");
  int const lane = arch::lane_idx();
  auto const of_lane = [](auto value, int from) {
    return __shfl_sync(arch::kAllLanes, value, from);
  };
  auto const parts = static_cast<uint32_t>(aggregate_parts<Config, Element>(p.hidden));
  uint32_t const group = item / parts;
  int64_t const first = int64_t{group} * item_tokens;
  if (first >= p.tokens) return;
  int const tokens = static_cast<int>(min(p.tokens - first, int64_t{item_tokens}));
  int const column = static_cast<int>(item - group * parts) * kAggregateColumns<Config, Element> +
                     lane * Vector::kElements;
  int const hidden = static_cast<int>(p.hidden);
  bool const wanted = column < hidden;
  // Lane i has where the slots of the item's token i begin. The lane behind the last token and the last lane of all
  // have where they end, and lanes between these two have kNoSlot.
  int const place_of_lane = lane == kLastLane ? tokens : lane;
  int const offset =
      place_of_lane <= tokens ? p.gmem_token_offsets[first + place_of_lane] : kNoSlot;
  int const begin = of_lane(offset, 0), end = of_lane(offset, kLastLane);
  AggregateSlot ahead = load_slot(p, begin + lane, end);
  auto const* const gmem_y = static_cast<Element const*>(p.gmem_y) + column;
  uint4 ring[kSlots];
  auto const load_row = [&](uint4& value, int row) {
    uint64_t const bytes =
        uint64_t{static_cast<uint32_t>(row)} * (hidden * unsigned{sizeof(Element)});
    value =
        arch::load_streaming_16(reinterpret_cast<char const*>(gmem_y) + bytes, row >= 0 && wanted);
  };
  TESSERA_UNROLL
  for (int i = 0; i < kSlots; ++i) load_row(ring[i], of_lane(ahead.row, i));

  AggregateSlot slots;
  // A row that is not there was loaded as zeros: their product with -0 changes no sum.
  auto const take = [&](AggregateSlot const& loaded) {
    slots = {loaded.row, loaded.row < 0 ? -0.0f : loaded.score};
  };
  take(ahead);
  auto* gmem_o = static_cast<Element*>(p.gmem_o) + first * p.o_pitch + column;
  float sum[Vector::kElements] = {};
  int token = 0, token_end = of_lane(offset, 1);
  // Ends the tokens whose last slot is the one before `to`.
  auto const finish = [&](int to) {
    while (token_end == to) {
      if (wanted) *reinterpret_cast<uint4*>(gmem_o) = Vector::round(sum);
      gmem_o += p.o_pitch;
      token_end = of_lane(offset, ++token + 1);
      TESSERA_UNROLL
      for (float& value : sum) value = 0;
    }
  };
  finish(begin);
  for (int slot = begin; token_end != kNoSlot; slot += kSlots) {
    int const place = (slot - begin) & (kLanes - 1), from = (place + kSlots) & (kLanes - 1);
    float const scores = of_lane(slots.score, place + lane);
    int const rows = of_lane(from == 0 ? ahead.row : slots.row, from + lane);
    // A group ahead of their first use, of which any use of these registers would have to wait for them.
    if (from == kLanes - kSlots) ahead = load_slot(p, slot - place + kLanes + lane, end);
    TESSERA_UNROLL
    for (int i = 0; i < kSlots; ++i) {
      Vector::add(sum, ring[i], of_lane(scores, i));
      load_row(ring[i], of_lane(rows, i));
      finish(slot + i + 1);
    }
    if (from == 0) take(ahead);
  }
}

template <class Config, class Element>
__global__ void __launch_bounds__(Config::config.threads(), Config::config.ctas_per_sm)
    aggregate(__grid_constant__ AggregateArguments const p) {
  static_assert(valid(Config::config));
  arch::wait_for_previous_kernel();
  auto const parts = static_cast<uint32_t>(aggregate_parts<Config, Element>(p.hidden));
  uint32_t const item = blockIdx.x * Config::config.warps + arch::warp_idx();
  int64_t const token = item / parts;
  if (token < p.tokens) aggregate_part<Config, Element>(p, token, item % parts);
}

// The same in a ring, where numbers of slots vary.
template <class Config, class Element>
__global__ void __launch_bounds__(Config::config.threads(), Config::config.ctas_per_sm)
    aggregate_ring(__grid_constant__ AggregateArguments const p, int const item_tokens) {
  static_assert(valid(Config::config));
  arch::wait_for_previous_kernel();
  aggregate_in_ring<Config, Element>(p, item_tokens,
                                     blockIdx.x * Config::config.warps + arch::warp_idx());
}

// Beside the previous kernel of the stream, on the SMs that it leaves and then on all: as many CTAs as the device
// holds, whose warps draw tokens. Every warp draws once in vain, so that the last ticket is known; it leaves the
// counter as the next launch expects it.
template <class Config, class Element>
__global__ void __launch_bounds__(Config::config.threads(), Config::config.ctas_per_sm)
    aggregate_beside(__grid_constant__ AggregateBesideArguments const params) {
  AggregateArguments const& p = params.aggregate;
  arch::let_next_kernel_start();  // router_wgrad
  __threadfence();  // what was visible to the previous kernel is so here, also through L1
  auto const parts = static_cast<uint32_t>(aggregate_parts<Config, Element>(p.hidden));
  int64_t const last_ticket = p.tokens + int64_t{gridDim.x} * Config::config.warps - 1;
  auto const draw = [&] {
    return arch::lane_idx() == 0 ? atomicAdd(params.gmem_token_counter, 1u) : 0u;
  };
  uint32_t ticket = __shfl_sync(arch::kAllLanes, draw(), 0);
  while (ticket < p.tokens) {
    uint32_t const next = draw();
    for (uint32_t part = 0; part < parts; ++part) {
      aggregate_part<Config, Element>(p, ticket, part);
    }
    ticket = __shfl_sync(arch::kAllLanes, next, 0);
  }
  if (ticket == last_ticket && arch::lane_idx() == 0) *params.gmem_token_counter = 0;
  // Whoever comes next in the stream comes after both.
  if (blockIdx.x == gridDim.x - 1) arch::wait_for_previous_kernel();
}

template <class Config, class Element>
cudaError_t launch_aggregate_config(AggregateArguments const& args, cudaStream_t stream) {
  int64_t const parts = aggregate_parts<Config, Element>(args.hidden);
  if (args.tokens != 0 && parts > INT32_MAX / args.tokens) return cudaErrorInvalidValue;
  int64_t const ctas = (args.tokens * parts + Config::config.warps - 1) / Config::config.warps;
  if (ctas == 0) return cudaSuccess;
  return host::launch_early(aggregate<Config, Element>, true, static_cast<unsigned>(ctas),
                            Config::config.threads(), 0, stream, args);
}

template <class Config, class Element>
cudaError_t launch_aggregate_ring_config(AggregateArguments const& args, cudaStream_t stream) {
  if (args.adds_to_o) return cudaErrorInvalidValue;
  if (args.tokens == 0) return cudaSuccess;
  int const item_tokens = aggregate_item_tokens<Config, Element>(args);
  int64_t const items = aggregate_items<Config, Element>(args, item_tokens);
  if (items > INT32_MAX || args.hidden >= kAggregateMostColumns) return cudaErrorInvalidValue;
  int64_t const ctas = (items + Config::config.warps - 1) / Config::config.warps;
  return host::launch_early(aggregate_ring<Config, Element>, true, unsigned(ctas),
                            Config::config.threads(), 0, stream, args, item_tokens);
}

template <class Config, class Element>
cudaError_t launch_aggregate_beside_config(AggregateBesideArguments const& args, int sm_count,
                                           cudaStream_t stream) {
  if (args.aggregate.tokens == 0) return cudaSuccess;
  return host::launch_early(aggregate_beside<Config, Element>, true,
                            unsigned(sm_count * Config::config.ctas_per_sm),
                            Config::config.threads(), 0, stream, args);
}

// Rows and bases of 16 bytes.
template <class Element>
bool aggregate_serves(AggregateArguments const& args) {
  constexpr int64_t kElements = AggregateVector<Element>::kElements;
  auto const aligned = [](void const* gmem) {
    return reinterpret_cast<uintptr_t>(gmem) % kAggregateVectorBytes == 0;
  };
  return args.hidden % kElements == 0 && args.o_pitch % kElements == 0 && aligned(args.gmem_y) &&
         aligned(args.gmem_o);
}

template <class Element>
cudaError_t launch_aggregate(AggregateArguments const& args, cudaStream_t stream) {
  if (!aggregate_serves<Element>(args)) return cudaErrorInvalidValue;
  bool const varies = args.gmem_token_offsets != nullptr;
  if (varies && !args.adds_to_o && has_aggregate_ring(args.top_k) &&
      args.hidden < kAggregateMostColumns) {
    return launch_aggregate_ring_config<AggregateRing, Element>(args, stream);
  }
  return with_aggregate_config(args.top_k, [&]<class Config>(Config) {
    return launch_aggregate_config<Config, Element>(args, stream);
  });
}

template <class Element>
cudaError_t launch_aggregate_beside(AggregateBesideArguments const& args, int sm_count,
                                    cudaStream_t stream) {
  constexpr int64_t kMaxTokens = int64_t{1} << 31;  // tickets are 32-bit
  if (!aggregate_serves<Element>(args.aggregate) || args.aggregate.tokens > kMaxTokens) {
    return cudaErrorInvalidValue;
  }
  return with_aggregate_config(args.aggregate.top_k, [&]<class Config>(Config) {
    return launch_aggregate_beside_config<Config, Element>(args, sm_count, stream);
  });
}

}  // namespace tessera::cuda

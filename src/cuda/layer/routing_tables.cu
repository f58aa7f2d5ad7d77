// SPDX-License-Identifier: Apache-2.0
// Device values are never trusted: offsets are clamped so that later kernels stay inside their buffers, and the
// first that breaks a rule goes to the error word.
#include "routing_tables.hpp"

#include <algorithm>
#include "error_word.hpp"
#include "items.cuh"

namespace tessera::cuda {
namespace {

constexpr int kScanThreads = 1024;

__device__ int64_t value_at(Integers const& integers, int64_t i) {
  return integers.is_int64 ? static_cast<int64_t const*>(integers.gmem)[i]
                           : static_cast<int32_t const*>(integers.gmem)[i];
}

__device__ int64_t clamped(int64_t value, int64_t most) {
  return value < 0 ? 0 : value > most ? most : value;
}

__global__ void __launch_bounds__(kItemThreads) given_slots(GivenSlots const p) {
  int64_t const slot = item_idx();
  if (slot >= p.slots) return;
  bool const varies = p.gmem_token_offsets != nullptr;
  int64_t const token = varies ? 0 : slot / p.top_k;
  int64_t const choice = slot - token * p.top_k;
  int64_t const id = value_at(p.ids, token * p.ids_pitch + choice);
  p.gmem_ids[slot] = id >= 0 && id < p.experts ? static_cast<int32_t>(id) : -1;
  if (p.gmem_weights != nullptr) {
    p.gmem_scores[slot] = p.gmem_weights[token * p.weights_pitch + choice];
  }
}

// Both ends are what they must be, whatever the caller gives, so that every slot has an owner.
__global__ void __launch_bounds__(kItemThreads) given_token_offsets(GivenSlots const p) {
  int64_t const t = item_idx();
  if (t > p.tokens) return;
  int64_t const value = value_at(p.token_offsets, t);
  int64_t const least = t == 0 ? 0 : value_at(p.token_offsets, t - 1);
  bool const first = t == 0, last = t == p.tokens;
  if (value < least || value > p.slots || (first && value != 0) || (last && value != p.slots)) {
    *p.gmem_error = ErrorWord{BadValue::token_offsets, t, value}.packed();
  }
  int64_t const kept = last ? p.slots : first ? 0 : clamped(value, p.slots);
  p.gmem_token_offsets[t] = static_cast<int32_t>(kept);
}

// One CTA walks the experts, kScanThreads at a time. Given ends become a running maximum, counts a running sum, both
// clamped to [0,P]. Shared memory holds one step of the scan at a time.
__global__ void __launch_bounds__(kScanThreads) grouped_offsets(GroupedRows const p) {
  __shared__ int64_t smem_values[kScanThreads];
  __shared__ int smem_bad;  // the first expert whose end breaks a rule
  bool const sums = p.grouping == RowGrouping::counts;
  int const lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < p.cleared.count; i += kScanThreads) p.cleared.gmem[i] = 0;
  if (lane == 0) {
    smem_bad = INT_MAX;
    p.tables.expert_offsets[0] = 0;
  }
  __syncthreads();
  if (p.grouping == RowGrouping::offsets && lane == 0 && value_at(p.groups, 0) != 0) smem_bad = 0;
  int64_t const first_end = p.grouping == RowGrouping::offsets ? 1 : 0;
  int64_t carry = 0;
  for (int64_t base = 0; base < p.experts; base += kScanThreads) {
    int64_t const expert = base + lane;
    bool const inside = expert < p.experts;
    int64_t const given = inside ? value_at(p.groups, first_end + expert) : 0;
    smem_values[lane] = inside ? clamped(given, p.rows) : 0;
    __syncthreads();
    for (int step = 1; step < kScanThreads; step *= 2) {
      int64_t const other = lane >= step ? smem_values[lane - step] : 0;
      __syncthreads();
      int64_t const own = smem_values[lane];
      smem_values[lane] = sums ? own + other : max(own, other);
      __syncthreads();
    }
    int64_t const scanned = sums ? carry + smem_values[lane] : max(carry, smem_values[lane]);
    int64_t const end = min(scanned, p.rows);
    // An end is sound if clamping left it unchanged, a count if it is not negative and the sum stays within the rows.
    bool const sound = sums ? given >= 0 && given <= p.rows && scanned <= p.rows : given == end;
    if (inside && !sound) atomicMin(&smem_bad, static_cast<int>(expert + 1));
    if (inside) p.tables.expert_offsets[expert + 1] = static_cast<int32_t>(end);
    int64_t const total = smem_values[kScanThreads - 1];
    carry = min(sums ? carry + total : max(carry, total), p.rows);
    __syncthreads();
  }
  if (lane != 0 || smem_bad == INT_MAX) return;
  int64_t const at = smem_bad - (first_end == 1 ? 0 : 1);  // as the caller counts
  *p.gmem_error = ErrorWord{BadValue::expert_offsets, at, value_at(p.groups, at)}.packed();
}

__global__ void __launch_bounds__(kItemThreads) grouped_tables(GroupedRows const p) {
  int64_t const r = item_idx();
  if (r >= p.rows) return;
  bool const routed = r < p.tables.expert_offsets[p.experts];
  auto const row = static_cast<int32_t>(r);
  p.tables.sort_permutation[r] = routed ? row : -1;
  p.tables.gather_index[r] = routed ? row : 0;
  p.tables.inverse_permutation[r] = routed ? row : -1;
  p.tables.scores[r] = p.gmem_row_scores != nullptr ? p.gmem_row_scores[r] : 1.0f;
}

// A warp for each row: a row has at most a few KB, and most calls have no row to clear.
__global__ void __launch_bounds__(kItemThreads) zero_tail(ZeroTail const p) {
  int64_t const row = item_idx() / 32;
  if (row >= p.rows || row < *p.gmem_first) return;
  auto* const gmem_row = static_cast<uint16_t*>(p.gmem_rows) + row * (p.row_bytes / 2);
  for (int64_t i = threadIdx.x % 32; i < p.row_bytes / 2; i += 32) gmem_row[i] = 0;
}

struct ExpertCounts {
  int32_t const* gmem_expert_offsets;
  int64_t experts;
  int32_t* gmem_counts;
};
__global__ void __launch_bounds__(kItemThreads) expert_counts(ExpertCounts const p) {
  int64_t const e = item_idx();
  if (e < p.experts) {
    p.gmem_counts[e] = p.gmem_expert_offsets[e + 1] - p.gmem_expert_offsets[e];
  }
}

__device__ void store_integer(RouteOutputs const& p, void* gmem, int64_t at, int32_t value) {
  if (p.ids_out_are_int64) {
    static_cast<int64_t*>(gmem)[at] = value;
  } else {
    static_cast<int32_t*>(gmem)[at] = value;
  }
}

__global__ void __launch_bounds__(kItemThreads) route_outputs(RouteOutputs const p) {
  int64_t const i = item_idx();
  if (i < p.rows * p.columns) {
    int64_t const row = i / p.columns, column = i % p.columns;
    store_integer(p, p.gmem_ids_out, row * p.ids_pitch + column, p.gmem_ids[i]);
    p.gmem_weights_out[row * p.weights_pitch + column] = p.gmem_weights[i];
  }
  if (p.gmem_token_offsets_out != nullptr && i <= p.tokens) {
    store_integer(p, p.gmem_token_offsets_out, i, p.gmem_token_offsets[i]);
  }
}

}  // namespace

cudaError_t launch_given_slots(GivenSlots const& args, cudaStream_t stream) {
  cudaError_t const error = launch_for_items(given_slots, args.slots, args, stream);
  if (error != cudaSuccess || args.gmem_token_offsets == nullptr) return error;
  return launch_for_items(given_token_offsets, args.tokens + 1, args, stream);
}

cudaError_t launch_grouped_offsets(GroupedRows const& args, cudaStream_t stream) {
  grouped_offsets<<<1, kScanThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_grouped_rows(GroupedRows const& args, cudaStream_t stream) {
  cudaError_t const error = launch_grouped_offsets(args, stream);
  return error == cudaSuccess ? launch_for_items(grouped_tables, args.rows, args, stream) : error;
}

cudaError_t launch_zero_tail(ZeroTail const& args, cudaStream_t stream) {
  return launch_for_items(zero_tail, args.rows * 32, args, stream);
}

cudaError_t launch_expert_counts(int32_t const* gmem_expert_offsets, int64_t experts,
                                 int32_t* gmem_counts, cudaStream_t stream) {
  ExpertCounts const args{gmem_expert_offsets, experts, gmem_counts};
  return launch_for_items(expert_counts, experts, args, stream);
}

cudaError_t launch_route_outputs(RouteOutputs const& args, cudaStream_t stream) {
  int64_t const offsets = args.gmem_token_offsets_out != nullptr ? args.tokens + 1 : 0;
  return launch_for_items(route_outputs, std::max(args.rows * args.columns, offsets), args, stream);
}

}  // namespace tessera::cuda

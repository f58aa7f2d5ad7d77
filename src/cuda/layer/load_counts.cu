// SPDX-License-Identifier: Apache-2.0
// One CTA per call: E values are few. Sums of integers are exact in any order; that of fp32 counts has the CPU's.
#include "load_counts.hpp"

#include "cuda/host/token_mask.hpp"
#include "error_word.hpp"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;

// Sum over the CTA, for every thread. Each call has shared memory of its own, so that one barrier is enough.
template <class Value>
__device__ Value add_up(Value own, Value (&smem_sums)[kThreads / kLanes]) {
  for (int half = kLanes / 2; half > 0; half /= 2) own += __shfl_xor_sync(kWholeWarp, own, half);
  if (threadIdx.x % kLanes == 0) smem_sums[threadIdx.x / kLanes] = own;
  __syncthreads();
  Value all = 0;
  for (Value const sum : smem_sums) all += sum;
  return all;
}

// Returns what the error word holds of an fp32 count that breaks a rule: it has no place for fractions and NaN.
__device__ int64_t bad_real(double count) { return count > 0 ? INT64_MAX : -1; }

// Computes sum f of fp32 counts; every warp adds up all of them.
__device__ core::LoadSum checked_real_sum(core::LoadCounts const& counts, uint64_t* gmem_error) {
  static_assert(core::LoadCounts::kLanes == kLanes, "a lane of the sum per lane of a warp");
  double sum = counts.lane_sum(threadIdx.x % kLanes);
  for (int half = kLanes / 2; half > 0; half /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, half);
  bool bad = false;
  for (int64_t e = threadIdx.x; e < counts.experts; e += kThreads) {
    bad = bad || counts.is_bad_real(e);
  }
  if (__syncthreads_or(bad) == 0) return {0, sum};
  if (threadIdx.x == 0) {
    int64_t const first = counts.first_bad();
    *gmem_error = ErrorWord{BadValue::topk_counts, first, bad_real(counts.real_at(first))}.packed();
  }
  return {};
}

// Returns sum f to every thread of the CTA, or 0 where a count breaks a rule, which goes to the error word.
__device__ core::LoadSum checked_sum(core::LoadCounts const& counts, uint64_t* gmem_error) {
  if (counts.is_real()) return checked_real_sum(counts, gmem_error);
  // Halves of 32 bits: the sum of counts that break the rule must not wrap around.
  __shared__ uint64_t smem_low[kThreads / kLanes], smem_high[kThreads / kLanes];
  uint64_t low = 0, high = 0;
  bool negative = false;
  for (int64_t e = threadIdx.x; e < counts.experts; e += kThreads) {
    auto const count = static_cast<uint64_t>(counts.at(e));
    negative = negative || counts.at(e) < 0;
    low += count & 0xffffffffu;
    high += count >> 32;
  }
  low = add_up(low, smem_low);
  high = add_up(high, smem_high) + (low >> 32);
  uint64_t const sum = high << 32 | (low & 0xffffffffu);
  bool const too_large = high >> 32 != 0 || sum > uint64_t{core::LoadCounts::kMax};
  if (__syncthreads_or(negative || too_large) == 0) {
    return {static_cast<int64_t>(sum), static_cast<double>(sum)};
  }
  if (threadIdx.x == 0) {
    int64_t const bad = counts.first_bad();
    *gmem_error = ErrorWord{BadValue::topk_counts, bad, counts.at(bad)}.packed();
  }
  return {};
}

__global__ void __launch_bounds__(kThreads) balance_costs(BalanceCosts const p) {
  core::LoadSum const sum = checked_sum(p.counts, p.gmem_error);
  int64_t const scope = p.scope_tokens != 0 ? p.scope_tokens : *p.gmem_count;
  for (int64_t e = threadIdx.x; e < p.experts; e += kThreads) {
    p.gmem_cost[e] = core::balance_cost(p.balance, p.counts, e, sum, scope);
  }
  if (threadIdx.x == 0) p.gmem_cost[p.experts] = core::z_share(p.z, scope);
}

__device__ int64_t integer_at(void const* gmem, bool is_int64, int64_t i) {
  return is_int64 ? static_cast<int64_t const*>(gmem)[i] : static_cast<int32_t const*>(gmem)[i];
}

// Tokens of a sequence, within [0,T] whatever the offsets say.
struct Span {
  int64_t first, end;
};
__device__ Span span_of(SequenceCosts const& p, int64_t b) {
  auto const at = [&](int64_t i) {
    int64_t const value = integer_at(p.gmem_offsets, p.offsets_are_int64, i);
    return value < 0 ? 0 : value > p.tokens ? p.tokens : value;
  };
  int64_t const first = at(b), end = at(b + 1);
  return {first, end < first ? first : end};
}

// CTA (b, part) counts every gridDim.y-th group of tokens of sequence b. The order of integer sums does not matter.
__global__ void __launch_bounds__(kThreads) sequence_counts(SequenceCosts const p) {
  int64_t const b = blockIdx.x;
  int32_t* const gmem_counts = p.gmem_counts + b * (p.experts + 1);
  if (blockIdx.y == 0 && threadIdx.x == 0) {
    int64_t const begin = integer_at(p.gmem_offsets, p.offsets_are_int64, b);
    int64_t const end = integer_at(p.gmem_offsets, p.offsets_are_int64, b + 1);
    bool const last = b == p.sequences - 1;
    if (b == 0 && begin != 0) {
      *p.gmem_error = ErrorWord{BadValue::sequence_offsets, 0, begin}.packed();
    } else if (end < begin || end > p.tokens || (last && end != p.tokens)) {
      *p.gmem_error = ErrorWord{BadValue::sequence_offsets, b + 1, end}.packed();
    }
  }
  Span const span = span_of(p, b);
  int64_t const step = int64_t{gridDim.y} * kThreads;
  for (int64_t t = span.first + int64_t{blockIdx.y} * kThreads + threadIdx.x; t < span.end;
       t += step) {
    p.gmem_sequence_of[t] = static_cast<int32_t>(b);
    if (!is_real(p.gmem_token_mask, t)) continue;
    atomicAdd(gmem_counts + p.experts, 1);
    for (int64_t k = 0; k < p.top_k; ++k) {
      int64_t const id = integer_at(p.gmem_ids, p.ids_are_int64, t * p.ids_pitch + k);
      if (id >= 0 && id < p.experts) atomicAdd(gmem_counts + id, 1);
    }
  }
}

__global__ void __launch_bounds__(kThreads) sequence_costs(SequenceCosts const p) {
  __shared__ int64_t smem_sums[kThreads / kLanes], smem_used[kThreads / kLanes];
  int64_t const b = blockIdx.x;
  int32_t const* const gmem_counts = p.gmem_counts + b * (p.experts + 1);
  int64_t sum = 0, used = 0;
  for (int64_t e = threadIdx.x; e < p.experts; e += kThreads) sum += gmem_counts[e];
  for (int64_t other = threadIdx.x; other < p.sequences; other += kThreads) {
    used += p.gmem_counts[other * (p.experts + 1) + p.experts] != 0 ? 1 : 0;
  }
  sum = add_up(sum, smem_sums);
  used = add_up(used, smem_used);
  for (int64_t e = threadIdx.x; e < p.experts; e += kThreads) {
    p.gmem_cost[b * p.experts + e] = core::sequence_cost(p.balance, p.experts, gmem_counts[e], sum,
                                                         gmem_counts[p.experts], used);
  }
}

__global__ void __launch_bounds__(kThreads) selection_bias_update(SelectionBiasUpdate const p) {
  __shared__ int64_t smem_signs[kThreads / kLanes];
  core::LoadSum const sum = checked_sum(p.counts, p.gmem_error);
  if (sum.real == 0) return;
  int64_t const experts = p.counts.experts;
  int64_t signs = 0;
  for (int64_t e = threadIdx.x; e < experts; e += kThreads) {
    signs += core::sign_below_mean(p.counts, e, sum);
  }
  signs = add_up(signs, smem_signs);
  float const mean = p.subtract_mean ? core::mean_sign(signs, experts) : 0.0f;
  for (int64_t e = threadIdx.x; e < experts; e += kThreads) {
    auto const sign = static_cast<float>(core::sign_below_mean(p.counts, e, sum));
    p.gmem_bias[e] += p.rate * (sign - mean);
  }
}

}  // namespace

cudaError_t launch_balance_costs(BalanceCosts const& args, cudaStream_t stream) {
  balance_costs<<<1, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_sequence_costs(SequenceCosts const& args, cudaStream_t stream) {
  auto const bytes = [](int64_t ints) { return static_cast<size_t>(ints) * sizeof(int32_t); };
  cudaError_t error =
      cudaMemsetAsync(args.gmem_counts, 0, bytes(args.sequences * (args.experts + 1)), stream);
  if (error == cudaSuccess && args.tokens > 0) {
    error = cudaMemsetAsync(args.gmem_sequence_of, 0xff, bytes(args.tokens), stream);
  }
  if (error != cudaSuccess) return error;
  // About two CTAs an SM where there are few sequences, and none without a token of its own where they are even.
  constexpr int64_t kCtas = 264;
  int64_t const groups = (args.tokens / args.sequences + kThreads) / kThreads;
  int64_t const parts = kCtas / args.sequences < groups ? kCtas / args.sequences : groups;
  auto const sequences = static_cast<unsigned>(args.sequences);
  dim3 const grid(sequences, static_cast<unsigned>(parts > 1 ? parts : 1));
  sequence_counts<<<grid, kThreads, 0, stream>>>(args);
  sequence_costs<<<sequences, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_selection_bias_update(SelectionBiasUpdate const& args, cudaStream_t stream) {
  selection_bias_update<<<1, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace tessera::cuda

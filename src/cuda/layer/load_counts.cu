// SPDX-License-Identifier: Apache-2.0
// One CTA per call: E values are few. Sums of integers are exact in any order; that of fp32 counts has the CPU's.
#include "load_counts.hpp"

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

// What the error word keeps of an fp32 count that breaks a rule: it has no place for fractions and NaN.
__device__ int64_t bad_real(double count) { return count > 0 ? INT64_MAX : -1; }

// sum f of fp32 counts: every warp adds up all of them.
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

// sum f for every thread of the CTA; 0 where a count breaks a rule, of which the error word hears.
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
  bool const too_large = high >> 32 != 0 || sum > uint64_t{core::LoadCounts::kMost};
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
  for (int64_t e = threadIdx.x; e < p.experts; e += kThreads) {
    p.gmem_cost[e] = core::balance_cost(p.balance, p.counts, e, sum, p.scope_tokens);
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

cudaError_t launch_selection_bias_update(SelectionBiasUpdate const& args, cudaStream_t stream) {
  selection_bias_update<<<1, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace tessera::cuda

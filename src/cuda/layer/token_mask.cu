// SPDX-License-Identifier: Apache-2.0
// Small kernels around the mask of a call: they run in calls with a mask alone.
#include "cuda/host/token_mask.hpp"

#include "cuda/host/router_backward.hpp"
#include "items.cuh"

namespace tessera::cuda {
namespace {

constexpr int kScanThreads = 1024;

// One CTA: every thread counts the real tokens of a share, finds out how many come before, and lists its own.
__global__ void __launch_bounds__(kScanThreads) token_order(TokenOrder const p) {
  __shared__ int64_t smem_sums[kScanThreads];
  int const thread = static_cast<int>(threadIdx.x);
  int64_t const share = (p.tokens + kScanThreads - 1) / kScanThreads;
  int64_t const first = min(thread * share, p.tokens), end = min(first + share, p.tokens);
  int64_t own = 0;
  for (int64_t t = first; t < end; ++t) own += p.gmem_token_mask[t] != 0 ? 1 : 0;
  smem_sums[thread] = own;
  __syncthreads();
  for (int step = 1; step < kScanThreads; step *= 2) {
    int64_t const other = thread >= step ? smem_sums[thread - step] : 0;
    __syncthreads();
    smem_sums[thread] += other;
    __syncthreads();
  }
  int64_t const all = smem_sums[kScanThreads - 1];
  int64_t real = smem_sums[thread] - own;
  int64_t padding = all + first - real;
  for (int64_t t = first; t < end; ++t) {
    int64_t& place = p.gmem_token_mask[t] != 0 ? real : padding;
    p.gmem_order[place++] = static_cast<int32_t>(t);
  }
  if (thread == 0) *p.gmem_count = static_cast<int32_t>(all);
}

__global__ void __launch_bounds__(kItemThreads) mask_choice(MaskChoice const p) {
  int64_t const slot = item_idx();
  if (slot >= p.tokens * p.top_k || p.gmem_token_mask[slot / p.top_k] != 0) return;
  p.gmem_ids[slot] = -1;
  p.gmem_scores[slot] = 0;
  if (p.gmem_chosen_p != nullptr) p.gmem_chosen_p[slot] = 0;
}

// The chunks are those of so many tokens without padding; those behind the last one are empty.
__global__ void __launch_bounds__(kItemThreads) pack_dlogits(PackDlogits const p) {
  int64_t const i = item_idx(), count = *p.gmem_count;
  if (i <= router_wgrad_most_chunks(p.tokens, p.hidden, p.columns)) {
    int64_t const begin = i * router_wgrad_chunk(count, p.hidden, p.columns);
    p.gmem_chunk_offsets[i] = static_cast<int32_t>(min(begin, count));
  }
  int64_t const row = i / p.columns;
  if (row >= count) return;
  auto const* const gmem_from = static_cast<uint16_t const*>(p.gmem_dlogits);
  static_cast<uint16_t*>(p.gmem_packed)[i] =
      gmem_from[p.gmem_order[row] * int64_t{p.columns} + i % p.columns];
}

}  // namespace

cudaError_t launch_token_order(TokenOrder const& args, cudaStream_t stream) {
  token_order<<<1, kScanThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_mask_choice(MaskChoice const& args, cudaStream_t stream) {
  return launch_for_items(mask_choice, args.tokens * args.top_k, args, stream);
}

cudaError_t launch_pack_dlogits(PackDlogits const& args, cudaStream_t stream) {
  int64_t const offsets = router_wgrad_most_chunks(args.tokens, args.hidden, args.columns) + 1;
  int64_t const elements = args.tokens * args.columns;
  return launch_for_items(pack_dlogits, offsets > elements ? offsets : elements, args, stream);
}

}  // namespace tessera::cuda

// SPDX-License-Identifier: Apache-2.0
// metadata, one thread per expert: each walks all slots, first to count, then to hand out its rows.
#include <cuda_runtime.h>

#include "../host/metadata.hpp"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 64;

__device__ int64_t id_of(MetadataArguments const& p, int64_t slot) {
  return p.ids_are_int64 ? static_cast<int64_t const*>(p.gmem_ids)[slot]
                         : static_cast<int32_t const*>(p.gmem_ids)[slot];
}

// expert_offsets[e+1] = M_e; rows and slots start out as if nothing had a row.
__global__ void __launch_bounds__(kThreads)
    metadata_plain_count(__grid_constant__ MetadataArguments const p) {
  int64_t const thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  int64_t const threads = int64_t{gridDim.x} * kThreads;
  for (int64_t slot = thread; slot < p.slots; slot += threads) {
    p.gmem_sort_permutation[slot] = -1;
    p.gmem_gather_index[slot] = 0;
    p.gmem_inverse_permutation[slot] = -1;
  }
  for (int64_t i = thread; i < p.cleared.count; i += threads) p.cleared.gmem[i] = 0;
  if (thread >= p.experts) return;
  int32_t rows = 0;
  for (int64_t slot = 0; slot < p.slots; ++slot) rows += id_of(p, slot) == thread ? 1 : 0;
  p.gmem_expert_offsets[thread + 1] = rows;
}

__global__ void metadata_plain_scan(__grid_constant__ MetadataArguments const p) {
  p.gmem_expert_offsets[0] = 0;
  for (int e = 0; e < p.experts; ++e) p.gmem_expert_offsets[e + 1] += p.gmem_expert_offsets[e];
  for (int i = 0; i < p.unused.count; ++i) p.unused.gmem[i] = 0;
}

__global__ void __launch_bounds__(kThreads)
    metadata_plain_assign(__grid_constant__ MetadataArguments const p) {
  int64_t const expert = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (expert >= p.experts) return;
  int32_t row = p.gmem_expert_offsets[expert];
  int32_t token = 0;
  for (int64_t slot = 0; slot < p.slots; ++slot) {
    if (id_of(p, slot) != expert) continue;  // nor look for its token: there may be none
    if (p.gmem_token_offsets == nullptr) {
      token = static_cast<int32_t>(slot / p.top_k);
    } else {
      while (p.gmem_token_offsets[token + 1] <= slot) ++token;
    }
    p.gmem_inverse_permutation[slot] = row;
    p.gmem_sort_permutation[row] = static_cast<int32_t>(slot);
    p.gmem_gather_index[row] = token;
    ++row;
  }
}

}  // namespace

cudaError_t launch_metadata_plain(MetadataArguments const& args, cudaStream_t stream) {
  if (args.experts < 1) return cudaErrorInvalidValue;
  auto const ctas = static_cast<unsigned>((args.experts + kThreads - 1) / kThreads);
  metadata_plain_count<<<ctas, kThreads, 0, stream>>>(args);
  metadata_plain_scan<<<1, 1, 0, stream>>>(args);
  metadata_plain_assign<<<ctas, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace tessera::cuda

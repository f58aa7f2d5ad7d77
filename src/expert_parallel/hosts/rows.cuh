// SPDX-License-Identifier: Apache-2.0
// Kernels of rows.hpp.
//   choose_tokens  a CTA for each host: every thread counts a share of the tokens, finds out how many come before, and
//                  lists its own
//   pack_rows      a CTA for each row of the message
//   sum_partials   a thread for each element
#pragma once

#include <cuda_runtime.h>

#include <climits>

#include "cuda/arch/static_shared.cuh"
#include "expert_parallel/hosts/rows.hpp"

namespace tessera::expert_parallel::hosts {

constexpr int kChooseThreads = 512, kPackThreads = 128, kSumThreads = 256;

__global__ void __launch_bounds__(kChooseThreads) choose_tokens(ChooseTokens const p) {
  TESSERA_STATIC_SHARED(smem_sums, int64_t[kChooseThreads]);
  int const thread = static_cast<int>(threadIdx.x), host = static_cast<int>(blockIdx.x);
  int64_t const share = (p.tokens + kChooseThreads - 1) / kChooseThreads;
  int64_t const first = thread * share < p.tokens ? thread * share : p.tokens;
  int64_t const end = first + share < p.tokens ? first + share : p.tokens;
  int64_t own = 0;
  for (int64_t t = first; t < end; ++t) own += p.goes(t, host) ? 1 : 0;
  smem_sums[thread] = own;
  __syncthreads();
  for (int step = 1; step < kChooseThreads; step *= 2) {
    int64_t const other = thread >= step ? smem_sums[thread - step] : 0;
    __syncthreads();
    smem_sums[thread] += other;
    __syncthreads();
  }
  int64_t place = smem_sums[thread] - own;
  for (int64_t t = first; t < end; ++t) {
    bool const goes = p.goes(t, host);
    p.gmem_place[host * p.tokens + t] = goes ? static_cast<int32_t>(place) : -1;
    if (goes) p.gmem_token[host * p.tokens + place++] = static_cast<int32_t>(t);
  }
  if (thread == kChooseThreads - 1) p.gmem_counts[host] = smem_sums[thread];
}

__global__ void __launch_bounds__(kPackThreads) pack_rows(PackRows const p) {
  int64_t const row = blockIdx.x, token = p.token_of(row);
  if (p.gmem_rows != nullptr) {
    auto const* const gmem_x = static_cast<uint4 const*>(p.gmem_x);
    auto* const gmem_to = static_cast<uint4*>(p.gmem_rows) + row * p.words;
    for (int64_t i = threadIdx.x; i < p.words; i += kPackThreads) {
      gmem_to[i] = token < 0 ? uint4{} : gmem_x[token * p.words + i];
    }
  }
  for (int k = static_cast<int>(threadIdx.x); k < p.top_k; k += kPackThreads) {
    p.pack_choice(row, token, k);
  }
}

template <class Element>
__global__ void __launch_bounds__(kSumThreads) sum_partials(SumPartials const p) {
  int64_t const i = int64_t{blockIdx.x} * kSumThreads + threadIdx.x;
  if (i < p.tokens * p.columns) p.sum<Element>(i / p.columns, i % p.columns);
}

template <class Arguments>
cudaError_t launch(void (*kernel)(Arguments), int64_t ctas, int threads, Arguments const& args,
                   cudaStream_t stream) {
  if (ctas == 0) return cudaSuccess;
  if (ctas > INT_MAX) return cudaErrorInvalidValue;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args);
}

inline cudaError_t launch_choose(ChooseTokens const& args, cudaStream_t stream) {
  return launch(choose_tokens, args.hosts, kChooseThreads, args, stream);
}
inline cudaError_t launch_pack(PackRows const& args, cudaStream_t stream) {
  return launch(pack_rows, args.rows, kPackThreads, args, stream);
}
inline cudaError_t launch_sum(SumPartials const& args, cudaStream_t stream) {
  int64_t const ctas = (args.tokens * args.columns + kSumThreads - 1) / kSumThreads;
  return launch(args.fp32 ? sum_partials<float> : sum_partials<core::Bf16>, ctas, kSumThreads, args,
                stream);
}

}  // namespace tessera::expert_parallel::hosts

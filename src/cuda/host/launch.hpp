// SPDX-License-Identifier: Apache-2.0
// Launches: of a persistent kernel, as many clusters as the device holds at once, one CTA per SM; of any kernel that
// may start before the previous one of the stream ends.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "outside_capture.hpp"
#include "per_context.hpp"

namespace tessera::cuda::host {

struct PersistentShape {
  int threads;
  int cluster;
  int smem_bytes;
  bool starts_early = false;  // launch_early()
};

// Returns the shape of a GEMM kernel (gemm/sm90/roles.cuh) with config kGemm.
template <auto kGemm, class SharedStorage>
constexpr PersistentShape persistent_shape(bool starts_early = false) {
  return {kGemm.threads(), kGemm.cluster_m(), int(sizeof(SharedStorage)), starts_early};
}

inline cudaLaunchAttribute starts_early() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// `early`: CTAs start on SMs that the previous kernel has left, once it lets them (arch/dependent_launch.cuh).
template <typename... Params>
cudaError_t launch_early(void (*kernel)(Params...), bool early, unsigned ctas, int threads,
                         size_t smem_bytes, cudaStream_t stream,
                         std::type_identity_t<Params> const&... params) {
  cudaLaunchAttribute attribute = starts_early();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

inline cudaLaunchConfig_t launch_config(PersistentShape shape, int ctas, cudaStream_t stream,
                                        cudaLaunchAttribute (&attributes)[2]) {
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {unsigned(shape.cluster), 1, 1};
  attributes[1] = starts_early();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(ctas));
  config.blockDim = dim3(unsigned(shape.threads));
  config.dynamicSmemBytes = size_t(shape.smem_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = shape.starts_early ? 2 : 1;
  return config;
}

// The runtime is asked about a kernel once in a context, at its first launch; later launches look at a word.

// Opts in to the shared memory. A kernel always asks for the same bytes.
template <auto kKernel>
cudaError_t allow_shared_memory(int smem_bytes) {
  static PerContext allowed;
  uint64_t const context = current_context_id();
  if (allowed.get(context) != 0) return cudaSuccess;
  OutsideCapture const outside;
  cudaError_t const error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (error == cudaSuccess) allowed.set(context, 1);
  return error;
}

// Counts the clusters that the device holds at once, of a kernel that may have its shared memory. A kernel always has
// one shape.
template <auto kKernel>
cudaError_t resident_clusters(PersistentShape shape, int& clusters) {
  static PerContext known;
  uint64_t const context = current_context_id();
  clusters = known.get(context);
  if (clusters > 0) return cudaSuccess;
  OutsideCapture const outside;
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t const config = launch_config(shape, shape.cluster, nullptr, attributes);
  cudaError_t const error = cudaOccupancyMaxActiveClusters(&clusters, kKernel, &config);
  if (error == cudaSuccess) known.set(context, clusters);
  return error;
}

// At most `clusters` of them, and one per work tile. The kernel may have its shared memory.
template <typename Params>
cudaError_t launch_clusters(void (*kernel)(Params const), PersistentShape shape, int clusters,
                            int64_t most_tiles, Params const& params, cudaStream_t stream) {
  if (most_tiles == 0) return cudaSuccess;
  int const ctas = int(std::min<int64_t>(clusters, most_tiles)) * shape.cluster;
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t const config = launch_config(shape, ctas, stream, attributes);
  return cudaLaunchKernelEx(&config, kernel, params);
}

// No more CTAs than SMs.
template <auto kKernel, typename Params>
cudaError_t launch_persistent(PersistentShape shape, int64_t most_tiles, int sm_count,
                              Params const& params, cudaStream_t stream) {
  cudaError_t error = allow_shared_memory<kKernel>(shape.smem_bytes);
  if (error != cudaSuccess) return error;
  int clusters = sm_count / shape.cluster;
  if (shape.cluster > 1) {
    int resident = 0;
    error = resident_clusters<kKernel>(shape, resident);
    if (error != cudaSuccess) return error;
    clusters = std::min(clusters, resident);
  }
  return launch_clusters(kKernel, shape, clusters, most_tiles, params, stream);
}

}  // namespace tessera::cuda::host

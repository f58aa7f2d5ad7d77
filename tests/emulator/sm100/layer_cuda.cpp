// SPDX-License-Identifier: Apache-2.0
#include "tests/emulator/sm100/layer_cuda.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include "cuda/host/aggregate.hpp"
#include "cuda/host/metadata.hpp"
#include "cuda/layer/routing_tables.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::cuda {
namespace {

using emulator::Bits;

PlayedGpu played;

// What neutral kernels would wait for.
cudaError_t behind_the_stream() {
  std::string const wrong = finish();
  if (wrong.empty()) return cudaSuccess;
  std::fprintf(stderr, "%s\n", wrong.c_str());
  return cudaErrorLaunchFailure;
}

// Returns the first slot of a token and the one behind its last.
std::pair<std::int64_t, std::int64_t> slots_of(std::int64_t token, std::int32_t const* offsets,
                                               std::int64_t top_k) {
  if (offsets == nullptr) return {token * top_k, (token + 1) * top_k};
  return {offsets[token], offsets[token + 1]};
}

}  // namespace

void start_played_cuda(PlayedGpu const& gpu) { played = gpu; }
std::string finish() { return emulator::run({.seed = played.seed, .burst = 4}); }

// Neutral kernels.

cudaError_t launch_given_slots(GivenSlots const& args, cudaStream_t) {
  if (cudaError_t const error = behind_the_stream(); error != cudaSuccess) return error;
  for (std::int64_t slot = 0; slot < args.slots; ++slot) {
    args.gmem_ids[slot] = static_cast<std::int32_t const*>(args.ids.gmem)[slot];
    args.gmem_scores[slot] = args.gmem_weights[slot];
  }
  return cudaSuccess;
}

cudaError_t launch_metadata(MetadataArguments const& args, cudaStream_t) {
  if (cudaError_t const error = behind_the_stream(); error != cudaSuccess) return error;
  auto const* const ids = static_cast<std::int32_t const*>(args.gmem_ids);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(args.slots));
  for (std::int32_t token = 0; token < args.tokens; ++token) {
    auto const [first, end] = slots_of(token, args.gmem_token_offsets, args.top_k);
    std::fill(tokens.begin() + first, tokens.begin() + end, token);
  }
  std::int32_t row = 0;
  for (std::int64_t slot = 0; slot < args.slots; ++slot) {
    args.gmem_inverse_permutation[slot] = args.gmem_sort_permutation[slot] = -1;
    args.gmem_gather_index[slot] = 0;
  }
  for (std::int32_t expert = 0; expert < args.experts; ++expert) {
    args.gmem_expert_offsets[expert] = row;
    for (std::int32_t slot = 0; slot < args.slots; ++slot) {
      if (ids[slot] != expert) continue;
      args.gmem_sort_permutation[row] = slot;
      args.gmem_gather_index[row] = tokens[static_cast<std::size_t>(slot)];
      args.gmem_inverse_permutation[slot] = row++;
    }
  }
  args.gmem_expert_offsets[args.experts] = row;
  std::memset(args.cleared.gmem, 0,
              sizeof(std::int32_t) * static_cast<std::size_t>(args.cleared.count));
  return cudaSuccess;
}

template <>
cudaError_t launch_aggregate<__nv_bfloat16>(AggregateArguments const& args, cudaStream_t) {
  if (cudaError_t const error = behind_the_stream(); error != cudaSuccess) return error;
  auto const* const y = static_cast<Bits const*>(args.gmem_y);
  auto* const o = static_cast<Bits*>(args.gmem_o);
  for (std::int64_t token = 0; token < args.tokens; ++token) {
    for (std::int64_t c = 0; c < args.hidden; ++c) {
      Bits& out = o[token * args.o_pitch + c];
      bool const adds = args.adds_to_o && (args.gmem_adds == nullptr || args.gmem_adds[token] != 0);
      float sum = adds ? emulator::widen(out) : 0.0f;
      auto const [first, end] = slots_of(token, args.gmem_token_offsets, args.top_k);
      for (std::int64_t slot = first; slot < end; ++slot) {
        std::int64_t const row = args.gmem_inverse_permutation[slot];
        if (row < 0) continue;
        float const score = args.gmem_scores != nullptr ? args.gmem_scores[slot] : 1.0f;
        sum += score * emulator::widen(y[row * args.hidden + c]);
      }
      out = emulator::round(sum);
    }
  }
  return cudaSuccess;
}

}  // namespace tessera::cuda

cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t) {
  cudaError_t const error = tessera::cuda::behind_the_stream();
  std::memset(memory, value, bytes);
  return error;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "played");
  properties->major = tessera::cuda::played.major;
  properties->multiProcessorCount = tessera::cuda::played.sm_count;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  *memory = ::operator new(bytes);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  ::operator delete(memory);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
char const* cudaGetErrorString(cudaError_t) { return "an error of the played CUDA"; }

// SPDX-License-Identifier: Apache-2.0
// db[half][e](i) = sum over rows r of expert e of weight_r * left[gather_index[r], half*columns + i].
// A CTA sums kColumns columns of one expert in kThreads / kColumns lanes: lane l takes rows l, l + lanes, ..; then the
// sums of the lanes are added in order.
#include "../host/bias_gradient.hpp"
#include "dot.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 1024;

template <class Element, class Gradient, int kColumns>
__global__ void __launch_bounds__(kThreads) bias_gradient_plain(BiasGradientArguments const p) {
  constexpr int kLanes = kThreads / kColumns;
  __shared__ float smem_sums[kLanes][kColumns];
  int64_t const width = p.halves * p.columns, groups = (width + kColumns - 1) / kColumns;
  int64_t const expert = blockIdx.x / groups, group = blockIdx.x % groups;
  int const lane = int(threadIdx.x) / kColumns, place = int(threadIdx.x) % kColumns;
  int64_t const column = group * kColumns + place;
  bool const one = p.gmem_expert_offsets == nullptr;
  int64_t const first = one ? 0 : p.gmem_expert_offsets[expert];
  int64_t const end = one ? p.left.rows : p.gmem_expert_offsets[expert + 1];
  auto const* const gmem_left = static_cast<Element const*>(p.left.gmem);
  float sum = 0;
  if (column < width) {
    for (int64_t row = first + lane; row < end; row += kLanes) {
      int64_t const source = p.gmem_gather_index != nullptr ? p.gmem_gather_index[row] : row;
      float const weight =
          p.gmem_scores != nullptr ? p.gmem_scores[p.gmem_sort_permutation[row]] : 1.0f;
      sum = fmaf(weight, plain::widen(gmem_left[source * p.left.pitch + column]), sum);
    }
  }
  smem_sums[lane][place] = sum;
  __syncthreads();
  if (lane != 0 || column >= width || (p.accumulates && first == end)) return;
  WeightRows const& db = p.db[column / p.columns];
  if (db.gmem == nullptr) return;
  for (int other = 1; other < kLanes; ++other) sum += smem_sums[other][place];
  auto* const gmem_db = static_cast<Gradient*>(const_cast<void*>(db.gmem));
  plain::store_gradient(gmem_db[db.row_offset(expert, column % p.columns)], sum, p.accumulates);
}

// Few columns per CTA for the few columns of an fp32 matrix (dlogits): its rows then still feed many CTAs.
template <class Element, class Gradient>
cudaError_t launch_of(BiasGradientArguments const& args, cudaStream_t stream) {
  constexpr int kColumns = sizeof(Element) == 4 ? 8 : kThreads / kBiasGradientLanes;
  int64_t const groups = (args.halves * args.columns + kColumns - 1) / kColumns;
  int64_t const ctas = args.experts * groups;
  if (ctas == 0) return cudaSuccess;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  bias_gradient_plain<Element, Gradient, kColumns>
      <<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class Element>
cudaError_t launch_of(BiasGradientArguments const& args, cudaStream_t stream) {
  return args.is_fp32 ? launch_of<Element, float>(args, stream)
                      : launch_of<Element, __nv_bfloat16>(args, stream);
}

}  // namespace

cudaError_t launch_bias_gradient_plain(BiasGradientArguments const& args, cudaStream_t stream) {
  return args.left_is_fp32 ? launch_of<float>(args, stream)
                           : launch_of<__nv_bfloat16>(args, stream);
}

}  // namespace tessera::cuda

// SPDX-License-Identifier: Apache-2.0
#include "../kernels/aggregate.cuh"

namespace tessera::cuda {

template cudaError_t launch_aggregate<__nv_bfloat16>(AggregateArguments const&, cudaStream_t);
template cudaError_t launch_aggregate_beside<__nv_bfloat16>(AggregateBesideArguments const&, int,
                                                            cudaStream_t);

}  // namespace tessera::cuda

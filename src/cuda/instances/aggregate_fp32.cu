// SPDX-License-Identifier: Apache-2.0
#include "../kernels/aggregate.cuh"

namespace tessera::cuda {

template cudaError_t launch_aggregate<float>(AggregateArguments const&, cudaStream_t);

}  // namespace tessera::cuda

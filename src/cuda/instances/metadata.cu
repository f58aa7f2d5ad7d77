// SPDX-License-Identifier: Apache-2.0
#include "../kernels/metadata.cuh"

namespace tessera::cuda {

cudaError_t launch_metadata(MetadataArguments const& args, cudaStream_t stream) {
  return launch_metadata_config<MetadataConfig>(args, stream);
}

}  // namespace tessera::cuda

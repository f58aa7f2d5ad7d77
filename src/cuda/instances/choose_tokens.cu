// SPDX-License-Identifier: Apache-2.0
#include "../kernels/choose_tokens.cuh"

namespace tessera::cuda {

cudaError_t launch_choose_tokens(ChooseTokensArguments const& args, cudaStream_t stream) {
  return launch_choose_tokens_config<ChooseTokensConfig>(args, stream);
}

}  // namespace tessera::cuda

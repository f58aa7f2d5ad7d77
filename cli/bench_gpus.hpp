// SPDX-License-Identifier: Apache-2.0
// tessera bench --gpus N: one layer whose experts are spread over N GPUs, against the layer on one of them.
#pragma once

#include <cstdint>

#include "cli/bench_cuda.hpp"

namespace tessera::cli {

/// The results document; T of a job is that of each GPU. Throws CommandError for what the machine or this bench does
/// not serve.
Json bench_on_gpus(std::int32_t gpus, CudaBench const& bench);

}  // namespace tessera::cli

// SPDX-License-Identifier: Apache-2.0
// A kernel ahead stores rows late, so that kernels behind it which start early have to wait.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/arch/signal.cuh"
#include "tests/emulator/memory.hpp"

namespace tessera::emulator {

// Has a kernel of the stream write `to`, which stays as it is for many turns. Both outlive the run.
template <class T>
void write_late(cudaStream_t stream, Memory<T> const& from, Memory<T>& to) {
  launch_in(stream, 1, 1, 0, [&from, &to] {
    std::uint32_t const word = 0;
    for (int i = 0; i < 500; ++i) cuda::arch::load_acquire_gpu(&word);
    std::copy_n(from.get(), from.size(), to.get());
  });
}

}  // namespace tessera::emulator

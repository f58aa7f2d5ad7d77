// SPDX-License-Identifier: Apache-2.0
// A thread for each GPU, which gets its window: what programs over several GPUs begin with.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <tessera/tessera.hpp>
#include <thread>
#include <vector>

#include "support.hpp"

namespace examples {

constexpr int kSkipped = 77;

/// run(desc, window, all) on every rank, with desc_of(rank, ranks, tokens). The command line is [GPUS] [TOKENS], 2 and
/// 2048 if not given. Exit code: 0 ok, 1 failed or wrong, 2 bad usage, 77 where GPUs are missing or do not address each
/// other.
template <class DescOf, class Run>
int run_on_gpus(int argc, char** argv, DescOf desc_of, Run run) {
  int const ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  std::int64_t const tokens = argc > 2 ? std::atoll(argv[2]) : 2048;
  if (argc > 3 || ranks < 2 || ranks > tessera::kMaxRanks || tokens < 1) {
    std::fprintf(stderr, "usage: %s [GPUS, 2 to %d] [TOKENS, 1 or more]\n", argv[0],
                 tessera::kMaxRanks);
    return 2;
  }
  // Else CUDA loads a kernel when it is first launched, and may wait for a pass that runs, which waits for a rank that
  // loads, too.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  int present = 0;
  if (cudaGetDeviceCount(&present) != cudaSuccess) present = 0;
  if (present < ranks) {
    std::printf(
        "skipped: this machine has %d GPUs of %d; run on a host with that many Hopper GPUs\n",
        present, ranks);
    return kSkipped;
  }
  std::vector<tessera::Device> devices;
  for (int rank = 0; rank < ranks; ++rank) devices.push_back({tessera::DeviceKind::cuda, rank});
  auto const bytes = tessera::ExpertParallel::window_bytes(desc_of(0, ranks, tokens));
  using Windows = tessera::Expected<std::vector<tessera::PeerWindow>>;
  Windows windows =
      bytes.ok() ? tessera::PeerWindow::open_all(devices, bytes.value()) : Windows(bytes.status());
  if (!windows.ok()) {
    bool const lacks = windows.status().code() == tessera::StatusCode::environment;
    std::printf("%s: %s\n", lacks ? "skipped" : "no group",
                windows.status().text());  // with remedy
    return lacks ? kSkipped : 1;
  }
  Meeting all(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        run(desc_of(rank, ranks, tokens), windows.value()[static_cast<std::size_t>(rank)], all);
      } catch (std::exception const& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        all.leave();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return all.has_failed() ? 1 : 0;
}

}  // namespace examples

// SPDX-License-Identifier: Apache-2.0
// The ranks of an exchange as threads on peer memory, as threads on NCCL's windows or as processes on those. Threads on
// peer memory may share GPUs, each with its part of the SMs: the protocol of many ranks runs on few GPUs.
#pragma once

#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../../src/expert_parallel/transport/engine.hpp"
#include "chain_rank.cuh"
#include "meeting.hpp"

namespace tessera::bench {

struct RankOptions {
  int gpus = 2;
  int ranks_per_gpu = 1;
  bool processes = false, nccl = false;
  std::string nccl_path;  // empty: the library that is found

  int ranks() const { return gpus * ranks_per_gpu; }
  int device_of(int rank) const { return rank / ranks_per_gpu; }
  // "4 GPUs", "4 ranks on 1 GPU"
  std::string text() const {
    std::string const devices = std::to_string(gpus) + (gpus == 1 ? " GPU" : " GPUs");
    return ranks_per_gpu == 1 ? devices : std::to_string(ranks()) + " ranks on " + devices;
  }
};

// Before CUDA is first called. A kernel that waits for another rank holds up all that waits for its GPU: a kernel that
// is loaded at its first launch, and a stream that shares a queue with another one.
inline void prepare_shared_gpus() {
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
}

// The first `gpus` GPUs, each of which may then read and write the others. False, with a line: there are fewer.
inline bool connect_gpus(int gpus) {
  int present = 0;
  if (cudaGetDeviceCount(&present) != cudaSuccess) present = 0;
  if (present < gpus) {
    std::printf(
        "skipped: this machine has %d GPUs of %d; run on a host with that many Hopper GPUs\n",
        present, gpus);
    return false;
  }
  for (int rank = 0; rank < gpus; ++rank) {
    for (int peer = 0; peer < gpus; ++peer) device::enable_peer_access(rank, peer);
  }
  return true;
}

// Memory through which ranks exchange texts and wait for each other, be they threads or processes.
struct Talk : Meeting {
  int ranks;
  char text[kMaxRanks][Status::kTextBytes];
  void meet() { barrier(ranks); }
};

// The windows of all ranks: NCCL's, or of peers in one process.
class Windows {
 public:
  Windows(int rank, int64_t bytes, RankOptions const& options, Talk& talk,
          char* (&peers)[kMaxRanks]) {
    if (!options.nccl) {
      own_ = std::make_unique<DeviceBuffer<char>>(bytes);
      TESSERA_CUDA(cudaMemset(own_->get(), 0, size_t(bytes)));
      TESSERA_CUDA(cudaDeviceSynchronize());
      peers[rank] = own_->get();
      talk.meet();
      for (int r = 0; r < talk.ranks; ++r) address[size_t(r)] = peers[r];
      return;
    }
    expert_parallel::EngineConfig config = {
        .rank = rank,
        .ranks = talk.ranks,
        .device = rank,
        .nccl_path = options.nccl_path.empty() ? nullptr : options.nccl_path.c_str(),
        .nccl_nvls_enable = std::getenv("NCCL_NVLS_ENABLE")};
    if (rank == 0) {
      auto id = expert_parallel::make_unique_id(config);
      fail(id.status());
      talk.nccl_id = id.value();
    }
    talk.meet();
    config.id = talk.nccl_id;
    auto engine = expert_parallel::Engine::open(config);
    fail(engine.status());
    engine_ = std::move(engine).value();
    auto window = engine_->allocate(size_t(bytes));
    fail(window.status());
    window_ = window.value();
    for (int r = 0; r < talk.ranks; ++r) {
      address[size_t(r)] = static_cast<char*>(window_.address[size_t(r)]);
    }
  }
  // All ranks.
  void close() {
    if (engine_ == nullptr) return;
    fail(engine_->release(window_));
    fail(engine_->close());
  }

  WindowAddresses address = {};

 private:
  std::unique_ptr<DeviceBuffer<char>> own_;
  std::unique_ptr<expert_parallel::Engine> engine_;
  expert_parallel::Window window_;
};

// Body(rank, Rank&, Talk&, context) for every rank, on a thread or in a process of its own; what each
// of them returned.
template <typename Body>
std::vector<char> on_ranks(RankOptions const& options, ExchangeShape const& shape,
                           ActivationKind activation, Body body) {
  Talk* const memory = make_shared_memory<Talk>();
  if (memory == nullptr) fail(Status::error(StatusCode::out_of_memory, "no shared memory"));
  Talk& talk = *memory;
  talk.ranks = shape.ranks;
  char* peers[kMaxRanks] = {};
  auto const rank_main = [&](int rank) -> bool {
    int const device = options.device_of(rank);
    TESSERA_CUDA(cudaSetDevice(device));
    auto context = Context::create({.device = {DeviceKind::cuda, device}});
    fail(context.status());
    Windows windows(rank, expert_parallel::WindowLayout(shape).bytes, options, talk, peers);
    bool ok = false;
    {
      int sm_count = 0;
      TESSERA_CUDA(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device));
      Rank r(rank, device, sm_count / options.ranks_per_gpu, shape, activation, windows.address);
      talk.meet();
      ok = body(rank, r, talk, context.value());
      talk.meet();
    }
    windows.close();
    talk.meet();
    return ok;
  };
  std::vector<char> ok(size_t(shape.ranks), 0);
  std::vector<std::thread> threads;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    if (!options.processes) {
      if (rank > 0) threads.emplace_back([&, rank] { ok[size_t(rank)] = rank_main(rank); });
      continue;
    }
    std::fflush(stdout);
    pids.push_back(fork());
    if (pids.back() != 0) continue;
    die_with_parent();
    bool const right = rank_main(rank);
    std::fflush(stdout);
    _exit(right ? 0 : 1);
  }
  if (!options.processes) ok[0] = rank_main(0);
  for (std::thread& t : threads) t.join();
  for (size_t ended = 0; ended < pids.size(); ++ended) {
    int status = 0;
    pid_t const pid = waitpid(-1, &status, 0);
    bool const right = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    for (size_t rank = 0; rank < pids.size(); ++rank) {
      if (pids[rank] == pid) ok[rank] = right;
    }
    if (!right) talk.failed = 1;  // the others leave the next meeting
  }
  munmap(&talk, sizeof talk);
  return ok;
}
inline bool all_of(std::vector<char> const& ok) { return std::count(ok.begin(), ok.end(), 0) == 0; }

}  // namespace tessera::bench

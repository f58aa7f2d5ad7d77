// SPDX-License-Identifier: Apache-2.0
// Two ranks, each with a GPU, as threads of one process or as two processes, and two ways to a window of
// the other: plain peer access (CUDA IPC between processes), and the engine's, by NCCL.
#pragma once

#include <cuda_runtime.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>
#include <thread>

#include "../../src/expert_parallel/transport/engine.hpp"
#include "meeting.hpp"
#include "probe_kernels.cuh"

namespace tessera::bench {

enum class Launch { kThreads, kProcesses };
enum class Access { kPeer, kNccl };
struct Mode {
  Launch launch;
  Access access;
};
inline std::string name(Mode mode) {
  char const* const launch = mode.launch == Launch::kThreads ? "threads" : "processes";
  char const* const access = mode.access == Access::kPeer ? "peer" : "nccl";
  return std::string(launch) + "/" + access;
}

// What two ranks exchange, and the rows they report.
struct Shared : Meeting {
  char* address[2];
  cudaIpcMemHandle_t ipc[2];
  double value[2][8];
  std::atomic<int> row_bytes, line_bytes;
  char rows[1 << 20];   // JSON objects, each followed by a comma
  char lines[1 << 16];  // the table for people

  void barrier() { Meeting::barrier(2); }
  // One JSON object.
  __attribute__((format(printf, 2, 3))) void row(char const* format, ...) {
    va_list values;
    va_start(values, format);
    append(rows, sizeof rows, row_bytes, ",\n", format, values);
    va_end(values);
  }
  // One line of the table, or a part of it.
  __attribute__((format(printf, 2, 3))) void line(char const* format, ...) {
    va_list values;
    va_start(values, format);
    append(lines, sizeof lines, line_bytes, "", format, values);
    va_end(values);
  }

 private:
  static void append(char* text, size_t capacity, std::atomic<int>& used, char const* end,
                     char const* format, va_list values) {
    char line[1024];
    std::vsnprintf(line, sizeof line, format, values);
    std::string const all = std::string(line) + end;
    size_t const at = size_t(used.fetch_add(int(all.size())));
    if (at + all.size() < capacity) std::memcpy(text + at, all.data(), all.size());
  }
};

class Rank {
 public:
  Rank(int rank, Mode mode, Shared& shared, char const* nccl_path)
      : rank(rank), mode(mode), shared(shared) {
    cuda(cudaSetDevice(rank), "cudaSetDevice");
    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    cuda(cudaHostAlloc(&fault, sizeof *fault, cudaHostAllocMapped), "cudaHostAlloc");
    *fault = {};
    if (mode.access == Access::kPeer) {
      open_peer();
    } else {
      open_nccl(nccl_path);
    }
    cuda(cudaMalloc(&device_out, 1 << 16), "cudaMalloc");
    cuda(cudaMemsetAsync(local, 0, Window::kX, stream), "cudaMemset");
    fill_pattern<<<1024, 256, 0, stream>>>(reinterpret_cast<uint32_t*>(local + Window::kX),
                                           Window::kRegion / 4, rank);
    synchronize("fill_pattern");
    shared.barrier();
  }

  // Both ranks, at the end of a mode: the engine frees what it made. The rest ends with the process.
  void close() {
    if (engine_ == nullptr) return;
    nccl(engine_->release(window_));
    nccl(engine_->close());
  }

  [[nodiscard]] Ends ends() const { return {local, peer, rank, fault}; }

  void cuda(cudaError_t error, char const* what) const {
    if (error == cudaSuccess) return;
    fail("%s: %s", what, cudaGetErrorString(error));
  }
  void nccl(Status const& status) const {
    if (!status.ok()) fail("%s", status.text());
  }
  // Reports, and ends this process.
  [[noreturn]] __attribute__((format(printf, 2, 3))) void fail(char const* format, ...) const {
    char reason[512];
    va_list values;
    va_start(values, format);
    std::vsnprintf(reason, sizeof reason, format, values);
    va_end(values);
    for (char& c : reason) c = c == '"' || c == '\\' || c == '\n' ? ' ' : c;
    if (shared.failed.exchange(1) == 0) {
      shared.row(R"({"what": "failure", "mode": "%s", "rank": %d, "reason": "%s"})",
                 name(mode).c_str(), rank, reason);
      shared.line("%s rank %d: FAILED: %s\n", name(mode).c_str(), rank, reason);
    }
    _exit(1);
  }
  void synchronize(char const* what) const {
    cuda(cudaGetLastError(), what);
    cuda(cudaStreamSynchronize(stream), what);
    if (fault->site != 0) {
      fail("%s: waited 5 s at site %s, expected %u, saw %u", what, site_name(fault->site),
           fault->expected, fault->seen);
    }
  }
  // Words back to 0 on both sides, then both at once.
  void reset_words() const {
    cuda(cudaMemsetAsync(local, 0, Window::kPayload, stream), "cudaMemset");
    synchronize("reset");
    shared.barrier();
  }
  template <typename T>
  T read(int index) const {
    T value;
    cuda(cudaMemcpy(&value, static_cast<T const*>(device_out) + index, sizeof value,
                    cudaMemcpyDeviceToHost),
         "cudaMemcpy");
    return value;
  }
  // Both ranks' values, [rank].
  void exchange(int slot, double value) const { shared.value[rank][slot] = value; }

  int const rank;
  Mode const mode;
  Shared& shared;
  cudaStream_t stream = nullptr;
  Fault* fault = nullptr;
  char* local = nullptr;
  char* peer = nullptr;
  void* device_out = nullptr;  // 64 KB for results

 private:
  void open_peer() {
    int possible = 0;
    cuda(cudaDeviceCanAccessPeer(&possible, rank, 1 - rank), "cudaDeviceCanAccessPeer");
    if (possible == 0) fail("GPU %d has no peer access to GPU %d", rank, 1 - rank);
    cuda(cudaMalloc(&local, Window::kBytes), "cudaMalloc");
    shared.address[rank] = local;
    if (mode.launch == Launch::kProcesses) {
      cuda(cudaIpcGetMemHandle(&shared.ipc[rank], local), "cudaIpcGetMemHandle");
    }
    shared.barrier();
    if (mode.launch == Launch::kProcesses) {
      cuda(cudaIpcOpenMemHandle(reinterpret_cast<void**>(&peer), shared.ipc[1 - rank],
                                cudaIpcMemLazyEnablePeerAccess),
           "cudaIpcOpenMemHandle");
    } else {
      cuda(cudaDeviceEnablePeerAccess(1 - rank, 0), "cudaDeviceEnablePeerAccess");
      peer = shared.address[1 - rank];
    }
  }

  void open_nccl(char const* path) {
    expert_parallel::EngineConfig config = {.rank = rank,
                                            .ranks = 2,
                                            .device = rank,
                                            .nccl_path = path,
                                            .nccl_nvls_enable = std::getenv("NCCL_NVLS_ENABLE")};
    if (rank == 0) {
      auto id = expert_parallel::make_unique_id(config);
      nccl(id.status());
      shared.nccl_id = id.value();
    }
    shared.barrier();
    config.id = shared.nccl_id;
    auto engine = expert_parallel::Engine::open(config);
    nccl(engine.status());
    engine_ = std::move(engine).value();
    auto window = engine_->allocate(Window::kBytes);
    nccl(window.status());
    window_ = window.value();
    local = static_cast<char*>(window_.address[size_t(rank)]);
    peer = static_cast<char*>(window_.address[size_t(1 - rank)]);
    shared.line("%s rank %d: a window with the peer's address\n", name(mode).c_str(), rank);
  }

  std::unique_ptr<expert_parallel::Engine> engine_;
  expert_parallel::Window window_;
};

// Runs `body` for both ranks in processes of their own below this one. False if that took more than
// `seconds` (they are killed then) or a rank failed.
template <typename Body>
bool run_ranks(Mode mode, Shared& shared, int seconds, Body body) {
  pid_t pids[2] = {-1, -1};
  int const processes = mode.launch == Launch::kThreads ? 1 : 2;
  for (int p = 0; p < processes; ++p) {
    pids[p] = fork();
    if (pids[p] != 0) continue;
    die_with_parent();
    if (processes == 2) {
      body(p);
    } else {
      std::thread other([&] { body(1); });
      body(0);
      other.join();
    }
    _exit(0);
  }
  timespec begin = {};
  clock_gettime(CLOCK_MONOTONIC, &begin);
  bool ok = true;
  for (int running = processes; running > 0;) {
    for (int p = 0; p < processes; ++p) {
      int status = 0;
      if (pids[p] > 0 && waitpid(pids[p], &status, WNOHANG) == pids[p]) {
        ok = ok && WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (!ok) shared.failed = 1;
        pids[p] = -1;
        --running;
      }
    }
    timespec now = {};
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (now.tv_sec - begin.tv_sec > seconds) {
      for (pid_t pid : pids) {
        if (pid > 0) kill(pid, SIGKILL);
      }
      shared.row(R"({"what": "failure", "mode": "%s", "reason": "killed after %d s"})",
                 name(mode).c_str(), seconds);
      shared.line("%s: FAILED: killed after %d s\n", name(mode).c_str(), seconds);
      ok = false;
      seconds += 1000;  // the killed ones are still to be collected
    }
    usleep(2000);
  }
  return ok;
}

}  // namespace tessera::bench

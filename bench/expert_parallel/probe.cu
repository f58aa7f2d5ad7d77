// SPDX-License-Identifier: Apache-2.0
// What two GPUs of one host do for each other, asked before any kernel relies on it: rates of bulk copies
// in both directions, round trips of flags, stale data under each order, cooperative launches that wait
// for each other, threads and processes, the engine's windows, the memory of a dead process.
//
//   NCCL_NVLS_ENABLE=0 probe [--nccl PATH] [--out FILE] [--commit HASH]
//
// A short table goes to stdout, all rows to FILE. Needs NCCL_NVLS_ENABLE=0: windows must create no
// multicast object. Every part runs in processes of its own and is killed when it takes too long.
#include <algorithm>
#include <vector>

#include "peers.cuh"
#include "results.hpp"

namespace tessera::bench {
namespace {

constexpr int kRepeats = 5;
constexpr int64_t kBytesPerCta = 3 << 20;  // 396 MB over 132 CTAs: beyond L2, inside a region

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Traffic {
  char const* what;
  bool pulls, pushes, both_ways;
};
constexpr Traffic kTraffic[] = {{"pull", true, false, false},
                                {"push", false, true, false},
                                {"pull-both", true, false, true},
                                {"push-both", false, true, true},
                                {"pull+push-both", true, true, true}};

struct Rate {
  double total, pull,
      push;  // bytes per ns of one direction of one GPU: all, and each until its end
};

// GB/s of the slower GPU, median of repeats; the first run is checked, not timed.
Rate measure_move(Rank const& r, Traffic const& traffic, int message, int ctas, int ring) {
  bool const active = traffic.both_ways || r.rank == 0;
  int const batch = std::max(message, ring / 4) / message;
  int const messages = int(kBytesPerCta / message) / batch * batch;
  Move p = {.ends = r.ends(),
            .message = message,
            .ring = ring,
            .pulls = traffic.pulls ? messages : 0,
            .pushes = traffic.pushes ? messages : 0,
            .rendezvous = traffic.both_ways,
            .epoch = 1,
            .gmem_times = static_cast<uint64_t*>(r.device_out)};
  size_t const smem_bytes = size_t(2 * ring);
  std::vector<double> total, pull, push;
  for (int repeat = 0; repeat <= kRepeats; ++repeat) {
    if (repeat == 0) {
      r.cuda(cudaMemsetAsync(r.local + Window::kPool, 0, 2 * Window::kRegion, r.stream), "memset");
    }
    r.reset_words();
    if (active) {
      move<<<ctas, 64, smem_bytes, r.stream>>>(p);
      r.synchronize("move");
    }
    r.shared.barrier();
    if (repeat == 0) {
      Move left = p;
      left.pulls = active ? p.pulls : 0;
      left.pushes = traffic.both_ways || r.rank == 1 ? p.pushes : 0;
      auto* const wrong =
          reinterpret_cast<unsigned long long*>(static_cast<char*>(r.device_out) + (32 << 10));
      r.cuda(cudaMemsetAsync(wrong, 0, 8, r.stream), "memset");
      check_move<<<1024, 256, 0, r.stream>>>(left, ctas, wrong);
      r.synchronize("check_move");
      if (auto const count = r.read<unsigned long long>(4096)) {
        r.fail("%s of %d B by %d CTAs left %llu wrong words", traffic.what, message, ctas, count);
      }
      continue;
    }
    if (!active) continue;
    std::vector<uint64_t> times(3 * size_t(ctas));
    r.cuda(cudaMemcpy(times.data(), r.device_out, times.size() * 8, cudaMemcpyDeviceToHost),
           "times");
    uint64_t begin = ~uint64_t{0}, pulled = 0, pushed = 0;
    for (int c = 0; c < ctas; ++c) {
      begin = std::min(begin, times[3 * c]);
      pulled = std::max(pulled, times[3 * c + 1]);
      pushed = std::max(pushed, times[3 * c + 2]);
    }
    double const bytes = double(messages) * message * ctas;
    int const streams = int(traffic.pulls) + int(traffic.pushes);
    total.push_back(streams * bytes / double(std::max(pulled, pushed) - begin));
    pull.push_back(traffic.pulls ? bytes / double(pulled - begin) : 0);
    push.push_back(traffic.pushes ? bytes / double(pushed - begin) : 0);
  }
  r.shared.barrier();
  r.exchange(0, active ? median(total) : 1e30);
  r.exchange(1, active ? median(pull) : 1e30);
  r.exchange(2, active ? median(push) : 1e30);
  r.shared.barrier();
  auto const slower = [&](int slot) {
    return std::min(r.shared.value[0][slot], r.shared.value[1][slot]);
  };
  Rate const rate = {slower(0), slower(1), slower(2)};
  if (r.rank == 0) {
    r.shared.row(
        R"({"what": "%s", "mode": "%s", "message": %d, "ctas": %d, "ring": %d, "gbps": %.1f, )"
        R"("pull_gbps": %.1f, "push_gbps": %.1f, "checked": true})",
        traffic.what, name(r.mode).c_str(), message, ctas, ring, rate.total, rate.pull, rate.push);
  }
  r.shared.barrier();
  return rate;
}

void measure_rates(Rank const& r, int sms, bool full) {
  r.cuda(cudaFuncSetAttribute(move, cudaFuncAttributeMaxDynamicSharedMemorySize, 128 << 10),
         "cudaFuncSetAttribute");
  auto const print = [&](char const* format, auto... values) {
    if (r.rank == 0) r.shared.line(format, values...);
  };
  std::string const mode = name(r.mode);
  if (!full) {
    print("%s GB/s, 4 KB messages, %d CTAs, ring 16 KB:", mode.c_str(), sms);
    for (Traffic const& traffic : kTraffic) {
      print(" %s %.0f", traffic.what, measure_move(r, traffic, 4096, sms, 16 << 10).total);
    }
    print("\n");
    return;
  }
  for (Traffic const& traffic : kTraffic) {
    print("%s %s, GB/s, ring 16 KB; CTAs 4 8 16 32 64 %d\n", mode.c_str(), traffic.what, sms);
    for (int message : {512, 1024, 2048, 4096, 8192, 16384}) {
      print("%6d B", message);
      for (int ctas : {4, 8, 16, 32, 64, sms}) {
        print(" %6.1f", measure_move(r, traffic, message, ctas, 16 << 10).total);
      }
      print("\n");
    }
  }
  for (Traffic const& traffic : kTraffic) {
    if (!traffic.both_ways) continue;
    print("%s %s, GB/s; ring 4 8 32 64 KB\n", mode.c_str(), traffic.what);
    for (int message : {512, 2048, 4096}) {
      for (int ctas : {16, 64, sms}) {
        print("%6d B %3d CTAs", message, ctas);
        for (int ring : {4 << 10, 8 << 10, 32 << 10, 64 << 10}) {
          print(" %6.1f", measure_move(r, traffic, message, ctas, ring).total);
        }
        print("\n");
      }
    }
  }
}

// Launches `launch` on both ranks and returns rank 0's nanoseconds, word `index` of the results.
template <typename Launch>
double timed(Rank const& r, char const* what, Launch launch, int index = 0) {
  r.reset_words();
  launch(static_cast<uint64_t*>(r.device_out));
  r.synchronize(what);
  double const ns = double(r.read<uint64_t>(index));
  r.shared.barrier();
  return ns;
}

template <Order kOrder>
void measure_ping(Rank const& r, char const* order) {
  constexpr int kRounds = 5000;
  double const ns = timed(r, "ping", [&](uint64_t* out) {
    ping<kOrder><<<1, 1, 0, r.stream>>>(r.ends(), 1, kRounds, out);
  });
  if (r.rank != 0) return;
  r.shared.row(R"({"what": "flag-round-trip", "mode": "%s", "order": "%s", "us": %.3f})",
               name(r.mode).c_str(), order, ns / kRounds / 1e3);
  r.shared.line("%s flag round trip, %s: %.3f us\n", name(r.mode).c_str(), order,
                ns / kRounds / 1e3);
}

template <Payload kPayload>
void measure_payload(Rank const& r, char const* how, int bytes) {
  constexpr int kRounds = 4000;
  auto* const stale = reinterpret_cast<unsigned*>(static_cast<char*>(r.device_out) + 1024);
  r.cuda(cudaMemsetAsync(stale, 0, 4, r.stream), "memset");
  double const ns = timed(r, "ping_payload", [&](uint64_t* out) {
    ping_payload<kPayload><<<1, 32, 0, r.stream>>>(r.ends(), 1, kRounds, bytes, out, stale);
  });
  unsigned const count = r.read<unsigned>(256);
  r.shared.line("%s rank %d payload round trip, %s, %d B: %.3f us, %u stale words\n",
                name(r.mode).c_str(), r.rank, how, bytes, ns / kRounds / 1e3, count);
  r.shared.row(
      R"({"what": "payload-round-trip", "mode": "%s", "rank": %d, "how": "%s", "bytes": %d, )"
      R"("us": %.3f, "rounds": %d, "stale_words": %u})",
      name(r.mode).c_str(), r.rank, how, bytes, ns / kRounds / 1e3, kRounds, count);
  r.shared.barrier();
}

void measure_flags(Rank const& r) {
  measure_ping<Order::kAcquireSys>(r, "release/acquire sys");
  measure_ping<Order::kRelaxedSys>(r, "relaxed sys");
  double const ns = timed(r, "local_ping", [&](uint64_t* out) {
    local_ping<<<2, 1, 0, r.stream>>>(r.ends(), 1, 5000, out);
  });
  if (r.rank == 0) {
    r.shared.row(R"({"what": "flag-round-trip", "mode": "%s", "order": "release/acquire gpu, )"
                 R"(two CTAs of one GPU", "us": %.3f})",
                 name(r.mode).c_str(), ns / 5000 / 1e3);
    r.shared.line("%s flag round trip, gpu scope, one GPU: %.3f us\n", name(r.mode).c_str(),
                  ns / 5000 / 1e3);
  }
  for (int bytes : {512, 4096, 16384}) {
    measure_payload<Payload::kBulk>(r, "bulk", bytes);
    measure_payload<Payload::kBulkReadByBulk>(r, "bulk, read by bulk", bytes);
    measure_payload<Payload::kStores>(r, "stores", bytes);
    measure_payload<Payload::kBulkNoWait>(r, "bulk, announced before written (mutant)", bytes);
  }
}

// A cooperative launch on every GPU, each kernel waiting for the other: eagerly, and by graph replay.
void measure_cooperative(Rank const& r, int sms, bool graph) {
  constexpr int kRounds = 200;
  Ends ends = r.ends();
  uint32_t epoch = 1;
  int rounds = kRounds;
  auto* out = static_cast<uint64_t*>(r.device_out);
  void* arguments[] = {&ends, &epoch, &rounds, &out};
  auto const launch = [&] {
    r.cuda(cudaLaunchCooperativeKernel(reinterpret_cast<void const*>(barriers), dim3(sms), dim3(32),
                                       arguments, 0, r.stream),
           "cudaLaunchCooperativeKernel");
  };
  cudaGraphExec_t executable = nullptr;
  if (graph) {
    cudaGraph_t captured = nullptr;
    r.cuda(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeThreadLocal), "capture");
    launch();
    r.cuda(cudaStreamEndCapture(r.stream, &captured), "capture");
    r.cuda(cudaGraphInstantiate(&executable, captured, 0), "cudaGraphInstantiate");
    r.cuda(cudaGraphUpload(executable, r.stream), "cudaGraphUpload");
    r.synchronize("upload");
  }
  std::vector<double> first, each;
  for (int repeat = 0; repeat < 20; ++repeat) {
    first.push_back(timed(r, "barriers", [&](uint64_t*) {
      if (graph) {
        r.cuda(cudaGraphLaunch(executable, r.stream), "cudaGraphLaunch");
      } else {
        launch();
      }
    }));
    each.push_back(double(r.read<uint64_t>(1)) / (kRounds - 1));
  }
  r.shared.row(R"({"what": "cooperative", "mode": "%s", "rank": %d, "graph": %s, "ctas": %d, )"
               R"("barrier_us": %.3f, "first_wait_us": %.1f, "first_wait_max_us": %.1f})",
               name(r.mode).c_str(), r.rank, graph ? "true" : "false", sms, median(each) / 1e3,
               median(first) / 1e3, *std::max_element(first.begin(), first.end()) / 1e3);
  r.shared.line("%s rank %d cooperative%s: barrier %.2f us, first wait %.1f us\n",
                name(r.mode).c_str(), r.rank, graph ? " in a graph" : "", median(each) / 1e3,
                median(first) / 1e3);
  r.shared.barrier();
}

void run_mode(Mode mode, Shared& shared, char const* nccl_path, bool full) {
  run_ranks(mode, shared, 40, [&](int rank) {
    Rank r(rank, mode, shared, nccl_path);
    int sms = 0;
    r.cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, rank), "attribute");
    measure_cooperative(r, sms, false);
    measure_cooperative(r, sms, true);
    measure_flags(r);
    measure_rates(r, sms, full);
    shared.barrier();
    r.close();
    shared.barrier();
  });
}

// Rank 1 is killed while rank 0 reads its memory; rank 0 goes on, then starts another kernel.
void probe_dead_peer(Access access, Shared& shared, char const* nccl_path) {
  Mode const mode = {Launch::kProcesses, access};
  constexpr int kWords = 256;
  constexpr uint64_t kReadNs = 2'000'000'000;
  pid_t pids[2];
  shared.value[0][7] = 0;
  for (int rank = 0; rank < 2; ++rank) {
    pids[rank] = fork();
    if (pids[rank] != 0) continue;
    die_with_parent();
    Rank const r(rank, mode, shared, nccl_path);
    if (rank == 1) {
      for (;;) pause();
    }
    auto* const out = static_cast<uint64_t*>(r.device_out);
    uint64_t counts[2][2] = {};
    cudaError_t errors[2] = {};
    for (int part = 0; part < 2; ++part) {  // 0: the peer dies meanwhile; 1: it is dead
      r.cuda(cudaMemsetAsync(out, 0, 16, r.stream), "memset");
      read_peer<<<1, 32, 0, r.stream>>>(r.ends(), part == 0 ? kReadNs : kReadNs / 8, kWords, out);
      shared.value[0][7] = 1;  // the parent kills rank 1 a second later
      errors[part] = cudaStreamSynchronize(r.stream);
      if (errors[part] != cudaSuccess) {
        errors[1] = errors[part];
        break;
      }
      r.cuda(cudaMemcpy(counts[part], out, 16, cudaMemcpyDeviceToHost), "cudaMemcpy");
    }
    shared.row(
        R"({"what": "dead-peer", "mode": "%s", "while_dying": "%s", "rounds": %llu, "wrong": %llu, )"
        R"("afterwards": "%s", "rounds_afterwards": %llu, "wrong_afterwards": %llu})",
        name(mode).c_str(), cudaGetErrorName(errors[0]), (unsigned long long)counts[0][0],
        (unsigned long long)counts[0][1], cudaGetErrorName(errors[1]),
        (unsigned long long)counts[1][0], (unsigned long long)counts[1][1]);
    shared.line(
        "%s dead peer: %s while dying (%llu rounds, %llu wrong), %s afterwards (%llu, %llu)\n",
        name(mode).c_str(), cudaGetErrorName(errors[0]), (unsigned long long)counts[0][0],
        (unsigned long long)counts[0][1], cudaGetErrorName(errors[1]),
        (unsigned long long)counts[1][0], (unsigned long long)counts[1][1]);
    _exit(0);
  }
  auto const is_over = [&](int rank) { return waitpid(pids[rank], nullptr, WNOHANG) != 0; };
  for (int tick = 0; tick < 300 && shared.value[0][7] == 0 && shared.failed.load() == 0; ++tick) {
    usleep(100'000);
  }
  usleep(1'000'000);
  kill(pids[1], SIGKILL);
  waitpid(pids[1], nullptr, 0);
  for (int tick = 0; tick < 100; ++tick) {
    if (is_over(0)) return;
    usleep(100'000);
  }
  kill(pids[0], SIGKILL);
  waitpid(pids[0], nullptr, 0);
  shared.row(R"({"what": "dead-peer", "mode": "%s", "while_dying": "rank 0 hung, killed"})",
             name(mode).c_str());
  shared.line("%s dead peer: rank 0 hung\n", name(mode).c_str());
}

// In a process of its own, so that the parent never touches CUDA.
void report_devices(Shared& shared) {
  pid_t const pid = fork();
  if (pid == 0) {
    int count = 0;
    cudaGetDeviceCount(&count);
    for (int device = 0; device < count; ++device) {
      cudaDeviceProp properties = {};
      cudaGetDeviceProperties(&properties, device);
      int access = 0, atomics = 0;
      int const other = device == 0 ? 1 : 0;
      if (count > 1) {
        cudaDeviceCanAccessPeer(&access, device, other);
        cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device, other);
      }
      shared.row(R"({"what": "device", "index": %d, "name": "%s", "sms": %d, "memory_gb": %.1f, )"
                 R"("peer_access": %s, "peer_atomics": %s})",
                 device, properties.name, properties.multiProcessorCount,
                 double(properties.totalGlobalMem) / 1e9, access ? "true" : "false",
                 atomics ? "true" : "false");
      shared.line("GPU %d: %s, peer access %d, peer atomics %d\n", device, properties.name, access,
                  atomics);
    }
    _exit(0);
  }
  waitpid(pid, nullptr, 0);
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  char const* nccl_path = nullptr;
  char const* out = nullptr;
  std::string commit;
  for (int i = 1; i + 1 < argc; i += 2) {
    std::string const flag = argv[i];
    if (flag == "--nccl") {
      nccl_path = argv[i + 1];
    } else if (flag == "--out") {
      out = argv[i + 1];
    } else if (flag == "--commit") {
      commit = argv[i + 1];
    } else {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      return 2;
    }
  }
  char const* const nvls = std::getenv("NCCL_NVLS_ENABLE");
  if (nvls == nullptr || std::strcmp(nvls, "0") != 0) {
    std::fprintf(stderr, "NVLink multicast must stay off: set NCCL_NVLS_ENABLE=0\n");
    return 3;
  }
  // A kernel that is loaded at its first launch may synchronise a GPU that waits for the other one.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  Shared* const shared = make_shared_memory<Shared>();
  if (shared == nullptr) return 3;

  size_t printed = 0;
  auto const report = [&] {  // what is new
    std::printf("%s", shared->lines + printed);
    std::fflush(stdout);
    printed = std::strlen(shared->lines);
    shared->failed = shared->arrived = 0;
  };
  report_devices(*shared);
  report();
  for (Launch launch : {Launch::kThreads, Launch::kProcesses}) {
    for (Access access : {Access::kPeer, Access::kNccl}) {
      run_mode({launch, access}, *shared, nccl_path,
               launch == Launch::kThreads && access == Access::kPeer);
      report();
    }
  }
  for (Access access : {Access::kPeer, Access::kNccl}) {
    probe_dead_peer(access, *shared, nccl_path);
    report();
  }
  if (out == nullptr) return 0;
  std::string rows(shared->rows);
  if (rows.size() > 2) rows.resize(rows.size() - 2);  // the last comma
  return write_results(
      out,
      {.command = command_line("NCCL_NVLS_ENABLE=0 build-cuda/bin/bench_dist_probe", argc, argv),
       .commit = commit,
       .protocol = "rates: median of " + std::to_string(kRepeats) +
                   " after one checked run, each CTA moves 3 MB, rows scattered over 512 MB; "
                   "GB/s of one direction of the slower GPU",
       .gpus = 2,
       .rows = rows});
}

// SPDX-License-Identifier: Apache-2.0
// The experts over one or two GPUs: the unfused chain (dispatch, the GEMMs of one GPU, combine, aggregate)
// and the one kernel that does all of it. Every result is compared bit for bit with the single-GPU layer
// that has all experts, then passes and the chain's parts are timed.
//
//   chain [--gpus 1|2] [--nccl PATH] [--processes] [--only chain|fused]
//         [--check | --iters N [--config NAME] [--latency]] [--out FILE] [--commit HASH]
//
// --check: small awkward exchanges, several passes each, no timing; a rank that stalls, and as a process of its own
// one that is killed. --latency: FlashDMoE's layer over numbers of tokens and experts. Ranks are threads on peer
// memory, or on NCCL's windows (NCCL_NVLS_ENABLE=0), or processes on those. Exits with 77 where there are too few GPUs.
#include <sys/wait.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "../../src/dist/engine.hpp"
#include "chain_rank.cuh"
#include "meeting.hpp"
#include "results.hpp"

namespace tessera::bench {
namespace {

struct Options {
  int gpus = 2, iters = 30;
  bool check = false, processes = false, nccl = false, latency = false;
  std::string command, out, commit, only, config, nccl_path;

  bool selects(Way way) const {
    return only.empty() || only == (way == Way::chain ? "chain" : "fused");
  }
};

// What ranks tell each other, be they threads or processes.
struct Talk : Meeting {
  int ranks;
  char text[2][Status::kTextBytes];
  void meet() { barrier(ranks); }
};

// The windows of all ranks: NCCL's, or of peers in one process.
class Windows {
 public:
  Windows(int rank, int64_t bytes, Options const& options, Talk& talk, char* (&peers)[2]) {
    if (!options.nccl) {
      own_ = std::make_unique<DeviceBuffer<char>>(bytes);
      TESSERA_CUDA(cudaMemset(own_->get(), 0, size_t(bytes)));
      TESSERA_CUDA(cudaDeviceSynchronize());
      peers[rank] = own_->get();
      talk.meet();
      for (int r = 0; r < talk.ranks; ++r) address[size_t(r)] = peers[r];
      return;
    }
    dist::EngineConfig config = {
        .rank = rank,
        .ranks = talk.ranks,
        .device = rank,
        .nccl_path = options.nccl_path.empty() ? nullptr : options.nccl_path.c_str(),
        .nccl_nvls_enable = std::getenv("NCCL_NVLS_ENABLE")};
    if (rank == 0) {
      auto id = dist::make_unique_id(config);
      fail(id.status());
      talk.nccl_id = id.value();
    }
    talk.meet();
    config.id = talk.nccl_id;
    auto engine = dist::Engine::open(config);
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

  std::array<char*, 2> address = {};

 private:
  std::unique_ptr<DeviceBuffer<char>> own_;
  std::unique_ptr<dist::Engine> engine_;
  dist::Window window_;
};

// Body(rank, Rank&, Talk&, context) for every rank, on a thread or in a process of its own; what each
// of them returned.
template <typename Body>
std::vector<char> on_ranks(Options const& options, ExchangeShape const& shape,
                           ActivationKind activation, Body body) {
  Talk* const memory = make_shared_memory<Talk>();
  if (memory == nullptr) fail(Status::error(StatusCode::out_of_memory, "no shared memory"));
  Talk& talk = *memory;
  talk.ranks = shape.ranks;
  char* peers[2] = {};
  auto const rank_main = [&](int rank) -> bool {
    TESSERA_CUDA(cudaSetDevice(rank));
    auto context = Context::create({.device = {DeviceKind::cuda, rank}});
    fail(context.status());
    Windows windows(rank, dist::WindowLayout(shape).bytes, options, talk, peers);
    bool ok = false;
    {
      Rank r(rank, shape, activation, windows.address);
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
    if (!right) talk.failed = 1;  // the other one leaves the next meeting
  }
  munmap(&talk, sizeof talk);
  return ok;
}
bool all_of(std::vector<char> const& ok) { return std::count(ok.begin(), ok.end(), 0) == 0; }

// Passes of different patterns and sizes on the same buffers.
int check_small(Options const& options) {
  int failures = 0;
  struct Small {
    int tokens, hidden, intermediate, local_experts, top_k;
    ActivationKind activation;
  };
  using enum ActivationKind;
  for (Small const& c : {Small{40, 256, 128, 4, 2, swiglu},
                         {300, 512, 256, 8, 4, gelu},
                         {7, 64, 64, 1, 1, swiglu},
                         {1000, 1152, 192, 16, 8, geglu},
                         {129, 2048, 320, 3, 3, relu2}}) {
    ExchangeShape const shape = {.ranks = options.gpus,
                                 .max_tokens = c.tokens,
                                 .hidden = c.hidden,
                                 .intermediate = c.intermediate,
                                 .experts = c.local_experts * options.gpus,
                                 .max_top_k = c.top_k,
                                 .gated = Activation{.kind = c.activation}.gated()};
    auto const all = on_ranks(
        options, shape, c.activation, [&](int rank, Rank& r, Talk& talk, Context const& context) {
          bool all_right = true;
          for (uint64_t pass = 0; pass < 20; ++pass) {
            Pattern const pattern = kPatterns[pass / 2 % std::size(kPatterns)];
            Way const way =
                options.selects(Way::fused) && (pass % 2 == 1 || !options.selects(Way::chain))
                    ? Way::fused
                    : Way::chain;
            r.set_pass(draw(shape, pattern, rank, pass), pass);
            r.compute_wanted(context);
            r.poison();
            talk.meet();
            if (way == Way::chain) {
              r.launch_chain([](Part) {});
            } else {
              r.launch_fused(int(pass / 2) - 1);
            }
            TESSERA_CUDA(cudaDeviceSynchronize());
            r.check_fault();
            if (!r.is_right()) {
              all_right = false;
              std::printf("pass %d, pattern %d, %s\n", int(pass), int(pattern),
                          way == Way::chain ? "chain" : "fused");
            }
            talk.meet();
          }
          return all_right;
        });
    bool const ok = all_of(all);
    std::printf("%s (T %d, d %d, n %d, E %d, K %d), %d GPUs, 20 passes\n", ok ? "ok " : "BAD",
                c.tokens, c.hidden, c.intermediate, shape.experts, c.top_k, options.gpus);
    std::fflush(stdout);
    failures += ok ? 0 : 1;
  }
  return failures ? 1 : 0;
}

// Equal bits from every one of many passes, whatever comes first: every wait in the kernel is followed by a pause
// of random length, and ranks launch at random times.
int check_repeats(Options const& options) {
  constexpr int kRepeats = 1000;
  ExchangeShape const shape = {.ranks = options.gpus,
                               .max_tokens = 300,
                               .hidden = 512,
                               .intermediate = 256,
                               .experts = 8 * options.gpus,
                               .max_top_k = 4};
  bool const ok =
      all_of(on_ranks(options, shape, ActivationKind::swiglu,
                      [&](int rank, Rank& r, Talk& talk, Context const& context) {
                        r.set_pass(draw(shape, Pattern::random, rank, 1), 1);
                        r.compute_wanted(context);
                        r.set_jitter(20000);
                        std::mt19937_64 rng{uint64_t(rank)};
                        int wrong = 0;
                        for (int pass = 0; pass < kRepeats; ++pass) {
                          if (pass % 10 == 0) {
                            r.poison();
                            talk.meet();
                          }
                          std::this_thread::sleep_for(std::chrono::microseconds(rng() % 200));
                          r.launch_fused(pass % 5);
                          TESSERA_CUDA(cudaDeviceSynchronize());
                          r.check_fault();
                          wrong += r.is_right() ? 0 : 1;
                        }
                        talk.meet();
                        return wrong == 0;
                      }));
  std::printf("%s %d passes with random delays, %d GPUs\n", ok ? "ok " : "BAD", kRepeats,
              options.gpus);
  return ok ? 0 : 1;
}

// Rank 1 comes too late: rank 0 gives up after its limit and says for whom it waited; rank 1 then leaves at
// once, as rank 0 had given up.
int check_stalled(Options const& options) {
  if (options.gpus != 2) return 0;
  ExchangeShape const shape = {.ranks = 2,
                               .max_tokens = 64,
                               .hidden = 256,
                               .intermediate = 128,
                               .experts = 8,
                               .max_top_k = 2};
  bool const ok = all_of(on_ranks(
      options, shape, ActivationKind::swiglu, [&](int rank, Rank& r, Talk& talk, Context const&) {
        r.set_limit(0.2);
        r.set_pass(draw(shape, Pattern::random, rank, 1), 1);
        talk.meet();
        for (int turn = 0; turn < 2; ++turn) {
          if (turn == rank) {
            r.launch_fused(-1);
            TESSERA_CUDA(cudaDeviceSynchronize());
            std::snprintf(talk.text[rank], sizeof talk.text[rank], "%s", r.fault().text());
          }
          talk.meet();
        }
        if (rank != 0) return true;
        std::string const first = talk.text[0], second = talk.text[1];
        std::printf("  %s\n  %s\n", first.c_str(), second.c_str());
        return first.find("at publish in pass 1") != std::string::npos &&
               first.find("the word of rank 1 is 0, expected 1") != std::string::npos &&
               second.find("rank 0 had given up") != std::string::npos;
      }));
  std::printf("%s a stalled rank\n", ok ? "ok " : "BAD");
  return ok ? 0 : 1;
}

// The process of rank 1 is killed in the middle of its passes: rank 0 reports for whom it waited, and every pass that
// it ended before was right.
int check_killed(Options const& options) {
  if (options.gpus != 2 || !options.processes) return 0;
  constexpr double kLimit = 0.5;  // seconds, of a wait
  constexpr int kMostPasses = 200000;
  ExchangeShape const shape = {.ranks = 2,
                               .max_tokens = 300,
                               .hidden = 512,
                               .intermediate = 256,
                               .experts = 16,
                               .max_top_k = 4};
  auto const ok =
      on_ranks(options, shape, ActivationKind::swiglu,
               [&](int rank, Rank& r, Talk& talk, Context const& context) -> bool {
                 r.set_limit(kLimit);
                 r.set_pass(draw(shape, Pattern::random, rank, 1), 1);
                 r.compute_wanted(context);
                 talk.meet();
                 if (rank == 1) {
                   std::thread([] {
                     std::this_thread::sleep_for(std::chrono::milliseconds(200));
                     raise(SIGKILL);
                   }).detach();
                 }
                 int passes = 0, wrong = 0;
                 while (passes < kMostPasses) {
                   r.launch_fused(-1);
                   cudaError_t const error = cudaDeviceSynchronize();
                   if (!r.fault().ok() || error != cudaSuccess) break;
                   wrong += ++passes % 100 == 0 && !r.is_right() ? 1 : 0;
                 }
                 std::string const text = r.fault().text();
                 std::printf("  after %d passes, %d wrong: %s\n", passes, wrong, text.c_str());
                 std::fflush(stdout);
                 bool const reported = text.find("the word of rank 1 is") != std::string::npos;
                 _exit(reported && wrong == 0 && passes > 0 ? 0 : 1);  // nobody is left to meet
               });
  std::printf("%s a killed rank\n", ok[0] && !ok[1] ? "ok " : "BAD");
  return ok[0] && !ok[1] ? 0 : 1;
}

struct Named {
  std::string name;
  int tokens, hidden, intermediate, experts, top_k;
  ActivationKind activation = ActivationKind::swiglu;
};
// The named layers at 8192 tokens per GPU, or FlashDMoE's over tokens and experts.
std::vector<Named> configs_of(Options const& options) {
  std::vector<Named> all = {{"Qwen3-30B", 8192, 2048, 768, 128, 8},
                            {"FlashDMoE-swiglu", 8192, 2048, 2048, 32, 2},
                            {"FlashDMoE", 8192, 2048, 2048, 32, 2, ActivationKind::gelu},
                            {"DSv3", 8192, 7168, 2048, 256, 8}};
  if (options.latency) {
    all.clear();
    for (int tokens = 1024; tokens <= 16384; tokens *= 2) {
      for (int experts = 8; experts <= 128; experts *= 2) {
        all.push_back({"FlashDMoE-swiglu", tokens, 2048, 2048, experts, 2});
        all.push_back({"FlashDMoE", tokens, 2048, 2048, experts, 2, ActivationKind::gelu});
      }
    }
  }
  std::erase_if(
      all, [&](Named const& c) { return !options.config.empty() && options.config != c.name; });
  return all;
}

// What is timed: the chain's parts, the chain, the fused kernel at several lags.
struct Timed {
  char const* pass;
  char const* variant;
  Way way;
  int lag;
};
constexpr Timed kTimed[] = {{kPartNames[kDispatch], "unfused-chain", Way::chain, 0},
                            {kPartNames[kUp], "unfused-chain", Way::chain, 0},
                            {kPartNames[kDown], "unfused-chain", Way::chain, 0},
                            {kPartNames[kCombine], "unfused-chain", Way::chain, 0},
                            {kPartNames[kAggregate], "unfused-chain", Way::chain, 0},
                            {"forward-inference", "unfused-chain", Way::chain, 0},
                            {"forward-inference", "fused", Way::fused, -1},
                            {"forward-inference", "fused-lag-4", Way::fused, 4},
                            {"forward-inference", "fused-lag-8", Way::fused, 8},
                            {"forward-inference", "fused-lag-16", Way::fused, 16},
                            {"forward-inference", "fused-lag-32", Way::fused, 32}};
constexpr size_t kNumTimed = std::size(kTimed);

// One pass; ms[] of what it times, for this rank.
void time_pass(Rank& r, size_t first, std::vector<float>& ms, cudaEvent_t (&events)[kParts + 1]) {
  TESSERA_CUDA(cudaEventRecord(events[0]));
  if (kTimed[first].way == Way::fused) {
    r.launch_fused(kTimed[first].lag);
    TESSERA_CUDA(cudaEventRecord(events[1]));
  } else {
    r.launch_chain([&](Part part) { TESSERA_CUDA(cudaEventRecord(events[part + 1])); });
  }
  TESSERA_CUDA(cudaDeviceSynchronize());
  r.check_fault();
  if (kTimed[first].way == Way::fused) {
    TESSERA_CUDA(cudaEventElapsedTime(&ms[first], events[0], events[1]));
    return;
  }
  for (int part = 0; part < kParts; ++part) {
    TESSERA_CUDA(cudaEventElapsedTime(&ms[size_t(part)], events[part], events[part + 1]));
  }
  TESSERA_CUDA(cudaEventElapsedTime(&ms[kParts], events[0], events[kParts]));
}

// Medians are those of the slower GPU of each pass.
int measure(Options const& options) {
  std::string rows;
  int failures = 0;
  for (Named const& c : configs_of(options)) {
    ExchangeShape const shape = {.ranks = options.gpus,
                                 .max_tokens = c.tokens,
                                 .hidden = c.hidden,
                                 .intermediate = c.intermediate,
                                 .experts = c.experts,
                                 .max_top_k = c.top_k,
                                 .gated = Activation{.kind = c.activation}.gated()};
    std::vector<std::vector<float>> ms(kNumTimed);
    std::vector<std::vector<float>> latest(size_t(options.gpus), std::vector<float>(kNumTimed));
    std::vector<std::vector<char>> right(size_t(options.gpus), std::vector<char>(kNumTimed, 0));
    std::vector<size_t> passes;  // the first that each pass times
    if (options.selects(Way::chain)) passes.push_back(0);
    for (size_t v = kParts + 1; v < kNumTimed && options.selects(Way::fused); ++v) {
      passes.push_back(v);
      if (options.latency) break;
    }
    on_ranks(options, shape, c.activation,
             [&](int rank, Rank& r, Talk& talk, Context const& context) {
               r.set_pass(draw(shape, Pattern::random, rank, 1), 1);
               r.compute_wanted(context);
               cudaEvent_t events[kParts + 1];
               for (cudaEvent_t& event : events) TESSERA_CUDA(cudaEventCreate(&event));
               for (int i = -6; i < options.iters; ++i) {
                 for (size_t p = 0; p < passes.size(); ++p) {
                   size_t const first = passes[(p + size_t(i + 6)) % passes.size()];
                   size_t const end = first == 0 ? kParts + 1 : first + 1;
                   if (i == -6) r.poison();
                   talk.meet();
                   time_pass(r, first, latest[size_t(rank)], events);
                   if (i == -6) {
                     bool const ok = r.is_right();
                     for (size_t v = first; v < end; ++v) right[size_t(rank)][v] = ok;
                   }
                   talk.meet();
                   for (size_t v = first; rank == 0 && i >= 0 && v < end; ++v) {
                     float slower = 0;
                     for (auto const& l : latest) slower = std::max(slower, l[v]);
                     ms[v].push_back(slower);
                   }
                 }
               }
               r.set_pass(draw(shape, Pattern::nothing, rank, 1), 1);
               std::vector<float> head;
               for (int i = 0; i < 12; ++i) {
                 talk.meet();
                 time_pass(r, kParts + 1, latest[size_t(rank)], events);
                 if (i > 3) head.push_back(latest[size_t(rank)][kParts + 1]);
                 talk.meet();
               }
               std::printf("%s rank %d: a pass without rows %.4f ms\n", c.name.c_str(), rank,
                           quantiles(head).median);
               return true;
             });
    double const flops = (shape.gated ? 6.0 : 4.0) * c.tokens * c.top_k * c.intermediate * c.hidden;
    std::printf("%s, T %d per GPU, E %d, %d GPUs\n", c.name.c_str(), c.tokens, c.experts,
                options.gpus);
    for (size_t v = 0; v < kNumTimed; ++v) {
      if (ms[v].empty()) continue;
      bool checked = true;
      for (auto const& r : right) checked = checked && r[v] != 0;
      failures += checked ? 0 : 1;
      bool const whole = v >= kParts;
      Quantiles const q = quantiles(ms[v]);
      double const tflops = whole ? flops / q.median / 1e9 : 0.0;
      std::printf("  %-20s %-14s %8.4f ms %6.1f TFLOP/s per GPU%s\n", kTimed[v].pass,
                  kTimed[v].variant, q.median, tflops, checked ? "" : "  WRONG BITS");
      char text[512];
      std::snprintf(text, sizeof text,
                    "%s\n  {\"config\": \"%s\", \"shape\": [%d, %d, %d, %d, %d], \"dtype\": "
                    "\"bf16\", \"gpus\": %d, \"routing\": \"random\", \"router\": \"given\", "
                    "\"round\": \"none\", \"pass\": \"%s\", \"impl\": \"tessera\", \"variant\": "
                    "\"%s\", \"ms\": %.4f, \"ms_p10\": %.4f, \"ms_p90\": %.4f, \"tflops\": %.1f, "
                    "\"checked\": %s}",
                    rows.empty() ? "" : ",", c.name.c_str(), c.tokens, c.hidden, c.intermediate,
                    c.experts, c.top_k, options.gpus, kTimed[v].pass, kTimed[v].variant, q.median,
                    q.p10, q.p90, tflops, checked ? "true" : "false");
      rows += text;
    }
    std::fflush(stdout);
  }
  if (!options.out.empty()) {
    int const written = write_results(
        options.out, {.command = options.command,
                      .commit = options.commit,
                      .protocol = "median of " + std::to_string(options.iters) +
                                  " after 6 warm-ups, slower GPU of each part, eager launches, "
                                  "uniform random data",
                      .gpus = options.gpus,
                      .rows = rows});
    if (written != 0) return written;
  }
  return failures ? 1 : 0;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  tessera::bench::Options options;
  options.command = tessera::bench::command_line("build-cuda/bin/bench_dist_chain", argc, argv);
  for (int i = 1; i < argc; ++i) {
    std::string const flag = argv[i];
    bool const has_value = i + 1 < argc;
    if (flag == "--check") {
      options.check = true;
    } else if (flag == "--gpus" && has_value) {
      options.gpus = std::atoi(argv[++i]);
    } else if (flag == "--iters" && has_value) {
      options.iters = std::atoi(argv[++i]);
    } else if (flag == "--out" && has_value) {
      options.out = argv[++i];
    } else if (flag == "--latency") {
      options.latency = true;
      options.only = "fused";
    } else if (flag == "--config" && has_value) {
      options.config = argv[++i];
    } else if (flag == "--processes") {
      options.processes = options.nccl = true;
    } else if (flag == "--nccl" && has_value) {  // a path, or "" for the library that is found
      options.nccl = true;
      options.nccl_path = argv[++i];
    } else if (flag == "--only" && has_value) {
      options.only = argv[++i];
    } else if (flag == "--commit" && has_value) {
      options.commit = argv[++i];
    } else {
      std::fprintf(stderr, "unknown option %s\n", flag.c_str());
      return 2;
    }
  }
  if (options.gpus != 1 && options.gpus != 2) {
    std::fprintf(stderr, "--gpus %d: 1 or 2\n", options.gpus);
    return 2;
  }
  if (options.processes && !options.check) {
    std::fprintf(stderr, "--processes: with --check only\n");
    return 2;
  }
  if (!options.processes) {  // forked ranks must find CUDA untouched
    int present = 0;
    if (cudaGetDeviceCount(&present) != cudaSuccess) present = 0;
    if (present < options.gpus) {
      std::printf("skipped: this machine has %d GPUs of %d\n", present, options.gpus);
      return 77;
    }
    for (int rank = 0; rank < options.gpus; ++rank) {
      TESSERA_CUDA(cudaSetDevice(rank));
      if (options.gpus == 2) TESSERA_CUDA(cudaDeviceEnablePeerAccess(1 - rank, 0));
    }
  }
  if (!options.check) return tessera::bench::measure(options);
  int const wrong = tessera::bench::check_small(options);
  return wrong + tessera::bench::check_repeats(options) + tessera::bench::check_stalled(options) +
                 tessera::bench::check_killed(options)
             ? 1
             : 0;
}

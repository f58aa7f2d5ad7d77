// SPDX-License-Identifier: Apache-2.0
// The experts over one or two GPUs: the unfused chain (dispatch, the GEMMs of one GPU, combine, aggregate)
// and the one kernel that does all of it. Every result is compared bit for bit with the single-GPU layer
// that has all experts, then passes and the chain's parts are timed.
//
//   chain [--gpus 1|2] [--only chain|fused] [--check | --iters N] [--out FILE] [--commit HASH]
//
// --check: small awkward exchanges, several passes each, no timing. Ranks are threads. Exits with 77 where
// there are too few GPUs.
#include <barrier>
#include <cstring>
#include <memory>
#include <thread>

#include "../../src/cuda/host/aggregate.hpp"
#include "../../src/cuda/host/projection.hpp"
#include "../../src/dist/kernels/exchange.hpp"
#include "../../src/dist/kernels/forward.hpp"
#include "../cuda/support.cuh"
#include "tessera/tessera.hpp"

namespace tessera::bench {
namespace {

using dist::ExchangeArguments;
using dist::ExchangeShape;

constexpr double kLimitSeconds = 10;
enum Part { kDispatch, kUp, kDown, kCombine, kAggregate, kParts };
enum class Way { chain, fused };
constexpr char const* kPartNames[] = {"dispatch", "up_projection_fwd", "down_projection_fwd",
                                      "combine", "aggregate"};

enum class Pattern { random, one_expert, sentinels, idle_rank, one_token };
constexpr Pattern kPatterns[] = {Pattern::random, Pattern::one_expert, Pattern::sentinels,
                                 Pattern::idle_rank, Pattern::one_token};

// What one rank's router chose in one pass.
struct Choices {
  int tokens;
  std::vector<int32_t> ids;
  std::vector<float> scores;
};
Choices draw(ExchangeShape const& s, Pattern pattern, int rank, uint64_t seed) {
  std::mt19937_64 rng(seed * 1000003 + uint64_t(rank));
  Choices c = {.tokens = s.max_tokens, .ids = {}, .scores = {}};
  if (pattern == Pattern::idle_rank && rank == s.ranks - 1) c.tokens = 0;
  if (pattern == Pattern::one_token) c.tokens = 1;
  if (pattern == Pattern::sentinels) c.tokens -= rank;
  std::vector<int32_t> experts(size_t(s.experts));
  std::iota(experts.begin(), experts.end(), 0);
  for (int t = 0; t < c.tokens; ++t) {
    for (int k = 0; k < s.max_top_k; ++k) {
      std::swap(experts[size_t(k)], experts[size_t(k) + rng() % uint64_t(s.experts - k)]);
      bool const none = (pattern == Pattern::sentinels && rng() % 3 == 0) ||
                        (pattern == Pattern::one_expert && k > 0);
      int32_t const one = pattern == Pattern::one_expert ? s.experts - 1 : experts[size_t(k)];
      c.ids.push_back(none ? (rng() % 2 ? -1 : s.experts) : one);
      c.scores.push_back(float(rng() % 1000) / 1000.0f + 0.1f);
    }
  }
  return c;
}

class Rank {
 public:
  Rank(int rank, ExchangeShape const& s)
      : rank_(rank),
        shape_(s),
        window_layout_(s),
        local_layout_(s, sm_count(rank)),
        window_(window_layout_.bytes),
        local_(local_layout_.bytes),
        epoch_(std::vector<uint32_t>{1}),
        ids_(pairs()),
        slot_of_pair_(pairs()),
        scores_(pairs()),
        offsets_(s.local_experts() + 1),
        pool_(s.pool_rows() * s.hidden),
        a_(s.pool_rows() * s.intermediate),
        y_(s.max_rows() * s.hidden),
        w_up_(int64_t{2} * s.experts * s.intermediate * s.hidden),
        w_down_(int64_t{1} * s.experts * s.intermediate * s.hidden),
        o_(int64_t{s.max_tokens} * s.hidden),
        wanted_(int64_t{s.max_tokens} * s.hidden),
        tile_counters_(std::vector<int32_t>{0, 0}) {
    TESSERA_CUDA(cudaMemset(window_.get(), 0, size_t(window_.count())));
    TESSERA_CUDA(cudaMemset(local_.get(), 0, size_t(local_.count())));
    TESSERA_CUDA(cudaHostAlloc(&fault_, sizeof *fault_, cudaHostAllocMapped));
    *fault_ = {};
    fill_uniform<<<4096, 256>>>(w_up_.get(), w_up_.count(), 11, 0x1p-4f);
    fill_uniform<<<4096, 256>>>(w_down_.get(), w_down_.count(), 12, 0x1p-4f);
    TESSERA_CUDA(cudaDeviceSynchronize());
  }
  ~Rank() { cudaFreeHost(fault_); }

  char* window() const { return window_.get(); }
  void connect(std::vector<char*> const& windows) {
    for (size_t r = 0; r < windows.size(); ++r) windows_[r] = windows[r];
  }

  void set_pass(Choices const& c, uint64_t seed) {
    tokens_ = c.tokens;
    if (c.tokens > 0) {
      TESSERA_CUDA(cudaMemcpy(ids_.get(), c.ids.data(), c.ids.size() * 4, cudaMemcpyHostToDevice));
      TESSERA_CUDA(
          cudaMemcpy(scores_.get(), c.scores.data(), c.scores.size() * 4, cudaMemcpyHostToDevice));
    }
    fill_uniform<<<1024, 256>>>(x(), int64_t{tokens_} * shape_.hidden, seed * 2 + uint64_t(rank_),
                                1.0f);
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  // The layer on this GPU alone.
  void compute_wanted(Context const& context) {
    if (tokens_ == 0) return;
    ExchangeShape const& s = shape_;
    MoeDesc desc;
    desc.shape = {.tokens = tokens_,
                  .hidden = s.hidden,
                  .intermediate = s.intermediate,
                  .experts = s.experts,
                  .top_k = s.max_top_k};
    desc.dtype = DType::bf16;
    desc.router.kind = RouterKind::given;
    desc.save = SavePolicy::none;
    Device const device = context.device();
    auto const bytes = workspace_bytes(context, desc, Pass::forward);
    if (!bytes.ok()) fail(bytes.status());
    DeviceBuffer<char> workspace{int64_t(const_cast<Expected<size_t>&>(bytes).value())};
    MoeForwardArgs args;
    args.x = tensor(static_cast<void const*>(x()), DType::bf16, {tokens_, s.hidden}, device);
    args.weights.w_up = tensor(static_cast<void const*>(w_up_.get()), DType::bf16,
                               {s.experts, 2 * s.intermediate, s.hidden}, device);
    args.weights.w_down = tensor(static_cast<void const*>(w_down_.get()), DType::bf16,
                                 {s.experts, s.hidden, s.intermediate}, device);
    args.topk_ids =
        tensor(static_cast<void const*>(ids_.get()), DType::int32, {tokens_, s.max_top_k}, device);
    args.topk_weights = tensor(static_cast<void const*>(scores_.get()), DType::fp32,
                               {tokens_, s.max_top_k}, device);
    args.o = tensor(static_cast<void*>(wanted_.get()), DType::bf16, {tokens_, s.hidden}, device);
    args.workspace = {workspace.get(), size_t(workspace.count())};
    fail(moe_forward(context, desc, args));
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  void poison() {
    pool_.poison();
    a_.poison();
    y_.poison();
    o_.poison();
    TESSERA_CUDA(cudaMemset(window_.get() + window_layout_.slots, 0xff,
                            size_t(window_layout_.bytes - window_layout_.slots)));
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  ExchangeArguments exchange() const {
    return {.shape = shape_,
            .window = window_layout_,
            .local = local_layout_,
            .rank = rank_,
            .windows = {windows_[0], windows_[1]},
            .gmem_local = local_.get(),
            .gmem_epoch = epoch_.get(),
            .fault = fault_,
            .limit_ns = uint64_t(kLimitSeconds * 1e9),
            .tokens = tokens_,
            .gmem_topk_ids = ids_.get(),
            .gmem_slot_of_pair = slot_of_pair_.get(),
            .gmem_expert_offsets = offsets_.get(),
            .gmem_pool = reinterpret_cast<char*>(pool_.get()),
            .gmem_y = reinterpret_cast<char const*>(y_.get())};
  }

  void launch_fused(int lag) {
    int64_t const first = int64_t{rank_} * shape_.local_experts();
    int64_t const matrix = int64_t{shape_.intermediate} * shape_.hidden;
    TESSERA_CUDA(dist::launch_forward({.exchange = exchange(),
                                       .gmem_w_up = w_up_.get() + 2 * first * matrix,
                                       .gmem_w_down = w_down_.get() + first * matrix,
                                       .gmem_a = a_.get(),
                                       .gmem_scores = scores_.get(),
                                       .gmem_o = o_.get(),
                                       .lag = lag},
                                      sm_count(rank_), nullptr));
  }

  // `mark(part)` after each of the parts.
  template <typename Mark>
  void launch_chain(Mark mark) {
    ExchangeShape const& s = shape_;
    int const sms = sm_count(rank_);
    int64_t const d = s.hidden;
    int64_t const n = s.intermediate;
    int64_t const first = int64_t{rank_} * s.local_experts();
    ExchangeArguments const p = exchange();
    TESSERA_CUDA(dist::launch_dispatch(p, sms, nullptr));
    mark(kDispatch);
    cuda::UpProjectionFwdArguments up = {};
    up.x = {.gmem = pool_.get(), .rows = s.max_rows(), .pitch = d};
    up.gmem_expert_offsets = offsets_.get();
    for (int half = 0; half < 2; ++half) {
      up.w_up[half] = {.gmem = w_up_.get() + (2 * first + half) * n * d,
                       .expert_stride = 2 * n * d,
                       .row_stride = d,
                       .column_stride = 1,
                       .block = n};
    }
    up.gmem_a = a_.get();
    up.rows = s.max_rows();
    up.hidden = d;
    up.intermediate = n;
    up.experts = s.local_experts();
    up.gmem_tile_counter = tile_counters_.get();
    TESSERA_CUDA(cuda::launch_up_projection_fwd(up, sms, nullptr));
    mark(kUp);
    cuda::DownProjectionFwdArguments down = {};
    down.gmem_a = a_.get();
    down.gmem_expert_offsets = offsets_.get();
    down.w_down = {.gmem = w_down_.get() + first * n * d,
                   .expert_stride = d * n,
                   .row_stride = n,
                   .column_stride = 1,
                   .block = d};
    down.gmem_y = y_.get();
    down.rows = s.max_rows();
    down.hidden = d;
    down.intermediate = n;
    down.experts = s.local_experts();
    down.gmem_tile_counter = tile_counters_.get() + 1;
    TESSERA_CUDA(cuda::launch_down_projection_fwd(down, sms, nullptr));
    mark(kDown);
    TESSERA_CUDA(dist::launch_combine(p, sms, nullptr));
    mark(kCombine);
    cuda::AggregateArguments aggregate = {};
    aggregate.gmem_y = window_.get() + window_layout_.slots;
    aggregate.gmem_scores = scores_.get();
    aggregate.gmem_inverse_permutation = slot_of_pair_.get();
    aggregate.gmem_o = o_.get();
    aggregate.o_pitch = d;
    aggregate.tokens = tokens_;
    aggregate.hidden = d;
    aggregate.top_k = s.max_top_k;
    TESSERA_CUDA(cuda::launch_aggregate<bf16>(aggregate, nullptr));
    mark(kAggregate);
  }

  // Ends the program if a wait ended without its word.
  void check_fault() const { fail(dist::fault_status(*fault_, kLimitSeconds)); }

  bool is_right() const {
    if (tokens_ == 0) return true;
    int64_t const count = int64_t{tokens_} * shape_.hidden;
    std::vector<uint16_t> got(static_cast<size_t>(count)), wanted(static_cast<size_t>(count));
    TESSERA_CUDA(cudaMemcpy(got.data(), o_.get(), got.size() * 2, cudaMemcpyDeviceToHost));
    TESSERA_CUDA(cudaMemcpy(wanted.data(), wanted_.get(), got.size() * 2, cudaMemcpyDeviceToHost));
    int64_t different = 0, zeros = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      different += got[i] != wanted[i];
      zeros += wanted[i] == 0;
    }
    if (different > 0) {
      std::printf("rank %d: %lld of %lld elements differ\n", rank_,
                  static_cast<long long>(different), static_cast<long long>(count));
    }
    return different == 0 && zeros < count;
  }

 private:
  static int sm_count(int device) {
    int count = 0;
    TESSERA_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
  }
  static void fail(Status const& status) {
    if (status.ok()) return;
    std::fprintf(stderr, "%s\n", status.text());
    std::exit(1);
  }
  int64_t pairs() const { return int64_t{shape_.max_tokens} * shape_.max_top_k; }
  bf16* x() const { return reinterpret_cast<bf16*>(window_.get() + window_layout_.x); }

  int rank_;
  ExchangeShape shape_;
  dist::WindowLayout window_layout_;
  dist::LocalLayout local_layout_;
  DeviceBuffer<char> window_, local_;
  DeviceBuffer<uint32_t> epoch_;
  DeviceBuffer<int32_t> ids_, slot_of_pair_;
  DeviceBuffer<float> scores_;
  DeviceBuffer<int32_t> offsets_;
  DeviceBuffer<bf16> pool_, a_, y_, w_up_, w_down_, o_, wanted_;
  DeviceBuffer<int32_t> tile_counters_;
  dist::Fault* fault_ = nullptr;
  char* windows_[2] = {};
  int tokens_ = 0;
};

struct Options {
  int gpus = 2, iters = 30;
  bool check = false;
  std::string out, commit, only;

  bool selects(Way way) const {
    return only.empty() || only == (way == Way::chain ? "chain" : "fused");
  }
};

// Body(rank, Rank&, barrier, context) on a thread per rank, with windows connected.
template <typename Body>
void on_ranks(ExchangeShape const& shape, Body body) {
  std::barrier sync(shape.ranks);
  std::vector<char*> windows(static_cast<size_t>(shape.ranks));
  auto const rank_main = [&](int rank) {
    TESSERA_CUDA(cudaSetDevice(rank));
    auto context = Context::create({.device = {DeviceKind::cuda, rank}});
    if (!context.ok()) {
      std::fprintf(stderr, "%s\n", context.status().text());
      std::exit(1);
    }
    Rank r(rank, shape);
    windows[size_t(rank)] = r.window();
    sync.arrive_and_wait();
    r.connect(windows);
    sync.arrive_and_wait();
    body(rank, r, sync, context.value());
    sync.arrive_and_wait();
  };
  std::vector<std::thread> threads;
  for (int rank = 1; rank < shape.ranks; ++rank) threads.emplace_back(rank_main, rank);
  rank_main(0);
  for (std::thread& t : threads) t.join();
}

// Passes of different patterns and sizes on the same buffers.
int check_small(Options const& options) {
  int failures = 0;
  struct Small {
    int tokens, hidden, intermediate, local_experts, top_k;
  };
  for (Small const& c : {Small{40, 256, 128, 4, 2},
                         {300, 512, 256, 8, 4},
                         {7, 64, 64, 1, 1},
                         {1000, 1152, 192, 16, 8},
                         {129, 2048, 256, 3, 3}}) {
    ExchangeShape const shape = {.ranks = options.gpus,
                                 .max_tokens = c.tokens,
                                 .hidden = c.hidden,
                                 .intermediate = c.intermediate,
                                 .experts = c.local_experts * options.gpus,
                                 .max_top_k = c.top_k};
    std::vector<char> right(size_t(options.gpus), 1);
    on_ranks(shape, [&](int rank, Rank& r, std::barrier<>& sync, Context const& context) {
      for (uint64_t pass = 0; pass < 20; ++pass) {
        Pattern const pattern = kPatterns[pass / 2 % std::size(kPatterns)];
        Way const way =
            options.selects(Way::fused) && (pass % 2 == 1 || !options.selects(Way::chain))
                ? Way::fused
                : Way::chain;
        r.set_pass(draw(shape, pattern, rank, pass), pass);
        r.compute_wanted(context);
        r.poison();
        sync.arrive_and_wait();
        if (way == Way::chain) {
          r.launch_chain([](Part) {});
        } else {
          r.launch_fused(int(pass / 2) - 1);
        }
        TESSERA_CUDA(cudaDeviceSynchronize());
        r.check_fault();
        bool const ok = r.is_right();
        if (!ok) {
          right[size_t(rank)] = 0;
          std::printf("pass %d, pattern %d, %s\n", int(pass), int(pattern),
                      way == Way::chain ? "chain" : "fused");
        }
        sync.arrive_and_wait();
      }
    });
    bool const ok = std::count(right.begin(), right.end(), 0) == 0;
    std::printf("%s (T %d, d %d, n %d, E %d, K %d), %d GPUs, 20 passes\n", ok ? "ok " : "BAD",
                c.tokens, c.hidden, c.intermediate, shape.experts, c.top_k, options.gpus);
    std::fflush(stdout);
    failures += ok ? 0 : 1;
  }
  return failures ? 1 : 0;
}

struct Named {
  char const* name;
  int hidden, intermediate, experts, top_k;
};
constexpr Named kNamed[] = {{"Qwen3-30B", 2048, 768, 128, 8},
                            {"FlashDMoE-swiglu", 2048, 2048, 32, 2},
                            {"DSv3", 7168, 2048, 256, 8}};
constexpr int kTokens = 8192;

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
                            {"forward-inference", "fused-lag-16", Way::fused, 16},
                            {"forward-inference", "fused-lag-all", Way::fused, 1 << 20}};
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
  for (Named const& c : kNamed) {
    ExchangeShape const shape = {.ranks = options.gpus,
                                 .max_tokens = kTokens,
                                 .hidden = c.hidden,
                                 .intermediate = c.intermediate,
                                 .experts = c.experts,
                                 .max_top_k = c.top_k};
    std::vector<std::vector<float>> ms(kNumTimed);
    std::vector<std::vector<float>> latest(size_t(options.gpus), std::vector<float>(kNumTimed));
    std::vector<std::vector<char>> right(size_t(options.gpus), std::vector<char>(kNumTimed, 0));
    std::vector<size_t> passes;  // the first that each pass times
    if (options.selects(Way::chain)) passes.push_back(0);
    for (size_t v = kParts + 1; v < kNumTimed && options.selects(Way::fused); ++v)
      passes.push_back(v);
    on_ranks(shape, [&](int rank, Rank& r, std::barrier<>& sync, Context const& context) {
      r.set_pass(draw(shape, Pattern::random, rank, 1), 1);
      r.compute_wanted(context);
      cudaEvent_t events[kParts + 1];
      for (cudaEvent_t& event : events) TESSERA_CUDA(cudaEventCreate(&event));
      for (int i = -6; i < options.iters; ++i) {
        for (size_t p = 0; p < passes.size(); ++p) {
          size_t const first = passes[(p + size_t(i + 6)) % passes.size()];
          size_t const end = first == 0 ? kParts + 1 : first + 1;
          if (i == -6) r.poison();
          sync.arrive_and_wait();
          time_pass(r, first, latest[size_t(rank)], events);
          if (i == -6) {
            bool const ok = r.is_right();
            for (size_t v = first; v < end; ++v) right[size_t(rank)][v] = ok;
          }
          sync.arrive_and_wait();
          for (size_t v = first; rank == 0 && i >= 0 && v < end; ++v) {
            float slower = 0;
            for (auto const& l : latest) slower = std::max(slower, l[v]);
            ms[v].push_back(slower);
          }
        }
      }
    });
    double const flops = 6.0 * kTokens * c.top_k * c.intermediate * c.hidden;
    std::printf("%s, T %d per GPU, %d GPUs\n", c.name, kTokens, options.gpus);
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
                    rows.empty() ? "" : ",", c.name, kTokens, c.hidden, c.intermediate, c.experts,
                    c.top_k, options.gpus, kTimed[v].pass, kTimed[v].variant, q.median, q.p10,
                    q.p90, tflops, checked ? "true" : "false");
      rows += text;
    }
    std::fflush(stdout);
  }
  if (options.out.empty()) return failures ? 1 : 0;
  auto const query = [](char const* fields) {
    return read_command(
        (std::string("nvidia-smi -i 0 --format=csv,noheader,nounits --query-gpu=") + fields)
            .c_str());
  };
  FILE* const file = std::fopen(options.out.c_str(), "w");
  if (file == nullptr) {
    std::fprintf(stderr, "cannot write %s\n", options.out.c_str());
    return 2;
  }
  std::fprintf(file,
               "{\"command\": \"build-cuda/bin/bench_dist_chain --gpus %d --out FILE\", "
               "\"commit\": \"%s\", \"device\": \"%dx %s\", \"driver\": \"%s\", \"clocks_mhz\": "
               "[%s], \"date\": \"%s\",\n \"protocol\": \"median of %d after 6 warm-ups, slower "
               "GPU of each part, eager launches, uniform random data\",\n \"rows\": [%s\n]}\n",
               options.gpus, options.commit.c_str(), options.gpus, query("name").c_str(),
               query("driver_version").c_str(), query("clocks.sm,clocks.mem").c_str(),
               read_command("date +%F").c_str(), options.iters, rows.c_str());
  std::fclose(file);
  return failures ? 1 : 0;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  tessera::bench::Options options;
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
  return options.check ? tessera::bench::check_small(options) : tessera::bench::measure(options);
}

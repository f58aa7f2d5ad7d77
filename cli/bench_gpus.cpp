// SPDX-License-Identifier: Apache-2.0
// A thread per GPU. Every GPU holds the weights of all experts, so that it can also compute its tokens alone: the bits
// to compare with, and the time of the layer that needs no other GPU.
#include "cli/bench_gpus.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cli/bench_bound.hpp"
#include "cli/clock.hpp"
#include "cli/commands.hpp"
#include "device/device.hpp"
#include "tessera/expert_parallel.hpp"
#include "tessera/moe.hpp"
#include "tessera/work.hpp"
#include "verify/names.hpp"
#include "verify/random_source.hpp"

namespace tessera::cli {
namespace {

constexpr std::int64_t kFewTokens = 8;  // one GPU adds up their rows in another order
constexpr int kWarmUps = 20, kMinRounds = 50, kMaxRounds = 2000;
constexpr char kProtocol[] =
    "median of at least 50 rounds after 20; a round runs every candidate once, in rotating order; "
    "a pass is enqueued "
    "behind a gate that opens for all GPUs at once, and its time is that of the slowest between "
    "CUDA events; mhz: mean "
    "SM clock of the slowest GPU's passes; o is compared bit for bit with the layer that has all "
    "experts on one GPU, with partial combine by the norm of the error, at most 2^-8";

/// The threads of a group meet here. Who fails takes the others along.
class Meeting {
 public:
  explicit Meeting(std::int32_t threads) : threads_(threads) {}
  void meet() {
    std::unique_lock lock(mutex_);
    std::int64_t const before = generation_;
    if (++arrived_ == threads_) {
      arrived_ = 0;
      ++generation_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return generation_ != before || failed_; });
    if (failed_) throw CommandError("another rank has failed", kEnvironment);
  }
  void fail() {
    std::lock_guard const lock(mutex_);
    failed_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int32_t threads_, arrived_ = 0;
  std::int64_t generation_ = 0;
  bool failed_ = false;
};

enum Candidate { kEager, kGraph, kOneGpu, kCandidates };
constexpr std::array<char const*, kCandidates> kVariants = {"", "graph", "one-gpu"};
constexpr std::array<char const*, kCandidates> kVariantsOfPartialCombine = {
    "partial-combine", "graph-partial-combine", "one-gpu"};

/// Holds what was measured of one pass.
struct Reading {
  float ms = 0, mhz = 0;
};

/// Holds what the ranks of one job share.
struct Group {
  Group(std::int32_t ranks, std::vector<PeerWindow> of_ranks)
      : meeting(ranks), windows(std::move(of_ranks)), latest(windows.size()) {}
  Meeting meeting;
  device::Gate gate;
  std::vector<PeerWindow> windows;
  std::vector<std::array<Reading, kCandidates>> latest;  // of each rank
  std::array<std::vector<double>, kCandidates> ms, mhz;  // of the slowest rank
  bool more = true;                                      // written by rank 0
};

Tensor bf16(device::Memory const& memory, std::initializer_list<std::int64_t> shape,
            Device device) {
  return tensor(static_cast<void*>(memory.get()), DType::bf16, shape, device);
}

ExpertParallelDesc group_desc(std::int32_t rank, std::int32_t ranks, MoeDesc const& desc,
                              bool partial_combine) {
  MoeShape const& s = desc.shape;
  return {.rank = rank,
          .ranks = ranks,
          .max_tokens = std::max<std::int64_t>(s.tokens, 1),
          .hidden = s.hidden,
          .intermediate = s.intermediate,
          .experts = s.experts,
          .top_k = s.top_k,
          .activation = desc.activation,
          .partial_combine = partial_combine};
}

/// Refuses what several GPUs do not serve, before any of them is looked for.
void check_job(std::int32_t gpus, CudaBench::Job const& job, CudaBench const& bench) {
  verify::LayerCase const& layer_case = job.layer_case;
  MoeDesc const& desc = layer_case.desc;
  auto const refuse = [&job](std::string const& what) {
    throw CommandError(fmt::format("{}: {} not spread over several GPUs yet", job.name, what));
  };
  if (desc.layout != WeightLayout{}) {
    refuse(fmt::format("weights of --layout {} are", verify::layout_name(desc.layout)));
  }
  if (desc.bias) refuse("experts with biases (--bias) are");
  if (desc.dtype != DType::bf16) refuse("experts of other types than bf16 (--dtype) are");
  if (layer_case.aux_dlogits || layer_case.router_bias || desc.router_dtype != DType::none) {
    throw CommandError(
        "--aux-dlogits, --router-bias, --router-dtype: several GPUs are given ids and weights; "
        "leave it out");
  }
  check(ExpertParallel::window_bytes(group_desc(0, gpus, desc, bench.partial_combine)).status());
  if (std::int64_t const tokens = desc.shape.tokens;
      bench.check && tokens > 0 && tokens <= kFewTokens) {
    throw CommandError(
        fmt::format("tokens={}: with at most {} tokens the layer on one GPU, which the check "
                    "compares bits with, adds up in another order; take more, or --no-check",
                    tokens, kFewTokens));
  }
}

/// One rank: its buffers and what it enqueues.
class RankBench {
 public:
  RankBench(std::int32_t rank, std::int32_t ranks, CudaBench::Job const& job, bool partial_combine,
            Group& group)
      : context_(value_of(Context::create({.device = {DeviceKind::cuda, rank}}))),
        stream_(rank),
        watch_(rank),
        group_(group),
        rank_(rank),
        partial_combine_(partial_combine),
        desc_(job.layer_case.desc) {
    MoeShape const& s = desc_.shape;
    desc_.save = SavePolicy::none;
    desc_.router.kind = RouterKind::given;
    desc_.ids_dtype = DType::int32;
    auto const allocate = [rank](std::size_t bytes) {
      return device::allocate(rank, bytes, device::Kind::device);
    };
    ExpertParallelDesc const own = group_desc(rank, ranks, desc_, partial_combine);
    std::size_t const group_workspace = value_of(ExpertParallel::workspace_bytes(context_, own));
    std::size_t const workspace = value_of(workspace_bytes(context_, desc_, Pass::forward));
    group_workspace_ = allocate(group_workspace);
    workspace_ = allocate(workspace);
    std::int64_t const up_rows = desc_.up_width() * s.intermediate;
    std::int64_t const matrix = s.hidden * s.intermediate;
    w_up_ = allocate(static_cast<std::size_t>(2 * s.experts * up_rows * s.hidden));
    w_down_ = allocate(static_cast<std::size_t>(2 * s.experts * matrix));
    auto const o_bytes = static_cast<std::size_t>(2 * s.tokens * s.hidden);
    o_ = allocate(o_bytes);
    wanted_ = allocate(o_bytes);
    stream_.fill_uniform(w_up_.get(), s.experts * up_rows * s.hidden, 2, 0x1p-4f);
    stream_.fill_uniform(w_down_.get(), s.experts * matrix, 3, 0x1p-4f);
    choose(job.layer_case);
    stream_.synchronize();
    experts_.emplace(value_of(ExpertParallel::create(
        context_, own, group_.windows[static_cast<std::size_t>(rank)].addresses(),
        {group_workspace_.get(), group_workspace})));

    Device const device = context_.device();
    Tensor const x = experts_->input(s.tokens);
    stream_.fill_uniform(x.data, x.elements(), 4 + static_cast<std::uint64_t>(rank), 1);
    Tensor const ids =
        tensor(reinterpret_cast<std::int32_t*>(ids_.get()), {s.tokens, s.top_k}, device);
    Tensor const scores =
        tensor(reinterpret_cast<float*>(scores_.get()), {s.tokens, s.top_k}, device);
    std::int64_t const local = s.experts / ranks, first = rank * local;
    args_.x = x;
    args_.topk_ids = ids;
    args_.topk_weights = scores;
    args_.w_up = tensor(static_cast<void*>(w_up_.get() + 2 * first * up_rows * s.hidden),
                        DType::bf16, {local, up_rows, s.hidden}, device);
    args_.w_down = tensor(static_cast<void*>(w_down_.get() + 2 * first * matrix), DType::bf16,
                          {local, s.hidden, s.intermediate}, device);
    args_.o = bf16(o_, {s.tokens, s.hidden}, device);
    alone_.x = x;
    alone_.topk_ids = ids;
    alone_.topk_weights = scores;
    alone_.weights.w_up = bf16(w_up_, {s.experts, up_rows, s.hidden}, device);
    alone_.weights.w_down = bf16(w_down_, {s.experts, s.hidden, s.intermediate}, device);
    alone_.o = bf16(wanted_, {s.tokens, s.hidden}, device);
    alone_.workspace = {workspace_.get(), workspace};
    graph_.emplace(stream_, [this] { run(kEager); });
    run(kOneGpu);  // loads its kernels, which might wait for a held stream later
    stream_.synchronize();
    group_.meeting.meet();
  }

  /// Bit for bit, eagerly and by graph replay; a partial combine rounds sums.
  bool is_right() {
    run(kOneGpu);
    auto const bytes = static_cast<std::size_t>(2 * args_.o.elements());
    bool right = true;
    for (Candidate const candidate : {kEager, kGraph}) {
      stream_.fill(o_.get(), 0xff, bytes);
      stream_.synchronize();
      group_.meeting.meet();
      run(candidate);
      synchronize();
      std::vector<std::uint16_t> got(bytes / 2), wanted(bytes / 2);
      device::download(got.data(), o_.get(), bytes);
      device::download(wanted.data(), wanted_.get(), bytes);
      bool const some = std::any_of(wanted.begin(), wanted.end(), [](auto v) { return v != 0; });
      bool const equal = partial_combine_ ? is_near(got, wanted) : got == wanted;
      right = right && equal && (some || bytes == 0);
      group_.meeting.meet();
    }
    return right;
  }

  void round(int first) {
    for (int i = 0; i < kCandidates; ++i) {
      auto const candidate = static_cast<Candidate>((i + first) % kCandidates);
      group_.gate.hold(stream_, ++passes_);
      watch_.start(stream_);
      run(candidate);
      watch_.stop(stream_);
      group_.meeting.meet();
      if (rank_ == 0) group_.gate.open();
      synchronize();
      group_.latest[static_cast<std::size_t>(rank_)][candidate] = {watch_.ms(), watch_.mhz()};
    }
    group_.meeting.meet();
  }

 private:
  /// One that is void would not be: any missing term costs more than roundings.
  static bool is_near(std::vector<std::uint16_t> const& got,
                      std::vector<std::uint16_t> const& wanted) {
    auto const value = [](std::uint16_t bits) {
      return static_cast<double>(std::bit_cast<float>(std::uint32_t{bits} << 16));
    };
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      error += std::pow(value(got[i]) - value(wanted[i]), 2);
      norm += std::pow(value(wanted[i]), 2);
    }
    return error <= std::pow(0x1p-8, 2) * norm;  // false for NaN
  }

  void run(Candidate candidate) {
    if (candidate == kGraph) return graph_->launch(stream_);
    check(candidate == kEager ? experts_->forward(args_, stream_.handle())
                              : moe_forward(context_, desc_, alone_, stream_.handle()));
  }
  void synchronize() {
    stream_.synchronize();
    check(experts_->check());
  }

  void choose(verify::LayerCase const& layer_case) {
    verify::LayerCase own = layer_case;
    own.seed += static_cast<std::uint64_t>(rank_);
    own.desc = desc_;
    auto const chosen = verify::make_slots(own).topk_ids;
    std::vector<std::int32_t> const ids(chosen.begin(), chosen.end());
    verify::RandomSource random(own.seed, 1);
    std::vector<float> scores(ids.size());
    for (float& score : scores) score = static_cast<float>(0.05 + 0.95 * random.uniform());
    ids_ = device::allocate(rank_, 4 * ids.size(), device::Kind::device);
    scores_ = device::allocate(rank_, 4 * ids.size(), device::Kind::device);
    device::upload(ids_.get(), ids.data(), 4 * ids.size());
    device::upload(scores_.get(), scores.data(), 4 * ids.size());
  }

  Context context_;
  device::Stream stream_;
  device::Stopwatch watch_;
  Group& group_;
  std::int32_t rank_;
  bool partial_combine_;
  std::uint32_t passes_ = 0;  // that were timed
  MoeDesc desc_;
  device::Memory group_workspace_, workspace_, w_up_, w_down_, o_, wanted_, ids_, scores_;
  std::optional<ExpertParallel> experts_;
  ExpertParallelArgs args_;
  MoeForwardArgs alone_;
  std::optional<device::Graph> graph_;
};

void run_rank(std::int32_t rank, std::int32_t ranks, CudaBench::Job const& job,
              CudaBench const& bench, Group& group, std::vector<char>& right) {
  RankBench own(rank, ranks, job, bench.partial_combine, group);
  if (bench.check) right[static_cast<std::size_t>(rank)] = own.is_right();
  double end = 0;
  for (int i = -kWarmUps; group.more; ++i) {
    own.round(i + kWarmUps);
    if (rank == 0) {
      if (i < 0) end = now_seconds() + bench.seconds;
      for (int c = 0; c < kCandidates && i >= 0; ++c) {
        Reading slowest;
        for (auto const& latest : group.latest) {
          Reading const& reading = latest[static_cast<std::size_t>(c)];
          if (reading.ms > slowest.ms) slowest = reading;
        }
        group.ms[static_cast<std::size_t>(c)].push_back(slowest.ms);
        group.mhz[static_cast<std::size_t>(c)].push_back(slowest.mhz);
      }
      group.more = i + 1 < kMaxRounds && (i + 1 < kMinRounds || now_seconds() < end);
    }
    group.meeting.meet();
  }
}

double quantile(std::vector<double> values, double at) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(at * static_cast<double>(values.size() - 1) + 0.5)];
}

Json bench_job(std::int32_t gpus, CudaBench::Job const& job, CudaBench const& bench) {
  std::vector<Device> devices;
  for (std::int32_t rank = 0; rank < gpus; ++rank) devices.push_back({DeviceKind::cuda, rank});
  std::size_t const window_bytes = value_of(ExpertParallel::window_bytes(
      group_desc(0, gpus, job.layer_case.desc, bench.partial_combine)));
  Group group(gpus, value_of(PeerWindow::open_all(devices, window_bytes)));
  std::vector<char> right(static_cast<std::size_t>(gpus), 0);
  std::vector<std::exception_ptr> errors(right.size());
  std::vector<std::thread> threads;
  for (std::int32_t rank = 0; rank < gpus; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        run_rank(rank, gpus, job, bench, group, right);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
        group.meeting.fail();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  // Several errors become one: that which is not "another rank has failed".
  std::exception_ptr worst;
  for (std::exception_ptr const& error : errors) {
    if (error == nullptr) continue;
    try {
      std::rethrow_exception(error);
    } catch (std::exception const& e) {
      if (worst == nullptr || std::string(e.what()) != "another rank has failed") worst = error;
    }
  }
  if (worst != nullptr) std::rethrow_exception(worst);

  MoeDesc const& desc = job.layer_case.desc;
  MoeShape const& s = desc.shape;
  double const flops = work::forward_flops(desc, static_cast<double>(s.tokens * s.top_k));
  bool const checked = std::all_of(right.begin(), right.end(), [](char r) { return r != 0; });
  Json rows = Json::array();
  for (std::size_t c = 0; c < kCandidates; ++c) {
    std::vector<double> const& ms = group.ms[c];
    rows.push_back({{"config", job.name},
                    {"shape", {s.tokens, s.hidden, s.intermediate, s.experts, s.top_k}},
                    {"dtype", "bf16"},
                    {"gpus", c == kOneGpu ? 1 : gpus},
                    {"routing", verify::routing_name(job.layer_case.routing)},
                    {"router", "given"},
                    {"round", "none"},
                    {"pass", "forward-inference"},
                    {"impl", "tessera"},
                    {"variant", (bench.partial_combine ? kVariantsOfPartialCombine : kVariants)[c]},
                    {"ms", quantile(ms, 0.5)},
                    {"ms_p10", quantile(ms, 0.1)},
                    {"ms_p90", quantile(ms, 0.9)},
                    {"tflops", flops / quantile(ms, 0.5) * 1e-9},
                    {"mhz", std::round(quantile(group.mhz[c], 0.5))},
                    {"checked", checked}});
  }
  return rows;
}

}  // namespace

Json bench_on_gpus(std::int32_t gpus, CudaBench const& bench) {
  for (std::string const& pass : bench.passes) {
    if (pass != "forward-inference") {
      throw CommandError(
          fmt::format("--pass {}: several GPUs run forward-inference; leave it out", pass));
    }
  }
  for (CudaBench::Job const& job : bench.jobs) check_job(gpus, job, bench);
  // The last of them: says in one line what is missing.
  check(Context::create({.device = {DeviceKind::cuda, gpus - 1}}).status());
  auto const facts = device::facts(0);
  Json document = {{"command", bench.command},
                   {"commit", bench.commit},
                   {"device", fmt::format("{}x {}", gpus, facts.name)},
                   {"driver", facts.driver},
                   {"clocks_mhz", {0, 0}},
                   {"date", today()},
                   {"protocol", kProtocol},
                   {"rows", Json::array()}};
  if (bench.print) {
    print_text(fmt::format("{:<18} {:>4} {:<10} {:>9} {:>9} {:>9} {:>10} {:>5}  {}\n", "config",
                           "gpus", "variant", "ms", "p10", "p90", "TFLOP/s", "MHz", "checked"));
  }
  for (CudaBench::Job const& job : bench.jobs) {
    for (Json& row : bench_job(gpus, job, bench)) {
      if (bench.print) {
        print_text(fmt::format(
            "{:<18} {:>4} {:<10} {:>9.4f} {:>9.4f} {:>9.4f} {:>10.1f} {:>5.0f}  {}\n",
            row["config"].get<std::string>(), row["gpus"].get<int>(),
            row["variant"].get<std::string>(), row["ms"].get<double>(), row["ms_p10"].get<double>(),
            row["ms_p90"].get<double>(), row["tflops"].get<double>(), row["mhz"].get<double>(),
            row["checked"].get<bool>() ? "yes" : "-"));
      }
      document["rows"].push_back(std::move(row));
    }
    bench.keep(document);
  }
  return document;
}

}  // namespace tessera::cli

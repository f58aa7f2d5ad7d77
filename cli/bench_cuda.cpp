// SPDX-License-Identifier: Apache-2.0
// score = (bound + aggregate floor) / ms: how much of the time the layer's GEMMs at cuBLAS's speed and one aggregation
// at the speed of a copy explain.
#include "cli/bench_cuda.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <string_view>
#include <vector>

#include "cli/bench_bound.hpp"
#include "cli/bench_cuda_layer.hpp"
#include "cli/clock.hpp"
#include "cli/commands.hpp"
#include "cli/kernel_op.hpp"
#include "cli/output.hpp"
#include "device/cublas.hpp"
#include "tessera/work.hpp"
#include "verify/names.hpp"

namespace tessera::cli {
namespace {

constexpr int kBlocks = 3, kWarmUps = 20, kMinPerBlock = 20, kMaxPerBlock = 200;
constexpr double kWarmUpSeconds = 1.5;  // until clocks under load have settled
constexpr std::size_t kFlushBytes = std::size_t{256} << 20;
constexpr char kProtocol[] =
    "median of 3 blocks of at least 20 rounds after 20 warm-up rounds and 1.5 s; a round runs "
    "every candidate once, in random order, between CUDA events on one stream; layers smaller "
    "than twice L2 after 256 MiB of fills each; bound: cuBLAS batched GEMMs of R/E rows per "
    "expert, two forward, four backward; main-grad: weight gradients added to fp32 ones, else "
    "written as bf16; floor of the aggregate: 2Rd + 2Td bytes at the rate of a device copy in "
    "the same rounds; kernels apart: each in a graph of its own, down_projection_fwd behind an "
    "up_projection_fwd that is not timed, floor: FLOPs or bytes at the ceilings";

struct Times {
  std::vector<std::vector<double>> blocks = std::vector<std::vector<double>>(kBlocks);

  static double quantile(std::vector<double> values, double at) {
    std::sort(values.begin(), values.end());
    return values[static_cast<std::size_t>(at * static_cast<double>(values.size() - 1) + 0.5)];
  }
  [[nodiscard]] double at(double quantile_) const {
    std::vector<double> all;
    for (auto const& block : blocks) all.insert(all.end(), block.begin(), block.end());
    return quantile(std::move(all), quantile_);
  }
  [[nodiscard]] double median() const { return at(0.5); }
  /// Returns how far the blocks' medians lie apart, as a fraction of the median.
  [[nodiscard]] double block_spread() const {
    double least = HUGE_VAL, most = 0;
    for (auto const& block : blocks) {
      double const own = quantile(block, 0.5);
      least = std::min(least, own);
      most = std::max(most, own);
    }
    return (most - least) / median();
  }
};

/// Medians of the bound's GEMMs by op.
using BoundTimes = std::map<std::string, double>;

struct Candidate {
  std::string name;
  std::function<void()> body;
  std::function<void()> ahead{};  ///< what has to run before, not timed
  Times times{};
  device::Event start{}, end{};
};

/// Runs all candidates round after round.
class Rounds {
 public:
  Rounds(device::Stream const& stream, std::byte* scratch, bool flush)
      : stream_(stream), scratch_(scratch), flush_(flush) {}

  void run(std::vector<Candidate>& candidates, double seconds) {
    double const warm = now_seconds() + kWarmUpSeconds;
    for (int i = 0; i < kWarmUps || now_seconds() < warm; ++i) round(candidates);
    for (int block = 0; block < kBlocks; ++block) {
      double const end = now_seconds() + seconds / kBlocks;
      for (int i = 0; i < kMaxPerBlock && (i < kMinPerBlock || now_seconds() < end); ++i) {
        round(candidates);
        for (Candidate& candidate : candidates) {
          candidate.times.blocks[static_cast<std::size_t>(block)].push_back(
              candidate.end.since(candidate.start));
        }
      }
    }
  }

 private:
  /// In random order: near the power limit a pass runs at the clock that its predecessor leaves, so a rotation, where
  /// each always follows the same one, favours some by more than a percent.
  void round(std::vector<Candidate>& candidates) {
    stream_.fill(scratch_, 0, kFlushBytes);  // keeps the GPU busy while the host gets ahead of it
    order_.resize(candidates.size());
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::shuffle(order_.begin(), order_.end(), random_);
    for (std::size_t const next : order_) {
      Candidate& candidate = candidates[next];
      if (candidate.ahead) candidate.ahead();
      if (flush_) stream_.fill(scratch_, 0, kFlushBytes);
      candidate.start.record(stream_);
      candidate.body();
      candidate.end.record(stream_);
    }
    stream_.synchronize();
  }

  device::Stream const& stream_;
  std::byte* scratch_;
  bool flush_;
  std::mt19937 random_{1};
  std::vector<std::size_t> order_;
};

struct Ceilings {
  double gemm_tflops = 0;
  std::vector<double> copy_rates{};  ///< bytes per second, read and written, a value per job
  std::vector<double> clocks_mhz{};
  std::string driver{};
};

/// The line that nvidia-smi prints for `query`, or "".
std::string nvidia_smi(std::int32_t device, char const* query) {
  std::string const command = fmt::format(
      "nvidia-smi --query-gpu={} --format=csv,noheader,nounits -i {} 2>/dev/null", query, device);
  std::string line;
  if (std::FILE* const pipe = ::popen(command.c_str(), "r")) {
    char text[128];
    if (std::fgets(text, sizeof(text), pipe) != nullptr) line = text;
    ::pclose(pipe);
  }
  while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.pop_back();
  return line;
}

bool is_inference(std::string const& pass) { return pass == "forward-inference"; }
bool is_backward(std::string const& pass) { return pass == "backward"; }

/// One configuration on one GPU.
class JobBench {
 public:
  JobBench(Context const& context, device::Stream const& stream, device::Cublas const& cublas,
           CudaBench::Job const& job, CudaBench const& bench, Ceilings& ceilings)
      : stream_(stream),
        job_(job),
        bench_(bench),
        ceilings_(ceilings),
        device_(context.device().index),
        backward_(std::find(bench.passes.begin(), bench.passes.end(), "backward") !=
                  bench.passes.end()),
        layer_(context, stream, job.layer_case, backward_) {
    if (bench.check) {
      std::string const failure = layer_.check();
      if (!failure.empty()) print_note(fmt::format("{}: {}\n", job.name, failure));
      checked_ = failure.empty();
    } else {
      layer_.forward();
      stream.synchronize();
    }
    rows_ = layer_.routed_rows();
    bound_.emplace(cublas, stream, device_, desc(), rows_, backward_);
  }

  [[nodiscard]] bool checked() const { return checked_; }

  Json run() {
    MoeShape const& s = desc().shape;
    double const y_bytes = 2.0 * static_cast<double>(rows_) * static_cast<double>(s.hidden);
    std::size_t const copied = static_cast<std::size_t>(std::clamp(y_bytes, 256e6, 2e9));
    auto const from = device::allocate(device_, copied, device::Kind::device);
    auto const to = device::allocate(device_, copied, device::Kind::device);
    auto const scratch = device::allocate(device_, kFlushBytes, device::Kind::device);
    stream_.fill(from.get(), 1, copied);
    Rounds rounds(stream_, scratch.get(), touched_bytes() < 2.0 * l2_bytes());

    std::vector<Candidate> candidates;
    std::vector<device::Graph> graphs;
    graphs.reserve(bench_.passes.size());
    for (std::string const& pass : bench_.passes) {
      auto const body = [this, pass] { run_pass(pass); };
      device::Graph const& graph = graphs.emplace_back(stream_, body);
      candidates.push_back({pass, body});
      candidates.push_back({pass + " graph", [&graph, this] { graph.launch(stream_); }});
      if (is_backward(pass)) {
        candidates.push_back({pass + " main-grad", [this] { layer_.backward_main_grad(); }});
      }
    }
    std::vector<device::CublasBound::Gemm> const forward = bound_->forward(),
                                                 backward = bound_gemms();
    for (auto const& gemms : {forward, backward}) {
      for (device::CublasBound::Gemm const& gemm : gemms) candidates.push_back({gemm.op, gemm.run});
    }
    candidates.push_back({"copy", [&] { stream_.copy(to.get(), from.get(), copied); }});
    rounds.run(candidates, bench_.seconds);
    read_clocks(bench_.passes.front(), candidates.front().times.median());

    auto const times = [&](std::string const& name) -> Times const& {
      return std::find_if(candidates.begin(), candidates.end(),
                          [&](Candidate const& c) { return c.name == name; })
          ->times;
    };
    double const copy_rate = 2.0 * static_cast<double>(copied) / times("copy").median() * 1e3;
    ceilings_.copy_rates.push_back(copy_rate);
    double const floor_ms =
        (y_bytes + 2.0 * static_cast<double>(s.tokens) * static_cast<double>(s.hidden)) /
        copy_rate * 1e3;
    BoundTimes bounds;
    Json gemm_rows = Json::array();
    for (auto const& gemms : {forward, backward}) {
      for (device::CublasBound::Gemm const& gemm : gemms) {
        bounds[gemm.op] = times(gemm.op).median();
        gemm_rows.push_back(
            row(gemm.op, "cublas-bmm", "", times(gemm.op), work_of(gemm.op).flops, 0, 0));
      }
    }
    auto const sum = [&bounds](std::vector<device::CublasBound::Gemm> const& gemms) {
      double ms = 0;
      for (device::CublasBound::Gemm const& gemm : gemms) ms += bounds.at(gemm.op);
      return ms;
    };
    Json rows = Json::array();
    for (std::string const& pass : bench_.passes) {
      bool const back = is_backward(pass);
      for (std::string const variant : {"", "graph", "main-grad"}) {
        if (variant == "main-grad" && !back) continue;
        Times const& t = times(variant.empty() ? pass : pass + " " + variant);
        rows.push_back(row(pass, "tessera", variant, t,
                           back ? 2 * forward_flops() : forward_flops(),
                           sum(back ? backward : forward), floor_ms));
      }
    }
    for (Json& own : gemm_rows) rows.push_back(std::move(own));
    add_kernel_rows(rounds, copy_rate, bounds, false, rows);
    if (backward_) add_kernel_rows(rounds, copy_rate, bounds, true, rows);
    return rows;
  }

 private:
  [[nodiscard]] MoeDesc const& desc() const { return layer_.desc(); }
  [[nodiscard]] double rows() const { return static_cast<double>(rows_); }
  [[nodiscard]] double forward_flops() const { return work::forward_flops(desc(), rows()); }
  [[nodiscard]] double touched_bytes() const {
    return work_of("up_projection_fwd").bytes() + work_of("down_projection_fwd").bytes();
  }
  [[nodiscard]] std::vector<device::CublasBound::Gemm> bound_gemms() const {
    return backward_ ? bound_->backward() : std::vector<device::CublasBound::Gemm>{};
  }

  void run_pass(std::string const& pass) const {
    if (is_backward(pass)) return layer_.backward();
    is_inference(pass) ? layer_.forward_inference() : layer_.forward();
  }

  /// Returns what an op has to do; nothing for those that work.hpp does not count.
  [[nodiscard]] work::OpWork work_of(std::string const& op, bool backward = false) const {
    for (work::OpWork const& w :
         {work::up_projection_fwd(desc(), rows()), work::down_projection_fwd(desc(), rows()),
          work::down_projection_dgrad(desc(), rows()), work::down_projection_wgrad(desc(), rows()),
          work::up_projection_dgrad(desc(), rows()), work::up_projection_wgrad(desc(), rows()),
          work::quantise_rows(desc()), work::quantise_weights(desc(), true),
          work::dequantise_rows(desc()), work::aggregate(desc(), rows(), !backward)}) {
      if (op == w.op) return w;
    }
    return op == "router_logits" ? work::route(desc()) : work::OpWork{};
  }
  [[nodiscard]] double l2_bytes() const {
    return static_cast<double>(device::facts(device_).l2_bytes);
  }

  [[nodiscard]] std::size_t transient_bytes(std::string const& pass) const {
    return is_backward(pass) ? layer_.backward_workspace_bytes()
                             : layer_.forward_workspace_bytes(is_inference(pass));
  }

  Json row(std::string const& pass, char const* impl, std::string const& variant,
           Times const& times, double flops, double bound_ms, double floor_ms) const {
    MoeShape const& s = desc().shape;
    bool const inference = is_inference(pass);
    bool const whole = pass == "forward" || inference || is_backward(pass);
    double const ms = times.median();
    Json out = {{"config", job_.name},
                {"shape", {s.tokens, s.hidden, s.intermediate, s.experts, s.top_k}},
                {"dtype", verify::name_of(verify::kDTypeNames, desc().dtype)},
                {"layout", verify::layout_name(desc().layout)},
                {"gpus", 1},
                {"routing", verify::routing_name(job_.layer_case.routing)},
                {"router", verify::name_of(verify::kRouterNames, desc().router.kind)},
                {"round", verify::name_of(verify::kRoundingNames, desc().router.round)},
                {"pass", pass},
                {"impl", impl},
                {"variant", variant},
                {"ms", ms},
                {"ms_p10", times.at(0.1)},
                {"ms_p90", times.at(0.9)},
                {"block_spread", times.block_spread()},
                {"tflops", flops / ms * 1e-9},
                {"bound_ms", bound_ms},
                {"aggregate_floor_ms", floor_ms},
                {"saved_bytes", whole && !inference ? layer_.saved_bytes_total() : 0},
                {"transient_peak_bytes", whole ? transient_bytes(pass) : 0},
                {"checked", checked_ && std::string_view(impl) == "tessera"}};
    if (desc().quantises() && std::string_view(impl) == "tessera") {
      out["precision"] = verify::name_of(verify::kPrecisionNames, desc().precision);
    }
    return out;
  }

  /// The op whose kernels have to run before those of `op`; empty: none.
  [[nodiscard]] std::string before_kernel(std::string const& op, bool backward) const {
    bool const codes = desc().quantises();
    if (!backward && op == "down_projection_fwd") return codes ? "" : "up_projection_fwd";
    // y lies over the codes of w_up.
    return codes && !backward && op == "up_projection_fwd" ? "quantise_weights" : "";
  }

  /// Every kernel of a pass in a graph of its own, summed per op.
  void add_kernel_rows(Rounds& rounds, double copy_rate, BoundTimes const& bounds, bool backward,
                       Json& rows) const {
    auto const kernels = device::kernel_graphs(
        stream_, [this, backward] { backward ? layer_.backward() : layer_.forward(); });
    std::vector<std::string> ops;
    for (auto const& kernel : kernels) {
      std::string const op = op_of_kernel(kernel.name);
      if (std::find(ops.begin(), ops.end(), op) == ops.end()) ops.push_back(op);
    }
    auto const launch = [&kernels, this](std::string const& op) {
      for (auto const& kernel : kernels) {
        if (op_of_kernel(kernel.name) == op) kernel.graph.launch(stream_);
      }
    };
    std::vector<Candidate> candidates;
    for (std::string const& op : ops) {
      candidates.push_back({op, [launch, op] { launch(op); }});
      // It waits for what up_projection_fwd hands over, and who makes the tables takes that back; or what it reads has
      // been overwritten since.
      if (std::string const before = before_kernel(op, backward); !before.empty()) {
        candidates.back().ahead = [launch, before] { launch(before); };
      }
    }
    rounds.run(candidates, bench_.seconds / 3);
    auto const floor_of = [&](work::OpWork const& w) {
      return std::max(w.flops / ceilings_.gemm_tflops * 1e-9, w.bytes() / copy_rate * 1e3);
    };
    for (Candidate const& candidate : candidates) {
      std::string const& op = candidate.name;
      work::OpWork const w = work_of(op, backward);
      auto const bound = bounds.find(op);
      Json own = row(op, "tessera", backward ? "backward kernel" : "kernel", candidate.times,
                     w.flops, bound == bounds.end() ? 0 : bound->second, 0);
      own["floor_ms"] = floor_of(w);
      rows.push_back(std::move(own));
    }
  }

  /// The SM clock under load: nvidia-smi takes its time, so the stream gets about a second of work first.
  void read_clocks(std::string const& pass, double ms) const {
    int const calls = std::clamp(static_cast<int>(1000 / ms), 1, 1000);
    for (int i = 0; i < calls; ++i) run_pass(pass);
    std::string const line = nvidia_smi(device_, "clocks.sm");
    if (!line.empty()) ceilings_.clocks_mhz.push_back(std::strtod(line.c_str(), nullptr));
    stream_.synchronize();
  }

  device::Stream const& stream_;
  CudaBench::Job const& job_;
  CudaBench const& bench_;
  Ceilings& ceilings_;
  std::int32_t device_;
  bool backward_;
  CudaBenchLayer layer_;
  std::optional<device::CublasBound> bound_;
  std::int64_t rows_ = 0;
  bool checked_ = false;
};

double score_of(Json const& row) {
  return (row["bound_ms"].get<double>() + row["aggregate_floor_ms"].get<double>()) /
         row["ms"].get<double>();
}

bool is_layer(Json const& row) { return row["aggregate_floor_ms"].get<double>() > 0; }

std::string row_text(Json const& row) {
  double const bound = row["bound_ms"].get<double>();
  std::string const variant = row["variant"].get<std::string>();
  std::string pass = row["pass"].get<std::string>();
  if (!variant.empty()) pass += " " + variant;
  if (row["impl"] != "tessera") pass += " " + row["impl"].get<std::string>();
  std::string const score =
      bound > 0
          ? fmt::format("{:.3f}", is_layer(row) ? score_of(row) : bound / row["ms"].get<double>())
          : "";
  return fmt::format(
      "{:<12} {:<32} {:>9.4f} {:>9.4f} {:>9.4f} {:>6.1f}% {:>7.1f} {:>9.4f} {:>9.4f} "
      "{:>6}  {}\n",
      row["config"].get<std::string>(), pass, row["ms"].get<double>(), row["ms_p10"].get<double>(),
      row["ms_p90"].get<double>(), 100 * row["block_spread"].get<double>(),
      row["tflops"].get<double>(), bound,
      is_layer(row) ? row["aggregate_floor_ms"].get<double>() : row.value("floor_ms", 0.0), score,
      row["checked"].get<bool>() ? "yes" : "-");
}

/// Geometric means of the scores of eager rows, by pass.
Json score_means(Json const& rows) {
  std::map<std::string, std::pair<double, int>> sums;
  for (Json const& row : rows) {
    if (!is_layer(row) || row["variant"] != "") continue;
    auto& [sum, count] = sums[row["pass"].get<std::string>()];
    sum += std::log(score_of(row));
    ++count;
  }
  Json means = Json::object();
  for (auto const& [pass, sum] : sums) means[pass] = std::exp(sum.first / sum.second);
  return means;
}

Json document_of(CudaBench const& bench, std::string const& device, Ceilings const& ceilings,
                 Json const& rows) {
  std::vector<double> clocks = ceilings.clocks_mhz;
  if (clocks.empty()) clocks.push_back(0);
  auto const [slowest, fastest] = std::minmax_element(clocks.begin(), clocks.end());
  return {{"command", bench.command},
          {"commit", bench.commit},
          {"device", device},
          {"driver", ceilings.driver},
          {"clocks_mhz", {*slowest, *fastest}},
          {"date", today()},
          {"protocol", kProtocol},
          {"ceilings",
           {{"bf16_tflops_8k", ceilings.gemm_tflops},
            {"copy_tbps", 1e-12 * Times::quantile(ceilings.copy_rates, 0.5)}}},
          {"score_geometric_mean", score_means(rows)},
          {"rows", rows}};
}

}  // namespace

void check_cuda_bench(CudaBench const& bench) {
  for (std::string const& pass : bench.passes) {
    if (pass != "forward" && !is_inference(pass) && !is_backward(pass)) {
      throw CommandError(fmt::format(
          "--pass {}: not known; choose from: forward backward forward-inference", pass));
    }
  }
  for (CudaBench::Job const& job : bench.jobs) {
    MoeDesc const& desc = job.layer_case.desc;
    verify::check_routing(job.layer_case);
    if (desc.shape.variable_experts) {
      throw CommandError("--variable-experts: the bench on a GPU has K experts for every token");
    }
    if (desc.router.replay) {
      throw CommandError("--replay: the bench on a GPU has no ids for a router; leave it out");
    }
    if (desc.save != SavePolicy::h) {
      throw CommandError("--save: the bench on a GPU times layers that save h; leave it out");
    }
    if (desc.router.kind != RouterKind::given &&
        job.layer_case.routing.pattern != verify::RoutingPattern::random) {
      throw CommandError("--routing: a router meets random tokens here; use --router given");
    }
  }
}

Json bench_on_cuda(Context const& context, CudaBench const& bench) {
  for (CudaBench::Job const& job : bench.jobs) {
    check(workspace_bytes(context, job.layer_case.desc, Pass::forward).status());
  }
  std::int32_t const index = context.device().index;
  device::Stream const stream(index);
  device::Cublas const cublas;
  Ceilings ceilings;
  ceilings.gemm_tflops = device::gemm_ceiling_tflops(cublas, stream, index);
  if (bench.print) {
    print_text(fmt::format("{:<12} {:<32} {:>9} {:>9} {:>9} {:>7} {:>7} {:>9} {:>9} {:>6}  {}\n",
                           "config", "pass", "ms", "p10", "p90", "spread", "TFLOP/s", "bound ms",
                           "floor ms", "score", "checked"));
  }
  auto const facts = device::facts(index);
  std::string const driver = nvidia_smi(index, "driver_version");
  ceilings.driver = driver.empty() ? facts.driver : driver + ", " + facts.driver;
  Json document;
  Json rows = Json::array();
  for (CudaBench::Job const& job : bench.jobs) {
    print_note(fmt::format("{}: {}\n", job.name, bench.check ? "checking, then timing" : "timing"));
    JobBench run(context, stream, cublas, job, bench, ceilings);
    for (Json& row : run.run()) {
      if (bench.print) print_text(row_text(row));
      rows.push_back(std::move(row));
    }
    document = document_of(bench, facts.name, ceilings, rows);
    bench.keep(document);
  }
  if (bench.print) {
    for (auto const& [pass, mean] : document["score_geometric_mean"].items()) {
      print_text(
          fmt::format("geometric mean of the scores, {}: {:.3f}\n", pass, mean.get<double>()));
    }
  }
  return document;
}

}  // namespace tessera::cli

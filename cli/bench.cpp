// SPDX-License-Identifier: Apache-2.0
// tessera bench: the layer's passes, interleaved with their bound, after a check of the same data.
// score = (bound + aggregate floor) / ms: how much of the time the layer's GEMMs and one aggregation explain;
// x bound = ms / bound: what the layer costs beside its GEMMs alone.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <system_error>
#include <thread>

#include "cli/bench_bound.hpp"
#include "cli/bench_configs.hpp"
#include "cli/bench_cuda.hpp"
#include "cli/bench_gpus.hpp"
#include "cli/bench_layer.hpp"
#include "cli/clock.hpp"
#include "cli/commands.hpp"
#include "cli/output.hpp"
#include "cli/shape_flags.hpp"
#include "tessera/expert_parallel.hpp"
#include "tessera/work.hpp"
#include "verify/names.hpp"
#include "verify/runner.hpp"

namespace tessera::cli {
namespace {

struct BenchFlags {
  ShapeFlags shape;
  std::vector<std::string> configs;
  std::vector<std::string> passes;
  std::string out;
  double seconds = 5;
  std::int64_t gpus = 0;
  bool no_check = false, json = false, partial_combine = false;
  bool sums_on_owners = false;  // the old name of partial_combine, until 1.0
};

constexpr std::int64_t kTokensPerGpu = 8192;
constexpr int kMinIterations = 5, kMaxIterations = 200;
constexpr std::chrono::milliseconds kBusyWait{20};  // and more than that

struct Job {
  std::string name;
  verify::LayerCase layer_case;
};

std::vector<Job> jobs_of(BenchFlags const& flags, CLI::App const& command) {
  if (flags.shape.any_shape()) {
    if (flags.configs.empty()) return {{"custom", flags.shape.layer_case()}};
    throw CommandError("--config: a configuration has its own shape; leave out the shape flags");
  }
  std::vector<Job> jobs;
  for (std::string const& name :
       flags.configs.empty()
           ? std::vector<std::string>{flags.shape.on_cuda() ? "7B-n256" : "cpu-small"}
           : flags.configs) {
    auto const* const found =
        std::find_if(std::begin(kBenchConfigs), std::end(kBenchConfigs),
                     [&name](BenchConfig const& config) { return name == config.name; });
    if (found == std::end(kBenchConfigs)) {
      std::string names;
      for (auto const& config : kBenchConfigs) names += std::string(" ") + config.name;
      throw CommandError(fmt::format("--config {}: not known; choose from:{}", name, names));
    }
    Job job{name, flags.shape.layer_case()};
    MoeShape& shape = job.layer_case.desc.shape;
    MoeShape const given = shape;
    shape = found->shape;
    shape.variable_experts = given.variable_experts;
    // The layers that several GPUs share are measured at T 8192 each.
    if (flags.gpus > 0 && !flags.configs.empty()) {
      shape.tokens = std::min(shape.tokens, kTokensPerGpu);
    }
    bool const file = job.layer_case.routing.pattern == verify::RoutingPattern::file;
    if (file && (shape.tokens != given.tokens || shape.top_k != given.top_k)) {
      throw CommandError(fmt::format(
          "--config {} with --routing file: the configuration has {} tokens with top_k {}, "
          "the file {} with {}; leave out one of them",
          name, shape.tokens, shape.top_k, given.tokens, given.top_k));
    }
    if (found->activation != ActivationKind::swiglu) {
      if (command.get_option("--activation")->count() > 0) {
        throw CommandError(fmt::format(
            "--activation with --config {}: the configuration has its own; leave it out", name));
      }
      job.layer_case.desc.activation.kind = found->activation;
    }
    job.layer_case.desc.bias = job.layer_case.desc.bias || found->bias;
    if (!flags.shape.has_layout()) job.layer_case.desc.layout = found->layout;
    jobs.push_back(std::move(job));
  }
  return jobs;
}

/// Median and the tenth and ninetieth percentile of milliseconds.
struct Times {
  std::vector<double> ms;
  [[nodiscard]] double at(double quantile) const {
    std::vector<double> sorted = ms;
    std::sort(sorted.begin(), sorted.end());
    return sorted[static_cast<std::size_t>(quantile * static_cast<double>(sorted.size() - 1) +
                                           0.5)];
  }
};

/// One pass of the layer and, where it has one, its bound.
struct TimedPass {
  std::string name;
  std::function<void()> layer{}, bound{};
  Pass pass = Pass::forward;
  std::string bound_name{};                             ///< what is fastest
  std::vector<std::pair<std::string, double>> tried{};  ///< every way to compute the bound, its ms
  Times times{}, bound_times{};
};

void time_once(std::function<void()> const& body, Times& times) {
  double const start = now_seconds();
  body();
  times.ms.push_back((now_seconds() - start) * 1e3);
}

/// About what the layer, its bound and its data take.
double memory_needed(MoeDesc const& desc) {
  auto const size = [](std::int64_t value) { return static_cast<double>(value); };
  MoeShape const& s = desc.shape;
  double const weights =
      size(desc.up_width() + 1) * size(s.experts) * size(s.hidden) * size(s.intermediate);
  double const rows = size(s.tokens) * size(s.top_k) *
                      (size(desc.up_width() + 1) * 3 * size(s.intermediate) + 4 * size(s.hidden));
  return 36 * weights + 4 * rows;
}

/// The case against the reference, and the layer about to be timed against that run, bit for bit.
bool check_layer(Context const& context, Job const& job, BenchLayer& layer) {
  print_note(fmt::format("{}: checking against the fp64 reference\n", job.name));
  auto const result = value_of(verify::verify_case(context, context, job.layer_case));
  for (auto const& failure : result.failures) {
    print_note(fmt::format("{}: {}\n", job.name, failure));
  }
  layer.forward();
  layer.backward();
  return result.ok && layer.equals(result.outputs);
}

/// Returns what differs from the plain call.
std::string variant_of(MoeDesc const& desc) {
  std::string variant;
  if (desc.save == SavePolicy::x) variant = "save-x";
  if (desc.pow2_scales) variant += variant.empty() ? "pow2-scales" : ",pow2-scales";
  if (desc.column_chunk != 0) {
    variant += (variant.empty() ? "" : ",") + fmt::format("column-chunk {}", desc.column_chunk);
  }
  return variant;
}

Json bench_job(BenchFlags const& flags, Context const& context, Job const& job, double copy_rate) {
  BenchLayer layer(context, job.layer_case);
  bool const checked = !flags.no_check && check_layer(context, job, layer);
  if (!checked) layer.forward(), layer.backward();
  std::int64_t const rows = layer.routed_rows();
  MoeDesc const& desc = layer.desc();
  BlasBound bound(context, desc, rows);

  std::vector<TimedPass> passes;
  for (std::string const& name : flags.passes) {
    bool const backward = name == "backward", inference = name == "forward-inference";
    TimedPass timed{.name = name, .pass = backward ? Pass::backward : Pass::forward};
    timed.layer = [&layer, backward, inference] {
      backward ? layer.backward() : inference ? layer.forward_inference() : layer.forward();
    };
    timed.bound = [&bound, backward] { backward ? bound.backward() : bound.forward(); };
    timed.bound_name = backward ? bound.backward_name() : bound.forward_name();
    timed.tried = backward ? bound.backward_tried() : bound.forward_tried();
    passes.push_back(std::move(timed));
  }
  double const end = now_seconds() + flags.seconds;
  for (int i = 0; i < kMaxIterations && (i < kMinIterations || now_seconds() < end); ++i) {
    layer.redraw(job.layer_case.seed + 1 + static_cast<std::uint64_t>(i));
    layer.forward();  // warms up, and leaves what backward reads
    for (TimedPass& pass : passes) time_once(pass.layer, pass.times);
    // Last, and each after a rest: threads that a library has of its own wait busily for a while.
    for (TimedPass& pass : passes) {
      std::this_thread::sleep_for(kBusyWait);
      pass.bound();  // warms up
      time_once(pass.bound, pass.bound_times);
    }
  }

  Json result = Json::array();
  auto const element = static_cast<double>(dtype_bytes(desc.dtype));
  double const floor_bytes = element * static_cast<double>(desc.shape.hidden) *
                             static_cast<double>(rows + desc.shape.tokens);
  for (TimedPass const& pass : passes) {
    double const ms = pass.times.at(0.5);
    bool const backward = pass.pass == Pass::backward;
    double const flops = backward ? work::backward_flops(desc, static_cast<double>(rows))
                                  : work::forward_flops(desc, static_cast<double>(rows));
    MoeShape const& s = desc.shape;
    Json tried = Json::object();
    for (auto const& [name, tried_ms] : pass.tried) tried[name] = tried_ms;
    result.push_back(
        {{"config", job.name},
         {"shape", {s.tokens, s.hidden, s.intermediate, s.experts, s.top_k}},
         {"dtype", verify::name_of(verify::kDTypeNames, desc.dtype)},
         {"layout", verify::layout_name(desc.layout)},
         {"gpus", 0},
         {"routing", verify::routing_name(job.layer_case.routing)},
         {"router", verify::name_of(verify::kRouterNames, desc.router.kind)},
         {"round", verify::name_of(verify::kRoundingNames, desc.router.round)},
         {"pass", pass.name},
         {"impl", "tessera"},
         {"variant", variant_of(desc)},
         {"ms", ms},
         {"ms_p10", pass.times.at(0.1)},
         {"ms_p90", pass.times.at(0.9)},
         {"tflops", flops / ms * 1e-9},
         {"bound_ms", pass.bound_times.at(0.5)},
         {"bound_impl", pass.bound_name},
         {"bounds_tried_ms", tried},
         {"aggregate_floor_ms", floor_bytes / copy_rate * 1e3},
         {"saved_bytes", pass.name == "forward-inference" ? 0 : layer.saved_bytes_total()},
         {"transient_peak_bytes", layer.workspace_bytes_of(pass.pass)},
         {"checked", checked}});
    if (desc.quantises()) {
      result.back()["precision"] = verify::name_of(verify::kPrecisionNames, desc.precision);
    }
  }
  return result;
}

std::string first_line_of(char const* command) {
  std::string line;
  if (std::FILE* const pipe = ::popen(command, "r")) {
    char text[128];
    if (std::fgets(text, sizeof(text), pipe) != nullptr) line = text;
    ::pclose(pipe);
  }
  while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.pop_back();
  return line;
}

/// Value of a "key : value" line of /proc/cpuinfo, for every CPU.
std::vector<std::string> cpuinfo(std::string const& key) {
  std::vector<std::string> values;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    auto const colon = line.find(": ");
    if (line.starts_with(key) && colon != std::string::npos)
      values.push_back(line.substr(colon + 2));
  }
  return values;
}

std::string commit() {
  std::string const line = first_line_of("git rev-parse --short HEAD 2>/dev/null");
  return line.empty() ? "unknown" : line;
}

void write_file(std::string const& path, std::string const& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file) throw CommandError(fmt::format("--out {}: cannot be written", path));
}

/// Before anything is measured: --out can be written. A file that is there keeps what it holds.
void require_writable(std::string const& path) {
  if (path.empty()) return;
  std::error_code error;
  bool const is_new = !std::filesystem::exists(path, error);
  if (!std::ofstream(path, std::ios::binary | std::ios::app)) {
    throw CommandError(fmt::format("--out {}: cannot be written", path));
  }
  if (is_new) std::filesystem::remove(path, error);
}

/// The document so far goes to --out, so that a run that is interrupted leaves what it has measured.
void keep(BenchFlags const& flags, Json const& document) {
  if (!flags.out.empty()) write_file(flags.out, document.dump(1) + '\n');
}

Json document_of(std::string const& command_line, Context const& context, double copy_rate,
                 Json const& rows) {
  auto const names = cpuinfo("model name");
  std::vector<double> clocks;
  for (std::string const& mhz : cpuinfo("cpu MHz"))
    clocks.push_back(std::strtod(mhz.c_str(), nullptr));
  if (clocks.empty()) clocks.push_back(0);
  auto const [slowest, fastest] = std::minmax_element(clocks.begin(), clocks.end());
  char date[16] = {};
  std::time_t const now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::strftime(date, sizeof(date), "%Y-%m-%d", &parts);
  return {
      {"command", command_line},
      {"commit", commit()},
      {"device",
       fmt::format("{}, {} threads", names.empty() ? "CPU" : names.front(), context.num_threads())},
      {"driver", ""},
      {"clocks_mhz", {*slowest, *fastest}},
      {"date", date},
      {"protocol",
       "median of the iterations, each with new data and routing; layer and bound interleaved; "
       "bound: the fastest way of the installed libraries to multiply contiguous balanced data on "
       "the same threads, of one call per expert and GEMM (BLIS, OpenBLAS, oneDNN, bf16 operands "
       "with fp32 results, or fp32 operands where no library multiplies bf16 on the processor) and "
       "one "
       "batched call per GEMM (oneDNN, results of the operands' type); "
       "no installed library has a call for groups of unequal sizes"},
      {"ceilings", {{"bf16_tflops_8k", 0}, {"copy_tbps", copy_rate * 1e-12}}},
      {"rows", rows}};
}

std::string row_text(Json const& row) {
  double const ms = row["ms"].get<double>();
  double const explained = row["bound_ms"].get<double>() + row["aggregate_floor_ms"].get<double>();
  return fmt::format(
      "{:<14} {:<18} {:>9.3f} {:>9.3f} {:>9.3f} {:>9.1f} {:>9.3f} {:>8} {:>7.2f} {:>9.3f} "
      "{:>6.2f}  {}\n",
      row["config"].get<std::string>(), row["pass"].get<std::string>(), ms,
      row["ms_p10"].get<double>(), row["ms_p90"].get<double>(), row["tflops"].get<double>() * 1e3,
      row["bound_ms"].get<double>(), row["bound_impl"].get<std::string>(),
      ms / row["bound_ms"].get<double>(), row["aggregate_floor_ms"].get<double>(), explained / ms,
      row["checked"].get<bool>() ? "yes" : "NO");
}

/// The options that were given, apart from where the results go.
std::string command_line_of(CLI::App const& command) {
  std::string line = "tessera bench";
  auto const add = [&line](CLI::App const& part) {
    for (CLI::Option const* const option : part.get_options()) {
      std::string const name = option->get_name();
      if (option->count() == 0 || name == "--out" || name == "--json") continue;
      line += " " + name;
      if (option->get_expected_max() > 0) {
        line += " " + CLI::detail::join(option->results(), ",");
      }
    }
  };
  for (CLI::App const* const group : command.get_subcommands([](CLI::App const*) { return true; }))
    add(*group);
  add(command);
  return line;
}

int bench_cuda(BenchFlags const& flags, CLI::App const& command, std::string const& command_line) {
  if (command.get_option("--ids-dtype")->count() > 0) {
    throw CommandError(
        "--ids-dtype with bench --device cuda: given ids are int64 on one GPU, as Python has them, "
        "and int32 with --gpus; leave it out");
  }
  CudaBench request;
  for (Job& job : jobs_of(flags, command)) {
    request.jobs.push_back({job.name, std::move(job.layer_case)});
  }
  request.passes = flags.passes;
  if (request.passes.empty() && flags.gpus == 0) {
    request.passes = {"forward", "backward", "forward-inference"};
  }
  request.seconds = flags.seconds;
  request.check = !flags.no_check;
  request.partial_combine = flags.partial_combine || flags.sums_on_owners;
  request.print = !flags.json;
  request.command = command_line;
  request.commit = commit();
  request.keep = [&flags](Json const& document) { keep(flags, document); };
  Json document;
  if (flags.gpus == 0) {
    check_cuda_bench(request);
    Context const context = flags.shape.context();
    for (CudaBench::Job& job : request.jobs) resolve_precision(context, job.layer_case.desc);
    document = bench_on_cuda(context, request);
  } else {
    document = bench_on_gpus(static_cast<std::int32_t>(flags.gpus), request);
  }
  if (flags.json) print_json(document);
  for (Json const& row : document["rows"]) {
    bool const wrong = row["impl"] == "tessera" && !row["checked"].get<bool>();
    if (wrong && !flags.no_check) return kCheckFailed;
  }
  return kOk;
}

int bench(BenchFlags flags, CLI::App const& command) {
  std::string const command_line = command_line_of(command);
  require_writable(flags.out);
  if (flags.sums_on_owners) {
    print_note("note: --sums-on-owners is called --partial-combine; the old name goes with 1.0\n");
  }
  if ((flags.partial_combine || flags.sums_on_owners) && flags.gpus == 0) {
    throw CommandError(
        "--partial-combine: of the GPUs of --gpus; give their number, or leave it out");
  }
  if (command.get_option("--padding")->count() > 0) {
    throw CommandError("--padding with bench: it times calls without a mask; leave it out");
  }
  if (flags.shape.on_cuda()) {
    if (flags.gpus > 0) {
      refuse_flags(command, kPrecisionFlags, "layers over several GPUs quantise nothing");
    }
    return bench_cuda(flags, command, command_line);
  }
  if (flags.passes.empty()) flags.passes = {"forward", "backward", "forward-inference"};
  for (std::string const& name : flags.passes) {
    if (name != "forward" && name != "backward" && name != "forward-inference") {
      throw CommandError(fmt::format(
          "--pass {}: not known; choose from: forward backward forward-inference", name));
    }
  }
  if (flags.gpus != 0) throw CommandError("--gpus: the CPU backend has none; leave it out");
  auto jobs = jobs_of(flags, command);
  Context const context = flags.shape.context();
  for (Job& job : jobs) {
    resolve_precision(context, job.layer_case.desc);
    verify::check_routing(job.layer_case);
    check(workspace_bytes(context, job.layer_case.desc, Pass::backward).status());
    require_memory(memory_needed(job.layer_case.desc));
  }
  double const copy_rate = copy_bytes_per_second(context);
  Json document, rows = Json::array();
  if (!flags.json) {
    print_text(
        fmt::format("{:<14} {:<18} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>7} {:>9} {:>6}  {}\n",
                    "config", "pass", "ms", "p10", "p90", "GFLOP/s", "bound ms", "by", "x bound",
                    "floor ms", "score", "checked"));
  }
  bool all_checked = true;
  for (Job const& job : jobs) {
    for (Json& row : bench_job(flags, context, job, copy_rate)) {
      all_checked = all_checked && row["checked"].get<bool>();
      if (!flags.json) print_text(row_text(row));
      rows.push_back(std::move(row));
    }
    document = document_of(command_line, context, copy_rate, rows);
    keep(flags, document);
  }
  if (flags.json) print_json(document);
  return all_checked || flags.no_check ? kOk : kCheckFailed;
}

}  // namespace

void add_bench(CLI::App& app) {
  auto* const command = app.add_subcommand("bench", "Time the layer against its bound");
  auto const flags = std::make_shared<BenchFlags>();
  flags->shape.add_to(*command);
  command->add_option("--config", flags->configs, "named configurations (default cpu-small)")
      ->delimiter(',')
      ->type_name("NAME[,NAME]");
  command
      ->add_option("--pass", flags->passes,
                   "forward, backward, forward-inference (default all served)")
      ->delimiter(',');
  command->add_option("--seconds", flags->seconds, "time for each configuration")
      ->check(number_in(0, 3600))
      ->capture_default_str();
  command->add_option("--gpus", flags->gpus, "GPUs that share the experts; T is that of each")
      ->check(CLI::Range(0, kMaxRanks));
  command->add_flag("--partial-combine", flags->partial_combine,
                    "with --gpus: where the link would decide, send back sums instead of results");
  command->add_flag("--sums-on-owners", flags->sums_on_owners)->group("");  // not in the help
  command->add_option("--out", flags->out, "write the results file")->type_name("FILE");
  command->add_flag("--no-check", flags->no_check, "skip the check; rows say so");
  command->add_flag("--json", flags->json, "the results as JSON on stdout");
  run_with(*command, "tessera bench --config cpu-small,cpu-mid --pass forward,backward",
           [flags, command] { return bench(*flags, *command); });
}

}  // namespace tessera::cli

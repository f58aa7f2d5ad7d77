// SPDX-License-Identifier: Apache-2.0
// The experts over several GPUs: the unfused pass (dispatch, the GEMMs of one GPU, combine, aggregate) and the one
// kernel that does all of it. Every result is compared bit for bit with the single-GPU layer that has all experts, then
// the kernel is timed beside the unfused pass and its parts, its GEMMs without communication, and that layer.
//
//   chain [--gpus P] [--ranks-per-gpu R] [--nccl PATH] [--processes] [--only unfused|fused]
//         [--check | --iters N [--config NAME,NAME] [--tokens N,N] [--transfer direct|once|partial-combine]
//          [--routing random|balanced|zipf] [[--lags] [--copies] | --latency]] [--out FILE] [--commit HASH]
//
// --check: small awkward exchanges, several passes each, no timing; a rank that stalls, and as a process of its own
// one that is killed. --tokens: of a GPU, 8192 and 4096 if not given. --lags: the kernel with its down tasks at several
// distances. --copies: the kernel where x is not in its window yet. --latency: FlashDMoE's layer over numbers of
// tokens and experts. Ranks are threads on peer memory, or on NCCL's windows (NCCL_NVLS_ENABLE=0), or processes on
// those. --ranks-per-gpu: threads on peer memory, each with its part of a GPU's SMs; times are then those of these
// parts, and no link is crossed between ranks of a GPU. Exits with 77 where there are too few GPUs.
//
// Judged is the kernel's time against the larger of two bounds: its GEMMs without communication, by our kernels or by
// cuBLAS, whichever are faster, and the bytes that cross the link in one direction, those of rows there and of results
// back, at expert_parallel::kLinkRate.
#include <algorithm>
#include <optional>

#include "../../src/expert_parallel/plan/choose_transfer.hpp"
#include "arguments.hpp"
#include "chain_checks.cuh"
#include "cublas_gemms.cuh"
#include "layers.hpp"
#include "results.hpp"

namespace tessera::bench {
namespace {

// FLOP per cycle of the tensor pipes of all SMs.
constexpr double kTensorFlopPerCycle = 132 * 4096;
constexpr int kWarmUps = 6;

struct Options : CheckOptions {
  int iters = 30;
  std::optional<Transfer> transfer;  // none: the one that the library chooses
  Pattern routing = Pattern::random;
  bool cublas = false;  // is installed
  bool check = false, latency = false, lags = false, copies = false;
  std::string command, out, commit, config, tokens;
};

// The named layers, or FlashDMoE's over tokens and experts.
std::vector<NamedLayer> layers_of(Options const& options) {
  if (!options.latency) return named_layers(options.config, options.tokens);
  std::vector<NamedLayer> all;
  for (int tokens = 1024; tokens <= 16384; tokens *= 2) {
    if (!among(options.tokens, std::to_string(tokens))) continue;
    for (int experts = 8; experts <= 128; experts *= 2) {
      for (NamedLayer layer : named_layers("FlashDMoE-swiglu,FlashDMoE", std::to_string(tokens))) {
        layer.experts = experts;
        if (among(options.config, layer.name)) all.push_back(layer);
      }
    }
  }
  return all;
}

// A row of the results. Rows of one way are those of one run of it; the last of them is all of it.
enum class Way { unfused, gemms, cublas, cublas_grouped, layer, fused };
bool is_cublas(Way way) { return way == Way::cublas || way == Way::cublas_grouped; }
struct Timed {
  char const* pass;
  char const* variant;
  Way way;
  int lag = -1;
  X from = X::in_window;
};
constexpr Timed kTimed[] = {
    {kPartNames[kDispatch], "unfused", Way::unfused},
    {kPartNames[kUp], "unfused", Way::unfused},
    {kPartNames[kDown], "unfused", Way::unfused},
    {kPartNames[kCombine], "unfused", Way::unfused},
    {kPartNames[kAggregate], "unfused", Way::unfused},
    {"forward-inference", "unfused", Way::unfused},
    {"gemms", "", Way::gemms},
    {"gemms", "cublas-bmm", Way::cublas},
    {"gemms", "cublas-grouped", Way::cublas_grouped},
    {"forward-inference", "one-gpu", Way::layer},
    {"forward-inference", "fused", Way::fused},
    {"forward-inference", "fused-x-by-kernel", Way::fused, -1, X::by_kernel},
    {"forward-inference", "fused-x-ahead", Way::fused, -1, X::ahead},
    {"forward-inference", "fused-lag-2", Way::fused, 2},
    {"forward-inference", "fused-lag-4", Way::fused, 4},
    {"forward-inference", "fused-lag-8", Way::fused, 8},
    {"forward-inference", "fused-lag-32", Way::fused, 32},
    {"forward-inference", "fused-lag-64", Way::fused, 64}};
constexpr size_t kNumTimed = std::size(kTimed), kGemms = kParts + 1, kCublas = kGemms + 1,
                 kCublasGrouped = kCublas + 1, kLayer = kCublasGrouped + 1, kFused = kLayer + 1;

// The last row of every run that the options ask for.
std::vector<size_t> runs_of(Options const& options) {
  if (options.latency) return {kFused};
  std::vector<size_t> runs;
  if (options.unfused) runs = {kParts, kGemms, kCublas, kCublasGrouped, kLayer};
  if (!options.cublas) std::erase_if(runs, [](size_t row) { return is_cublas(kTimed[row].way); });
  if (options.fused) {
    for (size_t row = kFused; row < kNumTimed; ++row) {
      bool const asked = kTimed[row].from != X::in_window ? options.copies : options.lags;
      if (row == kFused || asked) runs.push_back(row);
    }
  }
  return runs;
}

struct Reading {
  float ms = 0, mhz = 0;
};
struct Readings {
  std::vector<float> ms, mhz;
};

// Runs of one rank, enqueued behind the gate that all ranks share: no time of the host is in a reading.
class Clock {
 public:
  Clock(int device, device::Gate& gate) : gate_(gate), watch_(device) {}

  // latest[]: of the rows that the run has.
  void time(size_t row, Rank& r, CublasGemms const& cublas, Talk& talk, int rank,
            Context const& context, std::vector<Reading>& latest) {
    gate_.hold(r.stream(), ++runs_);
    watch_.start(r.stream());
    switch (kTimed[row].way) {
      case Way::unfused:
        parts_[0].record(r.stream());
        r.launch_chain([&](Part part) { parts_[part + 1].record(r.stream()); });
        break;
      case Way::gemms:
        r.launch_up();
        r.launch_down();
        break;
      case Way::cublas:
        cublas.run_batched();
        break;
      case Way::cublas_grouped:
        cublas.run_grouped(r.stream());
        break;
      case Way::layer:
        r.launch_layer(context);
        break;
      case Way::fused:
        r.launch_fused(kTimed[row].lag, kTimed[row].from);
        break;
    }
    watch_.stop(r.stream());
    talk.meet();
    if (rank == 0) gate_.open();
    r.stream().synchronize();
    r.check_fault();
    latest[row] = {watch_.ms(), watch_.mhz()};
    for (size_t part = 0; kTimed[row].way == Way::unfused && part < kParts; ++part) {
      latest[part] = {parts_[part + 1].since(parts_[part]), latest[row].mhz};
    }
  }

 private:
  device::Gate& gate_;
  device::Stopwatch watch_;
  device::Event parts_[kParts + 1];
  uint32_t runs_ = 0;
};

// Launched once without the gate, so that kernels are loaded; the outcome is compared.
bool is_right(size_t row, Rank& r, Talk& talk, Context const& context) {
  r.poison();
  talk.meet();
  switch (kTimed[row].way) {
    case Way::unfused:
      r.launch_chain([](Part) {});
      break;
    case Way::gemms:  // those of the unfused pass
      r.launch_chain([](Part) {});
      break;
    case Way::cublas:
    case Way::cublas_grouped:
      return true;  // its values are its own
    case Way::layer:
      r.launch_layer(context);
      return true;  // is what the others are compared with
    case Way::fused:
      r.launch_fused(kTimed[row].lag, kTimed[row].from);
      break;
  }
  r.stream().synchronize();
  r.check_fault();
  bool const right = r.is_right(kTimed[row].way == Way::fused);
  talk.meet();
  return right;
}

// What is measured of one config, by row: times of the slowest GPU.
struct Measured {
  std::vector<Readings> rows = std::vector<Readings>(kNumTimed);
  std::vector<char> right = std::vector<char>(kNumTimed, 1);
  std::vector<float> empty;  // passes without routed rows, of rank 0
};

Measured measure_config(Options const& options, NamedLayer const& c, ExchangeShape const& shape) {
  Measured m;
  device::Gate gate;
  std::vector<std::vector<Reading>> latest(size_t(options.ranks()),
                                           std::vector<Reading>(kNumTimed));
  std::vector<std::vector<char>> right(size_t(options.ranks()), std::vector<char>(kNumTimed, 1));
  std::vector<size_t> const runs = runs_of(options);
  on_ranks(options, shape, c.activation,
           [&](int rank, Rank& r, Talk& talk, Context const& context) {
             Clock clock(options.device_of(rank), gate);
             CublasGemms cublas;
             if (std::ranges::find(runs, kCublas) != runs.end()) {
               cublas = CublasGemms(r, options.device_of(rank), shape, c.activation,
                                    rows_of_experts(shape, options.routing, rank));
             }
             auto const first_row = [](size_t row) { return row == kParts ? 0 : row; };
             r.set_pass(draw(shape, options.routing, rank, 1), 1);
             r.compute_wanted(context);
             for (size_t const row : runs) {
               bool const ok = is_right(row, r, talk, context);
               for (size_t i = first_row(row); i <= row; ++i) right[size_t(rank)][i] = ok;
             }
             for (int i = 0; i < kWarmUps + options.iters; ++i) {
               for (size_t run = 0; run < runs.size(); ++run) {
                 size_t const row = runs[(run + size_t(i)) % runs.size()];
                 clock.time(row, r, cublas, talk, rank, context, latest[size_t(rank)]);
                 talk.meet();
                 for (size_t v = first_row(row); rank == 0 && i >= kWarmUps && v <= row; ++v) {
                   Reading slowest;
                   for (auto const& l : latest) {
                     if (l[v].ms > slowest.ms) slowest = l[v];
                   }
                   m.rows[v].ms.push_back(slowest.ms);
                   m.rows[v].mhz.push_back(slowest.mhz);
                 }
                 talk.meet();
               }
             }
             if (!options.fused) return true;
             r.set_pass(draw(shape, Pattern::nothing, rank, 1), 1);
             talk.meet();  // it waited for its GPU, where another rank would wait for it
             for (int i = 0; i < 12; ++i) {
               clock.time(kFused, r, cublas, talk, rank, context, latest[size_t(rank)]);
               if (rank == 0 && i > 3) m.empty.push_back(latest[0][kFused].ms);
             }
             return true;
           });
  for (auto const& of_rank : right) {
    for (size_t row = 0; row < kNumTimed; ++row) m.right[row] = m.right[row] && of_rank[row];
  }
  return m;
}

int measure(Options const& options) {
  std::string rows;
  int failures = 0;
  std::vector<NamedLayer> const layers = layers_of(options);
  if (layers.empty()) return refuse_none(options.config, options.tokens);
  for (NamedLayer const& c : layers) {
    int const ranks = options.ranks();
    ExchangeShape shape = {.ranks = ranks,
                           .max_tokens = c.tokens,
                           .hidden = c.hidden,
                           .intermediate = c.intermediate,
                           .experts = c.experts,
                           .max_top_k = c.top_k,
                           .gated = Activation{.kind = c.activation}.gated()};
    shape.transfer = options.transfer.value_or(expert_parallel::choose_transfer(shape));
    Measured const m = measure_config(options, c, shape);
    double const choices = double(c.tokens) * c.top_k;
    double const flops = (shape.gated ? 6.0 : 4.0) * choices * c.intermediate * c.hidden;
    double const across = expert_parallel::rows_across(shape, shape.transfer) +
                          expert_parallel::results_across(shape);  // there and back
    double const link_ms = 2e3 * c.tokens * c.hidden * across / expert_parallel::kLinkRate;
    double gemms_ms = 0;  // of the faster ones; 0: not timed
    double same_ms = 0;   // .. of those on the rows of the pass
    for (size_t const row : {kGemms, kCublas, kCublasGrouped}) {
      if (m.rows[row].ms.empty()) continue;
      double const ms = double(quantiles(m.rows[row].ms).median);
      gemms_ms = gemms_ms == 0 ? ms : std::min(gemms_ms, ms);
      if (row != kCublas) same_ms = same_ms == 0 ? ms : std::min(same_ms, ms);
    }
    std::printf("%s, T %d per rank, E %d, %s; the link takes %.4f ms, a pass without rows %.4f\n",
                c.name.c_str(), c.tokens, c.experts, options.text().c_str(), link_ms,
                m.empty.empty() ? 0.0 : double(quantiles(m.empty).median));
    for (size_t v = 0; v < kNumTimed; ++v) {
      if (m.rows[v].ms.empty()) continue;
      Timed const& timed = kTimed[v];
      bool const checked = m.right[v] != 0;
      failures += checked ? 0 : 1;
      Quantiles const q = quantiles(m.rows[v].ms);
      double const mhz = double(quantiles(m.rows[v].mhz).median);
      double const tflops = v >= kParts ? flops / q.median / 1e9 : 0.0;
      double const pipe = mhz > 0 ? tflops * 1e6 / (mhz * kTensorFlopPerCycle) : 0.0;
      std::string more;  // of the kernel, beside its bound
      if (timed.way == Way::fused && gemms_ms > 0) {
        bool const link = link_ms > gemms_ms;
        double const bound_ms = link ? link_ms : gemms_ms;
        char text[160];
        std::snprintf(text, sizeof text,
                      ", \"bound\": \"%s\", \"bound_ms\": %.4f, \"of_bound\": %.3f, "
                      "\"of_gemms_on_its_rows\": %.3f",
                      link ? "link" : "gemms", bound_ms, bound_ms / double(q.median),
                      same_ms / double(q.median));
        more = text;
      }
      std::printf(
          "  %-20s %-17s %8.4f ms %6.1f TFLOP/s per rank, %4.0f MHz, tensor pipe %.3f%s%s\n",
          timed.pass, timed.variant, q.median, tflops, mhz, pipe, more.c_str(),
          checked ? "" : "  WRONG BITS");
      char text[640];
      std::snprintf(
          text, sizeof text,
          "%s\n  {\"config\": \"%s\", \"shape\": [%d, %d, %d, %d, %d], \"dtype\": "
          "\"bf16\", \"gpus\": %d, \"ranks_per_gpu\": %d, \"routing\": \"%s\", \"router\": "
          "\"given\", "
          "\"round\": \"none\", \"pass\": \"%s\", \"impl\": \"%s\", \"variant\": "
          "\"%s\", \"ms\": %.4f, \"ms_p10\": %.4f, \"ms_p90\": %.4f, \"tflops\": %.1f, "
          "\"mhz\": %.0f, \"tensor_pipe\": %.3f, \"transfer\": \"%s\"%s, \"checked\": %s}",
          rows.empty() ? "" : ",", c.name.c_str(), c.tokens, c.hidden, c.intermediate, c.experts,
          c.top_k, timed.way == Way::layer ? 1 : options.gpus, options.ranks_per_gpu,
          name(options.routing), timed.pass, is_cublas(timed.way) ? "cublas" : "tessera",
          timed.variant, q.median, q.p10, q.p90, tflops, mhz, pipe, transfer_name(shape.transfer),
          more.c_str(),
          is_cublas(timed.way) ? "null"
          : checked            ? "true"
                               : "false");
      rows += text;
    }
    std::fflush(stdout);
  }
  if (!options.out.empty()) {
    int const written = write_results(
        options.out,
        {.command = options.command,
         .commit = options.commit,
         .protocol =
             "median of " + std::to_string(options.iters) + " rounds after " +
             std::to_string(kWarmUps) +
             "; a round runs everything once, in rotating order, each enqueued behind a gate that "
             "opens for all GPUs at once; times between CUDA events, of the slowest GPU; uniform "
             "random data; mhz: mean SM clock; tensor_pipe: FLOP of routed rows over what the "
             "tensor cores can do at that clock; cublas-bmm: as many rows for each expert, no "
             "activation; cublas-grouped: the rows of the pass, no activation; bound: the larger "
             "of the GEMMs without communication, the fastest of "
             "these, and the bytes over the link at 350 GB/s; of_gemms_on_its_rows: cublas-bmm "
             "left out",
         .gpus = options.gpus,
         .rows = rows});
    if (written != 0) return written;
  }
  return failures ? 1 : 0;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  Options options;
  options.command = command_line("build-cuda/bin/bench_dist_chain", argc, argv);
  std::string only;
  Arguments arguments(argc, argv);
  while (arguments.next()) {
    if (arguments.is("--check")) {
      options.check = true;
    } else if (arguments.is("--latency")) {
      options.latency = true;
    } else if (arguments.is("--lags")) {
      options.lags = true;
    } else if (arguments.is("--copies")) {
      options.copies = true;
    } else if (arguments.is("--processes")) {
      options.processes = options.nccl = true;
    } else if (arguments.takes("--nccl", options.nccl_path)) {  // a path, or "": it is found
      options.nccl = true;
    } else if (arguments.takes("--only", only)) {
      options.unfused = only == "unfused" || only == "chain";
      options.fused = only == "fused";
    } else {
      bool const known =
          arguments.takes("--gpus", options.gpus) ||
          arguments.takes("--ranks-per-gpu", options.ranks_per_gpu) ||
          arguments.takes("--iters", options.iters) ||
          arguments.takes("--config", options.config) ||
          arguments.takes("--tokens", options.tokens) ||
          arguments.takes("--routing", kRoutings, &name, options.routing) ||
          arguments.takes("--transfer", kTransfers, &tessera::expert_parallel::transfer_name,
                          options.transfer) ||
          arguments.takes("--out", options.out) || arguments.takes("--commit", options.commit);
      if (!known) return arguments.refuse();
    }
  }
  if (options.gpus < 1 || options.ranks_per_gpu < 1 || options.ranks() > tessera::kMaxRanks) {
    std::fprintf(stderr, "--gpus %d, --ranks-per-gpu %d: 1 to %d ranks\n", options.gpus,
                 options.ranks_per_gpu, tessera::kMaxRanks);
    return 2;
  }
  if (options.ranks_per_gpu > 1 && options.nccl) {
    std::fprintf(stderr, "--ranks-per-gpu: not with --nccl or --processes\n");
    return 2;
  }
  if (options.processes && !options.check) {
    std::fprintf(stderr, "--processes: with --check only\n");
    return 2;
  }
  if (!options.unfused && !options.fused) {
    std::fprintf(stderr, "--only: unfused or fused\n");
    return 2;
  }
  if (options.ranks_per_gpu > 1) prepare_shared_gpus();
  // Forked ranks must find CUDA untouched.
  if (!options.processes && !connect_gpus(options.gpus)) return 77;
  if (!options.check) {
    options.cublas = options.unfused && !options.latency && CublasGemms::installed();
    return measure(options);
  }
  int wrong = check_small(options);
  for (Transfer const transfer : kTransfers) wrong += check_repeats(options, transfer);
  return wrong + check_stalled(options) + check_killed(options) ? 1 : 0;
}

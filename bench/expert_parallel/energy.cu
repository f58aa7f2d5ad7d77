// SPDX-License-Identifier: Apache-2.0
// Where power limits the clock, time is energy: joules of a pass of the kernel over several GPUs, beside those of its
// GEMMs without communication, by our kernels and, of as many rows for every expert, by cuBLAS where it is installed,
// and of a pass without routed rows. Each way is enqueued without rests, on all GPUs at once, and measured when it has
// run for a while; then the last o is compared bit for bit with that of the single-GPU layer.
//
//   energy [--gpus P] [--seconds S] [--config NAME,NAME] [--tokens N,N] [--transfer direct|once|partial-combine]
//          [--routing random|balanced|zipf] [--only fused] [--out FILE] [--commit HASH]
//
// Exits with 77 where there are too few GPUs or the driver does not report their energy.
#include <optional>

#include "../../src/expert_parallel/plan/choose_transfer.hpp"
#include "arguments.hpp"
#include "cublas_gemms.cuh"
#include "layers.hpp"
#include "power.hpp"
#include "ranks.cuh"
#include "results.hpp"

namespace tessera::bench {
namespace {

struct Options : RankOptions {
  double seconds = 1;
  bool only_fused = false;
  bool cublas = false;               // is installed
  std::optional<Transfer> transfer;  // none: the one that the library chooses
  Pattern routing = Pattern::random;
  std::string command, out, commit, config, tokens;
};

enum class Way { gemms, cublas, fused, empty };
constexpr char const* kWayNames[] = {"gemms", "cublas-bmm", "fused", "without-rows"};

// Of one GPU.
struct Measured {
  double ms = 0, mhz = 0;  // of a pass; of its SMs
  PowerMeter::Reading power;
};

// A rank and its GEMMs by cuBLAS.
struct Passes {
  Rank& rank;
  CublasGemms const& cublas;

  void launch(Way way) const {
    switch (way) {
      case Way::gemms:
        rank.launch_up();
        rank.launch_down();
        break;
      case Way::cublas:
        cublas.run_batched();
        break;
      case Way::fused:
      case Way::empty:
        rank.launch_fused(-1);
        break;
    }
  }
};

// The host waits now and then, for less than a thousandth of the time, so that it knows where the GPU is.
void launch_many(Way way, Passes const& p, int passes, double ms) {
  int const between_waits = std::max(1, int(40 / ms));
  for (int pass = 1; pass <= passes; ++pass) {
    p.launch(way);
    if (pass % between_waits == 0) p.rank.stream().synchronize();
  }
  p.rank.stream().synchronize();
  p.rank.check_fault();
}

Measured measure_way(Options const& options, Way way, Passes const& p, int rank, Talk& talk,
                     std::vector<double>& trials, PowerMeter& meter) {
  constexpr int kTrials = 10;
  device::Stream const& stream = p.rank.stream();
  device::Stopwatch const watch(rank);
  launch_many(way, p, kTrials, 1);
  talk.meet();
  watch.start(stream);
  launch_many(way, p, kTrials, 1);
  watch.stop(stream);
  stream.synchronize();
  trials[size_t(rank)] = double(watch.ms()) / kTrials;
  talk.meet();
  // As many passes on all GPUs.
  double const ms = *std::max_element(trials.begin(), trials.end());
  int const passes = int(1e3 * options.seconds / ms);
  talk.meet();
  launch_many(way, p, passes / 3, ms);
  meter.start();
  watch.start(stream);
  launch_many(way, p, passes, ms);
  watch.stop(stream);
  stream.synchronize();
  Measured const measured = {double(watch.ms()) / passes, double(watch.mhz()), meter.stop()};
  talk.meet();
  return measured;
}

// Also those of the GPUs, in watts.
std::string row_of(NamedLayer const& layer, ExchangeShape const& shape, Pattern routing, Way way,
                   std::vector<Measured> const& gpus) {
  Measured slowest;
  double watts = 0;
  std::string each;
  for (Measured const& m : gpus) {
    if (m.ms > slowest.ms) slowest = m;
    watts += m.power.watts / double(gpus.size());
    char text[32];
    std::snprintf(text, sizeof text, "%s%.0f", each.empty() ? "" : ", ", m.power.watts);
    each += text;
  }
  double const joules = 1e-3 * watts * slowest.ms;
  PowerMeter::Reading const& power = slowest.power;
  std::printf(
      "  %-13s %8.4f ms %4.0f MHz %4.0f W (%s) %7.4f J, tensor %.1f%% DRAM %.1f%%, link %.0f "
      "%.0f\n",
      kWayNames[int(way)], slowest.ms, slowest.mhz, watts, each.c_str(), joules, power.tensor,
      power.dram, power.received, power.sent);
  std::fflush(stdout);
  char text[640];
  std::snprintf(text, sizeof text,
                "\n  {\"config\": \"%s\", \"shape\": [%d, %d, %d, %d, %d], \"dtype\": \"bf16\", "
                "\"gpus\": %d, \"routing\": \"%s\", \"router\": \"given\", \"round\": \"none\", "
                "\"pass\": \"forward-inference\", \"impl\": \"%s\", \"variant\": \"%s\", "
                "\"ms\": %.4f, \"mhz\": %.0f, \"watts\": [%s], \"joules\": %.4f, "
                "\"tensor_percent\": %.1f, \"dram_percent\": %.1f, \"link_mb_s\": [%.0f, %.0f], "
                "\"transfer\": \"%s\"},",
                layer.name.c_str(), layer.tokens, layer.hidden, layer.intermediate, layer.experts,
                layer.top_k, shape.ranks, name(routing), way == Way::cublas ? "cublas" : "tessera",
                kWayNames[int(way)], slowest.ms, slowest.mhz, each.c_str(), joules, power.tensor,
                power.dram, power.received, power.sent, transfer_name(shape.transfer));
  return text;
}

std::string measure_layer(Options const& options, Nvml const& nvml, NamedLayer const& layer) {
  ExchangeShape shape = {.ranks = options.gpus,
                         .max_tokens = layer.tokens,
                         .hidden = layer.hidden,
                         .intermediate = layer.intermediate,
                         .experts = layer.experts,
                         .max_top_k = layer.top_k,
                         .gated = Activation{.kind = layer.activation}.gated()};
  shape.transfer = options.transfer.value_or(expert_parallel::choose_transfer(shape));
  std::printf("%s, T %d per GPU, %d GPUs\n", layer.name.c_str(), layer.tokens, options.gpus);
  std::string rows;
  std::vector<double> trials(size_t(options.gpus));
  std::vector<Measured> measured(size_t(options.gpus));
  auto const ok = on_ranks(
      options, shape, layer.activation, [&](int rank, Rank& r, Talk& talk, Context const& context) {
        bool right = true;
        char bus[32];
        TESSERA_CUDA(cudaDeviceGetPCIBusId(bus, sizeof bus, rank));
        PowerMeter meter(nvml, bus);
        CublasGemms cublas;
        if (options.cublas) {
          cublas = CublasGemms(r, rank, shape, layer.activation,
                               rows_of_experts(shape, options.routing, rank));
        }
        for (Way const way : {Way::gemms, Way::cublas, Way::fused, Way::empty}) {
          if (options.only_fused && way != Way::fused) continue;
          if (way == Way::cublas && !options.cublas) continue;
          Pattern const routing = way == Way::empty    ? Pattern::nothing
                                  : way == Way::cublas ? Pattern::balanced
                                                       : options.routing;
          r.set_pass(draw(shape, routing, rank, 1), 1);
          if (way == Way::fused) {
            r.compute_wanted(context);
            r.poison();
          }
          talk.meet();
          if (way == Way::gemms) {  // what they read and where it lies
            r.launch_chain([](Part) {});
            r.stream().synchronize();
            r.check_fault();
            talk.meet();
          }
          measured[size_t(rank)] =
              measure_way(options, way, {r, cublas}, rank, talk, trials, meter);
          if (way == Way::fused) right = r.is_right(true);
          talk.meet();
          if (rank == 0) rows += row_of(layer, shape, routing, way, measured);
          talk.meet();
        }
        return right;
      });
  if (!all_of(ok)) {
    std::fprintf(stderr, "%s: wrong bits\n", layer.name.c_str());
    std::exit(1);
  }
  return rows;
}

int measure(Options const& options) {
  Nvml const nvml;
  char bus[32];
  TESSERA_CUDA(cudaDeviceGetPCIBusId(bus, sizeof bus, 0));
  if (nvml.millijoules(nvml.device(bus)) == 0) {
    std::printf(
        "skipped: the driver does not report the energy of GPU 0; run on a data-centre GPU\n");
    return 77;
  }
  std::vector<NamedLayer> const layers = named_layers(options.config, options.tokens);
  if (layers.empty()) return refuse_none(options.config, options.tokens);
  std::string rows;
  for (NamedLayer const& layer : layers) rows += measure_layer(options, nvml, layer);
  if (!rows.empty()) rows.pop_back();
  if (options.out.empty()) return 0;
  return write_results(
      options.out,
      {.command = options.command,
       .commit = options.commit,
       .protocol =
           "each way is enqueued without rests on all GPUs at once, a third of the passes before "
           "the "
           "measurement; ms: mean, of the slowest GPU, mhz: its mean SM clock; watts: of each "
           "GPU, between steps of the driver's counter of energy; joules: of one GPU and "
           "pass; tensor_percent, dram_percent: busy, link_mb_s: received and sent, by the "
           "driver's counters, of the slowest GPU, -1: not known; uniform random data; o of the "
           "fused pass "
           "has the bits of the single-GPU layer, with partial combine those of the same sums",
       .gpus = options.gpus,
       .rows = rows});
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  Options options;
  options.command = command_line("build-cuda/bin/bench_dist_energy", argc, argv);
  std::string only;
  Arguments arguments(argc, argv);
  while (arguments.next()) {
    bool const known =
        arguments.takes("--gpus", options.gpus) || arguments.takes("--seconds", options.seconds) ||
        arguments.takes("--config", options.config) ||
        arguments.takes("--tokens", options.tokens) ||
        arguments.takes("--routing", kRoutings, &name, options.routing) ||
        arguments.takes("--transfer", kTransfers, &tessera::expert_parallel::transfer_name,
                        options.transfer) ||
        arguments.takes("--only", only) || arguments.takes("--out", options.out) ||
        arguments.takes("--commit", options.commit);
    if (!known) return arguments.refuse();
  }
  if (!only.empty() && only != "fused") {
    std::fprintf(stderr, "--only %s: fused\n", only.c_str());
    return 2;
  }
  options.only_fused = !only.empty();
  if (options.gpus < 1 || options.gpus > tessera::kMaxRanks || options.seconds <= 0) {
    std::fprintf(stderr, "--gpus %d: 1 to %d; --seconds %g: more than 0\n", options.gpus,
                 tessera::kMaxRanks, options.seconds);
    return 2;
  }
  if (!connect_gpus(options.gpus)) return 77;
  options.cublas = !options.only_fused && CublasGemms::installed();
  return measure(options);
}

// SPDX-License-Identifier: Apache-2.0
#include "cli/cluster_assumptions.hpp"

#include <fmt/format.h>

#include <string_view>

namespace tessera::cli {
namespace {

constexpr char kMeasured[] = "measured", kScaled[] = "scaled", kAssumed[] = "assumed";

std::string tera(double rate, char const* unit) {
  return fmt::format("{:.3g} T{}", rate * 1e-12, unit);
}

}  // namespace

std::vector<Assumption> assumptions_of(TrainingModel const& model, Cluster const& cluster,
                                       RateSet const& set, GpuRates const& gpu) {
  bool const measured = set.file != nullptr;
  bool const h200 = std::string_view(gpu.name) == "h200";
  char const* const basis = !measured ? kAssumed : h200 ? kMeasured : kScaled;
  std::string const file = measured ? set.file : "";
  char const* const flops = basis == kScaled ? ", 630/650 of an H200's" : "";
  char const* const bytes = basis == kScaled ? ", 2.4/3.4 of an H200's" : "";
  std::vector<Assumption> list = {
      {"GEMMs", basis, tera(gpu.dense, "FLOP/s") + flops + ", projections and head alike", file},
      {"attention", basis,
       tera(gpu.attention, "FLOP/s") + flops + ", " + set.attention +
           ", forward and backward together",
       file},
      {"elementwise", basis, "40 rows of d per token at " + tera(gpu.elementwise, "B/s") + bytes,
       file},
      {"copies", basis,
       "of sharding, beyond what runs beside them: 14 bytes of a parameter at " +
           tera(gpu.copies, "B/s") + bytes,
       file},
      {"optimizer", basis,
       "AdamW and clipping, 36 bytes of a parameter at " + tera(gpu.optimizer, "B/s") + bytes,
       file},
      {"NCCL", measured ? kMeasured : kAssumed,
       fmt::format("{:.0f} GB/s of a rank within a host{}", gpu.link * 1e-9,
                   measured ? ", beside kernels, on two H200" : ", as its all-reduce alone"),
       file}};
  auto const assume = [&](char const* of, std::string text) {
    list.push_back({of, kAssumed, std::move(text), ""});
  };
  if (cluster.gpus > 2 || cluster.hosts > 1)
    assume("NCCL", "more GPUs send at the rate of two; no multicast");
  if (cluster.hosts > 1) {
    assume("network",
           fmt::format(
               "{:.0f} GB/s of a GPU between hosts, 400 Gb/s less a tenth, a port for each GPU",
               gpu.network * 1e-9));
    assume("stragglers", "steps over several hosts take 1.02 to 1.06 times as long");
  }
  assume("overlap",
         "layers are gathered and reduced beside the compute of others; the first and the last "
         "of a step are covered by nothing");
  list.push_back({"gaps", measured ? kMeasured : kAssumed,
                  fmt::format("a step takes {} times its parts", set.slowdown), file});
  assume("experts", "times grow with T beyond 0.10 ms; 36 % of a layer is forward");
  if (set.logits_rows > 0) {
    list.push_back({"router", basis,
                    fmt::format("the model's own: top-k, counts and losses, its GEMMs {}counted",
                                set.router_gemms ? "" : "not "),
                    file});
  }
  assume("routing", "balanced: no expert is much fuller than others");
  assume(
      "memory",
      "16 bytes of a parameter sharded, 10 of a layer's gathered, 3 GiB for CUDA and NCCL; neither "
      "fragmentation nor what the kernels of one layer work in, which grows with T");
  if (cluster.expert_parallel) {
    assume(
        "exchange",
        "rows of x and y, of d in bf16, sent five times a step, beside nothing; bench/end_to_end "
        "does not train so");
  }
  if (cluster.sharding == Sharding::hsdp && cluster.hosts > 1) {
    assume("sharding",
           "bench/end_to_end shards over all GPUs; hsdp needs a mesh of two dimensions");
  }
  if (model.heads != model.kv_heads || model.hidden != 1536) {
    assume("model", "kernels of other sizes are as fast as those of d 1536, 12 heads");
  }
  assume("left out",
         "data loading, checkpoints, evaluation, failures; biases, norms of queries and keys");
  return list;
}

bool has_published(Cluster const& cluster, GpuRates const& gpu) {
  return cluster.hosts * cluster.gpus == 64 && std::string_view(gpu.name) == "h100";
}

}  // namespace tessera::cli

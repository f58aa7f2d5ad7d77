// SPDX-License-Identifier: Apache-2.0
#include "cli/plan_cluster.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/cluster_report.hpp"
#include "cli/output.hpp"
#include "lm/text.hpp"

namespace tessera::cli {
namespace {

constexpr std::int64_t kMaxGpus = 1 << 16;  // of a host, and hosts
constexpr std::int64_t kMaxSize = 1 << 24;

constexpr std::string_view kNeeded[] = {"--hidden", "--intermediate", "--experts",   "--top-k",
                                        "--layers", "--heads",        "--vocabulary"};
constexpr std::string_view kModel[] = {"--layers",    "--heads",      "--kv-heads",
                                       "--head-size", "--vocabulary", "--tied"};
constexpr std::string_view kTraining[] = {"--gpu",           "--sharding",  "--expert-parallel",
                                          "--context",       "--sequences", "--recompute",
                                          "--keep-gathered", "--impl",      "--rates"};

bool was_given(CLI::App const& command, std::string_view name) {
  return command.get_option(std::string(name))->count() > 0;
}

// The two numbers of HOSTSxGPUS.
Cluster read_cluster(std::string const& text) {
  Cluster cluster;
  auto const number = [](char const* begin, char const* end, std::int64_t& value) {
    auto const [stop, error] = std::from_chars(begin, end, value);
    return error == std::errc{} && stop == end && value >= 1 && value <= kMaxGpus;
  };
  auto const cross = text.find('x');
  char const* const begin = text.data();
  if (cross == std::string::npos || !number(begin, begin + cross, cluster.hosts) ||
      !number(begin + cross + 1, begin + text.size(), cluster.gpus)) {
    throw CommandError(fmt::format(
        "--cluster '{}': must be HOSTSxGPUS, two numbers in [1, {}]; write 8x8 for 8 hosts of 8",
        text, kMaxGpus));
  }
  return cluster;
}

}  // namespace

void ClusterFlags::add_to(CLI::App& command) {
  auto const at_least_one = number_in(1, static_cast<double>(kMaxSize));
  auto* const group = command.add_option_group(kClusterGroup);
  group->add_option("--cluster", cluster_,
                    "HOSTSxGPUS: predict time and memory of training the whole model");
  group->add_option("--gpu", gpu_, "h100 h200")->capture_default_str();
  group
      ->add_option("--sharding", sharding_,
                   "of the state: fsdp (over all GPUs) hsdp (within a host)")
      ->capture_default_str();
  group->add_flag("--expert-parallel", expert_parallel_,
                  "spread experts over the GPUs of a host, with --sharding hsdp");
  group->add_option("--layers", layers_, "with --hf fewer than the model has")->check(at_least_one);
  group->add_option("--heads", heads_, "of queries")->check(at_least_one);
  group->add_option("--kv-heads", kv_heads_, "default: --heads")->check(at_least_one);
  group->add_option("--head-size", head_size_, "default: --hidden / --heads")->check(at_least_one);
  group->add_option("--vocabulary", vocabulary_)->check(at_least_one);
  group->add_flag("--tied", tied_, "the head is the embedding");
  group->add_option("--context", context_, "tokens of a sequence")
      ->check(at_least_one)
      ->capture_default_str();
  group->add_option("--sequences", sequences_, "of a GPU (default: the most that fit)")
      ->check(at_least_one);
  group->add_flag("--recompute", recompute_, "blocks run again in backward");
  group->add_flag("--keep-gathered", keep_gathered_,
                  "layers stay gathered in bf16 between forward and backward");
  group->add_option("--impl", impl_,
                    "one implementation of the experts (default: all with a time), or no-experts");
  group->add_option("--rates", rates_, "before-runs first-run balanced-run (default: the newest)");
}

bool ClusterFlags::given(CLI::App const& command) { return was_given(command, "--cluster"); }

void ClusterFlags::refuse_without_cluster(CLI::App const& command) const {
  for (auto const names :
       {std::span<std::string_view const>(kModel), std::span<std::string_view const>(kTraining)}) {
    for (std::string_view const name : names) {
      if (was_given(command, name)) {
        throw CommandError(fmt::format(
            "{} without --cluster: it is of a training step; add --cluster HOSTSxGPUS", name));
      }
    }
  }
}

Cluster ClusterFlags::cluster(std::int64_t experts) const {
  Cluster cluster = read_cluster(cluster_);
  if (sharding_ != "fsdp" && sharding_ != "hsdp") {
    throw CommandError(
        fmt::format("--sharding {}: not known; choose one of: fsdp hsdp", sharding_));
  }
  cluster.sharding = sharding_ == "fsdp" ? Sharding::fsdp : Sharding::hsdp;
  cluster.expert_parallel = expert_parallel_;
  if (!expert_parallel_) return cluster;
  if (cluster.sharding == Sharding::fsdp) {
    throw CommandError(
        "--expert-parallel with --sharding fsdp: experts spread within a host have a copy on every "
        "host; add --sharding hsdp");
  }
  if (cluster.gpus < 2 || experts % cluster.gpus != 0) {
    throw CommandError(
        fmt::format("--expert-parallel: {} experts on {} GPUs of a host; take 2 or more GPUs whose "
                    "number divides "
                    "that of the experts",
                    experts, cluster.gpus));
  }
  return cluster;
}

TrainingModel ClusterFlags::model_of_flags(MoeShape const& shape, CLI::App const& command) const {
  for (std::string_view const name : kNeeded) {
    if (was_given(command, name)) continue;
    throw CommandError(
        fmt::format("--cluster without {}: a model needs {}; give them, or --hf config.json", name,
                    lm::joined(kNeeded, " ")));
  }
  TrainingModel model{.layers = layers_,
                      .hidden = shape.hidden,
                      .heads = heads_,
                      .kv_heads = kv_heads_ == 0 ? heads_ : kv_heads_,
                      .head_size = head_size_,
                      .intermediate = shape.intermediate,
                      .experts = shape.experts,
                      .top_k = shape.top_k,
                      .vocabulary = vocabulary_,
                      .tied = tied_};
  for (auto const& [name, size] : {std::pair{"--hidden", model.hidden},
                                   {"--intermediate", model.intermediate},
                                   {"--experts", model.experts},
                                   {"--top-k", model.top_k}}) {
    if (size < 1 || size > kMaxSize) {
      throw CommandError(fmt::format("{} {}: must be in [1, {}]", name, size, kMaxSize));
    }
  }
  if (model.head_size == 0) {
    if (model.hidden % model.heads != 0) {
      throw CommandError(fmt::format("--heads {}: does not divide --hidden {}; give --head-size",
                                     model.heads, model.hidden));
    }
    model.head_size = model.hidden / model.heads;
  }
  if (model.top_k > model.experts) {
    throw CommandError(
        fmt::format("--top-k {}: more than --experts {}; lower it", model.top_k, model.experts));
  }
  if (model.heads % model.kv_heads != 0) {
    throw CommandError(
        fmt::format("--kv-heads {}: must divide --heads {}", model.kv_heads, model.heads));
  }
  return model;
}

TrainingModel ClusterFlags::model(std::optional<huggingface::Model> const& config,
                                  MoeShape const& shape, CLI::App const& command) const {
  if (!config) return model_of_flags(shape, command);
  for (std::string_view const name : kModel) {
    if (name != "--layers" && was_given(command, name)) {
      throw CommandError(
          fmt::format("{} with --hf: config.json fixes it; leave out one of them", name));
    }
  }
  bool const all = static_cast<std::int64_t>(config->moe_layers.size()) == config->layers;
  if (!config->heads || !all || config->shared_intermediate > 0) {
    throw CommandError(
        fmt::format("--cluster with --hf: {} has {}; the training program has grouped-query "
                    "attention and routed "
                    "experts in every layer: describe a model like that by flags",
                    config->model_type,
                    !config->heads ? "another attention"
                    : !all         ? "layers without experts"
                                   : "shared experts"));
  }
  if (layers_ > config->layers) {
    throw CommandError(
        fmt::format("--layers {}: the model has {}; take at most those", layers_, config->layers));
  }
  MoeShape const& s = config->moe.shape;
  return {.layers = layers_ == 0 ? config->layers : layers_,
          .hidden = s.hidden,
          .heads = config->heads->query,
          .kv_heads = config->heads->key_value,
          .head_size = config->heads->dim,
          .intermediate = s.intermediate,
          .experts = s.experts,
          .top_k = s.top_k,
          .vocabulary = config->vocabulary,
          .tied = config->parameters.head == 0};
}

int ClusterFlags::plan(std::optional<huggingface::Model> const& config, MoeShape const& shape,
                       CLI::App const& command, bool json) const {
  ClusterPlan plan;
  plan.model = model(config, shape, command);
  plan.cluster = cluster(plan.model.experts);
  plan.set = rates_.empty() ? &rate_sets().back() : &rate_set(rates_);
  plan.gpu = &gpu_rates(*plan.set, gpu_);
  plan.batch = {.sequences = sequences_,
                .context = context_,
                .recompute = recompute_,
                .keep_gathered = keep_gathered_};
  ClusterModel const formulas(plan.model, plan.cluster, *plan.set, *plan.gpu);
  std::vector<Experts> all = formulas.experts();
  if (impl_ == ClusterModel::no_experts().impl) all = {ClusterModel::no_experts()};
  std::string known;
  for (Experts const& experts : all) {
    known += (known.empty() ? "" : " ") + experts.impl;
    if (!impl_.empty() && impl_ != experts.impl) continue;
    ClusterRow row;
    row.experts = experts;
    row.batch = plan.batch;
    row.largest = formulas.largest(experts.impl, plan.batch);
    if (sequences_ == 0) row.batch.sequences = std::max<std::int64_t>(1, row.largest);
    row.saved = formulas.saved_by_layer(experts.impl);
    row.fits = row.batch.sequences <= row.largest;
    row.prediction = formulas.predict(experts, row.batch);
    plan.rows.push_back(row);
  }
  if (plan.rows.empty()) {
    throw CommandError(
        fmt::format("--impl {}: has no time at this shape; choose one of: {}", impl_, known));
  }
  if (json) {
    print_json(cluster_plan_json(plan));
  } else {
    print_text(cluster_plan_text(plan));
  }
  if (plan.rows.front().fits) return kOk;
  print_note("tessera: " + too_large(plan) + '\n');
  return kCheckFailed;
}

}  // namespace tessera::cli

// SPDX-License-Identifier: Apache-2.0
#include "cli/cluster.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

namespace tessera::cli {
namespace {

constexpr double kLossRows = 4096;  // of logits that exist at a time
constexpr double kElementwiseRows =
    40;  // rows of d in bf16 that a token's elementwise kernels read and write
// Bytes of a gathered parameter that are copied: bf16 twice into place, gradients to be reduced.
constexpr double kCopyBytes = 14;
constexpr double kOptimizerBytes = 36;  // of a parameter: AdamW reads and writes 28, clipping 8

double real(std::int64_t value) { return static_cast<double>(value); }

// The layer that calls itself tessera in results of layers; in a step it is this or, behind the model's router,
// `tessera`.
constexpr std::string_view kTesseraLayer = "tessera-layer";
constexpr std::string_view kNoExperts = "no-experts";

bool keeps_little(std::string_view impl) {
  return impl == "tessera" || impl == kTesseraLayer || impl == "sonicmoe" || impl == "liger-triton";
}

}  // namespace

double TrainingModel::expert_parameters() const noexcept {
  return 3.0 * real(experts) * real(hidden) * real(intermediate);
}

double TrainingModel::layer_parameters() const noexcept {
  double const attention = 2.0 * real(hidden) * real(head_size) * real(heads + kv_heads);
  return attention + expert_parameters() + real(experts) * real(hidden) + 2.0 * real(hidden);
}

double TrainingModel::parameters() const noexcept {
  double const tables = real(vocabulary) * real(hidden) * (tied ? 1 : 2);
  return real(layers) * layer_parameters() + tables + real(hidden);
}

double ClusterModel::saved_by_experts(std::string const& impl) const {
  double const d = real(model_.hidden), n = real(model_.intermediate), k = real(model_.top_k);
  if (impl == kNoExperts) return 2 * d;
  if (keeps_little(impl)) return 2 * d + 4 * k * n;
  if (impl == "scattermoe") return 2 * d + 2 * k * d + 8 * k * n;
  return 2 * d + 6 * k * d + 8 * k * n;  // grouped_mm of torch and transformers
}

double ClusterModel::saved_by_layer(std::string const& impl) const {
  double const d = real(model_.hidden), size = real(model_.head_size);
  // x and its norm, q, k, v, rotated q and k, o; log-sum-exp. The norm that experts read is counted with them.
  double attention = 2 * (2 * d + size * real(2 * model_.heads + 2 * model_.kv_heads) +
                          size * real(model_.heads)) +
                     4 * real(model_.heads);
  if (set_.norm_of_experts) attention += 2 * d;
  if (impl != kTesseraLayer) attention += 2 * 4 * real(model_.experts);  // logits, their softmax
  return attention + saved_by_experts(impl);
}

double ClusterModel::sharded() const {
  double const shards =
      cluster_.sharding == Sharding::fsdp ? cluster_.ranks() : real(cluster_.gpus);
  return model_.parameters() / shards;
}

double ClusterModel::gathered() const {
  return model_.layer_parameters() - (cluster_.expert_parallel ? model_.expert_parameters() : 0);
}

PeakBytes ClusterModel::peak(std::string const& impl, Batch const& batch) const {
  double const layers = real(model_.layers), d = real(model_.hidden), v = real(model_.vocabulary);
  double const kept =
      batch.recompute ? layers * 2 * d + saved_by_layer(impl) : layers * saved_by_layer(impl);
  PeakBytes peak;
  peak.state = 16 * sharded();
  peak.gathered = (6 + 2 * (batch.keep_gathered ? layers : 2)) * gathered();
  peak.saved = batch.tokens() * kept;
  peak.loss = 3 * kLossRows * v * 4 + 8 * v * d;
  peak.runtime = 3 * kGib;
  if (cluster_.expert_parallel) {
    peak.gathered += 10 * model_.expert_parameters() / real(cluster_.gpus);
    peak.exchange = batch.tokens() * 2 * real(model_.top_k) * 2 * d;  // rows of x and of y
  }
  return peak;
}

std::int64_t ClusterModel::largest(std::string const& impl, Batch batch) const {
  batch.sequences = 0;
  double const without = peak(impl, batch).total();
  batch.sequences = 1;
  double const each = peak(impl, batch).total() - without;
  return static_cast<std::int64_t>(std::max(0.0, std::floor((gpu_.memory - without) / each)));
}

void ClusterModel::exchanges(StepTerms& terms, double tokens) const {
  double const p = gathered(), g = real(cluster_.gpus), hosts = real(cluster_.hosts);
  double const within = (g - 1) / g, between = (hosts - 1) / hosts;
  if (cluster_.sharding == Sharding::hsdp) {
    terms.gather = 2 * p * within / gpu_.link;
    terms.reduce = 4 * p * within / gpu_.link;
    if (cluster_.hosts > 1) {
      terms.reduce += 4 * model_.layer_parameters() / g * 2 * between / gpu_.network;
    }
  } else {  // a ring for each GPU of a host; it leaves the host through that GPU's port
    double const share = (cluster_.ranks() - 1) / cluster_.ranks();
    double const rate = cluster_.hosts > 1 ? std::min(gpu_.link, g * gpu_.network) : gpu_.link;
    terms.gather = 2 * p * share / rate;
    terms.reduce = 4 * p * share / rate;
  }
  if (cluster_
          .expert_parallel) {  // forward sends x and y; backward x, the gradient of y and that of x
    double const rows = tokens * real(model_.top_k) * 2 * real(model_.hidden);
    terms.exchange = real(model_.layers) * 5 * rows * within / gpu_.link;
  }
}

Prediction ClusterModel::predict(Experts const& experts, Batch const& batch) const {
  double const tokens = batch.tokens(), d = real(model_.hidden), v = real(model_.vocabulary),
               layers = real(model_.layers), size = real(model_.head_size);
  StepTerms terms;
  terms.projections =
      layers * 6 * tokens * 2 * d * size * real(model_.heads + model_.kv_heads) / gpu_.dense;
  terms.attention =
      layers * 3.5 * 2 * tokens * real(batch.context) * real(model_.heads) * size / gpu_.attention;
  double const local = gathered() + (model_.layer_parameters() - gathered()) / real(cluster_.gpus);
  terms.elementwise = layers * (tokens * d * 2 * kElementwiseRows / gpu_.elementwise +
                                local * kCopyBytes / gpu_.copies);
  double const ms =
      experts.slower * (kExpertsFixedMs + (experts.ms - kExpertsFixedMs) * tokens / experts.tokens);
  terms.experts = experts.impl == kNoExperts ? 0 : layers * ms * 1e-3;
  if (!experts.own_router) {
    terms.router = layers * tokens * real(model_.experts) * 4 * set_.logits_rows / gpu_.elementwise;
  }
  terms.head = 6 * tokens * v * d / gpu_.dense + 4 * tokens * v * 2 / gpu_.elementwise;
  terms.optimizer = sharded() * kOptimizerBytes / gpu_.optimizer;
  exchanges(terms, tokens);

  double const layer =
      (terms.projections + terms.attention + terms.elementwise + terms.experts + terms.router) /
      layers;
  double const sent = terms.exchange / layers / 5;
  double const forward = kForwardShare * layer + 2 * sent;
  double backward = (1 - kForwardShare) * layer + 3 * sent;
  if (batch.recompute) backward += forward;
  double const both = std::max(forward, terms.gather) +
                      std::max(backward, (batch.keep_gathered ? 0 : terms.gather) + terms.reduce);
  Prediction prediction;
  prediction.seconds =
      set_.slowdown * (layers * both + terms.head + terms.optimizer + terms.gather + terms.reduce);
  prediction.terms = terms;
  prediction.peak = peak(experts.impl, batch);
  return prediction;
}

Experts ClusterModel::known(ExpertsTime const& time, std::string const& impl, double work) const {
  bool const h100 = std::string_view(gpu_.name) == "h100";
  bool const own = h100 && set_.layer_h100 && time.h100_ms > 0;
  double slower = 1;  // than an H200
  if (h100 && !own) {
    slower = gpu_rates(set_, "h200").dense / gpu_.dense;
    if (set_.layer_h100) {  // as Tessera's layer of the same shape
      for (ExpertsTime const& other : experts_times()) {
        if (std::string_view(other.config) == time.config && other.h100_ms > 0) {
          slower = other.h100_ms / other.h200_ms;
        }
      }
    }
  }
  Experts known{.impl = impl,
                .ms = work * (own ? time.h100_ms : time.h200_ms),
                .slower = slower,
                .tokens = real(time.tokens),
                .measured = time.measured && work == 1 && (own || !h100),
                .source = own ? kLayerH100File : time.source,
                .own_router = impl == kTesseraLayer};
  if (h100 && !own)
    known.source += fmt::format(", an H100 taking {:.3f} of an H200's time", slower);
  if (work != 1) known.source += fmt::format(", as many FLOP/s as at {}", time.config);
  return known;
}

Experts ClusterModel::no_experts() {
  return {.impl = std::string(kNoExperts),
          .ms = 0,
          .slower = 1,
          .tokens = 1,
          .measured = true,
          .source = "none are computed",
          .own_router = false};
}

std::vector<Experts> ClusterModel::experts() const {
  auto const is = [&](ExpertsTime const& t) {
    return t.hidden == model_.hidden && t.intermediate == model_.intermediate &&
           t.experts == model_.experts && t.top_k == model_.top_k;
  };
  auto const both = [&](std::vector<Experts>& list, ExpertsTime const& time, double work) {
    if (set_.file != nullptr) list.push_back(known(time, std::string(kTesseraLayer), work));
    list.push_back(known(time, "tessera", work));
  };
  std::vector<Experts> list;
  ExpertsTime const* nearest = nullptr;
  double least = 0;
  for (ExpertsTime const& time : experts_times()) {
    bool const tessera = std::string_view(time.impl) == "tessera";
    if (is(time)) {
      if (tessera) {
        both(list, time, 1);
      } else {
        list.push_back(known(time, time.impl, 1));
      }
    }
    if (!tessera) continue;
    double const apart = std::abs(std::log(real(time.hidden) / real(model_.hidden))) +
                         std::abs(std::log(real(time.intermediate) / real(model_.intermediate)));
    if (nearest == nullptr || apart < least) nearest = &time, least = apart;
  }
  if (!list.empty()) return list;
  auto const work = [](std::int64_t hidden, std::int64_t intermediate, std::int64_t top_k) {
    return real(hidden) * real(intermediate) * real(top_k);
  };
  both(list, *nearest,
       work(model_.hidden, model_.intermediate, model_.top_k) /
           work(nearest->hidden, nearest->intermediate, nearest->top_k));
  return list;
}

}  // namespace tessera::cli

// SPDX-License-Identifier: Apache-2.0
#include "lm/trainer.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numbers>
#include <numeric>

#include "lm/adamw.hpp"
#include "lm/error.hpp"
#include "lm/evaluation.hpp"
#include "tessera/balance.hpp"

namespace tessera::lm {

namespace {

double now() {
  auto const time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(time).count();
}

// Estimates what a step holds beyond parameters, to the first order: attention probabilities, the residual stream's
// copies, projections and the experts' rows.
double activation_bytes(TrainingOptions const& o) {
  ModelConfig const& c = o.model;
  auto const tokens = static_cast<double>(o.batch) * static_cast<double>(c.context);
  double const per_token =
      static_cast<double>(c.heads * c.context) + 5 * static_cast<double>(c.hidden) +
      2 * static_cast<double>(c.qkv_width()) + 2 * static_cast<double>(c.top_k * c.intermediate);
  return sizeof(float) * tokens * static_cast<double>(c.layers) * per_token;
}

}  // namespace

void require_memory(TrainingOptions const& options) {
  double const have =
      static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  double const want = activation_bytes(options) +
                      4.0 * sizeof(float) * static_cast<double>(parameter_count(options.model));
  if (want <= have) return;
  throw InputError(
      fmt::format("training would take {:.1f} GB of the machine's {:.1f}; lower --batch, --context "
                  "or the sizes",
                  want * 1e-9, have * 1e-9));
}

ExpertLoad expert_load(std::span<std::int32_t const> counts, std::int64_t layers) {
  std::size_t const experts = counts.size() / static_cast<std::size_t>(layers);
  ExpertLoad load;
  for (std::size_t first = 0; first < counts.size(); first += experts) {
    LoadStatistics const layer = load_statistics(counts.subspan(first, experts));
    load.max_over_mean += layer.max_over_mean / static_cast<double>(layers);
    load.coefficient_of_variation += layer.coefficient_of_variation / static_cast<double>(layers);
    load.idle += layer.empty;
  }
  return load;
}

Trainer::Trainer(Context const& context, TrainingState& state, Corpus const& corpus)
    : context_(context),
      state_(state),
      corpus_(corpus),
      model_(context, state.options.model),
      windows_(state.options.batch, state.options.model.context),
      gradients_(state.parameters.size()) {
  require_enough(corpus, state.options.model.context);
}

double Trainer::tokens_per_second() const noexcept {
  auto const tokens =
      static_cast<double>(steps_here_ * state_.options.batch * state_.options.model.context);
  return training_seconds_ > 0 ? tokens / training_seconds_ : 0;
}

std::vector<float> Trainer::load_snapshot() const {
  auto const counts = model_.expert_counts();
  auto const experts = static_cast<std::size_t>(state_.options.model.experts);
  std::vector<float> load;
  for (std::size_t first = 0; first < counts.size(); first += experts) {
    auto const layer = counts.subspan(first, experts);
    auto const total = std::accumulate(layer.begin(), layer.end(), std::int64_t{0});
    for (std::int32_t const count : layer) {
      load.push_back(total == 0 ? 0.0f
                                : static_cast<float>(count) * static_cast<float>(experts) /
                                      static_cast<float>(total));
    }
  }
  return load;
}

void Trainer::step() {
  TrainingOptions const& o = state_.options;
  draw_batch(corpus_.train, o.seed, state_.step, o.batch, o.model.context, windows_);
  RoundingOptions const rounding{.rounding = o.rounding,
                                 .tile = o.tile,
                                 .seed = o.seed,
                                 .step = static_cast<std::uint64_t>(state_.step)};
  double const loss = model_.train(state_.parameters, windows_.batch(o.batch), rounding,
                                   {.balance = o.balance, .z = o.z_loss}, gradients_);
  if (!std::isfinite(loss)) {
    throw EnvironmentError(
        fmt::format("the loss of step {} is not finite; train with a lower --lr", state_.step + 1));
  }
  std::int64_t const next = state_.step + 1;
  adamw_step(context_, {}, model_.layout(), next,
             learning_rate(o.rate, o.warmup, o.schedule_span(), next), gradients_,
             state_.parameters, state_.moments);
  state_.step = next;
  state_.history.loss.push_back(static_cast<float>(loss / std::numbers::ln2));
  if (has_selection_bias(o.model)) model_.update_selection_bias(o.bias_rate, state_.parameters);
  load_ = expert_load(model_.expert_counts(), o.model.layers);
  state_.history.balance.push_back(static_cast<float>(load_.max_over_mean));
  if (next % History::kLoadEvery == 0) {
    auto const load = load_snapshot();
    state_.history.expert_load.insert(state_.history.expert_load.end(), load.begin(), load.end());
  }
}

double Trainer::evaluate() {
  return model_bits_per_byte(model_, state_.parameters,
                             {corpus_.held_out, kEvaluationWindows, state_.options.batch})
      .value();
}

Progress Trainer::progress(bool evaluated) const {
  History const& history = state_.history;
  double const per_step = training_seconds_ / static_cast<double>(steps_here_);
  return {.step = state_.step,
          .steps = state_.options.steps,
          .loss = history.loss.back(),
          .tokens_per_second = tokens_per_second(),
          .load = load_,
          .seconds_left = per_step * static_cast<double>(state_.options.steps - state_.step),
          .evaluated = evaluated,
          .held_out = history.held_out.empty() ? 0.0 : history.held_out.back()};
}

RunEnd Trainer::run(RunOptions const& options) {
  double const begin = now();
  RunEnd end = RunEnd::finished;
  while (state_.step < state_.options.steps) {
    double const before = now();
    step();
    ++steps_here_;
    training_seconds_ += now() - before;
    bool const evaluates = state_.step % state_.options.eval_every == 0;
    if (evaluates) state_.history.held_out.push_back(static_cast<float>(evaluate()));
    if (options.report) {
      Progress report = progress(evaluates);
      double const left = std::max(options.seconds - (now() - begin), 0.0);
      if (options.seconds > 0) report.seconds_left = std::min(report.seconds_left, left);
      options.report(report);
    }
    if (options.stop != nullptr && options.stop->load()) {
      end = RunEnd::stopped;
      break;
    }
    if (options.seconds > 0 && now() - begin >= options.seconds) {
      end = RunEnd::out_of_time;
      break;
    }
    bool const last = state_.step == state_.options.steps;
    if (!last && options.save && state_.step % options.save_every == 0) options.save();
  }
  if (options.save) options.save();
  return end;
}

}  // namespace tessera::lm

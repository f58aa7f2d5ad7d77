// SPDX-License-Identifier: Apache-2.0
#include "lm/adamw.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "lm/simd.hpp"

namespace tessera::lm {

namespace {

constexpr std::int64_t kBlock = 1 << 14;

struct Factors {
  float keep1, add1, keep2, add2;     // of the moments
  float correction1, correction2;     // 1 / (1 - b^s)
  float rate, epsilon, decay, scale;  // scale: of the gradient
};

TESSERA_LM_SIMD void update(std::int64_t count, Factors f, float const* gradient, float* parameter,
                            float* first, float* second) {
  for (std::int64_t i = 0; i < count; ++i) {
    float const g = f.scale * gradient[i];
    first[i] = f.keep1 * first[i] + f.add1 * g;
    second[i] = f.keep2 * second[i] + f.add2 * (g * g);
    float const denominator = std::sqrt(second[i] * f.correction2) + f.epsilon;
    float const step = first[i] * f.correction1 / denominator + f.decay * parameter[i];
    parameter[i] -= f.rate * step;
  }
}

TESSERA_LM_SIMD double block_squares(std::int64_t count, float const* values) {
  return lane_sum(count, [&](std::int64_t i) {
    auto const value = static_cast<double>(values[i]);
    return value * value;
  });
}

// A run of parameters with one rule for decay, at most kBlock long.
struct Run {
  std::int64_t offset, count;
  bool decays;
};

std::vector<Run> runs_of(ParameterLayout const& layout) {
  std::vector<Run> runs;
  for (NamedSlice const& slice : layout.slices()) {
    if (slice.role == Role::selection_bias) continue;
    for (std::int64_t done = 0; done < slice.size; done += kBlock) {
      runs.push_back(
          {slice.offset + done, std::min(kBlock, slice.size - done), slice.role == Role::weight});
    }
  }
  return runs;
}

}  // namespace

double global_norm(Context const& context, std::span<float const> values) {
  auto const count = static_cast<std::int64_t>(values.size());
  std::vector<double> partials(static_cast<std::size_t>((count + kBlock - 1) / kBlock));
  context.parallel_for(static_cast<std::int64_t>(partials.size()), [&](std::int64_t block) {
    std::int64_t const first = block * kBlock;
    partials[static_cast<std::size_t>(block)] =
        block_squares(std::min(kBlock, count - first), values.data() + first);
  });
  double sum = 0;
  for (double const partial : partials) sum += partial;
  return std::sqrt(sum);
}

double adamw_step(Context const& context, AdamW const& options, ParameterLayout const& layout,
                  std::int64_t step, double rate, std::span<float const> gradients,
                  std::span<float> parameters, Moments& moments) {
  double const norm = global_norm(context, gradients);
  auto const s = static_cast<double>(step);
  Factors factors{
      .keep1 = static_cast<float>(options.beta1),
      .add1 = static_cast<float>(1 - options.beta1),
      .keep2 = static_cast<float>(options.beta2),
      .add2 = static_cast<float>(1 - options.beta2),
      .correction1 = static_cast<float>(1 / (1 - std::pow(options.beta1, s))),
      .correction2 = static_cast<float>(1 / (1 - std::pow(options.beta2, s))),
      .rate = static_cast<float>(rate),
      .epsilon = static_cast<float>(options.epsilon),
      .decay = 0,
      .scale = static_cast<float>(norm > options.clip ? options.clip / norm : 1.0),
  };
  std::vector<Run> const runs = runs_of(layout);
  context.parallel_for(static_cast<std::int64_t>(runs.size()), [&](std::int64_t i) {
    Run const& run = runs[static_cast<std::size_t>(i)];
    Factors own = factors;
    own.decay = run.decays ? static_cast<float>(options.decay) : 0.0f;
    update(run.count, own, gradients.data() + run.offset, parameters.data() + run.offset,
           moments.first.data() + run.offset, moments.second.data() + run.offset);
  });
  return norm;
}

double learning_rate(double peak, std::int64_t warmup, std::int64_t span, std::int64_t step) {
  if (step < warmup) return peak * static_cast<double>(step) / static_cast<double>(warmup);
  double const way =
      std::min(1.0, static_cast<double>(step - warmup) /
                        static_cast<double>(std::max<std::int64_t>(1, span - warmup)));
  return peak * (0.1 + 0.45 * (1 + std::cos(std::numbers::pi * way)));
}

}  // namespace tessera::lm

// SPDX-License-Identifier: Apache-2.0
#include "lm/training_state.hpp"

#include <fmt/format.h>

#include <utility>

#include "lm/error.hpp"

namespace tessera::lm {

void validate(TrainingOptions const& o) {
  validate(o.model);
  auto const in_range = [](char const* name, std::int64_t value, std::int64_t low,
                           std::int64_t high) {
    if (value >= low && value <= high) return;
    throw InputError(fmt::format("{} = {}: must be in [{}, {}]", name, value, low, high));
  };
  in_range("steps", o.steps, 1, 10'000'000);
  in_range("batch", o.batch, 1, 65'536);
  in_range("warmup", o.warmup, 0, 10'000'000);
  in_range("eval-every", o.eval_every, 1, 10'000'000);
  in_range("tile", o.tile, 1, 4096);
  if (!(o.rate > 0 && o.rate <= 1)) {
    throw InputError(fmt::format("lr = {}: must be in (0, 1]", o.rate));
  }
  for (auto const& [name, value] : {std::pair{"balance", o.balance}, {"z-loss", o.z_loss}}) {
    if (value >= 0 && value <= 10) continue;
    throw InputError(fmt::format("{} = {}: must be in [0, 10]", name, value));
  }
  if (!(o.bias_rate >= 0 && o.bias_rate <= 1)) {
    throw InputError(fmt::format("bias-rate = {}: must be in [0, 1]", o.bias_rate));
  }
  // The library's rules for routers and rounding: groups, capacity, tile.
  RoundingOptions const rounding{.rounding = o.rounding, .tile = o.tile};
  check(saved_bytes(moe_desc(o.model, o.batch * o.model.context, rounding, 0, true)).status());
}

TrainingState initial_state(TrainingOptions const& options, TextSource text) {
  ParameterLayout const layout(options.model);
  TrainingState state;
  state.options = options;
  state.text = std::move(text);
  state.parameters = initial_parameters(layout, options.seed);
  state.moments.first.assign(state.parameters.size(), 0.0f);
  state.moments.second.assign(state.parameters.size(), 0.0f);
  return state;
}

}  // namespace tessera::lm

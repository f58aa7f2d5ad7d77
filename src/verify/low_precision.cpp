// SPDX-License-Identifier: Apache-2.0
#include "verify/low_precision.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cpu/reference/activation.hpp"
#include "tessera/low_precision.hpp"

namespace tessera::verify {
namespace {

constexpr double kNoNoise = 999, kNotQuantised = 60;  // dB; e4m3 has 32
constexpr double kFlips = 0x1p-9;  // relative, of sums: beyond what tensor cores lose of one

/// `value` on the other side of `kink` where it is within a step of e4m3 of it.
double across(double value, double kink) {
  double const step = std::abs(kink) / 8;
  if (value == kink)
    return kink + std::copysign(step / 8, kink);  // the bound itself passes gradients
  return std::abs(value - kink) < step ? 2 * kink - value : value;
}

Tensors sample_of(LayerData const& data, reference::Recipe const& recipe,
                  reference::LowPrecisionForward const& q) {
  Tensors sample;
  reference::Values const d_o(data.d_o.begin(), data.d_o.end());
  auto const b = reference::low_precision_backward(recipe, q, d_o);
  for (auto const& [name, values] : reference_tensors(data, q.forward, b)) {
    sample[name].assign(values.begin(), values.end());
  }
  return sample;
}

}  // namespace

reference::Recipe recipe_of(MoeDesc const& desc) {
  ScaleRule const rule = scale_rule(desc);
  return desc.precision == Precision::mxfp8 ? reference::mxfp8(rule) : reference::fp8_block(rule);
}

double sqnr_db(std::vector<double> const& ref, std::vector<float> const& out) {
  double signal = 0, noise = 0;
  for (std::size_t i = 0; i < ref.size(); ++i) {
    signal += ref[i] * ref[i];
    noise += (ref[i] - out[i]) * (ref[i] - out[i]);
  }
  return noise == 0 ? kNoNoise : 10 * std::log10(signal / noise);
}

std::vector<Tensors> recipe_samples(LayerData const& data, reference::Inputs const& inputs) {
  reference::Recipe const recipe = recipe_of(data.desc);
  auto q = reference::low_precision_forward(inputs, recipe);
  std::vector<Tensors> samples = {sample_of(data, recipe, q)};
  Activation const& activation = data.desc.activation;
  if (activation.kind != ActivationKind::clamped_swiglu) return samples;
  reference::Forward& f = q.forward;
  double const limit = activation.limit;
  for (std::size_t i = 0; i < f.a.size(); ++i) {
    f.h_gate[i] = across(f.h_gate[i], limit);
    f.h_up[i] = across(across(f.h_up[i], limit), -limit);
    f.a[i] = reference::activate(activation, f.h_gate[i], f.h_up[i]);
  }
  samples.push_back(sample_of(data, recipe, q));
  return samples;
}

Tensors recipe_sample(LayerData const& data, reference::Inputs const& inputs,
                      reference::Recipe const& recipe) {
  return sample_of(data, recipe, reference::low_precision_forward(inputs, recipe));
}

std::vector<Tensors> flipped_samples(LayerData const& data, reference::Inputs const& inputs) {
  std::vector<Tensors> samples;
  for (double const part : {1.0, 0.5, 0.25}) {
    for (double const sign : {1.0, -1.0}) {
      reference::Recipe recipe = recipe_of(data.desc);
      recipe.offset = sign * part * kFlips;
      samples.push_back(recipe_sample(data, inputs, recipe));
    }
  }
  return samples;
}

std::vector<std::string> lost_db(ReferenceTensors const& ref, std::vector<Tensors> const& recipe,
                                 Tensors const& out, std::int64_t slots) {
  constexpr std::int64_t kMin = 4096;
  constexpr double kAllowance = 0.3, kOfSlots = 1;
  double const of_slots = kAllowance + 6 / std::sqrt(static_cast<double>(slots));
  std::vector<std::string> lost;
  for (auto const& [name, values] : out) {
    if (std::ssize(values) < kMin) continue;
    double const have = sqnr_db(ref.at(name), values);
    double want = sqnr_db(ref.at(name), recipe.front().at(name));
    for (Tensors const& sample : recipe)
      want = std::min(want, sqnr_db(ref.at(name), sample.at(name)));
    if (want > kNotQuantised) continue;  // computed as without quantising
    bool const few = name == "dscores" || name == "dlogits" || name.ends_with("router");
    if (have >= want - (few ? std::max(kOfSlots, of_slots) : kAllowance)) continue;
    char text[120];
    std::snprintf(text, sizeof(text), "%s: %.2f dB, the recipe has %.2f on these data",
                  name.c_str(), have, want);
    lost.emplace_back(text);
  }
  return lost;
}

}  // namespace tessera::verify

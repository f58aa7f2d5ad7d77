// SPDX-License-Identifier: Apache-2.0
#include "tests/mutants/mutant.hpp"

#include <algorithm>
#include <cmath>

#include "verify/storage.hpp"

namespace tessera::verify {
namespace {

using reference::Backward;
using reference::Forward;
using reference::Inputs;
using reference::Values;

constexpr std::int64_t kTile = 4;  // of the lost tails: a small part of every sum

/// A layer that is computed op by op, so that a mutant can reach between them.
struct MutantLayer {
  LayerData const& data;
  Mutant mutant;
  Inputs inputs;
  Forward f{};
  Backward b{};

  [[nodiscard]] bool is(Mutant m) const { return mutant == m; }
  [[nodiscard]] std::int64_t d() const { return data.desc.shape.hidden; }
  [[nodiscard]] std::int64_t n() const { return data.desc.shape.intermediate; }
};

/// The busiest expert's last row; the mutants of rows act there, where there are neighbours.
std::int64_t last_row(MutantLayer const& layer) {
  auto const& offsets = layer.f.metadata.expert_offsets;
  std::int64_t busiest = 0;
  for (std::int64_t e = 0; e < layer.data.desc.shape.experts; ++e) {
    if (offsets[e + 1] - offsets[e] > offsets[busiest + 1] - offsets[busiest]) busiest = e;
  }
  return offsets[busiest + 1] - 1;
}

void mutate_weights(MutantLayer& layer) {
  auto& w = layer.f.weights;
  if (layer.is(Mutant::swapped_gate_and_up)) {
    std::swap(w.gate, w.up);
    std::swap(w.b_gate, w.b_up);
  }
  if (layer.is(Mutant::swapped_experts)) {
    std::int64_t const size = layer.n() * layer.d();
    for (Values* const matrix : {&w.gate, &w.up, &w.down}) {
      if (!matrix->empty())
        std::swap_ranges(matrix->begin(), matrix->begin() + size, matrix->begin() + size);
    }
  }
  if (layer.is(Mutant::lost_hidden_tail)) {
    for (Values* const matrix : {&w.gate, &w.up}) {
      for (std::size_t i = 0; i < matrix->size(); ++i) {
        if (static_cast<std::int64_t>(i) % layer.d() >= layer.d() - kTile) (*matrix)[i] = 0;
      }
    }
  }
  if (layer.is(Mutant::lost_intermediate_tail)) {
    for (std::size_t i = 0; i < w.down.size(); ++i) {
      if (static_cast<std::int64_t>(i) % layer.n() >= layer.n() - kTile) w.down[i] = 0;
    }
  }
}

void mutate_routing(MutantLayer& layer) {
  auto& meta = layer.f.metadata;
  if (layer.is(Mutant::wrong_token)) {
    std::int64_t& token = meta.gather_index[last_row(layer)];
    token = (token + 1) % layer.data.desc.shape.tokens;
  }
  if (layer.is(Mutant::missing_slot)) {
    std::int64_t weakest = -1;
    for (std::size_t j = 0; j < layer.f.scores.size(); ++j) {
      if (meta.inverse_permutation[j] < 0) continue;
      if (weakest < 0 || std::abs(layer.f.scores[j]) < std::abs(layer.f.scores[weakest])) {
        weakest = static_cast<std::int64_t>(j);
      }
    }
    meta.inverse_permutation[weakest] = -1;
  }
}

void run_forward(MutantLayer& layer) {
  Inputs& inputs = layer.inputs;
  Forward& f = layer.f;
  if (layer.is(Mutant::computed_sentinel)) {
    for (std::size_t j = 0; j < inputs.topk_ids.size(); ++j) {
      std::int64_t& id = inputs.topk_ids[j];
      if (id >= 0 && id < inputs.desc.shape.experts) continue;
      id = inputs.desc.shape.experts - 1;
      inputs.scores[j] = 0.5;
      break;
    }
  }
  f.metadata = reference::metadata(inputs.desc, inputs.topk_ids, inputs.token_offsets);
  f.scores = inputs.scores;
  f.weights = reference::logical_weights(inputs.desc, inputs.weights);
  mutate_weights(layer);
  mutate_routing(layer);
  reference::up_projection_fwd(inputs, f);
  reference::down_projection_fwd(inputs, f);
  std::int64_t const row = last_row(layer), d = layer.d();
  if (layer.is(Mutant::neighbour_row)) std::copy_n(&f.y[(row - 1) * d], d, &f.y[row * d]);
  if (layer.is(Mutant::stale_row)) {
    // The tile that ends at `row` was one row too far up: its last row keeps what memory held, and the row
    // after it belongs to the next expert.
    std::fill_n(&f.y[row * d], d, 0.25);
    if (row + 1 < f.metadata.rows()) std::copy_n(&f.y[(row - 1) * d], d, &f.y[(row + 1) * d]);
  }
  f.o.assign(inputs.x.size(), 0);
  reference::aggregate(inputs.desc, f.metadata, f.y,
                       layer.is(Mutant::ignored_scores) ? nullptr : &f.scores, f.o);
}

void run_backward(MutantLayer& layer, reference::LogicalWeights& gradients) {
  Inputs const& inputs = layer.inputs;
  Forward& f = layer.f;
  Backward& b = layer.b;
  Values const d_o(layer.data.d_o.begin(), layer.data.d_o.end());
  if (layer.is(Mutant::ignored_scores)) std::fill(f.scores.begin(), f.scores.end(), 1.0);
  reference::down_projection_dgrad(inputs, f, d_o, b);
  for (std::int64_t r = 0; r < f.metadata.rows(); ++r) {
    std::int64_t const slot = f.metadata.sort_permutation[r];
    if (layer.is(Mutant::scaled_dscores)) b.dscores[slot] *= f.scores[slot];
    if (layer.is(Mutant::no_bias_in_dscores) && inputs.desc.bias) {
      auto const expert = inputs.topk_ids[slot];
      b.dscores[slot] -= reference::dot(&d_o[f.metadata.gather_index[r] * layer.d()],
                                        &f.weights.b_down[expert * layer.d()], layer.d());
    }
  }
  if (layer.is(Mutant::lost_token_tail)) {
    std::int64_t const row = last_row(layer), n = layer.n();
    std::fill_n(&b.a_scaled[row * n], n, 0.0);
  }
  reference::down_projection_wgrad(inputs, f, d_o, b, gradients);
  reference::up_projection_dgrad(inputs, f, b);
  reference::up_projection_wgrad(inputs, f, b, gradients);
  b.dx.assign(inputs.x.size(), 0);
  reference::aggregate(inputs.desc, f.metadata, b.dx_rows, nullptr, b.dx);
}

/// h = x W^T, y = a D^T with every partial sum in bf16.
void sum_in_low_precision(MutantLayer& layer) {
  auto const low = [](double value) {
    return static_cast<double>(round_to(DType::bf16, static_cast<float>(value)));
  };
  Forward& f = layer.f;
  std::int64_t const d = layer.d(), n = layer.n();
  for (std::int64_t e = 0; e < layer.data.desc.shape.experts; ++e) {
    for (std::int64_t r = f.metadata.expert_offsets[e]; r < f.metadata.expert_offsets[e + 1]; ++r) {
      for (std::int64_t c = 0; c < d; ++c) {
        double sum = 0;
        for (std::int64_t i = 0; i < n; ++i) {
          sum = low(sum + f.a[r * n + i] * f.weights.down[(e * d + c) * n + i]);
        }
        f.y[r * d + c] = sum + (layer.data.desc.bias ? f.weights.b_down[e * d + c] : 0);
      }
    }
  }
  f.o.assign(layer.inputs.x.size(), 0);
  reference::aggregate(layer.inputs.desc, f.metadata, f.y, &f.scores, f.o);
}

Tensors rounded(ReferenceTensors const& tensors, LayerData const& data) {
  Tensors out;
  for (auto const& [name, values] : tensors) {
    out[name].assign(values.begin(), values.end());
    bool const fp32 = name == "dscores" || (is_parameter_gradient(name) &&
                                            data.gradient_mode == GradientMode::accumulate);
    if (!fp32) round_all(data.desc.dtype, out[name]);
  }
  return out;
}

}  // namespace

Tensors mutant_tensors(LayerData const& data, Mutant mutant) {
  MutantLayer layer{.data = data, .mutant = mutant, .inputs = reference_inputs(data)};
  run_forward(layer);
  auto gradients = reference::zero_weights(data.desc);
  run_backward(layer, gradients);
  layer.b.gradients = reference::stored_weights(data.desc, gradients);
  if (mutant == Mutant::low_precision_sums) sum_in_low_precision(layer);

  LayerData start = data;
  if (mutant == Mutant::ignored_accumulate) start.gradient_mode = GradientMode::write;
  Tensors out = rounded(reference_tensors(start, layer.f, layer.b), data);
  if (mutant == Mutant::all_zeros) {
    for (auto& [name, values] : out) std::fill(values.begin(), values.end(), 0.0f);
  }
  if (mutant == Mutant::unwritten_empty_expert) {
    auto const& offsets = layer.f.metadata.expert_offsets;
    std::int64_t const size = std::ssize(out["dw_down"]) / data.desc.shape.experts;
    for (std::int64_t e = 0; e < data.desc.shape.experts; ++e) {
      if (offsets[e] == offsets[e + 1]) std::fill_n(&out["dw_down"][e * size], size, NAN);
    }
  }
  return out;
}

}  // namespace tessera::verify

// SPDX-License-Identifier: Apache-2.0
// concat       pi_g(i) = i,     pi_u(i) = n+i        interleaved  pi_g(i) = 2i,  pi_u(i) = 2i+1
// up_first     pi_g(i) = n+i,   pi_u(i) = i          blocked      pi_g(i) = 2B*(i div B) + i mod B,  pi_u = pi_g + B
#include "cpu/reference/layout.hpp"

#include <tuple>

namespace tessera::reference {
namespace {

/// Calls visit(logical, stored) with references to each pair of elements of the two forms, all arrays sized.
/// One of the two may be const: this is the only place that knows the layouts.
template <class Logical, class Stored, class Visit>
void for_each_element(MoeDesc const& desc, Logical& logical, Stored& stored, Visit&& visit) {
  auto const [d, n, experts] =
      std::tuple{desc.shape.hidden, desc.shape.intermediate, desc.shape.experts};
  std::int64_t const up_rows = desc.up_width() * n;
  bool const separate = desc.layout.orientation == WeightOrientation::separate;
  bool const transposed = desc.layout.orientation == WeightOrientation::transposed;

  auto const visit_part = [&](Part part, auto& matrix, auto& bias) {
    auto& target = separate && part == Part::gate ? stored.w_gate : stored.w_up;
    auto& target_bias = separate && part == Part::gate ? stored.b_gate : stored.b_up;
    std::int64_t const rows = separate ? n : up_rows;
    for (std::int64_t e = 0; e < experts; ++e) {
      for (std::int64_t i = 0; i < n; ++i) {
        std::int64_t const row = separate ? i : stored_row(desc, part, i);
        for (std::int64_t c = 0; c < d; ++c) {
          std::int64_t const place =
              transposed ? (e * d + c) * rows + row : (e * rows + row) * d + c;
          visit(matrix[(e * n + i) * d + c], target[place]);
        }
        if (desc.bias) visit(bias[e * n + i], target_bias[e * rows + row]);
      }
    }
  };
  if (desc.activation.gated()) visit_part(Part::gate, logical.gate, logical.b_gate);
  visit_part(Part::up, logical.up, logical.b_up);

  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int64_t c = 0; c < d; ++c) {
      for (std::int64_t i = 0; i < n; ++i) {
        std::int64_t const place = transposed ? (e * n + i) * d + c : (e * d + c) * n + i;
        visit(logical.down[(e * d + c) * n + i], stored.w_down[place]);
      }
      if (desc.bias) visit(logical.b_down[e * d + c], stored.b_down[e * d + c]);
    }
  }
}

}  // namespace

std::int64_t stored_row(MoeDesc const& desc, Part part, std::int64_t i) {
  if (!desc.activation.gated()) return i;
  bool const gate = part == Part::gate;
  std::int64_t const n = desc.shape.intermediate, block = desc.layout.block;
  switch (desc.layout.order) {
    case GateUpOrder::concat:
      return gate ? i : n + i;
    case GateUpOrder::up_first:
      return gate ? n + i : i;
    case GateUpOrder::interleaved:
      return gate ? 2 * i : 2 * i + 1;
    case GateUpOrder::blocked:
      return 2 * block * (i / block) + i % block + (gate ? 0 : block);
  }
  return i;
}

LogicalWeights zero_weights(MoeDesc const& desc) {
  std::int64_t const rows = desc.shape.experts * desc.shape.intermediate;
  std::int64_t const matrix = rows * desc.shape.hidden;
  LogicalWeights w;
  if (desc.activation.gated()) w.gate.resize(matrix);
  w.up.resize(matrix);
  w.down.resize(matrix);
  if (desc.bias) {
    if (desc.activation.gated()) w.b_gate.resize(rows);
    w.b_up.resize(rows);
    w.b_down.resize(desc.shape.experts * desc.shape.hidden);
  }
  return w;
}

LogicalWeights logical_weights(MoeDesc const& desc, StoredWeights const& stored) {
  LogicalWeights logical = zero_weights(desc);
  for_each_element(desc, logical, stored, [](double& to, double from) { to = from; });
  return logical;
}

StoredWeights stored_weights(MoeDesc const& desc, LogicalWeights const& logical) {
  StoredWeights stored;
  bool const separate = desc.layout.orientation == WeightOrientation::separate;
  if (separate) {
    stored.w_gate.resize(logical.gate.size());
    stored.b_gate.resize(logical.b_gate.size());
  }
  stored.w_up.resize(logical.up.size() + (separate ? 0 : logical.gate.size()));
  stored.b_up.resize(logical.b_up.size() + (separate ? 0 : logical.b_gate.size()));
  stored.w_down.resize(logical.down.size());
  stored.b_down.resize(logical.b_down.size());
  for_each_element(desc, logical, stored, [](double from, double& to) { to = from; });
  return stored;
}

}  // namespace tessera::reference

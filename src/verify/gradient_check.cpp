// SPDX-License-Identifier: Apache-2.0
#include "verify/gradient_check.hpp"

#include <cmath>

#include "cpu/reference/activation.hpp"
#include "cpu/reference/layer.hpp"
#include "verify/storage.hpp"

namespace tessera::verify {
namespace {

using Doubles = std::vector<double>;
using reference::Part;

constexpr double kRowError = 0x1p-7, kLogitError = 0x1p-9, kScoreError = 0x1p-8;
constexpr double kSumError = 0x1p-20;  // of a sum in fp32, of the absolute values that it adds up

/// ||out - ref|| <= limit * ||ref||; "" or what is wrong.
std::string norm_failure(char const* name, Doubles const& ref, std::vector<float> const& out,
                         double limit) {
  if (out.size() != ref.size()) return std::string(name) + " is not there";
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < ref.size(); ++i) {
    double const difference = static_cast<double>(out[i]) - ref[i];
    error += difference * difference;
    norm += ref[i] * ref[i];
  }
  double const ratio = std::sqrt(error / (norm > 0 ? norm : 1));
  return ratio <= limit ? "" : std::string(name) + ": error " + std::to_string(ratio);
}

Doubles row_of(UniformTensor const& tensor, std::int64_t row, std::int64_t columns) {
  Doubles out(columns);
  for (std::int64_t c = 0; c < columns; ++c) out[c] = tensor.at(row * columns + c);
  return out;
}

bool gated(UniformLayer const& layer) { return layer.desc.up_width() == 2; }

/// sum over c of d_o[c] * D[c,i]
double unscaled_da(UniformLayer const& layer, Doubles const& d_o, std::int64_t expert,
                   std::int64_t i) {
  double sum = 0;
  for (std::size_t c = 0; c < d_o.size(); ++c) {
    sum += d_o[c] * layer.down(expert, static_cast<std::int64_t>(c), i);
  }
  return sum;
}

/// One slot: adds its dx row, returns ds; `size` is the norm of the products that ds adds up.
double slot_gradient(Context const& host, UniformLayer const& layer, Doubles const& d_o,
                     std::int64_t expert, double score, std::vector<float> const& h, Doubles& dx,
                     double& size) {
  std::int64_t const d = layer.desc.shape.hidden, n = layer.desc.shape.intermediate;
  Activation const& act = layer.desc.activation;
  Doubles term(n), dh_gate(n), dh_up(n);
  host.parallel_for(n, [&](std::int64_t i) {
    double const gate = gated(layer) ? h[i] : 0, up = gated(layer) ? h[n + i] : h[i];
    double const da = unscaled_da(layer, d_o, expert, i);
    term[i] = da * reference::activate(act, gate, up);
    auto const gradient = reference::activation_gradient(act, gate, up, score * da);
    dh_gate[i] = gradient.gate;
    dh_up[i] = gradient.up;
  });
  host.parallel_for(d, [&](std::int64_t c) {
    for (std::int64_t i = 0; i < n; ++i) {
      dx[c] += dh_up[i] * layer.up(Part::up, expert, i, c);
      if (gated(layer)) dx[c] += dh_gate[i] * layer.up(Part::gate, expert, i, c);
    }
  });
  double ds = 0, squares = 0;
  auto const add = [&](double product) {
    ds += product;
    squares += product * product;
  };
  for (double const value : term) add(value);
  for (std::int64_t c = 0; layer.desc.bias && c < d; ++c) {
    add(d_o[c] * layer.b_down.at(expert * d + c));
  }
  size = std::sqrt(squares);
  return ds;
}

/// dlogits of one token from its dscores.
Doubles logit_gradient(Context const& host, UniformLayer const& layer, TokenResult const& forward,
                       std::vector<float> const& dscores) {
  std::int64_t const experts = layer.desc.shape.experts;
  reference::Inputs inputs;
  inputs.desc = layer.desc;
  inputs.desc.shape.tokens = inputs.desc.shape.hidden = 1;  // no dx here
  inputs.topk_ids = forward.ids;
  inputs.unrounded_ids = forward.unrounded_ids;
  inputs.x = {0};
  inputs.w_router.assign(experts, 0);
  inputs.aux_dlogits = row_of(layer.aux_dlogits, forward.token, experts);
  reference::Forward f;
  f.metadata = reference::metadata(inputs.desc, forward.ids,
                                   {0, static_cast<std::int64_t>(forward.ids.size())});
  f.logits = layer.logits(host, forward.token);
  reference::Backward b;
  b.dscores.assign(dscores.begin(), dscores.end());
  b.dx = {0};
  reference::router_backward(inputs, f, b);
  return b.dlogits;
}

std::string failure_of_token(Context const& host, UniformLayer const& layer,
                             TokenResult const& forward, TokenGradients const& gradients) {
  std::int64_t const d = layer.desc.shape.hidden, experts = layer.desc.shape.experts;
  Doubles const d_o = row_of(layer.d_o, forward.token, d);
  Doubles dx(d, 0);
  for (std::size_t k = 0; k < forward.ids.size(); ++k) {
    std::int64_t const expert = forward.ids[k];
    double ds = 0, size = 0;
    if (expert >= 0 && expert < experts) {
      ds = slot_gradient(host, layer, d_o, expert, forward.scores[k], forward.h[k], dx, size);
    }
    double const error = std::abs(gradients.dscores[k] - ds);
    if (!(error <= kScoreError * size)) {
      return "dscores of slot " + std::to_string(k) + " is " +
             std::to_string(gradients.dscores[k]) + ", should be " + std::to_string(ds);
    }
  }
  if (layer.desc.router.kind != RouterKind::given) {
    Doubles const dlogits = logit_gradient(host, layer, forward, gradients.dscores);
    std::string const failure = norm_failure("dlogits", dlogits, gradients.dlogits, kLogitError);
    if (!failure.empty()) return failure;
    host.parallel_for(d, [&](std::int64_t c) {
      for (std::int64_t e = 0; e < experts; ++e) dx[c] += dlogits[e] * layer.w_router.at(e * d + c);
    });
  }
  return norm_failure("dx", dx, gradients.dx, kRowError);
}

}  // namespace

std::string token_gradient_failure(Context const& host, UniformLayer const& layer,
                                   TokenResult const& forward, TokenGradients const& gradients) {
  std::string const failure = failure_of_token(host, layer, forward, gradients);
  return failure.empty() ? failure : "token " + std::to_string(forward.token) + ": " + failure;
}

std::string unit_gradient_failure(Context const& host, UniformLayer const& layer,
                                  UnitGradients const& gradients) {
  std::int64_t const d = layer.desc.shape.hidden;
  std::size_t const rows = gradients.tokens.size();
  Doubles const column = [&] {
    Doubles out(d);
    for (std::int64_t c = 0; c < d; ++c) out[c] = layer.down(gradients.expert, c, gradients.i);
    return out;
  }();
  Doubles dh_gate(rows), dh_up(rows), a_scaled(rows);
  host.parallel_for(static_cast<std::int64_t>(rows), [&](std::int64_t r) {
    Doubles const d_o = row_of(layer.d_o, gradients.tokens[r], d);
    double const gate = gated(layer) ? gradients.h_gate[r] : 0, up = gradients.h_up[r];
    double const da = gradients.scores[r] * reference::dot(d_o.data(), column.data(), d);
    auto const gradient = reference::activation_gradient(layer.desc.activation, gate, up, da);
    dh_gate[r] = gradient.gate;
    dh_up[r] = gradient.up;
    a_scaled[r] = gradients.scores[r] * reference::activate(layer.desc.activation, gate, up);
  });
  Doubles dw_gate(d, 0), dw_up(d, 0), dw_down(d, 0);
  host.parallel_for(d, [&](std::int64_t c) {
    for (std::size_t r = 0; r < rows; ++r) {
      std::int64_t const at = gradients.tokens[r] * d + c;
      double const x = layer.x.at(at);
      dw_gate[c] += dh_gate[r] * x;
      dw_up[c] += dh_up[r] * x;
      dw_down[c] += a_scaled[r] * layer.d_o.at(at);
    }
  });
  std::string failure = norm_failure("dw_down", dw_down, gradients.dw_down, kRowError);
  if (failure.empty()) failure = norm_failure("dw_up", dw_up, gradients.dw_up, kRowError);
  if (failure.empty() && gated(layer)) {
    failure = norm_failure("dw_up, gate half", dw_gate, gradients.dw_gate, kRowError);
  }
  return failure.empty() ? failure
                         : "expert " + std::to_string(gradients.expert) + ", unit " +
                               std::to_string(gradients.i) + ": " + failure;
}

std::string router_row_failure(Context const& host, UniformLayer const& layer,
                               RouterRow const& row) {
  std::int64_t const d = layer.desc.shape.hidden;
  Doubles dw(d, 0);
  host.parallel_for(d, [&](std::int64_t c) {
    for (std::size_t t = 0; t < row.dlogits.size(); ++t) {
      dw[c] += row.dlogits[t] * layer.x.at(static_cast<std::int64_t>(t) * d + c);
    }
  });
  std::string failure = norm_failure("dw_router", dw, row.dw_router, kRowError);
  if (failure.empty() && row.db_router) {
    double sum = 0, size = 0;
    for (double const value : row.dlogits) {
      sum += value;
      size += std::abs(value);
    }
    double const error = std::abs(*row.db_router - sum);
    if (!(error <= kRowError * std::abs(sum) + kSumError * size)) {
      failure =
          "db_router is " + std::to_string(*row.db_router) + ", should be " + std::to_string(sum);
    }
  }
  return failure.empty() ? failure : "expert " + std::to_string(row.expert) + ": " + failure;
}

}  // namespace tessera::verify

// SPDX-License-Identifier: Apache-2.0
#include "verify/token_check.hpp"

#include <algorithm>
#include <cmath>

#include "cpu/reference/activation.hpp"
#include "cpu/reference/layer.hpp"
#include "device/device.hpp"
#include "verify/runner.hpp"
#include "verify/storage.hpp"

namespace tessera::verify {
namespace {

using Doubles = std::vector<double>;

constexpr double kScoreError = 0x1p-12;
constexpr double kRowError = 0x1p-7;

/// One token in fp64.
class Token {
 public:
  Token(Context const& host, UniformLayer const& layer, std::int64_t token)
      : host_(host), layer_(layer), d_(layer.desc.shape.hidden), n_(layer.desc.shape.intermediate) {
    for (std::int64_t c = 0; c < d_; ++c) x_.push_back(layer.x.at(token * d_ + c));
  }

  [[nodiscard]] Doubles logits() const {
    Doubles out(layer_.desc.shape.experts, 0);
    host_.parallel_for(layer_.desc.shape.experts, [&](std::int64_t e) {
      for (std::int64_t c = 0; c < d_; ++c) out[e] += x_[c] * layer_.w_router.at(e * d_ + c);
    });
    return out;
  }

  /// [gate half | up half], or one matrix.
  [[nodiscard]] Doubles h(std::int64_t expert) const {
    std::int64_t const halves = layer_.desc.up_width();
    Doubles out(halves * n_, 0);
    host_.parallel_for(halves * n_, [&](std::int64_t place) {
      bool const gate = halves == 2 && place < n_;
      std::int64_t const i = place % n_;
      reference::Part const part = gate ? reference::Part::gate : reference::Part::up;
      bool const apart = layer_.desc.layout.orientation == WeightOrientation::separate;
      std::int64_t const rows = apart ? n_ : halves * n_;
      std::int64_t const row = apart ? i : reference::stored_row(layer_.desc, part, i);
      UniformTensor const& w = apart && gate ? layer_.w_gate : layer_.w_up;
      double sum = 0;
      for (std::int64_t c = 0; c < d_; ++c) sum += x_[c] * w.at(at(expert, row, c, rows, d_));
      if (layer_.desc.bias) {
        sum += (apart && gate ? layer_.b_gate : layer_.b_up).at(expert * rows + row);
      }
      out[place] = sum;
    });
    return out;
  }

  /// o += score * (act(h) D^T + b_down)
  void add_output(std::int64_t expert, double score, Doubles const& h, Doubles& o) const {
    bool const gated = layer_.desc.up_width() == 2;
    Doubles a(n_);
    for (std::int64_t i = 0; i < n_; ++i) {
      a[i] =
          reference::activate(layer_.desc.activation, gated ? h[i] : 0, gated ? h[n_ + i] : h[i]);
    }
    host_.parallel_for(d_, [&](std::int64_t c) {
      double y = layer_.desc.bias ? layer_.b_down.at(expert * d_ + c) : 0;
      for (std::int64_t i = 0; i < n_; ++i) y += a[i] * layer_.w_down.at(at(expert, c, i, d_, n_));
      o[c] += score * y;
    });
  }

 private:
  /// Place of element (row, column) of an expert's [rows,columns], or of its transpose.
  [[nodiscard]] std::int64_t at(std::int64_t expert, std::int64_t row, std::int64_t column,
                                std::int64_t rows, std::int64_t columns) const {
    return layer_.desc.layout.orientation == WeightOrientation::transposed
               ? (expert * columns + column) * rows + row
               : (expert * rows + row) * columns + column;
  }

  Context const& host_;
  UniformLayer const& layer_;
  std::int64_t d_, n_;
  Doubles x_;
};

/// ||out - ref|| / ||ref||; infinite for NaN.
double row_error(Doubles const& ref, std::vector<float> const& out) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < ref.size(); ++i) {
    double const difference = static_cast<double>(out[i]) - ref[i];
    error += difference * difference;
    norm += ref[i] * ref[i];
  }
  double const ratio = std::sqrt(error / std::max(norm, 1e-300));
  return ratio < HUGE_VAL ? ratio : HUGE_VAL;
}

std::string router_failure(MoeDesc desc, Doubles const& logits, TokenResult const& result) {
  desc.shape.tokens = 1;
  reference::Inputs inputs;
  inputs.desc = desc;
  auto const failures =
      selection_failures(desc, reference::router_keys(inputs, logits), result.ids);
  if (!failures.empty()) return failures.front();
  auto const scores = reference::unscaled_scores(desc, logits.data(), result.ids);
  for (std::size_t k = 0; k < result.ids.size(); ++k) {
    double const want = desc.router.route_scale * scores[result.ids[k]];
    if (!(std::abs(result.scores[k] - want) <= kScoreError * std::abs(want))) {
      return "score " + std::to_string(k) + " is " + std::to_string(result.scores[k]) +
             ", should be " + std::to_string(want);
    }
  }
  return {};
}

std::string experts_failure(Token const& token, UniformLayer const& layer,
                            TokenResult const& result) {
  Doubles o(layer.desc.shape.hidden, 0);
  bool routed = false;
  for (std::size_t k = 0; k < result.ids.size(); ++k) {
    std::int64_t const expert = result.ids[k];
    if (expert < 0 || expert >= layer.desc.shape.experts) continue;
    routed = true;
    Doubles const h = token.h(expert);
    if (!result.h.empty()) {
      double const error = row_error(h, result.h[k]);
      if (error > kRowError)
        return "h of slot " + std::to_string(k) + ": error " + std::to_string(error);
    }
    token.add_output(expert, static_cast<double>(result.scores[k]), h, o);
  }
  if (!routed) {
    bool const zero = std::all_of(result.o.begin(), result.o.end(), [](float v) { return v == 0; });
    return zero ? "" : "o of a token without rows is not 0";
  }
  double const error = row_error(o, result.o);
  return error > kRowError ? "o: error " + std::to_string(error) : "";
}

}  // namespace

double UniformTensor::at(std::int64_t index) const noexcept {
  return round_to(DType::bf16,
                  device::uniform_value(static_cast<std::uint64_t>(index), seed, scale));
}

std::string token_failure(Context const& host, UniformLayer const& layer,
                          TokenResult const& result) {
  Token const token(host, layer, result.token);
  std::string failure;
  if (layer.desc.router.kind != RouterKind::given) {
    failure = router_failure(layer.desc, token.logits(), result);
  }
  if (failure.empty()) failure = experts_failure(token, layer, result);
  return failure.empty() ? failure : "token " + std::to_string(result.token) + ": " + failure;
}

}  // namespace tessera::verify

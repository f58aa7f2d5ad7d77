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

  /// [gate half | up half], or one matrix.
  [[nodiscard]] Doubles h(std::int64_t expert) const {
    std::int64_t const halves = layer_.desc.up_width();
    Doubles out(halves * n_, 0);
    host_.parallel_for(halves * n_, [&](std::int64_t place) {
      bool const gate = halves == 2 && place < n_;
      std::int64_t const i = place % n_;
      reference::Part const part = gate ? reference::Part::gate : reference::Part::up;
      double sum = layer_.desc.bias ? layer_.up_bias(part, expert, i) : 0;
      for (std::int64_t c = 0; c < d_; ++c) sum += x_[c] * layer_.up(part, expert, i, c);
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
      for (std::int64_t i = 0; i < n_; ++i) y += a[i] * layer_.down(expert, c, i);
      o[c] += score * y;
    });
  }

 private:
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
  std::vector<std::int64_t> const members = desc.rounds_tokens()    ? result.unrounded_ids
                                            : desc.experts_choose() ? std::vector<std::int64_t>{}
                                                                    : result.ids;
  if (!desc.experts_choose()) {
    auto const failures = selection_failures(desc, reference::router_keys(inputs, logits), members);
    if (!failures.empty()) return failures.front();
  }
  auto const scores = reference::unscaled_scores(desc, logits.data(), members);
  for (std::size_t k = 0; k < result.ids.size(); ++k) {
    if (result.ids[k] < 0 || result.ids[k] >= desc.shape.experts) return "a slot without an expert";
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

std::int64_t UniformLayer::up_place(reference::Part part, std::int64_t i, std::int64_t c) const {
  std::int64_t const d = desc.shape.hidden, rows = desc.up_width() * desc.shape.intermediate;
  if (desc.layout.orientation == WeightOrientation::separate) return i * d + c;
  std::int64_t const row = reference::stored_row(desc, part, i);
  return desc.layout.orientation == WeightOrientation::transposed ? c * rows + row : row * d + c;
}

std::int64_t UniformLayer::down_place(std::int64_t c, std::int64_t i) const {
  return desc.layout.orientation == WeightOrientation::transposed ? i * desc.shape.hidden + c
                                                                  : c * desc.shape.intermediate + i;
}

double UniformLayer::up(reference::Part part, std::int64_t expert, std::int64_t i,
                        std::int64_t c) const {
  bool const apart = desc.layout.orientation == WeightOrientation::separate;
  std::int64_t const rows = (apart ? 1 : desc.up_width()) * desc.shape.intermediate;
  return (apart && part == reference::Part::gate ? w_gate : w_up)
      .at(expert * rows * desc.shape.hidden + up_place(part, i, c));
}

double UniformLayer::up_bias(reference::Part part, std::int64_t expert, std::int64_t i) const {
  std::int64_t const n = desc.shape.intermediate;
  if (desc.layout.orientation == WeightOrientation::separate) {
    return (part == reference::Part::gate ? b_gate : b_up).at(expert * n + i);
  }
  return b_up.at(expert * desc.up_width() * n + reference::stored_row(desc, part, i));
}

double UniformLayer::down(std::int64_t expert, std::int64_t c, std::int64_t i) const {
  return w_down.at(expert * desc.shape.hidden * desc.shape.intermediate + down_place(c, i));
}

std::vector<double> UniformLayer::logits(Context const& host, std::int64_t token) const {
  std::int64_t const d = desc.shape.hidden;
  Doubles out(desc.shape.experts);
  host.parallel_for(desc.shape.experts, [&](std::int64_t e) {
    double sum = b_router.at(e);
    for (std::int64_t c = 0; c < d; ++c) sum += x.at(token * d + c) * w_router.at(e * d + c);
    out[e] = sum;
  });
  return out;
}

std::string token_failure(Context const& host, UniformLayer const& layer,
                          TokenResult const& result) {
  Token const token(host, layer, result.token);
  std::string failure;
  if (layer.desc.router.kind != RouterKind::given) {
    failure = router_failure(layer.desc, layer.logits(host, result.token), result);
  }
  if (failure.empty()) failure = experts_failure(token, layer, result);
  return failure.empty() ? failure : "token " + std::to_string(result.token) + ": " + failure;
}

}  // namespace tessera::verify

// SPDX-License-Identifier: Apache-2.0
// Layers whose numerics are measured: inputs at unit scale, ids and scores given.
#pragma once

#include <cmath>

#include "cpu/reference/low_precision.hpp"
#include "tests/low_precision/support.hpp"

namespace tessera::low_precision_tests {

enum class Tail {
  normal,   ///< N(0,1)
  student,  ///< Student's t with 3 degrees of freedom
};

struct LayerValues {
  reference::Inputs inputs;
  Values d_o;
};

/// Student's t with 3 degrees of freedom, over its standard deviation.
inline double student(verify::RandomSource& random) {
  double squares = 0;
  for (int i = 0; i < 3; ++i) {
    double const value = random.normal();
    squares += value * value;
  }
  return random.normal() / std::sqrt(squares / 3) / std::sqrt(3.0);
}

inline Values draw(std::int64_t count, std::uint64_t seed, std::uint64_t stream, double scale,
                   bool heavy) {
  verify::RandomSource random(seed, stream);
  Values out(count);
  for (double& value : out) {
    value = reference::to_bf16(scale * (heavy ? student(random) : random.normal()));
  }
  return out;
}

/// x, dO ~ N(0,1), weights over the square root of their fan-in, K different experts for each token, scores in
/// [0.05,1].
inline LayerValues make_layer(MoeShape const& shape, std::uint64_t seed, Tail tail = Tail::normal) {
  bool const heavy = tail == Tail::student;
  std::int64_t const d = shape.hidden, n = shape.intermediate, e = shape.experts;
  LayerValues out;
  reference::Inputs& in = out.inputs;
  in.desc.shape = shape;
  in.desc.dtype = DType::bf16;
  auto const of = [&](std::int64_t count, std::uint64_t stream, double scale) {
    return draw(count, seed, stream, scale, heavy);
  };
  in.x = of(shape.tokens * d, 0, 1);
  out.d_o = of(shape.tokens * d, 1, 1);
  in.weights.w_up = of(e * 2 * n * d, 2, 1 / std::sqrt(static_cast<double>(d)));
  in.weights.w_down = of(e * d * n, 3, 1 / std::sqrt(static_cast<double>(n)));
  verify::RandomSource random(seed, 4);
  for (std::int64_t t = 0; t < shape.tokens; ++t) {
    std::int64_t const first = random.below(e);
    for (std::int64_t k = 0; k < shape.top_k; ++k) {
      in.topk_ids.push_back((first + k * (1 + random.below(e / shape.top_k - 1))) % e);
      in.scores.push_back(static_cast<float>(0.05 + 0.95 * random.uniform()));
    }
  }
  return out;
}

/// 20 log10(|ref| / |ref - out|), dB.
inline double sqnr(Values const& ref, Values const& out) {
  double signal = 0, noise = 0;
  for (std::size_t i = 0; i < ref.size(); ++i) {
    signal += ref[i] * ref[i];
    noise += (ref[i] - out[i]) * (ref[i] - out[i]);
  }
  return 10 * std::log10(signal / noise);
}

struct LayerSqnr {
  double out, dx, dw_up, dw_down, ds;
};
inline LayerSqnr sqnr(reference::Forward const& f, reference::Backward const& b,
                      reference::LowPrecisionForward const& q, reference::Backward const& g) {
  return {sqnr(f.o, q.forward.o), sqnr(b.dx, g.dx), sqnr(b.gradients.w_up, g.gradients.w_up),
          sqnr(b.gradients.w_down, g.gradients.w_down), sqnr(b.dscores, g.dscores)};
}

}  // namespace tessera::low_precision_tests

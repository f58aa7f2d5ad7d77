// SPDX-License-Identifier: Apache-2.0
// Wrong quantisers and wrong GEMMs of quantised operands, each of which one of three rules has to reject:
//   1. bytes of codes and scales are those of the reference;
//   2. a GEMM's result, of the dequantised operands that it read, is within the allowance of
// docs/numerics.md#tolerance;      codes are within half a step of what they stand for;   3. the layer's errors are
// those of the recipe, measured on the same data. Right ones pass all of them.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "tests/low_precision/layer_data.hpp"
#include "tests/low_precision/tensor_core.hpp"
#include "verify/tolerance.hpp"

namespace tessera::low_precision_tests {
namespace {

using reference::dequantised;
using reference::quantise;
using reference::Quantised;

constexpr double kUnit = 0x1p-8;  // of bf16
constexpr std::int64_t kM = 64, kN = 256, kK = 256;

/// Normal values; `scaled`: rows and blocks of 128 along k, or blocks of 128x128, are times 2^-3 .. 2^3, so that no two
/// neighbours have the same scale.
enum class Data { normal, scaled, positive };

Values matrix(Data data, std::int64_t rows, std::int64_t width, std::uint64_t stream, bool weight) {
  Values out = normal(rows * width, stream, weight ? 1 / std::sqrt(static_cast<double>(width)) : 1);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < width; ++c) {
      double& value = out[r * width + c];
      if (data == Data::positive) value = std::abs(value);
      if (data != Data::scaled) continue;
      std::int64_t const k = c / 128;
      auto const power = weight ? (r / 128 * 4 + k * 3) % 7 - 3 : (r * 3) % 7 - 3 + (k * 2) % 5 - 2;
      value = std::ldexp(value, static_cast<int>(power));
    }
  }
  return out;
}

/// D = a b^T: a [m,k] in blocks of 1x128, b [n,k] in blocks of 128x128.
struct Gemm {
  Quantised a, b;
};

Gemm make_gemm(Data data, ScaleRule rule, std::int64_t m = kM, std::int64_t n = kN,
               std::int64_t k = kK) {
  return {quantise(matrix(data, m, k, 1, false), m, k, {1, 128}, rule),
          quantise(matrix(data, n, k, 2, true), n, k, {128, 128}, rule)};
}

/// What a kernel stores: sums as the tensor core makes them, rounded to bf16.
std::vector<float> run(Gemm const& gemm, Sums sums = Sums::promoted) {
  std::vector<float> out;
  for (std::int64_t i = 0; i < gemm.a.rows; ++i) {
    for (std::int64_t j = 0; j < gemm.b.rows; ++j) {
      out.push_back(static_cast<float>(reference::to_bf16(dot(gemm.a, i, gemm.b, j, sums))));
    }
  }
  return out;
}

/// a b^T in fp64, and term by term in fp32, rounded to bf16.
struct Products {
  Values exact;
  std::vector<float> naive;
};
Products products(Values const& a, Values const& b, std::int64_t k) {
  Products out;
  for (std::size_t i = 0; i < a.size(); i += k) {
    for (std::size_t j = 0; j < b.size(); j += k) {
      double exact = 0;
      float naive = 0;
      for (std::int64_t c = 0; c < k; ++c) {
        exact += a[i + c] * b[j + c];
        naive += static_cast<float>(a[i + c]) * static_cast<float>(b[j + c]);
      }
      out.exact.push_back(exact);
      out.naive.push_back(static_cast<float>(reference::to_bf16(naive)));
    }
  }
  return out;
}

/// Largest error over what rule 2 allows, in groups of `width` elements.
double error_over_allowance(Products const& want, std::vector<float> const& out,
                            std::int64_t width) {
  verify::Grouping rows;
  for (std::int64_t end = width; end <= std::ssize(out); end += width)
    rows.group_ends.push_back(end);
  auto const result = verify::compare(want.exact, {&want.naive}, out, rows, kUnit);
  return std::max(result.worst_row_ratio, result.worst_element_ratio);
}
double error_over_allowance(Gemm const& gemm, std::vector<float> const& out) {
  return error_over_allowance(products(dequantised(gemm.a), dequantised(gemm.b), gemm.a.width), out,
                              gemm.b.rows);
}

struct GemmMutant {
  char const* name;
  std::function<void(Gemm&)> break_it;
  double at_least;  ///< error over allowance with fp32 scales
};

/// Every scale becomes the one that `source(i, j)` names, indices taken round.
void shift(Quantised& q, std::int64_t rows, std::int64_t columns) {
  Values const before = q.scales;
  std::int64_t const height = q.rows / q.block.rows, width = q.width / q.block.columns;
  for (std::int64_t i = 0; i < height; ++i) {
    for (std::int64_t j = 0; j < width; ++j) {
      q.scales[i * width + j] = before[(i + rows) % height * width + (j + columns) % width];
    }
  }
}

std::vector<GemmMutant> gemm_mutants() {
  return {
      {"scale of the next row", [](Gemm& g) { shift(g.a, 1, 0); }, 100},
      {"scale of the next k block of x", [](Gemm& g) { shift(g.a, 0, 1); }, 50},
      {"scale of the next k block of w", [](Gemm& g) { shift(g.b, 0, 1); }, 50},
      {"scale of the next n block of w: that of gate for up", [](Gemm& g) { shift(g.b, 1, 0); },
       50},
      {"scales of the blocks of w transposed",
       [](Gemm& g) { std::swap(g.b.scales[1], g.b.scales[2]); }, 50},
      {"one row alone has another's scale", [](Gemm& g) { g.a.scales[2 * 5] = g.a.scales[2 * 6]; },
       50},
      {"scale of x twice",
       [](Gemm& g) {
         for (double& s : g.a.scales) s *= s;
       },
       50},
      {"scale of w twice",
       [](Gemm& g) {
         for (double& s : g.b.scales) s *= s;
       },
       50},
      {"w for its transpose",
       [](Gemm& g) {
         Quantised const b = g.b;
         for (std::int64_t r = 0; r < kN; ++r) {
           for (std::int64_t c = 0; c < kK; ++c) g.b.codes[r * kK + c] = b.codes[c * kN + r];
         }
       },
       50},
      {"no scale of x at all",
       [](Gemm& g) {
         for (double& s : g.a.scales) s = 1;
       },
       50},
  };
}

class Rules : public ::testing::TestWithParam<ScaleRule> {};
INSTANTIATE_TEST_SUITE_P(LowPrecisionMutants, Rules,
                         ::testing::Values(ScaleRule::fp32, ScaleRule::pow2), [](auto const& info) {
                           return info.param == ScaleRule::fp32 ? "fp32" : "pow2";
                         });

TEST_P(Rules, ARightGemmIsFarBelowTheAllowance) {
  for (auto const data : {Data::normal, Data::scaled, Data::positive}) {
    Gemm const gemm = make_gemm(data, GetParam());
    EXPECT_LT(error_over_allowance(gemm, run(gemm)), 0.5) << static_cast<int>(data);
  }
}

TEST_P(Rules, WrongScalesAreRejected) {
  Gemm const right = make_gemm(Data::scaled, GetParam());
  for (GemmMutant const& mutant : gemm_mutants()) {
    Gemm wrong = right;
    mutant.break_it(wrong);
    double const ratio = error_over_allowance(right, run(wrong));
    EXPECT_GT(ratio, mutant.at_least) << mutant.name;
    RecordProperty(mutant.name, std::to_string(ratio));
  }
}

TEST_P(Rules, NormalDataHideNeighboursUnderPowersOfTwo) {
  // Why the data are scaled: blocks of normal weights have nearly the same amax, and powers of two make it the same.
  Gemm right = make_gemm(Data::normal, GetParam());
  right.b = quantise(normal(kN * kK, 2, 0.08), kN, kK, {128, 128}, GetParam());
  Gemm wrong = right;
  shift(wrong.b, 1, 0);
  double const ratio = error_over_allowance(right, run(wrong));
  if (GetParam() == ScaleRule::pow2) {
    EXPECT_LT(ratio, 1);
  } else {
    EXPECT_GT(ratio, 1);
  }
}

TEST_P(Rules, StaleWeightsAreRejected) {
  Values w = matrix(Data::scaled, kN, kK, 2, true);
  Gemm right = make_gemm(Data::scaled, GetParam());
  Gemm const stale = right;
  for (std::int64_t r = 0; r < 128; ++r) {  // a step of the optimiser: 3% in one block
    for (std::int64_t c = 128; c < 256; ++c)
      w[r * kK + c] = reference::to_bf16(1.03 * w[r * kK + c]);
  }
  right.b = quantise(w, kN, kK, {128, 128}, GetParam());
  double const ratio = error_over_allowance(right, run(stale));
  EXPECT_GT(ratio, 1);
  EXPECT_LT(error_over_allowance(right, run(right)), 0.5);
  RecordProperty("stale weights", std::to_string(ratio));
}

TEST_P(Rules, SumsWithoutPromotionAreRejectedOnPositiveData) {
  double before = 0.5;  // a right one
  for (std::int64_t const k : {768, 1536}) {
    Gemm const gemm = make_gemm(Data::positive, GetParam(), 16, 128, k);
    double const ratio = error_over_allowance(gemm, run(gemm, Sums::rescaled));
    EXPECT_LT(error_over_allowance(gemm, run(gemm)), 0.5) << k;
    EXPECT_GT(ratio, std::max(1.0, 1.5 * before)) << k;
    RecordProperty("no promotion, K " + std::to_string(k), std::to_string(ratio));
    before = ratio;
  }
  Gemm const normal_data =
      make_gemm(Data::normal, GetParam(), 16, 128, 768);  // where the errors cancel
  EXPECT_LT(error_over_allowance(normal_data, run(normal_data, Sums::rescaled)), 1);
}

TEST_P(Rules, GradientsOfUnscaledRowsAreRejected) {
  // dw_up = dh^T x^, x^ = rnd(x8 s): operands in bf16, sums in fp32.
  std::int64_t const tokens = 64, n = 64, d = 128;
  auto const x8 =
      quantise(matrix(Data::scaled, tokens, d, 3, false), tokens, d, {1, 128}, GetParam());
  Values const x = dequantised(x8), dh = normal(n * tokens, 4);
  Values right(d * tokens), wrong(d * tokens);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t c = 0; c < d; ++c) {
      right[c * tokens + t] = reference::to_bf16(x[t * d + c]);
      wrong[c * tokens + t] = x8.codes[t * d + c];
    }
  }
  Products const want = products(dh, right, tokens);
  EXPECT_LT(error_over_allowance(want, want.naive, d), 0.5);
  EXPECT_GT(error_over_allowance(want, products(dh, wrong, tokens).naive, d), 50);
}

/// Why rule 2 rejects codes and scales of `values`; empty where it does not.
std::string broken(Values const& values, Quantised const& have, ScaleRule rule) {
  Quantised const want = quantise(values, have.rows, have.width, have.block, rule);
  Values largest(want.scales.size());
  for (std::int64_t r = 0; r < have.rows; ++r) {
    for (std::int64_t c = 0; c < have.width; ++c) {
      std::int64_t const i = r * have.width + c, block = have.scale_index(r, c);
      double const code = have.codes[i], scale = have.scales[block];
      if (!(std::abs(scale / want.scales[block] - 1) <= 0x1p-7)) return "scale";
      int const exponent = code == 0 ? -6 : std::max(std::ilogb(code), -6);
      double const half_step = scale * std::ldexp(0.5, exponent - 3);
      if (!(std::abs(code * scale - values[i]) <= half_step * (1 + 0x1p-6))) return "code";
      largest[block] = std::max(largest[block], std::abs(code));
    }
  }
  for (double const value : largest) {
    if (rule == ScaleRule::fp32 ? value != 448 : value < 224) return "largest code";
  }
  return "";
}

bool has_other_bytes(Quantised const& a, Quantised const& b) {
  for (std::size_t i = 0; i < a.codes.size(); ++i) {
    if (code_of(a.codes[i]) != code_of(b.codes[i])) return true;
  }
  return a.scales != b.scales;
}

struct QuantiserMutant {
  char const* name;
  std::function<Quantised(Values const&, ScaleRule)> quantise;
  char const* rule;
};

constexpr std::int64_t kRows = 96, kWidth = 256;

double to_e5m2(double value) {
  if (value == 0) return value;
  double const step = std::ldexp(1.0, std::max(std::ilogb(value), -14) - 2);
  return std::nearbyint(value / step) * step;
}

std::vector<QuantiserMutant> quantiser_mutants() {
  auto const right = [](Values const& values, ScaleRule rule) {
    return quantise(values, kRows, kWidth, {1, 128}, rule);
  };
  return {
      {"scale made a power of two after quantising",
       [=](Values const& values, ScaleRule) {
         Quantised out = right(values, ScaleRule::fp32);
         out.scales = right(values, ScaleRule::pow2).scales;
         return out;
       },
       "code"},
      {"amax of 64 for 128",
       [=](Values const& values, ScaleRule rule) {
         Values halves = values;
         for (std::int64_t i = 0; i < std::ssize(halves); ++i) {
           if (i % 128 >= 64) halves[i] = 0;
         }
         Quantised out = right(halves, rule);
         for (std::int64_t i = 0; i < std::ssize(halves); ++i) {
           double const scale = out.scales[i / 128];
           out.codes[i] =
               reference::to_e4m3(static_cast<float>(values[i] * static_cast<float>(1 / scale)));
         }
         return out;
       },
       "scale"},
      {"e5m2",
       [=](Values const& values, ScaleRule rule) {
         Quantised out = right(values, rule);
         for (std::int64_t i = 0; i < std::ssize(values); ++i) {
           out.codes[i] = to_e5m2(values[i] / out.scales[i / 128]);
         }
         return out;
       },
       "code"},
      {"rounded toward zero",
       [=](Values const& values, ScaleRule rule) {
         Quantised out = right(values, rule);
         for (std::int64_t i = 0; i < std::ssize(values); ++i) {
           double const value = values[i] / out.scales[i / 128];
           int const exponent = value == 0 ? -6 : std::max(std::ilogb(value), -6);
           double const step = std::ldexp(1.0, exponent - 3);
           out.codes[i] = std::trunc(value / step) * step;
         }
         return out;
       },
       "code"},
      {"codes of the next row",
       [=](Values const& values, ScaleRule rule) {
         Quantised out = right(values, rule);
         std::rotate(out.codes.begin(), out.codes.begin() + kWidth, out.codes.end());
         return out;
       },
       "code"},
  };
}

TEST_P(Rules, WrongQuantisersAreRejected) {
  for (auto const data : {Data::normal, Data::scaled}) {
    Values const values = matrix(data, kRows, kWidth, 7, false);
    Quantised const right = quantise(values, kRows, kWidth, {1, 128}, GetParam());
    EXPECT_EQ(broken(values, right, GetParam()), "");
    for (QuantiserMutant const& mutant : quantiser_mutants()) {
      Quantised const wrong = mutant.quantise(values, GetParam());
      EXPECT_TRUE(has_other_bytes(wrong, right)) << mutant.name;
      // pow2 states its scale exactly; under fp32 scales the same mutant has a wrong scale as well
      std::string const why = broken(values, wrong, GetParam());
      EXPECT_NE(why, "") << mutant.name;
      if (GetParam() == ScaleRule::pow2) {
        EXPECT_EQ(why, mutant.rule) << mutant.name;
      }
    }
  }
}

TEST(LowPrecisionMutants, NanForSaturationHasOtherBytes) {
  // `floor` lets a quarter of the blocks exceed 448.
  Values const values = matrix(Data::normal, kRows, kWidth, 8, false);
  Quantised const right = quantise(values, kRows, kWidth, {1, 32}, ScaleRule::floor);
  Quantised wrong = right;
  int saturated = 0;
  for (std::int64_t i = 0; i < std::ssize(values); ++i) {
    if (std::abs(values[i] / right.scales[i / 32]) <= 464) continue;
    wrong.codes[i] = kNan;
    ++saturated;
  }
  EXPECT_GT(saturated, 20);
  EXPECT_TRUE(has_other_bytes(wrong, right));
  EXPECT_EQ(broken(values, wrong, ScaleRule::floor), "code");
}

/// Rule 3: dB of every tensor within 0.3 of the recipe's on the same data, and above the floors.
bool accepts(LayerSqnr const& have, LayerSqnr const& recipe) {
  return have.out >= std::max(recipe.out - 0.3, 23.0) &&
         have.dx >= std::max(recipe.dx - 0.3, 22.0) &&
         have.dw_up >= std::max(recipe.dw_up - 0.3, 22.5) &&
         have.dw_down >= std::max(recipe.dw_down - 0.3, 22.5);
}

TEST(LowPrecisionMutants, OtherRecipesAreRejectedByTheLayersErrors) {
  LayerValues const data =
      make_layer({.tokens = 96, .hidden = 512, .intermediate = 256, .experts = 4, .top_k = 2}, 6);
  auto const f = reference::forward(data.inputs);
  auto const b = reference::backward(data.inputs, f, data.d_o);
  auto const measured = [&](reference::Recipe const& recipe, LayerValues const& of) {
    auto const q = reference::low_precision_forward(of.inputs, recipe);
    return sqnr(f, b, q, reference::low_precision_backward(recipe, q, of.d_o));
  };
  auto const recipe = reference::fp8_block(ScaleRule::fp32);
  LayerSqnr const right = measured(recipe, data);
  EXPECT_TRUE(accepts(right, right));
  // Stale weights of one expert, and operands that were quantised before: both look like FP8 of the right size.
  LayerValues stale = data;
  std::int64_t const expert = 2 * 256 * 512;
  for (std::int64_t i = 0; i < expert; ++i) stale.inputs.weights.w_up[i] *= 1.06;
  EXPECT_FALSE(accepts(measured(recipe, stale), right));
  LayerValues twice = data;
  twice.inputs.x = dequantised(quantise(data.inputs.x, 96, 512, {1, 32}, ScaleRule::rceil));
  EXPECT_FALSE(accepts(measured(recipe, twice), right));
  EXPECT_FALSE(accepts(measured(reference::fp8_block(ScaleRule::floor), data), right));
}

}  // namespace
}  // namespace tessera::low_precision_tests

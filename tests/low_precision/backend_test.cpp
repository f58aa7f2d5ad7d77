// SPDX-License-Identifier: Apache-2.0
// The CPU backend's layer on data that a wrong scale cannot hide in, by the three rules of mutants_test.cpp: bytes of
// x8, codes of h within half a step of what they stand for, and the errors of the recipe. Wrong saved tensors, and
// layers of other data, are rejected.
#include <gtest/gtest.h>

#include <functional>

#include "tessera/moe.hpp"
#include "tests/low_precision/layer_data.hpp"
#include "verify/low_precision.hpp"
#include "verify/runner.hpp"

namespace tessera::low_precision_tests {
namespace {

using core::Bf16;
using core::E4m3;
using reference::dequantised;
using reference::quantise;
using reference::Quantised;

constexpr MoeShape kShape{
    .tokens = 96, .hidden = 256, .intermediate = 256, .experts = 4, .top_k = 2};

/// Kinds of data, as mutants_test.cpp and the design of the recipe name them.
enum class Kind { normal, scaled, positive, student, outliers };

MoeDesc desc_of(Precision precision, bool pow2, MoeShape const& shape) {
  MoeDesc desc;
  desc.shape = shape;
  desc.dtype = DType::bf16;
  desc.precision = precision;
  desc.pow2_scales = pow2;
  return desc;
}

/// Every block of 128 x `rows` of a matrix times a power of two that its neighbours do not have.
void scale_blocks(Values& values, std::int64_t width, std::int64_t rows) {
  for (std::int64_t i = 0; i < std::ssize(values); ++i) {
    std::int64_t const r = i / width / rows, k = i % width / 128;
    values[i] = std::ldexp(values[i], static_cast<int>((r * 3 + k * 2) % 7 - 3));
  }
}

verify::LayerData layer_of(Kind kind, MoeDesc const& desc, std::uint64_t seed) {
  LayerValues values =
      make_layer(desc.shape, seed, kind == Kind::student ? Tail::student : Tail::normal);
  reference::Inputs& in = values.inputs;
  std::int64_t const d = desc.shape.hidden, n = desc.shape.intermediate;
  if (kind == Kind::scaled) {
    scale_blocks(in.x, d, 1);
    scale_blocks(in.weights.w_up, d, 128);
    scale_blocks(in.weights.w_down, n, 128);
    scale_blocks(values.d_o, d, 1);
  }
  if (kind == Kind::positive) {
    for (Values* of : {&in.x, &in.weights.w_up, &in.weights.w_down, &values.d_o}) {
      for (double& value : *of) value = std::abs(value);
    }
  }
  if (kind == Kind::outliers) {  // a channel of 1e4 times the others, with weights of 1e-4
    for (std::int64_t i = 17; i < std::ssize(in.x); i += d) {
      in.x[i] = reference::to_bf16(1e4 * in.x[i]);
    }
    for (std::int64_t i = 17; i < std::ssize(in.weights.w_up); i += d) {
      in.weights.w_up[i] = reference::to_bf16(1e-4 * in.weights.w_up[i]);
    }
  }
  auto const floats = [](Values const& from) {
    return std::vector<float>(from.begin(), from.end());
  };
  verify::LayerData out;
  out.desc = desc;
  out.x = floats(in.x);
  out.d_o = floats(values.d_o);
  out.topk_ids = in.topk_ids;
  out.scores = floats(in.scores);
  out.w_up = floats(in.weights.w_up);
  out.w_down = floats(in.weights.w_down);
  return out;
}

/// Failures of a whole run of the backend: both passes, split and repeated.
std::vector<std::string> failures_of(verify::LayerData const& data) {
  auto run =
      verify::run_candidate(context(3), data, verify::kPoisons[0], verify::Alignment::element);
  if (!run.ok()) return {run.status().text()};
  verify::CaseResult result;
  result.failures = run.value().failures;
  verify::judge_run(context(3), data, run.value(), result);
  return result.failures;
}

struct Scheme {
  Precision precision;
  bool pow2;
};
class Backend : public ::testing::TestWithParam<Scheme> {
 protected:
  [[nodiscard]] MoeDesc desc(MoeShape const& shape = kShape) const {
    return desc_of(GetParam().precision, GetParam().pow2, shape);
  }
};
INSTANTIATE_TEST_SUITE_P(LowPrecision, Backend,
                         ::testing::Values(Scheme{Precision::fp8, false},
                                           Scheme{Precision::fp8, true},
                                           Scheme{Precision::mxfp8, false}),
                         [](auto const& info) {
                           return std::string(info.param.precision == Precision::mxfp8 ? "mxfp8"
                                              : info.param.pow2                        ? "fp8_pow2"
                                                                : "fp8_fp32");
                         });

TEST_P(Backend, HasTheErrorsOfTheRecipeOnDataOfEveryKind) {
  for (Kind const kind :
       {Kind::normal, Kind::scaled, Kind::positive, Kind::student, Kind::outliers}) {
    MoeShape shape = kShape;
    if (kind == Kind::positive) shape.hidden = 1024, shape.tokens = 48;
    for (auto const& failure : failures_of(layer_of(kind, desc(shape), 11))) {
      ADD_FAILURE() << static_cast<int>(kind) << ": " << failure;
    }
  }
}

TEST_P(Backend, HasTheErrorsOfTheRecipeWithAnyNumberOfRows) {
  // Experts of 0, 1, 127 and 129 rows: tasks of the backend have 128.
  MoeShape shape = kShape;
  shape.tokens = 257;
  shape.top_k = 1;
  verify::LayerData data = layer_of(Kind::scaled, desc({257, 256, 256, 4, 2}), 12);
  data.desc.shape = shape;
  data.topk_ids.clear();
  for (std::int64_t t = 0; t < 257; ++t) data.topk_ids.push_back(t == 0 ? 1 : t < 128 ? 2 : 3);
  data.scores.resize(257);
  for (auto const& failure : failures_of(data)) ADD_FAILURE() << failure;
}

/// Forward and backward of a layer by the library, given ids, with what is saved between them in reach.
struct Call {
  verify::LayerData const& data;
  MoeDesc desc = data.desc;
  std::int64_t tokens = desc.shape.tokens, d = desc.shape.hidden, n = desc.shape.intermediate,
               rows = desc.num_slots();
  bool mxfp8 = desc.precision == Precision::mxfp8;
  std::vector<Bf16> x = bf16(data.x), d_o = bf16(data.d_o), w_up = bf16(data.w_up),
                    w_down = bf16(data.w_down);
  std::vector<std::int32_t> ids{data.topk_ids.begin(), data.topk_ids.end()};
  std::vector<Bf16> o = std::vector<Bf16>(x.size()), dx = o, dw_up = w_up, dw_down = w_down;
  std::vector<float> dscores = std::vector<float>(data.scores.size());
  std::vector<E4m3> x8 = std::vector<E4m3>(x.size()), h = std::vector<E4m3>(rows * 2 * n);
  std::int64_t x_blocks = d / desc.scale_block(), h_blocks = 2 * n / desc.scale_block();
  std::int64_t padded = padded_scale_rows(rows);
  // mxfp8 uses the bytes of these.
  std::vector<float> x_scale = std::vector<float>(tokens * x_blocks),
                     h_scale = std::vector<float>(padded * h_blocks);
  std::vector<std::byte> routing = std::vector<std::byte>(routing_bytes(desc).value());

  static std::vector<Bf16> bf16(std::vector<float> const& values) {
    return packed({values.begin(), values.end()});
  }
  static std::vector<float> floats(std::vector<Bf16> const& values) {
    std::vector<float> out;
    for (Bf16 const value : values) out.push_back(to_fp32(value));
    return out;
  }
  [[nodiscard]] ConstTensor in(std::vector<Bf16> const& v,
                               std::initializer_list<std::int64_t> shape) const {
    return tensor(static_cast<void const*>(v.data()), DType::bf16, shape);
  }
  [[nodiscard]] static Tensor to(void* v, DType type, std::initializer_list<std::int64_t> shape) {
    return tensor(v, type, shape);
  }
  [[nodiscard]] ExpertWeights weights() const {
    std::int64_t const e = desc.shape.experts;
    return {.w_up = in(w_up, {e, 2 * n, d}), .w_down = in(w_down, {e, d, n})};
  }
  [[nodiscard]] Tensor of_x_scale() {
    return to(x_scale.data(), mxfp8 ? DType::e8m0 : DType::fp32, {tokens, x_blocks});
  }
  [[nodiscard]] Tensor of_h_scale() {
    return mxfp8 ? to(h_scale.data(), DType::e8m0, {rows, h_blocks})
                 : to(h_scale.data(), DType::fp32, {h_blocks, padded});
  }

  Status forward() {
    std::vector<std::byte> workspace(workspace_bytes(context(3), desc, Pass::forward).value());
    MoeForwardArgs args;
    args.x = in(x, {tokens, d});
    args.topk_ids = tensor(ids.data(), {tokens, desc.shape.top_k});
    args.topk_weights = tensor(data.scores.data(), {tokens, desc.shape.top_k});
    args.weights = weights();
    args.o = to(o.data(), DType::bf16, {tokens, d});
    args.h = to(h.data(), DType::fp8_e4m3, {rows, 2 * n});
    args.x8 = to(x8.data(), DType::fp8_e4m3, {tokens, d});
    args.x_scale = of_x_scale();
    args.h_scale = of_h_scale();
    args.routing = {routing.data(), routing.size()};
    args.workspace = {workspace.data(), workspace.size()};
    return moe_forward(context(3), desc, args);
  }
  Status backward() {
    std::vector<std::byte> workspace(workspace_bytes(context(3), desc, Pass::backward).value());
    MoeBackwardArgs args;
    args.d_o = in(d_o, {tokens, d});
    args.h = to(h.data(), DType::fp8_e4m3, {rows, 2 * n});
    args.x8 = to(x8.data(), DType::fp8_e4m3, {tokens, d});
    args.x_scale = of_x_scale();
    args.h_scale = of_h_scale();
    args.routing = {routing.data(), routing.size()};
    args.weights = weights();
    std::int64_t const e = desc.shape.experts;
    args.dx = to(dx.data(), DType::bf16, {tokens, d});
    args.dscores = tensor(dscores.data(), {rows});
    args.gradients.dw_up = to(dw_up.data(), DType::bf16, {e, 2 * n, d});
    args.gradients.dw_down = to(dw_down.data(), DType::bf16, {e, d, n});
    args.workspace = {workspace.data(), workspace.size()};
    return moe_backward(context(3), desc, args);
  }
  void run() {
    Status const first = forward();
    ASSERT_TRUE(first.ok()) << first.text();
    Status const second = backward();
    ASSERT_TRUE(second.ok()) << second.text();
  }
  [[nodiscard]] verify::Tensors tensors() const {
    return {{"o", floats(o)},
            {"dx", floats(dx)},
            {"dscores", dscores},
            {"dw_up", floats(dw_up)},
            {"dw_down", floats(dw_down)}};
  }
  /// Scale of row r and block j of h.
  [[nodiscard]] double scale_of_h(std::int64_t r, std::int64_t j) const {
    if (!mxfp8) return h_scale[j * padded + r];
    return to_fp32(reinterpret_cast<core::E8m0 const*>(h_scale.data())[r * h_blocks + j]);
  }
};

TEST_P(Backend, SavesTheBytesOfTheReference) {
  verify::LayerData const data = layer_of(Kind::scaled, desc(), 13);
  Call call{data};
  call.run();
  Quantised const want = quantise({data.x.begin(), data.x.end()}, call.tokens, call.d,
                                  {1, call.desc.scale_block()}, scale_rule(call.desc));
  for (std::size_t i = 0; i < call.x8.size(); ++i) {
    ASSERT_EQ(call.x8[i].bits, code_of(want.codes[i])) << i;
  }
  for (std::size_t i = 0; i < want.scales.size(); ++i) {
    double const have = call.mxfp8
                            ? to_fp32(reinterpret_cast<core::E8m0 const*>(call.x_scale.data())[i])
                            : call.x_scale[i];
    ASSERT_EQ(have, want.scales[i]) << i;
  }
}

TEST_P(Backend, SavesCodesOfWhatTheOperandsGive) {
  verify::LayerData const data = layer_of(Kind::scaled, desc(), 14);
  Call call{data};
  call.run();
  // hb by fp64 sums of the dequantised operands.
  reference::Inputs const inputs = verify::reference_inputs(data);
  reference::Recipe recipe = verify::recipe_of(data.desc);
  recipe.save_h8 = false;
  auto const f = reference::low_precision_forward(inputs, recipe).forward;
  std::int64_t const block = call.desc.scale_block();
  for (std::int64_t r = 0; r < call.rows; ++r) {
    for (std::int64_t j = 0; j < call.h_blocks; ++j) {
      double largest = 0, code = 0;
      auto const at = [&](std::int64_t c) {
        std::int64_t const i = j * block + c;
        return (i < call.n ? f.h_gate : f.h_up)[r * call.n + i % call.n];
      };
      for (std::int64_t c = 0; c < block; ++c) largest = std::max(largest, std::abs(at(c)));
      double const scale = call.scale_of_h(r, j);
      double const wanted = reference::scale_of(largest, scale_rule(call.desc)).scale;
      // A rounding of the largest element may double a scale that is a power of two.
      if (GetParam().pow2 || call.mxfp8) {
        ASSERT_TRUE(scale == wanted || scale == 2 * wanted || 2 * scale == wanted) << r << ' ' << j;
      } else {
        ASSERT_LE(std::abs(scale / wanted - 1), 0x1p-7) << r << ' ' << j;
      }
      for (std::int64_t c = 0; c < block; ++c) {
        double const have = to_fp32(call.h[r * 2 * call.n + j * block + c]);
        int const exponent = have == 0 ? -6 : std::max(std::ilogb(have), -6);
        double const half_step = scale * std::ldexp(0.5, exponent - 3);
        ASSERT_LE(std::abs(have * scale - at(c)),
                  half_step * (1 + 0x1p-6) + 0x1p-8 * std::abs(at(c)))
            << r << ' ' << j << ' ' << c;
        code = std::max(code, std::abs(have));
      }
      ASSERT_GE(code, GetParam().pow2 || call.mxfp8 ? 224 : 448);
    }
  }
}

struct SavedMutant {
  char const* name;
  std::function<void(Call&)> break_it;
};

/// Scales in the order in which they are stored, each that of the place `shift` further.
template <class T>
void rotate(std::vector<T>& values, std::int64_t shift) {
  std::rotate(values.begin(), values.begin() + shift, values.end());
}

TEST_P(Backend, WrongSavedTensorsAreRejected) {
  // Scales of mxfp8 are bytes and not floats; its mutants are those of codes.
  bool const mxfp8 = GetParam().precision == Precision::mxfp8;
  verify::LayerData const data = layer_of(Kind::scaled, desc(), 15);
  reference::Inputs const inputs = verify::reference_inputs(data);
  auto const forward = reference::forward(inputs);
  reference::Values const d_o(data.d_o.begin(), data.d_o.end());
  auto const ref =
      verify::reference_tensors(data, forward, reference::backward(inputs, forward, d_o));
  auto const recipe = verify::recipe_samples(data, inputs);
  auto const accepts = [&](verify::Tensors const& out) {
    return verify::all_ok(verify::judge(data, inputs, forward, ref, recipe, out)) &&
           verify::lost_db(ref, recipe, out, data.desc.num_slots()).empty();
  };
  SavedMutant const mutants[] = {
      {"none", [](Call&) {}},
      {"scale of the next row of x", [](Call& c) { rotate(c.x_scale, c.x_blocks); }},
      {"scale of the next block of x", [](Call& c) { rotate(c.x_scale, 1); }},
      {"x without scales", [](Call& c) { std::fill(c.x_scale.begin(), c.x_scale.end(), 1.f); }},
      {"codes of the next row of x", [](Call& c) { rotate(c.x8, c.d); }},
      {"scale of x twice",
       [](Call& c) {
         for (float& s : c.x_scale) s *= s;
       }},
      {"one row of x has another's scale",
       [](Call& c) { c.x_scale[2 * c.x_blocks] = c.x_scale[3 * c.x_blocks]; }},
      {"scale of the next row of h", [](Call& c) { rotate(c.h_scale, 1); }},
      {"scale of gate for up, and of up for gate",
       [](Call& c) { rotate(c.h_scale, c.padded * c.h_blocks / 2); }},
      {"codes of the next row of h", [](Call& c) { rotate(c.h, 2 * c.n); }},
      {"gate for up", [](Call& c) { rotate(c.h, c.n); }},
      {"NaN for saturation",
       [](Call& c) {
         for (E4m3& code : c.h) code.bits = (code.bits & 0x7f) == 0x7e ? 0x7f : code.bits;
       }},
  };
  for (SavedMutant const& mutant : mutants) {
    if (mxfp8 && std::string(mutant.name).find("scale") != std::string::npos) continue;
    Call call{data};
    ASSERT_TRUE(call.forward().ok());
    mutant.break_it(call);
    ASSERT_TRUE(call.backward().ok());
    EXPECT_EQ(accepts(call.tensors()), &mutant == &mutants[0]) << mutant.name;
  }
}

TEST_P(Backend, NanStaysWithItsToken) {
  verify::LayerData const clean = layer_of(Kind::normal, desc(), 16);
  verify::LayerData dirty = clean;
  std::int64_t const d = kShape.hidden, token = 7, zero = 9;
  dirty.x[token * d + 3] = std::numeric_limits<float>::quiet_NaN();
  dirty.x[(token + 1) * d + 5] = std::numeric_limits<float>::infinity();
  std::fill_n(dirty.x.begin() + zero * d, d, -0.0f);
  Call plain{clean}, call{dirty};
  plain.run();
  call.run();
  auto const want = plain.tensors(), have = call.tensors();
  for (std::int64_t t = 0; t < kShape.tokens; ++t) {
    bool const is_nan = t == token || t == token + 1;
    for (std::int64_t c = 0; c < d; ++c) {
      float const o = have.at("o")[t * d + c];
      if (t == zero) {
        ASSERT_EQ(o, 0) << c;
      } else if (is_nan) {
        ASSERT_TRUE(std::isnan(o)) << t << ' ' << c;
      } else {
        ASSERT_EQ(o, want.at("o")[t * d + c]) << t << ' ' << c;
        ASSERT_EQ(have.at("dx")[t * d + c], want.at("dx")[t * d + c]) << t << ' ' << c;
      }
    }
  }
  for (std::int64_t e = 0; e < kShape.experts; ++e) {
    bool touched = false, has_zero = false;
    for (std::int64_t k = 0; k < 2; ++k) {
      touched |= clean.topk_ids[token * 2 + k] == e || clean.topk_ids[(token + 1) * 2 + k] == e;
      has_zero |= clean.topk_ids[zero * 2 + k] == e;
    }
    std::int64_t const size = 2 * kShape.intermediate * d;
    float const* const dw = &have.at("dw_up")[e * size];
    EXPECT_EQ(std::any_of(dw, dw + size, [](float v) { return std::isnan(v); }), touched) << e;
    if (touched || has_zero) continue;
    for (std::int64_t i = 0; i < size; ++i) ASSERT_EQ(dw[i], want.at("dw_up")[e * size + i]);
  }
}

}  // namespace
}  // namespace tessera::low_precision_tests

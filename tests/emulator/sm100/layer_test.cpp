// SPDX-License-Identifier: Apache-2.0
// The layer's forward and backward pass as a GPU of compute capability 10.0 would run them, on a CUDA that
// layer_cuda.cpp plays: its own plan, arguments, order and selection; every GEMM of the experts from the sources for
// sm_100a. Results are compared with loops in fp64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/reference/activation.hpp"
#include "cuda/host/projection.hpp"
#include "cuda/layer/backend.hpp"
#include "tests/emulator/memory.hpp"
#include "tests/emulator/sm100/layer_cuda.hpp"
#include "tests/emulator/sm100/random_cases.hpp"

namespace tessera::cuda {
namespace {

using emulator::Bits;
using emulator::Memory;
using Doubles = std::vector<double>;

struct Sizes {
  std::int64_t tokens, hidden, intermediate, experts, top_k;
};

// What else a layer may differ in.
struct Options {
  std::int64_t column_chunk = 0;
  SavePolicy save = SavePolicy::h;
  Activation activation = {};
  WeightLayout layout = {};
};

double widened(Memory<Bits> const& from, std::int64_t i) { return emulator::widen(from[i]); }
double widened(Memory<float> const& from, std::int64_t i) { return from[i]; }

// The largest error is a small part of the largest value, which is not 0.
template <class Values>
void expect_close(char const* what, Values const& values, Doubles const& wanted) {
  double size = 0, error = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    double const value = widened(values, static_cast<std::int64_t>(i));
    size = std::max(size, std::fabs(wanted[i]));
    error = std::isnan(value) ? INFINITY : std::max(error, std::fabs(value - wanted[i]));
  }
  EXPECT_GT(size, 0.01) << what;
  EXPECT_LE(error, 0.015 * size) << what;
}

template <class T>
Tensor view(Memory<T> const& memory, DType dtype, std::initializer_list<std::int64_t> shape) {
  return tensor(memory.get(), dtype, shape);
}

// A layer whose ids and weights the caller gives: its tensors, its passes, and what they should have made.
class Layer {
 public:
  explicit Layer(Sizes const& sizes, Options const& options = {}) : s_(sizes), options_(options) {
    desc_.column_chunk = options.column_chunk;
    desc_.save = options.save;
    desc_.activation = options.activation;
    desc_.layout = options.layout;
    desc_.shape = {.tokens = s_.tokens,
                   .hidden = s_.hidden,
                   .intermediate = s_.intermediate,
                   .experts = s_.experts,
                   .top_k = s_.top_k};
    desc_.dtype = DType::bf16;
    for (std::int64_t slot = 0; slot < slots_; ++slot) {
      // The last expert gets none; a few slots are sentinels.
      std::int64_t const token = slot / s_.top_k, choice = slot % s_.top_k;
      ids_[slot] = slot % 11 == 10
                       ? -1
                       : static_cast<std::int32_t>((token * token + choice) %
                                                   std::max<std::int64_t>(s_.experts - 1, 1));
      scores_[slot] = 0.25f + 0.03125f * static_cast<float>(slot % 19);
    }
    std::uint64_t seed = 0;
    for (auto const& [memory, scale] :
         {std::pair{&x_, 1.0f}, {&d_o_, 1.0f}, {&up_, 0.2f}, {&down_, 0.2f}}) {
      emulator::fill(memory->get(), static_cast<std::int64_t>(memory->size()), ++seed, scale);
    }
  }

  void forward(DeviceContext const& device, Stream stream) {
    MoeForwardArgs args;
    args.x = view(x_, DType::bf16, {s_.tokens, s_.hidden});
    args.topk_ids = view(ids_, DType::int32, {s_.tokens, s_.top_k});
    args.topk_weights = view(scores_, DType::fp32, {s_.tokens, s_.top_k});
    args.weights = weights();
    args.o = view(o_, DType::bf16, {s_.tokens, s_.hidden});
    if (desc_.save == SavePolicy::h)
      args.h = view(h_, DType::bf16, {slots_, width_ * s_.intermediate});
    args.routing = {routing_.get(), routing_.size()};
    Memory<std::byte> workspace(bytes_of(Pass::forward));
    args.workspace = {workspace.get(), workspace.size()};
    Status const status = moe_forward(device, desc_, args, tables(), routing_.size(), stream);
    ASSERT_TRUE(status.ok()) << status.text();
    ASSERT_EQ(finish(), "");
  }

  void backward(DeviceContext const& device, Stream stream) {
    MoeBackwardArgs args;
    args.d_o = view(d_o_, DType::bf16, {s_.tokens, s_.hidden});
    args.x = view(x_, DType::bf16, {s_.tokens, s_.hidden});
    if (desc_.save == SavePolicy::h)
      args.h = view(h_, DType::bf16, {slots_, width_ * s_.intermediate});
    args.routing = {routing_.get(), routing_.size()};
    args.weights = weights();
    args.dx = view(dx_, DType::bf16, {s_.tokens, s_.hidden});
    args.dscores = view(dscores_, DType::fp32, {slots_});
    args.gradients.dw_up = of_up(dw_up_, DType::fp32);
    args.gradients.dw_down = of_down(dw_down_, DType::fp32);
    Memory<std::byte> workspace(bytes_of(Pass::backward));
    args.workspace = {workspace.get(), workspace.size()};
    Status const status = moe_backward(device, desc_, args, tables(), Pass::backward, stream);
    ASSERT_TRUE(status.ok()) << status.text();
    ASSERT_EQ(finish(), "");
  }

  void expect_right_output() {
    Doubles o(o_.size());
    for_each_slot([&](Slot const& slot) {
      for (std::int64_t c = 0; c < s_.hidden; ++c) {
        double y = 0;
        for (std::int64_t i = 0; i < s_.intermediate; ++i) {
          y += slot.a[i] * widened(down_, down_at(slot.expert, c, i));
        }
        o[slot.token * s_.hidden + c] += slot.score * y;
      }
    });
    expect_close("o", o_, o);
  }

  void expect_right_gradients() {
    Doubles dx(dx_.size()), dscores(dscores_.size()), dw_up(dw_up_.size()),
        dw_down(dw_down_.size());
    std::int64_t const d = s_.hidden, n = s_.intermediate;
    for_each_slot([&](Slot const& slot) {
      std::int64_t const first_x = slot.token * d;
      for (std::int64_t i = 0; i < n; ++i) {
        double t = 0;
        for (std::int64_t c = 0; c < d; ++c) {
          t += widened(d_o_, first_x + c) * widened(down_, down_at(slot.expert, c, i));
        }
        dscores[slot.index] += t * slot.a[i];
        double const da = slot.score * t, dh[2] = {da * slot.slope[0][i], da * slot.slope[1][i]};
        for (std::int64_t c = 0; c < d; ++c) {
          dw_down[down_at(slot.expert, c, i)] +=
              slot.score * slot.a[i] * widened(d_o_, first_x + c);
          for (int half = 0; half < width_; ++half) {
            std::int64_t const w = up_at(slot.expert, half, i, c);
            dw_up[w] += dh[half] * widened(x_, first_x + c);
            dx[first_x + c] += dh[half] * widened(up_, w);
          }
        }
      }
    });
    expect_close("dx", dx_, dx);
    expect_close("dscores", dscores_, dscores);
    expect_close("dw_up", dw_up_, dw_up);
    expect_close("dw_down", dw_down_, dw_down);
  }

  // The bits of every result, and less memory for them.
  void expect_bits_of(Layer const& whole) const {
    auto const same = [](auto const& one, auto const& other) {
      return std::memcmp(one.get(), other.get(), one.size() * sizeof(*one.get())) == 0;
    };
    EXPECT_TRUE(same(o_, whole.o_)) << "o";
    EXPECT_TRUE(same(dx_, whole.dx_)) << "dx";
    EXPECT_TRUE(same(dscores_, whole.dscores_)) << "dscores";
    EXPECT_TRUE(same(dw_up_, whole.dw_up_)) << "dw_up";
    EXPECT_TRUE(same(dw_down_, whole.dw_down_)) << "dw_down";
    for (Pass const pass : {Pass::forward, Pass::backward}) {
      EXPECT_LT(bytes_of(pass), whole.bytes_of(pass));
    }
  }

 private:
  // A slot that has an expert: h, and what follows from it.
  struct Slot {
    std::int64_t index, token, expert;
    double score;
    Doubles slope[2] = {}, a = {};  // of a by the halves of h, and a
  };

  template <class Body>
  void for_each_slot(Body body) {
    std::int64_t const n = s_.intermediate, d = s_.hidden;
    for (std::int64_t index = 0; index < slots_; ++index) {
      if (ids_[index] < 0) continue;
      Slot slot{.index = index,
                .token = index / s_.top_k,
                .expert = ids_[index],
                .score = scores_[index]};
      for (std::int64_t i = 0; i < n; ++i) {
        double h[2] = {};
        for (int half = 0; half < width_; ++half) {
          for (std::int64_t c = 0; c < d; ++c) {
            h[half] +=
                widened(x_, slot.token * d + c) * widened(up_, up_at(slot.expert, half, i, c));
          }
        }
        Activation const& act = options_.activation;
        double const gate = width_ == 2 ? h[0] : 0, up = h[width_ - 1];
        auto const slopes = reference::activation_gradient(act, gate, up, 1.0);
        slot.slope[0].push_back(width_ == 2 ? slopes.gate : slopes.up);
        slot.slope[1].push_back(slopes.up);
        slot.a.push_back(reference::activate(act, gate, up));
      }
      body(slot);
    }
  }
  // Where row i of a half of an expert's w_up has column c, and row c of w_down column i.
  std::int64_t up_at(std::int64_t expert, int half, std::int64_t i, std::int64_t c) const {
    bool const up_first = options_.layout.order == GateUpOrder::up_first && width_ == 2;
    std::int64_t const row = (up_first ? 1 - half : half) * s_.intermediate + i;
    std::int64_t const rows = width_ * s_.intermediate;
    return transposed() ? (expert * s_.hidden + c) * rows + row
                        : (expert * rows + row) * s_.hidden + c;
  }
  std::int64_t down_at(std::int64_t expert, std::int64_t c, std::int64_t i) const {
    return transposed() ? (expert * s_.intermediate + i) * s_.hidden + c
                        : (expert * s_.hidden + c) * s_.intermediate + i;
  }
  bool transposed() const { return options_.layout.orientation == WeightOrientation::transposed; }
  template <class T>
  Tensor of_up(Memory<T> const& memory, DType dtype) const {
    std::int64_t const rows = width_ * s_.intermediate, d = s_.hidden;
    return transposed() ? view(memory, dtype, {s_.experts, d, rows})
                        : view(memory, dtype, {s_.experts, rows, d});
  }
  template <class T>
  Tensor of_down(Memory<T> const& memory, DType dtype) const {
    std::int64_t const n = s_.intermediate, d = s_.hidden;
    return transposed() ? view(memory, dtype, {s_.experts, n, d})
                        : view(memory, dtype, {s_.experts, d, n});
  }

  ExpertWeights weights() const {
    ExpertWeights out;
    out.w_up = of_up(up_, DType::bf16);
    out.w_down = of_down(down_, DType::bf16);
    return out;
  }
  RoutingView tables() {
    auto* const words = reinterpret_cast<std::int32_t*>(routing_.get());
    std::int32_t* const rows = words + s_.experts + 1;
    return {.expert_offsets = words,
            .sort_permutation = rows,
            .gather_index = rows + slots_,
            .inverse_permutation = rows + 2 * slots_,
            .scores = reinterpret_cast<float*>(rows + 3 * slots_)};
  }
  std::int64_t bytes_of(Pass pass) const {
    return static_cast<std::int64_t>(workspace_bytes(desc_, pass, routing_.size()));
  }

  Sizes s_;
  Options options_;
  int width_ = options_.activation.gated() ? 2 : 1;
  MoeDesc desc_;
  std::int64_t slots_ = s_.tokens * s_.top_k;
  std::int64_t matrix_ = s_.experts * s_.hidden * s_.intermediate;
  Memory<std::int32_t> ids_{slots_};
  Memory<float> scores_{slots_}, dscores_{slots_};
  Memory<Bits> x_{s_.tokens * s_.hidden}, d_o_{s_.tokens * s_.hidden}, up_{width_ * matrix_},
      down_{matrix_}, h_{slots_ * width_ * s_.intermediate};
  Memory<Bits> o_{s_.tokens * s_.hidden}, dx_{s_.tokens * s_.hidden};
  Memory<float> dw_up_{width_ * matrix_}, dw_down_{matrix_};
  Memory<std::byte> routing_{4 * (s_.experts + 1 + 4 * slots_)};
};

void expect_right_passes(Sizes const& sizes, Options const& options = {}) {
  start_played_cuda({.major = 10, .sm_count = 2});
  auto const device = DeviceContext::open(0, Unproven::taken);
  ASSERT_TRUE(device.ok()) << device.status().text();
  ASSERT_EQ(device.value()->architecture(), Architecture::sm_100);
  CUstream_st stream;
  Layer layer(sizes, options);
  ASSERT_NO_FATAL_FAILURE(layer.forward(*device.value(), {.native = &stream}));
  layer.expect_right_output();
  ASSERT_NO_FATAL_FAILURE(layer.backward(*device.value(), {.native = &stream}));
  layer.expect_right_gradients();
}

// Few rows for each expert: by one CTA. Neither d nor n fills its tiles.
TEST(LayerSm100, ForwardAndBackwardByOneCta) {
  expect_right_passes({.tokens = 40, .hidden = 136, .intermediate = 72, .experts = 4, .top_k = 2});
}

// Enough rows for pairs of CTAs.
TEST(LayerSm100, ForwardAndBackwardByPairs) {
  expect_right_passes({.tokens = 300, .hidden = 64, .intermediate = 64, .experts = 2, .top_k = 2});
}

// Backward makes h again.
TEST(LayerSm100, BackwardWithoutH) {
  expect_right_passes({.tokens = 40, .hidden = 72, .intermediate = 64, .experts = 3, .top_k = 2},
                      {.save = SavePolicy::x});
}

// Each activation through the selection, and weights in other orders.
TEST(LayerSm100, ActivationsAndLayouts) {
  for (int kind = 0; kind <= static_cast<int>(ActivationKind::gelu_erf); ++kind) {
    SCOPED_TRACE(kind);
    bool const odd = kind % 2 != 0;
    expect_right_passes(
        {.tokens = 24, .hidden = 72, .intermediate = 64, .experts = 3, .top_k = 2},
        {.activation = {.kind = static_cast<ActivationKind>(kind)},
         .layout = {odd ? GateUpOrder::up_first : GateUpOrder::concat,
                    odd ? WeightOrientation::transposed : WeightOrientation::rows}});
    if (testing::Test::HasFatalFailure()) return;
  }
}

// Any sizes, activation, layout and chunks; a GPU of two to four SMs.
TEST(LayerSm100, RandomLayers) {
  emulator::RandomCases const cases = emulator::random_cases({.seed = 11, .count = 5});
  std::mt19937 rng(cases.seed);
  auto const draw = [&](unsigned below) { return static_cast<std::int64_t>(rng() % below); };
  for (std::uint32_t i = 0; i < cases.count; ++i) {
    constexpr std::int64_t kFewest =
        tessera::cuda::kGemvTokens + 1;  // fewer take kernels that are not played here
    Sizes sizes{.tokens = kFewest + draw(90),
                .hidden = 8 * (1 + draw(25)),
                .intermediate = 8 * (1 + draw(18)),
                .experts = 1 + draw(6),
                .top_k = 1};
    sizes.top_k += draw(static_cast<unsigned>(std::min<std::int64_t>(sizes.experts, 3)));
    if (draw(5) == 0) {  // enough rows for pairs
      sizes.experts = std::min<std::int64_t>(sizes.experts, 2);
      sizes.top_k = std::min(sizes.top_k, sizes.experts);
      sizes.tokens = 256 * sizes.experts;
      sizes.hidden = std::min<std::int64_t>(sizes.hidden, 72);
    }
    Options options;
    options.activation.kind = static_cast<ActivationKind>(draw(10));
    options.save = draw(3) == 0 ? SavePolicy::x : SavePolicy::h;
    options.column_chunk = draw(3) == 0 ? 8 * (1 + draw(10)) : 0;
    options.layout = {draw(2) == 0 ? GateUpOrder::concat : GateUpOrder::up_first,
                      draw(2) == 0 ? WeightOrientation::rows : WeightOrientation::transposed};
    SCOPED_TRACE("seed " + std::to_string(cases.seed) + ", case " + std::to_string(i) + ": T " +
                 std::to_string(sizes.tokens) + ", d " + std::to_string(sizes.hidden) + ", n " +
                 std::to_string(sizes.intermediate));
    expect_right_passes(sizes, options);
    if (testing::Test::HasFailure()) return;
  }
}

// y and dx rows of some columns at a time, the last ones fewer: nothing is left over or taken twice. 100 are 96.
TEST(LayerSm100, ColumnsInChunks) {
  Sizes const sizes{.tokens = 40, .hidden = 136, .intermediate = 72, .experts = 4, .top_k = 2};
  start_played_cuda({.major = 10, .sm_count = 2});
  auto const device = DeviceContext::open(0, Unproven::taken);
  ASSERT_TRUE(device.ok()) << device.status().text();
  CUstream_st stream;
  Layer whole(sizes);
  ASSERT_NO_FATAL_FAILURE(whole.forward(*device.value(), {.native = &stream}));
  ASSERT_NO_FATAL_FAILURE(whole.backward(*device.value(), {.native = &stream}));
  for (std::int64_t const chunk : {100, 64, 8}) {
    SCOPED_TRACE(chunk);
    Layer chunked(sizes, {.column_chunk = chunk});
    ASSERT_NO_FATAL_FAILURE(chunked.forward(*device.value(), {.native = &stream}));
    chunked.expect_right_output();
    ASSERT_NO_FATAL_FAILURE(chunked.backward(*device.value(), {.native = &stream}));
    chunked.expect_right_gradients();
    chunked.expect_bits_of(whole);
  }
}

// Kernels for codes are sm_90a's, which a GPU of sm_100a does not run.
TEST(LayerSm100, RefusesCodes) {
  start_played_cuda({.major = 10, .sm_count = 2});
  auto const device = DeviceContext::open(0, Unproven::taken);
  ASSERT_TRUE(device.ok()) << device.status().text();
  MoeDesc desc;
  desc.shape = {.tokens = 8, .hidden = 256, .intermediate = 256, .experts = 2, .top_k = 1};
  desc.dtype = DType::bf16;
  desc.precision = Precision::fp8;
  Status const statuses[] = {moe_forward(*device.value(), desc, {}, {}, 0, {}),
                             moe_backward(*device.value(), desc, {}, {}, Pass::backward, {})};
  for (Status const& status : statuses) {
    EXPECT_EQ(std::string(status.text()).find("precision=fp8 on sm_100a"), 0) << status.text();
  }
}

// Nobody gets such a context without asking for it.
TEST(LayerSm100, IsRefusedUnlessItIsAskedFor) {
  start_played_cuda({.major = 10, .sm_count = 2});
  auto const device = DeviceContext::open(0);
  ASSERT_FALSE(device.ok());
  EXPECT_NE(std::string(device.status().text()).find("never run on hardware"), std::string::npos)
      << device.status().text();
}

}  // namespace
}  // namespace tessera::cuda

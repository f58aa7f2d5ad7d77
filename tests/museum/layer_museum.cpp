// SPDX-License-Identifier: Apache-2.0
// Bugs that other libraries shipped, as direct calls of the API.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/api/layer.hpp"

namespace tessera::api_test {
namespace {

float const kNaN = std::numeric_limits<float>::quiet_NaN();

double norm(Floats const& values) {
  double sum = 0;
  for (float const value : values) sum += static_cast<double>(value) * static_cast<double>(value);
  return std::sqrt(sum);
}

double relative_difference(Floats const& a, Floats const& b) {
  Floats difference(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) difference[i] = a[i] - b[i];
  return norm(difference) / norm(b);
}

struct LayerMuseum : testing::Test {
  Context context = value_of(Context::create({.num_threads = 2}));
};

// transformers #48205, torch's grouped_mm: buffers are larger than the rows in use, the tail is never written,
// and 0 * NaN in a weight gradient is NaN. Tail rows and their scores hold NaN here.
TEST_F(LayerMuseum, TailRowsMayHoldNaN) {
  constexpr std::size_t kValid = 16;
  MoeDesc desc = small_desc();
  desc.shape.top_k = 1;
  desc.grouping = RowGrouping::offsets;
  std::vector<std::int32_t> offsets = {0, 4, 4, 11, 15, kValid};  // of 19 rows
  Layer layer(context, desc);
  layer.forward.topk_ids = layer.forward.topk_weights = {};
  layer.forward.expert_offsets = tensor(offsets.data(), {6});
  layer.forward.row_scores = tensor(layer.weights.data(), {19});
  std::size_t const hidden = 12;
  std::fill(layer.x.begin() + kValid * hidden, layer.x.end(), kNaN);
  std::fill(layer.d_o.begin() + kValid * hidden, layer.d_o.end(), kNaN);
  std::fill(layer.weights.begin() + kValid, layer.weights.end(), kNaN);
  std::fill(layer.h.begin(), layer.h.end(), kNaN);
  ASSERT_TRUE(layer.run_forward().ok());
  ASSERT_TRUE(layer.run_backward().ok());
  for (Floats const* gradient : {&layer.dw_up, &layer.dw_down, &layer.db_up, &layer.db_down}) {
    EXPECT_TRUE(std::isfinite(norm(*gradient)));
    EXPECT_GT(norm(*gradient), 0);
  }
  for (std::size_t i = kValid * hidden; i < layer.o.size(); ++i) {
    ASSERT_EQ(layer.o[i], 0.0f);
    ASSERT_EQ(layer.dx[i], 0.0f);
  }
}

// Address space without memory behind it until it is used.
class SparseFloats {
 public:
  explicit SparseFloats(std::size_t count) : bytes_(count * sizeof(float)) {
    void* const mapped = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    data_ = mapped == MAP_FAILED ? nullptr : static_cast<float*>(mapped);
  }
  ~SparseFloats() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
  }
  SparseFloats(SparseFloats const&) = delete;
  SparseFloats& operator=(SparseFloats const&) = delete;
  [[nodiscard]] float* data() const noexcept { return data_; }

 private:
  std::size_t bytes_;
  float* data_;
};

// Liger #1248, vllm #48398: row * d in 32 bits points elsewhere once it passes 2^31. Rows 2^30 elements apart
// reach that with three tokens and three experts, in address space alone.
TEST_F(LayerMuseum, ElementOffsetsBeyond32Bits) {
  constexpr std::int64_t kPitch = std::int64_t{1} << 30, kCount = 4;
  MoeDesc desc = small_desc();
  desc.bias = false;
  desc.shape = {.tokens = kCount, .hidden = 8, .intermediate = 4, .experts = kCount, .top_k = 1};
  Layer dense(context, desc), far(context, desc);
  for (Layer* layer : {&dense, &far})
    layer->ids = {3, 2, 1, 0};  // the far rows meet the far experts
  ASSERT_TRUE(dense.run_forward().ok());
  ASSERT_TRUE(dense.run_backward().ok());

  SparseFloats const x(kCount * kPitch), o(kCount * kPitch), d_o(kCount * kPitch),
      dx(kCount * kPitch), w_up(kCount * kPitch), dw_up(kCount * kPitch);
  for (SparseFloats const* memory : {&x, &o, &d_o, &dx, &w_up, &dw_up}) {
    if (memory->data() == nullptr)
      GTEST_SKIP() << "no 16 GiB of address space for a mapping; raise `ulimit -v` or allow it by "
                      "`sysctl vm.overcommit_memory=1`";
  }
  auto const spread = [](Floats const& from, SparseFloats const& to) {
    std::size_t const row = from.size() / kCount;
    for (std::size_t i = 0; i < kCount; ++i) {
      std::memcpy(to.data() + i * kPitch, from.data() + i * row, row * sizeof(float));
    }
  };
  auto const gathered = [](SparseFloats const& from, std::size_t size) {
    Floats values(size);
    std::size_t const row = size / kCount;
    for (std::size_t i = 0; i < kCount; ++i) {
      std::memcpy(values.data() + i * row, from.data() + i * kPitch, row * sizeof(float));
    }
    return values;
  };
  auto const at = [](auto view, SparseFloats const& memory) {
    view.data = memory.data();
    view.stride[0] = kPitch;
    return view;
  };
  spread(far.x, x);
  spread(far.d_o, d_o);
  spread(far.w_up, w_up);
  far.forward.x = far.backward.x = at(far.forward.x, x);
  far.forward.o = at(far.forward.o, o);
  far.forward.weights.w_up = far.backward.weights.w_up = at(far.forward.weights.w_up, w_up);
  far.backward.d_o = at(far.backward.d_o, d_o);
  far.backward.dx = at(far.backward.dx, dx);
  far.backward.gradients.dw_up = at(far.backward.gradients.dw_up, dw_up);
  Status const forward = far.run_forward();
  ASSERT_TRUE(forward.ok()) << forward.text();
  Status const backward = far.run_backward();
  ASSERT_TRUE(backward.ok()) << backward.text();
  EXPECT_EQ(gathered(o, dense.o.size()), dense.o);
  EXPECT_EQ(gathered(dx, dense.dx.size()), dense.dx);
  EXPECT_EQ(gathered(dw_up, dense.dw_up.size()), dense.dw_up);
  EXPECT_EQ(far.dw_down, dense.dw_down);
}

// sglang #3339: counters in the workspace were taken for zeros. Whatever lies there, the bits are the same.
TEST_F(LayerMuseum, WorkspaceContentDoesNotMatter) {
  for (RouterKind const router : {RouterKind::given, RouterKind::topk_softmax}) {
    Floats expected;
    for (int const content : {0x00, 0xff, 0x7f, 0x01}) {  // zeros, NaN and -1, large, small
      Layer layer(context, small_desc(router));
      for (auto* workspace :
           {&layer.forward_workspace, &layer.backward_workspace, &layer.routing}) {
        std::memset(workspace->data(), content, workspace->size());
      }
      ASSERT_TRUE(layer.run_forward().ok());
      ASSERT_TRUE(layer.run_backward().ok());
      Floats result = layer.o;
      for (Floats const* more : {&layer.dx, &layer.dw_up, &layer.dw_down, &layer.dscores}) {
        result.insert(result.end(), more->begin(), more->end());
      }
      if (expected.empty()) expected = result;
      EXPECT_EQ(result, expected) << content;
    }
  }
}

// A rank of expert parallelism without the exchange: its own experts, all tokens, other ranks' ids as
// sentinels.
struct Rank : Layer {
  Rank(Context const& context_, Layer const& whole, std::int64_t first, std::int64_t count)
      : Layer(context_, local(whole.desc, count)) {
    x = whole.x;
    d_o = whole.d_o;
    weights = whole.weights;
    auto const part = [&](Floats const& all, Floats& mine) {
      std::size_t const each = all.size() / static_cast<std::size_t>(whole.desc.shape.experts);
      auto const begin =
          all.begin() + static_cast<std::ptrdiff_t>(first) * static_cast<std::ptrdiff_t>(each);
      std::copy_n(begin, mine.size(), mine.begin());
    };
    part(whole.w_up, w_up);
    part(whole.w_down, w_down);
    part(whole.b_up, b_up);
    part(whole.b_down, b_down);
    for (std::size_t slot = 0; slot < ids.size(); ++slot) {
      auto const mine = whole.ids[slot] - static_cast<std::int32_t>(first);
      ids[slot] = mine >= 0 && mine < count ? mine : static_cast<std::int32_t>(count);
    }
  }
  static MoeDesc local(MoeDesc desc, std::int64_t experts) {
    desc.shape.experts = experts;
    return desc;
  }
};

// flashinfer #3110: the sum over ranks was not what one GPU computes.
TEST_F(LayerMuseum, RanksAddUpToOneGpu) {
  MoeDesc desc = small_desc();
  desc.shape.experts = 6;
  Layer whole(context, desc);
  ASSERT_TRUE(whole.run_forward().ok());
  ASSERT_TRUE(whole.run_backward().ok());
  Floats o(whole.o.size(), 0.0f), dx(whole.dx.size(), 0.0f), dscores(whole.dscores.size(), 0.0f),
      dw_down;
  for (std::int64_t first = 0; first < 6; first += 2) {
    Rank rank(context, whole, first, 2);
    ASSERT_TRUE(rank.run_forward().ok());
    ASSERT_TRUE(rank.run_backward().ok());
    for (auto const& [sum, part] :
         {std::pair{&o, &rank.o}, {&dx, &rank.dx}, {&dscores, &rank.dscores}}) {
      for (std::size_t i = 0; i < sum->size(); ++i) (*sum)[i] += (*part)[i];
    }
    dw_down.insert(dw_down.end(), rank.dw_down.begin(), rank.dw_down.end());
  }
  EXPECT_LT(relative_difference(o, whole.o), 1e-6);
  EXPECT_LT(relative_difference(dx, whole.dx), 1e-6);
  EXPECT_EQ(dscores, whole.dscores);
  EXPECT_EQ(dw_down, whole.dw_down);
}

// transformers #45662: with FSDP2 every rank computed rank 0's experts. FlashMoE #18: experts of one rank shared
// a buffer. An expert's output names the expert here: its down weights are 0, its bias is e + 1.
TEST_F(LayerMuseum, EveryRankHasItsOwnExperts) {
  MoeDesc desc = small_desc();
  desc.shape.top_k = 1;
  desc.shape.experts = 6;
  Layer whole(context, desc);
  std::fill(whole.w_down.begin(), whole.w_down.end(), 0.0f);
  std::fill(whole.weights.begin(), whole.weights.end(), 1.0f);
  for (std::size_t i = 0; i < whole.b_down.size(); ++i) {
    whole.b_down[i] = static_cast<float>(i / 12 + 1);
  }
  for (std::size_t t = 0; t < whole.ids.size(); ++t)
    whole.ids[t] = static_cast<std::int32_t>(t % 6);
  for (std::int64_t first = 0; first < 6; first += 2) {
    Rank rank(context, whole, first, 2);
    ASSERT_TRUE(rank.run_forward().ok());
    for (std::size_t i = 0; i < rank.o.size(); ++i) {
      auto const expert = static_cast<std::int64_t>(i / 12 % 6);
      bool const here = expert >= first && expert < first + 2;
      ASSERT_EQ(rank.o[i], here ? static_cast<float>(expert + 1) : 0.0f) << i;
    }
  }
}

// sonic-moe #12, slime #1176: gate and up in the other order give a plausible, wrong model. Each layout holds the
// weights of `concat` here, and must give its results.
TEST_F(LayerMuseum, EveryLayoutAgreesWithConcat) {
  MoeDesc desc = small_desc();
  std::int64_t const e = 5, n = 10, d = 12;
  Layer concat(context, desc);
  ASSERT_TRUE(concat.run_forward().ok());
  ASSERT_TRUE(concat.run_backward().ok());
  auto const row_of = [&](GateUpOrder order, std::int64_t i, bool up) {
    switch (order) {
      case GateUpOrder::up_first:
        return up ? i : n + i;
      case GateUpOrder::interleaved:
        return 2 * i + (up ? 1 : 0);
      case GateUpOrder::blocked:
        return 2 * 5 * (i / 5) + i % 5 + (up ? 5 : 0);
      default:
        return up ? n + i : i;
    }
  };
  // w_up of `concat` in another order; of the bias with one column.
  auto const relaid = [&](Floats const& from, GateUpOrder order, bool transposed,
                          std::int64_t columns) {
    Floats to(from.size());
    for (std::int64_t expert = 0; expert < e; ++expert) {
      for (std::int64_t i = 0; i < 2 * n; ++i) {
        bool const up = i >= n;
        std::int64_t const row = row_of(order, up ? i - n : i, up);
        for (std::int64_t c = 0; c < columns; ++c) {
          std::int64_t const base = expert * 2 * n * columns;
          std::int64_t const at = transposed ? c * 2 * n + row : row * columns + c;
          to[static_cast<std::size_t>(base + at)] =
              from[static_cast<std::size_t>(base + i * columns + c)];
        }
      }
    }
    return to;
  };
  for (GateUpOrder const order :
       {GateUpOrder::up_first, GateUpOrder::interleaved, GateUpOrder::blocked}) {
    for (bool const transposed : {false, true}) {
      MoeDesc other = desc;
      other.layout = {order, transposed ? WeightOrientation::transposed : WeightOrientation::rows,
                      order == GateUpOrder::blocked ? 5 : 0};
      Layer layer(context, other);
      layer.w_up = relaid(concat.w_up, order, transposed, d);
      layer.b_up = relaid(concat.b_up, order, false, 1);
      layer.forward.weights.w_up =
          tensor(layer.w_up.data(), {e, transposed ? d : 2 * n, transposed ? 2 * n : d});
      layer.forward.weights.b_up = tensor(layer.b_up.data(), {e, 2 * n});
      layer.backward.gradients.dw_up =
          tensor(layer.dw_up.data(), {e, transposed ? d : 2 * n, transposed ? 2 * n : d});
      if (transposed) {
        Floats down(layer.w_down.size());
        for (std::int64_t i = 0; i < e * d * n; ++i) {
          std::int64_t const expert = i / (d * n), c = i / n % d, j = i % n;
          down[static_cast<std::size_t>(expert * d * n + j * d + c)] =
              concat.w_down[static_cast<std::size_t>(i)];
        }
        layer.w_down = down;
        layer.forward.weights.w_down = tensor(layer.w_down.data(), {e, n, d});
        layer.backward.gradients.dw_down = tensor(layer.dw_down.data(), {e, n, d});
      }
      layer.backward.weights = layer.forward.weights;
      ASSERT_TRUE(layer.run_forward().ok());
      ASSERT_TRUE(layer.run_backward().ok());
      EXPECT_LT(relative_difference(layer.o, concat.o), 1e-6);
      EXPECT_LT(relative_difference(layer.dx, concat.dx), 1e-6);
      EXPECT_LT(relative_difference(layer.dw_up, relaid(concat.dw_up, order, transposed, d)), 1e-6);
    }
  }
  Layer swapped(context, desc);  // the bug: it would have shown
  swapped.w_up = relaid(concat.w_up, GateUpOrder::up_first, false, d);
  swapped.forward.weights.w_up = tensor(swapped.w_up.data(), {e, 2 * n, d});
  ASSERT_TRUE(swapped.run_forward().ok());
  EXPECT_GT(relative_difference(swapped.o, concat.o), 0.1);
}

// One token, d = n = E = K = 1, x = w_down = score = 1: h is the weights, o the activation, db_up its slopes.
struct Activated {
  double value, d_gate, d_up;
};
Activated activated(Context const& context, Activation const& activation, double gate, double up) {
  MoeDesc desc;
  desc.shape = {.tokens = 1, .hidden = 1, .intermediate = 1, .experts = 1, .top_k = 1};
  desc.activation = activation;
  Layer layer(context, desc);
  layer.x = layer.w_down = layer.weights = layer.d_o = {1};
  layer.ids = {0};
  layer.w_up = {static_cast<float>(gate)};
  if (activation.gated()) layer.w_up.push_back(static_cast<float>(up));
  layer.forward.x = layer.backward.x = tensor(layer.x.data(), {1, 1});
  layer.forward.weights.w_up = tensor(layer.w_up.data(), {1, desc.up_width(), 1});
  layer.forward.weights.w_down = tensor(layer.w_down.data(), {1, 1, 1});
  layer.forward.topk_weights = tensor(layer.weights.data(), {1, 1});
  layer.forward.topk_ids = tensor(layer.ids.data(), {1, 1});
  layer.backward.weights = layer.forward.weights;
  layer.backward.d_o = tensor(layer.d_o.data(), {1, 1});
  EXPECT_TRUE(layer.run_forward().ok());
  EXPECT_TRUE(layer.run_backward().ok());
  double const second = activation.gated() ? static_cast<double>(layer.dw_up[1]) : 0;
  return {static_cast<double>(layer.o[0]), static_cast<double>(layer.dw_up[0]), second};
}

// PaddleFleet #1464 lost the clamp of gpt-oss's activation; in prime-rl #2365 it was argued whether the gate is
// clamped from below, too. It is not: far below it still passes a gradient; up is clamped on both sides.
TEST_F(LayerMuseum, ClampBoundsGateAboveAndUpBoth) {
  Activation const activation{.kind = ActivationKind::clamped_swiglu};
  constexpr double kAlpha = 1.702, kLimit = 7;
  for (double const gate : {-20.0, -7.5, -1.0, 2.0, 7.0, 9.0}) {
    for (double const up : {-20.0, -7.0, -3.0, 0.5, 7.0, 8.0}) {
      double const g = std::min(gate, kLimit), u = std::clamp(up, -kLimit, kLimit);
      double const v = 1 / (1 + std::exp(-kAlpha * g));
      double const d_gate = gate <= kLimit ? (u + 1) * v * (1 + kAlpha * g * (1 - v)) : 0;
      double const d_up = std::abs(up) <= kLimit ? g * v : 0;
      Activated const out = activated(context, activation, gate, up);
      auto const near = [](double value) { return 2e-6 * std::abs(value) + 1e-30; };
      EXPECT_NEAR(out.value, (u + 1) * g * v, near((u + 1) * g * v)) << gate << " " << up;
      EXPECT_NEAR(out.d_gate, d_gate, near(d_gate)) << gate << " " << up;
      EXPECT_NEAR(out.d_up, d_up, near(d_up)) << gate << " " << up;
    }
  }
}

// SonicMoE's source: the tanh form ran where a model asks for erf, and a cache keyed without "gated" could hand a
// plain activation the gated kernel. All four, one after the other, each by its own formula.
TEST_F(LayerMuseum, BothGelusGatedAndPlain) {
  auto const tanh_form = [](double x) {
    return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  };
  auto const erf_form = [](double x) { return x / 2 * (1 + std::erf(x / std::sqrt(2.0))); };
  for (double const x : {-3.0, -1.5, 0.7, 2.2}) {
    constexpr double kUp = 3;
    ASSERT_GT(std::abs(tanh_form(x) - erf_form(x)), 5e-5);  // apart, so that a mix-up shows
    struct Case {
      ActivationKind kind;
      double expected;
    };
    for (Case const& c : {Case{ActivationKind::geglu, kUp * tanh_form(x)},
                          {ActivationKind::gelu_erf, erf_form(x)},
                          {ActivationKind::geglu_erf, kUp * erf_form(x)},
                          {ActivationKind::gelu, tanh_form(x)}}) {
      EXPECT_NEAR(activated(context, {.kind = c.kind}, x, kUp).value, c.expected, 2e-6)
          << static_cast<int>(c.kind) << " at " << x;
    }
  }
}

// LigerCute's source: weight gradients were added up in bf16, which stops growing after some 256 equal steps.
// 64 micro-batches into one fp32 buffer, against the sum of each one's own gradient in fp64.
TEST_F(LayerMuseum, ManyAccumulationsKeepTheirBits) {
  Layer sum(context);
  sum.backward.gradients.mode = GradientMode::accumulate;
  std::fill(sum.dw_up.begin(), sum.dw_up.end(), 0.0f);
  std::fill(sum.dw_down.begin(), sum.dw_down.end(), 0.0f);
  std::vector<double> exact(sum.dw_up.size(), 0.0);
  for (unsigned batch = 1; batch <= 64; ++batch) {
    std::mt19937 generator(batch);
    sum.x = random_floats(static_cast<std::int64_t>(sum.x.size()), 1, generator);
    sum.forward.x = sum.backward.x = tensor(sum.x.data(), {19, 12});
    ASSERT_TRUE(sum.run_forward().ok());
    ASSERT_TRUE(sum.run_backward().ok());
    Layer alone(context);
    alone.x = sum.x;
    alone.forward.x = alone.backward.x = tensor(alone.x.data(), {19, 12});
    ASSERT_TRUE(alone.run_forward().ok());
    ASSERT_TRUE(alone.run_backward().ok());
    for (std::size_t i = 0; i < exact.size(); ++i) exact[i] += static_cast<double>(alone.dw_up[i]);
  }
  double error = 0, size = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    double const e = static_cast<double>(sum.dw_up[i]) - exact[i];
    error += e * e;
    size += exact[i] * exact[i];
  }
  EXPECT_LT(std::sqrt(error / size), 1e-6);  // bf16 sums: about 1e-2
}

// Automodel #3140: recomputing a layer for its backward broke ties another way, so shapes changed; #3247: the
// token counters counted twice. Equal logits are all ties here; routing again, and recomputing h, change no bit.
TEST_F(LayerMuseum, RecomputedRoutingIsTheSame) {
  MoeDesc desc = small_desc(RouterKind::topk_softmax);
  Layer plain(context, desc);
  std::fill(plain.w_router.begin(), plain.w_router.end(), 0.0f);
  std::fill(plain.b_router.begin(), plain.b_router.end(), 0.0f);
  std::vector<std::int32_t> counts(5, -1);
  plain.forward.expert_counts = tensor(counts.data(), {5});
  ASSERT_TRUE(plain.run_forward().ok());
  RoutingView const tables = plain.tables();
  for (std::int64_t t = 0; t < desc.shape.tokens; ++t) {
    EXPECT_EQ(tables.topk_ids[2 * t], 0);  // ties go to the lower expert
    EXPECT_EQ(tables.topk_ids[2 * t + 1], 1);
  }
  std::vector<std::byte> const first = plain.routing;
  std::vector<std::int32_t> const counted = counts;
  ASSERT_TRUE(plain.run_forward().ok());
  EXPECT_EQ(plain.routing, first);
  EXPECT_EQ(counts, counted);
  EXPECT_EQ(counts, (std::vector<std::int32_t>{19, 19, 0, 0, 0}));
  ASSERT_TRUE(plain.run_backward().ok());

  desc.save = SavePolicy::x;
  Layer recomputed(context, desc);
  std::fill(recomputed.w_router.begin(), recomputed.w_router.end(), 0.0f);
  std::fill(recomputed.b_router.begin(), recomputed.b_router.end(), 0.0f);
  recomputed.forward.h = {};
  recomputed.backward.h = {};
  ASSERT_TRUE(recomputed.run_forward().ok());
  ASSERT_TRUE(recomputed.run_backward().ok());
  EXPECT_EQ(recomputed.o, plain.o);
  EXPECT_EQ(recomputed.dx, plain.dx);
  EXPECT_EQ(recomputed.dw_up, plain.dw_up);
  EXPECT_EQ(recomputed.dw_router, plain.dw_router);
}

}  // namespace
}  // namespace tessera::api_test

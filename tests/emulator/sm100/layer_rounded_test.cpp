// SPDX-License-Identifier: Apache-2.0
// A layer that rounds tokens, by the calls of the library: on an emulated GPU of sm_90 (layer_cuda.hpp), with its plan,
// arguments, order and the router's kernels, beside the same calls on the CPU. The router's part of dx goes by the dx
// rows and by the list of tokens, or, with dlogits of other losses, by a GEMM over all tokens.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include "tessera/tessera.hpp"
#include "tests/emulator/memory.hpp"
#include "tests/emulator/sm100/layer_cuda.hpp"

namespace tessera::emulator {
namespace {

constexpr MoeShape kShape{
    .tokens = 150, .hidden = 72, .intermediate = 64, .experts = 8, .top_k = 2};

MoeDesc rounded_desc(RouterKind kind = RouterKind::topk_softmax) {
  MoeDesc desc;
  desc.shape = kShape;
  desc.dtype = DType::bf16;
  desc.router.kind = kind;
  desc.router.round = Rounding::nr_f;
  desc.router.tile = 16;
  return desc;
}

Context context_on(DeviceKind kind) {
  auto made = Context::create({.device = {kind, 0}});
  EXPECT_TRUE(made.ok()) << made.status().text();
  return std::move(made).value();
}

enum class OtherLosses { none, zeros };  // whose dlogits a call may be given

// The tensors of a layer on one device; data depend on the shape alone.
class RoundedLayer {
 public:
  RoundedLayer(Context const& context, MoeDesc const& desc, OtherLosses losses = OtherLosses::none)
      : context_(context), desc_(desc) {
    MoeShape const& s = desc.shape;
    std::int64_t const width = desc.up_width() * s.intermediate, slots = desc.num_slots();
    forward_.x = input(DType::bf16, {s.tokens, s.hidden}, 1, 1.5f);
    forward_.w_router = input(desc.router_storage(), {s.experts, s.hidden}, 2, 0.3f);
    forward_.weights.w_up = input(DType::bf16, {s.experts, width, s.hidden}, 3, 0.2f);
    forward_.weights.w_down = input(DType::bf16, {s.experts, s.hidden, s.intermediate}, 4, 0.2f);
    forward_.o = output(DType::bf16, {s.tokens, s.hidden});
    forward_.h = output(DType::bf16, {slots, width});
    forward_.routing = memory(routing_bytes(desc).value());
    forward_.workspace = memory(workspace_bytes(context, desc, Pass::forward).value());
    backward.d_o = input(DType::bf16, {s.tokens, s.hidden}, 5, 1.5f);
    backward.x = forward_.x;
    backward.h = forward_.h;
    backward.routing = {forward_.routing.data, forward_.routing.bytes};
    backward.weights = forward_.weights;
    backward.w_router = forward_.w_router;
    backward.dx = output(DType::bf16, {s.tokens, s.hidden});
    backward.dscores = output(DType::fp32, {slots});
    backward.dlogits = output(DType::fp32, {s.tokens, s.experts});
    backward.gradients.dw_up = output(DType::fp32, {s.experts, width, s.hidden});
    backward.gradients.dw_down = output(DType::fp32, {s.experts, s.hidden, s.intermediate});
    backward.gradients.dw_router = output(DType::fp32, {s.experts, s.hidden});
    backward.workspace = memory(workspace_bytes(context, desc, Pass::backward).value());
    if (losses == OtherLosses::zeros) {
      Tensor const zeros = output(DType::fp32, {s.tokens, s.experts});
      std::memset(zeros.data, 0, sizeof(float) * static_cast<std::size_t>(s.tokens * s.experts));
      backward.aux_dlogits = zeros;
    }
  }

  void run() const {
    forward();
    Status const status = moe_backward(context_, desc_, backward, stream());
    ASSERT_TRUE(status.ok()) << status.text();
    ASSERT_EQ(cuda::finish(), "");
  }
  // Backward by two calls.
  void run_split() {
    MoeShape const& s = desc_.shape;
    std::int64_t const slots = desc_.num_slots();
    forward();
    MoeBackwardArgs input = backward, weights = backward;
    input.gradients = {};
    input.dlogits = weights.dlogits = {};
    input.dh = weights.dh = output(DType::bf16, {slots, desc_.up_width() * s.intermediate});
    input.a_scaled = weights.a_scaled = output(DType::bf16, {slots, s.intermediate});
    input.dlogits_saved = weights.dlogits_saved = output(DType::fp32, {s.tokens, s.experts});
    input.workspace = memory(workspace_bytes(context_, desc_, Pass::backward_input).value());
    Status status = moe_backward_input(context_, desc_, input, stream());
    ASSERT_TRUE(status.ok()) << status.text();
    ASSERT_EQ(cuda::finish(), "");
    weights.h = weights.weights.w_up = weights.weights.w_down = {};
    weights.w_router = {};
    weights.dx = weights.dscores = {};
    weights.workspace = memory(workspace_bytes(context_, desc_, Pass::backward_weights).value());
    status = moe_backward_weights(context_, desc_, weights, stream());
    ASSERT_TRUE(status.ok()) << status.text();
    ASSERT_EQ(cuda::finish(), "");
  }

  void forward() const {
    Status const status = moe_forward(context_, desc_, forward_, stream());
    ASSERT_TRUE(status.ok()) << status.text();
    ASSERT_EQ(cuda::finish(), "");
  }
  [[nodiscard]] Tensor const& o() const { return forward_.o; }

  MoeBackwardArgs backward;

 private:
  [[nodiscard]] Stream stream() const { return {.native = &stream_}; }
  // What a kernel does not write is no number.
  Buffer memory(std::size_t bytes) {
    auto const& own =
        memory_.emplace_back(std::make_unique<Memory<std::byte>>(static_cast<std::int64_t>(bytes)));
    std::memset(own->get(), 0xff, bytes);
    return {own->get(), bytes};
  }
  Tensor output(DType dtype, std::initializer_list<std::int64_t> shape) {
    Tensor out = tensor(static_cast<void*>(nullptr), dtype, shape, context_.device());
    out.data = memory(static_cast<std::size_t>(out.elements()) * dtype_bytes(dtype)).data;
    return out;
  }
  ConstTensor input(DType dtype, std::initializer_list<std::int64_t> shape, std::uint64_t seed,
                    float scale) {
    Tensor const out = output(dtype, shape);
    std::vector<Bits> values(static_cast<std::size_t>(out.elements()));
    fill(values.data(), out.elements(), seed, scale);
    for (std::int64_t i = 0; i < out.elements(); ++i) {
      Bits const value = values[static_cast<std::size_t>(i)];
      if (dtype == DType::fp32) {  // of more digits than bf16 has
        static_cast<float*>(out.data)[i] = widen(value) * 1.0017f;
      } else {
        static_cast<Bits*>(out.data)[i] = value;
      }
    }
    return out;
  }

  Context const& context_;
  MoeDesc desc_;
  MoeForwardArgs forward_;
  std::vector<std::unique_ptr<Memory<std::byte>>> memory_;
  mutable CUstream_st stream_;
};

bool equal(Tensor const& a, Tensor const& b) {
  return std::memcmp(a.data, b.data,
                     static_cast<std::size_t>(a.elements()) * dtype_bytes(a.dtype)) == 0;
}
double value_at(Tensor const& t, std::int64_t i) {
  return t.dtype == DType::fp32 ? static_cast<float const*>(t.data)[i]
                                : widen(static_cast<Bits const*>(t.data)[i]);
}

void expect_near(char const* what, Tensor const& want, Tensor const& have, double part) {
  double largest = 0, error = 0;
  for (std::int64_t i = 0; i < want.elements(); ++i) {
    double const a = value_at(want, i), b = value_at(have, i);
    largest = std::max(largest, std::fabs(a));
    error = std::isnan(b) ? INFINITY : std::max(error, std::fabs(a - b));
  }
  EXPECT_GT(largest, 0.01) << what;
  EXPECT_LT(error, part * largest) << what;
}
void expect_near(RoundedLayer const& cpu, RoundedLayer const& gpu) {
  expect_near("dx", cpu.backward.dx, gpu.backward.dx, 0.01);
  expect_near("dlogits", cpu.backward.dlogits, gpu.backward.dlogits, 0.01);
  expect_near("dw_up", cpu.backward.gradients.dw_up, gpu.backward.gradients.dw_up, 0.01);
  expect_near("dw_router", cpu.backward.gradients.dw_router, gpu.backward.gradients.dw_router,
              0.01);
}
void expect_equal(RoundedLayer const& a, RoundedLayer const& b) {
  EXPECT_TRUE(equal(a.backward.dx, b.backward.dx));
  EXPECT_TRUE(equal(a.backward.dscores, b.backward.dscores));
  EXPECT_TRUE(equal(a.backward.gradients.dw_up, b.backward.gradients.dw_up));
  EXPECT_TRUE(equal(a.backward.gradients.dw_router, b.backward.gradients.dw_router));
}
// Counts the tokens whose dx has equal bits.
std::int64_t equal_tokens(RoundedLayer const& a, RoundedLayer const& b) {
  std::int64_t equal = 0;
  auto const bytes = static_cast<std::size_t>(kShape.hidden) * sizeof(Bits);
  for (std::int64_t t = 0; t < kShape.tokens; ++t) {
    std::int64_t const first = t * kShape.hidden;
    equal += std::memcmp(static_cast<Bits const*>(a.backward.dx.data) + first,
                         static_cast<Bits const*>(b.backward.dx.data) + first, bytes) == 0;
  }
  return equal;
}

class LayerRounded : public testing::Test {
 protected:
  LayerRounded() { play(7); }
  static void play(std::uint64_t seed) {
    cuda::start_played_cuda({.major = 9, .sm_count = 4, .seed = seed});
  }
};

TEST_F(LayerRounded, IsNearTheCpu) {
  Context const host = context_on(DeviceKind::cpu), device = context_on(DeviceKind::cuda);
  for (RouterKind const kind :
       {RouterKind::topk_softmax, RouterKind::sigmoid_bias, RouterKind::softmax_topk}) {
    SCOPED_TRACE(static_cast<int>(kind));
    RoundedLayer const cpu(host, rounded_desc(kind)), gpu(device, rounded_desc(kind));
    ASSERT_NO_FATAL_FAILURE(cpu.run());
    ASSERT_NO_FATAL_FAILURE(gpu.run());
    expect_near(cpu, gpu);
  }
}

TEST_F(LayerRounded, Fp32Router) {
  Context const host = context_on(DeviceKind::cpu), device = context_on(DeviceKind::cuda);
  MoeDesc desc = rounded_desc();
  desc.router_dtype = DType::fp32;
  RoundedLayer const cpu(host, desc), gpu(device, desc);
  ASSERT_NO_FATAL_FAILURE(cpu.run());
  ASSERT_NO_FATAL_FAILURE(gpu.run());
  expect_near(cpu, gpu);
}

// Tokens that are listed have the bits of the GEMM over all tokens; the parts of others are rounded with their rows.
TEST_F(LayerRounded, ListedTokensHaveTheBitsOfAllByAGemm) {
  Context const device = context_on(DeviceKind::cuda);
  RoundedLayer const listed(device, rounded_desc()),
      all(device, rounded_desc(), OtherLosses::zeros);
  ASSERT_NO_FATAL_FAILURE(listed.run());
  ASSERT_NO_FATAL_FAILURE(all.run());
  expect_near("dx", all.backward.dx, listed.backward.dx, 0.01);
  EXPECT_TRUE(equal(all.backward.dlogits, listed.backward.dlogits));
  EXPECT_TRUE(equal(all.backward.gradients.dw_router, listed.backward.gradients.dw_router));
  EXPECT_GT(equal_tokens(listed, all), 10);
  EXPECT_LT(equal_tokens(listed, all), 100);
}

// Tokens come to the list in other orders.
TEST_F(LayerRounded, BitsDependOnNoScheduleAndOnNoChunks) {
  Context const device = context_on(DeviceKind::cuda);
  MoeDesc chunks = rounded_desc();
  chunks.column_chunk = 32;
  RoundedLayer const one(device, rounded_desc()), again(device, rounded_desc()),
      in_chunks(device, chunks);
  ASSERT_NO_FATAL_FAILURE(one.run());
  play(8);
  ASSERT_NO_FATAL_FAILURE(again.run());
  ASSERT_NO_FATAL_FAILURE(in_chunks.run());
  expect_equal(one, again);
  expect_equal(one, in_chunks);
}

TEST_F(LayerRounded, BackwardByTwoCallsHasEqualBits) {
  Context const device = context_on(DeviceKind::cuda);
  RoundedLayer const whole(device, rounded_desc());
  RoundedLayer split(device, rounded_desc());
  ASSERT_NO_FATAL_FAILURE(whole.run());
  ASSERT_NO_FATAL_FAILURE(split.run_split());
  expect_equal(whole, split);
}

// Layers with and without token rounding take one launch. Columns in chunks take the GEMMs, for which plain twins stand
// in here.
TEST_F(LayerRounded, FewTokensHaveTheirExpertsInOneLaunch) {
  Context const host = context_on(DeviceKind::cpu), device = context_on(DeviceKind::cuda);
  for (int const number : {0, 1, 2}) {
    SCOPED_TRACE(number);
    MoeDesc desc = rounded_desc(RouterKind::topk_softmax);
    desc.router.tile = 2;
    if (number < 2) desc.router = {.kind = RouterKind::topk_softmax};
    desc.shape.tokens = number == 0 ? 1 : 7;
    MoeDesc chunks = desc;
    chunks.column_chunk = 32;
    RoundedLayer const cpu(host, desc), gpu(device, desc), again(device, desc),
        in_chunks(device, chunks);
    ASSERT_NO_FATAL_FAILURE(cpu.forward());
    ASSERT_NO_FATAL_FAILURE(gpu.forward());
    play(8);
    ASSERT_NO_FATAL_FAILURE(again.forward());
    ASSERT_NO_FATAL_FAILURE(in_chunks.forward());
    expect_near("o", cpu.o(), gpu.o(), 0.01);
    EXPECT_TRUE(equal(gpu.o(), again.o()));
    expect_near("o in chunks", cpu.o(), in_chunks.o(), 0.01);
  }
}

}  // namespace
}  // namespace tessera::emulator

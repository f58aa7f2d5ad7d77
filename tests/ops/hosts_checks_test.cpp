// SPDX-License-Identifier: Apache-2.0
// What passes of experts over several hosts are refused with, before a message is sent: every rule broken once, in
// arguments that are taken without that.
#include "ops/hosts_checks.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

namespace tessera::ops {
namespace {

// A pass of six tokens over two hosts of two ranks with four experts each, forward and backward.
struct Pass {
  HostsDesc desc;
  HostsSaved saved;
  HostsForwardArgs forward;
  HostsBackwardArgs backward;

  explicit Pass(ActivationKind activation = ActivationKind::clamped_swiglu, bool training = true) {
    desc.place = {.host = 1, .hosts = 2, .rank = 1};
    desc.within = {.rank = 1,
                   .ranks = 2,
                   .max_tokens = 8,
                   .hidden = 64,
                   .intermediate = 32,
                   .experts = 8,
                   .top_k = 3,
                   .activation = {.kind = activation},
                   .training = training};
    std::size_t const bytes = HostsExperts::saved_bytes(desc).value();
    saved.memory = {take(bytes), bytes};
    std::int64_t const up = up_rows(desc);
    forward = {.x = made(DType::bf16, {6, 64}),
               .topk_ids = made(DType::int32, {6, 3}),
               .topk_weights = made(DType::fp32, {6, 3}),
               .w_up = made(DType::bf16, {4, up, 64}),
               .w_down = made(DType::bf16, {4, 64, 32}),
               .b_up = made(DType::bf16, {4, up}),
               .b_down = made(DType::bf16, {4, 64}),
               .o = made(DType::bf16, {6, 64}),
               .saved = training ? &saved : nullptr};
    backward = {.d_o = made(DType::bf16, {6, 64}),
                .x = forward.x,
                .w_up = forward.w_up,
                .w_down = forward.w_down,
                .b_up = forward.b_up,
                .b_down = forward.b_down,
                .saved = &saved,
                .dx = made(DType::bf16, {6, 64}),
                .dscores = made(DType::fp32, {6, 3}),
                .dw_up = made(DType::fp32, {4, up, 64}),
                .dw_down = made(DType::fp32, {4, 64, 32}),
                .db_up = made(DType::fp32, {4, up}),
                .db_down = made(DType::fp32, {4, 64})};
  }
  Pass(Pass const&) = delete;
  Pass& operator=(Pass const&) = delete;

  // Memory that nothing else has. Checks read none of it.
  std::byte* take(std::size_t bytes) {
    blocks_.emplace_back(bytes + 64);
    auto const address = reinterpret_cast<std::uintptr_t>(blocks_.back().data());
    return blocks_.back().data() + (64 - address % 64);
  }
  Tensor made(DType dtype, std::initializer_list<std::int64_t> shape) {
    std::size_t elements = 1;
    for (std::int64_t const n : shape) elements *= static_cast<std::size_t>(n);
    return tensor(static_cast<void*>(take(4 * elements)), dtype, shape);
  }

 private:
  std::vector<std::vector<std::byte>> blocks_;
};

Expected<CheckedPass> forward_of(Pass const& p) {
  return check_hosts_forward(p.desc, Device(), p.forward);
}
Expected<CheckedPass> backward_of(Pass const& p) {
  return check_hosts_backward(p.desc, Device(), p.backward);
}

template <class T>
void move_by(T& tensor, std::ptrdiff_t bytes) {
  tensor.data = const_cast<char*>(static_cast<char const*>(tensor.data)) + bytes;
}

struct Refusal {
  char const* text;
  std::function<void(Pass&)> spoil;
  StatusCode code = StatusCode::invalid_argument;
};

void expect_refused(Expected<CheckedPass> (*check)(Pass const&), Refusal const& refusal,
                    Pass& pass) {
  ASSERT_TRUE(check(pass).ok()) << check(pass).status().text();
  refusal.spoil(pass);
  auto const checked = check(pass);
  ASSERT_FALSE(checked.ok()) << refusal.text;
  EXPECT_EQ(checked.status().code(), refusal.code) << checked.status().text();
  EXPECT_NE(std::string(checked.status().text()).find(refusal.text), std::string::npos)
      << checked.status().text();
}

TEST(HostsChecks, PassesThatAreTaken) {
  Pass pass;
  EXPECT_EQ(forward_of(pass).value().tokens, 6);
  EXPECT_GE(forward_of(pass).value().saved, pass.saved.memory.data);
  EXPECT_EQ(backward_of(pass).value().tokens, 6);
  EXPECT_EQ(backward_of(pass).value().saved, forward_of(pass).value().saved);
  pass.forward.saved = nullptr;
  EXPECT_EQ(forward_of(pass).value().saved, nullptr);
  pass.forward.b_up = pass.forward.b_down = {};
  EXPECT_TRUE(forward_of(pass).ok());
  pass.backward.dw_up = pass.backward.dw_down = pass.backward.db_up = pass.backward.db_down = {};
  EXPECT_TRUE(backward_of(pass).ok());
  pass.backward.b_up = pass.backward.b_down = {};
  EXPECT_TRUE(backward_of(pass).ok());
  Pass const inference(ActivationKind::clamped_swiglu, false);
  EXPECT_TRUE(forward_of(inference).ok());
}

TEST(HostsChecks, RefusalsOfForward) {
  for (Refusal const& refusal : {
           Refusal{"x: [T,64] with T from 0 to max_tokens=8",
                   [](Pass& p) { p.forward.x = p.made(DType::bf16, {9, 64}); }},
           Refusal{"x: [T,64] with T from 0", [](Pass& p) { p.forward.x = {}; }},
           Refusal{"x: shape [6,72]; [6,64] is needed",
                   [](Pass& p) { p.forward.x = p.made(DType::bf16, {6, 72}); }},
           Refusal{"x: stride 72 of dimension 0; it must be contiguous",
                   [](Pass& p) { p.forward.x.stride[0] = 72; }},
           Refusal{"begins at a multiple of 16", [](Pass& p) { move_by(p.forward.x, 8); }},
           Refusal{"topk_ids: shape [5,3]; [6,3] is needed",
                   [](Pass& p) { p.forward.topk_ids = p.made(DType::int32, {5, 3}); }},
           Refusal{"topk_ids: dtype", [](Pass& p) { p.forward.topk_ids.dtype = DType::fp32; }},
           Refusal{"topk_weights: dtype",
                   [](Pass& p) { p.forward.topk_weights.dtype = DType::bf16; }},
           Refusal{"w_up: shape [8,64,64]; [4,64,64] is needed",
                   [](Pass& p) { p.forward.w_up = p.made(DType::bf16, {8, 64, 64}); }},
           Refusal{"w_down: stride 2560 of dimension 0; it must be contiguous",
                   [](Pass& p) { p.forward.w_down.stride[0] = 2560; }},
           Refusal{"w_down", [](Pass& p) { p.forward.w_down = {}; }},
           Refusal{"b_up", [](Pass& p) { p.forward.b_up = {}; }},
           Refusal{"b_down", [](Pass& p) { p.forward.b_down = {}; }},
           Refusal{"o: ", [](Pass& p) { p.forward.o = {}; }},
           Refusal{"x and o overlap",
                   [](Pass& p) { p.forward.o.data = const_cast<void*>(p.forward.x.data); }},
           Refusal{"x: on cuda:0", [](Pass& p) { p.forward.x.device = {DeviceKind::cuda, 0}; }},
           Refusal{"saved.memory: ", [](Pass& p) { p.saved.memory.bytes -= 1; }},
           Refusal{"saved_bytes() are ", [](Pass& p) { p.saved.memory.data = nullptr; }},
       }) {
    SCOPED_TRACE(refusal.text);
    Pass pass;
    expect_refused(forward_of, refusal, pass);
  }
}

TEST(HostsChecks, RefusalsOfBackward) {
  for (Refusal const& refusal : {
           Refusal{"d_o: [T,64] with T from 0 to max_tokens=8",
                   [](Pass& p) { p.backward.d_o = p.made(DType::bf16, {9, 64}); }},
           Refusal{"d_o: shape [6,72]; [6,64] is needed",
                   [](Pass& p) { p.backward.d_o = p.made(DType::bf16, {6, 72}); }},
           Refusal{"saved: absent", [](Pass& p) { p.backward.saved = nullptr; }},
           Refusal{"saved.memory: ", [](Pass& p) { p.saved.memory.bytes -= 1; }},
           Refusal{"x: shape [5,64]; [6,64] is needed",
                   [](Pass& p) { p.backward.x = p.made(DType::bf16, {5, 64}); }},
           Refusal{"w_up: dtype", [](Pass& p) { p.backward.w_up.dtype = DType::fp32; }},
           Refusal{"dx: ", [](Pass& p) { p.backward.dx = {}; }},
           Refusal{"begins at a multiple of 16", [](Pass& p) { move_by(p.backward.dx, 2); }},
           Refusal{"dx: stride 72 of dimension 0; it must be contiguous",
                   [](Pass& p) { p.backward.dx.stride[0] = 72; }},
           Refusal{"dscores: ", [](Pass& p) { p.backward.dscores = {}; }},
           Refusal{"dscores: shape [18,1]",
                   [](Pass& p) { p.backward.dscores = p.made(DType::fp32, {18, 1}); }},
           Refusal{"dw_up: dtype", [](Pass& p) { p.backward.dw_up.dtype = DType::bf16; }},
           Refusal{"dw_down: shape [8,64,32]; [4,64,32] is needed",
                   [](Pass& p) { p.backward.dw_down = p.made(DType::fp32, {8, 64, 32}); }},
           Refusal{"db_up: dtype", [](Pass& p) { p.backward.db_up.dtype = DType::bf16; }},
           Refusal{"db_down: shape [4,32]; [4,64] is needed",
                   [](Pass& p) { p.backward.db_down = p.made(DType::fp32, {4, 32}); }},
           Refusal{"db_up: given, but there are no biases; leave it out",
                   [](Pass& p) { p.backward.b_up = p.backward.b_down = {}; }},
           Refusal{"db_down: given, but there are no biases; leave it out",
                   [](Pass& p) {
                     p.backward.b_up = p.backward.b_down = {};
                     p.backward.db_up = {};
                   }},
           Refusal{"dw_up and dw_down overlap",
                   [](Pass& p) { p.backward.dw_down.data = p.backward.dw_up.data; }},
       }) {
    SCOPED_TRACE(refusal.text);
    Pass pass;
    expect_refused(backward_of, refusal, pass);
  }
}

// The inner pass of a step would refuse them, behind messages of steps before.
TEST(HostsChecks, BiasesNeedClampedSwiglu) {
  Pass const pass(ActivationKind::swiglu);
  EXPECT_EQ(forward_of(pass).status().code(), StatusCode::unsupported);
  EXPECT_EQ(backward_of(pass).status().code(), StatusCode::unsupported);
  EXPECT_NE(std::string(forward_of(pass).status().text()).find("with clamped_swiglu alone"),
            std::string::npos);
}

TEST(HostsChecks, OnlyObjectsForTrainingSave) {
  Pass pass(ActivationKind::clamped_swiglu, false);
  pass.forward.saved = &pass.saved;
  for (Status const& status : {forward_of(pass).status(), backward_of(pass).status()}) {
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_NE(std::string(status.text()).find("saved: training=0; create the objects"),
              std::string::npos)
        << status.text();
  }
}

}  // namespace
}  // namespace tessera::ops

// SPDX-License-Identifier: Apache-2.0
// The lists of ops/tensors.hpp, visited by something that is no TensorCheck: they name every tensor of a call once, and
// say right which ones the call writes.
#include "ops/tensors.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/desc_check.hpp"
#include "tests/api/layer.hpp"

namespace tessera::ops {
namespace {

using api_test::Layer;
using api_test::small_desc;
using api_test::value_of;

constexpr std::uint32_t kPoison = 0xa5c3a5c3;  // no value of these calls: -3.4e-16 as fp32

/// Lists what a call lists, and can do something with each tensor that is there.
struct List final : core::TensorVisitor {
  struct Entry {
    ConstTensor tensor;
    bool written = false;
  };
  std::map<std::string, Entry> present;
  std::multiset<std::string> names;

  void visit(char const* name, ConstTensor const& tensor, core::Role role, DType dtype,
             std::initializer_list<std::int64_t> shape) noexcept override {
    names.insert(name);
    bool const optional = role == core::Role::optional_input || role == core::Role::optional_output;
    if (!tensor.present()) {
      EXPECT_TRUE(optional) << name;
      return;
    }
    EXPECT_EQ(tensor.dtype, dtype) << name;
    EXPECT_TRUE(std::equal(shape.begin(), shape.end(), tensor.shape, tensor.shape + tensor.rank))
        << name;
    present[name] = {tensor, role == core::Role::output || role == core::Role::optional_output};
  }
  void absent(char const* name, ConstTensor const& tensor, char const*) noexcept override {
    names.insert(name);
    EXPECT_FALSE(tensor.present()) << name;
  }
  void contiguous(char const*, ConstTensor const&) noexcept override {}
  void buffer(char const* name, ConstBuffer const&, std::size_t, std::size_t,
              bool) noexcept override {
    names.insert(name);
  }
  void fail(Status const& status) noexcept override { ADD_FAILURE() << status.text(); }

  static std::vector<std::uint32_t> words_of(ConstTensor const& tensor) {
    std::int64_t count = 1;
    for (int axis = 0; axis < tensor.rank; ++axis) count *= tensor.shape[axis];
    std::vector<std::uint32_t> words(static_cast<std::size_t>(count));
    std::memcpy(words.data(), tensor.data, words.size() * sizeof(std::uint32_t));
    return words;
  }

  void poison() const {
    for (auto const& [name, entry] : present) {
      if (!entry.written) continue;
      std::vector<std::uint32_t> const words(words_of(entry.tensor).size(), kPoison);
      std::memcpy(const_cast<void*>(entry.tensor.data), words.data(),
                  words.size() * sizeof(std::uint32_t));
    }
  }

  [[nodiscard]] std::map<std::string, std::vector<std::uint32_t>> inputs() const {
    std::map<std::string, std::vector<std::uint32_t>> values;
    for (auto const& [name, entry] : present) {
      if (!entry.written) values[name] = words_of(entry.tensor);
    }
    return values;
  }

  void expect_unchanged(std::map<std::string, std::vector<std::uint32_t>> const& before) const {
    for (auto const& [name, values] : inputs()) {
      EXPECT_TRUE(values == before.at(name)) << name << " is said to be read";
    }
  }

  /// Written tensors are written to the last element; fp32 and int32 alone are among these.
  void expect_written() const {
    for (auto const& [name, entry] : present) {
      if (!entry.written) continue;
      for (std::uint32_t const word : words_of(entry.tensor)) {
        ASSERT_NE(word, kPoison) << name << " is said to be written";
      }
    }
  }
};

template <class... Args>
List list(Args const&... args) {
  List out;
  visit_tensors(args..., out);
  return out;
}

std::vector<MoeDesc> descs() {
  std::vector<MoeDesc> all;
  for (RouterKind const router : {RouterKind::given, RouterKind::topk_softmax,
                                  RouterKind::sigmoid_bias, RouterKind::expert_choice}) {
    for (SavePolicy const save : {SavePolicy::h, SavePolicy::x}) {
      for (bool const bias : {true, false}) {
        MoeDesc desc = small_desc(router);
        if (router == RouterKind::expert_choice) desc.router.capacity = 4;
        desc.save = save;
        desc.bias = bias;
        all.push_back(desc);
      }
    }
  }
  return all;
}

/// Clears what the policies and routers of a desc do not take.
void fit(Layer& layer) {
  if (layer.desc.save == SavePolicy::x) layer.forward.h = {};
  if (layer.desc.save == SavePolicy::x) layer.backward.h = {};
}

class VisitTensors : public testing::Test {
 protected:
  Context const context = value_of(Context::create());
};

TEST_F(VisitTensors, WhatForwardListsAsWrittenIsWrittenAndNothingElse) {
  for (MoeDesc const& given : descs()) {
    Layer layer(context, given);
    fit(layer);
    std::vector<std::int32_t> counts(5), chosen(5);
    layer.forward.expert_counts = tensor(counts.data(), {5});
    layer.forward.topk_counts = tensor(chosen.data(), {5});
    MoeDesc const desc = core::resolved(given);
    List const tensors = list(desc, layer.forward, layer.forward.workspace.bytes);
    tensors.poison();
    auto const before = tensors.inputs();
    Status const status = layer.run_forward();
    ASSERT_TRUE(status.ok()) << status.text();
    if (!desc.experts_vary()) tensors.expect_written();  // else h has rows that nobody owns
    tensors.expect_unchanged(before);
  }
}

TEST_F(VisitTensors, WhatBackwardListsAsWrittenIsWrittenAndNothingElse) {
  for (MoeDesc const& given : descs()) {
    Layer layer(context, given);
    fit(layer);
    ASSERT_TRUE(layer.run_forward().ok());
    MoeDesc const desc = core::resolved(given);
    List const tensors = list(desc, layer.backward, Pass::backward, layer.backward.workspace.bytes);
    tensors.poison();
    auto const before = tensors.inputs();
    Status const status = layer.run_backward();
    ASSERT_TRUE(status.ok()) << status.text();
    tensors.expect_written();
    tensors.expect_unchanged(before);
  }
}

TEST_F(VisitTensors, WhatRoutersListAsWrittenIsWrittenAndNothingElse) {
  MoeDesc const desc = core::resolved(small_desc(RouterKind::topk_softmax));
  MoeShape const& s = desc.shape;
  Layer layer(context, desc);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(s.tokens * s.top_k));
  std::vector<float> weights(ids.size()), losses(2);
  std::vector<float> logits(static_cast<std::size_t>(s.tokens * s.experts)), dlogits(logits.size());
  std::vector<std::byte> workspace(std::max(value_of(workspace_bytes(context, desc, Pass::route)),
                                            value_of(router_loss_workspace_bytes(context, desc))));
  RouteArgs const route_args = {.x = layer.forward.x,
                                .w_router = layer.forward.w_router,
                                .topk_ids = tensor(ids.data(), {s.tokens, s.top_k}),
                                .topk_weights = tensor(weights.data(), {s.tokens, s.top_k}),
                                .logits = tensor(logits.data(), {s.tokens, s.experts}),
                                .workspace = {workspace.data(), workspace.size()}};
  List const of_route = list(desc, route_args, workspace.size());
  of_route.poison();
  auto before = of_route.inputs();
  Status status = route(context, desc, route_args);
  ASSERT_TRUE(status.ok()) << status.text();
  of_route.expect_written();
  of_route.expect_unchanged(before);

  RouterLossArgs const loss_args = {.logits = tensor(logits.data(), {s.tokens, s.experts}),
                                    .z = 0.5f,
                                    .losses = tensor(losses.data(), {2}),
                                    .dlogits = tensor(dlogits.data(), {s.tokens, s.experts}),
                                    .workspace = {workspace.data(), workspace.size()}};
  List const of_loss = list(desc, loss_args, workspace.size());
  of_loss.poison();
  before = of_loss.inputs();
  status = router_loss(context, desc, loss_args);
  ASSERT_TRUE(status.ok()) << status.text();
  of_loss.expect_written();
  of_loss.expect_unchanged(before);
}

// Every member of the arguments is listed, with its own name, so that none is passed without a check.
TEST_F(VisitTensors, ForwardListsEveryMemberOnce) {
  std::multiset<std::string> wanted = {
      "x",          "topk_ids",      "topk_weights",   "token_offsets",
      "w_router",   "b_router",      "selection_bias", "expert_offsets",
      "row_scores", "w_up",          "w_gate",         "w_down",
      "b_up",       "b_gate",        "b_down",         "o",
      "logits",     "expert_counts", "topk_counts",    "h",
      "token_mask", "routing",       "workspace",      "x8",
      "x_scale",    "h_scale"};
  for (char const* part :
       {"up", "up_scales", "down", "down_scales", "up_transposed", "down_transposed"}) {
    wanted.insert(std::string("weight_codes.") + part);
  }
  for (MoeDesc const& given : descs()) {
    Layer layer(context, given);
    fit(layer);
    List const tensors = list(core::resolved(given), layer.forward, std::size_t{0});
    EXPECT_EQ(tensors.names, wanted);
  }
}

}  // namespace
}  // namespace tessera::ops

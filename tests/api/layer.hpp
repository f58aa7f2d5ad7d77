// SPDX-License-Identifier: Apache-2.0
// A small layer with all its tensors, for tests of the public API. Values are random; correctness against
// the reference is tests/verify's business.
#pragma once

#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

#include "tessera/tessera.hpp"

namespace tessera::api_test {

using Floats = std::vector<float>;

inline Floats random_floats(std::int64_t count, float scale, std::mt19937& generator) {
  std::normal_distribution<float> normal;
  Floats values(static_cast<std::size_t>(count));
  for (float& value : values) value = scale * normal(generator);
  return values;
}

template <class T>
T value_of(Expected<T>&& expected) {
  if (!expected.ok()) throw std::runtime_error(expected.status().text());
  return std::move(expected).value();
}

inline MoeDesc small_desc(RouterKind router = RouterKind::given) {
  MoeDesc desc;
  desc.shape = {.tokens = 19, .hidden = 12, .intermediate = 10, .experts = 5, .top_k = 2};
  desc.bias = true;
  desc.router.kind = router;
  return desc;
}

/// Owns every tensor of forward and backward; the args point into it.
struct Layer {
  MoeDesc desc;
  Context const& context;
  Floats x, w_router, b_router, w_up, w_down, b_up, b_down, weights, d_o;
  std::vector<std::int32_t> ids;
  Floats o, h, dx, dscores, dw_up, dw_down, db_up, db_down, dw_router, db_router;
  std::vector<std::byte> routing, forward_workspace, backward_workspace;
  MoeForwardArgs forward;
  MoeBackwardArgs backward;

  explicit Layer(Context const& context_, MoeDesc const& desc_ = small_desc(), unsigned seed = 1)
      : desc(desc_), context(context_) {
    std::mt19937 generator(seed);
    auto const& s = desc.shape;
    std::int64_t const width = desc.up_width() * s.intermediate, slots = desc.num_slots();
    auto const make = [&](std::int64_t count, float scale) {
      return random_floats(count, scale, generator);
    };
    x = make(s.tokens * s.hidden, 1);
    d_o = make(s.tokens * s.hidden, 1);
    w_router = make(s.experts * s.hidden, 0.3f);
    b_router = make(s.experts, 0.3f);
    w_up = make(s.experts * width * s.hidden, 0.3f);
    w_down = make(s.experts * s.hidden * s.intermediate, 0.3f);
    b_up = make(s.experts * width, 1);
    b_down = make(s.experts * s.hidden, 1);
    weights = make(slots, 1);
    for (std::int64_t i = 0; i < slots; ++i) {
      ids.push_back(static_cast<std::int32_t>(generator() % static_cast<unsigned>(s.experts)));
    }
    o.resize(x.size());
    dx.resize(x.size());
    h.resize(static_cast<std::size_t>(slots * width));
    dscores.resize(static_cast<std::size_t>(slots));
    dw_up.resize(w_up.size());
    dw_down.resize(w_down.size());
    db_up.resize(b_up.size());
    db_down.resize(b_down.size());
    dw_router.resize(w_router.size());
    db_router.resize(b_router.size());
    routing.resize(value_of(routing_bytes(desc)));
    forward_workspace.resize(value_of(workspace_bytes(context, desc, Pass::forward)));
    backward_workspace.resize(value_of(workspace_bytes(context, desc, Pass::backward)));
    point(s, width, slots);
  }
  Layer(Layer const&) = delete;
  Layer& operator=(Layer const&) = delete;

  [[nodiscard]] bool routed() const { return desc.router.kind != RouterKind::given; }
  [[nodiscard]] Status run_forward() { return moe_forward(context, desc, forward); }
  [[nodiscard]] Status run_backward() { return moe_backward(context, desc, backward); }
  [[nodiscard]] RoutingView tables() {
    return value_of(routing_view(desc, {routing.data(), routing.size()}));
  }

 private:
  void point(MoeShape const& s, std::int64_t width, std::int64_t slots) {
    std::int64_t const e = s.experts, d = s.hidden, n = s.intermediate, t = s.tokens;
    forward.x = tensor(x.data(), {t, d});
    forward.weights.w_up = tensor(w_up.data(), {e, width, d});
    forward.weights.w_down = tensor(w_down.data(), {e, d, n});
    forward.weights.b_up = desc.bias ? tensor(b_up.data(), {e, width}) : Tensor{};
    forward.weights.b_down = desc.bias ? tensor(b_down.data(), {e, d}) : Tensor{};
    if (routed()) {
      forward.w_router = tensor(w_router.data(), {e, d});
      forward.b_router = tensor(b_router.data(), {e});
    } else {
      forward.topk_ids = tensor(ids.data(), {t, s.top_k});
      forward.topk_weights = tensor(weights.data(), {t, s.top_k});
    }
    forward.o = tensor(o.data(), {t, d});
    forward.h = tensor(h.data(), {slots, width});
    forward.routing = {routing.data(), routing.size()};
    forward.workspace = {forward_workspace.data(), forward_workspace.size()};

    backward.d_o = tensor(d_o.data(), {t, d});
    backward.x = forward.x;
    backward.h = tensor(h.data(), {slots, width});
    backward.routing = forward.routing;
    backward.w_router = forward.w_router;
    backward.weights = forward.weights;
    backward.dx = tensor(dx.data(), {t, d});
    backward.dscores = tensor(dscores.data(), {slots});
    backward.gradients.dw_up = tensor(dw_up.data(), {e, width, d});
    backward.gradients.dw_down = tensor(dw_down.data(), {e, d, n});
    backward.gradients.db_up = desc.bias ? tensor(db_up.data(), {e, width}) : Tensor{};
    backward.gradients.db_down = desc.bias ? tensor(db_down.data(), {e, d}) : Tensor{};
    if (routed()) {
      backward.gradients.dw_router = tensor(dw_router.data(), {e, d});
      backward.gradients.db_router = tensor(db_router.data(), {e});
    }
    backward.workspace = {backward_workspace.data(), backward_workspace.size()};
  }
};

}  // namespace tessera::api_test

// SPDX-License-Identifier: Apache-2.0
// Forward and backward of a routed layer through the C++ API. With scores 0.5 everywhere and one expert per
// token, d(o . 1)/d(score) = 2 * (o . 1) per slot: checked on every slot.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <tessera/tessera.hpp>
#include <vector>

namespace {

using tessera::tensor;

constexpr std::int64_t kTokens = 5, kHidden = 8, kIntermediate = 4, kExperts = 3;

int fail(char const* what, tessera::Status const& status) {
  std::printf("%s: %s\n", what, status.text());
  return 1;
}

std::vector<float> wave(std::int64_t size) {
  std::vector<float> values(static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i));
  return values;
}

}  // namespace

int main() {
  tessera::MoeDesc desc;
  desc.shape = {.tokens = kTokens,
                .hidden = kHidden,
                .intermediate = kIntermediate,
                .experts = kExperts,
                .top_k = 1};
  auto const context = tessera::Context::create();
  if (!context.ok()) return fail("context", context.status());

  auto const x = wave(kTokens * kHidden);
  auto const w_up = wave(kExperts * 2 * kIntermediate * kHidden);
  auto const w_down = wave(kExperts * kHidden * kIntermediate);
  std::vector<std::int32_t> const ids = {0, 1, 2, 1, 0};
  std::vector<float> const scores(kTokens, 0.5f), ones(kTokens * kHidden, 1.0f);
  std::vector<float> o(kTokens * kHidden), h(kTokens * 2 * kIntermediate), dscores(kTokens);
  std::vector<char> routing(tessera::routing_bytes(desc).value());
  std::vector<char> workspace;

  tessera::MoeForwardArgs forward;
  forward.x = tensor(x.data(), {kTokens, kHidden});
  forward.topk_ids = tensor(ids.data(), {kTokens, 1});
  forward.topk_weights = tensor(scores.data(), {kTokens, 1});
  forward.weights.w_up = tensor(w_up.data(), {kExperts, 2 * kIntermediate, kHidden});
  forward.weights.w_down = tensor(w_down.data(), {kExperts, kHidden, kIntermediate});
  forward.o = tensor(o.data(), {kTokens, kHidden});
  forward.h = tensor(h.data(), {kTokens, 2 * kIntermediate});
  forward.routing = {routing.data(), routing.size()};
  workspace.resize(tessera::workspace_bytes(context.value(), desc, tessera::Pass::forward).value());
  forward.workspace = {workspace.data(), workspace.size()};
  if (auto status = tessera::moe_forward(context.value(), desc, forward); !status.ok()) {
    return fail("forward", status);
  }

  tessera::MoeBackwardArgs backward;
  backward.d_o = tensor(ones.data(), {kTokens, kHidden});
  backward.x = forward.x;
  backward.h = forward.h;
  backward.routing = forward.routing;
  backward.weights = forward.weights;
  backward.dscores = tensor(dscores.data(), {kTokens});
  workspace.resize(
      tessera::workspace_bytes(context.value(), desc, tessera::Pass::backward).value());
  backward.workspace = {workspace.data(), workspace.size()};
  if (auto status = tessera::moe_backward(context.value(), desc, backward); !status.ok()) {
    return fail("backward", status);
  }

  for (std::int64_t token = 0; token < kTokens; ++token) {
    float sum = 0;
    for (std::int64_t i = 0; i < kHidden; ++i) sum += o[token * kHidden + i];
    if (!(std::abs(dscores[token] - 2 * sum) <= 1e-4f * (1 + std::abs(sum)))) {
      std::printf("dscores[%d] = %g instead of %g\n", static_cast<int>(token), dscores[token],
                  2 * sum);
      return 1;
    }
  }
  std::printf("C++: libtessera %s works\n", TESSERA_VERSION);
  return 0;
}

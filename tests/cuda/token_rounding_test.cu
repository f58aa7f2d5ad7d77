// SPDX-License-Identifier: Apache-2.0
// route() with token rounding and expert choice on a GPU, through the public API: offsets, ids, weights and logits of
// the CPU, bit for bit. An identity router makes the logits the values of x, alike on both. Exit 0 passed, 1 failed, 77
// skipped (no GPU).
#include <cmath>

#include "first_gpu.cuh"
#include "layer.cuh"
#include "tessera/router.hpp"

namespace tessera::cuda_test {
namespace {

struct Case {
  char const* name;
  int64_t tokens, experts, top_k;
  RouterKind kind = RouterKind::topk_softmax;
  Rounding round = Rounding::none;
  int32_t tile = 16;
  DType ids = DType::int32;
  bool selection_bias = false, has_logits = false;
  int64_t logits_padding = 0;
};

// int64 ids and offsets, whatever the call wrote.
struct Slots {
  std::vector<int64_t> ids, offsets;
  std::vector<float> weights, logits;
};

bool same(Slots const& a, Slots const& b) {
  return a.ids == b.ids && a.offsets == b.offsets && same_bits(a.weights, b.weights) &&
         same_bits(a.logits, b.logits);
}

MoeDesc desc_of(Case const& c, DType dtype) {
  MoeDesc desc;
  desc.shape = {.tokens = c.tokens,
                .hidden = c.experts,
                .intermediate = 8,
                .experts = c.experts,
                .top_k = c.top_k};
  desc.dtype = dtype;
  desc.ids_dtype = dtype == DType::fp32 ? DType::int64 : c.ids;
  desc.router.kind = c.kind;
  desc.router.round = c.round;
  if (desc.rounds_tokens()) desc.router.tile = c.tile;
  if (draws(desc.router)) desc.router.seed = 17, desc.router.step = 2;
  desc.router.normalize_scores = c.kind == RouterKind::sigmoid_bias;
  return desc;
}

std::vector<float> widened(std::vector<__nv_bfloat16> const& from) {
  std::vector<float> out;
  for (__nv_bfloat16 const value : from) out.push_back(__bfloat162float(value));
  return out;
}

struct Inputs {
  std::vector<__nv_bfloat16> x, w_router;
  std::vector<float> selection_bias;
};

Inputs make_inputs(Case const& c) {
  Inputs out{values(c.tokens * c.experts, 9), {}, {}};
  for (int64_t e = 0; e < c.experts; ++e) {
    for (int64_t column = 0; column < c.experts; ++column) {
      out.w_router.push_back(__float2bfloat16(column == e ? 1.0f : 0.0f));
    }
    out.selection_bias.push_back(0.02f * static_cast<float>(e % 7) - 0.06f);
  }
  return out;
}

Slots on_cpu(Case const& c, Inputs const& inputs) {
  Context const cpu = Context::create({.num_threads = 2}).value();
  MoeDesc const desc = desc_of(c, DType::fp32);
  std::vector<float> const x = widened(inputs.x), w_router = widened(inputs.w_router);
  auto const slots = static_cast<size_t>(desc.num_slots());
  Slots out{std::vector<int64_t>(slots, -7),
            std::vector<int64_t>(size_t(c.tokens) + 1, -7),
            std::vector<float>(slots, NAN),
            {}};
  if (c.has_logits) out.logits = x;
  std::vector<std::byte> workspace(workspace_bytes(cpu, desc, Pass::route).value());
  RouteArgs args;
  args.x = tensor(x.data(), {c.tokens, c.experts});
  args.w_router = tensor(w_router.data(), {c.experts, c.experts});
  if (c.selection_bias) args.selection_bias = tensor(inputs.selection_bias.data(), {c.experts});
  args.topk_ids = tensor(out.ids.data(), {desc.num_slots()});
  args.topk_weights = tensor(out.weights.data(), {desc.num_slots()});
  args.token_offsets = tensor(out.offsets.data(), {c.tokens + 1});
  args.workspace = {workspace.data(), workspace.size()};
  EXPECT_OK(route(cpu, desc, args));
  return out;
}

std::vector<int64_t> integers(DeviceBuffer const& buffer, DType dtype) {
  if (dtype == DType::int64) return buffer.values<int64_t>();
  std::vector<int32_t> const narrow = buffer.values<int32_t>();
  return {narrow.begin(), narrow.end()};
}

Slots on_gpu(Context const& context, Case const& c, Inputs const& inputs) {
  MoeDesc const desc = desc_of(c, DType::bf16);
  Device const device = context.device();
  auto const slots = static_cast<size_t>(desc.num_slots());
  size_t const id_bytes = dtype_bytes(c.ids),
               bytes = workspace_bytes(context, desc, Pass::route).value();
  int64_t const logits_pitch = c.experts + c.logits_padding;
  DeviceBuffer const x(inputs.x), w_router(inputs.w_router), bias(inputs.selection_bias);
  DeviceBuffer const ids(id_bytes * slots), offsets(id_bytes * size_t(c.tokens + 1)),
      weights(4 * slots), logits(4 * size_t(c.tokens * logits_pitch)), workspace(bytes);
  RouteArgs args;
  args.x = tensor(x.as<void const>(), DType::bf16, {c.tokens, c.experts}, device);
  args.w_router = tensor(w_router.as<void const>(), DType::bf16, {c.experts, c.experts}, device);
  if (c.selection_bias) {
    args.selection_bias = tensor(bias.as<float const>(), {c.experts}, device);
  }
  args.topk_ids = tensor(ids.as<void>(), c.ids, {desc.num_slots()}, device);
  args.topk_weights = tensor(weights.as<float>(), {desc.num_slots()}, device);
  args.token_offsets = tensor(offsets.as<void>(), c.ids, {c.tokens + 1}, device);
  if (c.has_logits) {
    args.logits = tensor(logits.as<float>(), {c.tokens, c.experts}, device);
    args.logits.stride[0] = logits_pitch;
  }
  args.workspace = {workspace.as<void>(), bytes};
  EXPECT_OK(route(context, desc, args));
  require(cudaDeviceSynchronize(), "route");
  Slots out{integers(ids, c.ids), integers(offsets, c.ids), weights.values<float>(), {}};
  std::vector<float> const wide = logits.values<float>();
  for (size_t i = 0; c.has_logits && i < wide.size(); ++i) {
    if (int64_t(i) % logits_pitch < c.experts) out.logits.push_back(wide[i]);
  }
  return out;
}

constexpr Case kCases[] = {
    {.name = "nr-f", .tokens = 700, .experts = 24, .top_k = 3, .round = Rounding::nr_f},
    {.name = "nr-f, int64, logits",
     .tokens = 700,
     .experts = 24,
     .top_k = 3,
     .round = Rounding::nr_f,
     .ids = DType::int64,
     .has_logits = true},
    {.name = "nr-f, rows of logits apart",
     .tokens = 700,
     .experts = 24,
     .top_k = 3,
     .round = Rounding::nr_f,
     .has_logits = true,
     .logits_padding = 5},
    {.name = "sr-f, softmax-topk",
     .tokens = 1000,
     .experts = 64,
     .top_k = 6,
     .kind = RouterKind::softmax_topk,
     .round = Rounding::sr_f,
     .tile = 32},
    {.name = "nr-s, sigmoid-bias",
     .tokens = 1000,
     .experts = 64,
     .top_k = 6,
     .kind = RouterKind::sigmoid_bias,
     .round = Rounding::nr_s,
     .selection_bias = true},
    {.name = "balance-f, group-limited",
     .tokens = 1000,
     .experts = 64,
     .top_k = 4,
     .kind = RouterKind::group_limited,
     .round = Rounding::balance_f,
     .ids = DType::int64,
     .selection_bias = true},
    {.name = "up, sqrtsoftplus",
     .tokens = 600,
     .experts = 40,
     .top_k = 2,
     .kind = RouterKind::sqrtsoftplus,
     .round = Rounding::up},
    {.name = "down, renorm, plain GEMM",
     .tokens = 600,
     .experts = 37,
     .top_k = 5,
     .kind = RouterKind::softmax_topk_renorm,
     .round = Rounding::down},
    {.name = "nr-f, no tokens", .tokens = 0, .experts = 16, .top_k = 2, .round = Rounding::nr_f},
    {.name = "expert choice",
     .tokens = 900,
     .experts = 32,
     .top_k = 4,
     .kind = RouterKind::expert_choice,
     .has_logits = true},
    {.name = "expert choice, int64",
     .tokens = 300,
     .experts = 100,
     .top_k = 3,
     .kind = RouterKind::expert_choice,
     .ids = DType::int64},
};

int run(Context const& context) {
  constexpr int kRepeats = 2;
  for (Case const& c : kCases) {
    Inputs const inputs = make_inputs(c);
    Slots const cpu = on_cpu(c, inputs);
    bool passed = true;
    for (int i = 0; i < kRepeats; ++i) passed = same(on_gpu(context, c, inputs), cpu) && passed;
    std::printf("%s %s: %lld slots\n", passed ? "passed" : "FAILED", c.name,
                static_cast<long long>(cpu.offsets.back()));
    EXPECT(passed);
  }
  std::printf(failures == 0 ? "all passed\n" : "FAILED\n");
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda_test

int main() { return tessera::cuda_test::on_first_gpu(tessera::cuda_test::run); }

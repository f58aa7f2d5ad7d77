// SPDX-License-Identifier: Apache-2.0
// Calls with a token mask on a GPU, through the public API: a layer and the losses of its router, those of sequences
// among them, leave what the other tokens alone give, bit for bit; and the losses have the bits of the CPU. Padding
// holds NaN throughout. Exit 0 passed, 1 failed, 77 skipped (no GPU).
#include <cmath>
#include <random>
#include <string>

#include "first_gpu.cuh"
#include "layer.cuh"

namespace tessera::cuda_test {
namespace {

using Mask = std::vector<uint8_t>;

int64_t count_real(Mask const& mask) {
  return std::count_if(mask.begin(), mask.end(), [](uint8_t m) { return m != 0; });
}

// Every value but 0 is a real token. The last 40 are padding, as at the end of a batch, and some before. At least 9
// tokens are real, as a call of up to 8 has kernels that sum in another order (docs/numerics.md, Padding).
Mask make_mask(int64_t tokens) {
  std::mt19937_64 random(7);
  Mask mask;
  for (int64_t t = 0; t < tokens; ++t) {
    bool const padding = t == 0 || t + 40 >= tokens || random() % 3 == 0;
    mask.push_back(padding ? uint8_t{0} : static_cast<uint8_t>(random() % 255 + 1));
  }
  EXPECT(count_real(mask) > 8);
  return mask;
}

template <class T>
std::vector<T> real_rows(std::vector<T> const& rows, Mask const& mask) {
  size_t const width = rows.size() / mask.size();
  std::vector<T> out;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (mask[i / width] != 0) out.push_back(rows[i]);
  }
  return out;
}

template <class T>
std::vector<T> with_padding(std::vector<T> rows, Mask const& mask, T value) {
  size_t const width = rows.size() / mask.size();
  for (size_t i = 0; i < rows.size(); ++i) {
    if (mask[i / width] == 0) rows[i] = value;
  }
  return rows;
}

std::vector<float> widened(std::vector<__nv_bfloat16> const& from) {
  std::vector<float> out;
  for (__nv_bfloat16 const value : from) out.push_back(__bfloat162float(value));
  return out;
}

// A tensor of the device as floats.
std::vector<float> values_of(Tensor const& from) {
  auto const count = static_cast<size_t>(from.elements());
  if (from.dtype == DType::fp32) {
    std::vector<float> out(count);
    require(cudaMemcpy(out.data(), from.data, 4 * count, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return out;
  }
  std::vector<__nv_bfloat16> out(count);
  require(cudaMemcpy(out.data(), from.data, 2 * count, cudaMemcpyDeviceToHost), "cudaMemcpy");
  return widened(out);
}

struct Case {
  char const* name;
  RouterKind kind;
  Rounding round = Rounding::none;
  int64_t tokens = 700;
  bool splits = false, aux_dlogits = false, fp32_router = false;
};

MoeDesc desc_of(Case const& c) {
  MoeDesc desc = small_desc(c.kind);
  desc.shape.tokens = c.tokens;
  desc.router.round = c.round;
  if (desc.rounds_tokens()) desc.router.tile = 16;
  if (draws(desc.router)) desc.router.seed = 17;
  if (c.fp32_router) desc.router_dtype = DType::fp32;
  desc.router.normalize_scores = c.kind == RouterKind::sqrtsoftplus;
  return desc;
}

// Inputs of a layer that depend on the tokens, in place of the layer's own.
struct Rows {
  Rows(Layer& layer, MoeDesc const& desc, std::vector<__nv_bfloat16> const& x,
       std::vector<__nv_bfloat16> const& d_o, std::vector<float> const& aux, bool has_aux)
      : x(x),
        d_o(d_o),
        aux(aux),
        w_router(widened(values(desc.shape.experts * desc.shape.hidden, 2))),
        counts(4 * static_cast<size_t>(desc.shape.experts)) {
    MoeShape const& s = desc.shape;
    layer.args.x.data = layer.backward_args.x.data = this->x.as<void const>();
    layer.backward_args.d_o.data = this->d_o.as<void const>();
    layer.args.topk_counts = tensor(counts.as<int32_t>(), {s.experts}, layer.device());
    if (has_aux) {
      layer.backward_args.aux_dlogits =
          tensor(this->aux.as<float const>(), {s.tokens, s.experts}, layer.device());
    }
    if (desc.router_dtype == DType::fp32) {
      layer.args.w_router = layer.backward_args.w_router =
          tensor(w_router.as<float const>(), {s.experts, s.hidden}, layer.device());
    }
  }
  DeviceBuffer x, d_o, aux, w_router, counts;
};

// Forward and backward, with everything else poisoned between them.
void run(Layer const& layer, bool splits) {
  layer.poison(nullptr);
  EXPECT_OK(splits ? layer.forward(nullptr) : layer.step(nullptr));
  if (splits) EXPECT_OK(layer.split_backward(nullptr));
  require(cudaDeviceSynchronize(), "layer");
}

void run_layer(Context const& context, Case const& c) {
  MoeDesc const desc = desc_of(c);
  Mask const mask = make_mask(c.tokens);
  MoeDesc real_desc = desc;
  real_desc.shape.tokens = count_real(mask);
  Layer masked(context, desc), real(context, real_desc);
  auto const x = values(c.tokens * desc.shape.hidden, 1);
  auto const d_o = values(c.tokens * desc.shape.hidden, 5);
  auto const aux = widened(values(c.tokens * desc.shape.experts, 8));
  __nv_bfloat16 const nan = __float2bfloat16(NAN);
  Rows const masked_rows(masked, desc, with_padding(x, mask, nan), with_padding(d_o, mask, nan),
                         with_padding(aux, mask, NAN), c.aux_dlogits);
  Rows const real_inputs(real, real_desc, real_rows(x, mask), real_rows(d_o, mask),
                         real_rows(aux, mask), c.aux_dlogits);
  DeviceBuffer const d_mask(mask);
  masked.args.token_mask = masked.backward_args.token_mask =
      tensor(d_mask.as<uint8_t const>(), {c.tokens}, context.device());
  run(masked, c.splits);
  run(real, c.splits);
  int const before = failures;
  EXPECT(masked_rows.counts.values<int32_t>() == real_inputs.counts.values<int32_t>());
  std::vector<float> const zeros(static_cast<size_t>(c.tokens * desc.shape.hidden));
  for (auto const& [ours, wanted] : {std::pair{&masked.args.o, &real.args.o},
                                     {&masked.backward_args.dx, &real.backward_args.dx}}) {
    std::vector<float> const all = values_of(*ours);
    EXPECT(same_bits(real_rows(all, mask), values_of(*wanted)));
    EXPECT(same_bits(with_padding(all, mask, 0.0f), all));
    EXPECT(!same_bits(all, zeros));
  }
  ExpertGradients const &ours = masked.backward_args.gradients,
                        &wanted = real.backward_args.gradients;
  for (auto const& [a, b] : {std::pair{&ours.dw_up, &wanted.dw_up},
                             {&ours.dw_down, &wanted.dw_down},
                             {&ours.dw_router, &wanted.dw_router}}) {
    std::vector<float> const gradient = values_of(*a);
    EXPECT(same_bits(gradient, values_of(*b)));
    EXPECT(std::any_of(gradient.begin(), gradient.end(), [](float g) { return g != 0; }));
    EXPECT(std::none_of(gradient.begin(), gradient.end(), [](float g) { return std::isnan(g); }));
  }
  if (!c.splits) {
    std::vector<float> const dlogits = values_of(masked.backward_args.dlogits);
    EXPECT(same_bits(real_rows(dlogits, mask), values_of(real.backward_args.dlogits)));
    EXPECT(same_bits(with_padding(dlogits, mask, 0.0f), dlogits));
  }
  EXPECT_OK(check_device_values(context));
  std::printf("%s %s\n", failures == before ? "passed" : "FAILED", c.name);
}

constexpr Case kCases[] = {
    {.name = "topk-softmax", .kind = RouterKind::topk_softmax},
    {.name = "topk-softmax in two calls", .kind = RouterKind::topk_softmax, .splits = true},
    {.name = "few tokens", .kind = RouterKind::topk_softmax, .tokens = 64},
    {.name = "many chunks of tokens", .kind = RouterKind::topk_softmax, .tokens = 9000},
    {.name = "softmax-topk", .kind = RouterKind::softmax_topk},
    {.name = "sigmoid-bias, another loss of the logits",
     .kind = RouterKind::sigmoid_bias,
     .aux_dlogits = true},
    {.name = "another loss of the logits in two calls",
     .kind = RouterKind::sigmoid_bias,
     .splits = true,
     .aux_dlogits = true},
    {.name = "group-limited", .kind = RouterKind::group_limited},
    {.name = "sqrtsoftplus", .kind = RouterKind::sqrtsoftplus},
    {.name = "expert choice", .kind = RouterKind::expert_choice},
    {.name = "nr-f", .kind = RouterKind::topk_softmax, .round = Rounding::nr_f},
    {.name = "sr-f", .kind = RouterKind::softmax_topk, .round = Rounding::sr_f},
    {.name = "nr-s", .kind = RouterKind::sigmoid_bias, .round = Rounding::nr_s},
    {.name = "balance-f", .kind = RouterKind::topk_softmax, .round = Rounding::balance_f},
    {.name = "up", .kind = RouterKind::topk_softmax, .round = Rounding::up},
    {.name = "down, in two calls",
     .kind = RouterKind::topk_softmax,
     .round = Rounding::down,
     .splits = true},
    {.name = "fp32 router", .kind = RouterKind::topk_softmax, .fp32_router = true},
    {.name = "fp32 router, another loss of the logits",
     .kind = RouterKind::sigmoid_bias,
     .tokens = 3000,
     .aux_dlogits = true,
     .fp32_router = true},
};

struct LossCase {
  char const* name;
  int64_t tokens, experts, top_k;
  std::vector<int64_t> sequences;  // first token of each, and T
  RouterKind kind = RouterKind::topk_softmax;
  bool wide = false, masked = true;
  float balance = 0, z = 0;
};

struct LossInputs {
  std::vector<float> logits;
  std::vector<int64_t> ids;
};

struct LossResult {
  std::vector<float> losses, sequence_loss, dlogits;
};

bool same(LossResult const& a, LossResult const& b) {
  return same_bits(a.losses, b.losses) && same_bits(a.sequence_loss, b.sequence_loss) &&
         same_bits(a.dlogits, b.dlogits);
}

// Memory that a call reads, of the host or of the device.
template <class T>
struct Given {
  Given(std::vector<T> const& from, bool on_gpu)
      : host(from), device(on_gpu ? from : std::vector<T>()) {
    data = on_gpu ? device.template as<T>() : host.data();
  }
  std::vector<T> host;
  DeviceBuffer device;
  T* data;
};

template <class Id>
LossResult losses_of(Context const& context, LossCase const& c, LossInputs const& inputs,
                     Mask const& mask, std::vector<int64_t> const& offsets) {
  bool const on_gpu = context.device().kind == DeviceKind::cuda;
  auto const tokens = static_cast<int64_t>(inputs.logits.size()) / c.experts;
  auto const sequences = static_cast<int64_t>(offsets.size()) - 1;
  MoeDesc desc;
  desc.shape = {
      .tokens = tokens, .hidden = 8, .intermediate = 8, .experts = c.experts, .top_k = c.top_k};
  desc.router.kind = c.kind;
  std::vector<int64_t> counts(static_cast<size_t>(c.experts));
  for (int64_t slot = 0; slot < tokens * c.top_k; ++slot) {
    bool const real = mask.empty() || mask[static_cast<size_t>(slot / c.top_k)] != 0;
    if (real) ++counts[static_cast<size_t>(inputs.ids[static_cast<size_t>(slot)])];
  }
  Given<float> const logits(inputs.logits, on_gpu);
  Given<int64_t> const f(counts, on_gpu);
  Given<Id> const ids({inputs.ids.begin(), inputs.ids.end()}, on_gpu);
  Given<Id> const starts({offsets.begin(), offsets.end()}, on_gpu);
  Given<uint8_t> const real(mask, on_gpu);
  Given<float> const losses({NAN, NAN}, on_gpu), sequence_loss({NAN}, on_gpu),
      dlogits(std::vector<float>(inputs.logits.size(), NAN), on_gpu);
  size_t const bytes = router_loss_workspace_bytes(context, desc, sequences).value();
  Given<uint8_t> const workspace(std::vector<uint8_t>(bytes, kPoison), on_gpu);

  Device const device = context.device();
  RouterLossArgs args;
  args.logits = tensor(logits.data, {tokens, c.experts}, device);
  args.topk_counts = tensor(f.data, {c.experts}, device);
  args.balance = c.balance;
  args.z = c.z;
  args.d_loss = 0.75f;
  args.losses = tensor(losses.data, {2}, device);
  args.dlogits = tensor(dlogits.data, {tokens, c.experts}, device);
  args.workspace = {workspace.data, bytes};
  args.sequence_balance = 0.9f;
  args.topk_ids = tensor(ids.data, {tokens, c.top_k}, device);
  args.sequence_offsets = tensor(starts.data, {sequences + 1}, device);
  args.sequence_loss = tensor(sequence_loss.data, {1}, device);
  if (!mask.empty()) args.token_mask = tensor(real.data, {tokens}, device);
  EXPECT_OK(router_loss(context, desc, args));
  if (!on_gpu) return {losses.host, sequence_loss.host, dlogits.host};
  require(cudaDeviceSynchronize(), "router_loss");
  EXPECT_OK(check_device_values(context));
  return {losses.device.values<float>(), sequence_loss.device.values<float>(),
          dlogits.device.values<float>()};
}

void run_losses(Context const& context, LossCase const& c) {
  Mask const mask = c.masked ? make_mask(c.tokens) : Mask();
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal(0, 2);
  LossInputs all;
  for (int64_t i = 0; i < c.tokens * c.experts; ++i) all.logits.push_back(normal(random));
  for (int64_t t = 0; t < c.tokens; ++t) {
    auto const first = static_cast<int64_t>(random() % static_cast<uint64_t>(c.experts));
    for (int64_t k = 0; k < c.top_k; ++k) all.ids.push_back((first + 3 * k) % c.experts);
  }
  LossInputs rest = all;
  std::vector<int64_t> offsets = c.sequences;
  if (c.masked) {
    rest = {real_rows(all.logits, mask), real_rows(all.ids, mask)};
    all.logits = with_padding(all.logits, mask, NAN);
    for (int64_t& offset : offsets) {
      offset = std::count_if(mask.begin(), mask.begin() + offset, [](uint8_t m) { return m != 0; });
    }
  }
  Context const cpu = Context::create({.num_threads = 2}).value();
  auto const of = [&c](Context const& on, LossInputs const& inputs, Mask const& m,
                       std::vector<int64_t> const& starts) {
    return c.wide ? losses_of<int64_t>(on, c, inputs, m, starts)
                  : losses_of<int32_t>(on, c, inputs, m, starts);
  };
  LossResult const gpu = of(context, all, mask, c.sequences);
  bool const as_cpu = same(gpu, of(cpu, all, mask, c.sequences));
  bool const again = same(gpu, of(context, all, mask, c.sequences));
  bool without = true;
  if (c.masked) {
    LossResult const alone = of(context, rest, {}, offsets);
    without = same({gpu.losses, gpu.sequence_loss, real_rows(gpu.dlogits, mask)}, alone) &&
              same_bits(with_padding(gpu.dlogits, mask, 0.0f), gpu.dlogits);
  }
  bool const is_loss = gpu.sequence_loss[0] > 0.5f;  // 0.9 where every sequence is balanced
  bool const passed = as_cpu && again && without && is_loss;
  std::printf("%s losses, %s%s%s%s%s\n", passed ? "passed" : "FAILED", c.name,
              as_cpu ? "" : " (bits of the CPU)", again ? "" : " (repeat)",
              without ? "" : " (bits without padding)", is_loss ? "" : " (no loss)");
  EXPECT(passed);
}

std::vector<LossCase> loss_cases() {
  std::vector<int64_t> many;
  for (int64_t first = 0; first <= 3000; first += 30) many.push_back(first);
  return {
      {"one sequence", 500, 64, 4, {0, 500}},
      {"one sequence, no mask", 500, 64, 4, {0, 500}, RouterKind::topk_softmax, false, false},
      {"sequences of any length, one empty, one of padding alone",
       800,
       60,
       3,
       {0, 1, 300, 300, 777, 800}},
      {"int64 ids, all three losses",
       800,
       60,
       3,
       {0, 250, 800},
       RouterKind::sigmoid_bias,
       true,
       true,
       0.7f,
       0.3f},
      {"100 sequences", 3000, 128, 8, many, RouterKind::sqrtsoftplus},
      {"100 sequences, no mask, z", 3000, 128, 8, many, RouterKind::softmax_topk, true, false, 0,
       0.3f},
      {"1500 experts", 200, 1500, 8, {0, 80, 200}, RouterKind::topk_softmax, false, true, 0.5f},
  };
}

int run_all(Context const& context) {
  for (Case const& c : kCases) run_layer(context, c);
  for (LossCase const& c : loss_cases()) run_losses(context, c);
  std::printf(failures == 0 ? "all passed\n" : "FAILED\n");
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda_test

int main() { return tessera::cuda_test::on_first_gpu(tessera::cuda_test::run_all); }

// SPDX-License-Identifier: Apache-2.0
// router_loss and update_selection_bias on a GPU through the public API: the bits of the CPU, again and again, in
// graphs, on rows apart; and counts that break a rule. Exit 0 passed, 1 failed, 77 skipped (no GPU).
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "first_gpu.cuh"
#include "layer.cuh"

namespace tessera::cuda_test {
namespace {

enum class Logits { random, large, huge, with_infinities };  // huge: to the ends of fp32

struct LossCase {
  char const* name;
  int64_t tokens, experts;
  RouterKind kind = RouterKind::topk_softmax;
  float balance = 0.7f, z = 0.3f, d_loss = 1;
  int64_t scope_tokens = 0;
  int64_t padding = 0;  // between rows of logits and of dlogits
  DType counts_dtype = DType::int32;
  bool has_counts = true, has_losses = true, has_dlogits = true;
  Logits logits = Logits::random;
};

struct LossInputs {
  std::vector<float> logits;
  std::vector<int32_t> counts;
  std::vector<int64_t> wide_counts;
  std::vector<float> real_counts;

  [[nodiscard]] void const* counts_of(DType dtype) const {
    return dtype == DType::fp32    ? static_cast<void const*>(real_counts.data())
           : dtype == DType::int64 ? static_cast<void const*>(wide_counts.data())
                                   : counts.data();
  }
};

// Rows of logits, with NaN between them.
LossInputs make_inputs(LossCase const& c) {
  std::mt19937_64 random(11);
  std::normal_distribution<float> normal(0, 2);
  float const special[] = {std::nanf(""), INFINITY, -INFINITY, -0.0f, 0.0f, 200.0f, -200.0f};
  LossInputs out;
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t e = 0; e < c.experts + c.padding; ++e) {
      float l = c.logits == Logits::large ? 40 * normal(random) : normal(random);
      if (c.logits == Logits::huge)
        l = std::clamp(l, -2.0f, 2.0f) * (random() % 3 == 0 ? 1.6e38f : 1e3f);
      bool const is_special = c.logits == Logits::with_infinities && random() % 97 == 0;
      out.logits.push_back(e >= c.experts ? NAN : is_special ? special[random() % 7] : l);
    }
  }
  for (int64_t e = 0; e < c.experts; ++e) {
    out.counts.push_back(e % 5 == 3 ? 0 : static_cast<int32_t>(random() % 1000));
    // Sums beyond 32 bits.
    out.wide_counts.push_back(int64_t{out.counts.back()} << 20);
    // Thirds, of magnitudes whose sum is rounded.
    out.real_counts.push_back(static_cast<float>(out.counts.back()) / 3 * (e % 7 == 1 ? 1e20f : 1));
  }
  return out;
}

MoeDesc desc_of(LossCase const& c) {
  MoeDesc desc;
  desc.shape = {
      .tokens = c.tokens, .hidden = 8, .intermediate = 8, .experts = c.experts, .top_k = 1};
  desc.router.kind = c.kind;
  return desc;
}

// A [T,E] view of rows `pitch` elements apart.
template <class T>
auto rows(T* data, LossCase const& c, Device device) {
  auto view = tensor(data, {c.tokens, c.experts}, device);
  view.stride[0] = c.experts + c.padding;
  return view;
}

RouterLossArgs loss_args(LossCase const& c, Device device, float const* logits,
                         void const* counts) {
  RouterLossArgs args;
  args.logits = rows(logits, c, device);
  args.scope_tokens = c.scope_tokens;
  args.balance = c.balance;
  args.z = c.z;
  args.d_loss = c.d_loss;
  if (c.has_counts) args.topk_counts = tensor(counts, c.counts_dtype, {c.experts}, device);
  return args;
}

struct LossResult {
  std::vector<float> losses, dlogits;  // as they were, where not wanted
};

bool same(LossResult const& a, LossResult const& b) {
  return same_bits(a.losses, b.losses) && same_bits(a.dlogits, b.dlogits);
}

LossResult on_cpu(LossCase const& c, LossInputs const& inputs) {
  Context const cpu = Context::create({.num_threads = 2}).value();
  MoeDesc const desc = desc_of(c);
  LossResult out{std::vector<float>(2, NAN), std::vector<float>(inputs.logits.size(), NAN)};
  RouterLossArgs args = loss_args(c, {}, inputs.logits.data(), inputs.counts_of(c.counts_dtype));
  if (c.has_losses) args.losses = tensor(out.losses.data(), {2});
  if (c.has_dlogits) args.dlogits = rows(out.dlogits.data(), c, {});
  std::vector<std::byte> workspace(router_loss_workspace_bytes(cpu, desc).value());
  args.workspace = {workspace.data(), workspace.size()};
  EXPECT_OK(router_loss(cpu, desc, args));
  return out;
}

// A case on the device with all its buffers.
struct DeviceLoss {
  DeviceLoss(Context const& context, LossCase const& c, LossInputs const& inputs)
      : context(context),
        desc(desc_of(c)),
        logits(inputs.logits),
        counts(inputs.counts),
        wide_counts(inputs.wide_counts),
        real_counts(inputs.real_counts),
        losses(2 * sizeof(float)),
        dlogits(inputs.logits.size() * sizeof(float)),
        workspace(router_loss_workspace_bytes(context, desc).value()) {
    Device const device = context.device();
    args = loss_args(c, device, logits.as<float const>(),
                     (c.counts_dtype == DType::fp32    ? real_counts
                      : c.counts_dtype == DType::int64 ? wide_counts
                                                       : counts)
                         .as<void const>());
    if (c.has_losses) args.losses = tensor(losses.as<float>(), {2}, device);
    if (c.has_dlogits) args.dlogits = rows(dlogits.as<float>(), c, device);
    args.workspace = {workspace.as<void>(), workspace.size()};
  }

  void poison() {
    losses.poison();
    dlogits.poison();
    workspace.poison();
  }
  Status run(cudaStream_t stream) const { return router_loss(context, desc, args, {stream}); }
  LossResult results() const {
    require(cudaDeviceSynchronize(), "router_loss");
    return {losses.values<float>(), dlogits.values<float>()};
  }

  Context const& context;
  MoeDesc desc;
  DeviceBuffer logits, counts, wide_counts, real_counts, losses, dlogits, workspace;
  RouterLossArgs args;
};

// body(stream) as a graph, launched once.
template <class Body>
void replay_once(Body&& body) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  require(cudaStreamCreate(&stream), "stream");
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  body(stream);
  require(cudaStreamEndCapture(stream, &graph), "capture");
  require(cudaGraphInstantiate(&replay, graph, 0), "graph");
  require(cudaGraphLaunch(replay, stream), "graph");
  synchronize(stream);
  require(cudaGraphExecDestroy(replay), "graph");
  require(cudaGraphDestroy(graph), "graph");
  require(cudaStreamDestroy(stream), "stream");
}

void run_loss(Context const& context, LossCase const& c) {
  constexpr int kRepeats = 3;
  LossInputs const inputs = make_inputs(c);
  LossResult const cpu = on_cpu(c, inputs);
  DeviceLoss loss(context, c, inputs);
  bool eager = true;
  for (int i = 0; i < kRepeats; ++i) {
    loss.poison();
    EXPECT_OK(loss.run(nullptr));
    eager = same(loss.results(), cpu) && eager;
  }
  loss.poison();
  replay_once([&](cudaStream_t stream) { EXPECT_OK(loss.run(stream)); });
  bool const in_graph = same(loss.results(), cpu);
  EXPECT_OK(check_device_values(context));
  std::printf("%s %s%s%s\n", eager && in_graph ? "passed" : "FAILED", c.name,
              eager ? "" : " (bits)", in_graph ? "" : " (graph)");
  EXPECT(eager && in_graph);
}

constexpr LossCase kLossCases[] = {
    {.name = "no tokens", .tokens = 0, .experts = 8},
    {.name = "no tokens of a scope", .tokens = 0, .experts = 8, .scope_tokens = 50},
    {.name = "one expert", .tokens = 9, .experts = 1},
    {.name = "one token", .tokens = 1, .experts = 32},
    {.name = "32 experts", .tokens = 1000, .experts = 32},
    {.name = "33 experts", .tokens = 1000, .experts = 33},
    {.name = "64 experts, sigmoid",
     .tokens = 777,
     .experts = 64,
     .kind = RouterKind::sigmoid_bias,
     .counts_dtype = DType::int64},
    {.name = "60 experts, group-limited",
     .tokens = 777,
     .experts = 60,
     .kind = RouterKind::group_limited,
     .d_loss = -0.5f},
    {.name = "128 experts", .tokens = 5000, .experts = 128, .counts_dtype = DType::int64},
    {.name = "128 experts, sqrtsoftplus",
     .tokens = 3000,
     .experts = 128,
     .kind = RouterKind::sqrtsoftplus},
    {.name = "200 experts, softmax-topk",
     .tokens = 999,
     .experts = 200,
     .kind = RouterKind::softmax_topk},
    {.name = "512 experts, expert choice",
     .tokens = 500,
     .experts = 512,
     .kind = RouterKind::expert_choice},
    {.name = "1024 experts", .tokens = 300, .experts = 1024},
    {.name = "1024 experts, sqrtsoftplus",
     .tokens = 300,
     .experts = 1024,
     .kind = RouterKind::sqrtsoftplus},
    {.name = "1500 experts", .tokens = 70, .experts = 1500, .padding = 4},
    {.name = "1500 experts, sigmoid",
     .tokens = 70,
     .experts = 1500,
     .kind = RouterKind::sigmoid_bias,
     .counts_dtype = DType::int64},
    {.name = "1500 experts, losses alone", .tokens = 70, .experts = 1500, .has_dlogits = false},
    {.name = "part of a scope", .tokens = 600, .experts = 48, .scope_tokens = 2400},
    {.name = "rows apart", .tokens = 333, .experts = 40, .padding = 3},
    {.name = "large logits", .tokens = 500, .experts = 64, .logits = Logits::large},
    {.name = "large logits, sqrtsoftplus",
     .tokens = 500,
     .experts = 64,
     .kind = RouterKind::sqrtsoftplus,
     .logits = Logits::large},
    {.name = "huge logits", .tokens = 500, .experts = 64, .z = 700, .logits = Logits::huge},
    {.name = "huge logits, sigmoid",
     .tokens = 500,
     .experts = 64,
     .kind = RouterKind::sigmoid_bias,
     .logits = Logits::huge},
    {.name = "huge logits, sqrtsoftplus",
     .tokens = 500,
     .experts = 64,
     .kind = RouterKind::sqrtsoftplus,
     .logits = Logits::huge},
    {.name = "NaN and infinities", .tokens = 900, .experts = 64, .logits = Logits::with_infinities},
    {.name = "NaN and infinities, sigmoid",
     .tokens = 900,
     .experts = 64,
     .kind = RouterKind::sigmoid_bias,
     .logits = Logits::with_infinities},
    {.name = "z alone", .tokens = 400, .experts = 64, .balance = 0, .has_counts = false},
    {.name = "balance alone", .tokens = 400, .experts = 64, .z = 0},
    {.name = "losses alone", .tokens = 400, .experts = 64, .has_dlogits = false},
    {.name = "gradient alone", .tokens = 400, .experts = 64, .has_losses = false},
    {.name = "counts checked alone",
     .tokens = 400,
     .experts = 64,
     .has_losses = false,
     .has_dlogits = false},
    {.name = "fp32 counts", .tokens = 900, .experts = 128, .counts_dtype = DType::fp32},
    {.name = "1500 experts, fp32 counts",
     .tokens = 70,
     .experts = 1500,
     .counts_dtype = DType::fp32},
    {.name = "many blocks", .tokens = 40000, .experts = 16},
};

struct BiasCase {
  char const* name;
  std::vector<int64_t> counts;
  bool wide = true, subtract_mean = false;
  float divisor = 0;  // not 0: counts over it, in fp32
};

std::vector<BiasCase> bias_cases() {
  std::vector<int64_t> many, huge;
  std::mt19937_64 random(5);
  for (int e = 0; e < 3000; ++e) many.push_back(static_cast<int64_t>(random() % 50));
  for (int e = 0; e < 6; ++e) huge.push_back((int64_t{1} << 59) + e);
  return {{"one expert", {7}},
          {"four experts", {5, 2, 3, 2}},
          {"four experts, int32", {5, 2, 3, 2}, false},
          {"less the mean", {5, 2, 3, 2}, true, true},
          {"all counts 0", {0, 0, 0}, true, true},
          {"3000 experts", many, false, true},
          {"a sum near 2^62, less the mean", huge, true, true},
          {"four experts, thirds", {5, 2, 3, 2}, false, true, 3},
          {"3000 experts, sevenths", many, false, false, 7}};
}

void run_bias(Context const& context, BiasCase const& c) {
  auto const experts = static_cast<int64_t>(c.counts.size());
  std::vector<int32_t> const narrow(c.counts.begin(), c.counts.end());
  std::vector<float> bias(c.counts.size());
  for (size_t e = 0; e < bias.size(); ++e) bias[e] = 0.1f * static_cast<float>(e % 7) - 0.3f;
  std::vector<float> real;
  for (int64_t const count : c.counts) real.push_back(static_cast<float>(count) / c.divisor);
  DeviceBuffer const d_bias(bias), d_counts(c.counts), d_narrow(narrow), d_real(real);
  DType const dtype = c.divisor != 0 ? DType::fp32 : c.wide ? DType::int64 : DType::int32;
  SelectionBiasArgs args{.rate = 0.0137f, .subtract_mean = c.subtract_mean};
  SelectionBiasArgs on_device = args;
  void const* const counts = dtype == DType::fp32    ? static_cast<void const*>(real.data())
                             : dtype == DType::int64 ? static_cast<void const*>(c.counts.data())
                                                     : narrow.data();
  args.topk_counts = tensor(counts, dtype, {experts});
  args.selection_bias = tensor(bias.data(), {experts});
  DeviceBuffer const& d_given = dtype == DType::fp32    ? d_real
                                : dtype == DType::int64 ? d_counts
                                                        : d_narrow;
  on_device.topk_counts = tensor(d_given.as<void const>(), dtype, {experts}, context.device());
  on_device.selection_bias = tensor(d_bias.as<float>(), {experts}, context.device());
  Context const cpu = Context::create({.num_threads = 1}).value();
  for (int step = 0; step < 2; ++step) EXPECT_OK(update_selection_bias(cpu, args));
  EXPECT_OK(update_selection_bias(context, on_device));
  require(cudaDeviceSynchronize(), "update_selection_bias");
  replay_once(
      [&](cudaStream_t stream) { EXPECT_OK(update_selection_bias(context, on_device, {stream})); });
  EXPECT_OK(check_device_values(context));
  bool const passed = same_bits(d_bias.values<float>(), bias);
  std::printf("%s bias, %s\n", passed ? "passed" : "FAILED", c.name);
  EXPECT(passed);
}

// Counts that break a rule: all are taken for 0, and the word names the first of them.
void run_bad_counts(Context const& context) {
  struct Bad {
    std::vector<int64_t> counts;
    char const* text;
  };
  constexpr int64_t kMax = int64_t{1} << 62;
  LossCase const c{.name = "bad counts", .tokens = 50, .experts = 4, .counts_dtype = DType::int64};
  for (Bad const& bad :
       {Bad{{3, -2, 5, -1}, "topk_counts[1]: a count of -1 (-1: below 0 or NaN;"},
        Bad{{3, 9, kMax - 12, 1}, "topk_counts[3]: a count of 1 "},
        Bad{{kMax, kMax, kMax, kMax}, "topk_counts[1]: a count of 2147483646"},
        Bad{{std::numeric_limits<int64_t>::min(), 1, 1, 1}, "topk_counts[0]: a count of -1"}}) {
    LossInputs inputs = make_inputs(c);
    inputs.wide_counts = {0, 0, 0, 0};
    LossResult const zeros = on_cpu(c, inputs);
    inputs.wide_counts = bad.counts;
    DeviceLoss loss(context, c, inputs);
    std::vector<float> const bias = {1, 2, 3, 4};
    DeviceBuffer const d_bias(bias);
    auto const reports = [&] {
      require(cudaDeviceSynchronize(), "bad counts");
      Status const status = check_device_values(context);
      bool const reported = status.code() == StatusCode::invalid_argument &&
                            std::string(status.text()).find(bad.text) != std::string::npos;
      if (!reported) std::printf("expected: %s\ngot: %s\n", bad.text, status.text());
      return reported && check_device_values(context).ok();
    };
    EXPECT_OK(loss.run(nullptr));
    EXPECT(reports());
    EXPECT(same(loss.results(), zeros));
    SelectionBiasArgs update{.topk_counts = loss.args.topk_counts};
    update.selection_bias = tensor(d_bias.as<float>(), {4}, context.device());
    EXPECT_OK(update_selection_bias(context, update));
    EXPECT(reports());
    EXPECT(d_bias.values<float>() == bias);
  }
}

// What the host sees it refuses, before anything is written.
void run_refusals(Context const& context) {
  LossCase const c{.name = "refusals", .tokens = 50, .experts = 4};
  DeviceLoss loss(context, c, make_inputs(c));
  loss.args.z = NAN;
  EXPECT(loss.run(nullptr).code() == StatusCode::invalid_argument);
  loss.args.z = 1;
  loss.args.topk_counts.device = {};
  EXPECT(loss.run(nullptr).code() == StatusCode::invalid_argument);
  loss.args.topk_counts = {};
  EXPECT(loss.run(nullptr).code() == StatusCode::invalid_argument);
  EXPECT(loss.results().losses.size() == 2 && std::isnan(loss.results().losses[0]));
  EXPECT(update_selection_bias(context, {.rate = NAN}).code() == StatusCode::invalid_argument);
}

int run(Context const& context) {
  for (LossCase const& c : kLossCases) run_loss(context, c);
  for (BiasCase const& c : bias_cases()) run_bias(context, c);
  run_bad_counts(context);
  run_refusals(context);
  std::printf(failures == 0 ? "all passed\n" : "FAILED\n");
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda_test

int main() { return tessera::cuda_test::on_first_gpu(tessera::cuda_test::run); }

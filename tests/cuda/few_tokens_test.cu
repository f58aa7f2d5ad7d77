// SPDX-License-Identifier: Apache-2.0
// The kernels for few tokens against their plain twins and the GEMMs: rows of an expert from none to more than pass at
// once, sizes that fill no stage, every layout with contiguous rows, biases, activations, tokens without rows and with
// more of them than others, in poisoned memory, equal bits again.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "layer.cuh"
#include "src/cuda/host/aggregate.hpp"
#include "src/cuda/host/experts_fwd.hpp"
#include "src/cuda/host/projection.hpp"

namespace tessera::cuda_test {
namespace {

using cuda::WeightRows;

struct Case {
  char const* name;
  int64_t hidden, intermediate;
  std::vector<int32_t> rows;  // of each expert
  ActivationKind activation = ActivationKind::swiglu;
  bool bias = false, interleaved = false, stores_h = true;
};

std::vector<Case> cases() {
  using Kind = ActivationKind;
  return {
      {"one row", 2048, 768, {0, 0, 1, 0}},
      {"one to five rows", 512, 256, {1, 2, 3, 4, 5, 0}},
      {"more rows than pass at once", 320, 264, {9, 0, 24, 17}},
      {"no multiple of a stage", 200, 104, {2, 0, 7, 1}, Kind::swiglu, true},
      {"least sizes", 8, 8, {1, 3}, Kind::geglu, true, true},
      {"long rows", 7168, 64, {0, 8}, Kind::swiglu, false, true, false},
      {"long n", 64, 2880, {1, 1, 1, 1}, Kind::clamped_swiglu, true, true},
      {"not gated", 320, 136, {3, 1}, Kind::gelu, true},
      {"relu2, nothing kept", 264, 72, {1, 6}, Kind::relu2, false, false, false},
      {"more experts than threads", 128, 64, std::vector<int32_t>(300, 1)},
  };
}

// |value - expected| of bf16 values that differ in the order of their sums: one rounding, and what cancels.
bool close(std::vector<__nv_bfloat16> const& values, std::vector<__nv_bfloat16> const& expected,
           double scale) {
  if (values.size() != expected.size()) return false;
  for (size_t i = 0; i < values.size(); ++i) {
    double const a = __bfloat162float(values[i]), b = __bfloat162float(expected[i]);
    if (!(std::abs(a - b) <= std::abs(b) * 0x1p-7 + scale * 0x1p-16)) return false;
  }
  return true;
}

bool any(std::vector<__nv_bfloat16> const& values) {
  return std::any_of(values.begin(), values.end(),
                     [](__nv_bfloat16 v) { return __bfloat162float(v) != 0.0f; });
}

struct Experts {
  explicit Experts(Case const& c) : count(static_cast<int32_t>(c.rows.size())) {
    for (int32_t const r : c.rows) offsets.push_back(offsets.back() + r);
    rows = offsets.back();
    capacity = rows + 3;  // rows past the last expert are neither read nor written
    for (int64_t i = 0; i < capacity; ++i) gather.push_back(static_cast<int32_t>(i * 5 % capacity));
  }
  int32_t count;
  int64_t rows = 0, capacity = 0;
  std::vector<int32_t> offsets{0}, gather;
};

void check(Case const& c, char const* what, bool holds) {
  if (!holds) std::printf("%s: %s\n", c.name, what);
  EXPECT(holds);
}

// The buffers of a call, and its arguments.
class Call {
 public:
  explicit Call(Case const& c)
      : c_(c),
        e_(c),
        activation_{.kind = c.activation},
        halves_(activation_.gated() ? 2 : 1),
        tokens_(e_.capacity),
        x_(values(tokens_ * c.hidden, 1)),
        w_up_(values(e_.count * halves_ * c.intermediate * c.hidden, 2)),
        b_up_(values(e_.count * halves_ * c.intermediate, 3)),
        w_down_(values(e_.count * c.hidden * c.intermediate, 5)),
        b_down_(values(e_.count * c.hidden, 6)),
        offsets_(e_.offsets),
        gather_(e_.gather),
        inverse_(inverse()),
        token_offsets_(token_offsets()),
        scores_(scores()),
        h_(2 * static_cast<size_t>(e_.capacity * halves_ * c.intermediate)),
        a_(2 * static_cast<size_t>(e_.capacity * c.intermediate)),
        y_(2 * static_cast<size_t>(e_.capacity * c.hidden)),
        o_(2 * static_cast<size_t>(tokens_ * (c.hidden + kPadding))),
        counters_(std::vector<int32_t>(3, 0)) {}

  struct Results {
    Bytes h, a, y, o;
    std::vector<__nv_bfloat16> h_values, a_values, y_values, o_values;
    bool operator==(Results const& other) const {
      return h == other.h && a == other.a && y == other.y && o == other.o;
    }
  };

  cuda::ExpertsFwdArguments arguments() const {
    int64_t const d = c_.hidden, n = c_.intermediate;
    int32_t* const counters = counters_.as<int32_t>();
    cuda::ExpertsFwdArguments args{.up = {.x = {x_.as<void>(), tokens_, d},
                                          .gmem_gather_index = gather_.as<int32_t>(),
                                          .gmem_expert_offsets = offsets_.as<int32_t>(),
                                          .w_up = {half(w_up_, 0, d), half(w_up_, halves_ - 1, d)},
                                          .b_up = {},
                                          .activation = activation_,
                                          .gmem_h = c_.stores_h ? h_.as<void>() : nullptr,
                                          .gmem_a = a_.as<void>(),
                                          .rows = e_.capacity,
                                          .hidden = d,
                                          .intermediate = n,
                                          .experts = e_.count,
                                          .gmem_tile_counter = counters + 1},
                                   .down = {.gmem_a = a_.as<void>(),
                                            .gmem_expert_offsets = offsets_.as<int32_t>(),
                                            .w_down = rows_of(w_down_, n),
                                            .b_down = c_.bias ? rows_of(b_down_, 1) : WeightRows{},
                                            .gmem_y = y_.as<void>(),
                                            .rows = e_.capacity,
                                            .hidden = d,
                                            .intermediate = n,
                                            .experts = e_.count,
                                            .gmem_tile_counter = counters + 2},
                                   .aggregate = {.gmem_y = y_.as<void>(),
                                                 .gmem_scores = scores_.as<float>(),
                                                 .gmem_inverse_permutation = inverse_.as<int32_t>(),
                                                 .gmem_token_offsets = token_offsets_.as<int32_t>(),
                                                 .gmem_o = o_.as<void>(),
                                                 .o_pitch = d + kPadding,
                                                 .adds_to_o = false,
                                                 .tokens = tokens_,
                                                 .hidden = d,
                                                 .top_k = 2},
                                   .has_aggregate = true,
                                   .gmem_ticket = counters};
    if (c_.bias) {
      args.up.b_up[0] = half(b_up_, 0, 1);
      args.up.b_up[1] = half(b_up_, halves_ - 1, 1);
    }
    return args;
  }

  // launch(arguments) -> cudaError_t, which stores a, and y, as `inverted` says: then rows that nobody writes are 0,
  // whose inverse stands in the result.
  enum class Inverted { none, a, a_and_y };
  template <class Launch>
  Results run(Inverted inverted, Launch launch) const {
    for (DeviceBuffer const* buffer : {&h_, &a_, &y_, &o_}) {
      bool const cleared = (buffer == &a_ && inverted != Inverted::none) ||
                           (buffer == &y_ && inverted == Inverted::a_and_y);
      require(cudaMemsetAsync(buffer->as<void>(), cleared ? 0 : kPoison, buffer->size(), nullptr),
              "poison");
    }
    require(launch(arguments()), "the experts");
    synchronize(nullptr);
    auto const bytes_of = [](DeviceBuffer const& buffer, bool inverts) {
      Bytes bytes = buffer.bytes();
      for (auto& byte : bytes) {
        byte = static_cast<Bytes::value_type>(inverts ? ~byte : byte);
      }
      return bytes;
    };
    Results out{.h = h_.bytes(),
                .a = bytes_of(a_, inverted != Inverted::none),
                .y = bytes_of(y_, inverted == Inverted::a_and_y),
                .o = o_.bytes(),
                .h_values = h_.values<__nv_bfloat16>(),
                .a_values = {},
                .y_values = {},
                .o_values = o_.values<__nv_bfloat16>()};
    auto const values_of = [](Bytes const& bytes, int64_t count) {
      std::vector<__nv_bfloat16> values(static_cast<size_t>(count));
      std::memcpy(values.data(), bytes.data(), 2 * values.size());
      return values;
    };
    out.h_values.resize(static_cast<size_t>(c_.stores_h ? e_.rows * halves_ * c_.intermediate : 0));
    out.a_values = values_of(out.a, e_.rows * c_.intermediate);
    out.y_values = values_of(out.y, e_.rows * c_.hidden);
    return out;
  }

  bool leaves_zeros() const { return counters_.values<int32_t>() == std::vector<int32_t>(3, 0); }
  Experts const& experts() const { return e_; }

 private:
  static constexpr int64_t kPadding = 24;  // elements between rows of o

  // Slots are rows in another order, some of which no row has; every third token has none.
  std::vector<int32_t> inverse() const {
    std::vector<int32_t> out;
    for (int64_t i = 0; i < e_.rows; ++i) {
      out.push_back(static_cast<int32_t>((i * 7 + 3) % e_.rows));
      if (i % 4 == 1) out.push_back(-1);
    }
    return out;
  }
  std::vector<float> scores() const {
    std::vector<float> out(inverse().size());
    for (size_t i = 0; i < out.size(); ++i) out[i] = 0.25f + 0.125f * static_cast<float>(i % 7);
    return out;
  }
  std::vector<int32_t> token_offsets() const {
    auto const slots = static_cast<int64_t>(inverse().size());
    std::vector<int32_t> out{0};
    for (int64_t t = 0; t < tokens_; ++t) {
      int64_t const more = t % 3 == 1 ? 0 : (slots * 2 + tokens_ - 1) / tokens_;
      int64_t const end = t + 1 == tokens_ ? slots : std::min(slots, out.back() + more);
      out.push_back(static_cast<int32_t>(end));
    }
    return out;
  }
  WeightRows half(DeviceBuffer const& buffer, int64_t h, int64_t columns) const {
    bool const turns = c_.interleaved && halves_ == 2;
    int64_t const n = c_.intermediate;
    return {.gmem = buffer.as<__nv_bfloat16>() + (turns ? h * columns : h * n * columns),
            .expert_stride = halves_ * n * columns,
            .row_stride = turns ? 2 * columns : columns,
            .column_stride = 1,
            .block = n};
  }
  WeightRows rows_of(DeviceBuffer const& buffer, int64_t columns) const {
    return {.gmem = buffer.as<void>(),
            .expert_stride = c_.hidden * columns,
            .row_stride = columns,
            .column_stride = 1,
            .block = c_.hidden};
  }

  Case const& c_;
  Experts e_;
  Activation activation_;
  int64_t halves_, tokens_;
  DeviceBuffer x_, w_up_, b_up_, w_down_, b_down_, offsets_, gather_, inverse_, token_offsets_,
      scores_, h_, a_, y_, o_, counters_;
};

int sm_count() {
  int count = 0;
  require(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0), "SMs");
  return count;
}

void run_experts(Case const& c) {
  Call const call(c);
  int const sms = sm_count();
  using Arguments = cuda::ExpertsFwdArguments;
  auto const few = [&](Arguments const& args) {
    return cuda::launch_experts_fwd_few_tokens(args, sms, nullptr);
  };
  // Rows of y are the result.
  auto const in_place = [&](Arguments args) {
    args.has_aggregate = false;
    return few(args);
  };
  auto const plain = [](Arguments const& args) {
    cudaError_t error = cuda::launch_up_projection_fwd_plain(args.up, nullptr);
    if (error == cudaSuccess) error = cuda::launch_down_projection_fwd_plain(args.down, nullptr);
    if (error != cudaSuccess) return error;
    return cuda::launch_aggregate_plain<__nv_bfloat16>(args.aggregate, nullptr);
  };
  auto const gemms = [&](Arguments const& args) {
    cudaError_t error = cuda::launch_up_projection_fwd(args.up, sms, nullptr);
    if (error == cudaSuccess) error = cuda::launch_down_projection_fwd(args.down, sms, nullptr);
    if (error != cudaSuccess) return error;
    return cuda::launch_aggregate<__nv_bfloat16>(args.aggregate, nullptr);
  };
  using Inverted = Call::Inverted;
  auto const wanted = call.run(Inverted::none, plain);
  auto const got = call.run(Inverted::a_and_y, few);
  auto const got_in_place = call.run(Inverted::a, in_place);
  double const scale = std::sqrt(static_cast<double>(c.hidden));
  double const down_scale = scale * scale * std::sqrt(static_cast<double>(c.intermediate));
  check(c, "a is not zero", any(wanted.a_values));
  check(c, "o is not zero", any(wanted.o_values));
  check(c, "h", close(got.h_values, wanted.h_values, scale));
  check(c, "a", close(got.a_values, wanted.a_values, scale * scale));
  check(c, "y", close(got.y_values, wanted.y_values, 0x1p6 * down_scale));
  check(c, "equal bits", got == call.run(Inverted::a_and_y, few));
  check(c, "equal bits in place",
        got.h == got_in_place.h && got.a == got_in_place.a && got.y == got_in_place.y);
  check(c, "counters are 0 afterwards", call.leaves_zeros());
  check(c, "equal bits of the GEMMs", got == call.run(Inverted::none, gemms));
  auto const tail_of = [](Bytes const& bytes, int64_t values) {
    return Bytes(bytes.begin() + 2 * values, bytes.end());
  };
  int64_t const rows = call.experts().rows, n = c.intermediate, d = c.hidden;
  int64_t const width = Activation{.kind = c.activation}.gated() ? 2 * n : n;
  check(c, "rows of no expert",
        tail_of(got.a, rows * n) == tail_of(wanted.a, rows * n) &&
            tail_of(got.y, rows * d) == tail_of(wanted.y, rows * d) &&
            tail_of(got.h, rows * width) == tail_of(wanted.h, rows * width));
}

void run_logits(int64_t tokens, int64_t hidden, int32_t experts, bool bias) {
  DeviceBuffer const x(values(tokens * hidden, 7)), w(values(experts * hidden, 8)),
      b(values(experts, 9)), logits(sizeof(float) * static_cast<size_t>(tokens * experts));
  cuda::RouterLogitsArguments const args{.x = {x.as<void>(), tokens, hidden},
                                         .w_router = {w.as<void>(), experts, hidden},
                                         .gmem_b_router = bias ? b.as<void>() : nullptr,
                                         .gmem_logits = logits.as<float>(),
                                         .hidden = hidden,
                                         .experts = experts};
  auto const run = [&](auto* launch) {
    require(cudaMemsetAsync(logits.as<void>(), kPoison, logits.size(), nullptr), "poison");
    require(launch(args, nullptr), "router_logits");
    synchronize(nullptr);
    return logits.values<float>();
  };
  auto const plain = run(&cuda::launch_router_logits_plain);
  auto const gemv = run(&cuda::launch_router_logits_gemv);
  double worst = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    double const difference = std::abs(static_cast<double>(gemv[i]) - plain[i]);
    worst = std::isnan(difference) ? difference : std::max(worst, difference);
  }
  bool const holds = worst <= 1e-6 * static_cast<double>(hidden);
  if (!holds) {
    std::printf("T %lld d %lld E %d: off by %g\n", static_cast<long long>(tokens),
                static_cast<long long>(hidden), experts, worst);
  }
  EXPECT(holds);
  EXPECT(same_bits(gemv, run(&cuda::launch_router_logits_gemv)));
}

int run() {
  if (!has_device()) return kSkipped;
  for (Case const& c : cases()) {
    run_experts(c);
  }
  run_logits(1, 2048, 128, false);
  run_logits(8, 200, 37, true);
  run_logits(5, 7168, 256, true);
  run_logits(3, 8, 1, false);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda_test

int main() { return tessera::cuda_test::run(); }

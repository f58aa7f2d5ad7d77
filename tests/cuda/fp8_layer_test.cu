// SPDX-License-Identifier: Apache-2.0
// A layer with quantised operands on a GPU beside the same call on the CPU, in memory that both read: x8 has equal
// bytes, h8 equal codes but where its bf16 falls on the other side of a rounding, o and gradients are as near as such
// codes allow; h made again of x8 gives the bits of h saved; what is not served is refused
// by name. Noise against fp64 is the job of `tessera verify --precision fp8`.
// Exit 0 passed, 1 failed, 77 skipped (no GPU).
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>

#include "first_gpu.cuh"
#include "layer.cuh"
#include "tests/low_precision/layer_codes.hpp"

namespace tessera::cuda_test {
namespace {

class ManagedBuffer {
 public:
  explicit ManagedBuffer(size_t bytes) {
    require(cudaMallocManaged(&data_, bytes + kAlign), "cudaMallocManaged");
    std::memset(data_, kPoison, bytes + kAlign);
  }
  ManagedBuffer(ManagedBuffer const&) = delete;
  ManagedBuffer& operator=(ManagedBuffer const&) = delete;
  ~ManagedBuffer() { cudaFree(data_); }
  void* data() const { return data_; }

 private:
  static constexpr size_t kAlign = 16;
  void* data_ = nullptr;
};

// A layer of fp8 on one device; data depend on the shape alone.
class QuantisedLayer {
 public:
  QuantisedLayer(Context const& context, MoeDesc const& desc) : context_(context), desc_(desc) {
    MoeShape const& s = desc.shape;
    int64_t const width = desc.up_width() * s.intermediate, slots = desc.num_slots();
    bool const turned = desc.layout.orientation == WeightOrientation::transposed;
    forward.x = input({s.tokens, s.hidden}, 1, 1.7f);
    forward.w_router = input({s.experts, s.hidden}, 2, 0.1f);
    float const up = 1.7f / std::sqrt(float(s.hidden));
    float const down = 1.7f / std::sqrt(float(s.intermediate));
    forward.weights.w_up = turned ? input({s.experts, s.hidden, width}, 3, up)
                                  : input({s.experts, width, s.hidden}, 3, up);
    forward.weights.w_down = turned ? input({s.experts, s.intermediate, s.hidden}, 4, down)
                                    : input({s.experts, s.hidden, s.intermediate}, 4, down);
    forward.o = output(DType::bf16, {s.tokens, s.hidden});
    forward.x8 = output(DType::fp8_e4m3, {s.tokens, s.hidden});
    forward.x_scale = output(DType::fp32, {s.tokens, s.hidden / 128});
    if (desc.save == SavePolicy::h) {
      forward.h = output(DType::fp8_e4m3, {slots, width});
      forward.h_scale = output(DType::fp32, {width / 128, padded_scale_rows(slots)});
    }
    forward.routing = memory(routing_bytes(desc).value());
    forward.workspace = memory(workspace_bytes(context, desc, Pass::forward).value());
    backward.d_o = input({s.tokens, s.hidden}, 5, 1.7f);
    backward.x8 = forward.x8;
    backward.x_scale = forward.x_scale;
    backward.h = forward.h;
    backward.h_scale = forward.h_scale;
    backward.routing = {forward.routing.data, forward.routing.bytes};
    backward.w_router = forward.w_router;
    backward.weights = forward.weights;
    backward.dx = output(DType::bf16, {s.tokens, s.hidden});
    backward.dlogits = output(DType::fp32, {s.tokens, s.experts});
    backward.gradients.dw_up = like(forward.weights.w_up);
    backward.gradients.dw_down = like(forward.weights.w_down);
    backward.gradients.dw_router = output(DType::fp32, {s.experts, s.hidden});
    backward.workspace = memory(workspace_bytes(context, desc, Pass::backward).value());
    if (desc.weight_codes) make_codes();
  }

  void run() const {
    EXPECT_OK(moe_forward(context_, desc_, forward));
    wait();
    std::memset(forward.workspace.data, kPoison, forward.workspace.bytes);
    EXPECT_OK(moe_backward(context_, desc_, backward));
    wait();
  }
  void wait() const {
    require(cudaDeviceSynchronize(), "device");
    EXPECT_OK(check_device_values(context_));
  }

  MoeForwardArgs forward;
  MoeBackwardArgs backward;
  QuantisedWeights codes;  // with MoeDesc::weight_codes

 private:
  // Codes take the place of the weights.
  void make_codes() {
    auto const make = [this](DType dtype, std::initializer_list<int64_t> shape) {
      return output(dtype, shape);
    };
    codes = low_precision_tests::room_for_codes(desc_, make);
    EXPECT_OK(quantise_weights(context_, desc_, forward.weights, scale_rule(desc_), codes));
    wait();
    forward.weight_codes = low_precision_tests::as_read(codes);
    backward.weight_codes = forward.weight_codes;
    forward.weights = backward.weights = {};
  }
  Buffer memory(size_t bytes) {
    return {buffers_.emplace_back(std::make_unique<ManagedBuffer>(bytes))->data(), bytes};
  }
  Tensor output(DType dtype, std::initializer_list<int64_t> shape) {
    Tensor out = tensor(static_cast<void*>(nullptr), dtype, shape, context_.device());
    out.data = memory(size_t(out.elements()) * dtype_bytes(dtype)).data;
    return out;
  }
  Tensor like(ConstTensor const& weight) {
    return output(DType::fp32, {weight.shape[0], weight.shape[1], weight.shape[2]});
  }
  ConstTensor input(std::initializer_list<int64_t> shape, uint64_t seed, float scale) {
    Tensor const out = output(DType::bf16, shape);
    auto* const to = static_cast<__nv_bfloat16*>(out.data);
    auto const from = values(out.elements(), seed);
    for (int64_t i = 0; i < out.elements(); ++i) {
      to[i] = __float2bfloat16(__bfloat162float(from[size_t(i)]) * scale);
    }
    return out;
  }

  Context const& context_;
  MoeDesc desc_;
  std::vector<std::unique_ptr<ManagedBuffer>> buffers_;
};

size_t bytes_of(Tensor const& t) { return size_t(t.elements()) * dtype_bytes(t.dtype); }
bool equal(Tensor const& a, Tensor const& b) {
  return bytes_of(a) == bytes_of(b) && std::memcmp(a.data, b.data, bytes_of(a)) == 0;
}

// 20 log10(|want| / |want - have|).
double db(Tensor const& want, Tensor const& have) {
  double signal = 0, noise = 0;
  for (int64_t i = 0; i < want.elements(); ++i) {
    auto const at = [i](Tensor const& t) {
      return t.dtype == DType::fp32
                 ? double(static_cast<float const*>(t.data)[i])
                 : double(__bfloat162float(static_cast<__nv_bfloat16 const*>(t.data)[i]));
    };
    double const a = at(want), b = at(have);
    signal += a * a;
    noise += (a - b) * (a - b);
  }
  return noise == 0 ? 999 : 10 * std::log10(signal / noise);
}
void expect_db(char const* name, Tensor const& want, Tensor const& have, double least, int line) {
  double const found = db(want, have);
  std::printf("  %s: %.1f dB from the CPU's\n", name, found);
  expect(found >= least, name, line);  // NaN is not
}

MoeDesc fp8_desc(MoeShape const& shape) {
  MoeDesc desc;
  desc.shape = shape;
  desc.dtype = DType::bf16;
  desc.router.kind = RouterKind::topk_softmax;
  desc.precision = Precision::fp8;
  return desc;
}

float value_of(uint8_t code) {
  float const mantissa = code & 7;
  int const exponent = code >> 3 & 15;
  float const size =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -size : size;
}

// Codes of h differ where the sums of tensor cores round to another bf16, which may be a block's largest: by a step, or
// by less than 0.5 of 448.
void check_h(QuantisedLayer const& cpu, QuantisedLayer const& gpu, int64_t rows) {
  auto const* const want = static_cast<uint8_t const*>(cpu.forward.h.data);
  auto const* const have = static_cast<uint8_t const*>(gpu.forward.h.data);
  int64_t const width = cpu.forward.h.shape[1];
  int64_t other = 0, far = 0;
  for (int64_t i = 0; i < rows * width; ++i) {
    other += want[i] != have[i];
    float const a = value_of(want[i]), b = value_of(have[i]);
    far += std::abs(a - b) > std::max(0.5f, std::abs(a) / 7);
  }
  std::printf("  h8: %.2f%% of the codes are the neighbour of the CPU's\n",
              100.0 * double(other) / double(rows * width));
  EXPECT(other < rows * width / 20);
  EXPECT(far == 0);
  auto const* const scales = static_cast<float const*>(cpu.forward.h_scale.data);
  auto const* const own = static_cast<float const*>(gpu.forward.h_scale.data);
  int64_t const pitch = cpu.forward.h_scale.shape[1];
  int64_t wrong = 0;
  for (int64_t i = 0; i < cpu.forward.h_scale.elements(); ++i) {
    bool const is_row = i % pitch < rows;
    wrong += is_row ? std::abs(own[i] - scales[i]) > scales[i] / 128 : own[i] != 0;
  }
  EXPECT(wrong == 0);
}

int64_t routed_rows(MoeDesc const& desc, QuantisedLayer const& layer) {
  RoutingView const view = routing_view(desc, layer.forward.routing).value();
  return view.expert_offsets[desc.shape.experts];
}

void equals_the_cpu(Context const& context) {
  Context const host = std::move(Context::create()).value();
  struct Case {
    MoeShape shape;
    WeightLayout layout;
    Rounding round;
  };
  for (Case const& c : {
           Case{{.tokens = 300, .hidden = 512, .intermediate = 256, .experts = 8, .top_k = 2},
                {},
                Rounding::none},
           {{.tokens = 333, .hidden = 256, .intermediate = 768, .experts = 12, .top_k = 3},
            {GateUpOrder::interleaved},
            Rounding::none},
           {{.tokens = 257, .hidden = 768, .intermediate = 256, .experts = 4, .top_k = 2},
            {GateUpOrder::up_first, WeightOrientation::transposed},
            Rounding::none},
           {{.tokens = 900, .hidden = 256, .intermediate = 256, .experts = 4, .top_k = 2},
            {GateUpOrder::blocked, WeightOrientation::rows, 32},
            Rounding::nr_f},
           {{.tokens = 3, .hidden = 256, .intermediate = 256, .experts = 16, .top_k = 4},
            {},
            Rounding::none},
       }) {
    MoeDesc desc = fp8_desc(c.shape);
    desc.layout = c.layout;
    desc.router.round = c.round;
    std::printf(" T %lld, d %lld, n %lld\n", static_cast<long long>(c.shape.tokens),
                static_cast<long long>(c.shape.hidden),
                static_cast<long long>(c.shape.intermediate));
    QuantisedLayer const cpu(host, desc), gpu(context, desc);
    cpu.run();
    gpu.run();
    EXPECT(equal(cpu.forward.x8, gpu.forward.x8));
    EXPECT(equal(cpu.forward.x_scale, gpu.forward.x_scale));
    int64_t const rows = routed_rows(desc, cpu);
    EXPECT(rows == routed_rows(desc, gpu));
    check_h(cpu, gpu, rows);
    double const least = 32;
    expect_db("o", cpu.forward.o, gpu.forward.o, 34, __LINE__);
    expect_db("dx", cpu.backward.dx, gpu.backward.dx, least, __LINE__);
    expect_db("dw_up", cpu.backward.gradients.dw_up, gpu.backward.gradients.dw_up, least, __LINE__);
    expect_db("dw_down", cpu.backward.gradients.dw_down, gpu.backward.gradients.dw_down, least,
              __LINE__);
    expect_db("dw_router", cpu.backward.gradients.dw_router, gpu.backward.gradients.dw_router, 25,
              __LINE__);
  }
}

void h_made_again_has_equal_bits(Context const& context) {
  for (int64_t const n : {256, 512}) {
    MoeDesc desc =
        fp8_desc({.tokens = 300, .hidden = 512, .intermediate = n, .experts = 8, .top_k = 2});
    QuantisedLayer const saved(context, desc);
    desc.save = SavePolicy::x;
    QuantisedLayer const made(context, desc);
    saved.run();
    made.run();
    EXPECT(equal(saved.forward.o, made.forward.o));
    EXPECT(equal(saved.backward.dx, made.backward.dx));
    EXPECT(equal(saved.backward.gradients.dw_up, made.backward.gradients.dw_up));
    EXPECT(equal(saved.backward.gradients.dw_down, made.backward.gradients.dw_down));
  }
}

// Codes of weights are the CPU's, and a layer that reads them has the bits of one that quantises.
void codes_of_weights_have_equal_bits(Context const& context) {
  Context const host = std::move(Context::create()).value();
  for (auto const orientation : {WeightOrientation::rows, WeightOrientation::transposed}) {
    MoeDesc desc =
        fp8_desc({.tokens = 300, .hidden = 512, .intermediate = 256, .experts = 8, .top_k = 2});
    desc.layout.orientation = orientation;
    if (orientation == WeightOrientation::transposed) desc.save = SavePolicy::x;
    QuantisedLayer const quantises(context, desc);
    desc.weight_codes = true;
    QuantisedLayer const reads(context, desc), cpu(host, desc);
    for (auto const part : {&QuantisedWeights::up, &QuantisedWeights::up_transposed,
                            &QuantisedWeights::up_scales, &QuantisedWeights::down,
                            &QuantisedWeights::down_transposed, &QuantisedWeights::down_scales}) {
      EXPECT(equal(reads.codes.*part, cpu.codes.*part));
    }
    quantises.run();
    reads.run();
    EXPECT(equal(quantises.forward.o, reads.forward.o));
    EXPECT(equal(quantises.backward.dx, reads.backward.dx));
    EXPECT(equal(quantises.backward.gradients.dw_up, reads.backward.gradients.dw_up));
    EXPECT(equal(quantises.backward.gradients.dw_down, reads.backward.gradients.dw_down));
  }
}

// The same tensor, 8 bytes further.
template <class AnyTensor>
AnyTensor moved(AnyTensor t) {
  t.data = const_cast<void*>(static_cast<void const*>(static_cast<char const*>(t.data) + 8));
  return t;
}

void refusals_name_their_reason(Context const& context) {
  MoeDesc const desc =
      fp8_desc({.tokens = 40, .hidden = 256, .intermediate = 256, .experts = 4, .top_k = 2});
  QuantisedLayer const layer(context, desc);
  layer.run();
  auto const refused = [&](std::function<void(MoeForwardArgs&)> const& change, char const* name) {
    MoeForwardArgs args = layer.forward;
    change(args);
    Status const status = moe_forward(context, desc, args);
    EXPECT(status.code() == StatusCode::unsupported);
    if (!std::string(status.text()).starts_with(name)) std::printf("%s\n", status.text());
    EXPECT(std::string(status.text()).starts_with(name));
  };
  refused([](MoeForwardArgs& a) { a.x = moved(a.x); }, "x: its address");
  refused([](MoeForwardArgs& a) { a.h = moved(a.h); }, "h: its address");
  refused([](MoeForwardArgs& a) { a.x8 = moved(a.x8); }, "x8: its address");
  refused([](MoeForwardArgs& a) { a.weights.w_up = moved(a.weights.w_up); }, "w_up: its address");
  refused([](MoeForwardArgs& a) { a.weights.w_down = moved(a.weights.w_down); },
          "w_down: its address");
  MoeBackwardArgs args = layer.backward;
  args.h = moved(args.h);
  EXPECT(moe_backward(context, desc, args).code() == StatusCode::unsupported);
}

int run(Context const& context) {
  struct Test {
    char const* name;
    void (*body)(Context const&);
  };
  for (Test const& test :
       {Test{"equals the CPU", equals_the_cpu}, Test{"h made again", h_made_again_has_equal_bits},
        Test{"weight codes", codes_of_weights_have_equal_bits},
        Test{"refusals", refusals_name_their_reason}}) {
    int const before = failures;
    test.body(context);
    std::printf("%-14s %s\n", test.name, failures == before ? "ok" : "FAILED");
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda_test

int main() { return tessera::cuda_test::on_first_gpu(tessera::cuda_test::run); }

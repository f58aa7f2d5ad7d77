// SPDX-License-Identifier: Apache-2.0
// A layer on a GPU with all its buffers, through the public API, and what counts failed expectations.
#pragma once

#include <cuda_bf16.h>

#include <memory>
#include <vector>

#include "device_buffer.cuh"
#include "tessera/tessera.hpp"

namespace tessera::cuda_test {

inline int failures = 0;

#define EXPECT(condition) expect((condition), #condition, __LINE__)
inline void expect(bool holds, char const* what, int line) {
  if (holds) return;
  ++failures;
  std::printf("line %d: %s\n", line, what);
}

inline void expect_ok(Status const& status, int line) {
  if (!status.ok()) std::printf("line %d: %s\n", line, status.text());
  failures += status.ok() ? 0 : 1;
}
#define EXPECT_OK(expression) expect_ok((expression), __LINE__)

using Bytes = std::vector<unsigned char>;

// Values in [-1, 1) from the index and a seed.
inline std::vector<__nv_bfloat16> values(int64_t count, uint64_t seed) {
  std::vector<__nv_bfloat16> out(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    uint64_t z = (static_cast<uint64_t>(i) + seed * 0x632be59bd9b4e019ull) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z ^= z >> 31;
    out[i] = __float2bfloat16(static_cast<float>(z >> 40) * 0x1p-23f - 1.0f);
  }
  return out;
}

inline MoeDesc small_desc(RouterKind kind) {
  MoeDesc desc;
  desc.shape = {.tokens = 96, .hidden = 72, .intermediate = 40, .experts = 8, .top_k = 3};
  desc.dtype = DType::bf16;
  desc.router.kind = kind;
  return desc;
}

// A layer with all its buffers, forward and backward; weights and tokens depend on the shape alone.
class Layer {
 public:
  Layer(Context const& context, MoeDesc const& desc)
      : context_(context),
        desc_(desc),
        x_(values(desc.shape.tokens * desc.shape.hidden, 1)),
        w_router_(values(desc.shape.experts * desc.shape.hidden, 2)),
        w_up_(values(desc.shape.experts * width() * desc.shape.hidden, 3)),
        w_down_(values(desc.shape.experts * desc.shape.hidden * desc.shape.intermediate, 4)),
        o_(2 * static_cast<size_t>(desc.shape.tokens * desc.shape.hidden)),
        h_(2 * static_cast<size_t>(desc.num_slots() * width())),
        routing_(routing_bytes(desc).value()),
        workspace_(bytes_of(context, desc, Pass::forward)),
        d_o_(values(desc.shape.tokens * desc.shape.hidden, 5)),
        b_up_(values(desc.shape.experts * width(), 6)),
        b_down_(values(desc.shape.experts * desc.shape.hidden, 7)),
        backward_workspace_(bytes_of(context, desc, Pass::backward)) {
    MoeShape const& s = desc.shape;
    args.x = tensor(x_.as<void const>(), DType::bf16, {s.tokens, s.hidden}, device());
    if (desc.router.kind != RouterKind::given) {
      args.w_router =
          tensor(w_router_.as<void const>(), DType::bf16, {s.experts, s.hidden}, device());
    }
    args.weights.w_up =
        tensor(w_up_.as<void const>(), DType::bf16, {s.experts, width(), s.hidden}, device());
    args.weights.w_down = tensor(w_down_.as<void const>(), DType::bf16,
                                 {s.experts, s.hidden, s.intermediate}, device());
    if (desc.bias) {
      args.weights.b_up =
          tensor(b_up_.as<void const>(), DType::bf16, {s.experts, width()}, device());
      args.weights.b_down =
          tensor(b_down_.as<void const>(), DType::bf16, {s.experts, s.hidden}, device());
    }
    args.o = tensor(o_.as<void>(), DType::bf16, {s.tokens, s.hidden}, device());
    if (desc.save == SavePolicy::h) {
      args.h = tensor(h_.as<void>(), DType::bf16, {desc.num_slots(), width()}, device());
    }
    args.routing = {routing_.as<void>(), routing_bytes(desc).value()};
    args.workspace = {workspace_.as<void>(), bytes_of(context, desc, Pass::forward)};

    backward_args.d_o = tensor(d_o_.as<void const>(), DType::bf16, {s.tokens, s.hidden}, device());
    backward_args.x = args.x;
    backward_args.h = args.h;
    backward_args.routing = {routing_.as<void>(), routing_bytes(desc).value()};
    backward_args.w_router = args.w_router;
    backward_args.weights = args.weights;
    backward_args.workspace = {backward_workspace_.as<void>(),
                               bytes_of(context, desc, Pass::backward)};
    add(backward_args.dx, DType::bf16, {s.tokens, s.hidden});
    add(backward_args.dscores, DType::fp32, {desc.num_slots()});
    add(backward_args.gradients.dw_up, DType::fp32, {s.experts, width(), s.hidden});
    add(backward_args.gradients.dw_down, DType::fp32, {s.experts, s.hidden, s.intermediate});
    if (desc.bias) {
      add(backward_args.gradients.db_up, DType::fp32, {s.experts, width()});
      add(backward_args.gradients.db_down, DType::fp32, {s.experts, s.hidden});
    }
    if (desc.router.kind != RouterKind::given) {
      add(backward_args.dlogits, DType::fp32, {s.tokens, s.experts});
      add(backward_args.gradients.dw_router, DType::fp32, {s.experts, s.hidden});
    }
  }

  Status forward(cudaStream_t stream) const { return moe_forward(context_, desc_, args, {stream}); }
  Status backward(cudaStream_t stream) const {
    return moe_backward(context_, desc_, backward_args, {stream});
  }
  // The same in two calls.
  Status split_backward(cudaStream_t stream) const {
    MoeShape const& s = desc_.shape;
    DeviceBuffer const dh(2 * static_cast<size_t>(desc_.num_slots() * width()));
    DeviceBuffer const a_scaled(2 * static_cast<size_t>(desc_.num_slots() * s.intermediate));
    DeviceBuffer const dlogits(4 * static_cast<size_t>(s.tokens * s.experts));
    DeviceBuffer const input_workspace(bytes_of(context_, desc_, Pass::backward_input));
    DeviceBuffer const weights_workspace(bytes_of(context_, desc_, Pass::backward_weights));
    MoeBackwardArgs input = backward_args;
    input.dh = tensor(dh.as<void>(), DType::bf16, {desc_.num_slots(), width()}, device());
    input.a_scaled =
        tensor(a_scaled.as<void>(), DType::bf16, {desc_.num_slots(), s.intermediate}, device());
    if (desc_.router.kind != RouterKind::given) {
      input.dlogits_saved =
          tensor(dlogits.as<void>(), DType::fp32, {s.tokens, s.experts}, device());
    }
    MoeBackwardArgs weights = input;
    input.gradients = {};
    input.workspace = {input_workspace.as<void>(), input_workspace.size()};
    weights.dx = weights.dscores = weights.dlogits = {};
    weights.aux_dlogits = {};
    weights.workspace = {weights_workspace.as<void>(), weights_workspace.size()};
    Status const status = moe_backward_input(context_, desc_, input, {stream});
    return status.ok() ? moe_backward_weights(context_, desc_, weights, {stream}) : status;
  }
  // Forward, then backward from x, h and the tables: everything else is poisoned between them.
  Status step(cudaStream_t stream) const {
    Status const status = forward(stream);
    if (!status.ok()) return status;
    fill(args.workspace, stream);
    return backward(stream);
  }
  void poison(cudaStream_t stream) const {
    fill(args.workspace, stream);
    fill(backward_args.workspace, stream);
    fill({args.o.data, 2 * static_cast<size_t>(args.o.elements())}, stream);
    for (auto const& gradient : gradients_) {
      fill({gradient->as<void>(), gradient->size()}, stream);
    }
  }
  // Bytes of o, h and the tables.
  Bytes results() const {
    Bytes all = o_.bytes();
    for (Bytes const& more : {h_.bytes(), routing_.bytes()}) {
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }
  Bytes o() const { return o_.bytes(); }
  Bytes routing() const { return routing_.bytes(); }
  // Bytes of all gradients, dx first.
  Bytes gradients() const {
    Bytes all;
    for (auto const& gradient : gradients_) {
      Bytes const more = gradient->bytes();
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }
  Bytes everything() const {
    Bytes all = results();
    Bytes const more = gradients();
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  Device device() const { return context_.device(); }

  MoeForwardArgs args;
  MoeBackwardArgs backward_args;

 private:
  static size_t bytes_of(Context const& context, MoeDesc const& desc, Pass pass) {
    return workspace_bytes(context, desc, pass).value();
  }
  static void fill(Buffer buffer, cudaStream_t stream) {
    require(cudaMemsetAsync(buffer.data, kPoison, buffer.bytes, stream), "poison");
  }
  void add(Tensor& out, DType dtype, std::initializer_list<int64_t> shape) {
    out = tensor(static_cast<void*>(nullptr), dtype, shape, device());
    auto const bytes = static_cast<size_t>(out.elements()) * dtype_bytes(dtype);
    out.data = gradients_.emplace_back(std::make_unique<DeviceBuffer>(bytes))->as<void>();
  }
  int64_t width() const { return desc_.up_width() * desc_.shape.intermediate; }

  Context const& context_;
  MoeDesc desc_;
  DeviceBuffer x_, w_router_, w_up_, w_down_, o_, h_, routing_, workspace_, d_o_, b_up_, b_down_,
      backward_workspace_;
  std::vector<std::unique_ptr<DeviceBuffer>> gradients_;
};

inline void synchronize(cudaStream_t stream) { require(cudaStreamSynchronize(stream), "stream"); }

}  // namespace tessera::cuda_test

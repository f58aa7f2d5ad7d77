// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_layer.hpp"

#include <cstring>

#include "cli/commands.hpp"
#include "verify/storage.hpp"

namespace tessera::cli {
namespace {

bool same_bits(Tensor const& tensor, std::vector<float> const& expected) {
  auto const count = static_cast<std::size_t>(tensor.elements());
  auto const values = verify::unpack(tensor.dtype, tensor.data, count);
  return count == expected.size() &&
         (count == 0 || std::memcmp(values.data(), expected.data(), count * sizeof(float)) == 0);
}

}  // namespace

BenchLayer::BenchLayer(Context const& context, verify::LayerCase const& layer_case)
    : context_(context),
      case_(layer_case),
      data_(verify::make_data(layer_case)),
      memory_(verify::kPoisons[0], verify::Alignment::cache_line),
      inference_desc_(data_.desc) {
  MoeShape const& s = data_.desc.shape;
  MoeDesc const& desc = data_.desc;
  inference_desc_.save = SavePolicy::none;
  ConstTensor const x = memory_.input(desc.dtype, {s.tokens, s.hidden}, data_.x);
  forward_ = verify::forward_inputs(data_, memory_, x);
  forward_.o = memory_.output(desc.dtype, {s.tokens, s.hidden});
  inference_ = forward_;
  auto const saved = verify::saved_tensors(desc, memory_);
  forward_.h = saved.h;
  forward_.x8 = saved.x8;
  forward_.x_scale = saved.x_scale;
  forward_.h_scale = saved.h_scale;
  forward_.routing = memory_.buffer(value_of(routing_bytes(desc)));
  forward_.workspace = memory_.buffer(workspace_bytes_of(Pass::forward));
  inference_.workspace =
      memory_.buffer(value_of(workspace_bytes(context_, inference_desc_, Pass::forward)));

  backward_.d_o = memory_.input(desc.dtype, {s.tokens, s.hidden}, data_.d_o);
  if (!desc.quantises()) backward_.x = x;
  backward_.h = forward_.h;
  backward_.x8 = forward_.x8;
  backward_.x_scale = forward_.x_scale;
  backward_.h_scale = forward_.h_scale;
  backward_.routing = forward_.routing;
  backward_.w_router = forward_.w_router;
  backward_.b_router = forward_.b_router;
  backward_.weights = forward_.weights;
  if (!data_.aux_dlogits.empty()) {
    backward_.aux_dlogits = memory_.input(DType::fp32, {s.tokens, s.experts}, data_.aux_dlogits);
  }
  backward_.gradients.mode = data_.gradient_mode;
  for (auto const& output : verify::gradient_outputs(data_)) {
    Tensor& tensor = verify::gradient_argument(backward_, output.name);
    tensor = memory_.output(output.dtype, output.shape);
    verify::initialise_gradient(data_, output, tensor);
  }
  backward_.workspace = memory_.buffer(workspace_bytes_of(Pass::backward));
}

void BenchLayer::redraw(std::uint64_t seed) {
  if (data_.desc.shape.variable_experts) return;  // another P would need other buffers
  verify::LayerCase drawn = case_;
  drawn.seed = seed;
  verify::redraw_tokens(drawn, data_);
  // These inputs are ours: their views are read-only for the library's sake.
  auto const write = [this](ConstTensor const& tensor, std::vector<float> const& values) {
    if (!values.empty()) verify::pack(tensor.dtype, values, const_cast<void*>(tensor.data));
  };
  write(forward_.x, data_.x);
  write(backward_.d_o, data_.d_o);
  if (forward_.b_router.present()) write(forward_.b_router, data_.b_router);
  if (data_.desc.router.kind != RouterKind::given) return;
  write(forward_.topk_weights, data_.scores);
  void* const ids = const_cast<void*>(forward_.topk_ids.data);
  for (std::size_t j = 0; j < data_.topk_ids.size(); ++j) {
    if (data_.desc.ids_dtype == DType::int64) {
      static_cast<std::int64_t*>(ids)[j] = data_.topk_ids[j];
    } else {
      static_cast<std::int32_t*>(ids)[j] = static_cast<std::int32_t>(data_.topk_ids[j]);
    }
  }
}

void BenchLayer::forward() { check(moe_forward(context_, data_.desc, forward_)); }
void BenchLayer::backward() { check(moe_backward(context_, data_.desc, backward_)); }
void BenchLayer::forward_inference() { check(moe_forward(context_, inference_desc_, inference_)); }

std::int64_t BenchLayer::routed_rows() const {
  auto const view = value_of(routing_view(data_.desc, forward_.routing));
  return view.expert_offsets[data_.desc.shape.experts];
}

std::size_t BenchLayer::workspace_bytes_of(Pass pass) const {
  return value_of(workspace_bytes(context_, data_.desc, pass));
}

std::size_t BenchLayer::saved_bytes_total() const {
  return value_of(saved_bytes(data_.desc)).total();
}

bool BenchLayer::equals(verify::Tensors const& expected) {
  if (!same_bits(forward_.o, expected.at("o"))) return false;
  for (auto const& output : verify::gradient_outputs(data_)) {
    if (!same_bits(verify::gradient_argument(backward_, output.name), expected.at(output.name))) {
      return false;
    }
  }
  return true;
}

}  // namespace tessera::cli

// SPDX-License-Identifier: Apache-2.0
#include "verify/layer_arguments.hpp"

#include <stdexcept>

#include "tessera/low_precision.hpp"

namespace tessera::verify {
namespace {

using Shape = std::vector<std::int64_t>;

struct WeightShapes {
  Shape w_up, w_gate, w_down, b_up, b_gate, b_down;
};

WeightShapes weight_shapes(MoeDesc const& desc) {
  std::int64_t const experts = desc.shape.experts, d = desc.shape.hidden;
  std::int64_t const n = desc.shape.intermediate, up_rows = desc.up_width() * n;
  switch (desc.layout.orientation) {
    case WeightOrientation::transposed:
      return {{experts, d, up_rows}, {}, {experts, n, d}, {experts, up_rows}, {}, {experts, d}};
    case WeightOrientation::separate:
      return {{experts, n, d}, {experts, n, d}, {experts, d, n},
              {experts, n},    {experts, n},    {experts, d}};
    case WeightOrientation::rows:
      break;
  }
  return {{experts, up_rows, d}, {}, {experts, d, n}, {experts, up_rows}, {}, {experts, d}};
}

}  // namespace

ExpertWeights weight_arguments(LayerData const& data, Memory& memory) {
  WeightShapes const shapes = weight_shapes(data.desc);
  auto const add = [&](Shape const& shape, std::vector<float> const& values) {
    return values.empty() ? ConstTensor{} : memory.input(data.desc.dtype, shape, values);
  };
  ExpertWeights weights;
  weights.w_up = add(shapes.w_up, data.w_up);
  weights.w_gate = add(shapes.w_gate, data.w_gate);
  weights.w_down = add(shapes.w_down, data.w_down);
  weights.b_up = add(shapes.b_up, data.b_up);
  weights.b_gate = add(shapes.b_gate, data.b_gate);
  weights.b_down = add(shapes.b_down, data.b_down);
  return weights;
}

MoeForwardArgs forward_inputs(LayerData const& data, Memory& memory, ConstTensor const& x) {
  MoeDesc const& desc = data.desc;
  MoeShape const& s = desc.shape;
  MoeForwardArgs args;
  args.x = x;
  if (!router_chooses(desc)) {
    Shape const slots = s.variable_experts ? Shape{s.slots} : Shape{s.tokens, s.top_k};
    args.topk_ids = memory.input_ids(desc.ids_dtype, slots, data.topk_ids);
    if (!desc.router.replay) args.topk_weights = memory.input(DType::fp32, slots, data.scores);
    if (s.variable_experts) {
      args.token_offsets = memory.input_ids(desc.ids_dtype, {s.tokens + 1}, data.token_offsets);
    }
  }
  if (desc.router.kind != RouterKind::given) {
    args.w_router = memory.input(desc.router_storage(), {s.experts, s.hidden}, data.w_router);
    if (!data.b_router.empty()) {
      args.b_router = memory.input(desc.router_storage(), {s.experts}, data.b_router);
    }
    if (!data.selection_bias.empty()) {
      args.selection_bias = memory.input(DType::fp32, {s.experts}, data.selection_bias);
    }
  }
  if (!data.token_mask.empty()) args.token_mask = memory.input_mask(data.token_mask);
  args.weights = weight_arguments(data, memory);
  return args;
}

SavedTensors saved_tensors(MoeDesc const& desc, Memory& memory) {
  MoeShape const& s = desc.shape;
  std::int64_t const slots = desc.num_slots(), width = desc.up_width() * s.intermediate;
  bool const saves_h = desc.save == SavePolicy::h, mxfp8 = desc.precision == Precision::mxfp8;
  SavedTensors out;
  if (saves_h) {
    out.h = memory.output(desc.quantises() ? DType::fp8_e4m3 : desc.dtype, {slots, width});
  }
  if (!desc.quantises()) return out;
  std::int64_t const block = desc.scale_block();
  DType const scale = mxfp8 ? DType::e8m0 : DType::fp32;
  out.x8 = memory.output(DType::fp8_e4m3, {s.tokens, s.hidden});
  out.x_scale = memory.output(scale, {s.tokens, s.hidden / block});
  if (!saves_h) return out;
  out.h_scale = mxfp8 ? memory.output(scale, {slots, width / block})
                      : memory.output(scale, {width / block, padded_scale_rows(slots)});
  return out;
}

std::vector<GradientOutput> gradient_outputs(LayerData const& data) {
  MoeDesc const& desc = data.desc;
  MoeShape const& s = desc.shape;
  WeightShapes const shapes = weight_shapes(desc);
  DType const dtype = data.gradient_mode == GradientMode::accumulate ? DType::fp32 : desc.dtype;
  std::vector<GradientOutput> outputs = {
      {"dx", desc.dtype, {s.tokens, s.hidden}, false},
      {"dscores", DType::fp32, {desc.num_slots()}, false},
      {"dw_up", dtype, shapes.w_up, true},
      {"dw_down", dtype, shapes.w_down, true},
  };
  if (!data.w_gate.empty()) outputs.push_back({"dw_gate", dtype, shapes.w_gate, true});
  if (desc.bias) {
    outputs.push_back({"db_up", dtype, shapes.b_up, true});
    outputs.push_back({"db_down", dtype, shapes.b_down, true});
    if (!data.b_gate.empty()) outputs.push_back({"db_gate", dtype, shapes.b_gate, true});
  }
  if (desc.router.kind != RouterKind::given) {
    outputs.push_back({"dlogits", DType::fp32, {s.tokens, s.experts}, false});
    DType const of_router = desc.router_storage() == DType::fp32 ? DType::fp32 : dtype;
    outputs.push_back({"dw_router", of_router, {s.experts, s.hidden}, true});
    if (!data.b_router.empty()) outputs.push_back({"db_router", of_router, {s.experts}, true});
  }
  return outputs;
}

Tensor& gradient_argument(MoeBackwardArgs& args, std::string const& name) {
  ExpertGradients& g = args.gradients;
  std::pair<char const*, Tensor*> const members[] = {
      {"dx", &args.dx},
      {"dscores", &args.dscores},
      {"dlogits", &args.dlogits},
      {"dw_up", &g.dw_up},
      {"dw_gate", &g.dw_gate},
      {"dw_down", &g.dw_down},
      {"db_up", &g.db_up},
      {"db_gate", &g.db_gate},
      {"db_down", &g.db_down},
      {"dw_router", &g.dw_router},
      {"db_router", &g.db_router},
  };
  for (auto const& [member_name, member] : members) {
    if (name == member_name) return *member;
  }
  throw std::logic_error("no gradient is called " + name);
}

void initialise_gradient(LayerData const& data, GradientOutput const& output,
                         Tensor const& tensor) {
  if (data.gradient_mode != GradientMode::accumulate || !is_parameter_gradient(output.name)) return;
  auto* const values = static_cast<float*>(tensor.data);
  for (std::int64_t i = 0; i < tensor.elements(); ++i) {
    values[i] = initial_gradient(output.name, i);
  }
}

}  // namespace tessera::verify

// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_cuda_layer.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "cli/commands.hpp"
#include "core/interleaved_columns.hpp"
#include "tessera/low_precision.hpp"
#include "verify/random_source.hpp"
#include "verify/storage.hpp"

namespace tessera::cli {
namespace {

constexpr std::int64_t kSampledTokens = 4;
constexpr std::size_t kMaxScannedBytes = std::size_t{4} << 30;  // in search of poison

/// Uniform values whose products with unit-variance values, summed over `fan_in`, have variance 1.
float scale_for(std::int64_t fan_in) { return std::sqrt(3.0f / static_cast<float>(fan_in)); }

std::size_t bytes_of(ConstTensor const& tensor) {
  return static_cast<std::size_t>(tensor.elements()) * dtype_bytes(tensor.dtype);
}

std::array<Tensor*, 8> gradient_tensors(ExpertGradients& g) {
  return {&g.dw_up,   &g.dw_gate, &g.dw_down,   &g.db_up,
          &g.db_gate, &g.db_down, &g.dw_router, &g.db_router};
}

/// A row of h as [gate half | up half], however it lies on the GPU.
std::vector<float> in_halves(MoeDesc const& desc, std::vector<float> h) {
  if (!core::interleaves_columns(desc)) return h;
  std::vector<float> out(h.size());
  for (std::size_t i = 0; i < h.size(); ++i) out[i % 2 * (h.size() / 2) + i / 2] = h[i];
  return out;
}

/// Elements [first, first + count) of a bf16 or fp32 tensor on the device.
std::vector<float> download(Tensor const& tensor, std::int64_t first, std::int64_t count) {
  std::size_t const element = dtype_bytes(tensor.dtype);
  std::vector<std::byte> bytes(element * static_cast<std::size_t>(count));
  device::download(
      bytes.data(),
      static_cast<std::byte const*>(tensor.data) + element * static_cast<std::size_t>(first),
      bytes.size());
  return verify::unpack(tensor.dtype, bytes.data(), static_cast<std::size_t>(count));
}

std::vector<float> row(Tensor const& tensor, std::int64_t row) {
  return download(tensor, row * tensor.shape[1], tensor.shape[1]);
}

std::vector<std::int32_t> download(std::int32_t const* from, std::int64_t count) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(count));
  device::download(out.data(), from, 4 * out.size());
  return out;
}

/// The first, the last, and some between.
std::int64_t sampled_token(std::int64_t tokens, std::int64_t samples, std::int64_t i) {
  return samples == 1 ? tokens - 1 : i * (tokens - 1) / (samples - 1);
}

/// True if an element of a bf16 or fp32 tensor still holds the poison.
bool has_poison(Tensor const& tensor) {
  std::size_t const bytes = bytes_of(tensor);
  std::vector<std::uint16_t> halves(bytes / 2);
  device::download(halves.data(), tensor.data, bytes);
  std::size_t const step = dtype_bytes(tensor.dtype) / 2;  // the upper half of an fp32 is its bf16
  for (std::size_t i = step - 1; i < halves.size(); i += step) {
    if (halves[i] == 0xffff) return true;
  }
  return false;
}

}  // namespace

std::byte* CudaBenchLayer::allocate(std::size_t bytes) {
  memory_.push_back(device::allocate(context_.device().index, bytes, device::Kind::device));
  return memory_.back().get();
}

verify::UniformTensor CudaBenchLayer::fill(ConstTensor& tensor,
                                           std::initializer_list<std::int64_t> shape,
                                           std::uint64_t seed, float scale) {
  Tensor view = tessera::tensor(static_cast<void*>(nullptr), DType::bf16, shape, context_.device());
  view.data = allocate(bytes_of(view));
  stream_.fill_uniform(view.data, view.elements(), seed, scale);
  tensor = view;
  return {seed, scale};
}

verify::UniformTensor CudaBenchLayer::fill_router(ConstTensor& tensor,
                                                  std::initializer_list<std::int64_t> shape,
                                                  std::uint64_t seed, float scale) {
  verify::UniformTensor const values = fill(tensor, shape, seed, scale);
  if (layer_.desc.router_storage() != DType::fp32) return values;
  std::vector<float> wide(static_cast<std::size_t>(tensor.elements()));
  for (std::size_t i = 0; i < wide.size(); ++i) {
    wide[i] = static_cast<float>(values.at(static_cast<std::int64_t>(i)));
  }
  Tensor view = tessera::tensor(static_cast<void*>(nullptr), DType::fp32, shape, context_.device());
  view.data = allocate(bytes_of(view));
  device::upload(view.data, wide.data(), bytes_of(view));
  tensor = view;
  return values;
}

CudaBenchLayer::CudaBenchLayer(Context const& context, device::Stream const& stream,
                               verify::LayerCase const& layer_case, bool backward)
    : context_(context), stream_(stream), has_backward_(backward) {
  MoeDesc& desc = layer_.desc;
  desc = layer_case.desc;
  inference_desc_ = desc;
  inference_desc_.save = SavePolicy::none;
  MoeShape const& s = desc.shape;
  std::int64_t const e = s.experts, d = s.hidden, n = s.intermediate, width = desc.up_width() * n;
  std::uint64_t const seed = 16 * layer_case.seed;
  bool const turned = desc.layout.orientation == WeightOrientation::transposed;
  bool const apart = desc.layout.orientation == WeightOrientation::separate;
  constexpr float kUnit = 1.7320508f;  // sqrt(3): variance 1

  ExpertWeights& w = forward_.weights;
  layer_.x = fill(forward_.x, {s.tokens, d}, seed, kUnit);
  float const up = scale_for(d), down = scale_for(n);
  if (apart) {
    layer_.w_gate = fill(w.w_gate, {e, n, d}, seed + 1, up);
    layer_.w_up = fill(w.w_up, {e, n, d}, seed + 2, up);
  } else if (turned) {
    layer_.w_up = fill(w.w_up, {e, d, width}, seed + 2, up);
  } else {
    layer_.w_up = fill(w.w_up, {e, width, d}, seed + 2, up);
  }
  layer_.w_down = turned ? fill(w.w_down, {e, n, d}, seed + 3, down)
                         : fill(w.w_down, {e, d, n}, seed + 3, down);
  if (desc.bias) {
    layer_.b_up = fill(w.b_up, {e, apart ? n : width}, seed + 4, 1);
    if (apart) layer_.b_gate = fill(w.b_gate, {e, n}, seed + 5, 1);
    layer_.b_down = fill(w.b_down, {e, d}, seed + 6, 1);
  }
  if (desc.router.kind != RouterKind::given) {
    layer_.w_router = fill_router(forward_.w_router, {e, d}, seed + 7, scale_for(d));
    if (layer_case.router_bias) {
      layer_.b_router = fill_router(forward_.b_router, {e}, seed + 9, kUnit);
    }
  } else {
    give_routing(layer_case);
  }
  forward_.o = tensor(allocate(2 * static_cast<std::size_t>(s.tokens * d)), DType::bf16,
                      {s.tokens, d}, context.device());
  inference_ = forward_;
  std::int64_t const slots = desc.num_slots();
  auto const output = [this](DType dtype, std::initializer_list<std::int64_t> shape) {
    Tensor out = tensor(static_cast<void*>(nullptr), dtype, shape, context_.device());
    out.data = allocate(bytes_of(out));
    return out;
  };
  forward_.h = output(desc.quantises() ? DType::fp8_e4m3 : DType::bf16, {slots, width});
  if (desc.quantises()) {
    std::int64_t const block = desc.scale_block();
    bool const is_mxfp8 = desc.precision == Precision::mxfp8;
    DType const scale = is_mxfp8 ? DType::e8m0 : DType::fp32;
    forward_.x8 = output(DType::fp8_e4m3, {s.tokens, d});
    forward_.x_scale = output(scale, {s.tokens, d / block});
    forward_.h_scale = is_mxfp8 ? output(scale, {slots, width / block})
                                : output(scale, {width / block, padded_scale_rows(slots)});
  }
  std::size_t const tables = value_of(routing_bytes(desc));
  forward_.routing = {allocate(tables), tables};
  std::size_t const workspace =
      std::max(forward_workspace_bytes(false), forward_workspace_bytes(true));
  forward_.workspace = inference_.workspace = {allocate(workspace), workspace};
  if (backward) {
    layer_.d_o = fill(backward_.d_o, {s.tokens, d}, seed + 8, kUnit);
    if (layer_case.aux_dlogits) add_aux_dlogits({seed + 10, 0.1f * kUnit});
    add_backward();
  }
  stream_.synchronize();
}

void CudaBenchLayer::add_aux_dlogits(verify::UniformTensor const& formula) {
  MoeShape const& s = layer_.desc.shape;
  layer_.aux_dlogits = formula;
  std::vector<float> values(static_cast<std::size_t>(s.tokens * s.experts));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(formula.at(static_cast<std::int64_t>(i)));
  }
  std::byte* const memory = allocate(sizeof(float) * values.size());
  device::upload(memory, values.data(), sizeof(float) * values.size());
  backward_.aux_dlogits =
      tensor(reinterpret_cast<float*>(memory), {s.tokens, s.experts}, context_.device());
}

/// bf16 and fp32 gradients share their memory, which holds the fp32 ones.
void CudaBenchLayer::add_backward() {
  MoeShape const& s = layer_.desc.shape;
  auto const output = [this](ConstTensor const& like, DType dtype) {
    Tensor out;
    out.dtype = dtype;
    out.device = context_.device();
    out.rank = like.rank;
    std::copy_n(like.shape, kMaxRank, out.shape);
    std::copy_n(like.stride, kMaxRank, out.stride);
    out.data = like.present() ? allocate(bytes_of(out)) : nullptr;
    return out;
  };
  MoeBackwardArgs& args = backward_;
  if (!layer_.desc.quantises()) args.x = forward_.x;
  args.h = forward_.h;
  args.x8 = forward_.x8;
  args.x_scale = forward_.x_scale;
  args.h_scale = forward_.h_scale;
  args.routing = {forward_.routing.data, forward_.routing.bytes};
  args.w_router = forward_.w_router;
  args.b_router = forward_.b_router;
  args.weights = forward_.weights;
  args.dx = output(forward_.x, DType::bf16);
  args.dscores = tensor(
      reinterpret_cast<float*>(allocate(4 * static_cast<std::size_t>(layer_.desc.num_slots()))),
      {layer_.desc.num_slots()}, context_.device());
  if (layer_.desc.router.kind != RouterKind::given) {
    std::int64_t const pairs = s.tokens * s.experts;
    args.dlogits = tensor(reinterpret_cast<float*>(allocate(4 * static_cast<std::size_t>(pairs))),
                          {s.tokens, s.experts}, context_.device());
  }
  std::size_t const workspace = backward_workspace_bytes();
  args.workspace = {allocate(workspace), workspace};
  ExpertWeights const& w = args.weights;
  ExpertGradients& g = args.gradients;
  g = {.dw_up = output(w.w_up, DType::fp32),
       .dw_gate = output(w.w_gate, DType::fp32),
       .dw_down = output(w.w_down, DType::fp32),
       .db_up = output(w.b_up, DType::fp32),
       .db_gate = output(w.b_gate, DType::fp32),
       .db_down = output(w.b_down, DType::fp32),
       .dw_router = output(args.w_router, DType::fp32),
       .db_router = output(args.b_router, DType::fp32)};
  main_grad_ = args;
  main_grad_.gradients.mode = GradientMode::accumulate;
  bool const fp32_router = layer_.desc.router_storage() == DType::fp32;
  for (Tensor* const tensor : gradient_tensors(g)) {
    bool const of_router = tensor == &g.dw_router || tensor == &g.db_router;
    if (tensor->present() && !(of_router && fp32_router)) tensor->dtype = DType::bf16;
  }
}

void CudaBenchLayer::give_routing(verify::LayerCase const& layer_case) {
  MoeShape const& s = layer_.desc.shape;
  auto const ids = verify::make_slots(layer_case).topk_ids;
  verify::RandomSource random(layer_case.seed, 1);
  std::vector<float> scores(ids.size());
  for (float& score : scores) score = static_cast<float>(0.05 + 0.95 * random.uniform());
  if (layer_case.routing.pattern == verify::RoutingPattern::file) {
    scores = layer_case.routing.topk_weights;
  }
  layer_.desc.ids_dtype = inference_desc_.ids_dtype = DType::int64;
  Tensor const device_ids = tensor(reinterpret_cast<std::int64_t*>(allocate(8 * ids.size())),
                                   {s.tokens, s.top_k}, context_.device());
  Tensor const device_scores = tensor(reinterpret_cast<float*>(allocate(4 * ids.size())),
                                      {s.tokens, s.top_k}, context_.device());
  device::upload(device_ids.data, ids.data(), 8 * ids.size());
  device::upload(device_scores.data, scores.data(), 4 * ids.size());
  forward_.topk_ids = device_ids;
  forward_.topk_weights = device_scores;
}

void CudaBenchLayer::forward() const {
  tessera::cli::check(moe_forward(context_, layer_.desc, forward_, stream_.handle()));
}

void CudaBenchLayer::forward_inference() const {
  tessera::cli::check(moe_forward(context_, inference_desc_, inference_, stream_.handle()));
}

void CudaBenchLayer::backward() const {
  tessera::cli::check(moe_backward(context_, layer_.desc, backward_, stream_.handle()));
}

void CudaBenchLayer::backward_main_grad() const {
  tessera::cli::check(moe_backward(context_, layer_.desc, main_grad_, stream_.handle()));
}

std::int64_t CudaBenchLayer::routed_rows() const {
  RoutingView const tables = value_of(routing_view(layer_.desc, forward_.routing));
  std::int32_t rows = 0;
  device::download(&rows, tables.expert_offsets + layer_.desc.shape.experts, sizeof(rows));
  return rows;
}

std::size_t CudaBenchLayer::saved_bytes_total() const {
  MoeForwardArgs const& f = forward_;
  std::size_t const x =
      layer_.desc.quantises() ? bytes_of(f.x8) + bytes_of(f.x_scale) : bytes_of(f.x);
  return x + bytes_of(f.h) + bytes_of(f.h_scale) + f.routing.bytes;
}

std::size_t CudaBenchLayer::forward_workspace_bytes(bool inference) const {
  return value_of(
      workspace_bytes(context_, inference ? inference_desc_ : layer_.desc, Pass::forward));
}

std::size_t CudaBenchLayer::backward_workspace_bytes() const {
  return value_of(workspace_bytes(context_, layer_.desc, Pass::backward));
}

CudaBenchLayer::Slots CudaBenchLayer::slots_of(std::int64_t token) const {
  std::int64_t const top_k = layer_.desc.shape.top_k;
  RoutingView const tables = value_of(routing_view(layer_.desc, forward_.routing));
  if (tables.token_offsets == nullptr) return {token * top_k, top_k};
  auto const offsets = download(tables.token_offsets + token, 2);
  return {offsets[0], offsets[1] - offsets[0]};
}

verify::TokenResult CudaBenchLayer::token_result(std::int64_t token, bool inference) const {
  std::int64_t const top_k = layer_.desc.shape.top_k;
  auto const [first, count] = slots_of(token);
  RoutingView const tables = value_of(routing_view(layer_.desc, forward_.routing));
  auto const integers = [](std::int32_t const* from, std::int64_t size) {
    std::vector<std::int32_t> const values = download(from, size);
    return std::vector<std::int64_t>(values.begin(), values.end());
  };
  verify::TokenResult result;
  result.token = token;
  result.scores.resize(static_cast<std::size_t>(count));
  device::download(result.scores.data(), tables.scores + first, 4 * result.scores.size());
  if (tables.topk_ids != nullptr) {
    result.ids = integers(tables.topk_ids + first, count);
  } else {
    result.ids.resize(static_cast<std::size_t>(count));
    auto const* const given = static_cast<std::int64_t const*>(forward_.topk_ids.data);
    device::download(result.ids.data(), given + first, 8 * result.ids.size());
  }
  if (tables.unrounded_ids != nullptr) {
    result.unrounded_ids = integers(tables.unrounded_ids + token * top_k, top_k);
  }
  result.o = row(inference ? inference_.o : forward_.o, token);
  if (inference) return result;
  for (std::int32_t const at : download(tables.inverse_permutation + first, count)) {
    result.h.push_back(at < 0 ? std::vector<float>() : in_halves(layer_.desc, row(forward_.h, at)));
  }
  return result;
}

verify::TokenGradients CudaBenchLayer::token_gradients(MoeBackwardArgs const& args,
                                                       std::int64_t token) const {
  auto const [first, count] = slots_of(token);
  verify::TokenGradients out{row(args.dx, token), download(args.dscores, first, count), {}};
  if (args.dlogits.present()) out.dlogits = row(args.dlogits, token);
  return out;
}

verify::UnitGradients CudaBenchLayer::unit_gradients(MoeBackwardArgs const& args,
                                                     std::int64_t expert, std::int64_t i) const {
  MoeShape const& s = layer_.desc.shape;
  std::int64_t const n = s.intermediate, d = s.hidden, slots = layer_.desc.num_slots();
  bool const gated = layer_.desc.activation.gated();
  RoutingView const tables = value_of(routing_view(layer_.desc, forward_.routing));
  auto const ends = download(tables.expert_offsets + expert, 2);
  auto const tokens = download(tables.gather_index + ends[0], ends[1] - ends[0]);
  auto const slot_of = download(tables.sort_permutation + ends[0], ends[1] - ends[0]);
  auto const scores = download(tensor(tables.scores, {slots}), 0, slots);
  verify::UnitGradients out;
  out.expert = expert;
  out.i = i;
  for (std::size_t r = 0; r < tokens.size(); ++r) {
    out.tokens.push_back(tokens[r]);
    out.scores.push_back(scores[static_cast<std::size_t>(slot_of[r])]);
    std::vector<float> const h =
        in_halves(layer_.desc, row(forward_.h, ends[0] + static_cast<std::int64_t>(r)));
    if (gated) out.h_gate.push_back(h[static_cast<std::size_t>(i)]);
    out.h_up.push_back(h[static_cast<std::size_t>(gated ? n + i : i)]);
  }
  using reference::Part;
  ExpertGradients const& g = args.gradients;
  auto const matrix = [expert](Tensor const& dw) {
    std::int64_t const size = dw.shape[1] * dw.shape[2];
    return download(dw, expert * size, size);
  };
  std::vector<float> const up = matrix(g.dw_up), down = matrix(g.dw_down),
                           gate = g.dw_gate.present() ? matrix(g.dw_gate) : up;
  auto const at = [](std::vector<float> const& values, std::int64_t place) {
    return values[static_cast<std::size_t>(place)];
  };
  for (std::int64_t c = 0; c < d; ++c) {
    if (gated) out.dw_gate.push_back(at(gate, layer_.up_place(Part::gate, i, c)));
    out.dw_up.push_back(at(up, layer_.up_place(Part::up, i, c)));
    out.dw_down.push_back(at(down, layer_.down_place(c, i)));
  }
  return out;
}

verify::RouterRow CudaBenchLayer::router_row(MoeBackwardArgs const& args,
                                             std::int64_t expert) const {
  MoeShape const& s = layer_.desc.shape;
  auto const dlogits = download(args.dlogits, 0, s.tokens * s.experts);
  verify::RouterRow out;
  out.expert = expert;
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    out.dlogits.push_back(dlogits[static_cast<std::size_t>(t * s.experts + expert)]);
  }
  out.dw_router = row(args.gradients.dw_router, expert);
  Tensor const& bias = args.gradients.db_router;
  if (bias.present()) out.db_router = download(bias, expert, 1).front();
  return out;
}

std::string CudaBenchLayer::check_forward(Context const& host, bool inference) const {
  std::int64_t const tokens = layer_.desc.shape.tokens;
  stream_.fill(forward_.o.data, kPoison, bytes_of(forward_.o));
  stream_.fill(forward_.workspace.data, kPoison, forward_.workspace.bytes);
  inference ? forward_inference() : forward();
  stream_.synchronize();
  tessera::cli::check(check_device_values(context_));
  std::int64_t const samples = std::min(tokens, inference ? 1 : kSampledTokens);
  for (std::int64_t i = 0; i < samples; ++i) {
    std::string const failure = verify::token_failure(
        host, layer_, token_result(sampled_token(tokens, samples, i), inference));
    if (!failure.empty()) return (inference ? "inference, " : "") + failure;
  }
  return has_poison(forward_.o) ? "o has elements that nobody wrote" : "";
}

/// The results of forward() must be there.
std::string CudaBenchLayer::check_backward(Context const& host, MoeBackwardArgs const& args) const {
  MoeShape const& s = layer_.desc.shape;
  bool const accumulates = args.gradients.mode == GradientMode::accumulate;
  ExpertGradients gradients = args.gradients;
  for (Tensor const* const tensor : gradient_tensors(gradients)) {
    if (tensor->present()) stream_.fill(tensor->data, accumulates ? 0 : kPoison, bytes_of(*tensor));
  }
  stream_.fill(args.dx.data, kPoison, bytes_of(args.dx));
  stream_.fill(args.dscores.data, kPoison, bytes_of(args.dscores));
  stream_.fill(args.workspace.data, kPoison, args.workspace.bytes);
  accumulates ? backward_main_grad() : backward();
  stream_.synchronize();
  tessera::cli::check(check_device_values(context_));
  std::int64_t const samples = std::min(s.tokens, kSampledTokens);
  std::int64_t expert = 0;
  for (std::int64_t i = 0; i < samples; ++i) {
    verify::TokenResult const token = token_result(sampled_token(s.tokens, samples, i), false);
    std::string const failure =
        verify::token_gradient_failure(host, layer_, token, token_gradients(args, token.token));
    if (!failure.empty()) return failure;
    if (!token.ids.empty() && token.ids[0] >= 0 && token.ids[0] < s.experts) expert = token.ids[0];
  }
  std::string failure =
      verify::unit_gradient_failure(host, layer_, unit_gradients(args, expert, s.intermediate - 1));
  if (failure.empty() && args.gradients.dw_router.present()) {
    failure = verify::router_row_failure(host, layer_, router_row(args, expert));
  }
  if (!failure.empty()) return failure;
  for (auto const& [name, tensor] : {std::pair{"dx", &args.dx},
                                     {"dscores", &args.dscores},
                                     {"dw_up", &args.gradients.dw_up},
                                     {"dw_down", &args.gradients.dw_down}}) {
    if (bytes_of(*tensor) <= kMaxScannedBytes && has_poison(*tensor)) {
      return std::string(name) + " has elements that nobody wrote";
    }
  }
  return {};
}

std::string CudaBenchLayer::check() const {
  if (layer_.desc.quantises()) return check_quantised();
  Context const host = value_of(Context::create());
  std::string failure = check_forward(host, false);
  if (failure.empty() && has_backward_) failure = check_backward(host, backward_);
  if (failure.empty() && has_backward_) {
    failure = check_backward(host, main_grad_);
    if (!failure.empty()) failure = "main-grad, " + failure;
  }
  return failure.empty() ? check_forward(host, true) : failure;
}

}  // namespace tessera::cli

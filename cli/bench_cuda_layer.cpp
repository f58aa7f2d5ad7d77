// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_cuda_layer.hpp"

#include <algorithm>
#include <cmath>

#include "cli/commands.hpp"
#include "verify/random_source.hpp"
#include "verify/storage.hpp"

namespace tessera::cli {
namespace {

constexpr int kPoison = 0xff;  // bf16: NaN
constexpr std::int64_t kSampledTokens = 4;

/// Uniform values whose products with unit-variance values, summed over `fan_in`, have variance 1.
float scale_for(std::int64_t fan_in) { return std::sqrt(3.0f / static_cast<float>(fan_in)); }

std::size_t bytes_of(ConstTensor const& tensor) {
  return static_cast<std::size_t>(tensor.elements()) * dtype_bytes(tensor.dtype);
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

CudaBenchLayer::CudaBenchLayer(Context const& context, device::Stream const& stream,
                               verify::LayerCase const& layer_case)
    : context_(context), stream_(stream) {
  MoeDesc& desc = layer_.desc;
  desc = layer_case.desc;
  desc.save = SavePolicy::h;
  if (desc.shape.variable_experts) {
    throw CommandError("--variable-experts: the bench on a GPU has K experts for every token");
  }
  inference_desc_ = desc;
  inference_desc_.save = SavePolicy::none;
  MoeShape const& s = desc.shape;
  std::int64_t const e = s.experts, d = s.hidden, n = s.intermediate, width = desc.up_width() * n;
  std::uint64_t const seed = 8 * layer_case.seed;
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
    if (layer_case.routing.pattern != verify::RoutingPattern::random) {
      throw CommandError("--routing: a router meets random tokens here; use --router given");
    }
    layer_.w_router = fill(forward_.w_router, {e, d}, seed + 7, scale_for(d));
  } else {
    give_routing(layer_case);
  }
  forward_.o = tensor(allocate(2 * static_cast<std::size_t>(s.tokens * d)), DType::bf16,
                      {s.tokens, d}, context.device());
  inference_ = forward_;
  std::int64_t const slots = desc.num_slots();
  forward_.h = tensor(allocate(2 * static_cast<std::size_t>(slots * width)), DType::bf16,
                      {slots, width}, context.device());
  std::size_t const tables = value_of(routing_bytes(desc));
  forward_.routing = {allocate(tables), tables};
  std::size_t const workspace = std::max(workspace_bytes_of(false), workspace_bytes_of(true));
  forward_.workspace = inference_.workspace = {allocate(workspace), workspace};
  stream_.synchronize();
}

void CudaBenchLayer::give_routing(verify::LayerCase const& layer_case) {
  MoeShape const& s = layer_.desc.shape;
  auto const ids = verify::make_slots(layer_case).topk_ids;
  verify::RandomSource random(layer_case.seed, 1);
  std::vector<float> scores(ids.size());
  for (float& score : scores) score = static_cast<float>(0.05 + 0.95 * random.uniform());
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

std::int64_t CudaBenchLayer::routed_rows() const {
  RoutingView const tables = value_of(routing_view(layer_.desc, forward_.routing));
  std::int32_t rows = 0;
  device::download(&rows, tables.expert_offsets + layer_.desc.shape.experts, sizeof(rows));
  return rows;
}

std::size_t CudaBenchLayer::saved_bytes_total() const {
  return bytes_of(forward_.x) + bytes_of(forward_.h) + forward_.routing.bytes;
}

std::size_t CudaBenchLayer::workspace_bytes_of(bool inference) const {
  return value_of(
      workspace_bytes(context_, inference ? inference_desc_ : layer_.desc, Pass::forward));
}

std::vector<float> CudaBenchLayer::row(Tensor const& tensor, std::int64_t row) const {
  auto const columns = static_cast<std::size_t>(tensor.shape[1]);
  std::vector<std::byte> bytes(2 * columns);
  device::download(
      bytes.data(),
      static_cast<std::byte*>(tensor.data) + static_cast<std::size_t>(row) * bytes.size(),
      bytes.size());
  return verify::unpack(DType::bf16, bytes.data(), columns);
}

verify::TokenResult CudaBenchLayer::token_result(std::int64_t token, bool inference) const {
  auto const top_k = static_cast<std::size_t>(layer_.desc.shape.top_k);
  RoutingView const tables = value_of(routing_view(layer_.desc, forward_.routing));
  std::size_t const first = static_cast<std::size_t>(token) * top_k;
  verify::TokenResult result;
  result.token = token;
  result.scores.resize(top_k);
  device::download(result.scores.data(), tables.scores + first, 4 * top_k);
  result.ids.resize(top_k);
  if (tables.topk_ids != nullptr) {
    std::vector<std::int32_t> ids(top_k);
    device::download(ids.data(), tables.topk_ids + first, 4 * top_k);
    result.ids.assign(ids.begin(), ids.end());
  } else {
    auto const* const given = static_cast<std::int64_t const*>(forward_.topk_ids.data);
    device::download(result.ids.data(), given + first, 8 * top_k);
  }
  result.o = row(inference ? inference_.o : forward_.o, token);
  if (inference) return result;
  std::vector<std::int32_t> rows(top_k);
  device::download(rows.data(), tables.inverse_permutation + first, 4 * top_k);
  for (std::int32_t const at : rows) {
    result.h.push_back(at < 0 ? std::vector<float>() : row(forward_.h, at));
  }
  return result;
}

std::string CudaBenchLayer::check() const {
  Context const host = value_of(Context::create());
  std::int64_t const tokens = layer_.desc.shape.tokens;
  for (bool const inference : {false, true}) {
    stream_.fill(forward_.o.data, kPoison, bytes_of(forward_.o));
    stream_.fill(forward_.workspace.data, kPoison, forward_.workspace.bytes);
    inference ? forward_inference() : forward();
    stream_.synchronize();
    tessera::cli::check(check_device_values(context_));
    // The first, the last, and some between.
    std::int64_t const samples = std::min(tokens, inference ? 1 : kSampledTokens);
    for (std::int64_t i = 0; i < samples; ++i) {
      std::int64_t const token = samples == 1 ? tokens - 1 : i * (tokens - 1) / (samples - 1);
      std::string const failure =
          verify::token_failure(host, layer_, token_result(token, inference));
      if (!failure.empty()) return (inference ? "inference, " : "") + failure;
    }
    // Every element is written: none is the poison.
    std::size_t const bytes = bytes_of(forward_.o);
    std::vector<std::uint16_t> o(bytes / 2);
    device::download(o.data(), forward_.o.data, bytes);
    if (std::find(o.begin(), o.end(), 0xffff) != o.end()) return "o has elements that nobody wrote";
  }
  return {};
}

}  // namespace tessera::cli

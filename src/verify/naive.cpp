// SPDX-License-Identifier: Apache-2.0
// h = x W^T + b;  a = phi(g)*u;  y = a D^T + b_down;  o = sum s*y;  dY = s*dO;  ds = <dO, y>;  dA = dY D;
// dh = J^T dA;  dx = sum dh W;  dD = dY^T a;  dW = dh^T x: each array rounded to the storage type.
#include <algorithm>
#include <cmath>
#include <exception>
#include <numeric>
#include <span>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "verify/naive_activation.hpp"
#include "verify/naive_router.hpp"
#include "verify/random_source.hpp"
#include "verify/tensors.hpp"

namespace tessera::verify {
namespace {

using Floats = std::vector<float>;

/// out += factor * a, one term for each element. The loop is most of the time of a layer that is verified under the
/// address sanitizer, which is asked once for each of both ranges.
#if defined(__SANITIZE_ADDRESS__)
__attribute__((no_sanitize("address", "undefined"), optimize("O3"), noinline))
#endif
void add_to(float factor, float const* a, std::int64_t count, float* out) {
  for (std::int64_t i = 0; i < count; ++i) out[i] += factor * a[i];
}

void add_term(float factor, float const* a, std::int64_t count, float* out) {
#if defined(__SANITIZE_ADDRESS__)
  auto const bytes = static_cast<std::size_t>(count) * sizeof(float);
  for (void const* const range : {static_cast<void const*>(a), static_cast<void const*>(out)}) {
    if (auto* const bad = __asan_region_is_poisoned(const_cast<void*>(range), bytes)) {
      *static_cast<char volatile*>(bad);  // for its report
    }
  }
#endif
  add_to(factor, a, count, out);
}

using Order = std::vector<std::int64_t>;

/// Says what sums run over.
enum class Sum : std::uint64_t { d, n, rows, slots, tokens };

/// 0 .. offsets.back()-1; sample 0 leaves it so, others shuffle between each two offsets.
Order make_order(std::vector<std::int64_t> const& offsets, std::uint64_t sample, Sum sum) {
  Order order(offsets.back());
  std::iota(order.begin(), order.end(), 0);
  if (sample == 0) return order;
  RandomSource random(sample, static_cast<std::uint64_t>(sum));
  for (std::size_t part = 1; part < offsets.size(); ++part) {
    std::int64_t const first = offsets[part - 1];
    for (std::int64_t i = offsets[part] - 1; i > first; --i) {
      std::swap(order[i], order[first + random.below(i - first + 1)]);
    }
  }
  return order;
}

struct NaiveLayer {
  LayerData const& data;
  reference::Metadata const& metadata;
  NaiveRounding rounded;
  Order over_d, over_n, over_rows, over_slots, over_tokens;
  Floats gate{}, up{};      ///< [E,n,d]
  Floats gate_t{}, up_t{};  ///< [E,d,n]
  Floats down{}, down_t{};  ///< [E,d,n], [E,n,d]
  Floats b_gate{}, b_up{}, b_down{};
  Floats scores{};  ///< [P]
  Floats h_gate{}, h_up{}, a{}, y{}, dh_gate{}, dh_up{}, dy{};

  [[nodiscard]] MoeDesc const& desc() const { return data.desc; }
  [[nodiscard]] std::int64_t d() const { return data.desc.shape.hidden; }
  [[nodiscard]] std::int64_t n() const { return data.desc.shape.intermediate; }
  [[nodiscard]] bool gated() const { return data.desc.activation.gated(); }
  void round(std::span<float> values) {
    for (float& value : values) value = rounded(value);
  }
};

Floats narrowed(std::vector<double> const& values) { return {values.begin(), values.end()}; }

/// [E,rows,columns] -> [E,columns,rows].
Floats transposed(Floats const& values, std::int64_t rows, std::int64_t columns) {
  Floats out(values.size());
  for (std::size_t base = 0; base < values.size(); base += rows * columns) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t c = 0; c < columns; ++c) {
        out[base + c * rows + i] = values[base + i * columns + c];
      }
    }
  }
  return out;
}

/// body(expert, row) for every routed row.
template <class Body>
void for_each_row(NaiveLayer const& layer, Body&& body) {
  auto const& offsets = layer.metadata.expert_offsets;
  for (std::int64_t e = 0; e < layer.desc().shape.experts; ++e) {
    for (std::int64_t i = offsets[e]; i < offsets[e + 1]; ++i) body(e, layer.over_rows[i]);
  }
}

/// body(token, row, slot) for the routed slots of every token.
template <class Body>
void for_each_slot(NaiveLayer const& layer, Body&& body) {
  auto const& meta = layer.metadata;
  for (std::int64_t t = 0; t < layer.desc().shape.tokens; ++t) {
    for (std::int64_t i = meta.token_offsets[t]; i < meta.token_offsets[t + 1]; ++i) {
      std::int64_t const slot = layer.over_slots[i], row = meta.inverse_permutation[slot];
      if (row >= 0) body(t, row, slot);
    }
  }
}

void load_weights(NaiveLayer& layer) {
  auto const inputs = reference_inputs(layer.data);
  auto const weights = reference::logical_weights(layer.desc(), inputs.weights);
  layer.gate = narrowed(weights.gate);
  layer.up = narrowed(weights.up);
  layer.down = narrowed(weights.down);
  layer.b_gate = narrowed(weights.b_gate);
  layer.b_up = narrowed(weights.b_up);
  layer.b_down = narrowed(weights.b_down);
  layer.gate_t = transposed(layer.gate, layer.n(), layer.d());
  layer.up_t = transposed(layer.up, layer.n(), layer.d());
  layer.down_t = transposed(layer.down, layer.d(), layer.n());
}

/// h (one matrix) of all rows, not rounded yet.
Floats up_projection(NaiveLayer const& layer, Floats const& matrix_t, Floats const& bias) {
  std::int64_t const d = layer.d(), n = layer.n();
  Floats h(layer.metadata.rows() * n);
  for_each_row(layer, [&](std::int64_t e, std::int64_t r) {
    float const* const x = &layer.data.x[layer.metadata.gather_index[r] * d];
    for (std::int64_t const c : layer.over_d) {
      add_term(x[c], &matrix_t[(e * d + c) * n], n, &h[r * n]);
    }
    if (!bias.empty()) add_term(1, &bias[e * n], n, &h[r * n]);
  });
  return h;
}

void forward(NaiveLayer& layer, Tensors& out) {
  std::int64_t const d = layer.d(), n = layer.n();
  auto const& meta = layer.metadata;
  if (layer.gated()) layer.h_gate = up_projection(layer, layer.gate_t, layer.b_gate);
  layer.h_up = up_projection(layer, layer.up_t, layer.b_up);
  layer.round(layer.h_gate);
  layer.round(layer.h_up);
  layer.a.resize(layer.h_up.size());
  for (std::size_t i = 0; i < layer.a.size(); ++i) {
    layer.a[i] = naive_activate(layer.desc().activation, layer.rounded,
                                layer.gated() ? layer.h_gate[i] : 0, layer.h_up[i]);
  }
  layer.y.assign(meta.rows() * d, 0);
  for_each_row(layer, [&](std::int64_t e, std::int64_t r) {
    for (std::int64_t const i : layer.over_n) {
      add_term(layer.a[r * n + i], &layer.down_t[(e * n + i) * d], d, &layer.y[r * d]);
    }
    if (layer.desc().bias) add_term(1, &layer.b_down[e * d], d, &layer.y[r * d]);
  });
  layer.round(layer.y);

  Floats& o = out["o"];
  o.assign(layer.data.x.size(), 0);
  for_each_slot(layer, [&](std::int64_t t, std::int64_t row, std::int64_t slot) {
    for (std::int64_t c = 0; c < d; ++c) {
      float const scaled = layer.rounded(layer.scores[slot] * layer.y[row * d + c]);
      o[t * d + c] = layer.rounded(o[t * d + c] + scaled);
    }
  });
}

/// dY, ds, dA and dh.
void down_backward(NaiveLayer& layer, Tensors& out) {
  std::int64_t const d = layer.d(), n = layer.n();
  MoeDesc const& desc = layer.desc();
  out["dscores"].assign(desc.num_slots(), 0);
  layer.dy.resize(layer.y.size());
  layer.dh_gate.resize(layer.h_gate.size());
  layer.dh_up.resize(layer.h_up.size());
  Floats da(n);
  for_each_row(layer, [&](std::int64_t e, std::int64_t r) {
    std::int64_t const slot = layer.metadata.sort_permutation[r];
    float const* const d_o = &layer.data.d_o[layer.metadata.gather_index[r] * d];
    float dscore = 0;
    da.assign(n, 0);
    for (std::int64_t const c : layer.over_d) {
      dscore += d_o[c] * layer.y[r * d + c];
      layer.dy[r * d + c] = layer.rounded(layer.scores[slot] * d_o[c]);
      add_term(layer.dy[r * d + c], &layer.down[(e * d + c) * n], n, da.data());
    }
    out["dscores"][slot] = dscore;
    layer.round(da);
    for (std::int64_t i = 0; i < n; ++i) {
      std::int64_t const at = r * n + i;
      auto const dh = naive_gradient(desc.activation, layer.rounded,
                                     layer.gated() ? layer.h_gate[at] : 0, layer.h_up[at], da[i]);
      if (layer.gated()) layer.dh_gate[at] = dh.gate;
      layer.dh_up[at] = dh.up;
    }
  });
}

void input_backward(NaiveLayer& layer, Tensors& out) {
  std::int64_t const d = layer.d(), n = layer.n();
  auto const& meta = layer.metadata;
  Floats dx_rows(meta.rows() * d);
  for_each_row(layer, [&](std::int64_t e, std::int64_t r) {
    for (std::int64_t const i : layer.over_n) {
      std::int64_t const row = (e * n + i) * d;
      if (layer.gated()) {
        add_term(layer.dh_gate[r * n + i], &layer.gate[row], d, &dx_rows[r * d]);
      }
      add_term(layer.dh_up[r * n + i], &layer.up[row], d, &dx_rows[r * d]);
    }
  });
  layer.round(dx_rows);
  Floats& dx = out["dx"];
  dx.assign(layer.data.x.size(), 0);
  for_each_slot(layer, [&](std::int64_t t, std::int64_t row, std::int64_t) {
    add_term(1, &dx_rows[row * d], d, &dx[t * d]);
    layer.round(std::span(dx).subspan(t * d, d));
  });
}

void weight_backward(NaiveLayer const& layer, Tensors& out) {
  std::int64_t const d = layer.d(), n = layer.n();
  MoeDesc const& desc = layer.desc();
  Floats gate(layer.gate.size()), up(layer.up.size()), down(layer.down.size());
  Floats b_gate(layer.b_gate.size()), b_up(layer.b_up.size()), b_down(layer.b_down.size());
  for_each_row(layer, [&](std::int64_t e, std::int64_t r) {
    float const* const x = &layer.data.x[layer.metadata.gather_index[r] * d];
    for (std::int64_t c = 0; c < d; ++c) {
      add_term(layer.dy[r * d + c], &layer.a[r * n], n, &down[(e * d + c) * n]);
    }
    for (std::int64_t i = 0; i < n; ++i) {
      std::int64_t const row = (e * n + i) * d;
      if (layer.gated()) add_term(layer.dh_gate[r * n + i], x, d, &gate[row]);
      add_term(layer.dh_up[r * n + i], x, d, &up[row]);
    }
    if (!desc.bias) return;
    if (layer.gated()) add_term(1, &layer.dh_gate[r * n], n, &b_gate[e * n]);
    add_term(1, &layer.dh_up[r * n], n, &b_up[e * n]);
    add_term(1, &layer.dy[r * d], d, &b_down[e * d]);
  });
  auto const wide = [](Floats const& v) { return std::vector<double>(v.begin(), v.end()); };
  auto const stored = reference::stored_weights(
      desc, {wide(gate), wide(up), wide(down), wide(b_gate), wide(b_up), wide(b_down)});
  out["dw_up"] = narrowed(stored.w_up);
  out["dw_gate"] = narrowed(stored.w_gate);
  out["dw_down"] = narrowed(stored.w_down);
  out["db_up"] = narrowed(stored.b_up);
  out["db_gate"] = narrowed(stored.b_gate);
  out["db_down"] = narrowed(stored.b_down);
}

Floats router_forward(NaiveLayer const& layer, reference::Inputs const& inputs, Tensors& out) {
  LayerData const& data = layer.data;
  MoeShape const& s = data.desc.shape;
  Floats& logits = out["logits"];
  logits.assign(s.tokens * s.experts, 0);
  Floats const w_router_t = transposed(data.w_router, s.experts, s.hidden);
  auto const& meta = layer.metadata;
  Floats scores(inputs.topk_ids.size());
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    float* const row = &logits[t * s.experts];
    for (std::int64_t const c : layer.over_d) {
      add_term(data.x[t * s.hidden + c], &w_router_t[c * s.experts], s.experts, row);
    }
    if (!data.b_router.empty()) add_term(1, data.b_router.data(), s.experts, row);
    Floats const own =
        naive_unscaled_scores(inputs.desc, row, reference::members_of(inputs, meta, t));
    for (std::int64_t j = meta.token_offsets[t]; j < meta.token_offsets[t + 1]; ++j) {
      if (meta.inverse_permutation[j] < 0) continue;
      scores[j] = data.desc.router.route_scale * own[inputs.topk_ids[j]];
    }
  }
  out["scores"] = scores;
  return scores;
}

void router_backward(NaiveLayer& layer, reference::Inputs const& inputs, Tensors& out) {
  LayerData const& data = layer.data;
  auto const& meta = layer.metadata;
  MoeShape const& s = data.desc.shape;
  bool const rounds_router = data.desc.router_storage() != DType::fp32;
  Floats& dlogits = out["dlogits"];
  dlogits.assign(s.tokens * s.experts, 0);
  out["dw_router"].assign(s.experts * s.hidden, 0);
  if (!data.b_router.empty()) out["db_router"].assign(s.experts, 0);
  for (std::int64_t const t : layer.over_tokens) {
    Floats g(s.experts);
    for (std::int64_t j = meta.token_offsets[t]; j < meta.token_offsets[t + 1]; ++j) {
      if (meta.inverse_permutation[j] < 0) continue;
      g[inputs.topk_ids[j]] += data.desc.router.route_scale * out["dscores"][j];
    }
    Floats row = naive_logit_gradient(inputs.desc, &out["logits"][t * s.experts],
                                      reference::members_of(inputs, meta, t), g);
    bool const aux = !data.aux_dlogits.empty() && !is_padding(data, t);
    for (std::size_t e = 0; e < row.size() && aux; ++e) {
      row[e] += data.aux_dlogits[t * s.experts + e];
    }
    Floats dx(s.hidden);
    for (std::int64_t e = 0; e < s.experts; ++e) {
      dlogits[t * s.experts + e] = row[e];
      float const operand = rounds_router ? layer.rounded(row[e]) : row[e];
      add_term(operand, &data.x[t * s.hidden], s.hidden, &out["dw_router"][e * s.hidden]);
      add_term(operand, &data.w_router[e * s.hidden], s.hidden, dx.data());
      if (!data.b_router.empty()) out["db_router"][e] += row[e];
    }
    layer.round(dx);
    add_term(1, dx.data(), s.hidden, &out["dx"][t * s.hidden]);
  }
  layer.round(out["dx"]);
}

}  // namespace

Tensors naive_tensors(LayerData const& data, reference::Inputs const& inputs,
                      reference::Metadata const& metadata, std::uint64_t sample) {
  Tensors out;
  bool const routed = data.desc.router.kind != RouterKind::given;
  MoeShape const& shape = data.desc.shape;
  NaiveLayer layer{.data = data,
                   .metadata = metadata,
                   .rounded = NaiveRounding(data.desc.dtype, sample),
                   .over_d = make_order({0, shape.hidden}, sample, Sum::d),
                   .over_n = make_order({0, shape.intermediate}, sample, Sum::n),
                   .over_rows = make_order(metadata.expert_offsets, sample, Sum::rows),
                   .over_slots = make_order(metadata.token_offsets, sample, Sum::slots),
                   .over_tokens = make_order({0, shape.tokens}, sample, Sum::tokens)};
  layer.scores = routed ? router_forward(layer, inputs, out) : data.scores;
  load_weights(layer);
  forward(layer, out);
  down_backward(layer, out);
  input_backward(layer, out);
  weight_backward(layer, out);
  if (routed) router_backward(layer, inputs, out);

  bool const accumulate = data.gradient_mode == GradientMode::accumulate;
  for (auto& [name, values] : out) {
    if (!is_parameter_gradient(name)) continue;
    for (std::size_t i = 0; accumulate && i < values.size(); ++i) {
      values[i] += initial_gradient(name, static_cast<std::int64_t>(i));
    }
    bool const of_fp32_router =
        name.ends_with("_router") && data.desc.router_storage() == DType::fp32;
    if (!accumulate && !of_fp32_router) layer.round(values);
  }
  std::erase_if(out, [](auto const& entry) {
    return is_parameter_gradient(entry.first) && entry.second.empty();
  });
  return out;
}

std::vector<Tensors> naive_samples(Context const& context, LayerData const& data,
                                   reference::Inputs const& inputs,
                                   reference::Metadata const& metadata) {
  MoeShape const& shape = data.desc.shape;
  std::int64_t const rows = metadata.rows();
  std::int64_t const of_token = shape.top_k * std::min(shape.hidden, shape.intermediate);
  bool const few = rows < 512 || rows < 16 * shape.experts || of_token < 512;
  // Errors drawn uniformly come near their bound soon; those of fp32 sums are normal, with long tails.
  std::size_t const of_few = data.desc.dtype == DType::fp32 ? 48 : 8;
  std::size_t const count = few ? of_few : rows < 8192 ? 8 : 4;
  std::vector<Tensors> naives(count);
  std::vector<std::exception_ptr> errors(naives.size());
  context.parallel_for(std::ssize(naives), [&](std::int64_t sample) {
    try {
      naives[sample] = naive_tensors(data, inputs, metadata, static_cast<std::uint64_t>(sample));
    } catch (...) {  // out of memory: not to leave a thread of the pool
      errors[sample] = std::current_exception();
    }
  });
  for (std::exception_ptr const& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return naives;
}

}  // namespace tessera::verify

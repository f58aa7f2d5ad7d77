// SPDX-License-Identifier: Apache-2.0
// h = x8 w8_up^T, hb = rnd(h), a8 of act(hb), y = rnd(a8 w8_down^T); dA' = dO8 w8_down, dh8 of rnd(dh), dx rows =
// rnd(dh8 w8_up); gradients of weights from dO, a', dh and x^ = rnd(x8 s).
#include "verify/low_precision.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cpu/reference/activation.hpp"
#include "tessera/grouped_gemm.hpp"
#include "tessera/low_precision.hpp"
#include "verify/layer_arguments.hpp"
#include "verify/storage.hpp"

namespace tessera::verify {
namespace {

using Floats = std::vector<float>;
using Bytes = std::vector<std::uint8_t>;

constexpr std::uint8_t kPoisonByte = 0xff;  // NaN as e4m3, as e8m0, and as every byte of an fp32

/// Leaves the run with what the library says.
struct Failure {
  Status status;
};
void require(Status const& status) {
  if (!status.ok()) throw Failure{status};
}

ConstTensor read(Floats const& values, std::initializer_list<std::int64_t> shape) {
  return tensor(values.data(), shape);
}
std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

class Layer {
 public:
  Layer(Context const& context, LayerData const& data, reference::Metadata const& metadata,
        LowPrecision const& precision)
      : context_(context),
        data_(data),
        metadata_(metadata),
        rule_(precision.rule),
        mxfp8_(precision.kind == LowPrecision::Kind::mxfp8),
        logical_(reference::logical_weights(data.desc, reference_inputs(data).weights)) {
    quantise_weights_of_layer();
  }

  Tensors run() {
    Floats const xs = through_rows(data_.x, d_);
    Floats const h = rounded(gemm_along_rows(gathered(xs, d_), up_, d_, w_ * n_, up_bias()));
    Tensors out;
    forward(through_rows(activated(h), n_), out);
    backward(xs, through_rows(h, w_ * n_), out);
    return out;
  }

 private:
  [[nodiscard]] std::int64_t block() const { return mxfp8_ ? 32 : 128; }
  [[nodiscard]] DType scale_dtype() const { return mxfp8_ ? DType::e8m0 : DType::fp32; }
  [[nodiscard]] std::int64_t rows() const { return metadata_.rows(); }

  static Floats rounded(Floats values) {
    round_all(DType::bf16, values);
    return values;
  }

  /// [rows,width] through codes and back, in blocks along rows.
  [[nodiscard]] Floats through_rows(Floats const& values, std::int64_t width) const {
    std::int64_t const rows = std::ssize(values) / width, blocks = width / block();
    Bytes codes(values.size(), kPoisonByte);
    Bytes scales(size(rows * blocks) * dtype_bytes(scale_dtype()), kPoisonByte);
    auto const kind = mxfp8_ ? QuantiseBlock::row_32 : QuantiseBlock::row_128;
    Tensor const to = tensor(static_cast<void*>(codes.data()), DType::fp8_e4m3, {rows, width});
    Tensor const scale = tensor(static_cast<void*>(scales.data()), scale_dtype(), {rows, blocks});
    require(quantise(context_, {.block = kind,
                                .rule = rule_,
                                .layout = ScaleLayout::matrix,
                                .values = read(values, {rows, width}),
                                .codes = to,
                                .codes_transposed = {},
                                .scales = scale}));
    Floats out(values.size());
    require(dequantise(context_, {.block = kind,
                                  .layout = ScaleLayout::matrix,
                                  .codes = to,
                                  .scales = scale,
                                  .values = tensor(out.data(), {rows, width})}));
    return out;
  }

  /// One weight, [count,rows,width] codes with their scales, as fp32.
  [[nodiscard]] Floats dequantised(Bytes& codes, void* scales, std::int64_t count,
                                   std::int64_t rows, std::int64_t width) const {
    Floats out(codes.size());
    ConstTensor const scale =
        mxfp8_ ? tensor(static_cast<void const*>(scales), DType::e8m0,
                        {count, scale_atom_bytes(rows, width / 32)})
               : tensor(static_cast<float const*>(scales), {count, rows / 128, width / 128});
    require(
        dequantise(context_, {.block = mxfp8_ ? QuantiseBlock::row_32 : QuantiseBlock::square_128,
                              .layout = mxfp8_ ? ScaleLayout::atoms : ScaleLayout::matrix,
                              .codes = tensor(static_cast<void const*>(codes.data()),
                                              DType::fp8_e4m3, {count, rows, width}),
                              .scales = scale,
                              .values = tensor(out.data(), {count, rows, width})}));
    return out;
  }

  void quantise_weights_of_layer() {
    Memory memory(kPoisons[0]);
    Bytes up(size(e_ * w_ * n_ * d_), kPoisonByte), up_t = up;
    Bytes down(size(e_ * d_ * n_), kPoisonByte), down_t = down;
    QuantisedWeights out{
        .up = tensor(static_cast<void*>(up.data()), DType::fp8_e4m3, {e_, w_, n_, d_}),
        .up_transposed =
            tensor(static_cast<void*>(up_t.data()), DType::fp8_e4m3, {e_, d_, w_ * n_}),
        .down = tensor(static_cast<void*>(down.data()), DType::fp8_e4m3, {e_, d_, n_}),
        .down_transposed = tensor(static_cast<void*>(down_t.data()), DType::fp8_e4m3, {e_, n_, d_}),
        .up_scales = {},
        .down_scales = {},
        .up_transposed_scales = {},
        .down_transposed_scales = {}};
    mxfp8_ ? quantise_mxfp8(memory, out, up, up_t, down, down_t)
           : quantise_fp8(memory, out, up, up_t, down, down_t);
  }

  void quantise_mxfp8(Memory& memory, QuantisedWeights& out, Bytes& up, Bytes& up_t, Bytes& down,
                      Bytes& down_t) {
    std::int64_t const n_by_d = scale_atom_bytes(n_, d_ / 32),
                       d_by_n = scale_atom_bytes(d_, n_ / 32),
                       d_by_up = scale_atom_bytes(d_, w_ * n_ / 32);
    out.up_scales = memory.output(DType::e8m0, {e_, w_, n_by_d});
    out.down_scales = memory.output(DType::e8m0, {e_, d_by_n});
    out.up_transposed_scales = memory.output(DType::e8m0, {e_, d_by_up});
    out.down_transposed_scales = memory.output(DType::e8m0, {e_, n_by_d});
    require(quantise_weights(context_, data_.desc, weight_arguments(data_, memory), rule_, out));
    up_ = dequantised(up, out.up_scales.data, e_ * w_, n_, d_);
    up_t_ = dequantised(up_t, out.up_transposed_scales.data, e_, d_, w_ * n_);
    down_ = dequantised(down, out.down_scales.data, e_, d_, n_);
    down_t_ = dequantised(down_t, out.down_transposed_scales.data, e_, n_, d_);
  }

  /// The scales of up are [E,n/128,d/128,w]; those of a part, and of the transposes, have the same values elsewhere.
  void quantise_fp8(Memory& memory, QuantisedWeights& out, Bytes& up, Bytes& up_t, Bytes& down,
                    Bytes& down_t) {
    std::int64_t const n = n_ / 128, d = d_ / 128;
    Floats of_up(size(e_ * n * d * w_)), of_down(size(e_ * d * n));
    out.up_scales = tensor(of_up.data(), {e_, n, d, w_});
    out.down_scales = tensor(of_down.data(), {e_, d, n});
    require(quantise_weights(context_, data_.desc, weight_arguments(data_, memory), rule_, out));
    Floats parts(of_up.size()), up_t_scales(of_up.size()), down_t_scales(of_down.size());
    for (std::int64_t e = 0; e < e_; ++e) {
      for (std::int64_t i = 0; i < n; ++i) {
        for (std::int64_t j = 0; j < d; ++j) {
          for (std::int64_t part = 0; part < w_; ++part) {
            float const scale = of_up[((e * n + i) * d + j) * w_ + part];
            parts[((e * w_ + part) * n + i) * d + j] = scale;
            up_t_scales[(e * d + j) * w_ * n + part * n + i] = scale;
          }
          down_t_scales[(e * n + i) * d + j] = of_down[(e * d + j) * n + i];
        }
      }
    }
    up_ = dequantised(up, parts.data(), e_ * w_, n_, d_);
    up_t_ = dequantised(up_t, up_t_scales.data(), e_, d_, w_ * n_);
    down_ = dequantised(down, of_down.data(), e_, d_, n_);
    down_t_ = dequantised(down_t, down_t_scales.data(), e_, n_, d_);
  }

  /// Rows in the order of experts of a [T,width] tensor.
  [[nodiscard]] Floats gathered(Floats const& values, std::int64_t width) const {
    Floats out(size(rows() * width));
    for (std::int64_t r = 0; r < rows(); ++r) {
      std::copy_n(&values[metadata_.gather_index[r] * width], width, &out[r * width]);
    }
    return out;
  }

  void run_gemm(GroupedGemmArgs args) const {
    args.expert_offsets = tensor(metadata_.expert_offsets.data(), {e_ + 1});
    auto const needed = grouped_gemm_workspace_bytes(context_, args);
    require(needed.status());
    Bytes workspace(needed.value());
    args.workspace = {workspace.data(), workspace.size()};
    require(grouped_gemm(context_, args));
  }
  /// a [R,k] times b [E,columns,k].
  [[nodiscard]] Floats gemm_along_rows(Floats const& a, Floats const& b, std::int64_t k,
                                       std::int64_t columns, Floats const& bias = {}) const {
    Floats out(size(rows() * columns));
    GroupedGemmArgs args;
    args.a = read(a, {rows(), k});
    args.b = read(b, {e_, columns, k});
    if (!bias.empty()) args.bias = read(bias, {e_, columns});
    args.c = tensor(out.data(), {rows(), columns});
    run_gemm(args);
    return out;
  }
  /// The sum over an expert's rows of a [R,m] and b [R,columns]: [E,m,columns].
  [[nodiscard]] Floats gemm_over_rows(Floats const& a, Floats const& b, std::int64_t m,
                                      std::int64_t columns) const {
    Floats out(size(e_ * m * columns));
    GroupedGemmArgs args;
    args.kind = GroupedGemmKind::varlen_k;
    args.a = read(a, {rows(), m});
    args.b = read(b, {rows(), columns});
    args.c = tensor(out.data(), {e_, m, columns});
    run_gemm(args);
    return out;
  }

  [[nodiscard]] Floats up_bias() const {
    Floats out;
    if (!data_.desc.bias) return out;
    for (std::int64_t e = 0; e < e_; ++e) {
      for (auto const* part : {&logical_.b_gate, &logical_.b_up}) {
        if (part->empty()) continue;
        out.insert(out.end(), part->begin() + e * n_, part->begin() + (e + 1) * n_);
      }
    }
    return out;
  }
  [[nodiscard]] Floats down_bias() const {
    return {logical_.b_down.begin(), logical_.b_down.end()};
  }

  [[nodiscard]] double gate(Floats const& h, std::int64_t r, std::int64_t i) const {
    return w_ == 2 ? h[r * 2 * n_ + i] : 0;
  }
  [[nodiscard]] double up(Floats const& h, std::int64_t r, std::int64_t i) const {
    return h[r * w_ * n_ + (w_ - 1) * n_ + i];
  }
  [[nodiscard]] Floats activated(Floats const& h) const {
    Floats out(size(rows() * n_));
    for (std::int64_t r = 0; r < rows(); ++r) {
      for (std::int64_t i = 0; i < n_; ++i) {
        out[r * n_ + i] = static_cast<float>(
            reference::activate(data_.desc.activation, gate(h, r, i), up(h, r, i)));
      }
    }
    return out;
  }

  /// out_t = rnd(sum over its slots, ascending, of weight * row).
  [[nodiscard]] Floats aggregated(Floats const& rows, bool scored) const {
    Floats out(size(data_.desc.shape.tokens * d_));
    for (std::int64_t t = 0; t < data_.desc.shape.tokens; ++t) {
      for (std::int64_t j = metadata_.token_offsets[t]; j < metadata_.token_offsets[t + 1]; ++j) {
        std::int64_t const row = metadata_.inverse_permutation[j];
        if (row < 0) continue;
        float const weight = scored ? data_.scores[j] : 1;
        for (std::int64_t c = 0; c < d_; ++c) out[t * d_ + c] += weight * rows[row * d_ + c];
      }
    }
    return rounded(std::move(out));
  }

  void forward(Floats const& a, Tensors& out) const {
    out["o"] = aggregated(rounded(gemm_along_rows(a, down_, n_, d_, down_bias())), true);
  }

  void backward(Floats const& xs, Floats const& h, Tensors& out) const {
    Floats const a = activated(h), d_o = gathered(through_rows(data_.d_o, d_), d_);
    Floats const da = gemm_along_rows(d_o, down_t_, d_, n_);
    Floats dh(size(rows() * w_ * n_)), scaled(a.size());
    Floats& ds = out["dscores"];
    ds.assign(size(data_.desc.num_slots()), 0);
    for_each_row([&](std::int64_t e, std::int64_t r, std::int64_t slot) {
      float const score = data_.scores[slot];
      for (std::int64_t i = 0; i < n_; ++i) {
        std::int64_t const at = r * n_ + i;
        ds[slot] += da[at] * a[at];
        auto const gradient = reference::activation_gradient(data_.desc.activation, gate(h, r, i),
                                                             up(h, r, i), score * da[at]);
        if (w_ == 2) dh[r * 2 * n_ + i] = static_cast<float>(gradient.gate);
        dh[r * w_ * n_ + (w_ - 1) * n_ + i] = static_cast<float>(gradient.up);
        scaled[at] = score * a[at];
      }
      for (std::int64_t c = 0; data_.desc.bias && c < d_; ++c) {
        ds[slot] += d_o[r * d_ + c] * static_cast<float>(logical_.b_down[e * d_ + c]);
      }
    });
    dh = rounded(std::move(dh));
    scaled = rounded(std::move(scaled));
    out["dx"] =
        aggregated(rounded(gemm_along_rows(through_rows(dh, w_ * n_), up_t_, w_ * n_, d_)), false);
    weight_gradients(rounded(gathered(xs, d_)), dh, scaled, out);
  }

  template <class Body>
  void for_each_row(Body&& body) const {
    for (std::int64_t e = 0; e < e_; ++e) {
      for (auto r = metadata_.expert_offsets[e]; r < metadata_.expert_offsets[e + 1]; ++r) {
        body(e, r, metadata_.sort_permutation[r]);
      }
    }
  }

  void weight_gradients(Floats const& x, Floats const& dh, Floats const& scaled,
                        Tensors& out) const {
    Floats const d_o = gathered(data_.d_o, d_);
    Floats const up = gemm_over_rows(dh, x, w_ * n_, d_);
    Floats const down = gemm_over_rows(d_o, scaled, d_, n_);
    reference::LogicalWeights sums = reference::zero_weights(data_.desc);
    std::copy(down.begin(), down.end(), sums.down.begin());
    for (std::int64_t e = 0; e < e_; ++e) {
      auto const of_expert = up.begin() + e * w_ * n_ * d_;
      if (w_ == 2) std::copy_n(of_expert, n_ * d_, sums.gate.begin() + e * n_ * d_);
      std::copy_n(of_expert + (w_ - 1) * n_ * d_, n_ * d_, sums.up.begin() + e * n_ * d_);
    }
    if (data_.desc.bias) bias_gradients(dh, d_o, sums);
    auto const stored = reference::stored_weights(data_.desc, sums);
    auto const add = [&](char const* name, std::vector<double> const& values) {
      if (!values.empty()) out[name] = rounded(Floats(values.begin(), values.end()));
    };
    add("dw_up", stored.w_up);
    add("dw_gate", stored.w_gate);
    add("dw_down", stored.w_down);
    add("db_up", stored.b_up);
    add("db_gate", stored.b_gate);
    add("db_down", stored.b_down);
  }

  void bias_gradients(Floats const& dh, Floats const& d_o, reference::LogicalWeights& sums) const {
    for_each_row([&](std::int64_t e, std::int64_t r, std::int64_t slot) {
      for (std::int64_t i = 0; i < n_; ++i) {
        if (w_ == 2) sums.b_gate[e * n_ + i] += gate(dh, r, i);
        sums.b_up[e * n_ + i] += up(dh, r, i);
      }
      for (std::int64_t c = 0; c < d_; ++c) {
        sums.b_down[e * d_ + c] += data_.scores[slot] * d_o[r * d_ + c];
      }
    });
  }

  Context const& context_;
  LayerData const& data_;
  reference::Metadata const& metadata_;
  ScaleRule rule_;
  bool mxfp8_;
  reference::LogicalWeights logical_;
  std::int64_t d_ = data_.desc.shape.hidden, n_ = data_.desc.shape.intermediate,
               e_ = data_.desc.shape.experts, w_ = data_.desc.up_width();
  Floats up_{}, up_t_{}, down_{},
      down_t_{};  ///< dequantised: [E,w*n,d], [E,d,w*n], [E,d,n], [E,n,d]
};

/// `value` on the other side of `kink` where it is within a step of e4m3 of it.
double across(double value, double kink) {
  double const step = std::abs(kink) / 8;
  if (value == kink)
    return kink + std::copysign(step / 8, kink);  // the bound itself passes gradients
  return std::abs(value - kink) < step ? 2 * kink - value : value;
}

}  // namespace

reference::Recipe recipe_of(LowPrecision const& precision) {
  return precision.kind == LowPrecision::Kind::mxfp8 ? reference::mxfp8(precision.rule)
                                                     : reference::fp8_block(precision.rule);
}

LayerData with_given_routing(LayerData const& data) {
  reference::Inputs const inputs = reference_inputs(data, exact_choice(data));
  reference::Forward const f = reference::begin_forward(inputs);
  LayerData out = data;
  MoeDesc& desc = out.desc;
  if (desc.experts_vary()) {
    out.token_offsets = f.metadata.token_offsets;
    desc.shape.variable_experts = true;
    desc.shape.slots = out.token_offsets.back();
  }
  desc.router = {};
  desc.router_dtype = DType::none;
  std::int64_t const slots = desc.num_slots();
  out.topk_ids.assign(inputs.topk_ids.begin(), inputs.topk_ids.begin() + slots);
  out.scores.assign(f.scores.begin(), f.scores.begin() + slots);
  out.w_router.clear();
  out.b_router.clear();
  out.selection_bias.clear();
  out.aux_dlogits.clear();
  out.gradient_mode = GradientMode::write;
  return out;
}

Expected<Tensors> low_precision_tensors(Context const& context, LayerData const& data,
                                        reference::Metadata const& metadata,
                                        LowPrecision const& precision) {
  try {
    return Layer(context, data, metadata, precision).run();
  } catch (Failure const& failure) {
    return failure.status;
  }
}

double sqnr_db(std::vector<double> const& ref, std::vector<float> const& out) {
  double signal = 0, noise = 0;
  for (std::size_t i = 0; i < ref.size(); ++i) {
    signal += ref[i] * ref[i];
    noise += (ref[i] - out[i]) * (ref[i] - out[i]);
  }
  return noise == 0 ? 999 : 10 * std::log10(signal / noise);
}

std::vector<Tensors> recipe_samples(LayerData const& data, reference::Inputs const& inputs,
                                    LowPrecision const& precision) {
  reference::Recipe const recipe = recipe_of(precision);
  reference::Values const d_o(data.d_o.begin(), data.d_o.end());
  auto q = reference::low_precision_forward(inputs, recipe);
  std::vector<Tensors> samples;
  auto const add = [&] {
    Tensors sample;
    auto const b = reference::low_precision_backward(recipe, q, d_o);
    for (auto const& [name, values] : reference_tensors(data, q.forward, b)) {
      sample[name].assign(values.begin(), values.end());
    }
    samples.push_back(std::move(sample));
  };
  add();
  Activation const& activation = data.desc.activation;
  if (activation.kind != ActivationKind::clamped_swiglu) return samples;
  reference::Forward& f = q.forward;
  double const limit = activation.limit;
  for (std::size_t i = 0; i < f.a.size(); ++i) {
    f.h_gate[i] = across(f.h_gate[i], limit);
    f.h_up[i] = across(across(f.h_up[i], limit), -limit);
    f.a[i] = reference::activate(activation, f.h_gate[i], f.h_up[i]);
  }
  add();
  return samples;
}

std::vector<std::string> lost_db(ReferenceTensors const& ref, std::vector<Tensors> const& recipe,
                                 Tensors const& out) {
  constexpr std::int64_t kMin = 4096;
  std::vector<std::string> lost;
  for (auto const& [name, values] : out) {
    if (std::ssize(values) < kMin) continue;
    double const have = sqnr_db(ref.at(name), values);
    double want = sqnr_db(ref.at(name), recipe.front().at(name));
    for (Tensors const& sample : recipe)
      want = std::min(want, sqnr_db(ref.at(name), sample.at(name)));
    if (have >= want - (name == "dscores" ? 1 : 0.3)) continue;
    char text[120];
    std::snprintf(text, sizeof(text), "%s: %.2f dB, the recipe has %.2f on these data",
                  name.c_str(), have, want);
    lost.emplace_back(text);
  }
  return lost;
}

}  // namespace tessera::verify

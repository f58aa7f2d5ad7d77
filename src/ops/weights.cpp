// SPDX-License-Identifier: Apache-2.0
#include "ops/weights.hpp"

#include "core/gradient_dtype.hpp"

namespace tessera::ops {
namespace {

constexpr std::int64_t kWeightBlock = 128;  // rows and columns of weights that share a scale

bool transposed(MoeDesc const& desc) noexcept {
  return desc.layout.orientation == WeightOrientation::transposed;
}
bool separate(MoeDesc const& desc) noexcept {
  return desc.layout.orientation == WeightOrientation::separate;
}

/// Strides of a checked tensor; where an extent is 1 its stride may hold anything, so it is replaced.
std::int64_t stride_of(ConstTensor const& tensor, int axis) noexcept {
  if (tensor.shape[axis] > 1) return tensor.stride[axis];
  std::int64_t inner = 1;
  for (int later = axis + 1; later < tensor.rank; ++later) {
    if (tensor.shape[later] > 1) return tensor.stride[later] * tensor.shape[later];
    inner *= tensor.shape[later];
  }
  return inner;
}

template <class T>
cpu::MatrixView<T> matrix_of(ConstTensor const& tensor, T* data, bool transpose) noexcept {
  cpu::MatrixView<T> const stored{data, stride_of(tensor, 1), 1};
  return transpose ? stored.transposed() : stored;
}

template <class T, class View>
cpu::UpMatrices<T> up_matrices_of(MoeDesc const& desc, View const& w_up,
                                  View const& w_gate) noexcept {
  cpu::UpMatrices<T> out;
  out.separate = separate(desc);
  auto* const up = static_cast<T*>(w_up.data);
  if (out.separate) {
    out.up = matrix_of<T>(w_up, up, false);
    out.up_expert_stride = stride_of(w_up, 0);
    out.gate = matrix_of<T>(w_gate, static_cast<T*>(w_gate.data), false);
    out.gate_expert_stride = stride_of(w_gate, 0);
  } else {
    out.joined = matrix_of<T>(w_up, up, transposed(desc));
    out.expert_stride = stride_of(w_up, 0);
  }
  return out;
}

template <class T, class View>
cpu::DownMatrices<T> down_matrices_of(MoeDesc const& desc, View const& w_down) noexcept {
  return {matrix_of<T>(w_down, static_cast<T*>(w_down.data), transposed(desc)),
          stride_of(w_down, 0)};
}

template <class T, class View>
cpu::UpBiases<T> up_biases_of(MoeDesc const& desc, View const& b_up, View const& b_gate) noexcept {
  auto* const up = static_cast<T*>(b_up.data);
  if (!separate(desc)) return {up, stride_of(b_up, 0), nullptr, 0};
  return {static_cast<T*>(b_gate.data), stride_of(b_gate, 0), up, stride_of(b_up, 0)};
}

/// The shapes of one set of weights or gradients; `visit(name, tensor, shape)` for each that the desc has.
template <class Visit, class Absent>
void visit_shapes(MoeDesc const& desc, Visit&& visit, Absent&& absent) noexcept {
  std::int64_t const e = desc.shape.experts, d = desc.shape.hidden, n = desc.shape.intermediate;
  std::int64_t const width = desc.up_width() * n;
  bool const turned = transposed(desc), apart = separate(desc);
  if (apart) {
    visit(0, {e, n, d});
    visit(1, {e, n, d});
  } else if (turned) {
    visit(0, {e, d, width});
  } else {
    visit(0, {e, width, d});
  }
  if (!apart) absent(1, "only the separate layout has it");
  if (turned) {
    visit(2, {e, n, d});
  } else {
    visit(2, {e, d, n});
  }
  if (desc.bias) {
    visit(3, {e, apart ? n : width});
    if (apart) visit(4, {e, n});
    visit(5, {e, d});
  } else {
    absent(3, "the desc has no biases");
    absent(5, "the desc has no biases");
  }
  if (!apart || !desc.bias) absent(4, "only the separate layout with biases has it");
}

}  // namespace

void visit_weights(MoeDesc const& desc, ExpertWeights const& weights,
                   core::TensorVisitor& visitor) noexcept {
  ConstTensor const* const tensors[] = {&weights.w_up, &weights.w_gate, &weights.w_down,
                                        &weights.b_up, &weights.b_gate, &weights.b_down};
  constexpr char const* kNames[] = {"w_up", "w_gate", "w_down", "b_up", "b_gate", "b_down"};
  visit_shapes(
      desc,
      [&](int which, std::initializer_list<std::int64_t> shape) {
        constexpr int kFirstBias = 3;
        if (desc.weight_codes && which < kFirstBias) {
          return visitor.absent(kNames[which], *tensors[which], "weight_codes take its place");
        }
        visitor.input(kNames[which], *tensors[which], desc.dtype, shape);
      },
      [&](int which, char const* reason) {
        visitor.absent(kNames[which], *tensors[which], reason);
      });
}

void visit_weight_codes(MoeDesc const& desc, WeightCodes const& codes, bool forward, bool backward,
                        core::TensorVisitor& visitor) noexcept {
  std::int64_t const e = desc.shape.experts, d = desc.shape.hidden, n = desc.shape.intermediate;
  std::int64_t const w = desc.up_width(), block = kWeightBlock;
  auto const add = [&](char const* name, ConstTensor const& tensor, DType dtype, bool is_read,
                       std::initializer_list<std::int64_t> shape) {
    if (!desc.weight_codes) {
      return visitor.absent(name, tensor, "only a desc with weight_codes has codes of weights");
    }
    is_read ? visitor.input(name, tensor, dtype, shape)
            : visitor.optional_input(name, tensor, dtype, shape);
    visitor.contiguous(name, tensor);
  };
  DType const code = DType::fp8_e4m3, scale = DType::fp32;
  bool const both = forward || backward, again = backward && desc.save == SavePolicy::x;
  add("weight_codes.up", codes.up, code, forward || again, {e, w, n, d});
  add("weight_codes.up_scales", codes.up_scales, scale, both, {e, n / block, d / block, w});
  add("weight_codes.down", codes.down, code, forward, {e, d, n});
  add("weight_codes.down_scales", codes.down_scales, scale, both, {e, d / block, n / block});
  add("weight_codes.up_transposed", codes.up_transposed, code, backward, {e, d, w * n});
  add("weight_codes.down_transposed", codes.down_transposed, code, backward, {e, n, d});
}

void visit_gradients(MoeDesc const& desc, ExpertGradients const& gradients,
                     core::TensorVisitor& visitor) noexcept {
  Tensor const* const tensors[] = {&gradients.dw_up, &gradients.dw_gate, &gradients.dw_down,
                                   &gradients.db_up, &gradients.db_gate, &gradients.db_down};
  constexpr char const* kNames[] = {"dw_up", "dw_gate", "dw_down", "db_up", "db_gate", "db_down"};
  DType const dtype = core::gradient_dtype(desc, gradients);
  visit_shapes(
      desc,
      [&](int which, std::initializer_list<std::int64_t> shape) {
        visitor.optional_output(kNames[which], *tensors[which], dtype, shape);
      },
      [&](int which, char const* reason) {
        visitor.absent(kNames[which], *tensors[which], reason);
      });
  if (gradients.mode != GradientMode::write && gradients.mode != GradientMode::accumulate) {
    visitor.fail(Status::invalid("gradients.mode=%d: 0 write or 1 accumulate",
                                 static_cast<int>(gradients.mode)));
  }
}

template <class T>
cpu::UpMatrices<T const> up_matrices(MoeDesc const& desc, ExpertWeights const& weights) noexcept {
  return up_matrices_of<T const>(desc, weights.w_up, weights.w_gate);
}
template <class T>
cpu::DownMatrices<T const> down_matrices(MoeDesc const& desc,
                                         ExpertWeights const& weights) noexcept {
  return down_matrices_of<T const>(desc, weights.w_down);
}
template <class T>
cpu::UpBiases<T const> up_biases(MoeDesc const& desc, ExpertWeights const& weights) noexcept {
  return up_biases_of<T const>(desc, weights.b_up, weights.b_gate);
}
template <class T>
cpu::DownBiases<T const> down_biases(ExpertWeights const& weights) noexcept {
  return {static_cast<T const*>(weights.b_down.data), stride_of(weights.b_down, 0)};
}
template <class T>
cpu::UpMatrices<T> up_matrices(MoeDesc const& desc, ExpertGradients const& gradients) noexcept {
  return up_matrices_of<T>(desc, gradients.dw_up, gradients.dw_gate);
}
template <class T>
cpu::DownMatrices<T> down_matrices(MoeDesc const& desc, ExpertGradients const& gradients) noexcept {
  return down_matrices_of<T>(desc, gradients.dw_down);
}
template <class T>
cpu::UpBiases<T> up_biases(MoeDesc const& desc, ExpertGradients const& gradients) noexcept {
  return up_biases_of<T>(desc, gradients.db_up, gradients.db_gate);
}
template <class T>
cpu::DownBiases<T> down_biases(ExpertGradients const& gradients) noexcept {
  return {static_cast<T*>(gradients.db_down.data), stride_of(gradients.db_down, 0)};
}

#define TESSERA_INSTANTIATE(T)                                                                     \
  template cpu::UpMatrices<T const> up_matrices<T>(MoeDesc const&, ExpertWeights const&) noexcept; \
  template cpu::DownMatrices<T const> down_matrices<T>(MoeDesc const&,                             \
                                                       ExpertWeights const&) noexcept;             \
  template cpu::UpBiases<T const> up_biases<T>(MoeDesc const&, ExpertWeights const&) noexcept;     \
  template cpu::DownBiases<T const> down_biases<T>(ExpertWeights const&) noexcept;                 \
  template cpu::UpMatrices<T> up_matrices<T>(MoeDesc const&, ExpertGradients const&) noexcept;     \
  template cpu::DownMatrices<T> down_matrices<T>(MoeDesc const&, ExpertGradients const&) noexcept; \
  template cpu::UpBiases<T> up_biases<T>(MoeDesc const&, ExpertGradients const&) noexcept;         \
  template cpu::DownBiases<T> down_biases<T>(ExpertGradients const&) noexcept;
TESSERA_INSTANTIATE(float)
TESSERA_INSTANTIATE(cpu::Bf16)
#undef TESSERA_INSTANTIATE

}  // namespace tessera::ops

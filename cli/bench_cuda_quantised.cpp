// SPDX-License-Identifier: Apache-2.0
// The check of a timed layer that quantises its operands: tensor by tensor against the same call in native precision.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "cli/bench_cuda_layer.hpp"
#include "cli/commands.hpp"
#include "verify/low_precision.hpp"
#include "verify/storage.hpp"

namespace tessera::cli {
namespace {

/// The noise in dB that a right result may have at most (docs/numerics.md#a-layer-that-quantises), and one that no
/// quantised tensor is as free of.
constexpr double kFloorO = 23, kFloorDx = 22, kFloorWeights = 22.5, kExact = 40;
constexpr std::int64_t kMaxCompared = std::int64_t{1} << 22;  // elements, of either end of a tensor

std::size_t bytes_of(Tensor const& tensor) {
  return static_cast<std::size_t>(tensor.elements()) * dtype_bytes(tensor.dtype);
}

/// The first and the last elements of a tensor on the device.
std::vector<float> sampled(Tensor const& tensor) {
  std::int64_t const count = std::min(tensor.elements(), kMaxCompared);
  std::size_t const element = dtype_bytes(tensor.dtype);
  std::vector<std::byte> bytes(element * static_cast<std::size_t>(count));
  std::vector<float> out;
  for (std::int64_t const first : {std::int64_t{0}, tensor.elements() - count}) {
    device::download(
        bytes.data(),
        static_cast<std::byte const*>(tensor.data) + element * static_cast<std::size_t>(first),
        bytes.size());
    auto const values = verify::unpack(tensor.dtype, bytes.data(), static_cast<std::size_t>(count));
    out.insert(out.end(), values.begin(), values.end());
  }
  return out;
}

struct Compared {
  Tensor tensor;
  double floor_db;
};
using Outputs = std::map<std::string, Compared>;

Outputs gradients_of(MoeBackwardArgs const& args) {
  return {{"dx", {args.dx, kFloorDx}},
          {"dw_up", {args.gradients.dw_up, kFloorWeights}},
          {"dw_down", {args.gradients.dw_down, kFloorWeights}}};
}

std::map<std::string, std::vector<double>> values_of(Outputs const& outputs) {
  std::map<std::string, std::vector<double>> values;
  for (auto const& [name, output] : outputs) {
    auto const found = sampled(output.tensor);
    values[name].assign(found.begin(), found.end());
  }
  return values;
}

}  // namespace

std::string CudaBenchLayer::check_quantised() const {
  MoeDesc native = layer_.desc;
  native.precision = Precision::native;
  native.pow2_scales = false;
  std::int32_t const device = context_.device().index;
  auto const memory_of = [device](std::size_t bytes) {
    return device::allocate(device, bytes, device::Kind::device);
  };
  std::int64_t const slots = native.num_slots(),
                     width = native.up_width() * native.shape.intermediate;
  auto const h = memory_of(2 * static_cast<std::size_t>(slots * width));
  std::size_t workspace = value_of(workspace_bytes(context_, native, Pass::forward));
  if (has_backward_) {
    workspace = std::max(workspace, value_of(workspace_bytes(context_, native, Pass::backward)));
  }
  auto const scratch = memory_of(workspace);
  auto const poison = [this](Outputs const& outputs, int value) {
    for (auto const& [name, output] : outputs) {
      stream_.fill(output.tensor.data, value, bytes_of(output.tensor));
    }
  };
  auto const wait = [this] {
    stream_.synchronize();
    tessera::cli::check(check_device_values(context_));
  };

  Outputs const forward_outputs = {{"o", {forward_.o, kFloorO}}};
  MoeForwardArgs plain = forward_;
  plain.x8 = plain.x_scale = plain.h_scale = {};
  plain.h = tensor(static_cast<void*>(h.get()), DType::bf16, {slots, width}, context_.device());
  plain.workspace = {scratch.get(), workspace};
  tessera::cli::check(moe_forward(context_, native, plain, stream_.handle()));
  wait();
  auto want = values_of(forward_outputs);
  if (has_backward_) {
    MoeBackwardArgs back = backward_;
    back.x = forward_.x;
    back.h = plain.h;
    back.x8 = back.x_scale = back.h_scale = {};
    back.workspace = plain.workspace;
    tessera::cli::check(moe_backward(context_, native, back, stream_.handle()));
    wait();
    want.merge(values_of(gradients_of(back)));
  }

  auto const compare = [&](Outputs const& outputs, char const* call) -> std::string {
    for (auto const& [name, output] : outputs) {
      double const db = verify::sqnr_db(want.at(name), sampled(output.tensor));
      if (db >= output.floor_db && db < kExact) continue;
      return fmt::format("{}{}: {:.2f} dB from native precision, not {} to {}", call, name, db,
                         output.floor_db, kExact);
    }
    return {};
  };
  poison(forward_outputs, kPoison);
  stream_.fill(forward_.workspace.data, kPoison, forward_.workspace.bytes);
  forward();
  wait();
  std::string failure = compare(forward_outputs, "");
  auto const trained = sampled(forward_.o);
  if (failure.empty() && has_backward_) {
    poison(gradients_of(backward_), kPoison);
    stream_.fill(backward_.workspace.data, kPoison, backward_.workspace.bytes);
    backward();
    wait();
    failure = compare(gradients_of(backward_), "");
  }
  if (failure.empty() && has_backward_) {
    poison(gradients_of(main_grad_), 0);
    backward_main_grad();
    wait();
    failure = compare(gradients_of(main_grad_), "main-grad, ");
  }
  if (!failure.empty()) return failure;
  poison(forward_outputs, kPoison);
  forward_inference();
  wait();
  return sampled(forward_.o) == trained ? "" : "inference: o differs from training's";
}

}  // namespace tessera::cli

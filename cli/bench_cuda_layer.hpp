// SPDX-License-Identifier: Apache-2.0
// A layer on a GPU with all its buffers, filled on the device, and the check of sampled tokens against fp64.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "device/device.hpp"
#include "tessera/moe.hpp"
#include "verify/case.hpp"
#include "verify/gradient_check.hpp"
#include "verify/token_check.hpp"

namespace tessera::cli {

inline constexpr int kPoison = 0xff;  // in each byte of what a pass has to write; bf16: NaN

class CudaBenchLayer {
 public:
  /// Without `backward` there are no buffers for it.
  CudaBenchLayer(Context const& context, device::Stream const& stream,
                 verify::LayerCase const& layer_case, bool backward);

  void forward() const;             ///< training: h and the routing tables stay
  void forward_inference() const;   ///< nothing stays
  void backward() const;            ///< of the last forward(): bf16 weight gradients, written
  void backward_main_grad() const;  ///< the same, added to fp32 weight gradients

  [[nodiscard]] MoeDesc const& desc() const noexcept { return layer_.desc; }
  [[nodiscard]] std::int64_t routed_rows() const;  ///< R of the last forward()
  [[nodiscard]] std::size_t saved_bytes_total() const;
  [[nodiscard]] std::size_t forward_workspace_bytes(bool inference) const;
  [[nodiscard]] std::size_t backward_workspace_bytes() const;

  /// Runs all on poisoned outputs and compares samples with an fp64 computation on the host: of a few tokens the
  /// choice of experts, scores, h, o, dx, dscores and dlogits, of an expert weight gradients. Where operands are
  /// quantised: with the layer in native precision. Empty where all is right, else the first thing that is not.
  [[nodiscard]] std::string check() const;

 private:
  std::byte* allocate(std::size_t bytes);
  verify::UniformTensor fill(ConstTensor& tensor, std::initializer_list<std::int64_t> shape,
                             std::uint64_t seed, float scale);
  /// The same of the router's storage type.
  verify::UniformTensor fill_router(ConstTensor& tensor, std::initializer_list<std::int64_t> shape,
                                    std::uint64_t seed, float scale);
  void give_routing(verify::LayerCase const& layer_case);
  void add_backward();
  void add_aux_dlogits(verify::UniformTensor const& formula);
  [[nodiscard]] std::string check_forward(Context const& host, bool inference) const;
  [[nodiscard]] std::string check_backward(Context const& host, MoeBackwardArgs const& args) const;
  /// Where operands are quantised: against the same layer in native precision, by the noise of whole tensors.
  [[nodiscard]] std::string check_quantised() const;
  struct Slots {
    std::int64_t first, count;
  };
  [[nodiscard]] Slots slots_of(std::int64_t token) const;
  [[nodiscard]] verify::TokenResult token_result(std::int64_t token, bool inference) const;
  [[nodiscard]] verify::TokenGradients token_gradients(MoeBackwardArgs const& args,
                                                       std::int64_t token) const;
  [[nodiscard]] verify::UnitGradients unit_gradients(MoeBackwardArgs const& args,
                                                     std::int64_t expert, std::int64_t i) const;
  [[nodiscard]] verify::RouterRow router_row(MoeBackwardArgs const& args,
                                             std::int64_t expert) const;

  Context const& context_;
  device::Stream const& stream_;
  verify::UniformLayer layer_;
  MoeDesc inference_desc_;
  std::deque<device::Memory> memory_;
  MoeForwardArgs forward_, inference_;
  bool has_backward_;
  MoeBackwardArgs backward_, main_grad_;
};

}  // namespace tessera::cli

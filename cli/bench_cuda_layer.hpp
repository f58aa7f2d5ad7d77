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
#include "verify/token_check.hpp"

namespace tessera::cli {

class CudaBenchLayer {
 public:
  CudaBenchLayer(Context const& context, device::Stream const& stream,
                 verify::LayerCase const& layer_case);

  void forward() const;            ///< training: h and the routing tables stay
  void forward_inference() const;  ///< nothing stays

  [[nodiscard]] MoeDesc const& desc() const noexcept { return layer_.desc; }
  [[nodiscard]] std::int64_t routed_rows() const;  ///< R of the last forward()
  [[nodiscard]] std::size_t saved_bytes_total() const;
  [[nodiscard]] std::size_t workspace_bytes_of(bool inference) const;

  /// Runs both on poisoned outputs and compares sampled tokens with an fp64 computation on the host: choice of
  /// experts, scores, h and o. Empty where all is right, else the first thing that is not.
  [[nodiscard]] std::string check() const;

 private:
  std::byte* allocate(std::size_t bytes);
  verify::UniformTensor fill(ConstTensor& tensor, std::initializer_list<std::int64_t> shape,
                             std::uint64_t seed, float scale);
  void give_routing(verify::LayerCase const& layer_case);
  [[nodiscard]] verify::TokenResult token_result(std::int64_t token, bool inference) const;
  [[nodiscard]] std::vector<float> row(Tensor const& tensor, std::int64_t row) const;

  Context const& context_;
  device::Stream const& stream_;
  verify::UniformLayer layer_;
  MoeDesc inference_desc_;
  std::deque<device::Memory> memory_;
  MoeForwardArgs forward_, inference_;
};

}  // namespace tessera::cli

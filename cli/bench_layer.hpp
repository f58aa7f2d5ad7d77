// SPDX-License-Identifier: Apache-2.0
// A layer with all its buffers in place, ready to be timed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/context.hpp"
#include "verify/layer_arguments.hpp"

namespace tessera::cli {

class BenchLayer {
 public:
  BenchLayer(Context const& context, verify::LayerCase const& layer_case);

  /// Overwrites x, dO and the routing with what the case draws from `seed`.
  void redraw(std::uint64_t seed);

  void forward();
  void backward();
  void forward_inference();

  [[nodiscard]] MoeDesc const& desc() const noexcept { return data_.desc; }
  [[nodiscard]] std::int64_t routed_rows() const;  ///< of the last forward
  [[nodiscard]] std::size_t workspace_bytes_of(Pass pass) const;
  [[nodiscard]] std::size_t saved_bytes_total() const;

  /// True if o and all gradients of the last forward and backward equal `expected` bit for bit.
  [[nodiscard]] bool equals(verify::Tensors const& expected);

 private:
  Context const& context_;
  verify::LayerCase case_;
  verify::LayerData data_;
  verify::Memory memory_;
  MoeDesc inference_desc_;
  MoeForwardArgs forward_, inference_;
  MoeBackwardArgs backward_;
};

}  // namespace tessera::cli

// SPDX-License-Identifier: Apache-2.0
// FLOPs and bytes of every op: the one place that states them (formulas: docs/numerics.md).
#pragma once

#include <cstdint>

#include "tessera/shape.hpp"

namespace tessera::work {

/// Work of one op over `rows` routed rows (R); bytes count each array once.
struct OpWork {
  char const* op = "";
  double flops = 0;
  double read_bytes = 0;
  double written_bytes = 0;
  [[nodiscard]] constexpr double bytes() const noexcept { return read_bytes + written_bytes; }
};

namespace detail {
struct Sizes {
  double tokens, hidden, intermediate, experts, rows, width, element, router_element;
};
constexpr Sizes sizes(MoeDesc const& desc, double rows) noexcept {
  return {static_cast<double>(desc.shape.tokens),
          static_cast<double>(desc.shape.hidden),
          static_cast<double>(desc.shape.intermediate),
          static_cast<double>(desc.shape.experts),
          rows,
          static_cast<double>(desc.up_width()),
          static_cast<double>(dtype_bytes(desc.dtype)),
          static_cast<double>(dtype_bytes(desc.router_storage()))};
}
/// Bytes of an element of quantised rows, and of quantised weights, their scales with them; else of the storage type.
constexpr double row_bytes(MoeDesc const& desc) noexcept {
  return desc.quantises() ? 33.0 / 32 : static_cast<double>(dtype_bytes(desc.dtype));
}
constexpr double weight_bytes(MoeDesc const& desc) noexcept {
  return desc.precision == Precision::fp8 ? 1 + 4.0 / (128 * 128) : row_bytes(desc);
}
}  // namespace detail

/// h = x[gather_index] w_up^T, a = act(h). With MoeDesc::quantises() x, w_up, h and a are codes with scales.
constexpr OpWork up_projection_fwd(MoeDesc const& desc, double rows) noexcept {
  auto const s = detail::sizes(desc, rows);
  double const element = detail::row_bytes(desc);
  double const h = desc.save == SavePolicy::h ? element * s.width * s.rows * s.intermediate : 0;
  return {"up_projection_fwd", 2 * s.width * s.rows * s.intermediate * s.hidden,
          element * s.tokens * s.hidden +
              detail::weight_bytes(desc) * s.width * s.experts * s.intermediate * s.hidden +
              4 * s.rows,
          h + element * s.rows * s.intermediate};
}
/// y = a w_down^T. With MoeDesc::quantises() a and w_down are codes with scales.
constexpr OpWork down_projection_fwd(MoeDesc const& desc, double rows) noexcept {
  auto const s = detail::sizes(desc, rows);
  return {"down_projection_fwd", 2 * s.rows * s.intermediate * s.hidden,
          detail::row_bytes(desc) * s.rows * s.intermediate +
              detail::weight_bytes(desc) * s.experts * s.intermediate * s.hidden,
          s.element * s.rows * s.hidden};
}
/// x to x8 with its scales.
constexpr OpWork quantise_rows(MoeDesc const& desc) noexcept {
  auto const s = detail::sizes(desc, 0);
  double const elements = s.tokens * s.hidden;
  return {"quantise_rows", 0, s.element * elements, detail::row_bytes(desc) * elements};
}
/// The weights of all experts to codes with their scales: of both projections, or of the up projection alone.
constexpr OpWork quantise_weights(MoeDesc const& desc, bool down) noexcept {
  auto const s = detail::sizes(desc, 0);
  double const elements = (s.width + (down ? 1 : 0)) * s.experts * s.intermediate * s.hidden;
  return {"quantise_weights", 0, s.element * elements, detail::weight_bytes(desc) * elements};
}
/// x8, which forward saved, to bf16 again.
constexpr OpWork dequantise_rows(MoeDesc const& desc) noexcept {
  auto const s = detail::sizes(desc, 0);
  double const elements = s.tokens * s.hidden;
  return {"dequantise_rows", 0, detail::row_bytes(desc) * elements, s.element * elements};
}
/// o_t = sum of s_j y_j (forward), or dX_t = sum of dx rows (backward: unweighted).
constexpr OpWork aggregate(MoeDesc const& desc, double rows, bool weighted = true) noexcept {
  auto const s = detail::sizes(desc, rows);
  return {"aggregate", (weighted ? 2 : 1) * s.rows * s.hidden,
          s.element * s.rows * s.hidden + (weighted ? 8 : 4) * s.rows,
          s.element * s.tokens * s.hidden};
}
/// dA' = dO[gather_index] w_down; dh, s*a, ds from it.
constexpr OpWork down_projection_dgrad(MoeDesc const& desc, double rows) noexcept {
  auto const s = detail::sizes(desc, rows);
  return {"down_projection_dgrad", 2 * s.rows * s.intermediate * s.hidden,
          s.element * s.tokens * s.hidden + s.element * s.experts * s.intermediate * s.hidden +
              s.element * s.width * s.rows * s.intermediate + 4 * s.rows,
          s.element * (s.width + 1) * s.rows * s.intermediate + 4 * s.rows};
}
/// dw_down[e] = dO_e^T (s*a)_e.
constexpr OpWork down_projection_wgrad(MoeDesc const& desc, double rows) noexcept {
  auto const s = detail::sizes(desc, rows);
  return {"down_projection_wgrad", 2 * s.rows * s.intermediate * s.hidden,
          s.element * s.tokens * s.hidden + s.element * s.rows * s.intermediate,
          s.element * s.experts * s.intermediate * s.hidden};
}
/// dx rows = dh w_up.
constexpr OpWork up_projection_dgrad(MoeDesc const& desc, double rows) noexcept {
  auto const s = detail::sizes(desc, rows);
  return {"up_projection_dgrad", 2 * s.width * s.rows * s.intermediate * s.hidden,
          s.element * s.width * s.rows * s.intermediate +
              s.element * s.width * s.experts * s.intermediate * s.hidden,
          s.element * s.rows * s.hidden};
}
/// dw_up[e] = dh_e^T x_e.
constexpr OpWork up_projection_wgrad(MoeDesc const& desc, double rows) noexcept {
  auto const s = detail::sizes(desc, rows);
  return {"up_projection_wgrad", 2 * s.width * s.rows * s.intermediate * s.hidden,
          s.element * s.tokens * s.hidden + s.element * s.width * s.rows * s.intermediate,
          s.element * s.width * s.experts * s.intermediate * s.hidden};
}
/// logits = x w_router^T, with the selection after it.
constexpr OpWork route(MoeDesc const& desc) noexcept {
  auto const s = detail::sizes(desc, 0);
  return {"route", 2 * s.tokens * s.experts * s.hidden,
          (s.element * s.tokens + s.router_element * s.experts) * s.hidden,
          4 * s.tokens * s.experts};
}
/// ds of every slot from its partial sums, and dlogits from it.
constexpr OpWork router_dlogits(MoeDesc const& desc, double rows) noexcept {
  auto const s = detail::sizes(desc, rows);
  return {"router_dlogits", 0, 12 * s.rows, 4 * s.rows + s.element * s.tokens * s.experts};
}
/// The router's part of dx = dlogits w_router.
constexpr OpWork router_dgrad(MoeDesc const& desc) noexcept {
  auto const s = detail::sizes(desc, 0);
  return {"router_dgrad", 2 * s.tokens * s.experts * s.hidden,
          (s.element * s.tokens + s.router_element * s.hidden) * s.experts,
          s.element * s.tokens * s.hidden};
}
/// dw_router = dlogits^T x.
constexpr OpWork router_wgrad(MoeDesc const& desc) noexcept {
  auto const s = detail::sizes(desc, 0);
  return {"router_wgrad", 2 * s.tokens * s.experts * s.hidden,
          s.element * s.tokens * (s.experts + s.hidden), s.router_element * s.experts * s.hidden};
}

/// GEMM FLOPs of the experts: (2w+2) R n d forward, twice that backward. The router is not counted.
constexpr double forward_flops(MoeDesc const& desc, double rows) noexcept {
  return up_projection_fwd(desc, rows).flops + down_projection_fwd(desc, rows).flops;
}
constexpr double backward_flops(MoeDesc const& desc, double rows) noexcept {
  return 2 * forward_flops(desc, rows);
}

/// Rows computed beyond the routed ones when each expert's M_e is rounded up to `tile`, over R.
template <class Counts>
constexpr double tile_waste(Counts const& rows_per_expert, std::int64_t tile) noexcept {
  std::int64_t padded = 0, rows = 0;
  for (auto const count : rows_per_expert) {
    rows += count;
    padded += (count + tile - 1) / tile * tile;
  }
  return rows == 0 ? 0.0 : static_cast<double>(padded - rows) / static_cast<double>(rows);
}

}  // namespace tessera::work

// SPDX-License-Identifier: Apache-2.0
// quantise.cpp and quantise_weights.cpp share this: the rules of blocks, and places in buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/fp8.hpp"
#include "cpu/parallel/quantise.hpp"
#include "tessera/low_precision.hpp"

namespace tessera::ops {

using cpu::is_mxfp8;

inline Status check_quantising_device(Context const& context) noexcept {
  if (context.device().kind == DeviceKind::cpu) return {};
  return Status::unsupported(
      "quantising on cuda: this version does it on the CPU; call with a context of the CPU");
}

inline Status check_rule(QuantiseBlock block, ScaleRule rule) noexcept {
  if (rule < ScaleRule::fp32 || rule > ScaleRule::floor) {
    return Status::invalid("rule=%d: not a value of its enum; see low_precision.hpp",
                           static_cast<int>(rule));
  }
  if (is_mxfp8(rule) != is_mxfp8(block)) {
    return Status::invalid(
        "rule=%d with block=%d: blocks of 128 have fp32 or pow2 scales, blocks of 32 rceil or "
        "floor; choose one of these",
        static_cast<int>(rule), static_cast<int>(block));
  }
  return {};
}

inline Status check_extent(char const* name, std::int64_t value, std::int64_t multiple) noexcept {
  if (value % multiple == 0) return {};
  using Int = long long;  // for %lld
  return Status::invalid("%s=%lld: blocks need a multiple of %lld; pad it to %lld", name,
                         static_cast<Int>(value), static_cast<Int>(multiple),
                         static_cast<Int>((value / multiple + 1) * multiple));
}

/// The element so far behind `data`; null stays null.
template <class T>
T* place(void* data, std::int64_t element) noexcept {
  return data == nullptr ? nullptr : static_cast<T*>(data) + element;
}

/// Scales that no block has, the padding, are 0.
inline void clear(Tensor const& scales) noexcept {
  std::size_t const bytes = static_cast<std::size_t>(scales.elements()) * dtype_bytes(scales.dtype);
  if (bytes > 0) std::memset(scales.data, 0, bytes);
}

}  // namespace tessera::ops

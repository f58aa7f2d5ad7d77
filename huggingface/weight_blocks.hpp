// SPDX-License-Identifier: Apache-2.0
// The weights of one expert between their logical form, gate and up [n,d] and down [d,n], and the block that a
// WeightLayout stores. Elements are moved as bytes, so every bit survives.
//   gate row i and up row i stand at pi_g(i), pi_u(i): concat i, n+i; up-first n+i, i; interleaved 2i, 2i+1;
//   blocked 2B*(i div B) + i mod B, the same + B. transposed stores [d, 2n], and down as [n, d].
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tessera/shape.hpp"

namespace tessera::huggingface {

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<std::byte const>;

struct BlockShape {
  std::int64_t intermediate = 0;  ///< n
  std::int64_t hidden = 0;        ///< d; 1 for biases
  std::size_t element = 0;        ///< bytes
  [[nodiscard]] std::size_t matrix_bytes() const noexcept {
    return static_cast<std::size_t>(intermediate * hidden) * element;
  }
};

/// gate and up, one matrix each, into the block of 2n rows. `layout` is not separate.
void pack_gate_up(BlockShape const& shape, WeightLayout const& layout, ConstBytes gate,
                  ConstBytes up, Bytes block);

/// The inverse.
void unpack_gate_up(BlockShape const& shape, WeightLayout const& layout, ConstBytes block,
                    Bytes gate, Bytes up);

/// [rows, columns] -> [columns, rows].
void transpose(std::int64_t rows, std::int64_t columns, std::size_t element, ConstBytes from,
               Bytes to);

}  // namespace tessera::huggingface

// SPDX-License-Identifier: Apache-2.0
// Checks of the tensors of one call: shape, type, device, strides, alignment, and that nothing written
// overlaps anything else.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "tessera/status.hpp"
#include "tessera/tensor.hpp"

namespace tessera::core {

/// Collects the tensors of a call; the first broken rule stays in status().
class TensorCheck {
 public:
  explicit TensorCheck(Device device) noexcept : device_(device) {}

  /// A tensor that is read. Requires presence, dtype and shape; the last stride 1, others large enough
  /// that no two elements share an address; 16-byte alignment is not needed on the CPU, that of the
  /// element is.
  void input(char const* name, ConstTensor const& tensor, DType dtype,
             std::initializer_list<std::int64_t> shape) noexcept {
    add(name, tensor, dtype, shape, false);
  }
  /// The same for a tensor that is written.
  void output(char const* name, Tensor const& tensor, DType dtype,
              std::initializer_list<std::int64_t> shape) noexcept {
    add(name, tensor, dtype, shape, true);
  }
  void optional_input(char const* name, ConstTensor const& tensor, DType dtype,
                      std::initializer_list<std::int64_t> shape) noexcept {
    if (tensor.present()) input(name, tensor, dtype, shape);
  }
  void optional_output(char const* name, Tensor const& tensor, DType dtype,
                       std::initializer_list<std::int64_t> shape) noexcept {
    if (tensor.present()) output(name, tensor, dtype, shape);
  }
  /// A tensor that this call does not take.
  void absent(char const* name, ConstTensor const& tensor, char const* reason) noexcept;
  /// Requires the tensor just added to be contiguous.
  void contiguous(char const* name, ConstTensor const& tensor) noexcept;
  /// Raw memory of at least `bytes`, aligned to `alignment`.
  void buffer(char const* name, ConstBuffer const& buffer, std::size_t bytes, std::size_t alignment,
              bool written) noexcept;

  /// After all tensors were added: the first broken rule, or overlap of a written range with any other.
  [[nodiscard]] Status finish() noexcept;

  void fail(Status const& status) noexcept {
    if (status_.ok()) status_ = status;
  }

 private:
  struct Range {
    char const* name;
    std::uintptr_t begin, end;
    bool written;
  };
  static constexpr int kMaxRanges = 40;

  void add(char const* name, ConstTensor const& tensor, DType dtype,
           std::initializer_list<std::int64_t> shape, bool written) noexcept;
  void add_range(char const* name, void const* data, std::size_t bytes, bool written) noexcept;

  Device device_;
  Status status_;
  Range ranges_[kMaxRanges];
  int num_ranges_ = 0;
};

}  // namespace tessera::core

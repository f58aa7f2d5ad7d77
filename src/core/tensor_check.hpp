// SPDX-License-Identifier: Apache-2.0
// Checks of the tensors of one call: shape, type, device, strides, alignment, and that nothing written
// overlaps anything else.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "tessera/status.hpp"
#include "tessera/tensor.hpp"

namespace tessera::core {

/// Says how a call uses a tensor. An optional one may be absent.
enum class Role : std::uint8_t { input, optional_input, output, optional_output };

/// A call lists its tensors to a visitor, each once, under the name that its caller knows (ops/tensors.hpp).
/// TensorCheck is one; others do what has to be done with all tensors of a call.
class TensorVisitor {
 public:
  virtual void visit(char const* name, ConstTensor const& tensor, Role role, DType dtype,
                     std::initializer_list<std::int64_t> shape) noexcept = 0;
  /// A tensor that this call does not take.
  virtual void absent(char const* name, ConstTensor const& tensor, char const* reason) noexcept = 0;
  /// The tensor just visited has to be contiguous.
  virtual void contiguous(char const* name, ConstTensor const& tensor) noexcept = 0;
  /// Raw memory of at least `bytes`, aligned to `alignment`.
  virtual void buffer(char const* name, ConstBuffer const& buffer, std::size_t bytes,
                      std::size_t alignment, bool written) noexcept = 0;
  /// A rule is broken that no tensor breaks alone.
  virtual void fail(Status const& status) noexcept = 0;

  void input(char const* name, ConstTensor const& tensor, DType dtype,
             std::initializer_list<std::int64_t> shape) noexcept {
    visit(name, tensor, Role::input, dtype, shape);
  }
  void output(char const* name, Tensor const& tensor, DType dtype,
              std::initializer_list<std::int64_t> shape) noexcept {
    visit(name, tensor, Role::output, dtype, shape);
  }
  void optional_input(char const* name, ConstTensor const& tensor, DType dtype,
                      std::initializer_list<std::int64_t> shape) noexcept {
    visit(name, tensor, Role::optional_input, dtype, shape);
  }
  void optional_output(char const* name, Tensor const& tensor, DType dtype,
                       std::initializer_list<std::int64_t> shape) noexcept {
    visit(name, tensor, Role::optional_output, dtype, shape);
  }

 protected:
  ~TensorVisitor() = default;
};

/// Collects the tensors of a call; the first broken rule stays in status(). A tensor has to be there, unless its role
/// is optional, with dtype and shape; its last stride is 1, others are large enough that no two elements share an
/// address; it is aligned to its element, not to 16 bytes.
class TensorCheck final : public TensorVisitor {
 public:
  explicit TensorCheck(Device device) noexcept : device_(device) {}

  void visit(char const* name, ConstTensor const& tensor, Role role, DType dtype,
             std::initializer_list<std::int64_t> shape) noexcept override;
  void absent(char const* name, ConstTensor const& tensor, char const* reason) noexcept override;
  void contiguous(char const* name, ConstTensor const& tensor) noexcept override;
  void buffer(char const* name, ConstBuffer const& buffer, std::size_t bytes, std::size_t alignment,
              bool written) noexcept override;
  void fail(Status const& status) noexcept override {
    if (status_.ok()) status_ = status;
  }

  /// After all tensors were added: the first broken rule, or overlap of a written range with any other.
  [[nodiscard]] Status finish() noexcept;

 private:
  struct Range {
    char const* name;
    std::uintptr_t begin, end;
    bool written;
  };
  static constexpr int kMaxRanges = 40;

  void add_range(char const* name, void const* data, std::size_t bytes, bool written) noexcept;

  Device device_;
  Status status_;
  Range ranges_[kMaxRanges];
  int num_ranges_ = 0;
};

}  // namespace tessera::core

// SPDX-License-Identifier: Apache-2.0
// Views of memory that the caller owns: pointer, element type, device, shape, strides in elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace tessera {

/// Element types. The numbers are part of the C ABI.
/// uint8 is that of masks: 0 false, any other value true.
enum class DType : std::int32_t {
  none = 0,
  fp32 = 1,
  bf16 = 2,
  fp16 = 3,
  int32 = 4,
  int64 = 5,
  uint8 = 6,
  fp8_e4m3 = 7,  ///< 4 exponent, 3 mantissa bits, largest value 448, no infinity
  e8m0 = 8,      ///< scales of mxfp8: 2^(byte - 127), 255 is NaN
};

/// Bytes per element; 0 for DType::none and unknown values.
constexpr std::size_t dtype_bytes(DType dtype) noexcept {
  switch (dtype) {
    case DType::fp32:
    case DType::int32:
      return 4;
    case DType::bf16:
    case DType::fp16:
      return 2;
    case DType::int64:
      return 8;
    case DType::uint8:
    case DType::fp8_e4m3:
    case DType::e8m0:
      return 1;
    case DType::none:
      break;
  }
  return 0;
}

/// Says where a tensor's memory lives. The numbers are part of the C ABI.
enum class DeviceKind : std::int32_t { cpu = 0, cuda = 1 };
struct Device {
  DeviceKind kind = DeviceKind::cpu;
  std::int32_t index = 0;
  bool operator==(Device const&) const = default;
};

inline constexpr int kMaxRank = 4;

/// A view; `Pointer` is void* (written by the call) or void const* (only read).
/// A default-made view is *absent*: how optional tensors are left out.
template <class Pointer>
struct BasicTensor {
  Pointer data = nullptr;
  DType dtype = DType::none;
  Device device = {};
  std::int32_t rank = 0;
  std::int64_t shape[kMaxRank] = {};
  std::int64_t stride[kMaxRank] = {};  ///< in elements; the last one must be 1

  /// Present, even where it has no elements (T = 0 has a null pointer but a rank).
  [[nodiscard]] constexpr bool present() const noexcept { return rank != 0; }
  [[nodiscard]] constexpr std::int64_t elements() const noexcept {
    std::int64_t product = rank == 0 ? 0 : 1;
    for (int axis = 0; axis < rank; ++axis) product *= shape[axis];
    return product;
  }
};

struct Tensor : BasicTensor<void*> {};

struct ConstTensor : BasicTensor<void const*> {
  ConstTensor() = default;
  ConstTensor(Tensor const& other) noexcept  // a writable view can always be read
  {
    data = other.data;
    dtype = other.dtype;
    device = other.device;
    rank = other.rank;
    for (int axis = 0; axis < kMaxRank; ++axis) {
      shape[axis] = other.shape[axis];
      stride[axis] = other.stride[axis];
    }
  }
};

namespace detail {
template <class View, class Pointer>
constexpr View make_view(Pointer data, DType dtype, std::initializer_list<std::int64_t> shape,
                         Device device) noexcept {
  View view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  for (std::int64_t extent : shape) {
    if (view.rank == kMaxRank) break;
    view.shape[view.rank++] = extent;
  }
  std::int64_t stride = 1;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    view.stride[axis] = stride;
    stride *= view.shape[axis];
  }
  return view;
}
template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::fp32;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::int32;
};
template <>
struct DTypeOf<std::int64_t> {
  static constexpr DType value = DType::int64;
};
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = DType::uint8;
};
}  // namespace detail

/// A contiguous view of `data` with the given shape, e.g. `tensor(x.data(), {T, d})`.
template <class T>
Tensor tensor(T* data, std::initializer_list<std::int64_t> shape, Device device = {}) noexcept {
  return detail::make_view<Tensor, void*>(data, detail::DTypeOf<T>::value, shape, device);
}
template <class T>
ConstTensor tensor(T const* data, std::initializer_list<std::int64_t> shape,
                   Device device = {}) noexcept {
  return detail::make_view<ConstTensor, void const*>(data, detail::DTypeOf<T>::value, shape,
                                                     device);
}
/// The same for types without a C++ counterpart (bf16, fp16).
inline Tensor tensor(void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                     Device device = {}) noexcept {
  return detail::make_view<Tensor, void*>(data, dtype, shape, device);
}
inline ConstTensor tensor(void const* data, DType dtype, std::initializer_list<std::int64_t> shape,
                          Device device = {}) noexcept {
  return detail::make_view<ConstTensor, void const*>(data, dtype, shape, device);
}

/// Raw bytes owned by the caller (workspace, saved routing tables).
struct Buffer {
  void* data = nullptr;
  std::size_t bytes = 0;
};
struct ConstBuffer {
  void const* data = nullptr;
  std::size_t bytes = 0;
  ConstBuffer() = default;
  ConstBuffer(void const* data_, std::size_t bytes_) noexcept : data(data_), bytes(bytes_) {}
  ConstBuffer(Buffer const& other) noexcept : data(other.data), bytes(other.bytes) {}
};

}  // namespace tessera

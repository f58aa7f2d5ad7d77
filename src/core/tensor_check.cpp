// SPDX-License-Identifier: Apache-2.0
#include "core/tensor_check.hpp"

#include <algorithm>
#include <cstdio>
#include <limits>

#include "core/dtype_name.hpp"

namespace tessera::core {
namespace {

using Int = long long;  // for %lld

/// "cpu", or "cuda:1".
struct DeviceText {
  char text[24];
};

DeviceText device_text(Device device) noexcept {
  DeviceText out;
  if (device.kind == DeviceKind::cpu) {
    std::snprintf(out.text, sizeof(out.text), "cpu");
  } else {
    std::snprintf(out.text, sizeof(out.text), "cuda:%d", device.index);
  }
  return out;
}

struct ShapeText {
  char text[96];
};

ShapeText shape_text(std::int64_t const* shape, int rank) noexcept {
  ShapeText out;
  int at = std::snprintf(out.text, sizeof(out.text), "[");
  for (int axis = 0; axis < rank && at < static_cast<int>(sizeof(out.text)) - 24; ++axis) {
    at += std::snprintf(out.text + at, sizeof(out.text) - static_cast<std::size_t>(at), "%s%lld",
                        axis == 0 ? "" : ",", static_cast<Int>(shape[axis]));
  }
  std::snprintf(out.text + at, sizeof(out.text) - static_cast<std::size_t>(at), "]");
  return out;
}

/// Elements from the first to one past the last, or -1 where that leaves int64.
std::int64_t extent(ConstTensor const& tensor) noexcept {
  std::int64_t last = 0;
  for (int axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.shape[axis] == 0) return 0;
    std::int64_t step = 0;
    if (__builtin_mul_overflow(tensor.shape[axis] - 1, tensor.stride[axis], &step) ||
        __builtin_add_overflow(last, step, &last)) {
      return -1;
    }
  }
  return last < std::numeric_limits<std::int64_t>::max() / 16 ? last + 1 : -1;
}

bool has_shape(ConstTensor const& tensor, std::initializer_list<std::int64_t> shape) noexcept {
  return tensor.rank == static_cast<int>(shape.size()) &&
         std::equal(shape.begin(), shape.end(), tensor.shape);
}

/// Says so of a tensor that has another shape: apart, as nothing is printed for one that has the right one.
Status wrong_shape(char const* name, ConstTensor const& tensor,
                   std::initializer_list<std::int64_t> shape) noexcept {
  auto const wanted = shape_text(shape.begin(), static_cast<int>(shape.size()));
  if (tensor.rank != static_cast<int>(shape.size())) {
    return Status::invalid("%s: rank %d; shape %s is needed", name, tensor.rank, wanted.text);
  }
  return Status::invalid("%s: shape %s; %s is needed", name,
                         shape_text(tensor.shape, tensor.rank).text, wanted.text);
}

bool is_empty(ConstTensor const& tensor) noexcept {
  auto const* const end = tensor.shape + tensor.rank;
  return std::find(tensor.shape, end, 0) != end;
}

Status check_strides(char const* name, ConstTensor const& tensor) noexcept {
  // Extents of 1 make a stride meaningless, one of 0 all of them; any value is accepted there.
  if (is_empty(tensor)) return {};
  std::int64_t inner = 1;
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    if (tensor.shape[axis] <= 1) continue;
    std::int64_t const stride = tensor.stride[axis];
    bool const last = axis == tensor.rank - 1;
    if (last ? stride != 1 : stride < inner) {
      return Status::invalid(
          "%s: stride %lld of dimension %d; %s %lld is needed; make it contiguous", name,
          static_cast<Int>(stride), axis, last ? "exactly" : "at least", static_cast<Int>(inner));
    }
    if (__builtin_mul_overflow(stride, tensor.shape[axis], &inner)) {
      return Status::invalid("%s: strides reach beyond 2^63 elements", name);
    }
  }
  return {};
}

Status check_tensor(char const* name, ConstTensor const& tensor, DType dtype,
                    std::initializer_list<std::int64_t> shape, Device device) noexcept {
  if (!tensor.present()) return Status::invalid("%s: missing; this call needs it", name);
  if (tensor.dtype != dtype) {
    return Status::invalid("%s: dtype %s; %s is needed", name, dtype_name(tensor.dtype),
                           dtype_name(dtype));
  }
  if (!(tensor.device == device)) {
    return Status::invalid(
        "%s: on %s, but the call's context is on %s; all of a call is on one device: move "
        "it there, or call with a context of the tensors' device",
        name, device_text(tensor.device).text, device_text(device).text);
  }
  if (!has_shape(tensor, shape)) return wrong_shape(name, tensor, shape);
  TESSERA_TRY(check_strides(name, tensor));
  std::int64_t const elements = extent(tensor);
  if (elements < 0) return Status::invalid("%s: spans more than 2^59 elements", name);
  if (elements > 0 && tensor.data == nullptr) {
    return Status::invalid("%s: null pointer with shape %s", name,
                           shape_text(tensor.shape, tensor.rank).text);
  }
  auto const address = reinterpret_cast<std::uintptr_t>(tensor.data);
  if (elements > 0 && address % dtype_bytes(dtype) != 0) {
    return Status::invalid("%s: address %p; a multiple of %zu bytes is needed", name, tensor.data,
                           dtype_bytes(dtype));
  }
  if (elements > 0 && address > std::numeric_limits<std::uintptr_t>::max() -
                                    static_cast<std::uintptr_t>(elements) * dtype_bytes(dtype)) {
    return Status::invalid("%s: address %p and shape %s leave the address space", name, tensor.data,
                           shape_text(tensor.shape, tensor.rank).text);
  }
  return {};
}

}  // namespace

void TensorCheck::visit(char const* name, ConstTensor const& tensor, Role role, DType dtype,
                        std::initializer_list<std::int64_t> shape) noexcept {
  bool const optional = role == Role::optional_input || role == Role::optional_output;
  bool const written = role == Role::output || role == Role::optional_output;
  if (!status_.ok() || (optional && !tensor.present())) return;
  status_ = check_tensor(name, tensor, dtype, shape, device_);
  if (status_.ok()) {
    add_range(name, tensor.data, static_cast<std::size_t>(extent(tensor)) * dtype_bytes(dtype),
              written);
  }
}

void TensorCheck::absent(char const* name, ConstTensor const& tensor, char const* reason) noexcept {
  if (status_.ok() && tensor.present()) {
    status_ = Status::invalid("%s: given, but %s; leave it out", name, reason);
  }
}

void TensorCheck::contiguous(char const* name, ConstTensor const& tensor) noexcept {
  if (!status_.ok() || is_empty(tensor)) return;
  std::int64_t inner = 1;
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    if (tensor.shape[axis] > 1 && tensor.stride[axis] != inner) {
      status_ = Status::invalid("%s: stride %lld of dimension %d; it must be contiguous", name,
                                static_cast<Int>(tensor.stride[axis]), axis);
      return;
    }
    inner *= tensor.shape[axis];
  }
}

void TensorCheck::buffer(char const* name, ConstBuffer const& buffer, std::size_t bytes,
                         std::size_t alignment, bool written) noexcept {
  if (!status_.ok()) return;
  if (buffer.bytes < bytes) {
    status_ = Status::invalid("%s: %zu bytes; at least %zu are needed", name, buffer.bytes, bytes);
  } else if (bytes > 0 && buffer.data == nullptr) {
    status_ = Status::invalid("%s: null pointer; %zu bytes are needed", name, bytes);
  } else if (bytes > 0 && reinterpret_cast<std::uintptr_t>(buffer.data) % alignment != 0) {
    status_ = Status::invalid("%s: address %p; a multiple of %zu bytes is needed", name,
                              buffer.data, alignment);
  } else {
    add_range(name, buffer.data, bytes, written);
  }
}

void TensorCheck::add_range(char const* name, void const* data, std::size_t bytes,
                            bool written) noexcept {
  if (bytes == 0) return;
  if (num_ranges_ == kMaxRanges) {
    status_ = Status::error(StatusCode::internal, "TensorCheck: more than %d tensors", kMaxRanges);
    return;
  }
  auto const begin = reinterpret_cast<std::uintptr_t>(data);
  ranges_[num_ranges_++] = {name, begin, begin + bytes, written};
}

Status TensorCheck::finish() noexcept {
  for (int i = 0; i < num_ranges_ && status_.ok(); ++i) {
    for (int j = 0; j < i && status_.ok(); ++j) {
      Range const &a = ranges_[j], &b = ranges_[i];
      if ((a.written || b.written) && a.begin < b.end && b.begin < a.end) {
        status_ = Status::invalid("%s and %s overlap, and %s is written; give each its own memory",
                                  a.name, b.name, b.written ? b.name : a.name);
      }
    }
  }
  return status_;
}

}  // namespace tessera::core

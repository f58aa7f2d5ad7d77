// SPDX-License-Identifier: Apache-2.0
// The files of the C ABI share this: the error of a thread, structs of older and newer callers, tensors.
#pragma once

#include <cstdint>
#include <cstring>

#include "tessera/tessera.h"
#include "tessera/tessera.hpp"

#define TESSERA_C_API extern "C" TESSERA_EXPORT

struct tessera_context {
  tessera::Context context;
};

namespace tessera::capi {

inline thread_local char last_error[Status::kTextBytes] = "";

inline int finish(Status const& status) noexcept {
  std::memcpy(last_error, status.text(), std::strlen(status.text()) + 1);
  return static_cast<int>(status.code());
}

/// A struct as an older or newer caller knew it: fields it did not know read as 0. Fields newer than this
/// library must be 0, or the caller asks for something this library cannot know.
template <class Struct>
Status read_struct(char const* name, Struct const* from, Struct& out) noexcept {
  std::memset(static_cast<void*>(&out), 0, sizeof(Struct));
  if (from == nullptr) return Status::invalid("%s: null pointer", name);
  std::uint64_t const size = from->size;
  if (size < sizeof(std::uint64_t) || size > 65536) {
    return Status::invalid("%s.size=%llu: set it to sizeof(%s)", name,
                           static_cast<unsigned long long>(size), name);
  }
  auto const* const bytes = reinterpret_cast<unsigned char const*>(from);
  for (std::uint64_t i = sizeof(Struct); i < size; ++i) {
    if (bytes[i] != 0) {
      return Status::unsupported(
          "%s: a field beyond this library's version is set; update libtessera", name);
    }
  }
  std::memcpy(static_cast<void*>(&out), from, size < sizeof(Struct) ? size : sizeof(Struct));
  return {};
}

/// The same without a copy of a struct that is as long as this library's. out: the caller's, or `room`, which is read
/// then.
template <class Struct>
Status read_struct(char const* name, Struct const* from, Struct& room,
                   Struct const*& out) noexcept {
  bool const same = from != nullptr && from->size == sizeof(Struct);
  out = same ? from : &room;
  return same ? Status() : read_struct(name, from, room);
}

/// Most tensors of a call are absent: of these nothing else is read.
inline Tensor tensor_of(tessera_tensor const& from) noexcept {
  Tensor tensor;
  if (from.rank == 0) return tensor;
  tensor.data = from.data;
  tensor.dtype = static_cast<DType>(from.dtype);
  tensor.device = {static_cast<DeviceKind>(from.device_kind), from.device_index};
  tensor.rank = from.rank;
  for (int axis = 0; axis < kMaxRank; ++axis) {
    tensor.shape[axis] = from.shape[axis];
    tensor.stride[axis] = from.stride[axis];
  }
  return tensor;
}

/// The same into a view that is absent.
template <class View>
void set(View& out, tessera_tensor const& from) noexcept {
  if (from.rank != 0) out = tensor_of(from);
}

inline Buffer buffer_of(tessera_buffer const& from) noexcept { return {from.data, from.bytes}; }

// 0 stands for the defaults: those of tessera.h for clamped_swiglu, none of the three for an activation that has none.
inline Activation activation_of(std::int32_t kind, float alpha, float limit,
                                float up_offset) noexcept {
  bool const clamped = static_cast<ActivationKind>(kind) == ActivationKind::clamped_swiglu;
  if (!clamped && alpha == 0 && limit == 0 && up_offset == 0) {
    return {.kind = static_cast<ActivationKind>(kind)};
  }
  return {static_cast<ActivationKind>(kind), alpha == 0 ? 1.0f : alpha,
          limit == 0 ? __builtin_huge_valf() : limit, up_offset};
}

/// Reads the structs of a layer (tessera.cpp).
Status moe_desc_of(tessera_moe_desc const* desc, MoeDesc& out) noexcept;
Status backward_args_of(tessera_backward_args const* c_args, MoeBackwardArgs& args) noexcept;

inline Status check_context(tessera_context const* context) noexcept {
  return context == nullptr ? Status::invalid("context: null pointer; call tessera_context_create")
                            : Status();
}

}  // namespace tessera::capi

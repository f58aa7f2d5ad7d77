// SPDX-License-Identifier: Apache-2.0
#include "verify/memory.hpp"

#include <algorithm>
#include <cstring>

#include "verify/storage.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(address, size) static_cast<void>(0)
#endif

namespace tessera::verify {
namespace {

constexpr std::size_t kGuardBytes = 64;
constexpr std::size_t kCacheLine = 64;
constexpr std::byte kCanary{0xc5};
constexpr std::size_t kFilledAtOnce = 16384;  // stays in the processor's first cache

std::size_t allocated_bytes(std::size_t bytes) { return bytes + 2 * kGuardBytes + 2 * kCacheLine; }

}  // namespace

GuardedBuffer::GuardedBuffer(std::size_t bytes, std::uint32_t poison, Alignment alignment,
                             Device device)
    : bytes_(bytes), poison_(poison) {
  if (device.kind == DeviceKind::cuda) {
    device_memory_ = device::allocate(device.index, allocated_bytes(bytes), device::Kind::managed);
    memory_ = device_memory_.get();
  } else {
    host_memory_.reset(new std::byte[allocated_bytes(bytes)]);
    memory_ = host_memory_.get();
  }
  auto const start = reinterpret_cast<std::uintptr_t>(memory_) + kGuardBytes;
  std::size_t const to_line = (kCacheLine - start % kCacheLine) % kCacheLine;
  data_ = memory_ + kGuardBytes + to_line + (alignment == Alignment::element ? 8 : 0);
  std::fill_n(data_ - kGuardBytes, kGuardBytes, kCanary);
  std::fill_n(data_ + bytes_, kGuardBytes, kCanary);
  fill(poison_);
  ASAN_POISON_MEMORY_REGION(data_ - kGuardBytes, kGuardBytes);
  ASAN_POISON_MEMORY_REGION(data_ + bytes_, kGuardBytes);
}

GuardedBuffer::~GuardedBuffer() {
  ASAN_UNPOISON_MEMORY_REGION(memory_, allocated_bytes(bytes_));
  fill(poison_);
}

void GuardedBuffer::fill(std::uint32_t word) noexcept {
  // The beginning is copied behind itself: four bytes at a time took 15 to 96% of the time of a verification.
  std::size_t written = std::min(sizeof(word), bytes_);
  std::memcpy(data(), &word, written);
  while (written < bytes_) {
    std::size_t const more = std::min({written, bytes_ - written, kFilledAtOnce});
    std::memcpy(data() + written, data(), more);
    written += more;
  }
}

void GuardedBuffer::seal() noexcept {
  sealed_ = true;
  checksum_ = checksum();
}

std::uint64_t GuardedBuffer::checksum() const noexcept {
  std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a over words
  for (std::size_t at = 0; at < bytes_; at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, data() + at, std::min(sizeof(word), bytes_ - at));
    hash = (hash ^ word) * 0x100000001b3u;
    hash ^= hash >> 29;
  }
  return hash;
}

bool GuardedBuffer::intact() const noexcept {
  ASAN_UNPOISON_MEMORY_REGION(memory_, allocated_bytes(bytes_));
  auto const untouched = [](std::byte const* guard) {
    return std::all_of(guard, guard + kGuardBytes, [](std::byte b) { return b == kCanary; });
  };
  bool const guarded = untouched(data_ - kGuardBytes) && untouched(data_ + bytes_);
  ASAN_POISON_MEMORY_REGION(data_ - kGuardBytes, kGuardBytes);
  ASAN_POISON_MEMORY_REGION(data_ + bytes_, kGuardBytes);
  return guarded && (!sealed_ || checksum() == checksum_);
}

Tensor Memory::output(DType dtype, std::vector<std::int64_t> const& shape) {
  Tensor view;
  view.dtype = dtype;
  view.device = device_;
  view.rank = static_cast<std::int32_t>(shape.size());
  std::int64_t stride = 1;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    view.shape[axis] = shape[axis];
    view.stride[axis] = stride;
    stride *= shape[axis];
  }
  view.data = buffer(static_cast<std::size_t>(stride) * dtype_bytes(dtype)).data;
  return view;
}

ConstTensor Memory::input(DType dtype, std::vector<std::int64_t> const& shape,
                          std::span<float const> values) {
  Tensor const view = output(dtype, shape);
  pack(dtype, values, view.data);
  seal_last();
  return view;
}

ConstTensor Memory::input_ids(DType dtype, std::vector<std::int64_t> const& shape,
                              std::span<std::int64_t const> values) {
  Tensor const view = output(dtype, shape);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::int64) {
      static_cast<std::int64_t*>(view.data)[i] = values[i];
    } else {
      static_cast<std::int32_t*>(view.data)[i] = static_cast<std::int32_t>(values[i]);
    }
  }
  seal_last();
  return view;
}

ConstTensor Memory::input_mask(std::span<std::uint8_t const> values) {
  Tensor const view = output(DType::uint8, {std::ssize(values)});
  std::copy(values.begin(), values.end(), static_cast<std::uint8_t*>(view.data));
  seal_last();
  return view;
}

Buffer Memory::buffer(std::size_t bytes) {
  GuardedBuffer const& added = buffers_.emplace_back(bytes, poison_, alignment_, device_);
  return {added.data(), bytes};
}

bool Memory::intact() const noexcept {
  return std::all_of(buffers_.begin(), buffers_.end(),
                     [](GuardedBuffer const& buffer) { return buffer.intact(); });
}

std::size_t Memory::bytes() const noexcept {
  std::size_t sum = 0;
  for (GuardedBuffer const& buffer : buffers_) sum += buffer.bytes();
  return sum;
}

}  // namespace tessera::verify

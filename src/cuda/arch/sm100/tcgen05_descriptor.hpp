// SPDX-License-Identifier: Apache-2.0
// The two words that say to tcgen05 what it multiplies, as types with named fields: the instruction descriptor (shape,
// formats, majors) and the descriptor of an operand in shared memory (where it lies, how it is laid out). Plain C++,
// so that the emulator (tests/emulator/sm100) decodes the very bits that a GPU would. Source: PTX ISA, tcgen05.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif

namespace tessera::cuda::arch {

// An operand is contiguous along k, or along its rows (M of A, N of B).
enum class MmaMajor : uint32_t { kK = 0, kRows = 1 };

// Formats of 8-bit operands.
enum class MmaFormat8 : uint32_t { kE4m3 = 0, kE5m2 = 1 };

// D(m x n, fp32) = or += A(m x 16) * B(n x 16)^T, both bf16. m = 128, or 256 by two CTAs; n a multiple of 16 to 256.
struct Bf16Mma {
  int m, n;
  MmaMajor a_major = MmaMajor::kK, b_major = MmaMajor::kK;
  TESSERA_HOST_DEVICE constexpr uint32_t bits() const {
    constexpr uint32_t kFp32 = 1, kBf16 = 1;
    return kFp32 << 4 | kBf16 << 7 | kBf16 << 10 | static_cast<uint32_t>(a_major) << 15 |
           static_cast<uint32_t>(b_major) << 16 | static_cast<uint32_t>(n / 8) << 17 |
           static_cast<uint32_t>(m / 16) << 24;
  }
};

// The same of 8-bit operands with a scale 2^(e-127) for every 32 k of a row: A(m x 32), B(n x 32). The scales of four
// consecutive steps of k are the bytes of a 32-bit cell of tensor memory: a_scale_byte and b_scale_byte name theirs.
struct Mxf8Mma {
  int m, n;
  int a_scale_byte = 0, b_scale_byte = 0;
  MmaFormat8 a_format = MmaFormat8::kE4m3, b_format = MmaFormat8::kE4m3;
  MmaMajor a_major = MmaMajor::kK, b_major = MmaMajor::kK;
  TESSERA_HOST_DEVICE constexpr uint32_t bits() const {
    constexpr uint32_t kUe8m0 = 1;
    return static_cast<uint32_t>(b_scale_byte) << 4 | static_cast<uint32_t>(a_format) << 7 |
           static_cast<uint32_t>(b_format) << 10 | static_cast<uint32_t>(a_major) << 15 |
           static_cast<uint32_t>(b_major) << 16 | static_cast<uint32_t>(n / 8) << 17 |
           kUe8m0 << 23 | static_cast<uint32_t>(m / 16) << 24 |
           static_cast<uint32_t>(a_scale_byte) << 29;
  }
};

// The swizzle exchanges 16-byte chunks inside rows of so many bytes. With 128: chunk c of row r lies at c ^ r % 8.
enum class MmaSwizzle : uint32_t { kNone = 0, k128 = 2, k64 = 4, k32 = 6 };

// An operand in shared memory. Eight rows (K-major) or eight k (rows-major) of one swizzle row are a group:
//   K-major     stride_bytes to the next group of 8 rows; leading_bytes is read without swizzle alone: to the next 16
//               bytes of k
//   rows-major  stride_bytes to the next 8 k; leading_bytes to the next 128 bytes of rows
// A step of k adds its bytes to the address (plus()).
struct MmaOperand {
  uint32_t address;  // in shared memory; a multiple of 1024 with a swizzle
  uint32_t leading_bytes = 16, stride_bytes = 1024;
  MmaSwizzle swizzle = MmaSwizzle::k128;
  TESSERA_HOST_DEVICE constexpr uint64_t bits() const {
    constexpr uint64_t kVersion = 1;
    return uint64_t{(address & 0x3ffff) >> 4} | uint64_t{leading_bytes >> 4} << 16 |
           uint64_t{stride_bytes >> 4} << 32 | kVersion << 46 |
           static_cast<uint64_t>(swizzle) << 61;
  }
};

// The descriptor of what lies `bytes` further on. No carry leaves the address: shared memory ends before.
TESSERA_HOST_DEVICE constexpr uint64_t plus(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

// Tiles as TMA brings them, with the 128-byte swizzle. K-major: rows of 128 bytes. Rows-major: boxes of 128 bytes of
// rows x 64 k, 8192 bytes each.
TESSERA_HOST_DEVICE constexpr MmaOperand k_major_tile(uint32_t address) { return {address}; }
TESSERA_HOST_DEVICE constexpr MmaOperand rows_major_boxes(uint32_t address) {
  return {.address = address, .leading_bytes = 8192};
}
// From one multiplication to the next, of such tiles in bf16.
constexpr uint32_t kKMajorStepBytes = 32, kRowsMajorStepBytes = 2048;
// 128 rows x 4 scales, packed as tcgen05.cp takes them (tcgen05_cp.cuh).
TESSERA_HOST_DEVICE constexpr MmaOperand scale_atom(uint32_t address) {
  return {.address = address, .stride_bytes = 128, .swizzle = MmaSwizzle::kNone};
}

// An address of tensor memory is lane << 16 | column; there are 128 lanes and 512 columns of 32 bits in a CTA.
constexpr int kTensorLanes = 128, kTensorColumns = 512;
TESSERA_HOST_DEVICE constexpr uint32_t tensor_lane(int lane) {
  return static_cast<uint32_t>(lane) << 16;
}

}  // namespace tessera::cuda::arch

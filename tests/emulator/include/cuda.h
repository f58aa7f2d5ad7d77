// SPDX-License-Identifier: Apache-2.0
// A tensor map as what it says; contexts as what a test makes of them.
#pragma once

#include <cstdint>

using CUresult = int;
constexpr CUresult CUDA_SUCCESS = 0;
using CUdevice = int;
using CUcontext = struct CUctx_st*;
using cuuint32_t = std::uint32_t;
using cuuint64_t = std::uint64_t;

struct alignas(64) CUtensorMap {
  std::uint32_t rank = 0;
  std::uint32_t element_bytes = 0;
  std::uint64_t base = 0;
  std::uint64_t extent[5] = {};
  std::uint64_t stride_bytes[5] = {};  // of every dimension
  std::uint32_t box[5] = {};
};

enum CUstreamCaptureMode { CU_STREAM_CAPTURE_MODE_GLOBAL = 0, CU_STREAM_CAPTURE_MODE_RELAXED = 2 };

enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_UINT8,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

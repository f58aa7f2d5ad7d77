// SPDX-License-Identifier: Apache-2.0
// What launchers ask CUDA's driver for, and what makes a context current: there is one, of one device.
#include <cstring>
#include <utility>

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

namespace {

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* gmem,
                cuuint64_t const* extent, cuuint64_t const* stride_bytes, cuuint32_t const* box,
                cuuint32_t const*, CUtensorMapInterleave, CUtensorMapSwizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  *map = {};
  map->rank = rank;
  map->element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32    ? 4
                       : type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2
                                                                  : 1;
  map->base = reinterpret_cast<std::uint64_t>(gmem);
  for (cuuint32_t i = 0; i < 5; ++i) {
    map->extent[i] = i < rank ? extent[i] : 1;
    map->box[i] = i < rank ? box[i] : 1;
    map->stride_bytes[i] = i == 0 ? map->element_bytes : i < rank ? stride_bytes[i - 1] : 0;
    if (i > 0 && i < rank && map->stride_bytes[i] % 16 != 0) return 1;
  }
  return map->base % 16 == 0 && map->box[0] * map->element_bytes <= 128 ? CUDA_SUCCESS : 1;
}

CUresult context_id(CUcontext, unsigned long long* id) {
  *id = 1;
  return CUDA_SUCCESS;
}

CUresult init(unsigned) { return CUDA_SUCCESS; }
CUresult device_get(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult retain(CUcontext* context, CUdevice) {
  static char place;
  *context = reinterpret_cast<CUcontext>(&place);
  return CUDA_SUCCESS;
}
CUresult get_current(CUcontext* context) {
  *context = nullptr;
  return CUDA_SUCCESS;
}
CUresult set_current(CUcontext) { return CUDA_SUCCESS; }
CUresult get_device(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}

}  // namespace

cudaError_t cudaGetDriverEntryPointByVersion(char const* name, void** entry, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  std::pair<char const*, void*> const functions[] = {
      {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(&encode)},
      {"cuCtxGetId", reinterpret_cast<void*>(&context_id)},
      {"cuInit", reinterpret_cast<void*>(&init)},
      {"cuDeviceGet", reinterpret_cast<void*>(&device_get)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(&retain)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(&get_current)},
      {"cuCtxSetCurrent", reinterpret_cast<void*>(&set_current)},
      {"cuCtxGetDevice", reinterpret_cast<void*>(&get_device)}};
  *entry = nullptr;
  for (auto const& [known, function] : functions) {
    if (std::strcmp(known, name) == 0) *entry = function;
  }
  *found = *entry != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointNotFound;
  return cudaSuccess;
}

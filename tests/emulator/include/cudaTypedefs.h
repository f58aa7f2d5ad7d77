// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

using PFN_cuTensorMapEncodeTiled_v12000 = CUresult (*)(CUtensorMap*, CUtensorMapDataType,
                                                       cuuint32_t, void*, cuuint64_t const*,
                                                       cuuint64_t const*, cuuint32_t const*,
                                                       cuuint32_t const*, CUtensorMapInterleave,
                                                       CUtensorMapSwizzle, CUtensorMapL2promotion,
                                                       CUtensorMapFloatOOBfill);
using PFN_cuInit_v2000 = CUresult (*)(unsigned);
using PFN_cuDeviceGet_v2000 = CUresult (*)(CUdevice*, int);
using PFN_cuDevicePrimaryCtxRetain_v7000 = CUresult (*)(CUcontext*, CUdevice);
using PFN_cuCtxGetCurrent_v4000 = CUresult (*)(CUcontext*);
using PFN_cuCtxSetCurrent_v4000 = CUresult (*)(CUcontext);
using PFN_cuCtxGetDevice_v2000 = CUresult (*)(CUdevice*);
using PFN_cuThreadExchangeStreamCaptureMode_v10010 = CUresult (*)(CUstreamCaptureMode*);
using PFN_cuCtxGetId_v12000 = CUresult (*)(CUcontext, unsigned long long*);

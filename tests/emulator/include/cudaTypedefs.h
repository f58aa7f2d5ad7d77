// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

using PFN_cuTensorMapEncodeTiled_v12000 = CUresult (*)(CUtensorMap*, CUtensorMapDataType,
                                                       cuuint32_t, void*, cuuint64_t const*,
                                                       cuuint64_t const*, cuuint32_t const*,
                                                       cuuint32_t const*, CUtensorMapInterleave,
                                                       CUtensorMapSwizzle, CUtensorMapL2promotion,
                                                       CUtensorMapFloatOOBfill);

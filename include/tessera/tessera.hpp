// SPDX-License-Identifier: Apache-2.0
// All of the C++ API.
#pragma once

#include "tessera/backend.hpp"
#include "tessera/balance.hpp"
#include "tessera/context.hpp"
#include "tessera/expert_parallel.hpp"
#include "tessera/grouped_gemm.hpp"
#include "tessera/hosts.hpp"
#include "tessera/low_precision.hpp"
#include "tessera/moe.hpp"
#include "tessera/names.hpp"
#include "tessera/router.hpp"
#include "tessera/routing.hpp"
#include "tessera/shape.hpp"
#include "tessera/status.hpp"
#include "tessera/tensor.hpp"
#include "tessera/version.hpp"
#include "tessera/work.hpp"

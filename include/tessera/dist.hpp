// SPDX-License-Identifier: Apache-2.0
// The former name of expert_parallel.hpp, kept until 1.0.
#pragma once

#include "tessera/expert_parallel.hpp"

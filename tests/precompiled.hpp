// SPDX-License-Identifier: Apache-2.0
// What nearly every test includes, read by the compiler once for all of them (tests/CMakeLists.txt).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

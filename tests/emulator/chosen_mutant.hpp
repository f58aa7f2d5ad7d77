// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>

// The number of the mutant that a program of several runs (mutant_switches.py), or 0.
inline int const chosen_mutant = [] {
  char const* const number = std::getenv("TESSERA_MUTANT");
  return number == nullptr ? 0 : std::atoi(number);
}();

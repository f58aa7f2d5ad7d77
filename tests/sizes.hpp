// SPDX-License-Identifier: Apache-2.0
// Sizes of tests that sanitizers would take long for. They look at the code; what only many cases or large ones show
// is seen where the same tests run whole, without them.
#pragma once

namespace tessera {

/// `whole`, or in a build of the sanitizers `sanitized`, which still has to reach the same code.
template <class T>
constexpr T size_of_test(T whole, [[maybe_unused]] T sanitized) {
#if defined(TESSERA_SANITIZED)
  return sanitized;
#else
  return whole;
#endif
}

}  // namespace tessera

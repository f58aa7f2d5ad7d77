// SPDX-License-Identifier: Apache-2.0
// A variable of a CTA in shared memory, of the type that stands behind its name. Written so, and not by the word of the
// language, it is also a variable of a CTA where kernels are emulated (tests/emulator), whatever CTAs run beside it.
#pragma once

#include <type_traits>

#define TESSERA_STATIC_SHARED(name, ...) __shared__ std::type_identity_t<__VA_ARGS__> name

// SPDX-License-Identifier: Apache-2.0
// The bounds of a kernel that both architectures run, where ptxas for sm_100a spills rather than take the registers
// that it needs: it is told that one CTA an SM is enough. On sm_90a the bounds are those of the threads, and of the
// CTAs of an SM where a kernel names them.
#pragma once

#if defined(__CUDA_ARCH_FEAT_SM100_ALL)
#define TESSERA_LAUNCH_BOUNDS(threads) __launch_bounds__(threads, 1)
#define TESSERA_LAUNCH_BOUNDS_CTAS(threads, ctas) __launch_bounds__(threads, 1)
#else
#define TESSERA_LAUNCH_BOUNDS(threads) __launch_bounds__(threads)
#define TESSERA_LAUNCH_BOUNDS_CTAS(threads, ctas) __launch_bounds__(threads, ctas)
#endif

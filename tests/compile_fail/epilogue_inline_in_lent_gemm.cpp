// SPDX-License-Identifier: Apache-2.0
// An inline epilogue in a GEMM that lends stages: it would not take them.
// error: epilogue contract: kMode is the mode of the GEMM's configuration
#include "epilogues.hpp"

struct Epilogue : Inline, Begin, Store, Settle, Drain {};

static_assert(fits<kLent, Epilogue>);

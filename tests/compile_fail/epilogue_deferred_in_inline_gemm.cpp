// SPDX-License-Identifier: Apache-2.0
// A deferred epilogue in a GEMM whose epilogues are inline: none of its pieces would be done.
// error: epilogue contract: kMode is the mode of the GEMM's configuration
#include "epilogues.hpp"

struct Epilogue : Deferred, Begin, Keep, Work, Drain {};

static_assert(fits<kInline, Epilogue>);

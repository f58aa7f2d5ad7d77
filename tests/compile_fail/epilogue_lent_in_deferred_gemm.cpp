// SPDX-License-Identifier: Apache-2.0
// An epilogue that borrows stages in a GEMM that defers: it would wait for ever.
// error: epilogue contract: kMode is the mode of the GEMM's configuration
#include "epilogues.hpp"

struct Epilogue : Lent, Begin, RingStore, Settle, Drain, Lend {};

static_assert(fits<kDeferred, Epilogue>);

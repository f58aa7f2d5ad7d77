// SPDX-License-Identifier: Apache-2.0
// A lent epilogue whose store() does not take the ring.
// error: epilogue contract: mode lent calls `void store(
#include "epilogues.hpp"

struct Epilogue : Lent, Begin, Store, Settle, Drain, Lend {};

static_assert(fits<kLent, Epilogue>);

// SPDX-License-Identifier: Apache-2.0
// An inline epilogue with hooks of a deferred one.
// error: epilogue contract: keep() and work() are called in mode deferred alone
#include "epilogues.hpp"

struct Epilogue : Inline, Begin, Store, Settle, Drain, Keep, Work {};

static_assert(fits<kInline, Epilogue>);

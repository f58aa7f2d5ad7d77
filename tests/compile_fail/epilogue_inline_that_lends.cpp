// SPDX-License-Identifier: Apache-2.0
// An inline epilogue with a lend() that nobody would call.
// error: epilogue contract: lend() is called in mode lent alone
#include "epilogues.hpp"

struct Epilogue : Inline, Begin, Store, Settle, Drain, Lend {};

static_assert(fits<kInline, Epilogue>);

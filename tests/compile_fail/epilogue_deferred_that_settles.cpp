// SPDX-License-Identifier: Apache-2.0
// A deferred epilogue with a settle() that nobody would call.
// error: epilogue contract: store() and settle() are not called in mode deferred
#include "epilogues.hpp"

struct Epilogue : Deferred, Begin, Keep, Work, Drain, Settle {};

static_assert(fits<kDeferred, Epilogue>);

// SPDX-License-Identifier: Apache-2.0
// A deferred epilogue with a hook of an inline one.
// error: epilogue contract: store() and settle() are not called in mode deferred
#include "epilogues.hpp"

struct Epilogue : Deferred, Begin, Keep, Work, Drain, Store {};

static_assert(fits<kDeferred, Epilogue>);

// SPDX-License-Identifier: Apache-2.0
// An epilogue whose drain() returns what nobody looks at.
// error: epilogue contract: every mode but apart calls `void drain()`
#include "epilogues.hpp"

struct Epilogue : Inline, Begin, Store, Settle {
  bool drain() { return true; }
};

static_assert(fits<kInline, Epilogue>);

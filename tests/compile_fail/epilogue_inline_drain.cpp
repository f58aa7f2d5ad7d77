// SPDX-License-Identifier: Apache-2.0
// An inline epilogue whose drain() is misspelt.
// error: epilogue contract: every mode but apart calls `void drain()`
#include "epilogues.hpp"

struct Epilogue : Inline, Begin, Store, Settle {
  void drian() {}
};

static_assert(fits<kInline, Epilogue>);

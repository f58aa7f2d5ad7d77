// SPDX-License-Identifier: Apache-2.0
// A lent epilogue whose drain() is misspelt.
// error: epilogue contract: every mode but apart calls `void drain()`
#include "epilogues.hpp"

struct Epilogue : Lent, Begin, RingStore, Settle, Lend {
  void drian() {}
};

static_assert(fits<kLent, Epilogue>);

// SPDX-License-Identifier: Apache-2.0
// A deferred epilogue whose drain() is misspelt.
// error: epilogue contract: every mode but apart calls `void drain()`
#include "epilogues.hpp"

struct Epilogue : Deferred, Begin, Keep, Work {
  void drian() {}
};

static_assert(fits<kDeferred, Epilogue>);

// SPDX-License-Identifier: Apache-2.0
// A deferred epilogue whose work() is misspelt.
// error: epilogue contract: mode deferred calls `void work(
#include "epilogues.hpp"

struct Epilogue : Deferred, Begin, Keep, Drain {
  void works(int) {}
};

static_assert(fits<kDeferred, Epilogue>);

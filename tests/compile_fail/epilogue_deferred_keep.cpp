// SPDX-License-Identifier: Apache-2.0
// A deferred epilogue whose keep() is misspelt.
// error: epilogue contract: mode deferred calls `void keep(
#include "epilogues.hpp"

struct Epilogue : Deferred, Begin, Work, Drain {
  void keeps(Accumulators&, WorkTile const&, int) {}
};

static_assert(fits<kDeferred, Epilogue>);

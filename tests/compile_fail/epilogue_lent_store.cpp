// SPDX-License-Identifier: Apache-2.0
// A lent epilogue whose store() is misspelt.
// error: epilogue contract: mode lent calls `void store(
#include "epilogues.hpp"

struct Epilogue : Lent, Begin, Settle, Drain, Lend {
  void stores(Accumulators&, WorkTile const&, int, Ring&) {}
};

static_assert(fits<kLent, Epilogue>);

// SPDX-License-Identifier: Apache-2.0
// A lent epilogue whose lend() is misspelt.
// error: epilogue contract: mode lent calls `static void lend(
#include "epilogues.hpp"

struct Epilogue : Lent, Begin, RingStore, Settle, Drain {
  static void lent(Smem&, EpilogueParams const&, int, WorkTile const&, int) {}
};

static_assert(fits<kLent, Epilogue>);

// SPDX-License-Identifier: Apache-2.0
// A lent epilogue whose lend() needs an object, which the producer does not have.
// error: epilogue contract: mode lent calls `static void lend(
#include "epilogues.hpp"

struct Epilogue : Lent, Begin, RingStore, Settle, Drain {
  void lend(Smem&, EpilogueParams const&, int, WorkTile const&, int) {}
};

static_assert(fits<kLent, Epilogue>);

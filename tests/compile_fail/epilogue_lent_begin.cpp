// SPDX-License-Identifier: Apache-2.0
// A lent epilogue whose begin() is misspelt.
// error: epilogue contract: every mode but apart calls `void begin(
#include "epilogues.hpp"

struct Epilogue : Lent, RingStore, Settle, Drain, Lend {
  void beginn(WorkTile const&, int, int) {}
};

static_assert(fits<kLent, Epilogue>);

// SPDX-License-Identifier: Apache-2.0
// A deferred epilogue whose begin() is misspelt.
// error: epilogue contract: every mode but apart calls `void begin(
#include "epilogues.hpp"

struct Epilogue : Deferred, Keep, Work, Drain {
  void beginn(WorkTile const&, int, int) {}
};

static_assert(fits<kDeferred, Epilogue>);

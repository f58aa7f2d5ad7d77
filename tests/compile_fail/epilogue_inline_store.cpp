// SPDX-License-Identifier: Apache-2.0
// An inline epilogue whose store() is misspelt.
// error: epilogue contract: mode inline calls `void store(
#include "epilogues.hpp"

struct Epilogue : Inline, Begin, Settle, Drain {
  void stores(Accumulators&, WorkTile const&, int) {}
};

static_assert(fits<kInline, Epilogue>);

// SPDX-License-Identifier: Apache-2.0
// An inline epilogue whose begin() is misspelt.
// error: epilogue contract: every mode but apart calls `void begin(
#include "epilogues.hpp"

struct Epilogue : Inline, Store, Settle, Drain {
  void beginn(WorkTile const&, int, int) {}
};

static_assert(fits<kInline, Epilogue>);

// SPDX-License-Identifier: Apache-2.0
// An epilogue whose begin() does not take the number of 64-row parts.
// error: epilogue contract: every mode but apart calls `void begin(
#include "epilogues.hpp"

struct Epilogue : Inline, Store, Settle, Drain {
  void begin(WorkTile const&, int) {}
};

static_assert(fits<kInline, Epilogue>);

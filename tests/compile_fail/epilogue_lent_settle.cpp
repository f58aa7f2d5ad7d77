// SPDX-License-Identifier: Apache-2.0
// A lent epilogue whose settle() is misspelt.
// error: epilogue contract: modes inline and lent call `void settle()`
#include "epilogues.hpp"

struct Epilogue : Lent, Begin, RingStore, Drain, Lend {
  void setle() {}
};

static_assert(fits<kLent, Epilogue>);

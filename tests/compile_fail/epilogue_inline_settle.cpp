// SPDX-License-Identifier: Apache-2.0
// An inline epilogue whose settle() is misspelt.
// error: epilogue contract: modes inline and lent call `void settle()`
#include "epilogues.hpp"

struct Epilogue : Inline, Begin, Store, Drain {
  void setle() {}
};

static_assert(fits<kInline, Epilogue>);

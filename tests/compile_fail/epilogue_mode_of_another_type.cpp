// SPDX-License-Identifier: Apache-2.0
// An epilogue whose mode is a number.
// error: epilogue contract: an epilogue declares when it works
#include "epilogues.hpp"

struct Epilogue : Begin, Store, Settle, Drain {
  static constexpr int kMode = 0;
};

static_assert(fits<kInline, Epilogue>);

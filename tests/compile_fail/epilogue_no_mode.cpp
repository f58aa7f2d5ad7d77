// SPDX-License-Identifier: Apache-2.0
// An epilogue that does not declare its mode.
// error: epilogue contract: an epilogue declares when it works
#include "epilogues.hpp"

struct Epilogue : Begin, Store, Settle, Drain {};

static_assert(fits<kInline, Epilogue>);

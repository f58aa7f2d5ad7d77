// SPDX-License-Identifier: Apache-2.0
// An epilogue of the storing warpgroup with a hook that nobody calls there.
// error: epilogue contract: mode apart has no hook that a consumer calls
#include "epilogues.hpp"

struct Epilogue : Apart, TileStore, Drain {};

static_assert(fits<kApart, Epilogue>);

// SPDX-License-Identifier: Apache-2.0
// An epilogue of the storing warpgroup with a hook that nobody calls there.
// error: epilogue contract: mode apart calls begin() and store() of a tile alone
#include "epilogues.hpp"

struct Epilogue : Apart, TileBegin, TileStore, Drain {};

static_assert(fits<kApart, Epilogue>);

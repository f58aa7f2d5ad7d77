// SPDX-License-Identifier: Apache-2.0
// An epilogue of the storing warpgroup whose store() asks for accumulators, which that warpgroup has not.
// error: epilogue contract: mode apart calls `void store(WorkTile const&, int
#include "epilogues.hpp"

struct Epilogue : Apart, Store {};

static_assert(fits<kApart, Epilogue>);

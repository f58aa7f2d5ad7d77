// SPDX-License-Identifier: Apache-2.0
// An epilogue of the storing warpgroup that never asks for what it reads.
// error: epilogue contract: mode apart calls `void begin(WorkTile const&, uint32_t
#include "epilogues.hpp"

struct Epilogue : Apart, TileStore {};

static_assert(fits<kApart, Epilogue>);

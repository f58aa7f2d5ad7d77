// SPDX-License-Identifier: Apache-2.0
// An epilogue of the storing warpgroup that reads and is never told of the first tile.
// error: epilogue contract: mode apart with row_numbers calls `void start(WorkTile
#include "epilogues.hpp"

struct Epilogue : Apart, TileBegin, Follow, TileStore, Finish {};

static_assert(fits<kReading, Epilogue>);

// SPDX-License-Identifier: Apache-2.0
// An epilogue of the storing warpgroup that reads and never asks for it.
// error: epilogue contract: mode apart with row_numbers calls `void begin(WorkTile
#include "epilogues.hpp"

struct Epilogue : Apart, Start, Follow, TileStore, Finish {};

static_assert(fits<kReading, Epilogue>);

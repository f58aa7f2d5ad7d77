// SPDX-License-Identifier: Apache-2.0
// An epilogue of the storing warpgroup that reads and leaves behind what is under way.
// error: epilogue contract: mode apart with row_numbers calls `void finish()
#include "epilogues.hpp"

struct Epilogue : Apart, Start, TileBegin, Follow, TileStore {};

static_assert(fits<kReading, Epilogue>);

// SPDX-License-Identifier: Apache-2.0
// An epilogue of the storing warpgroup that reads and never asks for what its first requests lead to.
// error: epilogue contract: mode apart with row_numbers calls `void follow(uint32_t
#include "epilogues.hpp"

struct Epilogue : Apart, Start, TileBegin, TileStore, Finish {};

static_assert(fits<kReading, Epilogue>);

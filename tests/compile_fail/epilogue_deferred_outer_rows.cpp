// SPDX-License-Identifier: Apache-2.0
// In a GEMM that adds an outer product a deferred epilogue has factors of two rows, where a thread has four.
// error: epilogue contract: with an outer product
#include "epilogues.hpp"

struct Epilogue : Deferred, Begin, Keep, Work, Drain {
  float const (&outer_rows() const)[2] { return u; }
  float u[2];
};

static_assert(fits<kOuterProduct, Epilogue>);

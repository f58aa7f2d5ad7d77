// SPDX-License-Identifier: Apache-2.0
// A deferred epilogue without outer_rows() in a GEMM that adds an outer product.
// error: epilogue contract: with an outer product
#include "epilogues.hpp"

struct Epilogue : Deferred, Begin, Keep, Work, Drain {
  float const* outer_rows() const { return nullptr; }
};

static_assert(fits<kOuterProduct, Epilogue>);

// SPDX-License-Identifier: Apache-2.0
// A wrapper that misspells the hook that it changes. Its base is private, so that this one does not take its place.
// error: epilogue contract: modes inline and lent call `void settle()`
#include "epilogues.hpp"

struct Whole : Inline, Begin, Store, Settle, Drain {};

struct Wrapper : private Whole {
  using Whole::begin;
  using Whole::kMode;
  using Whole::store;
  void setle() { Whole::settle(); }
  using Whole::drain;
};

static_assert(fits<kInline, Wrapper>);

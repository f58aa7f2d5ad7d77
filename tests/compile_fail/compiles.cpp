// SPDX-License-Identifier: Apache-2.0
// Whole epilogues of each mode fit: else the others of this folder would fail for a wrong reason.
#include "epilogues.hpp"

struct InlineEpilogue : Inline, Begin, Store, Settle, Drain {};
struct LentEpilogue : Lent, Begin, RingStore, Settle, Drain, Lend {};
struct DeferredEpilogue : Deferred, Begin, Keep, Work, Drain {};
struct ApartEpilogue : Apart, TileStore {};
struct ReadingEpilogue : Apart, Start, TileBegin, Follow, TileStore, Finish {};
struct OuterProductEpilogue : Deferred, Begin, Keep, Work, Drain, OuterRows {};

struct Wrapper : private InlineEpilogue {
  using InlineEpilogue::begin;
  using InlineEpilogue::kMode;
  using InlineEpilogue::store;
  void settle() { InlineEpilogue::settle(); }
  using InlineEpilogue::drain;
};

static_assert(fits<kInline, InlineEpilogue>);
static_assert(fits<kLent, LentEpilogue>);
static_assert(fits<kDeferred, DeferredEpilogue>);
static_assert(fits<kApart, ApartEpilogue>);
static_assert(fits<kReading, ReadingEpilogue>);
static_assert(fits<kOuterProduct, OuterProductEpilogue>);
static_assert(fits<kInline, Wrapper>);

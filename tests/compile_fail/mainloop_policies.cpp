// SPDX-License-Identifier: Apache-2.0
// A policy of the mainloop, or of a loop that loads, fits with all of its hooks and does not where one is missing.
#include "cuda/gemm/produce/gather.cuh"
#include "cuda/gemm/produce/tma.cuh"
#include "cuda/gemm/sm90/mainloop.cuh"

using tessera::cuda::gemm::BetweenKTiles;
using tessera::cuda::gemm::GathersTiles;
using tessera::cuda::gemm::LoadsTiles;
using tessera::cuda::gemm::WorkTile;

struct Ring {};
template <class... Hooks>
struct Policy : Hooks... {};

struct BeforeStage {
  void before(int, Ring const&) {}
};
struct First {
  void first() {}
};
struct Later {
  void later() {}
};
struct Each {
  void each(int) {}
};
static_assert(BetweenKTiles<Policy<BeforeStage, First, Later, Each>, Ring>);
static_assert(!BetweenKTiles<Policy<First, Later, Each>, Ring>);
static_assert(!BetweenKTiles<Policy<BeforeStage, Later, Each>, Ring>);
static_assert(!BetweenKTiles<Policy<BeforeStage, First, Each>, Ring>);
static_assert(!BetweenKTiles<Policy<BeforeStage, First, Later>, Ring>);

struct AnnounceFirst {
  void announce_first() {}
};
struct Begin {
  int begin(WorkTile&) { return 0; }
};
struct Before {
  void before(WorkTile const&, int, int) {}
};
struct Loads {
  static bool loads() { return true; }
};
struct Fill {
  void fill(int, WorkTile const&, int, int) {}
};
struct After {
  void after(Ring&, WorkTile const&) {}
};
struct End {
  void end() {}
};
static_assert(LoadsTiles<Policy<AnnounceFirst, Begin, Before, Loads, Fill, After, End>, Ring>);
static_assert(!LoadsTiles<Policy<Begin, Before, Loads, Fill, After, End>, Ring>);
static_assert(!LoadsTiles<Policy<AnnounceFirst, Before, Loads, Fill, After, End>, Ring>);
static_assert(!LoadsTiles<Policy<AnnounceFirst, Begin, Loads, Fill, After, End>, Ring>);
static_assert(!LoadsTiles<Policy<AnnounceFirst, Begin, Before, Fill, After, End>, Ring>);
static_assert(!LoadsTiles<Policy<AnnounceFirst, Begin, Before, Loads, After, End>, Ring>);
static_assert(!LoadsTiles<Policy<AnnounceFirst, Begin, Before, Loads, Fill, End>, Ring>);
static_assert(!LoadsTiles<Policy<AnnounceFirst, Begin, Before, Loads, Fill, After>, Ring>);

struct Prefetch {
  void prefetch(WorkTile const&) {}
};
struct BeginPrefetched {
  void begin() {}
};
struct FillB {
  void fill_b(int, WorkTile const&, int) {}
};
struct Copy {
  void copy(int, WorkTile const&) {}
};
static_assert(GathersTiles<Policy<Prefetch, BeginPrefetched, FillB, Copy, After>, Ring>);
static_assert(!GathersTiles<Policy<BeginPrefetched, FillB, Copy, After>, Ring>);
static_assert(!GathersTiles<Policy<Prefetch, FillB, Copy, After>, Ring>);
static_assert(!GathersTiles<Policy<Prefetch, BeginPrefetched, Copy, After>, Ring>);
static_assert(!GathersTiles<Policy<Prefetch, BeginPrefetched, FillB, After>, Ring>);
static_assert(!GathersTiles<Policy<Prefetch, BeginPrefetched, FillB, Copy>, Ring>);

// SPDX-License-Identifier: Apache-2.0
// Hooks of epilogues, a class for each, from which the files of this folder make epilogues with one left out or wrong.
#pragma once

#include "cuda/gemm/epilogue/contract.hpp"

using tessera::cuda::gemm::EpilogueConfig;
using tessera::cuda::gemm::EpilogueMode;
using tessera::cuda::gemm::WorkTile;

// What the hooks of a GEMM get.
struct Accumulators {
  static constexpr int kRows = 4;  // of a thread: no architecture has so many
};
struct Ring {};
struct Smem {};
struct EpilogueParams {};

template <EpilogueMode kIs>
struct In {
  static constexpr EpilogueMode kMode = kIs;
  using Params = EpilogueParams;
};
using Inline = In<EpilogueMode::kInline>;
using Lent = In<EpilogueMode::kLent>;
using Deferred = In<EpilogueMode::kDeferred>;
using Apart = In<EpilogueMode::kApart>;

struct Begin {
  void begin(WorkTile const&, int, int) {}
};
struct Store {
  void store(Accumulators&, WorkTile const&, int) {}
};
struct TileBegin {
  void begin(WorkTile const&, uint32_t) {}
};
struct TileStore {
  void store(WorkTile const&, int, uint32_t) {}
};
struct Start {
  void start(WorkTile const&) {}
};
struct Follow {
  void follow(uint32_t) {}
};
struct Finish {
  void finish() {}
};
struct RingStore {
  void store(Accumulators&, WorkTile const&, int, Ring&) {}
};
struct Settle {
  void settle() {}
};
struct Keep {
  void keep(Accumulators&, WorkTile const&, int) {}
};
struct Work {
  void work(int) {}
};
struct Drain {
  void drain() {}
};
struct Lend {
  static void lend(Smem&, EpilogueParams const&, int, WorkTile const&, int) {}
};
struct OuterRows {
  float const (&outer_rows() const)[Accumulators::kRows] { return u; }
  float u[Accumulators::kRows];
};

constexpr EpilogueConfig kInline{.mode = EpilogueMode::kInline};
constexpr EpilogueConfig kLent{.mode = EpilogueMode::kLent, .lent_stages = 1};
constexpr EpilogueConfig kDeferred{.mode = EpilogueMode::kDeferred};
constexpr EpilogueConfig kApart{.mode = EpilogueMode::kApart};
constexpr EpilogueConfig kReading{.mode = EpilogueMode::kApart, .row_numbers = 1};
constexpr EpilogueConfig kOuterProduct{.mode = EpilogueMode::kDeferred, .outer_product = true};

// As consume() of a GEMM asks for it.
template <EpilogueConfig kConfig, class Epilogue>
constexpr bool fits =
    tessera::cuda::gemm::keeps_contract<kConfig, Epilogue, Accumulators, Ring, Smem>();

// SPDX-License-Identifier: Apache-2.0
// A GEMM asks two things of an epilogue: that it declares its mode, and that it has every hook of that mode. A hook
// that has nothing to do is declared with an empty body: a misspelt or forgotten one does not compile. An epilogue
// apart reads where the configuration has row_numbers.
//   static constexpr EpilogueMode kMode = ..    the mode of the GEMM's configuration (config.hpp)
//
//   hook, returns void             inline lent deferred  called by a consumer warpgroup, but for lend()
//   begin(tile, row, subtiles)       x     x     x       before the k loop, for 64-row parts from `row`: asks for what
//                                                        the epilogue reads. Deferred: it still holds the tile before
//   store(acc, tile, row)            x                   after the k loop, for each of these parts
//   store(acc, tile, row, ring)            x             the same; it takes its lent stages from the ring
//   settle()                         x     x             under the first k_tile of the warpgroup's next tile, and where
//                                                        it has no rows of that: ends what store() has begun
//   keep(acc, tile, row)                         x       after the k loop: holds 64 rows, and frees the accumulators
//   work(piece)                                  x       pieces 0, 1, .. of what it holds, under the next k loop
//   drain()                          x     x     x       once, when there is no tile left and nothing is held
//   store(tile, consumer, turn)        apart             by the storing warpgroup, once for the rows of each consumer;
//                                                        mode apart has no other hooks but those of one that reads.
//                                                        turn: 0 and 1, of tiles in turns
//   begin(tile, turn)           apart that reads         before the tile before it is stored: asks for what the
//                                                        epilogue reads. Behind the last tile comes one without rows
//   start(tile)                 apart that reads         once, ahead of the first tile: in the place of its begin()
//                                                        and follow()
//   follow(turn)                apart that reads         when half of the tile before is stored: asks for what lies
//                                                        where begin() has found
//   finish()                    apart that reads         once, behind the last tile: ends what was asked for
//   lend(smem, p, stage, tile, i)          x             static, by one thread of the producer: fills the tile's i-th
//                                                        lent stage, or leaves it; arrives on full[stage] once
//   outer_rows()               with an outer product     deferred, after the k loop: the factors u of this thread's
//                                                        rows, `float const (&)[Accumulators::kRows]`
// A wrapper that changes a hook inherits in private and names each of the others: were a hook misspelt in it, that of a
// public base would take its place in silence. Each way to break the contract fails to compile: tests/compile_fail.
#pragma once

#include <concepts>
#include <type_traits>

#include "../config.hpp"
#include "../work_tile.hpp"

namespace tessera::cuda::gemm {

template <class E>
concept DeclaresMode = requires { typename std::integral_constant<EpilogueMode, E::kMode>; };

template <class E>
concept HasBegin = requires(E& e, WorkTile const& tile, int i) {
  { e.begin(tile, i, i) } -> std::same_as<void>;
};
template <class E, class Acc>
concept HasStore = requires(E& e, Acc& acc, WorkTile const& tile, int row) {
  { e.store(acc, tile, row) } -> std::same_as<void>;
};
template <class E, class Acc, class Ring>
concept HasRingStore = requires(E& e, Acc& acc, WorkTile const& tile, int row, Ring& ring) {
  { e.store(acc, tile, row, ring) } -> std::same_as<void>;
};
template <class E>
concept HasTileBegin = requires(E& e, WorkTile const& tile, uint32_t turn) {
  { e.begin(tile, turn) } -> std::same_as<void>;
};
template <class E>
concept HasTileStore = requires(E& e, WorkTile const& tile, int consumer, uint32_t turn) {
  { e.store(tile, consumer, turn) } -> std::same_as<void>;
};
template <class E>
concept HasStart = requires(E& e, WorkTile const& tile) {
  { e.start(tile) } -> std::same_as<void>;
};
template <class E>
concept HasFollow = requires(E& e, uint32_t turn) {
  { e.follow(turn) } -> std::same_as<void>;
};
template <class E>
concept HasFinish = requires(E& e) {
  { e.finish() } -> std::same_as<void>;
};
template <class E>
concept HasSettle = requires(E& e) {
  { e.settle() } -> std::same_as<void>;
};
template <class E, class Acc>
concept HasKeep = requires(E& e, Acc& acc, WorkTile const& tile, int row) {
  { e.keep(acc, tile, row) } -> std::same_as<void>;
};
template <class E>
concept HasWork = requires(E& e, int piece) {
  { e.work(piece) } -> std::same_as<void>;
};
template <class E>
concept HasDrain = requires(E& e) {
  { e.drain() } -> std::same_as<void>;
};
template <class E, class Smem>
concept HasLend = requires(Smem& smem, typename E::Params const& p, WorkTile const& tile, int i) {
  { E::lend(smem, p, i, tile, i) } -> std::same_as<void>;
};
template <class E, class Acc>
concept HasOuterRows = requires(E const& e) {
  { e.outer_rows() } -> std::same_as<float const(&)[Acc::kRows]>;
};

// Compiles if E fits the configuration. kConfig: of the GEMM; Acc: what store() or keep() reads, Ring and Smem: what
// store() and lend() get where stages are lent.
template <EpilogueConfig kConfig, class E, class Acc, class Ring, class Smem>
consteval bool keeps_contract() {
  static_assert(DeclaresMode<E>,
                "epilogue contract: an epilogue declares when it works; add "
                "`static constexpr EpilogueMode kMode = EpilogueMode::kInline;`, or kLent, "
                "kDeferred, kApart");
  if constexpr (DeclaresMode<E>) {
    constexpr EpilogueMode kMode = E::kMode;
    constexpr bool kDefers = kMode == EpilogueMode::kDeferred;
    constexpr bool kLends = kMode == EpilogueMode::kLent;
    static_assert(kMode == kConfig.mode,
                  "epilogue contract: kMode is the mode of the GEMM's configuration; take another "
                  "epilogue, or set GemmConfig::epilogue.mode");

    constexpr bool kApart = kMode == EpilogueMode::kApart;
    static_assert(!kApart || HasTileStore<E>,
                  "epilogue contract: mode apart calls `void store(WorkTile const&, int "
                  "consumer, uint32_t turn)`; declare it, or another mode");
    constexpr bool kReads = kApart && kConfig.row_numbers != 0;
    static_assert(!kReads || HasTileBegin<E>,
                  "epilogue contract: mode apart with row_numbers calls `void begin(WorkTile "
                  "const&, uint32_t turn)`; declare it, or set row_numbers to 0");
    static_assert(!kReads || HasStart<E>,
                  "epilogue contract: mode apart with row_numbers calls `void start(WorkTile "
                  "const&)`; declare it, or set row_numbers to 0");
    static_assert(!kReads || HasFollow<E>,
                  "epilogue contract: mode apart with row_numbers calls `void follow(uint32_t "
                  "turn)`; declare it, empty if what is read leads to nothing");
    static_assert(!kReads || HasFinish<E>,
                  "epilogue contract: mode apart with row_numbers calls `void finish()`; declare "
                  "it, empty if nothing is under way behind the last tile");
    static_assert(
        !kApart || !(HasBegin<E> || HasSettle<E> || HasKeep<E, Acc> || HasWork<E> || HasDrain<E>),
        "epilogue contract: mode apart has no hook that a consumer calls; remove it, or declare "
        "its mode");
    static_assert(
        kApart || HasBegin<E>,
        "epilogue contract: every mode but apart calls `void begin(WorkTile const&, int row, int "
        "subtiles)`; declare it, empty if nothing is read");
    static_assert(
        kDefers || kLends || kApart || HasStore<E, Acc>,
        "epilogue contract: mode inline calls `void store(Accumulators&, WorkTile const&, "
        "int row)`; declare it, or another mode");
    static_assert(!kLends || HasRingStore<E, Acc, Ring>,
                  "epilogue contract: mode lent calls `void store(Accumulators&, WorkTile const&, "
                  "int row, PipelineState& ring)`; declare it, or another mode");
    static_assert(
        kDefers || kApart || HasSettle<E>,
        "epilogue contract: modes inline and lent call `void settle()`; declare it, empty "
        "if store() leaves nothing under way");
    static_assert(
        !kDefers || HasKeep<E, Acc>,
        "epilogue contract: mode deferred calls `void keep(Accumulators&, WorkTile const&, "
        "int row)`; declare it, or another mode");
    static_assert(!kDefers || HasWork<E>,
                  "epilogue contract: mode deferred calls `void work(int piece)`; declare it, or "
                  "another mode");
    static_assert(kApart || HasDrain<E>,
                  "epilogue contract: every mode but apart calls `void drain()`; declare it, empty "
                  "if nothing "
                  "has to end before the CTA does");
    static_assert(
        !kLends || HasLend<E, Smem>,
        "epilogue contract: mode lent calls `static void lend(SharedStorage&, Params "
        "const&, int stage, WorkTile const&, int i)`; declare it, arriving on full[stage] "
        "alone if nothing is read");
    static_assert(!kConfig.outer_product || HasOuterRows<E, Acc>,
                  "epilogue contract: with an outer product `float const (&outer_rows() "
                  "const)[Accumulators::kRows]` is called; declare it, or unset "
                  "GemmConfig::epilogue.outer_product");

    static_assert(kDefers || kApart || !(HasKeep<E, Acc> || HasWork<E>),
                  "epilogue contract: keep() and work() are called in mode deferred alone; remove "
                  "them, or declare that mode");
    static_assert(!kDefers || !(HasStore<E, Acc> || HasRingStore<E, Acc, Ring> || HasSettle<E>),
                  "epilogue contract: store() and settle() are not called in mode deferred; remove "
                  "them, or declare another mode");
    static_assert(
        kLends || !HasLend<E, Smem>,
        "epilogue contract: lend() is called in mode lent alone; remove it, or declare that "
        "mode");
  }
  return true;
}

}  // namespace tessera::cuda::gemm

// SPDX-License-Identifier: Apache-2.0
// The exchange as three kernels around the GEMMs of a single GPU, for training and for an unfused pass to compare with.
//   route      sends lists and counts to the owners (route_scan, counted, publish), plans, makes tables of the own rows
//   dispatch   says that this rank's rows lie in its window [staged]; pulls the rows that the tables name; may be
//              called once more, for second_x alone, by ranks that choose to; or two kernels, the second one beside the
//              GEMM that reads the rows (unfused/dispatch_beside.cu)
//   combine    pushes rows to unique slots on their sources; ack says that all rows of a rank came back; adds up slots
// A pass is all three, or dispatch and combine with tables of an earlier pass.
// Rows have no pads between them: row r is row r of the plan, and expert_offsets are those of a GEMM.
// This header is the host side: arguments, which are the kernels' parameters too, and launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/awaited_rows.hpp"
#include "expert_parallel/plan/divisor.hpp"
#include "expert_parallel/plan/fault.hpp"
#include "expert_parallel/plan/protocol.hpp"
#include "expert_parallel/transport/windows.hpp"
#include "tessera/routing.hpp"

namespace tessera::expert_parallel {

struct ExchangeArguments {
  ExchangeShape shape;
  WindowLayout window;
  LocalLayout local;
  std::int32_t rank;
  Windows windows;            // zeroed before the first pass; x of this rank in its own
  char* gmem_local;           // local.bytes, zeroed before the first pass
  std::uint32_t* gmem_epoch;  // 1 before the first pass; combine increments it
  Fault* fault;               // zero; memory of the host that the device writes
  std::uint64_t limit_ns;     // of a wait
  std::uint32_t
      jitter_ns;        // tests: every wait is followed by a pause of up to this length; 0: none
  std::int32_t tokens;  // of this rank in this pass, at most shape.max_tokens
  std::int32_t const* gmem_topk_ids;  // [tokens,max_top_k]; outside [0,E): no row
  float const* gmem_scores;           // [tokens,max_top_k]
  char* gmem_pool;                    // the fused kernel: [pool_rows,d] bf16
  // These follow from the shape, so that no thread divides by it for each pair or row.
  std::int32_t local_experts = shape.local_experts();
  std::int32_t partial_experts = shape.partial_experts();
  Divisor by_local_experts{local_experts}, by_top_k{shape.max_top_k};

  [[nodiscard]] TESSERA_INLINE std::int32_t owner(std::int32_t expert) const {
    return by_local_experts.quotient(static_cast<std::uint32_t>(expert));
  }
  [[nodiscard]] TESSERA_INLINE std::int32_t token_of(std::uint32_t pair) const {
    return by_top_k.quotient(pair);
  }
  /// Returns the row of a pair's token where the tokens of all ranks lie one behind the other.
  [[nodiscard]] TESSERA_INLINE std::int32_t gathered_row(std::uint32_t source,
                                                         std::uint32_t pair) const {
    return static_cast<std::int32_t>(source) * shape.max_tokens + token_of(pair);
  }
};

/// Names the place that a row comes from and goes back to. Where a token's row crosses once, its rows here form a list
/// in order of expert, then choice; else every row is a list of its own.
struct alignas(16) RowOrigin {
  std::int32_t pair;      ///< token * max_top_k + choice, on its source
  std::int32_t source;    ///< rank
  std::int32_t next;      ///< the next row of the list, or -1
  std::int32_t is_first;  ///< 1 for the first row of the list, else 0
};

/// Holds what a rank knows of the rows that its experts have in a pass, R of them.
struct RowTables {
  std::int32_t* gmem_expert_offsets;  // [local_experts+1], the last one is R
  RowOrigin* gmem_origins;            // [R]
  float* gmem_scores;                 // [R]
};

/// The word in which a pass signals to the host how many rows this rank has.
struct HostSignal {
  std::uint64_t* word = nullptr;  // RoutedWord with `ticket`; memory of the host, or null
  std::uint32_t ticket = 0;
};

struct RouteArguments {
  ExchangeArguments exchange;  // without gmem_pool
  RowTables made;              // for as many rows as there may be
  std::int32_t row_limit;      // rows that this rank has memory for
  HostSignal host;
};

/// Rows of this rank's tokens that do not lie in its window yet.
struct CallerRows {
  char const* gmem = nullptr;  ///< [tokens,d] bf16 at a multiple of 16 bytes; null: they lie there
  std::int64_t pitch = 0;      ///< bytes from row to row, a multiple of 16
};
/// Most bytes of rows that dispatch copies. cudaMemcpyAsync has more in flight, and its launch is paid for with more.
constexpr std::int64_t kMostCopiedBytes = std::int64_t{8} << 20;

/// Words that dispatch sets to 0 for a kernel behind it.
struct ZeroedWords {
  std::int32_t* gmem = nullptr;
  std::int32_t count = 0;
};

struct DispatchArguments {
  ExchangeArguments exchange;  // without gmem_scores and gmem_pool
  RowTables tables;            // of the rows to pull
  RowTables saved;             // out: a copy of them; nulls: none is wanted
  std::int64_t capacity;       // rows that the memory below, and `saved`, hold
  bool may_overflow;           // true: rows beyond that are left out, and no rank is signalled
  char* gmem_rows;         // out [capacity,d] bf16: rows of x; null: an earlier call pulled them
  char* gmem_second_rows;  // out, the same of second_x; or null
  std::int32_t* gmem_slot_of_pair;  // out [tokens*max_top_k]: the pair, or -1: rows of the slots
  bool gathered = false;  // rows and second_rows are [ranks*max_tokens,d]: gathered_row(), once
  /// Where they do not lie in the window, dispatch copies them there; with gmem_rows alone.
  CallerRows x = {}, second_x = {};
  ZeroedWords zeroed = {};  // with gmem_rows alone
  /// Out: the tables of a layer of `capacity` grouped rows, whose gather_index says where their
  /// tokens lie in `rows`; without addresses none are wanted.
  RoutingView routing = {};
  /// Out, of begin_dispatch: [local_experts], how many of an expert's blocks, the first ones, have rows of this rank's
  /// tokens alone; 0 for experts before ready_from, whose weights are read once therefore.
  std::int32_t* gmem_ready_blocks = nullptr;
  std::int32_t ready_from = 0;
  /// CTAs of dispatch_beside that stay for second_x.
  std::int32_t second_ctas = 0;
  /// begin_dispatch sets it to 0, and dispatch_beside counts its CTAs whose rows of x are there.
  std::uint32_t* gmem_arrivals = nullptr;
};

/// Says what is made of the slots of a rank's tokens once all rows are back.
struct SlotResults {
  std::int32_t const* gmem_slot_of_pair = nullptr;  // [tokens*max_top_k]: the pair, or -1
  float const* gmem_scores = nullptr;               // [tokens,max_top_k]; null: all 1
  char* gmem_o = nullptr;  // out [tokens,d] bf16: fp32 sums over choices, rounded once
  float* gmem_pair_dscores =
      nullptr;  // out [tokens*max_top_k], with dscores: 0 where the slot is -1
};

struct CombineArguments {
  ExchangeArguments exchange;  // without gmem_topk_ids, gmem_scores and gmem_pool
  RowTables tables;            // gmem_scores unused
  std::int64_t capacity;
  char const* gmem_rows;      // [capacity,d] bf16
  float const* gmem_dscores;  // [capacity], to dscores of the windows; or null
  SlotResults results = {};   // without gmem_o the caller adds up the slots
  /// In place of gmem_dscores, or null: [capacity,ds_groups], of each row's the sum.
  float const* gmem_ds_partials = nullptr;
  std::int32_t ds_groups = 0;
};

/// sm_count is the number of CTAs. Those of route wait for each other, so all must be resident: its launch is
/// cooperative. route and dispatch hold sm_count SMs until the slowest rank has come this far.
cudaError_t launch_route(RouteArguments const& args, int sm_count, cudaStream_t stream);
/// begun: null, or an event without timing that is recorded when all CTAs have an SM.
cudaError_t launch_dispatch(DispatchArguments const& args, int sm_count, cudaStream_t stream,
                            cudaEvent_t begun = nullptr);
/// dispatch of gathered tokens by two kernels: behind the first this rank's tokens are there, and all tables; the
/// second one, on another stream behind the first, brings the peers', which are there once `arrivals` is sm_count, and
/// then those of second_x. x and second_x lie anywhere, also in the window.
cudaError_t launch_begin_dispatch(DispatchArguments const& args, int sm_count, cudaStream_t stream);
cudaError_t launch_dispatch_beside(DispatchArguments const& args, int sm_count, cudaStream_t stream,
                                   cudaEvent_t begun);
/// When it ends, all rows of this rank's tokens lie in its slots, and what `results` asks for is there.
cudaError_t launch_combine(CombineArguments const& args, int sm_count, cudaStream_t stream,
                           cudaEvent_t begun = nullptr);

}  // namespace tessera::expert_parallel

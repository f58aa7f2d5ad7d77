// SPDX-License-Identifier: Apache-2.0
// One rank of a group, ready to make passes: its windows, its workspace, the word that says what went wrong. No CUDA
// headers: a build without CUDA has the same functions (not_built.cpp), which say so.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/awaited_rows.hpp"
#include "expert_parallel/plan/fault.hpp"
#include "expert_parallel/plan/plan.hpp"
#include "expert_parallel/transport/engine.hpp"
#include "tessera/context.hpp"
#include "tessera/routing.hpp"
#include "tessera/shape.hpp"

namespace tessera::expert_parallel {

struct SessionConfig {
  ExchangeShape shape;
  Activation activation;
  std::int32_t rank = 0, device = 0, sm_count = 0;
  std::array<void*, kMaxRanks> windows = {};
  void* workspace = nullptr;
  double time_limit = 0;  // seconds
};

/// Rows [tokens,hidden] of a caller, bf16.
struct StagedRows {
  void const* gmem = nullptr;
  std::int64_t pitch = 0;  // elements from row to row; of one row it may be anything

  [[nodiscard]] std::int64_t pitch_of(std::int64_t tokens, std::int64_t hidden) const noexcept {
    return tokens == 1 ? hidden : pitch;
  }
  /// True if they are the rows in that place of the window, so that nothing is copied there.
  [[nodiscard]] bool lie_at(void const* place, std::int64_t tokens,
                            std::int64_t hidden) const noexcept {
    return tokens == 0 || (gmem == place && pitch_of(tokens, hidden) == hidden);
  }
};

/// Tables of an owner's rows; shapes as in DispatchTables.
struct PassTables {
  void* gmem_expert_offsets = nullptr;
  void* gmem_row_origins = nullptr;
  void* gmem_row_scores = nullptr;
  std::int64_t capacity = 0;  ///< rows that its memory holds
};

/// Checked tensors of one pass; shapes as in ExpertParallelArgs.
struct PassTensors {
  std::int32_t tokens = 0;
  StagedRows x;
  std::int32_t const* gmem_topk_ids = nullptr;
  float const* gmem_topk_weights = nullptr;
  void const* gmem_w_up = nullptr;
  void const* gmem_w_down = nullptr;
  void const* gmem_b_up = nullptr;  // both biases or none
  void const* gmem_b_down = nullptr;
  void* gmem_o = nullptr;
  PassTables saved = {};   // for backward; without tables nothing is saved
  void* gmem_h = nullptr;  // of as many rows, or null
  bool may_overflow = false;
};

/// Checked tensors of ExpertParallel::route, dispatch and combine.
struct RouteTensors {
  std::int32_t tokens = 0;
  std::int32_t const* gmem_topk_ids = nullptr;
  float const* gmem_topk_weights = nullptr;
  std::int32_t row_limit = 0;  // rows
};
struct DispatchTensors {
  std::int32_t tokens = 0;
  StagedRows x, second_x;
  bool has_x = true, has_second = false;
  bool may_overflow = false;
  std::int32_t const* gmem_topk_ids = nullptr;
  PassTables tables;
  void* gmem_rows = nullptr;
  void* gmem_second_rows = nullptr;
  bool gathered = false;                // they are tokens, there once
  RoutingView routing = {};             // tables of a layer of these rows, or no addresses
  std::span<std::int32_t> zeroed = {};  // words that become 0, with x
  std::int32_t sms = 0;                 // 0: all
  void* begun = nullptr;                // event, or null
};
struct CombineTensors {
  std::int32_t tokens = 0;
  PassTables tables;
  void const* gmem_rows = nullptr;
  float const* gmem_topk_weights = nullptr;  // or null: rows are added as they are
  float const* gmem_row_dscores = nullptr;   // or null
  float const* gmem_ds_partials = nullptr;   // in place of row_dscores, or null
  std::int32_t ds_groups = 0;
  float* gmem_dscores = nullptr;
  void* gmem_o = nullptr;
  std::int32_t sms = 0;   // 0: all
  void* begun = nullptr;  // event, or null
};

/// Kernels write these words for the host, in pinned memory.
struct HostWords;
/// Passes of which it is remembered how many rows they had.
constexpr std::uint64_t kCountedPasses = 4096;

class Session {
 public:
  static std::size_t workspace_bytes(ExchangeShape const& shape, std::int32_t sm_count) noexcept;
  /// Prepares the workspace; it is ready on return.
  static Expected<std::unique_ptr<Session>> open(SessionConfig const& config) noexcept;
  Session(Session const&) = delete;
  Session& operator=(Session const&) = delete;
  ~Session();

  [[nodiscard]] void* x() const noexcept;
  [[nodiscard]] void* second_x() const noexcept;
  Status forward(PassTensors const& tensors, Stream stream) noexcept;
  /// The three of a pass in this order, or the last two with tables of an earlier one. invalid_argument where another
  /// one is due.
  Status route(RouteTensors const& tensors, Stream stream) noexcept;
  /// Returns the rows of the pass `passes_ago` before the last one that route() or forward() counted; waits until they
  /// are known.
  Expected<RoutedRows> routed_rows(std::int64_t passes_ago) noexcept;
  Status dispatch(DispatchTensors const& tensors, Stream stream) noexcept;
  /// dispatch() of gathered x, of a pass with tables of an earlier one, and then that of second_x, on tensors.sms SMs
  /// of the side stream: what follows on `stream` has this rank's rows of x, and may take all other SMs. Returns how
  /// the others are awaited. The side stream ends with rows of second_x.
  Expected<core::AwaitedRows> dispatch_beside(DispatchTensors const& tensors, Stream stream,
                                              Stream side) noexcept;
  Status combine(CombineTensors const& tensors, Stream stream) noexcept;
  /// Lets what the side stream gets from now on wait for what `stream` has. This and the next three need training, and
  /// those that enqueue a DeviceScope of the caller.
  Status fork(Stream stream, Stream side) noexcept;
  /// The event that the next call on the side stream records once it has its SMs.
  [[nodiscard]] void* begun() const noexcept { return begun_; }
  /// `stream` waits until that call has them: what follows would take all.
  Status wait_until_begun(Stream stream) noexcept;
  /// `stream` waits for what the side stream has.
  Status join(Stream stream, Stream side) noexcept;
  [[nodiscard]] Status fault() const noexcept;

 private:
  enum class Stage : std::uint8_t { none, routed, dispatched };

  explicit Session(SessionConfig const& config) noexcept : config_(config) {}
  [[nodiscard]] Status check_stage(char const* call, bool allowed) const noexcept;
  void count_on(Stream stream) noexcept;

  SessionConfig config_;
  HostWords* host_ = nullptr;
  Stage stage_ = Stage::none;  // of the pass that has begun
  std::int32_t tokens_ = 0;    // of that pass
  std::uint64_t counted_ = 0;  // passes whose rows are signalled to the host; the last one's ticket
  void* counted_on_ = nullptr;  // its stream
  // Events of backward passes, with training.
  void* forked_ = nullptr;
  void* begun_ = nullptr;
  void* done_ = nullptr;
};

}  // namespace tessera::expert_parallel

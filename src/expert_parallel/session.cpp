// SPDX-License-Identifier: Apache-2.0
#include "expert_parallel/session.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <thread>

#include "core/workspace.hpp"
#include "cuda/host/error_text.hpp"
#include "expert_parallel/fused/forward.hpp"
#include "expert_parallel/plan/ready_experts.hpp"

namespace tessera::expert_parallel {

struct HostWords {
  Fault fault = {};
  std::array<std::uint64_t, kCountedPasses> rows =
      {};  // RoutedWord of pass i at i mod kCountedPasses

  [[nodiscard]] std::uint64_t& rows_of(std::uint64_t pass) noexcept {
    return rows[pass % kCountedPasses];
  }
};

namespace {

using cuda::host::check;

struct Regions {
  core::WorkspacePlan plan;
  core::Region<char> local;
  core::Region<std::uint32_t> epoch;
  core::Region<char> pool, a;
  // training: what route() leaves for dispatch(), and that for combine()
  core::Region<std::int32_t> expert_offsets;
  core::Region<RowOrigin> row_origins;
  core::Region<float> row_scores;
  core::Region<std::int32_t> slot_of_pair;
  core::Region<std::int32_t> ready_blocks;
  core::Region<std::uint32_t> arrivals;

  Regions(ExchangeShape const& s, std::int32_t sm_count) noexcept
      : local(plan.add<char>(LocalLayout(s, sm_count).bytes)),
        epoch(plan.add<std::uint32_t>(1)),
        pool(plan.add<char>(2 * s.pool_rows() * s.hidden)),
        a(plan.add<char>(2 * s.pool_rows() * s.intermediate)) {
    if (!s.training) return;
    expert_offsets = plan.add<std::int32_t>(s.local_experts() + 1);
    row_origins = plan.add<RowOrigin>(s.max_rows());
    row_scores = plan.add<float>(s.max_rows());
    slot_of_pair = plan.add<std::int32_t>(std::int64_t{s.max_tokens} * s.max_top_k);
    ready_blocks = plan.add<std::int32_t>(s.local_experts());
    arrivals = plan.add<std::uint32_t>(1);
  }
  [[nodiscard]] RowTables tables(std::byte* base) const noexcept {
    return {expert_offsets.in(base), row_origins.in(base), row_scores.in(base)};
  }
};

Status make_host_words(std::int32_t device, HostWords*& words) noexcept {
  DeviceScope const scope(device_calls(), device, ContextChoice::primary);
  TESSERA_TRY(scope.status());
  void* memory = nullptr;
  TESSERA_TRY(
      check(cudaHostAlloc(&memory, sizeof(HostWords), cudaHostAllocPortable), "cudaHostAlloc"));
  words = new (memory) HostWords{};
  return {};
}

// Behind so many passes that were counted.
HostSignal next_host_signal(HostWords* words, std::uint64_t counted) noexcept {
  return {&words->rows_of(counted + 1), static_cast<std::uint32_t>(counted + 1)};
}

RowTables row_tables(PassTables const& tables) noexcept {
  return {static_cast<std::int32_t*>(tables.gmem_expert_offsets),
          static_cast<RowOrigin*>(tables.gmem_row_origins),
          static_cast<float*>(tables.gmem_row_scores)};
}

// Rows to their place in the window.
Status stage(StagedRows const& rows, std::int32_t tokens, std::int32_t hidden, void* place,
             cudaStream_t stream) noexcept {
  if (rows.lie_at(place, tokens, hidden)) return {};
  std::size_t const row = 2 * static_cast<std::size_t>(hidden);
  std::size_t const pitch = 2 * static_cast<std::size_t>(rows.pitch_of(tokens, hidden));
  if (pitch == row) {  // 18 us where the call below takes 42, at 34 MB on an H200
    return check(cudaMemcpyAsync(place, rows.gmem, row * static_cast<std::size_t>(tokens),
                                 cudaMemcpyDeviceToDevice, stream),
                 "cudaMemcpyAsync");
  }
  return check(
      cudaMemcpy2DAsync(place, row, rows.gmem, pitch, row, static_cast<std::size_t>(tokens),
                        cudaMemcpyDeviceToDevice, stream),
      "cudaMemcpy2DAsync");
}

// Has rows of dispatch in their place in the window: by the kernel, which gets what this returns, or by a copy before
// it. by_kernel: whether that is possible at all.
Expected<CallerRows> stage_for_dispatch(StagedRows const& rows, std::int32_t tokens,
                                        std::int32_t hidden, void* place, bool by_kernel,
                                        cudaStream_t stream) noexcept {
  std::int64_t const pitch = 2 * rows.pitch_of(tokens, hidden);
  if (by_kernel && !rows.lie_at(place, tokens, hidden) &&
      std::int64_t{2} * tokens * hidden <= kMostCopiedBytes &&
      reinterpret_cast<std::uintptr_t>(rows.gmem) % 16 == 0 && pitch % 16 == 0) {
    return CallerRows{static_cast<char const*>(rows.gmem), pitch};
  }
  TESSERA_TRY(stage(rows, tokens, hidden, place, stream));
  return CallerRows{};
}

// SMs that bring x while GEMMs run that do not read it.
constexpr int kSecondSms = 8;

// Says where kernels read the caller's rows by 16 bytes; where they do not lie so, their place in the window, to which
// they are copied.
Expected<CallerRows> where_kernels_read(StagedRows const& rows, std::int32_t tokens,
                                        std::int32_t hidden, void* place, Stream stream) noexcept {
  std::int64_t const pitch = 2 * rows.pitch_of(tokens, hidden);
  if (tokens > 0 && reinterpret_cast<std::uintptr_t>(rows.gmem) % 16 == 0 && pitch % 16 == 0) {
    return CallerRows{static_cast<char const*>(rows.gmem), pitch};
  }
  TESSERA_TRY(stage(rows, tokens, hidden, place, static_cast<cudaStream_t>(stream.native)));
  return CallerRows{static_cast<char const*>(place), std::int64_t{2} * hidden};
}

// Lets what `next` gets from now on wait for what `first` has. event: that no other pair of streams uses.
Status order(void* event, Stream first, Stream next) noexcept {
  auto* const native = static_cast<cudaEvent_t>(event);
  TESSERA_TRY(
      check(cudaEventRecord(native, static_cast<cudaStream_t>(first.native)), "cudaEventRecord"));
  return check(cudaStreamWaitEvent(static_cast<cudaStream_t>(next.native), native),
               "cudaStreamWaitEvent");
}

// 0: all.
std::int32_t sms_of(std::int32_t asked, SessionConfig const& config) noexcept {
  return asked > 0 ? std::min(asked, config.sm_count) : config.sm_count;
}

char* own_window(SessionConfig const& config) noexcept {
  return static_cast<char*>(config.windows[static_cast<std::size_t>(config.rank)]);
}

// Returns what all kernels of a pass get; without ids, scores and pool.
ExchangeArguments exchange_of(SessionConfig const& config, Regions const& regions, Fault* fault,
                              std::int32_t tokens) noexcept {
  std::byte* const base = core::WorkspacePlan::align(config.workspace);
  return {.shape = config.shape,
          .window = WindowLayout(config.shape),
          .local = LocalLayout(config.shape, config.sm_count),
          .rank = config.rank,
          .windows = Windows(config.windows),
          .gmem_local = regions.local.in(base),
          .gmem_epoch = regions.epoch.in(base),
          .fault = fault,
          .limit_ns = static_cast<std::uint64_t>(config.time_limit * 1e9),
          .jitter_ns = 0,
          .tokens = tokens,
          .gmem_topk_ids = nullptr,
          .gmem_scores = nullptr,
          .gmem_pool = nullptr};
}

// Returns what dispatch and the two kernels in its place get alike: with tables of an earlier pass, and rows in the
// window.
DispatchArguments dispatch_arguments(SessionConfig const& config, Regions const& regions,
                                     Fault* fault, DispatchTensors const& tensors) noexcept {
  std::byte* const base = core::WorkspacePlan::align(config.workspace);
  ExchangeArguments exchange = exchange_of(config, regions, fault, tensors.tokens);
  exchange.gmem_topk_ids = tensors.gmem_topk_ids;
  return {.exchange = exchange,
          .tables = row_tables(tensors.tables),
          .saved = {},
          .capacity = tensors.tables.capacity,
          .may_overflow = tensors.may_overflow,
          .gmem_rows = static_cast<char*>(tensors.gmem_rows),
          .gmem_second_rows = static_cast<char*>(tensors.gmem_second_rows),
          .gmem_slot_of_pair = regions.slot_of_pair.in(base),
          .gathered = tensors.gathered,
          .zeroed = {tensors.zeroed.data(), static_cast<std::int32_t>(tensors.zeroed.size())},
          .routing = tensors.routing};
}

}  // namespace

std::size_t Session::workspace_bytes(ExchangeShape const& shape, std::int32_t sm_count) noexcept {
  return Regions(shape, sm_count).plan.bytes();
}

Expected<std::unique_ptr<Session>> Session::open(SessionConfig const& config) noexcept {
  DeviceScope const scope(device_calls(), config.device, ContextChoice::any_of_device);
  TESSERA_TRY(scope.status());
  std::unique_ptr<Session> session(new (std::nothrow) Session(config));
  if (session == nullptr)
    return Status::error(StatusCode::out_of_memory, "no memory for a session; end other processes");
  TESSERA_TRY(make_host_words(config.device, session->host_));
  if (config.shape.training) {
    for (void** event : {&session->forked_, &session->begun_, &session->done_}) {
      cudaEvent_t made = nullptr;
      TESSERA_TRY(check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming),
                        "cudaEventCreateWithFlags"));
      *event = made;
    }
  }
  // Whatever had the workspace before may still write to it, on a stream that cudaMemset does not wait for.
  TESSERA_TRY(device_calls().synchronize());
  Regions const regions(config.shape, config.sm_count);
  std::byte* const base = core::WorkspacePlan::align(config.workspace);
  std::uint32_t const first = 1;  // words of the windows are zero
  TESSERA_TRY(
      check(cudaMemset(regions.local.in(base), 0,
                       static_cast<std::size_t>(LocalLayout(config.shape, config.sm_count).bytes)),
            "cudaMemset"));
  TESSERA_TRY(
      check(cudaMemcpy(regions.epoch.in(base), &first, sizeof first, cudaMemcpyHostToDevice),
            "cudaMemcpy"));
  TESSERA_TRY(device_calls().synchronize());
  return session;
}

Session::~Session() {
  if (host_ == nullptr) return;
  {  // a pass may still write to it
    DeviceScope const scope(device_calls(), config_.device, ContextChoice::any_of_device);
    if (scope.status().ok()) {
      static_cast<void>(device_calls().synchronize());
      for (void* event : {forked_, begun_, done_}) {
        if (event != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(event));
      }
    }
  }
  DeviceScope const scope(device_calls(), config_.device, ContextChoice::primary);
  cudaFreeHost(host_);
}

void* Session::x() const noexcept { return own_window(config_) + WindowLayout(config_.shape).x; }

void* Session::second_x() const noexcept {
  return own_window(config_) + WindowLayout(config_.shape).second_x;
}

Status Session::check_stage(char const* call, bool allowed) const noexcept {
  constexpr char const* kNext[] = {"begin a pass with route(), or dispatch() with tables",
                                   "dispatch() is next", "combine() is next"};
  if (allowed) return fault();
  return Status::invalid("%s: %s", call, kNext[static_cast<int>(stage_)]);
}

Status Session::forward(PassTensors const& tensors, Stream stream) noexcept {
  TESSERA_TRY(check_stage("forward", stage_ == Stage::none));
  DeviceScope const scope(device_calls(), config_.device, ContextChoice::any_of_device);
  TESSERA_TRY(scope.status());
  auto* const native = static_cast<cudaStream_t>(stream.native);
  ExchangeShape const& s = config_.shape;
  // The kernel copies x while it routes, by copies of 16 bytes and more.
  std::int64_t const pitch = tensors.x.pitch_of(tensors.tokens, s.hidden);
  bool const by_kernel = !tensors.x.lie_at(x(), tensors.tokens, s.hidden) &&
                         reinterpret_cast<std::uintptr_t>(tensors.x.gmem) % 16 == 0 &&
                         2 * pitch % 16 == 0;
  if (!by_kernel) TESSERA_TRY(stage(tensors.x, tensors.tokens, s.hidden, x(), native));
  Regions const regions(s, config_.sm_count);
  std::byte* const base = core::WorkspacePlan::align(config_.workspace);
  ExchangeArguments exchange = exchange_of(config_, regions, &host_->fault, tensors.tokens);
  exchange.gmem_topk_ids = tensors.gmem_topk_ids;
  exchange.gmem_scores = tensors.gmem_topk_weights;
  exchange.gmem_pool = regions.pool.in(base);
  SavedPass saved = {};
  bool const saves = tensors.saved.gmem_expert_offsets != nullptr;
  if (saves) {
    // Each result goes back alone, as combine() does it.
    if (s.transfer == Transfer::partial_combine) exchange.shape.transfer = Transfer::once;
    exchange.partial_experts = exchange.shape.partial_experts();
    saved = {.tables = row_tables(tensors.saved),
             .capacity = tensors.saved.capacity,
             .may_overflow = tensors.may_overflow,
             .gmem_h = static_cast<char*>(tensors.gmem_h),
             .host = next_host_signal(host_, counted_)};
  }
  TESSERA_TRY(check(launch_forward({.exchange = exchange,
                                    .activation = config_.activation,
                                    .gmem_w_up = tensors.gmem_w_up,
                                    .gmem_w_down = tensors.gmem_w_down,
                                    .gmem_b_up = tensors.gmem_b_up,
                                    .gmem_b_down = tensors.gmem_b_down,
                                    .gmem_a = regions.a.in(base),
                                    .gmem_x = by_kernel ? tensors.x.gmem : nullptr,
                                    .x_pitch = pitch,
                                    .gmem_o = tensors.gmem_o,
                                    .lag = -1,
                                    .saved = saved},
                                   config_.sm_count, native),
                    "launch of the forward pass"));
  if (saves) count_on(stream);
  return {};
}

void Session::count_on(Stream stream) noexcept {
  ++counted_;
  counted_on_ = stream.native;
}

Status Session::route(RouteTensors const& tensors, Stream stream) noexcept {
  TESSERA_TRY(check_stage("route", stage_ == Stage::none));
  DeviceScope const scope(device_calls(), config_.device, ContextChoice::any_of_device);
  TESSERA_TRY(scope.status());
  Regions const regions(config_.shape, config_.sm_count);
  ExchangeArguments exchange = exchange_of(config_, regions, &host_->fault, tensors.tokens);
  exchange.gmem_topk_ids = tensors.gmem_topk_ids;
  exchange.gmem_scores = tensors.gmem_topk_weights;
  TESSERA_TRY(
      check(launch_route({.exchange = exchange,
                          .made = regions.tables(core::WorkspacePlan::align(config_.workspace)),
                          .row_limit = tensors.row_limit,
                          .host = next_host_signal(host_, counted_)},
                         config_.sm_count, static_cast<cudaStream_t>(stream.native)),
            "launch of route"));
  count_on(stream);
  stage_ = Stage::routed;
  tokens_ = tensors.tokens;
  return {};
}

Expected<RoutedRows> Session::routed_rows(std::int64_t passes_ago) noexcept {
  auto const known_passes = static_cast<std::int64_t>(std::min(counted_, kCountedPasses));
  if (passes_ago < 0 || passes_ago >= known_passes) {
    return Status::invalid("routed_rows: passes_ago=%lld; the last %lld have been counted",
                           static_cast<long long>(passes_ago),
                           static_cast<long long>(known_passes));
  }
  std::uint64_t const pass = counted_ - static_cast<std::uint64_t>(passes_ago);
  auto const ticket = static_cast<std::uint32_t>(pass);
  DeviceScope const scope(device_calls(), config_.device, ContextChoice::any_of_device);
  TESSERA_TRY(scope.status());
  std::atomic_ref<std::uint64_t> const word(host_->rows_of(pass));
  auto const known = [&] { return RoutedWord::of(word.load(std::memory_order_acquire)); };
  // The stream is asked seldom: the driver's locks are those of whoever enqueues.
  constexpr int kLooksPerQuery = 1 << 14;
  for (int look = 1; known().ticket != ticket; ++look) {
    if (look % kLooksPerQuery != 0) continue;
    TESSERA_TRY(fault());
    cudaError_t const error = cudaStreamQuery(static_cast<cudaStream_t>(counted_on_));
    if (error == cudaErrorNotReady) {
      std::this_thread::yield();  // and goes on looking
    } else if (error != cudaSuccess) {
      return check(error, "cudaStreamQuery");
    } else if (known().ticket != ticket) {  // it has ended without them
      TESSERA_TRY(fault());
      return Status::error(
          StatusCode::device_error,
          "routed_rows: the pass did not run, though its stream ended; make the group anew");
    }
  }
  return RoutedRows{known().rows, known().all_fit};
}

Status Session::dispatch(DispatchTensors const& tensors, Stream stream) noexcept {
  if (!tensors.has_x && stage_ != Stage::dispatched) {
    return Status::invalid("dispatch: second_x alone comes behind dispatch() of x");
  }
  TESSERA_TRY(check_stage("dispatch", stage_ != Stage::dispatched || !tensors.has_x));
  bool const routed = stage_ == Stage::routed;
  if (stage_ != Stage::none && tensors.tokens != tokens_) {
    return Status::invalid("x: %d tokens; the pass began with %d, pass as many", tensors.tokens,
                           tokens_);
  }
  DeviceScope const scope(device_calls(), config_.device, ContextChoice::any_of_device);
  TESSERA_TRY(scope.status());
  auto* const native = static_cast<cudaStream_t>(stream.native);
  std::int32_t const hidden = config_.shape.hidden;
  CallerRows copied, second_copied;
  if (tensors.has_x) {
    auto const rows = stage_for_dispatch(tensors.x, tensors.tokens, hidden, x(), true, native);
    if (!rows.ok()) return rows.status();
    copied = rows.value();
  }
  if (tensors.has_second) {
    auto const rows = stage_for_dispatch(tensors.second_x, tensors.tokens, hidden, second_x(),
                                         tensors.has_x, native);
    if (!rows.ok()) return rows.status();
    second_copied = rows.value();
  }
  Regions const regions(config_.shape, config_.sm_count);
  DispatchArguments args = dispatch_arguments(config_, regions, &host_->fault, tensors);
  if (routed) {
    args.saved = args.tables;
    args.tables = regions.tables(core::WorkspacePlan::align(config_.workspace));
  }
  args.x = copied;
  args.second_x = second_copied;
  TESSERA_TRY(check(launch_dispatch(args, sms_of(tensors.sms, config_), native,
                                    static_cast<cudaEvent_t>(tensors.begun)),
                    "launch of dispatch"));
  stage_ = Stage::dispatched;
  tokens_ = tensors.tokens;
  return {};
}

Expected<core::AwaitedRows> Session::dispatch_beside(DispatchTensors const& tensors, Stream stream,
                                                     Stream side) noexcept {
  TESSERA_TRY(check_stage("dispatch", stage_ == Stage::none));
  DeviceScope const scope(device_calls(), config_.device, ContextChoice::any_of_device);
  TESSERA_TRY(scope.status());
  std::int32_t const hidden = config_.shape.hidden;
  auto const x = where_kernels_read(tensors.x, tensors.tokens, hidden, this->x(), stream);
  if (!x.ok()) return x.status();
  Regions const regions(config_.shape, config_.sm_count);
  std::byte* const base = core::WorkspacePlan::align(config_.workspace);
  DispatchArguments args = dispatch_arguments(config_, regions, &host_->fault, tensors);
  args.x = x.value();
  args.gmem_ready_blocks = regions.ready_blocks.in(base);
  args.ready_from = first_ready_expert(config_.shape);
  args.gmem_arrivals = regions.arrivals.in(base);
  auto* const begun = static_cast<cudaEvent_t>(begun_);
  int const sms = sms_of(tensors.sms, config_);
  args.second_ctas = std::min(sms, kSecondSms);
  TESSERA_TRY(
      check(launch_begin_dispatch(args, config_.sm_count, static_cast<cudaStream_t>(stream.native)),
            "launch of begin_dispatch"));
  TESSERA_TRY(fork(stream, side));
  auto const second =
      where_kernels_read(tensors.second_x, tensors.tokens, hidden, second_x(), side);
  if (!second.ok()) return second.status();
  args.second_x = second.value();
  TESSERA_TRY(
      check(launch_dispatch_beside(args, sms, static_cast<cudaStream_t>(side.native), begun),
            "launch of dispatch_beside"));
  TESSERA_TRY(wait_until_begun(stream));
  stage_ = Stage::dispatched;
  tokens_ = tensors.tokens;
  return core::AwaitedRows{.gmem_ready_blocks = args.gmem_ready_blocks,
                           .gmem_arrivals = args.gmem_arrivals,
                           .arrivals = static_cast<std::uint32_t>(sms),
                           .sms_beside = args.second_ctas};
}

Status Session::combine(CombineTensors const& tensors, Stream stream) noexcept {
  // Not whether a rank has given up: the others wait for this one's rows, and shall hear of it at their end.
  if (stage_ != Stage::dispatched) TESSERA_TRY(check_stage("combine", false));
  if (tensors.tokens != tokens_) {
    return Status::invalid("o: %d tokens; dispatch() had %d, pass as many", tensors.tokens,
                           tokens_);
  }
  DeviceScope const scope(device_calls(), config_.device, ContextChoice::any_of_device);
  TESSERA_TRY(scope.status());
  auto* const native = static_cast<cudaStream_t>(stream.native);
  Regions const regions(config_.shape, config_.sm_count);
  std::byte* const base = core::WorkspacePlan::align(config_.workspace);
  ExchangeArguments const exchange = exchange_of(config_, regions, &host_->fault, tensors.tokens);
  TESSERA_TRY(check(
      launch_combine({.exchange = exchange,
                      .tables = row_tables(tensors.tables),
                      .capacity = tensors.tables.capacity,
                      .gmem_rows = static_cast<char const*>(tensors.gmem_rows),
                      .gmem_dscores = tensors.gmem_row_dscores,
                      .results = {.gmem_slot_of_pair = regions.slot_of_pair.in(base),
                                  .gmem_scores = tensors.gmem_topk_weights,
                                  .gmem_o = static_cast<char*>(tensors.gmem_o),
                                  .gmem_pair_dscores = tensors.gmem_dscores},
                      .gmem_ds_partials = tensors.gmem_ds_partials,
                      .ds_groups = tensors.ds_groups},
                     sms_of(tensors.sms, config_), native, static_cast<cudaEvent_t>(tensors.begun)),
      "launch of combine"));
  stage_ = Stage::none;
  return {};
}

Status Session::fork(Stream stream, Stream side) noexcept { return order(forked_, stream, side); }

Status Session::wait_until_begun(Stream stream) noexcept {
  return check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream.native),
                                   static_cast<cudaEvent_t>(begun_)),
               "cudaStreamWaitEvent");
}

Status Session::join(Stream stream, Stream side) noexcept { return order(done_, side, stream); }

Status Session::fault() const noexcept { return fault_status(host_->fault, config_.time_limit); }

}  // namespace tessera::expert_parallel

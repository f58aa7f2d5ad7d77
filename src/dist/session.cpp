// SPDX-License-Identifier: Apache-2.0
#include "dist/session.hpp"

#include <cuda_runtime.h>

#include <new>

#include "core/workspace.hpp"
#include "dist/kernels/forward.hpp"

namespace tessera::dist {
namespace {

Status check(cudaError_t error, char const* call) noexcept {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // leaves nothing behind for the caller's own calls
  return Status::error(StatusCode::device_error, "%s: %s", call, cudaGetErrorString(error));
}

struct Regions {
  core::WorkspacePlan plan;
  core::Region<char> local;
  core::Region<std::uint32_t> epoch;
  core::Region<char> pool, a;

  Regions(ExchangeShape const& s, std::int32_t sm_count) noexcept
      : local(plan.add<char>(LocalLayout(s, sm_count).bytes)),
        epoch(plan.add<std::uint32_t>(1)),
        pool(plan.add<char>(2 * s.pool_rows() * s.hidden)),
        a(plan.add<char>(2 * s.pool_rows() * s.intermediate)) {}
};

Status make_fault(std::int32_t device, Fault*& fault) noexcept {
  DeviceScope const scope(device_calls(), device, ContextChoice::primary);
  TESSERA_TRY(scope.status());
  void* memory = nullptr;
  TESSERA_TRY(check(cudaHostAlloc(&memory, sizeof(Fault), cudaHostAllocPortable), "cudaHostAlloc"));
  fault = new (memory) Fault{};
  return {};
}

}  // namespace

std::size_t Session::workspace_bytes(ExchangeShape const& shape, std::int32_t sm_count) noexcept {
  return Regions(shape, sm_count).plan.bytes();
}

Expected<std::unique_ptr<Session>> Session::open(SessionConfig const& config) noexcept {
  DeviceScope const scope(device_calls(), config.device, ContextChoice::any_of_device);
  TESSERA_TRY(scope.status());
  std::unique_ptr<Session> session(new (std::nothrow) Session(config));
  if (session == nullptr) return Status::error(StatusCode::out_of_memory, "no memory for a group");
  TESSERA_TRY(make_fault(config.device, session->fault_));
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
  if (fault_ == nullptr) return;
  {  // a pass may still write to it
    DeviceScope const scope(device_calls(), config_.device, ContextChoice::any_of_device);
    if (scope.status().ok()) static_cast<void>(device_calls().synchronize());
  }
  DeviceScope const scope(device_calls(), config_.device, ContextChoice::primary);
  cudaFreeHost(fault_);
}

void* Session::x() const noexcept {
  return static_cast<char*>(config_.windows[static_cast<std::size_t>(config_.rank)]) +
         WindowLayout(config_.shape).x;
}

Status Session::forward(PassTensors const& tensors, Stream stream) noexcept {
  TESSERA_TRY(fault());
  DeviceScope const scope(device_calls(), config_.device, ContextChoice::any_of_device);
  TESSERA_TRY(scope.status());
  auto* const native = static_cast<cudaStream_t>(stream.native);
  ExchangeShape const& s = config_.shape;
  // The kernel copies x while it routes, by copies of 16 bytes and more.
  std::int64_t const pitch = tensors.pitch(s.hidden);
  bool const copied = !is_in_place(tensors, s.hidden, x());
  bool const by_kernel =
      copied && reinterpret_cast<std::uintptr_t>(tensors.gmem_x) % 16 == 0 && 2 * pitch % 16 == 0;
  if (copied && !by_kernel) {
    std::size_t const row = 2 * static_cast<std::size_t>(s.hidden);
    TESSERA_TRY(
        check(cudaMemcpy2DAsync(x(), row, tensors.gmem_x, 2 * static_cast<std::size_t>(pitch), row,
                                static_cast<std::size_t>(tensors.tokens), cudaMemcpyDeviceToDevice,
                                native),
              "cudaMemcpy2DAsync"));
  }
  Regions const regions(s, config_.sm_count);
  std::byte* const base = core::WorkspacePlan::align(config_.workspace);
  ExchangeArguments exchange{.shape = s,
                             .window = WindowLayout(s),
                             .local = LocalLayout(s, config_.sm_count),
                             .rank = config_.rank,
                             .windows = {},
                             .gmem_local = regions.local.in(base),
                             .gmem_epoch = regions.epoch.in(base),
                             .fault = fault_,
                             .limit_ns = static_cast<std::uint64_t>(config_.time_limit * 1e9),
                             .jitter_ns = 0,
                             .tokens = tensors.tokens,
                             .gmem_topk_ids = tensors.gmem_topk_ids,
                             .gmem_scores = tensors.gmem_topk_weights,
                             .gmem_slot_of_pair = nullptr,
                             .gmem_expert_offsets = nullptr,
                             .gmem_pool = regions.pool.in(base),
                             .gmem_y = nullptr};
  for (std::size_t r = 0; r < static_cast<std::size_t>(s.ranks); ++r) {
    exchange.windows[r] = static_cast<char*>(config_.windows[r]);
  }
  return check(launch_forward({.exchange = exchange,
                               .activation = config_.activation,
                               .gmem_w_up = tensors.gmem_w_up,
                               .gmem_w_down = tensors.gmem_w_down,
                               .gmem_a = regions.a.in(base),
                               .gmem_x = by_kernel ? tensors.gmem_x : nullptr,
                               .x_pitch = pitch,
                               .gmem_o = tensors.gmem_o,
                               .lag = -1},
                              config_.sm_count, native),
               "launch of the forward pass");
}

Status Session::fault() const noexcept { return fault_status(*fault_, config_.time_limit); }

}  // namespace tessera::dist

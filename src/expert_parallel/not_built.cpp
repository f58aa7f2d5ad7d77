// SPDX-License-Identifier: Apache-2.0
// A build without kernels for Hopper GPUs, which alone are joined: so nothing else is ever reached.
#include "expert_parallel/hosts/stream_calls.hpp"
#include "expert_parallel/session.hpp"
#include "expert_parallel/transport/device_calls.hpp"

namespace tessera::expert_parallel {
namespace {

Status refuse() noexcept {
  return Status::error(StatusCode::environment,
                       "this build has no kernels that join GPUs, which are Hopper's; configure "
                       "with -DTESSERA_CUDA=ON and 90a among TESSERA_CUDA_ARCHS");
}

}  // namespace

DeviceCalls const& device_calls() noexcept {
  static constexpr DeviceCalls kCalls = {
      [](std::int32_t, ContextChoice) noexcept -> Expected<void*> { return refuse(); },
      [](void*) noexcept {},
      [](void*, std::size_t) noexcept { return refuse(); },
      []() noexcept { return refuse(); },
      [](void*, void const*, std::size_t) noexcept { return refuse(); },
      [](void const*) noexcept { return false; },
      [](std::size_t) noexcept -> Expected<void*> { return refuse(); },
      [](void*) noexcept {},
      [](std::int32_t, std::int32_t) noexcept { return refuse(); }};
  return kCalls;
}

hosts::StreamCalls const& hosts::stream_calls() noexcept {
  static constexpr StreamCalls kCalls = {
      [](ChooseTokens const&, Stream) noexcept { return refuse(); },
      [](PackRows const&, Stream) noexcept { return refuse(); },
      [](SumPartials const&, Stream) noexcept { return refuse(); },
      [](void*, void const*, std::size_t, Stream) noexcept { return refuse(); },
      [](void*, void const*, std::size_t, Stream) noexcept { return refuse(); },
      [](Stream) noexcept -> Expected<bool> { return refuse(); },
      []() noexcept -> Expected<void*> { return refuse(); },
      [](void*, Stream) noexcept { return refuse(); },
      [](std::size_t) noexcept -> Expected<void*> { return refuse(); },
      [](void*) noexcept -> Expected<bool> { return refuse(); },
      [](void*) noexcept {},
      [](void*) noexcept {},
      []() noexcept {}};
  return kCalls;
}

std::size_t Session::workspace_bytes(ExchangeShape const&, std::int32_t) noexcept { return 0; }
Expected<std::unique_ptr<Session>> Session::open(SessionConfig const&) noexcept { return refuse(); }
Session::~Session() = default;
void* Session::x() const noexcept { return nullptr; }
void* Session::second_x() const noexcept { return nullptr; }
Status Session::forward(PassTensors const&, Stream) noexcept { return refuse(); }
Status Session::route(RouteTensors const&, Stream) noexcept { return refuse(); }
Expected<RoutedRows> Session::routed_rows(std::int64_t) noexcept { return refuse(); }
Status Session::dispatch(DispatchTensors const&, Stream) noexcept { return refuse(); }
Expected<core::AwaitedRows> Session::dispatch_beside(DispatchTensors const&, Stream,
                                                     Stream) noexcept {
  return refuse();
}
Status Session::combine(CombineTensors const&, Stream) noexcept { return refuse(); }
Status Session::fork(Stream, Stream) noexcept { return refuse(); }
Status Session::wait_until_begun(Stream) noexcept { return refuse(); }
Status Session::join(Stream, Stream) noexcept { return refuse(); }
Status Session::fault() const noexcept { return {}; }

}  // namespace tessera::expert_parallel

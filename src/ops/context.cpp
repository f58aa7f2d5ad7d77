// SPDX-License-Identifier: Apache-2.0
#include "tessera/context.hpp"

#include <algorithm>
#include <thread>

#include "core/thread_pool.hpp"
#include "cuda/layer/backend.hpp"

namespace tessera {
namespace {

constexpr std::int32_t kMaxThreads = 1024;

std::int32_t default_threads() noexcept {
  // On Linux this counts the processors the process may use.
  auto const usable = static_cast<std::int32_t>(std::thread::hardware_concurrency());
  return std::clamp(usable, std::int32_t{1}, kMaxThreads);
}

}  // namespace

Context::Context() noexcept = default;
Context::Context(Context&&) noexcept = default;
Context& Context::operator=(Context&&) noexcept = default;
Context::~Context() = default;

Expected<Context> Context::create(ContextOptions const& options) noexcept {
  bool const on_cuda = options.device.kind == DeviceKind::cuda;
  if (!on_cuda && (options.device.kind != DeviceKind::cpu || options.device.index != 0)) {
    return Status::invalid("device %d:%d: 0:0 is the CPU, 1:N a GPU",
                           static_cast<int>(options.device.kind), options.device.index);
  }
  if (options.num_threads < 0 || options.num_threads > kMaxThreads) {
    return Status::invalid("num_threads=%d: 0 (automatic) to %d", options.num_threads, kMaxThreads);
  }
  Context context;
  context.device_ = options.device;
  if (on_cuda) {
    auto device = cuda::DeviceContext::open(options.device.index, options.unproven_kernels
                                                                      ? cuda::Unproven::taken
                                                                      : cuda::Unproven::refused);
    if (!device.ok()) return device.status();
    context.cuda_ = std::move(device).value();
  }
  std::int32_t const automatic = on_cuda ? 1 : default_threads();
  try {
    context.pool_ = std::make_unique<core::ThreadPool>(
        options.num_threads == 0 ? automatic : options.num_threads);
  } catch (...) {
    return Status::error(StatusCode::out_of_memory,
                         "num_threads=%d: the system refused the threads; ask for fewer",
                         options.num_threads);
  }
  return context;
}

Device Context::device() const noexcept { return device_; }
std::int32_t Context::num_threads() const noexcept { return pool_->num_threads(); }

void Context::parallel_for(std::int64_t count, void (*body)(void*, std::int64_t),
                           void* argument) const noexcept {
  pool_->run(count, [&](std::int64_t index, int) { body(argument, index); });
}

Status check_device_values(Context const& context) noexcept {
  return context.cuda() == nullptr ? Status() : context.cuda()->take_error();
}

}  // namespace tessera

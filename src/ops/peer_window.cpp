// SPDX-License-Identifier: Apache-2.0
// PeerWindow: the windows of a group, by NCCL (Engine) or for threads of one process (ProcessWindows).
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "expert_parallel/transport/engine.hpp"
#include "expert_parallel/transport/process_windows.hpp"
#include "ops/support.hpp"
#include "tessera/expert_parallel.hpp"

namespace tessera {

// A window is NCCL's, or one of this process.
struct PeerWindow::Parts {
  std::unique_ptr<expert_parallel::Engine> engine;
  std::shared_ptr<expert_parallel::ProcessWindows> process;
  expert_parallel::Window window;
  std::int32_t ranks = 0;
  std::int32_t rank = 0;  // of one process
};

PeerWindow::PeerWindow(std::unique_ptr<Parts> parts) noexcept : parts_(std::move(parts)) {}
PeerWindow::PeerWindow(PeerWindow&&) noexcept = default;
PeerWindow& PeerWindow::operator=(PeerWindow&&) noexcept = default;
PeerWindow::~PeerWindow() = default;

Expected<PeerGroupId> PeerWindow::make_id(char const* nccl_path) noexcept {
  auto const id = expert_parallel::make_unique_id(
      {.nccl_path = nccl_path, .nccl_nvls_enable = std::getenv("NCCL_NVLS_ENABLE")});
  if (!id.ok()) return id.status();
  PeerGroupId group;
  static_assert(sizeof group.bytes == sizeof id.value().bytes);
  std::memcpy(group.bytes, id.value().bytes, sizeof group.bytes);
  return group;
}

Expected<PeerWindow> PeerWindow::open(Context const& context, std::int32_t rank, std::int32_t ranks,
                                      PeerGroupId const& id, std::size_t bytes,
                                      char const* nccl_path) noexcept {
  TESSERA_TRY(ops::check_on_gpu(context));
  expert_parallel::EngineConfig config = {.rank = rank,
                                          .ranks = ranks,
                                          .device = context.device().index,
                                          .nccl_path = nccl_path,
                                          .nccl_nvls_enable = std::getenv("NCCL_NVLS_ENABLE")};
  std::memcpy(config.id.bytes, id.bytes, sizeof id.bytes);
  auto engine = expert_parallel::Engine::open(config);
  if (!engine.ok()) return engine.status();
  std::unique_ptr<Parts> parts(new (std::nothrow) Parts);
  if (parts == nullptr) return Status::error(StatusCode::out_of_memory, "no memory for a window");
  parts->engine = std::move(engine).value();
  parts->ranks = ranks;
  auto const window = parts->engine->allocate(bytes);
  if (!window.ok()) return window.status();
  parts->window = window.value();
  return PeerWindow(std::move(parts));
}

Expected<std::vector<PeerWindow>> PeerWindow::open_all(std::span<Device const> devices,
                                                       std::size_t bytes) noexcept try {
  std::vector<std::int32_t> indices;
  for (Device const& device : devices) {
    if (device.kind != DeviceKind::cuda) {
      return Status::error(StatusCode::environment,
                           "devices[%zu] is cpu: experts over several ranks run on GPUs; name "
                           "cuda:N",
                           indices.size());
    }
    indices.push_back(device.index);
  }
  auto const process = std::make_shared<expert_parallel::ProcessWindows>();
  TESSERA_TRY(process->open(indices, bytes));
  std::vector<PeerWindow> windows;
  for (std::size_t rank = 0; rank < indices.size(); ++rank) {
    auto parts = std::make_unique<Parts>();
    parts->process = process;
    parts->window = process->window();
    parts->rank = static_cast<std::int32_t>(rank);
    parts->ranks = static_cast<std::int32_t>(indices.size());
    windows.push_back(PeerWindow(std::move(parts)));
  }
  return windows;
} catch (std::bad_alloc const&) {
  return Status::error(StatusCode::out_of_memory, "no memory for windows");
}

std::span<void* const> PeerWindow::addresses() const noexcept {
  if (parts_ == nullptr) return {};
  return {parts_->window.address.data(), static_cast<std::size_t>(parts_->ranks)};
}

Status PeerWindow::close() noexcept {
  if (parts_ == nullptr) return {};
  std::unique_ptr<Parts> const parts = std::move(parts_);
  if (parts->process != nullptr) return parts->process->wait(parts->rank);
  TESSERA_TRY(parts->engine->release(parts->window));
  return parts->engine->close();
}

}  // namespace tessera

// SPDX-License-Identifier: Apache-2.0
// HostRail: opens the messages between hosts of src/expert_parallel/hosts, and closes them.
#include <cstdlib>
#include <cstring>
#include <utility>

#include "expert_parallel/hosts/rail.hpp"
#include "ops/support.hpp"
#include "tessera/hosts.hpp"

namespace tessera {

namespace hosts = expert_parallel::hosts;

HostRail::HostRail(std::unique_ptr<hosts::Rail> rail) noexcept : rail_(std::move(rail)) {}
HostRail::HostRail(HostRail&&) noexcept = default;
HostRail& HostRail::operator=(HostRail&&) noexcept = default;
HostRail::~HostRail() = default;

Expected<HostRail> HostRail::open(Context const& context, HostPlace const& place,
                                  PeerGroupId const& id, double time_limit,
                                  char const* nccl_path) noexcept {
  TESSERA_TRY(ops::check_on_gpu(context));
  hosts::RailConfig config = {.place = place,
                              .device = context.device().index,
                              .time_limit = time_limit,
                              .nccl_path = nccl_path,
                              .nccl_nvls_enable = std::getenv("NCCL_NVLS_ENABLE")};
  std::memcpy(config.id.bytes, id.bytes, sizeof id.bytes);
  auto rail = hosts::Rail::open(config);
  if (!rail.ok()) return rail.status();
  return HostRail(std::move(rail).value());
}

std::span<std::int64_t const> HostRail::bytes_sent() const noexcept {
  return rail_ == nullptr ? std::span<std::int64_t const>() : rail_->sent();
}

Status HostRail::close() noexcept {
  if (rail_ == nullptr) return {};
  return std::unique_ptr<hosts::Rail>(std::move(rail_))->close();
}

}  // namespace tessera

// SPDX-License-Identifier: Apache-2.0
// The CUDA backend of a build without CUDA: no device can be opened, so nothing else is ever reached.
#include "cuda/layer/backend.hpp"

namespace tessera::cuda {
namespace {

constexpr char kReason[] = "this build has no CUDA kernels; configure with -DTESSERA_CUDA=ON";

Status not_built() noexcept { return Status::error(StatusCode::environment, "%s", kReason); }

}  // namespace

Expected<std::unique_ptr<DeviceContext>> DeviceContext::open(std::int32_t index,
                                                             Unproven) noexcept {
  return Status::error(StatusCode::environment, "device cuda:%d: %s, or use device cpu", index,
                       kReason);
}
DeviceContext::~DeviceContext() = default;
Status DeviceContext::take_error() const noexcept { return not_built(); }

BackendInfo backend_info() { return {"cuda", false, false, kReason}; }

std::size_t workspace_bytes(MoeDesc const&, Pass, std::size_t) noexcept { return 0; }
Status moe_forward(DeviceContext const&, MoeDesc const&, MoeForwardArgs const&, RoutingView const&,
                   std::size_t, Stream) noexcept {
  return not_built();
}
Status moe_backward(DeviceContext const&, MoeDesc const&, MoeBackwardArgs const&,
                    RoutingView const&, Pass, Stream, SplitBackward) noexcept {
  return not_built();
}
std::span<std::int32_t> backward_counters(void*) noexcept { return {}; }
ScorePartials score_partials(MoeDesc const&, void*) noexcept { return {}; }
Status route(DeviceContext const&, MoeDesc const&, RouteArgs const&, Stream) noexcept {
  return not_built();
}
Status routing_of_groups(DeviceContext const&, MoeDesc const&, GroupedRoutingArgs const&,
                         RoutingView const&, Stream) noexcept {
  return not_built();
}
Status quantise_weights(DeviceContext const&, MoeDesc const&, ExpertWeights const&,
                        QuantisedWeights const&, Stream) noexcept {
  return not_built();
}
std::size_t grouped_gemm_workspace_bytes(GroupedGemmArgs const&) noexcept { return 0; }
Status grouped_gemm(DeviceContext const&, GroupedGemmArgs const&, Stream) noexcept {
  return not_built();
}
std::size_t router_loss_workspace_bytes(MoeDesc const&, std::int64_t) noexcept { return 0; }
Status router_loss(DeviceContext const&, MoeDesc const&, RouterLossArgs const&, Stream) noexcept {
  return not_built();
}
Status update_selection_bias(DeviceContext const&, SelectionBiasArgs const&, Stream) noexcept {
  return not_built();
}
std::vector<OpExplanation> explain(DeviceContext const&, MoeDesc const&, Pass) { return {}; }

}  // namespace tessera::cuda

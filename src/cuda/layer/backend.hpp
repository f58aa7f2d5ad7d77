// SPDX-License-Identifier: Apache-2.0
// The functions of the CUDA backend that src/ops calls. No CUDA headers: a build without CUDA has the same functions
// (not_built.cpp), which say so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/awaited_rows.hpp"
#include "cuda/layer/architecture.hpp"
#include "tessera/backend.hpp"
#include "tessera/balance.hpp"
#include "tessera/grouped_gemm.hpp"
#include "tessera/low_precision.hpp"
#include "tessera/moe.hpp"
#include "tessera/routing.hpp"

namespace tessera::cuda {

/// One GPU that the kernels run on, and the error word that they write bad device values to. Immutable but for
/// that word; any number of threads may use it.
class DeviceContext {
 public:
  /// Loads the driver. Errors: environment for no driver, no such device, or one the kernels are not built for.
  static Expected<std::unique_ptr<DeviceContext>> open(
      std::int32_t index, Unproven unproven = Unproven::refused) noexcept;
  ~DeviceContext();
  DeviceContext(DeviceContext const&) = delete;
  DeviceContext& operator=(DeviceContext const&) = delete;

  [[nodiscard]] std::int32_t index() const noexcept { return index_; }
  [[nodiscard]] int sm_count() const noexcept { return sm_count_; }
  [[nodiscard]] Architecture architecture() const noexcept { return architecture_; }
  /// The error word, as the device addresses it.
  [[nodiscard]] std::uint64_t* gmem_error() const noexcept { return gmem_error_; }

  /// The bad device value that a kernel met since the last call, as invalid_argument; clears it. Does not wait.
  [[nodiscard]] Status take_error() const noexcept;

 private:
  DeviceContext() = default;
  std::int32_t index_ = 0;
  int sm_count_ = 0;
  Architecture architecture_ = Architecture::sm_90;
  std::uint64_t* host_error_ = nullptr;  // the word in pinned host memory
  std::uint64_t* gmem_error_ = nullptr;
};

/// The backend as `backends()` reports it.
BackendInfo backend_info();

/// Refuses floating types of which the backend stores no tensors.
Status check_storage(DType dtype) noexcept;
/// Refuses a desc that core::check_desc accepted and the backend does not serve.
Status check_supported(MoeDesc const& desc) noexcept;

/// Ok for a desc of Precision::automatic that takes fp8 on such a GPU: fp8 serves it and is expected to be faster. Else
/// the error says why it takes native.
Status check_gains_by_fp8(Architecture architecture, MoeDesc const& desc) noexcept;

/// Bytes of workspace of a pass for a supported desc. With SavePolicy::none the routing tables, `routing_bytes` long,
/// stand at the start of forward's aligned workspace.
std::size_t workspace_bytes(MoeDesc const& desc, Pass pass, std::size_t routing_bytes) noexcept;

/// Enqueue a call whose tensors were checked. Errors: device_error where a launch is refused.
Status moe_forward(DeviceContext const& device, MoeDesc const& desc, MoeForwardArgs const& args,
                   RoutingView const& routing, std::size_t routing_bytes, Stream stream) noexcept;
/// Says what the caller of a part of a split backward pass has done by kernels of its own.
struct SplitBackward {
  bool counters_are_zero = false;  ///< no launch has to clear backward_counters()
  bool adds_up_scores = false;     ///< dscores are left as score_partials(), and not written
  core::AwaitedRows awaited = {};  ///< rows of d_o that come while backward_input runs
};
/// pass: backward, backward_input or backward_weights. The tables are only read.
Status moe_backward(DeviceContext const& device, MoeDesc const& desc, MoeBackwardArgs const& args,
                    RoutingView const& routing, Pass pass, Stream stream,
                    SplitBackward split = {}) noexcept;
/// The words of moe_backward's workspace that are 0 before its first kernel. Parts of a split pass on one workspace
/// have the same words, and each counts in words of its own. They lie in its first kBackwardCountersBytes.
std::span<std::int32_t> backward_counters(void* workspace) noexcept;
inline constexpr std::size_t kBackwardCountersBytes = 512;
/// [P,groups] fp32 by row in the workspace of backward_input: without b_down the gradient of a row's score is their
/// sum, in their order, beginning with 0.
struct ScorePartials {
  float const* gmem = nullptr;
  std::int32_t groups = 0;
};
ScorePartials score_partials(MoeDesc const& desc, void* workspace) noexcept;
Status route(DeviceContext const& device, MoeDesc const& desc, RouteArgs const& args,
             Stream stream) noexcept;
Status routing_of_groups(DeviceContext const& device, MoeDesc const& desc,
                         GroupedRoutingArgs const& args, RoutingView const& routing,
                         Stream stream) noexcept;

/// For a desc of precision fp8 without weight_codes. Errors: unsupported where tensors are off 16 bytes.
Status quantise_weights(DeviceContext const& device, MoeDesc const& desc,
                        ExpertWeights const& weights, QuantisedWeights const& out,
                        Stream stream) noexcept;

/// grouped_gemm, for arguments whose ranks, kind and offset type were checked, then whose tensors were.
Status check_supported(GroupedGemmArgs const& args) noexcept;
std::size_t grouped_gemm_workspace_bytes(GroupedGemmArgs const& args) noexcept;
Status grouped_gemm(DeviceContext const& device, GroupedGemmArgs const& args,
                    Stream stream) noexcept;

/// router_loss and update_selection_bias. Counts that break a rule are read as if all were 0, and go to the error word.
std::size_t router_loss_workspace_bytes(MoeDesc const& desc, std::int64_t sequences) noexcept;
Status router_loss(DeviceContext const& device, MoeDesc const& desc, RouterLossArgs const& args,
                   Stream stream) noexcept;
Status update_selection_bias(DeviceContext const& device, SelectionBiasArgs const& args,
                             Stream stream) noexcept;

/// Candidates of each op of a pass, for contiguous tensors on 16-byte addresses.
std::vector<OpExplanation> explain(DeviceContext const& device, MoeDesc const& desc, Pass pass);

}  // namespace tessera::cuda

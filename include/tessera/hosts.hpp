// SPDX-License-Identifier: Apache-2.0
// The experts of one layer spread over the GPUs of several hosts: those of rank g of host h, of H hosts with P ranks
// each, are [(h*P+g)*E/(H*P), (h*P+g+1)*E/(H*P)).
//
// In step s = 0 .. H-1 host h computes for the tokens of host (h+s) mod H: a token crosses once to each host that has
// an expert of it, to the rank with the same g (the ranks with one g are a rail), the ranks of that host make a pass of
// an ExpertParallel of theirs, and its partial sum comes back. o_t is the sum of the partial sums in fp32, hosts
// ascending, rounded once. Backward sends d_o the same way, gets dx and dscores back, and adds gradients of weights up
// in fp32. Messages go by NCCL's send and receive over whatever network it has.
//
// All is enqueued on one stream. All ranks make the same passes in the same order, also those in which they have no
// token. Bits repeat, are those of Python's ExpertParallel(hosts=), and depend on H alone, neither on P nor on
// `exchange`. What it is good for, and when not to use it: docs/several-hosts.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "tessera/context.hpp"
#include "tessera/expert_parallel.hpp"
#include "tessera/export.hpp"
#include "tessera/status.hpp"
#include "tessera/tensor.hpp"

namespace tessera {

namespace expert_parallel::hosts {
class Rail;
}  // namespace expert_parallel::hosts

inline constexpr std::int32_t kMaxHosts = 64;

/// Says which rank of which host this is.
struct HostPlace {
  std::int32_t host = 0;   ///< h, 0 to H-1
  std::int32_t hosts = 1;  ///< H, 1 to kMaxHosts
  std::int32_t rank = 0;   ///< g, 0 to P-1, within its host
  bool operator==(HostPlace const&) const = default;
};

/// This rank's end of its rail. A thread of it ends waits of the GPU for another host: when the stream has waited
/// time_limit seconds for one message, or NCCL has an error, it notes who did not come and aborts the communicator, so
/// that the stream, and a host that waits for it, goes on with void results. Nobody waits forever, but for a captured
/// pass that is replayed, whose waits it does not see.
class TESSERA_EXPORT HostRail {
 public:
  /// Joins the rail of place.rank. `id`: of PeerWindow::make_id() on one of its ranks, another one for each rail.
  /// time_limit: seconds that a wait for another host takes at most, that for the others to join included, above 0 and
  /// at most 86400; less than the inner ExpertParallel's, so that the error that names a host comes first. Collective.
  /// invalid_argument; environment: as PeerWindow::make_id(); device_error: a rank did not join.
  static Expected<HostRail> open(Context const& context, HostPlace const& place,
                                 PeerGroupId const& id, double time_limit,
                                 char const* nccl_path = nullptr) noexcept;

  HostRail(HostRail&&) noexcept;
  HostRail& operator=(HostRail&&) noexcept;
  /// Unless close() was called, aborts: ranks that still wait for this one get an error.
  ~HostRail();

  /// Bytes sent to each host since it was opened, [H].
  [[nodiscard]] std::span<std::int64_t const> bytes_sent() const noexcept;
  /// Leaves the rail when all work of the GPU has ended. Collective.
  Status close() noexcept;

 private:
  friend class HostsExperts;
  explicit HostRail(std::unique_ptr<expert_parallel::hosts::Rail> rail) noexcept;
  std::unique_ptr<expert_parallel::hosts::Rail> rail_;
};

/// Says what crosses to a host.
enum class HostExchange : std::int32_t {
  /// max_tokens rows, those that are missing without experts, and no numbers: the host never waits. Python's "static".
  all_rows = 0,
  /// Numbers of rows, for which the host waits once in a forward pass, then the rows that are needed.
  counted = 1,
};

/// Bounds of all passes, equal on all ranks but for `place` and `within.rank`.
struct HostsDesc {
  HostPlace place = {};
  HostExchange exchange = HostExchange::all_rows;
  /// The object of this host's ranks: experts: E/H; top_k: K of all experts, at most E/H; max_tokens: of any rank of
  /// any host. training: for passes that are saved.
  ExpertParallelDesc within = {};
  /// Rows that this rank's experts have memory for in one step, with training; 0: P*max_tokens*K, as many as there can
  /// be. A pass with more is void, and check() says so.
  std::int64_t max_rows = 0;
};

/// Holds what a forward pass leaves for its backward pass.
struct HostsSaved {
  Buffer memory = {};  ///< HostsExperts::saved_bytes(), the caller's
  /// Rows that go to each host and come from each, as forward() has found.
  std::array<std::int64_t, kMaxHosts> rows_out = {}, rows_in = {};
};

/// Tensors of one pass on this rank, bf16 unless said otherwise, contiguous; x, w_up, w_down, biases and o begin at
/// multiples of 16 bytes. T may be 0 and may differ from rank to rank and from pass to pass, up to max_tokens.
struct HostsForwardArgs {
  ConstTensor x = {};             ///< [T,d]
  ConstTensor topk_ids = {};      ///< [T,K] int32; outside [0,E): no row
  ConstTensor topk_weights = {};  ///< [T,K] fp32
  ConstTensor w_up =
      {};  ///< this rank's: [E/(H*P),2n,d], gate rows first; [E/(H*P),n,d] without a gate
  ConstTensor w_down = {};  ///< this rank's: [E/(H*P),d,n]
  ConstTensor b_up = {};  ///< optional, both or none, with clamped_swiglu, as in ExpertParallelArgs
  ConstTensor b_down = {};
  Tensor o = {};                ///< [T,d], every element is written
  HostsSaved* saved = nullptr;  ///< null: nothing is saved
};

/// As HostsForwardArgs, whose x, weights and biases it has again.
struct HostsBackwardArgs {
  ConstTensor d_o = {};  ///< [T,d]
  ConstTensor x = {};
  ConstTensor w_up = {}, w_down = {}, b_up = {}, b_down = {};
  HostsSaved const* saved = nullptr;  ///< of the forward pass, whose memory is as it left it
  Tensor dx = {};                     ///< [T,d], every element is written
  Tensor dscores = {};                ///< [T,K] fp32; 0 where a pair has no row
  /// Optional, fp32, shapes as of weights and biases: gradients are added to what is there.
  Tensor dw_up = {}, dw_down = {}, db_up = {}, db_down = {};
};

/// One rank. Not thread-safe: one pass at a time. Layers of the same shape share one.
class TESSERA_EXPORT HostsExperts {
 public:
  /// Bytes of this rank's workspace, and of what a pass saves. Errors: invalid_argument, unsupported, environment.
  static Expected<std::size_t> workspace_bytes(Context const& context,
                                               HostsDesc const& desc) noexcept;
  static Expected<std::size_t> saved_bytes(HostsDesc const& desc) noexcept;

  /// `experts`: of desc.within. `rail`: of desc.place. `context` and `workspace`, memory of this rank's GPU, stay until
  /// the object is destroyed. Collective along the rail, which tells all its ranks where fields of their descs differ
  /// that should be equal. Errors: as workspace_bytes(), device_error: a rank did not come.
  static Expected<HostsExperts> create(Context const& context, HostsDesc const& desc,
                                       ExpertParallel experts, HostRail rail,
                                       Buffer workspace) noexcept;

  HostsExperts(HostsExperts&&) noexcept;
  HostsExperts& operator=(HostsExperts&&) noexcept;
  ~HostsExperts();

  /// Enqueues a pass. A forward pass that is `counted` cannot be captured into a graph, which is refused. On an error
  /// the pass is void, and where it says that a rank did not come, all objects have to be made anew.
  Status forward(HostsForwardArgs const& args, Stream stream = {}) noexcept;
  Status backward(HostsBackwardArgs const& args, Stream stream = {}) noexcept;

  /// Ok if the passes that have ended are good. Else device_error: the text says who did not come, in which pass, for
  /// what. Does not wait: synchronise the stream of a pass first.
  [[nodiscard]] Status check() const noexcept;

  /// Returns the rail, to close it behind the last pass, or for its bytes.
  [[nodiscard]] HostRail& rail() noexcept;

 private:
  struct Parts;
  explicit HostsExperts(std::unique_ptr<Parts> parts) noexcept;
  std::unique_ptr<Parts> parts_;
};

}  // namespace tessera

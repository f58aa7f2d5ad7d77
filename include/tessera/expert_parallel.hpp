// SPDX-License-Identifier: Apache-2.0
// The experts of one layer spread over the GPUs of a host: rank r of P owns the experts [r*E/P, (r+1)*E/P).
//
//   o_t = sum over choices j of token t, in their order, of
//         s_tj * (act(x_t w_up[e_tj]^T + b_up[e_tj]) w_down[e_tj]^T + b_down[e_tj])
//
// One kernel per pass on every rank pulls rows to the owners of their experts, multiplies, and pushes the results
// back. No row is dropped; o has the bits of moe_forward on a single GPU with all experts, for every P, but where that
// has at most 8 tokens, for which it takes other kernels, or with a partial combine. Ranks are
// threads or processes. They make the same passes in the same order, also those in which they have no token.
//
// Backward, and whatever else forward() has not, such as biases with most activations, takes an unfused pass: route()
// signals to the owners which rows they get, dispatch() pulls them, sorted by expert; moe_forward or moe_backward with
// RowGrouping::offsets, or anything else, makes one row of each; combine() takes them back and adds up those of each
// token. Backward dispatches d_o and x by the tables that forward() or dispatch() saved, and combines dx; moe_backward
// reads tables that routing_of_tables() makes of these. For the bits of one GPU combine() weights the rows of o, and
// moe_forward has no row_scores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tessera/context.hpp"
#include "tessera/export.hpp"
#include "tessera/shape.hpp"
#include "tessera/status.hpp"
#include "tessera/tensor.hpp"

namespace tessera {

namespace expert_parallel {
class Engine;
class Session;
}  // namespace expert_parallel

inline constexpr std::int32_t kMaxRanks = 8;

/// Says who this rank is, and bounds of all passes. All but `rank` are equal on all ranks. Two more bounds hold, beyond
/// which a pass has to be split: max_tokens*K*K is at most 2^32, and a rank's pool, P*max_tokens*K rows and 127 for
/// each of its E/P experts, has at most 2^31-1 rows. What breaks a bound is refused with invalid_argument.
struct ExpertParallelDesc {
  std::int32_t rank = 0;          ///< 0 to P-1
  std::int32_t ranks = 1;         ///< P, 1 to kMaxRanks
  std::int64_t max_tokens = 0;    ///< most tokens of any rank in any pass, 1 to 2^24
  std::int64_t hidden = 0;        ///< d, a multiple of 8, at most 2^20
  std::int64_t intermediate = 0;  ///< n, a multiple of 8, at most 2^20
  std::int64_t experts = 0;       ///< E, a multiple of P, at most 512
  std::int64_t top_k = 0;         ///< K, 1 to 32, at most E
  Activation activation = {};
  /// True if a rank may send back one weighted sum of a token's choices there, rounded to bf16, instead of the result
  /// of each, where the link would hold up the pass: fewer bytes cross, and the bits of o, the same every time, depend
  /// on P and on where a token is. Chosen for passes of max_tokens; with far fewer tokens they take longer so. What is
  /// added to the error of o is a rounding of each sum (docs/numerics.md).
  bool partial_combine = false;
  bool sums_on_owners = false;  ///< the old name of partial_combine, until 1.0
  double time_limit = 30;  ///< seconds a pass waits for another rank, above 0 and at most 86400
  bool training =
      false;  ///< whether passes are saved for backward, or unfused: windows and workspace are larger
};

/// Holds what a rank knows of the rows that its experts have in a pass, R of them: sorted by expert, then by rank, its
/// own first and then those after it, by token, by choice. Whoever makes a pass writes it; dispatch() without route()
/// and combine() read it.
struct DispatchTables {
  Tensor expert_offsets =
      {};  ///< [E/P+1] int32: where the rows of an expert begin; the last one is R
  /// [R,4] int32: t*K+j of the pair on its rank; that rank; the row of the token's next choice here, or -1; whether it
  /// is the first of these
  Tensor row_origins = {};
  Tensor row_scores = {};  ///< [R] fp32: topk_weights of the pair
};

/// Tensors of one pass on this rank, bf16 unless said otherwise, contiguous but for x, whose rows may lie apart. T may
/// be 0 and may differ from rank to rank and from pass to pass, up to max_tokens. w_up, w_down and o begin at multiples
/// of 16 bytes. x is copied into the window, unless it is input(T); then nothing else may lie there. Copied fastest
/// where it begins, and its rows lie, at multiples of 16 bytes.
struct ExpertParallelArgs {
  ConstTensor x = {};             ///< [T,d]
  ConstTensor topk_ids = {};      ///< [T,K] int32; may repeat in a token; outside [0,E): no row
  ConstTensor topk_weights = {};  ///< [T,K] fp32
  ConstTensor w_up = {};    ///< this rank's: [E/P,2n,d], gate rows first; [E/P,n,d] without a gate
  ConstTensor w_down = {};  ///< this rank's: [E/P,d,n]
  Tensor o = {};            ///< [T,d], every element is written
  /// Optional, with training: tables of this rank's rows, for backward; where one rank has them, all have, and
  /// partial_combine does nothing. R may be larger than routed_rows(): what lies behind the last row is left as it is.
  /// Where it is smaller the pass is void, as that of dispatch() is.
  DispatchTables saved = {};
  Tensor h =
      {};  ///< optional, with saved: [R,2n] or [R,n], x w_up^T of its rows, at a multiple of 16 bytes
  /// Leaves out rows beyond those that saved and h hold, without a failure; o is good all the same. routed_rows()
  /// says whether all rows fitted, on all ranks.
  bool may_overflow = false;
  /// Optional, both or none, with ActivationKind::clamped_swiglu (gpt-oss), at multiples of 16 bytes; with other
  /// activations an unfused pass has them.
  ConstTensor b_up = {};     ///< this rank's: [E/P,2n], in the order of the rows of w_up
  ConstTensor b_down = {};   ///< this rank's: [E/P,d]
  DispatchTables kept = {};  ///< the old name of saved, until 1.0
};

struct ExpertRouteArgs {
  ConstTensor topk_ids = {};      ///< [T,K] int32, as in ExpertParallelArgs
  ConstTensor topk_weights = {};  ///< [T,K] fp32
  /// Rows that this rank will have memory for, 0: as many as there are.
  std::int64_t row_limit = 0;
  std::int64_t room = 0;  ///< the old name of row_limit, until 1.0
};

/// Holds what route(), or forward() that saves tables, has found.
struct RoutedRows {
  std::int64_t rows = 0;  ///< R of this rank
  bool all_fit =
      true;  ///< whether every rank's R is within its row_limit, or its tables; alike on all of them
};

/// bf16 unless said otherwise, contiguous but for x and second_x, whose rows may lie apart. R may be larger than
/// routed_rows(), in the tables, too; what lies behind the last row is left as it is. Where it is smaller the pass is
/// void: check() says so on all ranks, and the group must be made anew. T as in ExpertParallelArgs. rows and
/// second_rows begin at multiples of 16 bytes. Rows of second_x may come in a call of their own behind that of x, with
/// the same tables, on any stream that combine() comes behind: then x, topk_ids and rows are absent, on all ranks.
struct ExpertDispatchArgs {
  ConstTensor x = {};  ///< [T,d]
  ConstTensor second_x =
      {};  ///< optional [T,d]; where one rank has it, all have. As x: or second_input(T)
  ConstTensor topk_ids = {};  ///< [T,K] int32, those of route()
  DispatchTables tables = {};
  Tensor rows = {};         ///< [R,d], with x
  Tensor second_rows = {};  ///< [R,d], with second_x
  /// Leaves out rows that there is no memory for, without a failure: for who makes the pass again, on all ranks, where
  /// routed_rows() says behind it that they did not all fit.
  bool may_overflow = false;
  /// SMs that pull rows, 0: all. 16 to 24 leave the others to what runs beside and does not need these rows.
  std::int32_t sms = 0;
  /// Optional cudaEvent_t without timing, recorded once these SMs are taken: what waits for it takes none of them.
  void* begun = nullptr;
};

/// o_t = sum over choices j of token t, in their order, of topk_weights[t,j] times their rows, or of the rows alone, in
/// fp32, rounded once.
struct ExpertCombineArgs {
  ConstTensor rows = {};          ///< [R,d] bf16, at a multiple of 16 bytes
  DispatchTables tables = {};     ///< those of dispatch(); row_scores may be absent
  ConstTensor topk_weights = {};  ///< optional [T,K] fp32
  ConstTensor row_dscores = {};   ///< optional [R] fp32; where one rank has it, all have
  Tensor dscores =
      {};         ///< [T,K] fp32, with row_dscores: those of the pairs; 0 where there is no row
  Tensor o = {};  ///< [T,d] bf16, at a multiple of 16 bytes; every element is written
  /// SMs that push rows, 0: all. 16 to 24 fill the link and leave the others to what runs beside, as gradients of
  /// weights.
  std::int32_t sms = 0;
  /// Optional cudaEvent_t without timing, recorded once these SMs are taken: what waits for it takes none of them.
  void* begun = nullptr;
};

/// An identity for a group of ranks that make windows together.
struct PeerGroupId {
  char bytes[128] = {};
};

/// Memory of every rank that the kernels of every rank can address: for threads of one process by open_all(), for
/// processes by make_id() and open(), which take NCCL (2.28 or later; loaded at run time, the copy that the process has
/// loaded already before any other). Whoever has such memory from elsewhere, such as torch symmetric memory, needs none
/// of this. open() and close() behind it are collective: all ranks call them in the same order.
class TESSERA_EXPORT PeerWindow {
 public:
  /// On one rank; the caller carries it to all. `nccl_path`: null for libnccl.so.2.
  /// environment: NCCL is missing or too old, or NCCL_NVLS_ENABLE is not "0": NVLink multicast must be off before
  /// the first NCCL call of a process.
  static Expected<PeerGroupId> make_id(char const* nccl_path = nullptr) noexcept;
  /// `bytes` zeros on every rank; equal on all. environment: as make_id, or the GPUs do not address each other.
  /// out_of_memory: no host memory for the handle.
  static Expected<PeerWindow> open(Context const& context, std::int32_t rank, std::int32_t ranks,
                                   PeerGroupId const& id, std::size_t bytes,
                                   char const* nccl_path = nullptr) noexcept;

  /// Windows of all ranks, rank r on devices[r], for threads of this process: called once, by whichever thread. `bytes`
  /// zeros each. All memory is freed when the last of them is closed or destroyed, behind the work of all these GPUs.
  /// invalid_argument: no ranks or too many, or two on one GPU. environment: no such GPU, or GPUs that do not address
  /// each other. out_of_memory.
  static Expected<std::vector<PeerWindow>> open_all(std::span<Device const> devices,
                                                    std::size_t bytes) noexcept;

  PeerWindow(PeerWindow&&) noexcept;
  PeerWindow& operator=(PeerWindow&&) noexcept;
  /// Where close() has not been called, as after a fault: leaves the group without waiting for the others, and frees
  /// memory behind all work of its GPU.
  ~PeerWindow();

  /// [rank]: its memory, as this rank's GPU addresses it.
  [[nodiscard]] std::span<void* const> addresses() const noexcept;
  /// Waits for all work of this rank's GPU, then frees the memory. Does not wait for the other ranks: what they have
  /// mapped stays until they close, too, so their passes may still run, but no rank should close while another may
  /// still launch one. Of open_all(): not collective.
  Status close() noexcept;

 private:
  struct Parts;
  explicit PeerWindow(std::unique_ptr<Parts> parts) noexcept;
  std::unique_ptr<Parts> parts_;
};

/// One rank of a group of experts. Not thread-safe: one pass at a time. Layers of the same shape share one.
class TESSERA_EXPORT ExpertParallel {
 public:
  /// Bytes of every rank's window, and of this rank's workspace. Errors: invalid_argument, unsupported.
  static Expected<std::size_t> window_bytes(ExpertParallelDesc const& desc) noexcept;
  static Expected<std::size_t> workspace_bytes(Context const& context,
                                               ExpertParallelDesc const& desc) noexcept;

  /// `windows`: of all ranks, as this rank's GPU addresses them, zeroed on all ranks before any rank's first pass.
  /// `workspace`: memory of this rank's GPU. Both stay the group's until all ranks have destroyed their object.
  /// Errors: invalid_argument, unsupported, environment (a context that is not on cuda), device_error, out_of_memory.
  static Expected<ExpertParallel> create(Context const& context, ExpertParallelDesc const& desc,
                                         std::span<void* const> windows, Buffer workspace) noexcept;

  ExpertParallel(ExpertParallel&&) noexcept;
  ExpertParallel& operator=(ExpertParallel&&) noexcept;
  /// Waits for all work of this rank's GPU.
  ~ExpertParallel();

  /// The place of x in the window, [tokens,d]: what is written there need not be copied. It may be overwritten once
  /// a pass has ended on this rank.
  [[nodiscard]] Tensor input(std::int64_t tokens) const noexcept;

  /// The same of second_x, with training. It may be overwritten once the pass before has ended on this rank.
  [[nodiscard]] Tensor second_input(std::int64_t tokens) const noexcept;

  /// Enqueues a pass; it can be captured into a graph and replayed. The kernel takes all SMs of the GPU at once and
  /// waits for its peers: nothing else that waits for a peer may run beside it, and all ranks have to launch.
  /// On an error no pass was enqueued; once one has failed on the GPU, the error is what check() says of it. CUDA loads
  /// a kernel when it is first launched, and may wait for a pass that runs: where ranks are threads of one process,
  /// launch what runs between passes once before the first one.
  Status forward(ExpertParallelArgs const& args, Stream stream = {}) noexcept;

  /// An unfused pass, with ExpertParallelDesc::training: route(), dispatch(), combine(), or dispatch() and combine()
  /// with the tables of an earlier pass, in the order of one stream. Between them nothing else of this object may be
  /// called, on no rank; a call out of turn is refused with invalid_argument. Each waits for all ranks.
  Status route(ExpertRouteArgs const& args, Stream stream = {}) noexcept;
  /// Rows of the last pass that route() or forward() with tables has begun, or of one `passes_ago` passes before it, at
  /// most 4095; replays of graphs do not count. Waits until all ranks have routed, not for the rows.
  Expected<RoutedRows> routed_rows(std::int64_t passes_ago = 0) noexcept;
  Status dispatch(ExpertDispatchArgs const& args, Stream stream = {}) noexcept;
  Status combine(ExpertCombineArgs const& args, Stream stream = {}) noexcept;

  /// Ok if the passes that have ended are good; else device_error, and who waited where for what, if a rank did not
  /// come within the time limit. Their o is void then, on all ranks, and the group must be made anew. Does not wait:
  /// synchronise the stream of a pass first.
  [[nodiscard]] Status check() const noexcept;

 private:
  ExpertParallel(ExpertParallelDesc const& desc, Device device,
                 std::unique_ptr<expert_parallel::Session> session) noexcept;
  ExpertParallelDesc desc_;
  Device device_;
  std::unique_ptr<expert_parallel::Session> session_;
};

/// Writes into `routing`, routing_bytes(desc), the routing tables that moe_backward reads of the rows of a pass, with
/// the scores that `tables` hold. Those that moe_forward leaves of these rows have ones for scores, as combine()
/// weights the rows: with them dx and dscores would be wrong. desc: the layer of this rank's experts, a token for each
/// row, RowGrouping::offsets. Errors: invalid_argument, also where row_scores are absent; else as routing_of_groups().
TESSERA_EXPORT Status routing_of_tables(Context const& context, MoeDesc const& desc,
                                        DispatchTables const& tables, Buffer routing,
                                        Stream stream = {}) noexcept;

}  // namespace tessera

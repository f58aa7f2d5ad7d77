// SPDX-License-Identifier: Apache-2.0
// The experts of one layer spread over the GPUs of a host: rank r of P owns the experts [r*E/P, (r+1)*E/P).
//
//   o_t = sum over choices j of token t, in their order, of
//         s_tj * (act(x_t w_up[e_tj]^T + b_up[e_tj]) w_down[e_tj]^T + b_down[e_tj])
//
// One kernel per pass on every rank pulls rows to the owners of their experts, multiplies, and pushes the results
// back. No row is dropped. o has the bits of moe_forward on a single GPU with all experts, for every P, with two
// exceptions: at most 8 tokens, for which moe_forward takes other kernels, and a partial combine. Ranks are
// threads or processes. They make the same passes in the same order, also those in which they have no token.
//
// Backward, and what forward() does not offer, such as biases with most activations, is an unfused pass of several
// calls: route() signals to the owners which rows they get; dispatch() pulls these rows, sorted by expert; moe_forward
// or moe_backward with RowGrouping::offsets, or the caller's own code, makes one result row of each; combine() pushes
// these back and adds up those of each token. Backward dispatches d_o and x by the tables that forward() or dispatch()
// saved, and combines dx; moe_backward reads the tables that routing_of_tables() makes of them. For the bits of one GPU
// let combine() weight the rows of o, and give moe_forward no row_scores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tessera/context.hpp"
#include "tessera/export.hpp"
#include "tessera/moe.hpp"
#include "tessera/shape.hpp"
#include "tessera/status.hpp"
#include "tessera/tensor.hpp"

namespace tessera {

namespace core {
struct AwaitedRows;
}  // namespace core
namespace expert_parallel {
class Engine;
class Session;
struct DispatchTensors;
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
  /// True if a rank may send back one row for a token, the weighted sum of its results there in bf16, instead of a row
  /// for each choice. It does so where the link would hold up a pass of max_tokens; passes of far fewer tokens take
  /// longer then. The bits of o repeat, but depend on P and on the rank that has the token; each sum adds one rounding
  /// to the error of o (docs/numerics.md).
  bool partial_combine = false;
  bool sums_on_owners = false;  ///< the old name of partial_combine, until 1.0
  double time_limit = 30;  ///< seconds a pass waits for another rank, above 0 and at most 86400
  bool training =
      false;  ///< true if passes are saved for backward, or unfused: windows and workspace are larger
  /// SMs that kernels which wait for other ranks take at most, from 2 on; 0: all. Fewer leave the others to what runs
  /// beside a pass and waits for a peer itself, as NCCL's kernels do. The forward pass takes SMs in pairs of a GPC, so
  /// one SM of each GPC may be left over: leave one for each, 8 on an H100, besides those that the others need.
  std::int32_t sms = 0;
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
/// of 16 bytes. Unless x is input(T), it is copied there, over what input(T) held; the copy is fastest where x and each
/// of its rows begin at multiples of 16 bytes.
struct ExpertParallelArgs {
  ConstTensor x = {};             ///< [T,d]
  ConstTensor topk_ids = {};      ///< [T,K] int32; may repeat in a token; outside [0,E): no row
  ConstTensor topk_weights = {};  ///< [T,K] fp32
  ConstTensor w_up = {};    ///< this rank's: [E/P,2n,d], gate rows first; [E/P,n,d] without a gate
  ConstTensor w_down = {};  ///< this rank's: [E/P,d,n]
  Tensor o = {};            ///< [T,d], every element is written
  /// Optional, with training: tables of this rank's rows, written for backward. All ranks give them or none, and
  /// partial_combine has no effect then. R may be larger than routed_rows(): nothing is written behind the last row.
  /// Where it is smaller the pass is void, as with dispatch().
  DispatchTables saved = {};
  Tensor h =
      {};  ///< optional, with saved: [R,2n] or [R,n], x w_up^T of its rows, at a multiple of 16 bytes
  /// Leaves out rows beyond those that saved and h hold, without a failure; o is good all the same. routed_rows()
  /// says whether all rows fitted, on all ranks.
  bool may_overflow = false;
  /// Optional, both or none, with ActivationKind::clamped_swiglu (gpt-oss), at multiples of 16 bytes; biases with other
  /// activations need an unfused pass.
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
      true;  ///< true if every rank's R is within its row_limit or its tables; equal on all ranks
};

/// bf16 unless said otherwise, contiguous but for x and second_x, whose rows may lie apart. R may be larger than
/// routed_rows(), in the tables, too; nothing is written behind the last row. Where it is smaller the pass is
/// void: check() says so on all ranks, and the group must be made anew. T as in ExpertParallelArgs. rows and
/// second_rows begin at multiples of 16 bytes. A second call after that of x, with the same tables, may dispatch
/// second_x on any stream that combine() waits for; it has no x, topk_ids and rows. Each rank decides by itself about
/// that, and about `gathered`.
struct ExpertDispatchArgs {
  ConstTensor x = {};  ///< [T,d]
  ConstTensor second_x =
      {};  ///< optional [T,d], on all ranks or on none; copied as x is, unless it is second_input(T)
  ConstTensor topk_ids = {};  ///< [T,K] int32, those of route()
  DispatchTables tables = {};
  Tensor rows = {};         ///< [R,d], with x
  Tensor second_rows = {};  ///< [R,d], with second_x
  /// True: rows and second_rows are [P*max_tokens,d], where row r*max_tokens + t is token t of rank r, for GEMMs that
  /// gather rows. Each token that has rows here comes once, instead of K times and less; others are not written.
  bool gathered = false;
  /// Optional, with x: routing_bytes() of R grouped rows of E/P experts. Written are the tables that moe_backward reads
  /// of these rows, with their scores, as routing_of_tables() makes them; where `gathered`, those of a layer that
  /// gathers rows (RowGrouping::offsets with variable_experts).
  Buffer routing = {};
  /// Leaves out rows that there is no memory for, without a failure. For callers that repeat the pass, on all ranks,
  /// where routed_rows() says afterwards that not all of them fitted.
  bool may_overflow = false;
  /// Number of SMs that pull rows, 0: all. With 16 to 24 the others run kernels that do not need these rows meanwhile.
  std::int32_t sms = 0;
  /// Optional cudaEvent_t without timing, recorded once the call has its SMs: work that waits for it cannot take them.
  void* begun = nullptr;
};

/// o_t = sum over choices j of token t, in their order, of topk_weights[t,j] times row (t,j), without topk_weights of
/// the rows alone; in fp32, rounded once.
struct ExpertCombineArgs {
  ConstTensor rows = {};          ///< [R,d] bf16, at a multiple of 16 bytes
  DispatchTables tables = {};     ///< those of dispatch(); row_scores may be absent
  ConstTensor topk_weights = {};  ///< optional [T,K] fp32
  ConstTensor row_dscores = {};   ///< optional [R] fp32, on all ranks or on none
  Tensor dscores = {};  ///< [T,K] fp32, with row_dscores: of every pair; 0 where it has no row
  Tensor o = {};        ///< [T,d] bf16, at a multiple of 16 bytes; every element is written
  /// Number of SMs that push rows, 0: all. 16 to 24 fill the link, and the others run other kernels meanwhile, such as
  /// those of weight gradients.
  std::int32_t sms = 0;
  /// Optional cudaEvent_t without timing, recorded once the call has its SMs: work that waits for it cannot take them.
  void* begun = nullptr;
};

/// The calls of a backward pass with the tables of an earlier pass, in their order.
struct ExpertBackwardArgs {
  /// It brings rows of d_o as x and of x as second_x. Null: calls of dispatch() have brought them.
  ExpertDispatchArgs const* dispatch = nullptr;
  /// Where it is given, `dispatch` has x alone and this has second_x, both gathered and without begun, and there is a
  /// side stream: rows of other ranks' d_o come there, on `sms` of this one, while those of this rank are multiplied,
  /// and then rows of x.
  ExpertDispatchArgs const* second_dispatch = nullptr;
  Context const* context = nullptr;  ///< of moe_backward_input() and moe_backward_weights()
  MoeDesc const* input_desc = nullptr;
  /// Its dscores, where they are row_dscores of `combine`, are scratch memory: what is there afterwards is not said.
  MoeBackwardArgs const* input = nullptr;
  MoeDesc const* weights_desc =
      nullptr;  ///< null, with `weights`: nobody wants gradients of weights
  MoeBackwardArgs const* weights = nullptr;    ///< may have the workspace of `input`
  ExpertCombineArgs const* combine = nullptr;  ///< of dx and the gradients of scores
  /// A stream beside that of the call, on which rows of dx go back while gradients of weights are made; combine->sms
  /// says with how many SMs, and its `begun` is backward()'s own. Null: they go back before.
  Stream side = {};
};

/// An identity for a group of ranks that make windows together.
struct PeerGroupId {
  char bytes[128] = {};
};

/// Memory of every rank that the kernels of every rank can address. Threads of one process get it by open_all(),
/// processes by make_id() and open(), which use NCCL (2.28 or later; loaded at run time; a copy that the process has
/// loaded already is preferred). Who has such memory from elsewhere, as torch symmetric memory, needs no PeerWindow.
/// open(), and close() of what it made, are collective: all ranks call them in the same order.
class TESSERA_EXPORT PeerWindow {
 public:
  /// Makes an id on one rank; the caller passes it to all ranks. `nccl_path`: null for libnccl.so.2.
  /// environment: NCCL is missing or too old, or NCCL_NVLS_ENABLE is not "0": NVLink multicast must be off before
  /// the first NCCL call of a process.
  static Expected<PeerGroupId> make_id(char const* nccl_path = nullptr) noexcept;
  /// Makes a window of `bytes` zeros on every rank; all pass equal `bytes`. environment: as make_id, or the GPUs do not
  /// address each other.
  /// out_of_memory: no host memory for the handle.
  static Expected<PeerWindow> open(Context const& context, std::int32_t rank, std::int32_t ranks,
                                   PeerGroupId const& id, std::size_t bytes,
                                   char const* nccl_path = nullptr) noexcept;

  /// Makes the windows of all ranks, rank r on devices[r], of `bytes` zeros each, for threads of this process: one
  /// thread calls it, once. All memory is freed when the last of them is closed or destroyed, after all work of these
  /// GPUs. invalid_argument: no ranks or too many, or two on one GPU. environment: no such GPU, or GPUs that do not
  /// address each other. out_of_memory.
  static Expected<std::vector<PeerWindow>> open_all(std::span<Device const> devices,
                                                    std::size_t bytes) noexcept;

  PeerWindow(PeerWindow&&) noexcept;
  PeerWindow& operator=(PeerWindow&&) noexcept;
  /// If close() was not called, as after a fault, leaves the group without waiting for the others, and frees the
  /// memory after all work of its GPU.
  ~PeerWindow();

  /// Element r is the memory of rank r, as this rank's GPU addresses it.
  [[nodiscard]] std::span<void* const> addresses() const noexcept;
  /// Waits for all work of this rank's GPU, then frees the memory. Does not wait for the other ranks: what they have
  /// mapped stays until they close, too, so their passes may still run, but no rank should close while another may
  /// still launch one. A window of open_all() closes alone: the call is not collective.
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
  /// `workspace`: memory of this rank's GPU. Both must stay until all ranks have destroyed their object.
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

  /// The place of second_x, with training. It may be overwritten once the previous pass has ended on this rank.
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
  /// All calls of a backward pass: dispatch(), moe_backward_input(), combine() and moe_backward_weights(). What comes
  /// behind it on its stream comes behind all of them. Errors are those of these calls; with one the pass is void.
  Status backward(ExpertBackwardArgs const& args, Stream stream = {}) noexcept;

  /// Ok if the passes that have ended are good. Else device_error: a rank did not come within the time limit, and the
  /// text says who waited where for what. o is void then, on all ranks, and the group must be made anew. Does not wait:
  /// synchronise the stream of a pass first.
  [[nodiscard]] Status check() const noexcept;

 private:
  ExpertParallel(ExpertParallelDesc const& desc, Device device,
                 std::unique_ptr<expert_parallel::Session> session) noexcept;
  Status combine_partials(ExpertCombineArgs const& args, float const* ds_partials,
                          std::int32_t ds_groups, Stream stream) noexcept;
  [[nodiscard]] Expected<expert_parallel::DispatchTensors> dispatch_tensors(
      ExpertDispatchArgs const& args, std::span<std::int32_t> zeroed) const noexcept;
  Status dispatch_and_zero(ExpertDispatchArgs const& args, std::span<std::int32_t> zeroed,
                           Stream stream) noexcept;
  Expected<core::AwaitedRows> dispatch_beside(ExpertBackwardArgs const& args,
                                              std::span<std::int32_t> zeroed,
                                              Stream stream) noexcept;
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

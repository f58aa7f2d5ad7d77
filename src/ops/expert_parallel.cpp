// SPDX-License-Identifier: Apache-2.0
// ExpertParallel: checks everything, then hands over to src/expert_parallel.
#include <algorithm>
#include <cmath>
#include <utility>

#include "core/desc_check.hpp"
#include "core/tensor_check.hpp"
#include "cuda/layer/backend.hpp"
#include "expert_parallel/plan/biases.hpp"
#include "expert_parallel/plan/choose_transfer.hpp"
#include "expert_parallel/plan/protocol.hpp"
#include "expert_parallel/session.hpp"
#include "expert_parallel/transport/engine.hpp"
#include "ops/split_backward.hpp"
#include "ops/support.hpp"
#include "tessera/expert_parallel.hpp"
#include "tessera/routing.hpp"

namespace tessera {
namespace {

constexpr std::int64_t kMaxTokens = std::int64_t{1} << 24;
constexpr std::int64_t kMaxColumns = std::int64_t{1} << 20;
constexpr std::int64_t kMaxPoolRows = (std::int64_t{1} << 31) - 1;
constexpr std::int64_t kMaxPairs = std::int64_t{1} << 32;  // times top_k: expert_parallel::Divisor

Status check_range(char const* name, std::int64_t value, std::int64_t least, std::int64_t most,
                   std::int64_t step = 1) noexcept {
  if (value >= least && value <= most && value % step == 0) return {};
  using Int = long long;
  if (step == 1) {
    return Status::invalid("%s=%lld: %lld to %lld", name, Int{value}, Int{least}, Int{most});
  }
  return Status::invalid("%s=%lld: %lld to %lld, a multiple of %lld", name, Int{value}, Int{least},
                         Int{most}, Int{step});
}

// SMs of the kernels that wait for other ranks.
std::int32_t sms_of(ExpertParallelDesc const& d, Context const& context) noexcept {
  std::int32_t const all = context.cuda()->sm_count();
  return d.sms > 0 ? std::min(d.sms, all) : all;
}

Expected<expert_parallel::ExchangeShape> shape_of(ExpertParallelDesc const& d) noexcept {
  TESSERA_TRY(check_range("ranks", d.ranks, 1, kMaxRanks));
  TESSERA_TRY(check_range("rank", d.rank, 0, d.ranks - 1));
  TESSERA_TRY(check_range("max_tokens", d.max_tokens, 1, kMaxTokens));
  TESSERA_TRY(check_range("hidden", d.hidden, 8, kMaxColumns, 8));
  TESSERA_TRY(check_range("intermediate", d.intermediate, 8, kMaxColumns, 8));
  TESSERA_TRY(check_range("experts", d.experts, d.ranks, expert_parallel::kMaxExperts, d.ranks));
  TESSERA_TRY(check_range("top_k", d.top_k, 1,
                          std::min<std::int64_t>(d.experts, expert_parallel::kMaxChoices)));
  if (!(d.time_limit > 0) || !(d.time_limit <= 86400)) {
    return Status::invalid("time_limit=%g: seconds, above 0 and at most a day", d.time_limit);
  }
  if (d.sms < 0 || d.sms == 1) {  // the forward pass takes them in pairs
    return Status::invalid("sms=%d: 0 for all, or at least 2", d.sms);
  }
  if (static_cast<std::int32_t>(d.activation.kind) < 0 ||
      d.activation.kind > ActivationKind::gelu_erf) {
    return Status::invalid("activation=%d: one of ActivationKind",
                           static_cast<int>(d.activation.kind));
  }
  TESSERA_TRY(core::check_activation(d.activation));
  expert_parallel::ExchangeShape shape = {.ranks = d.ranks,
                                          .max_tokens = static_cast<std::int32_t>(d.max_tokens),
                                          .hidden = static_cast<std::int32_t>(d.hidden),
                                          .intermediate = static_cast<std::int32_t>(d.intermediate),
                                          .experts = static_cast<std::int32_t>(d.experts),
                                          .max_top_k = static_cast<std::int32_t>(d.top_k),
                                          .gated = d.activation.gated(),
                                          .training = d.training};
  if (shape.pool_rows() > kMaxPoolRows) {
    return Status::invalid(
        "max_tokens=%lld: a rank's pool would have %lld rows, more than 2^31-1; split the pass",
        static_cast<long long>(d.max_tokens), static_cast<long long>(shape.pool_rows()));
  }
  if (d.max_tokens * d.top_k > kMaxPairs / d.top_k) {
    return Status::invalid("max_tokens=%lld: at most %lld where top_k=%d; split the pass",
                           static_cast<long long>(d.max_tokens),
                           static_cast<long long>(kMaxPairs / d.top_k / d.top_k),
                           static_cast<int>(d.top_k));
  }
  shape.transfer = expert_parallel::choose_transfer(shape, d.partial_combine || d.sums_on_owners);
  return shape;
}

expert_parallel::StagedRows rows_of_caller(ConstTensor const& x) noexcept {
  return {x.data, x.stride[0]};
}

// Tensors of a pass of one rank.
struct PassCheck {
  ExpertParallelDesc const& desc;
  core::TensorCheck check;

  void input(char const* name, ConstTensor const& tensor, DType dtype,
             std::initializer_list<std::int64_t> shape) noexcept {
    check.input(name, tensor, dtype, shape);
    check.contiguous(name, tensor);
  }
  void output(char const* name, Tensor const& tensor, DType dtype,
              std::initializer_list<std::int64_t> shape) noexcept {
    check.output(name, tensor, dtype, shape);
    check.contiguous(name, tensor);
  }
  void aligned(char const* name, void const* data) noexcept {
    if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0) {
      check.fail(Status::invalid("%s=%p: begins at a multiple of 16", name, data));
    }
  }
  // Checks rows that are copied to their place in the window, unless they lie there.
  void staged(char const* name, ConstTensor const& x, std::int64_t tokens, void* place) noexcept {
    check.input(name, x, DType::bf16, {tokens, desc.hidden});
    if (rows_of_caller(x).lie_at(place, tokens, desc.hidden)) return;
    auto const bytes = static_cast<std::size_t>(2 * desc.max_tokens * desc.hidden);
    check.buffer("input()", {place, bytes}, bytes, 1, true);
  }
  void tables(DispatchTables const& tables, std::int64_t rows, bool written) noexcept {
    auto const add = [&](char const* name, Tensor const& tensor, DType dtype,
                         std::initializer_list<std::int64_t> shape) {
      written ? output(name, tensor, dtype, shape) : input(name, tensor, dtype, shape);
    };
    add("expert_offsets", tables.expert_offsets, DType::int32, {desc.experts / desc.ranks + 1});
    add("row_origins", tables.row_origins, DType::int32, {rows, 4});
    aligned("row_origins", tables.row_origins.data);
    if (written || tables.row_scores.present()) {
      add("row_scores", tables.row_scores, DType::fp32, {rows});
    }
  }
};

// [T,..] of a pass, T.
Expected<std::int64_t> tokens_of(char const* name, ConstTensor const& tensor,
                                 ExpertParallelDesc const& desc, std::int64_t columns) noexcept {
  using Int = long long;
  if (tensor.rank != 2) {
    return Status::invalid("%s: %d dimensions; [T,%lld] is needed", name, tensor.rank,
                           Int{columns});
  }
  std::int64_t const tokens = tensor.shape[0];
  if (tokens < 0 || tokens > desc.max_tokens) {
    return Status::invalid("%s: %lld tokens; [T,%lld] with T from 0 to max_tokens=%lld", name,
                           Int{tokens}, Int{columns}, Int{desc.max_tokens});
  }
  return tokens;
}

// [R,..], R.
Expected<std::int64_t> rows_of(char const* name, ConstTensor const& rows,
                               ExpertParallelDesc const& desc, std::int64_t columns) noexcept {
  std::int64_t const most = std::int64_t{desc.ranks} * desc.max_tokens * desc.top_k;
  if (rows.rank == 2 && rows.shape[0] >= 0 && rows.shape[0] <= most) return rows.shape[0];
  return Status::invalid("%s: [R,%lld] with R from 0 to ranks*max_tokens*top_k=%lld", name,
                         static_cast<long long>(columns), static_cast<long long>(most));
}

Status check_training(ExpertParallelDesc const& desc, char const* call) noexcept {
  if (desc.training) return {};
  return Status::invalid("%s: training=0; create the object with training", call);
}

Status check_sms(std::int32_t sms) noexcept {
  if (sms >= 0) return {};
  return Status::invalid("sms=%d: 0 for all, or how many", sms);
}

// Says what tables of R grouped rows of this rank's experts look like.
MoeDesc desc_of_rows(ExpertParallelDesc const& desc, std::int64_t rows) noexcept {
  MoeDesc out;
  out.shape = {.tokens = rows,
               .hidden = desc.hidden,
               .intermediate = desc.intermediate,
               .experts = desc.experts / desc.ranks,
               .top_k = 1};
  out.dtype = DType::bf16;
  out.activation = desc.activation;
  out.grouping = RowGrouping::offsets;
  return out;
}

// True if combine() may add up what down_projection_dgrad leaves of the gradients of scores, which nobody else reads.
// moe_backward_weights() may have the same workspace beside it, of which it must need the counters alone.
bool combine_adds_up_scores(ExpertBackwardArgs const& args, bool same_workspace) noexcept {
  MoeDesc const& desc = *args.input_desc;
  MoeBackwardArgs const& input = *args.input;
  if (same_workspace && cuda::workspace_bytes(*args.weights_desc, Pass::backward_weights, 0) >
                            cuda::kBackwardCountersBytes) {
    return false;
  }
  return args.context->cuda() != nullptr && desc.router.kind == RouterKind::given &&
         !desc.quantises() && !input.weights.b_down.present() && input.dscores.present() &&
         args.combine->row_dscores.data == input.dscores.data;
}

expert_parallel::PassTables pass_tables(DispatchTables const& tables, std::int64_t rows) noexcept {
  return {.gmem_expert_offsets = tables.expert_offsets.data,
          .gmem_row_origins = tables.row_origins.data,
          .gmem_row_scores = tables.row_scores.data,
          .capacity = rows};
}

}  // namespace

Expected<std::size_t> ExpertParallel::window_bytes(ExpertParallelDesc const& desc) noexcept {
  auto const shape = shape_of(desc);
  if (!shape.ok()) return shape.status();
  return static_cast<std::size_t>(expert_parallel::WindowLayout(shape.value()).bytes);
}

Expected<std::size_t> ExpertParallel::workspace_bytes(Context const& context,
                                                      ExpertParallelDesc const& desc) noexcept {
  auto const shape = shape_of(desc);
  if (!shape.ok()) return shape.status();
  TESSERA_TRY(ops::check_on_gpu(context));
  return expert_parallel::Session::workspace_bytes(shape.value(), sms_of(desc, context));
}

Expected<ExpertParallel> ExpertParallel::create(Context const& context,
                                                ExpertParallelDesc const& desc,
                                                std::span<void* const> windows,
                                                Buffer workspace) noexcept {
  auto const shape = shape_of(desc);
  if (!shape.ok()) return shape.status();
  TESSERA_TRY(ops::check_on_gpu(context));
  if (windows.size() != static_cast<std::size_t>(desc.ranks)) {
    return Status::invalid("windows: %zu addresses for %d ranks; pass one of each rank",
                           windows.size(), desc.ranks);
  }
  auto const bytes = static_cast<std::size_t>(expert_parallel::WindowLayout(shape.value()).bytes);
  expert_parallel::DeviceScope const scope(expert_parallel::device_calls(), context.device().index,
                                           expert_parallel::ContextChoice::any_of_device);
  TESSERA_TRY(scope.status());
  auto const window = expert_parallel::adopt_window(windows, bytes);
  if (!window.ok()) return window.status();
  core::TensorCheck check{context.device()};
  std::int32_t const sm_count = sms_of(desc, context);
  check.buffer("workspace", workspace,
               expert_parallel::Session::workspace_bytes(shape.value(), sm_count), 1, true);
  TESSERA_TRY(check.finish());
  auto session = expert_parallel::Session::open({.shape = shape.value(),
                                                 .activation = desc.activation,
                                                 .rank = desc.rank,
                                                 .device = context.device().index,
                                                 .sm_count = sm_count,
                                                 .windows = window.value().address,
                                                 .workspace = workspace.data,
                                                 .time_limit = desc.time_limit});
  if (!session.ok()) return session.status();
  return ExpertParallel(desc, context.device(), std::move(session).value());
}

ExpertParallel::ExpertParallel(ExpertParallelDesc const& desc, Device device,
                               std::unique_ptr<expert_parallel::Session> session) noexcept
    : desc_(desc), device_(device), session_(std::move(session)) {}
ExpertParallel::ExpertParallel(ExpertParallel&&) noexcept = default;
ExpertParallel& ExpertParallel::operator=(ExpertParallel&&) noexcept = default;
ExpertParallel::~ExpertParallel() = default;

Tensor ExpertParallel::input(std::int64_t tokens) const noexcept {
  return tensor(session_->x(), DType::bf16, {tokens, desc_.hidden}, device_);
}

Tensor ExpertParallel::second_input(std::int64_t tokens) const noexcept {
  return tensor(desc_.training ? session_->second_x() : nullptr, DType::bf16,
                {tokens, desc_.hidden}, device_);
}

Status ExpertParallel::forward(ExpertParallelArgs const& args, Stream stream) noexcept {
  auto const known = tokens_of("x", args.x, desc_, desc_.hidden);
  if (!known.ok()) return known.status();
  std::int64_t const tokens = known.value();
  std::int64_t const experts = desc_.experts / desc_.ranks;
  std::int64_t const up_rows = (desc_.activation.gated() ? 2 : 1) * desc_.intermediate;
  PassCheck pass{desc_, core::TensorCheck{device_}};
  pass.staged("x", args.x, tokens, session_->x());
  pass.input("topk_ids", args.topk_ids, DType::int32, {tokens, desc_.top_k});
  pass.input("topk_weights", args.topk_weights, DType::fp32, {tokens, desc_.top_k});
  pass.input("w_up", args.w_up, DType::bf16, {experts, up_rows, desc_.hidden});
  pass.input("w_down", args.w_down, DType::bf16, {experts, desc_.hidden, desc_.intermediate});
  pass.output("o", args.o, DType::bf16, {tokens, desc_.hidden});
  pass.aligned("w_up", args.w_up.data);
  pass.aligned("w_down", args.w_down.data);
  pass.aligned("o", args.o.data);
  expert_parallel::PassTensors tensors = {
      .tokens = static_cast<std::int32_t>(tokens),
      .x = rows_of_caller(args.x),
      .gmem_topk_ids = static_cast<std::int32_t const*>(args.topk_ids.data),
      .gmem_topk_weights = static_cast<float const*>(args.topk_weights.data),
      .gmem_w_up = args.w_up.data,
      .gmem_w_down = args.w_down.data,
      .gmem_o = args.o.data};
  DispatchTables const& saved = args.kept.expert_offsets.present() ? args.kept : args.saved;
  if (saved.expert_offsets.present()) {
    TESSERA_TRY(check_training(desc_, "saved"));
    auto const rows = rows_of("row_origins", saved.row_origins, desc_, 4);
    if (!rows.ok()) return rows.status();
    pass.tables(saved, rows.value(), true);
    tensors.saved = pass_tables(saved, rows.value());
    tensors.may_overflow = args.may_overflow;
    if (args.h.present()) {
      pass.output("h", args.h, DType::bf16, {rows.value(), up_rows});
      pass.aligned("h", args.h.data);
      tensors.gmem_h = args.h.data;
    }
  } else {
    pass.check.absent("h", args.h, "there are no tables of its rows");
  }
  if (args.b_up.present() || args.b_down.present()) {
    if (!expert_parallel::adds_biases(desc_.activation.kind)) {
      return Status::unsupported(
          "b_up, b_down: one launch has biases with clamped_swiglu alone; with other activations "
          "route(), dispatch() and combine() make a pass with them");
    }
    pass.input("b_up", args.b_up, DType::bf16, {experts, up_rows});
    pass.input("b_down", args.b_down, DType::bf16, {experts, desc_.hidden});
    pass.aligned("b_up", args.b_up.data);
    pass.aligned("b_down", args.b_down.data);
    tensors.gmem_b_up = args.b_up.data;
    tensors.gmem_b_down = args.b_down.data;
  }
  TESSERA_TRY(pass.check.finish());
  return session_->forward(tensors, stream);
}

Status ExpertParallel::route(ExpertRouteArgs const& args, Stream stream) noexcept {
  TESSERA_TRY(check_training(desc_, "route"));
  auto const tokens = tokens_of("topk_ids", args.topk_ids, desc_, desc_.top_k);
  if (!tokens.ok()) return tokens.status();
  PassCheck pass{desc_, core::TensorCheck{device_}};
  pass.input("topk_ids", args.topk_ids, DType::int32, {tokens.value(), desc_.top_k});
  pass.input("topk_weights", args.topk_weights, DType::fp32, {tokens.value(), desc_.top_k});
  TESSERA_TRY(pass.check.finish());
  constexpr std::int64_t kAny = INT32_MAX;
  std::int64_t const row_limit = args.row_limit != 0 ? args.row_limit : args.room;
  if (row_limit < 0) {
    return Status::invalid("row_limit=%lld: rows, 0 for as many as there are",
                           static_cast<long long>(row_limit));
  }
  return session_->route(
      {.tokens = static_cast<std::int32_t>(tokens.value()),
       .gmem_topk_ids = static_cast<std::int32_t const*>(args.topk_ids.data),
       .gmem_topk_weights = static_cast<float const*>(args.topk_weights.data),
       .row_limit = static_cast<std::int32_t>(row_limit == 0 ? kAny : std::min(row_limit, kAny))},
      stream);
}

Expected<RoutedRows> ExpertParallel::routed_rows(std::int64_t passes_ago) noexcept {
  TESSERA_TRY(check_training(desc_, "routed_rows"));
  return session_->routed_rows(passes_ago);
}

Status ExpertParallel::dispatch(ExpertDispatchArgs const& args, Stream stream) noexcept {
  return dispatch_and_zero(args, {}, stream);
}

// Checks arguments of dispatch(), and says what they mean to the session.
Expected<expert_parallel::DispatchTensors> ExpertParallel::dispatch_tensors(
    ExpertDispatchArgs const& args, std::span<std::int32_t> zeroed) const noexcept {
  TESSERA_TRY(check_training(desc_, "dispatch"));
  bool const has_second = args.second_x.present();
  bool const has_x = args.x.present() || !has_second;
  auto const tokens = has_x ? tokens_of("x", args.x, desc_, desc_.hidden)
                            : tokens_of("second_x", args.second_x, desc_, desc_.hidden);
  if (!tokens.ok()) return tokens.status();
  auto const rows = args.gathered ? rows_of("row_origins", args.tables.row_origins, desc_, 4)
                    : has_x       ? rows_of("rows", args.rows, desc_, desc_.hidden)
                                  : rows_of("second_rows", args.second_rows, desc_, desc_.hidden);
  if (!rows.ok()) return rows.status();
  std::int64_t const places = args.gathered ? desc_.ranks * desc_.max_tokens : rows.value();
  TESSERA_TRY(check_sms(args.sms));
  PassCheck pass{desc_, core::TensorCheck{device_}};
  pass.tables(args.tables, rows.value(), has_x);
  if (has_x) {
    pass.staged("x", args.x, tokens.value(), session_->x());
    pass.input("topk_ids", args.topk_ids, DType::int32, {tokens.value(), desc_.top_k});
    pass.output("rows", args.rows, DType::bf16, {places, desc_.hidden});
    pass.aligned("rows", args.rows.data);
  } else {
    pass.check.absent("rows", args.rows, "there is no x");
    pass.check.absent("topk_ids", args.topk_ids, "there is no x");
  }
  MoeDesc const of_rows = desc_of_rows(desc_, rows.value());
  RoutingView routing;
  if (args.routing.data != nullptr) {
    if (!has_x) {
      return Status::invalid("routing: there is no x; give it to the call of dispatch() that has");
    }
    pass.check.buffer("routing", args.routing, ops::routing_table_bytes(of_rows), 4, true);
    routing = ops::view_routing(of_rows, args.routing.data);
  }
  if (has_second) {
    pass.staged("second_x", args.second_x, tokens.value(), session_->second_x());
    pass.output("second_rows", args.second_rows, DType::bf16, {places, desc_.hidden});
    pass.aligned("second_rows", args.second_rows.data);
  } else {
    pass.check.absent("second_rows", args.second_rows, "there is no second_x");
  }
  TESSERA_TRY(pass.check.finish());
  return expert_parallel::DispatchTensors{
      .tokens = static_cast<std::int32_t>(tokens.value()),
      .x = rows_of_caller(args.x),
      .second_x = rows_of_caller(args.second_x),
      .has_x = has_x,
      .has_second = has_second,
      .may_overflow = args.may_overflow,
      .gmem_topk_ids = static_cast<std::int32_t const*>(args.topk_ids.data),
      .tables = pass_tables(args.tables, rows.value()),
      .gmem_rows = args.rows.data,
      .gmem_second_rows = args.second_rows.data,
      .gathered = args.gathered,
      .routing = routing,
      .zeroed = zeroed,
      .sms = args.sms,
      .begun = args.begun};
}

Status ExpertParallel::dispatch_and_zero(ExpertDispatchArgs const& args,
                                         std::span<std::int32_t> zeroed, Stream stream) noexcept {
  auto const tensors = dispatch_tensors(args, zeroed);
  return tensors.ok() ? session_->dispatch(tensors.value(), stream) : tensors.status();
}

Expected<core::AwaitedRows> ExpertParallel::dispatch_beside(ExpertBackwardArgs const& args,
                                                            std::span<std::int32_t> zeroed,
                                                            Stream stream) noexcept {
  auto const first = dispatch_tensors(*args.dispatch, zeroed);
  if (!first.ok()) return first.status();
  auto const second = dispatch_tensors(*args.second_dispatch, {});
  if (!second.ok()) return second.status();
  expert_parallel::DispatchTensors tensors = first.value();
  if (!tensors.has_x || tensors.has_second || second.value().has_x || !tensors.gathered ||
      !second.value().gathered || tensors.begun != nullptr || second.value().begun != nullptr ||
      args.side.native == nullptr) {
    return Status::invalid(
        "second_dispatch: x alone by dispatch, second_x alone by second_dispatch, both gathered "
        "and without begun, and a side stream");
  }
  if (tensors.tokens != second.value().tokens) {
    return Status::invalid("second_x: %d tokens; the pass began with %d, pass as many",
                           second.value().tokens, tensors.tokens);
  }
  tensors.has_second = true;
  tensors.second_x = second.value().second_x;
  tensors.gmem_second_rows = second.value().gmem_second_rows;
  tensors.sms = second.value().sms;
  return session_->dispatch_beside(tensors, stream, args.side);
}

Status ExpertParallel::combine(ExpertCombineArgs const& args, Stream stream) noexcept {
  return combine_partials(args, nullptr, 0, stream);
}

Status ExpertParallel::combine_partials(ExpertCombineArgs const& args, float const* ds_partials,
                                        std::int32_t ds_groups, Stream stream) noexcept {
  TESSERA_TRY(check_training(desc_, "combine"));
  auto const tokens = tokens_of("o", args.o, desc_, desc_.hidden);
  if (!tokens.ok()) return tokens.status();
  auto const rows = rows_of("rows", args.rows, desc_, desc_.hidden);
  if (!rows.ok()) return rows.status();
  TESSERA_TRY(check_sms(args.sms));
  PassCheck pass{desc_, core::TensorCheck{device_}};
  pass.input("rows", args.rows, DType::bf16, {rows.value(), desc_.hidden});
  pass.aligned("rows", args.rows.data);
  pass.tables(args.tables, rows.value(), false);
  if (args.topk_weights.present()) {
    pass.input("topk_weights", args.topk_weights, DType::fp32, {tokens.value(), desc_.top_k});
  }
  bool const has_dscores = args.row_dscores.present();
  if (has_dscores) {
    pass.input("row_dscores", args.row_dscores, DType::fp32, {rows.value()});
    pass.output("dscores", args.dscores, DType::fp32, {tokens.value(), desc_.top_k});
  } else {
    pass.check.absent("dscores", args.dscores, "there are no row_dscores");
  }
  pass.output("o", args.o, DType::bf16, {tokens.value(), desc_.hidden});
  pass.aligned("o", args.o.data);
  TESSERA_TRY(pass.check.finish());
  return session_->combine(
      {.tokens = static_cast<std::int32_t>(tokens.value()),
       .tables = pass_tables(args.tables, rows.value()),
       .gmem_rows = args.rows.data,
       .gmem_topk_weights = static_cast<float const*>(args.topk_weights.data),
       .gmem_row_dscores =
           ds_partials == nullptr ? static_cast<float const*>(args.row_dscores.data) : nullptr,
       .gmem_ds_partials = ds_partials,
       .ds_groups = ds_groups,
       .gmem_dscores = static_cast<float*>(args.dscores.data),
       .gmem_o = args.o.data,
       .sms = args.sms,
       .begun = args.begun},
      stream);
}

Status ExpertParallel::backward(ExpertBackwardArgs const& args, Stream stream) noexcept {
  TESSERA_TRY(check_training(desc_, "backward"));
  if (args.context == nullptr || args.input_desc == nullptr || args.input == nullptr ||
      args.combine == nullptr || (args.weights == nullptr) != (args.weights_desc == nullptr) ||
      (args.second_dispatch != nullptr && args.dispatch == nullptr)) {
    return Status::invalid(
        "backward: context, input_desc, input and combine, weights_desc beside weights, and "
        "dispatch beside second_dispatch; a pointer is null");
  }
  expert_parallel::DeviceScope const scope(expert_parallel::device_calls(), device_.index,
                                           expert_parallel::ContextChoice::any_of_device);
  TESSERA_TRY(scope.status());
  bool const beside = args.side.native != nullptr;
  Buffer const workspace = args.input->workspace;
  bool const same_workspace =
      args.weights != nullptr && args.weights->workspace.data == workspace.data;
  std::span<std::int32_t> counters;  // which dispatch() clears
  core::AwaitedRows awaited;         // rows of d_o that come on the side stream
  if (args.dispatch != nullptr) {
    if (args.dispatch->x.present() && args.context->cuda() != nullptr &&
        workspace.data != nullptr && workspace.bytes >= cuda::kBackwardCountersBytes) {
      counters = cuda::backward_counters(workspace.data);
    }
    if (args.second_dispatch != nullptr) {
      auto const rows = dispatch_beside(args, counters, stream);
      if (!rows.ok()) return rows.status();
      awaited = rows.value();
    } else {
      TESSERA_TRY(dispatch_and_zero(*args.dispatch, counters, stream));
    }
  }
  bool const cleared = !counters.empty(), adds_up = combine_adds_up_scores(args, same_workspace);
  TESSERA_TRY(ops::backward_input(
      *args.context, *args.input_desc, *args.input, stream,
      {.counters_are_zero = cleared, .adds_up_scores = adds_up, .awaited = awaited}));
  cuda::ScorePartials const partials =
      adds_up ? cuda::score_partials(*args.input_desc, workspace.data) : cuda::ScorePartials{};
  if (beside) {
    ExpertCombineArgs combine_args = *args.combine;
    combine_args.begun = session_->begun();
    TESSERA_TRY(session_->fork(stream, args.side));
    TESSERA_TRY(combine_partials(combine_args, partials.gmem, partials.groups, args.side));
    TESSERA_TRY(session_->wait_until_begun(stream));
  } else {
    TESSERA_TRY(combine_partials(*args.combine, partials.gmem, partials.groups, stream));
  }
  Status const status =
      args.weights == nullptr
          ? Status()
          : ops::backward_weights(*args.context, *args.weights_desc, *args.weights, stream,
                                  {.counters_are_zero = cleared && same_workspace});
  if (beside) TESSERA_TRY(session_->join(stream, args.side));  // with an error, too
  return status;
}

Status ExpertParallel::check() const noexcept { return session_->fault(); }

Status routing_of_tables(Context const& context, MoeDesc const& desc, DispatchTables const& tables,
                         Buffer routing, Stream stream) noexcept {
  if (!tables.row_scores.present()) {
    return Status::invalid(
        "row_scores: absent, so every score would be 1 in backward; pass the tables that forward() "
        "or dispatch() saved");
  }
  return routing_of_groups(context, desc,
                           {.expert_offsets = tables.expert_offsets,
                            .row_scores = tables.row_scores,
                            .routing = routing},
                           stream);
}

}  // namespace tessera

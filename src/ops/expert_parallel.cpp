// SPDX-License-Identifier: Apache-2.0
// ExpertParallel and PeerWindow: check everything, then hand over to src/dist.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "core/desc_check.hpp"
#include "core/tensor_check.hpp"
#include "cuda/layer/backend.hpp"
#include "dist/choose_transfer.hpp"
#include "dist/engine.hpp"
#include "dist/protocol.hpp"
#include "dist/session.hpp"
#include "tessera/dist.hpp"

namespace tessera {
namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 24;
constexpr std::int64_t kMostColumns = std::int64_t{1} << 20;
constexpr std::int64_t kMostPoolRows = (std::int64_t{1} << 31) - 1;
constexpr std::int64_t kMostPairs = std::int64_t{1} << 32;  // times top_k: dist::Divisor

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

Expected<dist::ExchangeShape> shape_of(ExpertParallelDesc const& d) noexcept {
  TESSERA_TRY(check_range("ranks", d.ranks, 1, kMaxRanks));
  TESSERA_TRY(check_range("rank", d.rank, 0, d.ranks - 1));
  TESSERA_TRY(check_range("max_tokens", d.max_tokens, 1, kMostTokens));
  TESSERA_TRY(check_range("hidden", d.hidden, 8, kMostColumns, 8));
  TESSERA_TRY(check_range("intermediate", d.intermediate, 8, kMostColumns, 8));
  TESSERA_TRY(check_range("experts", d.experts, d.ranks, dist::kMostExperts, d.ranks));
  TESSERA_TRY(
      check_range("top_k", d.top_k, 1, std::min<std::int64_t>(d.experts, dist::kMostChoices)));
  if (!(d.time_limit > 0) || !(d.time_limit <= 86400)) {
    return Status::invalid("time_limit=%g: seconds, above 0 and at most a day", d.time_limit);
  }
  if (static_cast<std::int32_t>(d.activation.kind) < 0 ||
      d.activation.kind > ActivationKind::gelu_erf) {
    return Status::invalid("activation=%d: one of ActivationKind",
                           static_cast<int>(d.activation.kind));
  }
  TESSERA_TRY(core::check_activation(d.activation));
  dist::ExchangeShape shape = {.ranks = d.ranks,
                               .max_tokens = static_cast<std::int32_t>(d.max_tokens),
                               .hidden = static_cast<std::int32_t>(d.hidden),
                               .intermediate = static_cast<std::int32_t>(d.intermediate),
                               .experts = static_cast<std::int32_t>(d.experts),
                               .max_top_k = static_cast<std::int32_t>(d.top_k),
                               .gated = d.activation.gated()};
  if (shape.pool_rows() > kMostPoolRows) {
    return Status::invalid(
        "max_tokens=%lld: a rank's pool would have %lld rows, more than 2^31-1; split the pass",
        static_cast<long long>(d.max_tokens), static_cast<long long>(shape.pool_rows()));
  }
  if (d.max_tokens * d.top_k > kMostPairs / d.top_k) {
    return Status::invalid("max_tokens=%lld: at most %lld where top_k=%d; split the pass",
                           static_cast<long long>(d.max_tokens),
                           static_cast<long long>(kMostPairs / d.top_k / d.top_k),
                           static_cast<int>(d.top_k));
  }
  shape.transfer = dist::choose_transfer(shape, d.sums_on_owners);
  return shape;
}

Status check_device(Context const& context) noexcept {
  if (context.cuda() != nullptr) return {};
  return Status::error(StatusCode::environment,
                       "experts over several ranks run on GPUs: this context is on cpu; create "
                       "it on cuda:N");
}

}  // namespace

struct PeerWindow::Parts {
  std::unique_ptr<dist::Engine> engine;
  dist::Window window;
  std::int32_t ranks = 0;
};

PeerWindow::PeerWindow(std::unique_ptr<Parts> parts) noexcept : parts_(std::move(parts)) {}
PeerWindow::PeerWindow(PeerWindow&&) noexcept = default;
PeerWindow& PeerWindow::operator=(PeerWindow&&) noexcept = default;
PeerWindow::~PeerWindow() = default;

Expected<PeerGroupId> PeerWindow::make_id(char const* nccl_path) noexcept {
  auto const id = dist::make_unique_id(
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
  TESSERA_TRY(check_device(context));
  dist::EngineConfig config = {.rank = rank,
                               .ranks = ranks,
                               .device = context.device().index,
                               .nccl_path = nccl_path,
                               .nccl_nvls_enable = std::getenv("NCCL_NVLS_ENABLE")};
  std::memcpy(config.id.bytes, id.bytes, sizeof id.bytes);
  auto engine = dist::Engine::open(config);
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

std::span<void* const> PeerWindow::addresses() const noexcept {
  if (parts_ == nullptr) return {};
  return {parts_->window.address.data(), static_cast<std::size_t>(parts_->ranks)};
}

Status PeerWindow::close() noexcept {
  if (parts_ == nullptr) return {};
  std::unique_ptr<Parts> const parts = std::move(parts_);
  TESSERA_TRY(parts->engine->release(parts->window));
  return parts->engine->close();
}

Expected<std::size_t> ExpertParallel::window_bytes(ExpertParallelDesc const& desc) noexcept {
  auto const shape = shape_of(desc);
  if (!shape.ok()) return shape.status();
  return static_cast<std::size_t>(dist::WindowLayout(shape.value()).bytes);
}

Expected<std::size_t> ExpertParallel::workspace_bytes(Context const& context,
                                                      ExpertParallelDesc const& desc) noexcept {
  auto const shape = shape_of(desc);
  if (!shape.ok()) return shape.status();
  TESSERA_TRY(check_device(context));
  return dist::Session::workspace_bytes(shape.value(), context.cuda()->sm_count());
}

Expected<ExpertParallel> ExpertParallel::create(Context const& context,
                                                ExpertParallelDesc const& desc,
                                                std::span<void* const> windows,
                                                Buffer workspace) noexcept {
  auto const shape = shape_of(desc);
  if (!shape.ok()) return shape.status();
  TESSERA_TRY(check_device(context));
  if (windows.size() != static_cast<std::size_t>(desc.ranks)) {
    return Status::invalid("windows: %zu addresses for %d ranks; pass one of each rank",
                           windows.size(), desc.ranks);
  }
  auto const bytes = static_cast<std::size_t>(dist::WindowLayout(shape.value()).bytes);
  dist::DeviceScope const scope(dist::device_calls(), context.device().index,
                                dist::ContextChoice::any_of_device);
  TESSERA_TRY(scope.status());
  auto const window = dist::adopt_window(windows, bytes);
  if (!window.ok()) return window.status();
  core::TensorCheck check{context.device()};
  std::int32_t const sm_count = context.cuda()->sm_count();
  check.buffer("workspace", workspace, dist::Session::workspace_bytes(shape.value(), sm_count), 1,
               true);
  TESSERA_TRY(check.finish());
  auto session = dist::Session::open({.shape = shape.value(),
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
                               std::unique_ptr<dist::Session> session) noexcept
    : desc_(desc), device_(device), session_(std::move(session)) {}
ExpertParallel::ExpertParallel(ExpertParallel&&) noexcept = default;
ExpertParallel& ExpertParallel::operator=(ExpertParallel&&) noexcept = default;
ExpertParallel::~ExpertParallel() = default;

Tensor ExpertParallel::input(std::int64_t tokens) const noexcept {
  return tensor(session_->x(), DType::bf16, {tokens, desc_.hidden}, device_);
}

Status ExpertParallel::forward(ExpertParallelArgs const& args, Stream stream) noexcept {
  if (args.x.rank != 2) {
    return Status::invalid("x: %d dimensions; [T,%lld] is needed", args.x.rank,
                           static_cast<long long>(desc_.hidden));
  }
  std::int64_t const tokens = args.x.shape[0];
  if (tokens < 0 || tokens > desc_.max_tokens) {
    return Status::invalid("x: %lld tokens; [T,%lld] with T from 0 to max_tokens=%lld",
                           static_cast<long long>(tokens), static_cast<long long>(desc_.hidden),
                           static_cast<long long>(desc_.max_tokens));
  }
  std::int64_t const experts = desc_.experts / desc_.ranks;
  std::int64_t const up_rows = (desc_.activation.gated() ? 2 : 1) * desc_.intermediate;
  core::TensorCheck check{device_};
  auto const input = [&](char const* name, ConstTensor const& tensor, DType dtype,
                         std::initializer_list<std::int64_t> shape) {
    check.input(name, tensor, dtype, shape);
    check.contiguous(name, tensor);
  };
  auto const aligned = [&](char const* name, void const* data) {
    if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0) {
      check.fail(Status::invalid("%s=%p: begins at a multiple of 16", name, data));
    }
  };
  check.input("x", args.x, DType::bf16, {tokens, desc_.hidden});
  input("topk_ids", args.topk_ids, DType::int32, {tokens, desc_.top_k});
  input("topk_weights", args.topk_weights, DType::fp32, {tokens, desc_.top_k});
  input("w_up", args.w_up, DType::bf16, {experts, up_rows, desc_.hidden});
  input("w_down", args.w_down, DType::bf16, {experts, desc_.hidden, desc_.intermediate});
  check.output("o", args.o, DType::bf16, {tokens, desc_.hidden});
  check.contiguous("o", args.o);
  aligned("w_up", args.w_up.data);
  aligned("w_down", args.w_down.data);
  aligned("o", args.o.data);
  dist::PassTensors const pass = {
      .tokens = static_cast<std::int32_t>(tokens),
      .gmem_x = args.x.data,
      .x_pitch = args.x.stride[0],
      .gmem_topk_ids = static_cast<std::int32_t const*>(args.topk_ids.data),
      .gmem_topk_weights = static_cast<float const*>(args.topk_weights.data),
      .gmem_w_up = args.w_up.data,
      .gmem_w_down = args.w_down.data,
      .gmem_o = args.o.data};
  if (!dist::is_in_place(pass, desc_.hidden, session_->x())) {
    auto const bytes = static_cast<std::size_t>(2 * desc_.max_tokens * desc_.hidden);
    check.buffer("input()", {session_->x(), bytes}, bytes, 1, true);
  }
  TESSERA_TRY(check.finish());
  return session_->forward(pass, stream);
}

Status ExpertParallel::check() const noexcept { return session_->fault(); }

}  // namespace tessera

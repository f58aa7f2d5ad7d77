// SPDX-License-Identifier: Apache-2.0
// One rank of bench_dist_chain: its buffers, the passes that it launches, what it compares them with.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "../../src/cuda/host/aggregate.hpp"
#include "../../src/cuda/host/experts_fwd.hpp"
#include "../../src/cuda/host/projection.hpp"
#include "../../src/device/device.hpp"
#include "../../src/expert_parallel/exchange/exchange.hpp"
#include "../../src/expert_parallel/fused/forward.hpp"
#include "../../src/expert_parallel/plan/biases.hpp"
#include "../../src/expert_parallel/plan/choose_transfer.hpp"
#include "../cuda/support.cuh"
#include "tessera/tessera.hpp"

namespace tessera::bench {

using expert_parallel::ExchangeArguments;
using expert_parallel::ExchangeShape;
using expert_parallel::kTransfers;
using expert_parallel::Transfer;

enum Part { kDispatch, kUp, kDown, kCombine, kAggregate, kParts };
constexpr char const* kPartNames[] = {"dispatch", "up_projection_fwd", "down_projection_fwd",
                                      "combine", "aggregate"};

// balanced: equally many rows for all experts, drawn without putting back where tokens' choices divide them.
// one_expert: all choices of all tokens but the first are none; repeats: all choices are one expert's; idle_rank: the
// last one has no tokens; nothing: no choice at all.
enum class Pattern {
  balanced,
  random,
  zipf,
  one_expert,
  repeats,
  sentinels,
  idle_rank,
  one_token,
  nothing
};
constexpr Pattern kPatterns[] = {Pattern::balanced,   Pattern::random,    Pattern::zipf,
                                 Pattern::one_expert, Pattern::repeats,   Pattern::sentinels,
                                 Pattern::idle_rank,  Pattern::one_token, Pattern::nothing};
inline char const* name(Pattern pattern) {
  constexpr char const* kNames[] = {"balanced",  "random",    "zipf",      "one-expert", "repeats",
                                    "sentinels", "idle-rank", "one-token", "nothing"};
  return kNames[int(pattern)];
}

// Those whose passes are timed.
constexpr Pattern kRoutings[] = {Pattern::random, Pattern::balanced, Pattern::zipf};

// What one rank's router chose in one pass.
struct Choices {
  int tokens;
  std::vector<int32_t> ids;
  std::vector<float> scores;
};
inline Choices draw(ExchangeShape const& s, Pattern pattern, int rank, uint64_t seed) {
  std::mt19937_64 rng(seed * 1000003 + uint64_t(rank));
  Choices c = {.tokens = s.max_tokens, .ids = {}, .scores = {}};
  if (pattern == Pattern::idle_rank && rank == s.ranks - 1) c.tokens = 0;
  if (pattern == Pattern::one_token) c.tokens = 1;
  if (pattern == Pattern::sentinels) c.tokens -= rank;
  std::vector<int32_t> experts(size_t(s.experts));
  std::iota(experts.begin(), experts.end(), 0);
  auto const weight = [&](int32_t expert) {  // Zipf(1.0): the e-th expert is chosen with 1/(e+1)
    return pattern == Pattern::zipf ? 1.0 / (1 + expert) : 1.0;
  };
  auto const pick = [&](int k) {  // one of those from k on
    double sum = 0;
    for (int e = k; e < s.experts; ++e) sum += weight(experts[size_t(e)]);
    double left = std::uniform_real_distribution<double>(0, sum)(rng);
    int e = k;
    while (e + 1 < s.experts && (left -= weight(experts[size_t(e)])) > 0) ++e;
    return size_t(e);
  };
  for (int t = 0; t < c.tokens; ++t) {
    if (pattern == Pattern::balanced && s.experts % s.max_top_k == 0 &&
        t * s.max_top_k % s.experts == 0) {
      std::shuffle(experts.begin(), experts.end(), rng);
    }
    for (int k = 0; k < s.max_top_k; ++k) {
      size_t const next = size_t((t * s.max_top_k + k) % s.experts);
      if (pattern != Pattern::balanced) std::swap(experts[size_t(k)], experts[pick(k)]);
      bool const none = (pattern == Pattern::sentinels && rng() % 3 == 0) ||
                        (pattern == Pattern::one_expert && k > 0) || pattern == Pattern::nothing;
      bool const last = pattern == Pattern::one_expert || pattern == Pattern::repeats;
      int32_t const one = last                           ? s.experts - 1
                          : pattern == Pattern::balanced ? experts[next]
                                                         : experts[size_t(k)];
      c.ids.push_back(none ? (rng() % 2 ? -1 : s.experts) : one);
      c.scores.push_back(float(rng() % 1000) / 1000.0f + 0.1f);
    }
  }
  return c;
}

using WindowAddresses = std::array<char*, kMaxRanks>;

inline void fail(Status const& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.text());
  std::exit(1);
}

// Where the fused pass finds x: in its window, or with the caller, whence the kernel copies it, or a copy ahead of it.
enum class X { in_window, by_kernel, ahead };

// o of tokens on `rank` from the results y [K,tokens,d] of their choices: in the order of the choices, but several on
// another rank are one term, rounded, where the first of them is. One CTA per token.
__global__ void add_as_owners(bf16 const* y, int64_t tokens, ExchangeShape s, int rank,
                              int32_t const* ids, float const* scores, bf16* o) {
  int const token = int(blockIdx.x);
  int32_t const* const of_token = ids + int64_t{token} * s.max_top_k;
  auto const owner = [&](int k) {
    return of_token[k] < 0 || of_token[k] >= s.experts ? -1 : s.owner(of_token[k]);
  };
  auto const adds_up = [&](int k) { return of_token[k] % s.local_experts() < s.partial_experts(); };
  for (int i = int(threadIdx.x); i < s.hidden; i += int(blockDim.x)) {
    auto const add = [&](int k, float sum) {
      return fmaf(scores[int64_t{token} * s.max_top_k + k],
                  float(y[(k * tokens + token) * s.hidden + i]), sum);
    };
    float sum = 0;
    for (int k = 0; k < s.max_top_k; ++k) {
      if (owner(k) < 0) continue;
      int before = 0, after = 0;  // choices on the same rank
      for (int j = 0; j < s.max_top_k; ++j) {
        if (owner(j) == owner(k) && adds_up(j)) (j < k ? before : after) += j == k ? 0 : 1;
      }
      if (owner(k) == rank || !adds_up(k) || before + after == 0) {
        sum = add(k, sum);
      } else if (before == 0) {
        float part = 0;
        for (int j = k; j < s.max_top_k; ++j) {
          if (owner(j) == owner(k) && adds_up(j)) part = add(j, part);
        }
        sum += float(bf16(part));
      }
    }
    o[int64_t{token} * s.hidden + i] = bf16(sum);
  }
}

class Rank {
 public:
  // `windows`: of all ranks, zeroed, as this GPU addresses them.
  Rank(int rank, int device, int sm_count, ExchangeShape const& s, ActivationKind activation,
       WindowAddresses const& windows)
      : rank_(rank),
        sm_count_(sm_count),
        stream_(device),
        shape_(s),
        activation_{.kind = activation},
        window_layout_(s),
        local_layout_(s, sm_count),
        windows_(windows),
        window_(windows[size_t(rank)]),
        local_(local_layout_.bytes),
        epoch_(std::vector<uint32_t>{1}),
        ids_(pairs()),
        slot_of_pair_(pairs()),
        scores_(pairs()),
        offsets_(s.local_experts() + 1),
        origins_(s.max_rows()),
        row_scores_(s.max_rows()),
        routing_(s.local_experts() + 1 + 4 * s.max_rows()),
        pool_(s.pool_rows() * s.hidden),
        a_(s.pool_rows() * s.intermediate),
        y_(s.max_rows() * s.hidden),
        w_up_(halves() * s.experts * s.intermediate * s.hidden),
        w_down_(int64_t{1} * s.experts * s.intermediate * s.hidden),
        b_up_(has_biases() ? halves() * s.experts * s.intermediate : 1),
        b_down_(has_biases() ? int64_t{1} * s.experts * s.hidden : 1),
        o_(int64_t{s.max_tokens} * s.hidden),
        callers_x_(s.max_tokens * x_pitch()),
        wanted_(int64_t{s.max_tokens} * s.hidden),
        wanted_of_owners_(s.transfer == Transfer::partial_combine ? wanted_.count() : 1),
        tile_counters_(std::vector<int32_t>{0, 0}) {
    TESSERA_CUDA(cudaMemset(local_.get(), 0, size_t(local_.count())));
    TESSERA_CUDA(cudaHostAlloc(&fault_, sizeof *fault_, cudaHostAllocMapped));
    *fault_ = {};
    fill_uniform<<<4096, 256>>>(w_up_.get(), w_up_.count(), 11, 0x1p-4f);
    fill_uniform<<<4096, 256>>>(w_down_.get(), w_down_.count(), 12, 0x1p-4f);
    fill_uniform<<<4096, 256>>>(b_up_.get(), b_up_.count(), 13, 1.0f);
    fill_uniform<<<4096, 256>>>(b_down_.get(), b_down_.count(), 14, 1.0f);
    TESSERA_CUDA(cudaDeviceSynchronize());
  }
  ~Rank() { cudaFreeHost(fault_); }

  void set_pass(Choices const& c, uint64_t seed) {
    tokens_ = c.tokens;
    has_rows_ = std::any_of(c.ids.begin(), c.ids.end(),
                            [&](int32_t id) { return id >= 0 && id < shape_.experts; });
    if (c.tokens > 0) {
      TESSERA_CUDA(cudaMemcpy(ids_.get(), c.ids.data(), c.ids.size() * 4, cudaMemcpyHostToDevice));
      TESSERA_CUDA(
          cudaMemcpy(scores_.get(), c.scores.data(), c.scores.size() * 4, cudaMemcpyHostToDevice));
    }
    fill_uniform<<<1024, 256>>>(x(), int64_t{tokens_} * shape_.hidden, seed * 2 + uint64_t(rank_),
                                1.0f);
    if (c.tokens > 0) {
      TESSERA_CUDA(cudaMemcpy2D(callers_x_.get(), 2 * x_pitch(), x(), 2 * shape_.hidden,
                                2 * shape_.hidden, c.tokens, cudaMemcpyDeviceToDevice));
    }
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  // Computes what is wanted: the result of the layer that needs no other GPU; of the fused kernel with partial combine,
  // the same results of single choices, added up as its owners do.
  void compute_wanted(Context const& context) {
    if (tokens_ == 0) return;
    prepare_layer(context);
    TESSERA_CUDA(cudaMemcpy(wanted_.get(), layer_.o->get(), sizeof(bf16) * tokens_ * shape_.hidden,
                            cudaMemcpyDeviceToDevice));
    if (shape_.transfer == Transfer::partial_combine) compute_wanted_of_owners(context);
  }
  // Few tokens, for which a layer has other kernels, get company without experts.
  void prepare_layer(Context const& context) {
    ExchangeShape const& s = shape_;
    int64_t const tokens = std::max<int64_t>(tokens_, cuda::kFewTokens + 1);
    layer_ = {};
    layer_.x = padded(x(), tokens_ * s.hidden, tokens * s.hidden, 0);
    layer_.ids = padded(ids_.get(), int64_t{tokens_} * s.max_top_k, tokens * s.max_top_k, 0xff);
    layer_.scores = padded(scores_.get(), int64_t{tokens_} * s.max_top_k, tokens * s.max_top_k, 0);
    layer_.o = std::make_unique<DeviceBuffer<bf16>>(tokens * s.hidden);
    layer_.desc.shape = {.tokens = tokens,
                         .hidden = s.hidden,
                         .intermediate = s.intermediate,
                         .experts = s.experts,
                         .top_k = s.max_top_k};
    layer_.desc.dtype = DType::bf16;
    layer_.desc.activation = activation_;
    layer_.desc.router.kind = RouterKind::given;
    layer_.desc.save = SavePolicy::none;
    layer_.desc.bias = has_biases();
    Device const device = context.device();
    auto bytes = workspace_bytes(context, layer_.desc, Pass::forward);
    fail(bytes.status());
    layer_.workspace = std::make_unique<DeviceBuffer<char>>(int64_t(bytes.value()));
    MoeForwardArgs& args = layer_.args;
    args.x =
        tensor(static_cast<void const*>(layer_.x->get()), DType::bf16, {tokens, s.hidden}, device);
    args.weights.w_up = tensor(static_cast<void const*>(w_up_.get()), DType::bf16,
                               {s.experts, halves() * s.intermediate, s.hidden}, device);
    args.weights.w_down = tensor(static_cast<void const*>(w_down_.get()), DType::bf16,
                                 {s.experts, s.hidden, s.intermediate}, device);
    if (has_biases()) {
      args.weights.b_up = tensor(static_cast<void const*>(b_up_.get()), DType::bf16,
                                 {s.experts, halves() * s.intermediate}, device);
      args.weights.b_down = tensor(static_cast<void const*>(b_down_.get()), DType::bf16,
                                   {s.experts, s.hidden}, device);
    }
    args.topk_ids = tensor(static_cast<void const*>(layer_.ids->get()), DType::int32,
                           {tokens, s.max_top_k}, device);
    args.topk_weights = tensor(static_cast<void const*>(layer_.scores->get()), DType::fp32,
                               {tokens, s.max_top_k}, device);
    args.o = tensor(static_cast<void*>(layer_.o->get()), DType::bf16, {tokens, s.hidden}, device);
    args.workspace = {layer_.workspace->get(), size_t(layer_.workspace->count())};
    TESSERA_CUDA(cudaDeviceSynchronize());  // the copies, on another stream
    launch_layer(context);
    TESSERA_CUDA(cudaDeviceSynchronize());
  }
  // The layer with one choice of each token at a time, its score 1, gives results as they are.
  void compute_wanted_of_owners(Context const& context) {
    ExchangeShape const& s = shape_;
    int64_t const tokens = layer_.desc.shape.tokens;
    DeviceBuffer<bf16> y(int64_t{s.max_top_k} * tokens * s.hidden);
    DeviceBuffer<int32_t> ids(tokens);
    DeviceBuffer<float> ones(std::vector<float>(size_t(tokens), 1.0f));
    MoeDesc desc = layer_.desc;
    desc.shape.top_k = 1;
    Device const device = context.device();
    for (int k = 0; k < s.max_top_k; ++k) {
      TESSERA_CUDA(cudaMemcpy2D(ids.get(), 4, layer_.ids->get() + k, 4 * size_t(s.max_top_k), 4,
                                size_t(tokens), cudaMemcpyDeviceToDevice));
      TESSERA_CUDA(cudaDeviceSynchronize());  // the copy, on another stream
      MoeForwardArgs args = layer_.args;
      args.topk_ids =
          tensor(static_cast<void const*>(ids.get()), DType::int32, {tokens, 1}, device);
      args.topk_weights =
          tensor(static_cast<void const*>(ones.get()), DType::fp32, {tokens, 1}, device);
      args.o = tensor(static_cast<void*>(y.get() + k * tokens * s.hidden), DType::bf16,
                      {tokens, s.hidden}, device);
      fail(moe_forward(context, desc, args, stream_.handle()));
      stream_.synchronize();
    }
    add_as_owners<<<dim3(unsigned(tokens_)), 256>>>(y.get(), tokens, s, rank_, ids_.get(),
                                                    scores_.get(), wanted_of_owners_.get());
    TESSERA_CUDA(cudaDeviceSynchronize());
  }
  void launch_layer(Context const& context) {
    fail(moe_forward(context, layer_.desc, layer_.args, stream_.handle()));
  }

  // The window's x, and nothing else.
  void poison_x() {
    TESSERA_CUDA(cudaMemset(x(), 0xff, size_t(2) * shape_.max_tokens * shape_.hidden));
    TESSERA_CUDA(cudaDeviceSynchronize());
  }
  void poison() {
    pool_.poison();
    a_.poison();
    y_.poison();
    o_.poison();
    TESSERA_CUDA(cudaMemset(window_ + window_layout_.slots, 0xff,
                            size_t(window_layout_.bytes - window_layout_.slots)));
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  ExchangeArguments exchange() const {
    return {.shape = shape_,
            .window = window_layout_,
            .local = local_layout_,
            .rank = rank_,
            .windows = expert_parallel::Windows(windows_),
            .gmem_local = local_.get(),
            .gmem_epoch = epoch_.get(),
            .fault = fault_,
            .limit_ns = uint64_t(limit_seconds_ * 1e9),
            .jitter_ns = jitter_ns_,
            .tokens = tokens_,
            .gmem_topk_ids = ids_.get(),
            .gmem_scores = scores_.get(),
            .gmem_pool = reinterpret_cast<char*>(pool_.get())};
  }

  void launch_fused(int lag, X from = X::in_window) {
    if (from == X::ahead) {
      TESSERA_CUDA(cudaMemcpy2DAsync(x(), 2 * shape_.hidden, callers_x_.get(), 2 * x_pitch(),
                                     2 * shape_.hidden, tokens_, cudaMemcpyDeviceToDevice,
                                     native()));
    }
    int64_t const first = int64_t{rank_} * shape_.local_experts();
    int64_t const matrix = int64_t{shape_.intermediate} * shape_.hidden;
    TESSERA_CUDA(expert_parallel::launch_forward(
        {.exchange = exchange(),
         .activation = activation_,
         .gmem_w_up = w_up_.get() + halves() * first * matrix,
         .gmem_w_down = w_down_.get() + first * matrix,
         .gmem_b_up = bias(b_up_, halves() * shape_.intermediate),
         .gmem_b_down = bias(b_down_, shape_.hidden),
         .gmem_a = a_.get(),
         .gmem_x = from == X::by_kernel ? callers_x_.get() : nullptr,
         .x_pitch = x_pitch(),
         .gmem_o = o_.get(),
         .lag = lag},
        sm_count_, native()));
  }

  // `mark(part)` after each of the parts. gathered: tokens come once, up gathers their rows, and combine adds up slots.
  template <typename Mark>
  void launch_chain(Mark mark, bool gathered = false) {
    ExchangeArguments const p = exchange();
    expert_parallel::RowTables const tables = {offsets_.get(), origins_.get(), row_scores_.get()};
    TESSERA_CUDA(expert_parallel::launch_route(
        {.exchange = p, .made = tables, .row_limit = INT32_MAX, .host = {}}, sm_count_, native()));
    TESSERA_CUDA(
        expert_parallel::launch_dispatch({.exchange = p,
                                          .tables = tables,
                                          .saved = {},
                                          .capacity = shape_.max_rows(),
                                          .may_overflow = false,
                                          .gmem_rows = reinterpret_cast<char*>(pool_.get()),
                                          .gmem_second_rows = nullptr,
                                          .gmem_slot_of_pair = slot_of_pair_.get(),
                                          .gathered = gathered,
                                          .routing = gathered ? routing() : RoutingView{}},
                                         sm_count_, native()));
    mark(kDispatch);
    launch_up(gathered);
    mark(kUp);
    launch_down();
    mark(kDown);
    TESSERA_CUDA(
        expert_parallel::launch_combine({.exchange = p,
                                         .tables = tables,
                                         .capacity = shape_.max_rows(),
                                         .gmem_rows = reinterpret_cast<char const*>(y_.get()),
                                         .gmem_dscores = nullptr,
                                         .results = {.gmem_slot_of_pair = slot_of_pair_.get(),
                                                     .gmem_scores = scores_.get(),
                                                     .gmem_o = gathered ? gmem_o() : nullptr}},
                                        sm_count_, native()));
    mark(kCombine);
    if (gathered) return;
    cuda::AggregateArguments aggregate = {};
    aggregate.gmem_y = window_ + window_layout_.slots;
    aggregate.gmem_scores = scores_.get();
    aggregate.gmem_inverse_permutation = slot_of_pair_.get();
    aggregate.gmem_o = o_.get();
    aggregate.o_pitch = shape_.hidden;
    aggregate.tokens = tokens_;
    aggregate.hidden = shape_.hidden;
    aggregate.top_k = shape_.max_top_k;
    TESSERA_CUDA(cuda::launch_aggregate<bf16>(aggregate, native()));
    mark(kAggregate);
  }

  // The GEMMs on the rows of the last dispatch.
  void launch_up(bool gathered = false) {
    ExchangeShape const& s = shape_;
    int64_t const d = s.hidden;
    int64_t const n = s.intermediate;
    int64_t const first = int64_t{rank_} * s.local_experts();
    cuda::UpProjectionFwdArguments up = {};
    up.x = {.gmem = pool_.get(), .rows = s.max_rows(), .pitch = d};
    if (gathered) up.gmem_gather_index = routing().gather_index;
    up.gmem_expert_offsets = offsets_.get();
    for (int half = 0; half < halves(); ++half) {
      up.w_up[half] = {.gmem = w_up_.get() + (halves() * first + half) * n * d,
                       .expert_stride = halves() * n * d,
                       .row_stride = d,
                       .column_stride = 1,
                       .block = n};
      if (!has_biases()) continue;
      up.b_up[half] = {.gmem = bias(b_up_, halves() * n) + half * n,
                       .expert_stride = halves() * n,
                       .row_stride = 1,
                       .column_stride = 1,
                       .block = n};
    }
    up.activation = activation_;
    up.gmem_a = a_.get();
    up.rows = s.max_rows();
    up.hidden = d;
    up.intermediate = n;
    up.experts = s.local_experts();
    up.gmem_tile_counter = tile_counters_.get();
    TESSERA_CUDA(cuda::launch_up_projection_fwd(up, sm_count_, native()));
  }
  void launch_down() {
    ExchangeShape const& s = shape_;
    int64_t const d = s.hidden;
    int64_t const n = s.intermediate;
    int64_t const first = int64_t{rank_} * s.local_experts();
    cuda::DownProjectionFwdArguments down = {};
    down.gmem_a = a_.get();
    down.gmem_expert_offsets = offsets_.get();
    down.w_down = {.gmem = w_down_.get() + first * n * d,
                   .expert_stride = d * n,
                   .row_stride = n,
                   .column_stride = 1,
                   .block = d};
    if (has_biases()) {
      down.b_down = {.gmem = bias(b_down_, d),
                     .expert_stride = d,
                     .row_stride = 1,
                     .column_stride = 1,
                     .block = d};
    }
    down.gmem_y = y_.get();
    down.rows = s.max_rows();
    down.hidden = d;
    down.intermediate = n;
    down.experts = s.local_experts();
    down.gmem_tile_counter = tile_counters_.get() + 1;
    TESSERA_CUDA(cuda::launch_down_projection_fwd(down, sm_count_, native()));
  }

  device::Stream const& stream() const { return stream_; }
  [[nodiscard]] Status fault() const {
    return expert_parallel::fault_status(*fault_, limit_seconds_);
  }
  // Ends the program if a wait ended without its word.
  void check_fault() const { fail(fault()); }
  void set_limit(double seconds) { limit_seconds_ = seconds; }
  void set_jitter(uint32_t ns) { jitter_ns_ = ns; }

  bool is_right(bool fused) const {
    bool const of_owners = fused && shape_.transfer == Transfer::partial_combine;
    if (tokens_ == 0) return true;
    int64_t const count = int64_t{tokens_} * shape_.hidden;
    std::vector<uint16_t> got(static_cast<size_t>(count)), wanted(static_cast<size_t>(count));
    TESSERA_CUDA(cudaMemcpy(got.data(), o_.get(), got.size() * 2, cudaMemcpyDeviceToHost));
    TESSERA_CUDA(cudaMemcpy(wanted.data(), (of_owners ? wanted_of_owners_ : wanted_).get(),
                            got.size() * 2, cudaMemcpyDeviceToHost));
    int64_t different = 0, zeros = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      different += got[i] != wanted[i];
      zeros += wanted[i] == 0;
    }
    if (different > 0) {
      std::printf("rank %d: %lld of %lld elements differ\n", rank_,
                  static_cast<long long>(different), static_cast<long long>(count));
    }
    return different == 0 && (zeros < count) == has_rows_;
  }

 private:
  int64_t halves() const { return activation_.gated() ? 2 : 1; }
  bool has_biases() const { return expert_parallel::adds_biases(activation_.kind); }
  // Of this rank's experts, `columns` of each; null: there are none.
  bf16 const* bias(DeviceBuffer<bf16> const& biases, int64_t columns) const {
    int64_t const first = int64_t{rank_} * shape_.local_experts();
    return has_biases() ? biases.get() + first * columns : nullptr;
  }
  // A copy of `count` values in a buffer of `size`, whose other bytes are `rest`.
  template <class T>
  static std::unique_ptr<DeviceBuffer<T>> padded(T const* values, int64_t count, int64_t size,
                                                 int rest) {
    auto buffer = std::make_unique<DeviceBuffer<T>>(size);
    TESSERA_CUDA(cudaMemset(buffer->get(), rest, sizeof(T) * size));
    TESSERA_CUDA(cudaMemcpy(buffer->get(), values, sizeof(T) * count, cudaMemcpyDeviceToDevice));
    return buffer;
  }
  int64_t pairs() const { return int64_t{shape_.max_tokens} * shape_.max_top_k; }
  // Returns tables of a layer of all rows that there may be.
  RoutingView routing() const {
    int64_t const rows = shape_.max_rows();
    RoutingView view;
    view.expert_offsets = routing_.get();
    view.sort_permutation = view.expert_offsets + shape_.local_experts() + 1;
    view.gather_index = view.sort_permutation + rows;
    view.inverse_permutation = view.gather_index + rows;
    view.scores = reinterpret_cast<float*>(view.inverse_permutation + rows);
    return view;
  }
  char* gmem_o() const { return reinterpret_cast<char*>(o_.get()); }
  int64_t x_pitch() const { return shape_.hidden + 8; }  // of the caller's x
  bf16* x() const { return reinterpret_cast<bf16*>(window_ + window_layout_.x); }

  cudaStream_t native() const { return static_cast<cudaStream_t>(stream_.handle().native); }

  int rank_, sm_count_;
  device::Stream stream_;
  ExchangeShape shape_;
  Activation activation_;
  expert_parallel::WindowLayout window_layout_;
  expert_parallel::LocalLayout local_layout_;
  WindowAddresses windows_;
  char* window_;  // of this rank
  DeviceBuffer<char> local_;
  DeviceBuffer<uint32_t> epoch_;
  DeviceBuffer<int32_t> ids_, slot_of_pair_;
  DeviceBuffer<float> scores_;
  DeviceBuffer<int32_t> offsets_;
  DeviceBuffer<expert_parallel::RowOrigin> origins_;
  DeviceBuffer<float> row_scores_;
  DeviceBuffer<int32_t> routing_;
  DeviceBuffer<bf16> pool_, a_, y_, w_up_, w_down_, b_up_, b_down_, o_, callers_x_, wanted_,
      wanted_of_owners_;
  DeviceBuffer<int32_t> tile_counters_;
  struct {
    MoeDesc desc;
    MoeForwardArgs args;
    std::unique_ptr<DeviceBuffer<char>> workspace;
    std::unique_ptr<DeviceBuffer<bf16>> x, o;
    std::unique_ptr<DeviceBuffer<int32_t>> ids;
    std::unique_ptr<DeviceBuffer<float>> scores;
  } layer_;
  expert_parallel::Fault* fault_ = nullptr;
  int tokens_ = 0;
  bool has_rows_ = false;
  double limit_seconds_ = 3;
  uint32_t jitter_ns_ = 0;
};

}  // namespace tessera::bench

// SPDX-License-Identifier: Apache-2.0
// A training step of one layer whose experts are spread over the GPUs of a host, a thread for each GPU: forward in one
// launch, which saves h and the tables of the rows that this rank's experts got; backward in three calls.
//
//   train_expert_parallel [GPUS] [TOKENS]      2 GPUs, with 2048 tokens each
//
// Every rank compares o and all gradients with those of the layer that has all experts and all ranks' tokens on one
// GPU. docs/multi-gpu.md explains the steps, ranks.hpp has the threads and the exit codes.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <tessera/tessera.hpp>
#include <vector>

#include "layer.hpp"
#include "ranks.hpp"
#include "support.hpp"

namespace {

using namespace examples;
using namespace tessera;

constexpr int kSteps = 20;

ExpertParallelDesc training_desc_of(int rank, int ranks, std::int64_t tokens) {
  ExpertParallelDesc desc = desc_of(rank, ranks, tokens);
  desc.training = true;
  return desc;
}

/// Memory of one rank for as long as the program runs; each tensor begins at a multiple of 256 bytes.
class Tensors {
 public:
  explicit Tensors(Device device) : device_(device) {}
  Tensor make(DType dtype, std::initializer_list<std::int64_t> shape) {
    Tensor made = tensor(static_cast<void*>(nullptr), dtype, shape, device_);
    made.data = bytes(dtype_bytes(dtype) * static_cast<std::size_t>(made.elements())).data;
    return made;
  }
  template <class T>
  Tensor make(DType dtype, std::vector<T> const& values,
              std::initializer_list<std::int64_t> shape) {
    Tensor const made = make(dtype, shape);
    require(cudaMemcpy(made.data, values.data(), sizeof(T) * values.size(), cudaMemcpyDefault));
    return made;
  }
  Buffer bytes(std::size_t count) {
    memory_.push_back(allocate(count));
    return {memory_.back().get(), count};
  }

 private:
  Device device_;
  std::vector<Memory> memory_;
};

/// Holds what a layer saves of a pass on this rank besides x and ids, with memory for `rows` rows.
struct Saved {
  DispatchTables tables;
  Tensor h;
};

/// Holds what backward makes, and the memory that it needs: the latter may be shared by all layers.
struct Backward {
  Tensor dx, dscores;  // of this rank's tokens
  ExpertGradients gradients;
  Tensor x_rows, d_o_rows, dx_rows, row_dscores;
  Buffer routing, workspace;
};

void run_backward(ExpertParallel& session, Context const& context, MoeDesc const& rows_desc,
                  Saved const& saved, ConstTensor const& x, ConstTensor const& ids,
                  ConstTensor const& d_o, ExpertWeights const& weights, Backward const& b) {
  require(session.dispatch({.x = d_o,
                            .second_x = x,
                            .topk_ids = ids,
                            .tables = saved.tables,
                            .rows = b.d_o_rows,
                            .second_rows = b.x_rows,
                            .gathered = rows_desc.shape.variable_experts,
                            .routing = b.routing}));
  require(moe_backward(context, rows_desc,
                       {.d_o = b.d_o_rows,
                        .x = b.x_rows,
                        .h = saved.h,
                        .routing = b.routing,
                        .weights = weights,
                        .dx = b.dx_rows,
                        .dscores = b.row_dscores,
                        .gradients = b.gradients,
                        .workspace = b.workspace}));
  require(session.combine({.rows = b.dx_rows,
                           .tables = saved.tables,
                           .row_dscores = b.row_dscores,
                           .dscores = b.dscores,
                           .o = b.dx}));
}

/// Results for all ranks' tokens, on one GPU with all experts.
struct Wanted {
  Tensor o, dx, dscores, dw_up, dw_down;
};
Wanted run_on_one_gpu(Context const& context, Tensors& gpu, MoeDesc const& desc, Tensor const& x,
                      Tensor const& ids, Tensor const& scores, Tensor const& d_o,
                      ExpertWeights const& weights) {
  MoeShape const& s = desc.shape;
  Wanted const wanted = {.o = gpu.make(DType::bf16, {s.tokens, kHidden}),
                         .dx = gpu.make(DType::bf16, {s.tokens, kHidden}),
                         .dscores = gpu.make(DType::fp32, {s.tokens * kTopK}),
                         .dw_up = gpu.make(DType::fp32, {s.experts, 2 * kIntermediate, kHidden}),
                         .dw_down = gpu.make(DType::fp32, {s.experts, kHidden, kIntermediate})};
  Tensor const h = gpu.make(DType::bf16, {s.tokens * kTopK, 2 * kIntermediate});
  Buffer const routing = gpu.bytes(value_of(routing_bytes(desc)));
  require(moe_forward(
      context, desc,
      {.x = x,
       .topk_ids = ids,
       .topk_weights = scores,
       .weights = weights,
       .o = wanted.o,
       .h = h,
       .routing = routing,
       .workspace = gpu.bytes(value_of(workspace_bytes(context, desc, Pass::forward)))}));
  require(moe_backward(
      context, desc,
      {.d_o = d_o,
       .x = x,
       .h = h,
       .routing = routing,
       .weights = weights,
       .dx = wanted.dx,
       .dscores = wanted.dscores,
       .gradients = {.dw_up = wanted.dw_up, .dw_down = wanted.dw_down},
       .workspace = gpu.bytes(value_of(workspace_bytes(context, desc, Pass::backward)))}));
  return wanted;
}

/// `count` elements of a tensor from the first-th on.
template <class T>
std::vector<T> values(Tensor const& from, std::int64_t first, std::int64_t count) {
  std::vector<T> all(static_cast<std::size_t>(count));
  require(cudaMemcpy(all.data(), static_cast<T const*>(from.data) + first, sizeof(T) * all.size(),
                     cudaMemcpyDefault));
  return all;
}
/// Throws unless `got` is near what `wanted` has from the first-th element on, row by row, or has its bits.
template <class T>
void compare(char const* name, Tensor const& got, Tensor const& wanted, std::int64_t first,
             std::int64_t columns, bool bit_for_bit) {
  auto const is = values<T>(got, 0, got.elements());
  auto const should = values<T>(wanted, first, got.elements());
  if (is == should) return;  // zeros, too, of a rank whose experts nobody chose
  if (!is_near(is, should, static_cast<std::size_t>(columns))) {
    throw std::runtime_error(std::string(name) + " is not that of one GPU");
  }
  if (bit_for_bit) throw std::runtime_error(std::string(name) + ": other bits");
}

void run_rank(ExpertParallelDesc const& desc, PeerWindow& window, Meeting& all) {
  std::int64_t const tokens = desc.max_tokens, experts = desc.experts;
  std::int64_t const all_tokens = desc.ranks * tokens, first_token = desc.rank * tokens;
  std::int64_t const first_expert = desc.rank * kOwnExperts;
  // The number of rows that this rank's experts get depends on the ids of all ranks. Twice the mean and some, at most
  // all of them: a pass with more is void, and check() says so.
  std::int64_t const rows = std::min(all_tokens * kTopK, 2 * tokens * kTopK + 1024);
  require(cudaSetDevice(desc.rank));
  Device const device = {DeviceKind::cuda, desc.rank};
  Context const context = value_of(Context::create({.device = device}));
  Tensors gpu(device);

  // All ranks' tokens, alike on all ranks; a pass gets those of its rank.
  Choices const chosen = draw(all_tokens, experts, 100);
  Tensor const ids = gpu.make(DType::int32, chosen.ids, {all_tokens, kTopK});
  Tensor const scores = gpu.make(DType::fp32, chosen.scores, {all_tokens, kTopK});
  Tensor const x =
      gpu.make(DType::bf16, uniform(all_tokens * kHidden, 200, 1), {all_tokens, kHidden});
  Tensor const d_o =
      gpu.make(DType::bf16, uniform(all_tokens * kHidden, 201, 1), {all_tokens, kHidden});
  ExpertWeights const all_weights = {
      .w_up = gpu.make(DType::bf16, uniform(experts * kUp, 1, 0x1p-4f),
                       {experts, 2 * kIntermediate, kHidden}),
      .w_down = gpu.make(DType::bf16, uniform(experts * kDown, 2, 0x1p-4f),
                         {experts, kHidden, kIntermediate})};
  MoeDesc const alone = {.shape = {all_tokens, kHidden, kIntermediate, experts, kTopK},
                         .dtype = DType::bf16};
  Wanted const wanted = run_on_one_gpu(context, gpu, alone, x, ids, scores, d_o, all_weights);

  // `count` rows of `columns` from the first-th on.
  auto const part = [device](ConstTensor const& from, std::int64_t first,
                             std::initializer_list<std::int64_t> shape) {
    std::int64_t row = 1;
    for (auto size = shape.begin() + 1; size != shape.end(); ++size) row *= *size;
    auto const offset = static_cast<std::size_t>(first * row) * dtype_bytes(from.dtype);
    return ConstTensor(
        tensor(static_cast<void const*>(static_cast<char const*>(from.data) + offset), from.dtype,
               shape, device));
  };
  ConstTensor const own_x = part(x, first_token, {tokens, kHidden});
  ConstTensor const own_ids = part(ids, first_token, {tokens, kTopK});
  ConstTensor const own_d_o = part(d_o, first_token, {tokens, kHidden});
  ExpertWeights const weights = {
      .w_up = part(all_weights.w_up, first_expert, {kOwnExperts, 2 * kIntermediate, kHidden}),
      .w_down = part(all_weights.w_down, first_expert, {kOwnExperts, kHidden, kIntermediate})};
  // The rows of this rank's experts as a layer of its own: a row is a token with one expert, or, where tokens of all
  // ranks take half of the memory of rows, gathers one of these, which come once then.
  bool const gathered = 2 * all_tokens <= rows;
  std::int64_t const places = gathered ? all_tokens : rows;
  MoeDesc const rows_desc = {.shape = {.tokens = places,
                                       .hidden = kHidden,
                                       .intermediate = kIntermediate,
                                       .experts = kOwnExperts,
                                       .top_k = 1,
                                       .slots = gathered ? rows : 0,
                                       .variable_experts = gathered},
                             .dtype = DType::bf16,
                             .grouping = RowGrouping::offsets};
  Saved const saved = {.tables = {.expert_offsets = gpu.make(DType::int32, {kOwnExperts + 1}),
                                  .row_origins = gpu.make(DType::int32, {rows, 4}),
                                  .row_scores = gpu.make(DType::fp32, {rows})},
                       .h = gpu.make(DType::bf16, {rows, 2 * kIntermediate})};
  Tensor const o = gpu.make(DType::bf16, {tokens, kHidden});
  Backward const backward = {
      .dx = gpu.make(DType::bf16, {tokens, kHidden}),
      .dscores = gpu.make(DType::fp32, {tokens, kTopK}),
      .gradients = {.dw_up = gpu.make(DType::fp32, {kOwnExperts, 2 * kIntermediate, kHidden}),
                    .dw_down = gpu.make(DType::fp32, {kOwnExperts, kHidden, kIntermediate})},
      .x_rows = gpu.make(DType::bf16, {places, kHidden}),
      .d_o_rows = gpu.make(DType::bf16, {places, kHidden}),
      .dx_rows = gpu.make(DType::bf16, {rows, kHidden}),
      .row_dscores = gpu.make(DType::fp32, {rows}),
      .routing = gpu.bytes(value_of(routing_bytes(rows_desc))),
      .workspace = gpu.bytes(value_of(workspace_bytes(context, rows_desc, Pass::backward)))};
  std::optional<ExpertParallel> session = value_of(
      ExpertParallel::create(context, desc, window.addresses(),
                             gpu.bytes(value_of(ExpertParallel::workspace_bytes(context, desc)))));

  auto const step = [&] {
    require(session->forward({.x = own_x,
                              .topk_ids = own_ids,
                              .topk_weights = part(scores, first_token, {tokens, kTopK}),
                              .w_up = weights.w_up,
                              .w_down = weights.w_down,
                              .o = o,
                              .saved = saved.tables,
                              .h = saved.h}));
    run_backward(*session, context, rows_desc, saved, own_x, own_ids, own_d_o, weights, backward);
  };
  all.meet();  // who fails so far fails before anybody waits for it in a pass
  step();      // warms up
  require(cudaDeviceSynchronize());
  all.meet();
  auto const start = std::chrono::steady_clock::now();
  for (int i = 0; i < kSteps; ++i) step();
  require(cudaDeviceSynchronize());
  std::chrono::duration<double, std::milli> const time = std::chrono::steady_clock::now() - start;
  require(
      session
          ->check());  // passes that have waited in vain for a rank, or had too many rows, are void
  bool const same_kernels =
      tokens > 8;  // for fewer one GPU has kernels that add up in another order
  compare<Bf16>("o", o, wanted.o, first_token * kHidden, kHidden, same_kernels);
  compare<Bf16>("dx", backward.dx, wanted.dx, first_token * kHidden, kHidden, same_kernels);
  compare<float>("dscores", backward.dscores, wanted.dscores, first_token * kTopK, kTopK, false);
  // Sums over rows in another order.
  compare<float>("dw_up", backward.gradients.dw_up, wanted.dw_up, first_expert * kUp, kUp, false);
  compare<float>("dw_down", backward.gradients.dw_down, wanted.dw_down, first_expert * kDown, kDown,
                 false);
  std::printf("rank %d of %d: %.3f ms a step, o and all gradients as on one GPU, %lld rows\n",
              desc.rank, desc.ranks, time.count() / kSteps,
              static_cast<long long>(value_of(session->routed_rows()).rows));

  session.reset();
  require(window.close());  // memory of all is freed when the last one has closed
}

}  // namespace

int main(int argc, char** argv) { return run_on_gpus(argc, argv, training_desc_of, run_rank); }

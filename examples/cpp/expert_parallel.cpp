// SPDX-License-Identifier: Apache-2.0
// The experts of one layer spread over the GPUs of a host, a thread for each GPU.
//
//   expert_parallel [GPUS] [TOKENS]      2 GPUs, with 2048 tokens each
//
// Every rank compares its o with that of the layer that has all experts on its own GPU. docs/multi-gpu.md explains the
// steps, ranks.hpp has the threads and the exit codes.
#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <tessera/tessera.hpp>
#include <vector>

#include "layer.hpp"
#include "ranks.hpp"
#include "support.hpp"

namespace {

using namespace examples;
using namespace tessera;

constexpr int kPasses = 20;

void run_rank(ExpertParallelDesc const& desc, PeerWindow& window, Meeting& all) {
  int const rank = desc.rank;
  std::int64_t const tokens = desc.max_tokens, experts = desc.experts;
  require(cudaSetDevice(rank));
  Device const device = {DeviceKind::cuda, rank};
  Context const context = value_of(Context::create({.device = device}));
  MoeDesc const alone = {.shape = {tokens, kHidden, kIntermediate, experts, kTopK},
                         .dtype = DType::bf16,
                         .save = SavePolicy::none};
  std::size_t const bytes = value_of(ExpertParallel::workspace_bytes(context, desc));
  std::size_t const alone_bytes = value_of(workspace_bytes(context, alone, Pass::forward));
  Memory const workspace = allocate(bytes), alone_workspace = allocate(alone_bytes);

  Choices const chosen = draw(tokens, experts, 100 + rank);
  std::vector<Bf16> const x = uniform(tokens * kHidden, 200 + rank, 1);
  std::vector<Bf16> o(x.size(), 0xffff), wanted = o;  // NaN
  Memory const gpu_ids = upload(chosen.ids), gpu_scores = upload(chosen.scores);
  Memory const gpu_o = upload(o), gpu_wanted = upload(wanted);
  // These are the weights of all experts, for the comparison: a pass gets those of its rank.
  Memory const w_up = upload(uniform(experts * kUp, 1, 0x1p-4f));
  Memory const w_down = upload(uniform(experts * kDown, 2, 0x1p-4f));
  auto const bf16 = [device](Memory const& memory, std::initializer_list<std::int64_t> shape,
                             std::int64_t first = 0) {
    return tensor(static_cast<Bf16*>(memory.get()) + first, DType::bf16, shape, device);
  };

  std::optional<ExpertParallel> session =
      value_of(ExpertParallel::create(context, desc, window.addresses(), {workspace.get(), bytes}));
  Tensor const place = session->input(tokens);  // x in the window: no pass has to copy it there
  require(cudaMemcpy(place.data, x.data(), 2 * x.size(), cudaMemcpyDefault));
  std::int64_t const first = rank * kOwnExperts;
  ExpertParallelArgs const args = {
      .x = place,
      .topk_ids = tensor(static_cast<std::int32_t*>(gpu_ids.get()), {tokens, kTopK}, device),
      .topk_weights = tensor(static_cast<float*>(gpu_scores.get()), {tokens, kTopK}, device),
      .w_up = bf16(w_up, {kOwnExperts, 2 * kIntermediate, kHidden}, first * kUp),
      .w_down = bf16(w_down, {kOwnExperts, kHidden, kIntermediate}, first * kDown),
      .o = bf16(gpu_o, {tokens, kHidden})};

  require(moe_forward(context, alone,
                      {.x = place,
                       .topk_ids = args.topk_ids,
                       .topk_weights = args.topk_weights,
                       .weights = {.w_up = bf16(w_up, {experts, 2 * kIntermediate, kHidden}),
                                   .w_down = bf16(w_down, {experts, kHidden, kIntermediate})},
                       .o = bf16(gpu_wanted, {tokens, kHidden}),
                       .workspace = {alone_workspace.get(), alone_bytes}}));
  all.meet();                       // who fails so far fails before anybody waits for it in a pass
  require(session->forward(args));  // warms up
  require(cudaDeviceSynchronize());
  all.meet();
  auto const start = std::chrono::steady_clock::now();
  for (int pass = 0; pass < kPasses; ++pass) require(session->forward(args));
  require(cudaDeviceSynchronize());
  std::chrono::duration<double, std::milli> const time = std::chrono::steady_clock::now() - start;
  require(session->check());  // passes that have waited in vain for a rank are void
  download(o, gpu_o);
  download(wanted, gpu_wanted);
  // With more than 8 tokens all bits are equal; for fewer one GPU has kernels that add up in another order.
  if (!is_near(o, wanted, kHidden)) throw std::runtime_error("o is not that of one GPU");
  std::printf("rank %d of %d: %.3f ms a pass, o as on one GPU%s\n", rank, desc.ranks,
              time.count() / kPasses, o == wanted ? ", bit for bit" : "");

  session.reset();
  require(window.close());  // memory of all is freed when the last one has closed
}

}  // namespace

int main(int argc, char** argv) { return run_on_gpus(argc, argv, desc_of, run_rank); }

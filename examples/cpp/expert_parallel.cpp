// SPDX-License-Identifier: Apache-2.0
// The experts of one layer spread over the GPUs of a host, a thread for each GPU.
//
//   expert_parallel [GPUS] [TOKENS]      2 GPUs, with 2048 tokens each
//
// Every rank compares its o with that of the layer that has all experts on its own GPU. Exit code: 0 ok, 1 failed or
// wrong, 2 bad usage, 77 where GPUs are missing or do not address each other. docs/multi-gpu.md explains the steps.
#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <random>
#include <tessera/tessera.hpp>
#include <thread>
#include <vector>

#include "support.hpp"

namespace {

using namespace examples;
using namespace tessera;

constexpr std::int64_t kHidden = 1024, kIntermediate = 512, kOwnExperts = 16, kTopK = 4;
constexpr std::int64_t kUp = 2 * kIntermediate * kHidden, kDown = kHidden * kIntermediate;
constexpr int kPasses = 20, kSkipped = 77;

ExpertParallelDesc desc_of(int rank, int ranks, std::int64_t tokens) {
  return {.rank = rank,
          .ranks = ranks,
          .max_tokens = tokens,
          .hidden = kHidden,
          .intermediate = kIntermediate,
          .experts = kOwnExperts * ranks,
          .top_k = kTopK};
}

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

  std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * kTopK));
  std::vector<float> scores(ids.size());
  std::mt19937 random(100u + static_cast<std::uint32_t>(rank));
  for (std::size_t i = 0; i < ids.size(); ++i) {  // a token's experts differ
    auto const next =
        i % kTopK == 0 ? static_cast<std::int64_t>(random()) : ids[i - 1] + experts / kTopK;
    ids[i] = static_cast<std::int32_t>(next % experts);
    scores[i] = 0x1p-4f + 0x1p-32f * static_cast<float>(random());
  }
  std::vector<Bf16> const x = uniform(tokens * kHidden, 200 + rank, 1);
  std::vector<Bf16> o(x.size(), 0xffff), wanted = o;  // NaN
  Memory const gpu_ids = upload(ids), gpu_scores = upload(scores);
  Memory const gpu_o = upload(o), gpu_wanted = upload(wanted);
  // Of all experts, for the comparison: a pass gets those of its rank.
  Memory const w_up = upload(uniform(experts * kUp, 1, 0x1p-4f));
  Memory const w_down = upload(uniform(experts * kDown, 2, 0x1p-4f));
  auto const bf16 = [device](Memory const& memory, std::initializer_list<std::int64_t> shape,
                             std::int64_t first = 0) {
    return tensor(static_cast<Bf16*>(memory.get()) + first, DType::bf16, shape, device);
  };

  std::optional<ExpertParallel> group =
      value_of(ExpertParallel::create(context, desc, window.addresses(), {workspace.get(), bytes}));
  Tensor const place = group->input(tokens);  // x in the window: no pass has to copy it there
  require(cudaMemcpy(place.data, x.data(), 2 * x.size(), cudaMemcpyDefault));
  std::int64_t const first = rank * kOwnExperts;
  ExpertParallelArgs const args = {
      .x = place,
      .topk_ids = tensor(static_cast<std::int32_t*>(gpu_ids.get()), {tokens, kTopK}, device),
      .topk_weights = tensor(static_cast<float*>(gpu_scores.get()), {tokens, kTopK}, device),
      .w_up = bf16(w_up, {kOwnExperts, 2 * kIntermediate, kHidden}, first * kUp),
      .w_down = bf16(w_down, {kOwnExperts, kHidden, kIntermediate}, first * kDown),
      .o = bf16(gpu_o, {tokens, kHidden})};

  // Before any pass: CUDA loads a kernel when it is first launched, and may wait for what runs on the GPU. A pass there
  // would wait for a rank that loads, too.
  require(moe_forward(context, alone,
                      {.x = place,
                       .topk_ids = args.topk_ids,
                       .topk_weights = args.topk_weights,
                       .weights = {.w_up = bf16(w_up, {experts, 2 * kIntermediate, kHidden}),
                                   .w_down = bf16(w_down, {experts, kHidden, kIntermediate})},
                       .o = bf16(gpu_wanted, {tokens, kHidden}),
                       .workspace = {alone_workspace.get(), alone_bytes}}));
  all.meet();                     // who fails so far fails before anybody waits for it in a pass
  require(group->forward(args));  // warms up
  require(cudaDeviceSynchronize());
  all.meet();
  auto const start = std::chrono::steady_clock::now();
  for (int pass = 0; pass < kPasses; ++pass) require(group->forward(args));
  require(cudaDeviceSynchronize());
  std::chrono::duration<double, std::milli> const time = std::chrono::steady_clock::now() - start;
  require(group->check());  // passes that have waited in vain for a rank are void
  download(o, gpu_o);
  download(wanted, gpu_wanted);
  // With more than 8 tokens all bits are equal; for fewer one GPU has kernels that add up in another order.
  if (!is_near(o, wanted, kHidden)) throw std::runtime_error("o is not that of one GPU");
  std::printf("rank %d of %d: %.3f ms a pass, o as on one GPU%s\n", rank, desc.ranks,
              time.count() / kPasses, o == wanted ? ", bit for bit" : "");

  group.reset();
  require(window.close());  // memory of all is freed when the last one has closed
}

}  // namespace

int main(int argc, char** argv) {
  int const ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  std::int64_t const tokens = argc > 2 ? std::atoll(argv[2]) : 2048;
  if (argc > 3 || ranks < 2 || ranks > kMaxRanks || tokens < 1) {
    std::fprintf(stderr, "usage: %s [GPUS, 2 to %d] [TOKENS, 1 or more]\n", argv[0], kMaxRanks);
    return 2;
  }
  int present = 0;
  if (cudaGetDeviceCount(&present) != cudaSuccess) present = 0;
  if (present < ranks) {
    std::printf("skipped: this machine has %d GPUs of %d\n", present, ranks);
    return kSkipped;
  }
  std::vector<Device> devices;
  for (int rank = 0; rank < ranks; ++rank) devices.push_back({DeviceKind::cuda, rank});
  auto const bytes = ExpertParallel::window_bytes(desc_of(0, ranks, tokens));
  auto windows = bytes.ok() ? PeerWindow::open_all(devices, bytes.value()) : bytes.status();
  if (!windows.ok()) {
    std::printf("no group: %s\n", windows.status().text());
    return windows.status().code() == StatusCode::environment ? kSkipped : 1;
  }
  Meeting all(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        run_rank(desc_of(rank, ranks, tokens), windows.value()[rank], all);
      } catch (std::exception const& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        all.leave();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return all.has_failed() ? 1 : 0;
}

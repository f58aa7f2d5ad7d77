// SPDX-License-Identifier: Apache-2.0
// Passes of all ranks of several hosts, each a thread.
#pragma once

#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "expert_parallel/transport/engine.hpp"
#include "tests/expert_parallel/host_ranks.hpp"

namespace tessera::expert_parallel::hosts {

struct Results {
  std::vector<Bits> o, dx;
  std::vector<float> dscores;
  std::vector<Gradients> gradients;  // [host]
};

// Other ranks would wait for one that does not go on.
inline void check(Status const& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.text());
  std::abort();
}

// Two passes of all ranks on the same objects; the gradients are those of the first.
inline Results run(Problem const& p, bool counted, std::vector<std::vector<std::int64_t>>& sent) {
  auto const ranks = static_cast<std::size_t>(p.ranks);
  std::vector<NcclUniqueId> ids;
  for (std::size_t g = 0; g < ranks; ++g) {
    ids.push_back(make_unique_id({.nccl_path = FAKE_NCCL_PATH, .nccl_nvls_enable = "0"}).value());
  }
  std::vector<std::unique_ptr<SharedHost>> hosts;
  for (std::int32_t h = 0; h < p.hosts; ++h) hosts.push_back(std::make_unique<SharedHost>(p, h));
  Results results;
  results.o.resize(p.x.size());
  results.dx.resize(p.x.size());
  results.dscores.resize(p.ids.size());
  results.gradients.resize(static_cast<std::size_t>(p.hosts));
  sent.assign(p.tokens.size(), {});
  std::barrier all(static_cast<std::ptrdiff_t>(p.tokens.size()));
  RotationShape const shape = {.hosts = p.hosts,
                               .max_tokens = p.max_tokens,
                               .hidden = p.hidden,
                               .top_k = p.top_k,
                               .experts = p.experts / p.hosts,
                               .counted = counted};
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < p.tokens.size(); ++rank) {
    threads.emplace_back([&, rank] {
      std::size_t const h = rank / ranks, g = rank % ranks;
      Queue queue;
      auto rail = Rail::open(
          {.place = {static_cast<std::int32_t>(h), p.hosts, static_cast<std::int32_t>(g)},
           .time_limit = 20,
           .id = ids[g],
           .nccl_path = FAKE_NCCL_PATH,
           .nccl_nvls_enable = "0"},
          kDevice, kStream);
      check(rail.status());
      std::vector<std::byte> workspace(RotationRegions(shape).plan.bytes(), std::byte{0xff});
      std::vector<std::byte> saved(SavedRegions(shape, true).plan.bytes(), std::byte{0xff});
      Rotation rotation(shape, *rail.value(), workspace.data(), kStream);
      InnerRank inner(*hosts[h], static_cast<std::int32_t>(g));
      std::int64_t const begin = p.begins[rank], tokens = p.tokens[rank];
      std::int64_t const row = begin * p.hidden, pair = begin * p.top_k;
      for (int pass = 0; pass < 2; ++pass) {
        std::array<std::int64_t, kMaxHosts> out = {}, in = {};
        Status const forward = rotation.forward({.tokens = tokens,
                                                 .gmem_x = p.x.data() + row,
                                                 .gmem_topk_ids = p.ids.data() + pair,
                                                 .gmem_topk_weights = p.scores.data() + pair,
                                                 .gmem_o = results.o.data() + row,
                                                 .gmem_saved = saved.data(),
                                                 .saves = true},
                                                {out.data(), in.data()}, inner, {&queue});
        check(forward);
        Status const backward = rotation.backward({.tokens = tokens,
                                                   .gmem_d_o = p.d_o.data() + row,
                                                   .gmem_x = p.x.data() + row,
                                                   .gmem_dx = results.dx.data() + row,
                                                   .gmem_dscores = results.dscores.data() + pair,
                                                   .gmem_saved = saved.data()},
                                                  {out.data(), in.data()}, inner, {&queue});
        check(backward);
        queue.drain();
        all.arrive_and_wait();
        if (pass == 0) {
          auto const bytes = rail.value()->sent();
          sent[rank].assign(bytes.begin(), bytes.end());
          if (g == 0) results.gradients[h] = hosts[h]->layer().gradients();
        }
        all.arrive_and_wait();
      }
      check(rail.value()->close());
      if (hosts[h]->failed) check(Status::invalid("a layer has failed"));
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

}  // namespace tessera::expert_parallel::hosts

// SPDX-License-Identifier: Apache-2.0
// Passes over several hosts, whose ranks are threads, on a fake NCCL: results bit by bit as the four steps of
// docs/several-hosts.md say, for any number of ranks, and the bytes of each rail.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/expert_parallel/host_problem.hpp"
#include "tests/expert_parallel/host_runs.hpp"

namespace tessera::expert_parallel::hosts {
namespace {

// As the hosts make it: the experts of each on the tokens of one after the other.
Results expected(Problem const& p) {
  std::int32_t const per_host = p.experts / p.hosts;
  std::vector<std::vector<float>> sums(3);  // o, dx, dscores
  sums[0].resize(p.x.size());
  sums[1].resize(p.x.size());
  sums[2].resize(p.ids.size());
  Results results;
  for (std::int32_t h = 0; h < p.hosts; ++h) {
    HostLayer layer(p, h);
    for (std::int32_t step = 0; step < p.hosts; ++step) {
      auto const source = static_cast<std::size_t>((h + step) % p.hosts);
      auto const ranks = static_cast<std::size_t>(p.ranks);
      std::int64_t const begin = p.begins[source * ranks], end = p.begins[(source + 1) * ranks];
      auto const part = [&](auto const& all, std::int64_t columns) {
        return std::decay_t<decltype(all)>(all.begin() + begin * columns,
                                           all.begin() + end * columns);
      };
      std::vector<std::int32_t> ids = part(p.ids, p.top_k);
      for (std::int32_t& id : ids) {
        id -= h * per_host;
        if (id < 0 || id >= per_host) id = -1;
      }
      std::vector<Bits> o, dx;
      std::vector<float> dscores;
      HostLayer::Saved saved;
      EXPECT_TRUE(layer.forward(part(p.x, p.hidden), ids, part(p.scores, p.top_k), o, saved).ok());
      EXPECT_TRUE(layer.backward(part(p.d_o, p.hidden), saved, dx, dscores).ok());
      for (std::size_t i = 0; i < o.size(); ++i) {
        std::size_t const at = static_cast<std::size_t>(begin * p.hidden) + i;
        sums[0][at] += core::to_fp32(core::Bf16{o[i]});
        sums[1][at] += core::to_fp32(core::Bf16{dx[i]});
      }
      for (std::size_t i = 0; i < dscores.size(); ++i) {
        sums[2][static_cast<std::size_t>(begin * p.top_k) + i] += dscores[i];
      }
    }
    results.gradients.push_back(layer.gradients());
  }
  for (float const sum : sums[0]) results.o.push_back(core::round_to<core::Bf16>(sum).bits);
  for (float const sum : sums[1]) results.dx.push_back(core::round_to<core::Bf16>(sum).bits);
  results.dscores = sums[2];
  return results;
}

template <class T>
void expect_bits(char const* what, std::vector<T> const& got, std::vector<T> const& wanted) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  EXPECT_EQ(std::memcmp(got.data(), wanted.data(), sizeof(T) * got.size()), 0) << what;
}

// What rank r sends to each host in a forward and a backward pass: docs/several-hosts.md.
std::vector<std::int64_t> expected_bytes(Problem const& p, std::size_t rank, bool counted) {
  auto const ranks = static_cast<std::size_t>(p.ranks);
  std::int32_t const per_host = p.experts / p.hosts;
  auto const rows = [&](std::size_t of, std::size_t host) -> std::int64_t {
    if (!counted) return p.max_tokens;
    std::int64_t count = 0;
    for (std::int64_t t = p.begins[of]; t < p.begins[of + 1]; ++t) {
      auto const* const first = p.ids.data() + t * p.top_k;
      count += std::any_of(first, first + p.top_k, [&](std::int32_t id) {
        return id >= 0 && id / per_host == static_cast<std::int32_t>(host);
      });
    }
    return count;
  };
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(p.hosts));
  for (std::size_t host = 0; host < bytes.size(); ++host) {
    if (host == rank / ranks) continue;
    std::int64_t const out = rows(rank, host), in = rows(host * ranks + rank % ranks, rank / ranks);
    std::int64_t const x = 2 * p.hidden, k = 4 * p.top_k;
    bytes[host] = out * (x + 2 * k) + in * x + out * x + in * (x + k) + (counted ? 8 : 0);
  }
  return bytes;
}

TEST_F(HostsTest, ResultsAndBytes) {
  struct Shape {
    std::int32_t hosts, ranks;
    std::vector<std::int64_t> tokens;
  };
  for (Shape const& s :
       {Shape{1, 2, {4, 5}}, Shape{2, 1, {7, 5}}, Shape{4, 1, {5, 0, 9, 4}},
        Shape{2, 2, {5, 0, 9, 4}}, Shape{2, 2, {0, 0, 0, 6}}, Shape{3, 2, {3, 4, 0, 6, 2, 5}},
        Shape{2, 3, {3, 4, 0, 6, 2, 5}}, Shape{6, 1, {3, 4, 0, 6, 2, 5}}, Shape{2, 1, {0, 0}}}) {
    for (Routing const routing :
         {Routing::random, Routing::skewed, Routing::one_expert, Routing::sentinels}) {
      SCOPED_TRACE(testing::Message() << s.hosts << " hosts of " << s.ranks << ", routing "
                                      << static_cast<int>(routing));
      Problem const problem =
          make_problem(s.hosts, s.ranks, s.tokens, routing, s.hosts == 6 ? 2 : 3);
      Results const wanted = expected(problem);
      for (bool const counted : {false, true}) {
        std::vector<std::vector<std::int64_t>> sent;
        Results const got = run(problem, counted, sent);
        expect_bits("o", got.o, wanted.o);
        expect_bits("dx", got.dx, wanted.dx);
        expect_bits("dscores", got.dscores, wanted.dscores);
        for (std::size_t h = 0; h < wanted.gradients.size(); ++h) {
          expect_bits("dw_up", got.gradients[h].up, wanted.gradients[h].up);
          expect_bits("dw_down", got.gradients[h].down, wanted.gradients[h].down);
        }
        for (std::size_t rank = 0; rank < sent.size(); ++rank) {
          std::vector<std::int64_t> none(static_cast<std::size_t>(s.hosts));
          EXPECT_EQ(sent[rank], s.hosts == 1 ? none : expected_bytes(problem, rank, counted));
        }
        EXPECT_TRUE(wanted.o.empty() || *std::max_element(wanted.o.begin(), wanted.o.end()) > 0);
      }
    }
  }
}

// Most sums of a few bf16 are the same in any order.
TEST(SumOfPartials, HostsAscendInFp32AndRoundOnce) {
  float const of_hosts[][3] = {{0x1p30f, -0x1p30f, 1}, {1, 0x1p-8f, 0x1p-8f}};
  float const wanted[] = {1, 1 + 0x1p-7f};
  for (int i = 0; i < 2; ++i) {
    for (bool const fp32 : {false, true}) {
      float fp32_sum = 0, fp32_partials[3];
      core::Bf16 bf16_sum = {}, bf16_partials[3];
      SumPartials p = {.tokens = 1, .columns = 1, .hosts = 3, .host = 1, .fp32 = fp32};
      for (int h = 0; h < 3; ++h) {
        fp32_partials[h] = of_hosts[i][h];
        bf16_partials[h] = core::round_to<core::Bf16>(of_hosts[i][h]);
        p.gmem_partial[h] = fp32 ? static_cast<void const*>(fp32_partials + h) : bf16_partials + h;
      }
      p.gmem_sum = fp32 ? static_cast<void*>(&fp32_sum) : &bf16_sum;
      fp32 ? p.sum<float>(0, 0) : p.sum<core::Bf16>(0, 0);
      EXPECT_EQ(fp32 ? fp32_sum : core::to_fp32(bf16_sum), wanted[i]) << i << ' ' << fp32;
    }
  }
}

}  // namespace
}  // namespace tessera::expert_parallel::hosts

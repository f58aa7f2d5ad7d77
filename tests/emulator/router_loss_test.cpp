// SPDX-License-Identifier: Apache-2.0
// router_loss of one GPU, from the source that GPUs get, against fp64: load balancing, z-loss and the loss of sequences
// with their gradient. A mask leaves the bits of the call without padding.
#include <cuda_runtime.h>

// Shared arrays of one CTA, which is all that these grids have: the emulator knows dynamic shared memory alone.
#undef __shared__
#define __shared__ static
#include "cuda/kernels/router_loss.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::cuda {
namespace {

using emulator::Memory;

struct Problem {
  RouterKind kind;
  int experts;
  std::vector<float> logits, cost, sequence_cost;  // (T,E), (E+1), (3,E)
  std::vector<std::int32_t> sequence_of;           // (T), -1: of none
};

constexpr float kDLoss = 0.75f;
constexpr int kSequences = 3;

Problem make_problem(RouterKind kind, int experts, int tokens) {
  std::mt19937_64 random(experts);
  std::normal_distribution<float> normal(0, 2);
  std::uniform_real_distribution<float> uniform(0, 1);
  Problem p{kind, experts, {}, {}, {}, {}};
  for (int i = 0; i < tokens * experts; ++i) p.logits.push_back(normal(random));
  for (int i = 0; i < experts; ++i) p.cost.push_back(uniform(random));
  p.cost.push_back(0.05f);  // of z
  for (int i = 0; i < kSequences * experts; ++i) p.sequence_cost.push_back(uniform(random));
  for (int t = 0; t < tokens; ++t)
    p.sequence_of.push_back(t % 7 == 3 ? -1 : t * kSequences / tokens);
  return p;
}

struct Losses {
  double balance = 0, z = 0, sequence = 0;
  [[nodiscard]] double all() const { return balance + z + sequence; }
};

// Of one token, in fp64.
Losses exact(Problem const& p, std::size_t token, std::vector<double> const& logits) {
  double largest = -INFINITY, exponentials = 0, own = 1e-20;
  for (double const l : logits) largest = std::max(largest, l);
  std::vector<double> values;
  for (double const l : logits) exponentials += std::exp(l - largest);
  for (double const l : logits) {
    double const q = p.kind == RouterKind::sqrtsoftplus   ? std::sqrt(std::log1p(std::exp(l)))
                     : p.kind == RouterKind::sigmoid_bias ? 1 / (1 + std::exp(-l))
                                                          : 0;
    own += q;
    values.push_back(core::has_own_p(p.kind) ? q : std::exp(l - largest) / exponentials);
  }
  Losses out;
  int const sequence = p.sequence_of[token];
  for (std::size_t e = 0; e < logits.size(); ++e) {
    double const share = core::has_own_p(p.kind) ? values[e] / own : values[e];
    out.balance += p.cost[e] * share;
    if (sequence >= 0) {
      out.sequence +=
          p.sequence_cost[static_cast<std::size_t>(sequence) * logits.size() + e] * share;
    }
  }
  double const lse = largest + std::log(exponentials);
  out.z = p.cost.back() * lse * lse;
  return out;
}

struct Result {
  std::vector<float> losses, dlogits;  // load balancing, z, sequences
};

// Of the tokens, the real ones first where `real` says how many those are.
Result run(Problem const& p, std::vector<std::int32_t> const& order, std::int32_t real,
           std::uint64_t seed) {
  auto const tokens = static_cast<std::int64_t>(p.sequence_of.size());
  EXPECT_EQ(loss_blocks(tokens), 1);
  Memory<float> losses(2), sequence(1), dlogits(tokens * p.experts), partials(kRouterLosses);
  RouterLossArguments args{};
  args.gmem_logits = p.logits.data();
  args.logits_pitch = args.dlogits_pitch = p.experts;
  args.gmem_cost = p.cost.data();
  args.gmem_dlogits = dlogits.get();
  args.gmem_losses = losses.get();
  args.gmem_sequence_loss = sequence.get();
  args.gmem_partials = partials.get();
  args.tokens = tokens;
  args.experts = p.experts;
  args.kind = p.kind;
  args.d_loss = kDLoss;
  args.gmem_sequence_cost = p.sequence_cost.data();
  args.gmem_sequence_of = p.sequence_of.data();
  if (!order.empty()) {
    args.gmem_order = order.data();
    args.gmem_count = &real;
  }
  CUstream_st stream;
  EXPECT_EQ(launch_router_loss_config<RouterLossConfig>(args, &stream), cudaSuccess);
  EXPECT_EQ(emulator::run({.seed = seed}), "");
  return {{losses[0], losses[1], sequence[0]}, {dlogits.get(), dlogits.get() + tokens * p.experts}};
}

class RouterLoss : public testing::TestWithParam<RouterKind> {};

TEST_P(RouterLoss, IsThatOfFp64) {
  for (int const experts : {20, 70}) {
    Problem const p = make_problem(GetParam(), experts, 32);
    Result const result = run(p, {}, 0, 1);
    Losses sums;
    for (std::size_t t = 0; t < p.sequence_of.size(); ++t) {
      auto const first = p.logits.begin() + static_cast<std::ptrdiff_t>(t) * experts;
      std::vector<double> logits(first, first + experts);
      Losses const own = exact(p, t, logits);
      sums.balance += own.balance;
      sums.z += own.z;
      sums.sequence += own.sequence;
      for (std::size_t e = 0; e < logits.size(); ++e) {
        constexpr double kStep = 1e-5;
        double const at = logits[e];
        logits[e] = at + kStep;
        double const above = exact(p, t, logits).all();
        logits[e] = at - kStep;
        double const slope = (above - exact(p, t, logits).all()) / (2 * kStep);
        logits[e] = at;
        ASSERT_NEAR(result.dlogits[t * logits.size() + e], kDLoss * slope, 2e-6)
            << "token " << t << ", expert " << e;
      }
    }
    EXPECT_NEAR(result.losses[0], sums.balance, 1e-5 * sums.balance);
    EXPECT_NEAR(result.losses[1], sums.z, 1e-5 * sums.z);
    EXPECT_NEAR(result.losses[2], sums.sequence, 1e-5 * sums.sequence);
  }
}

TEST_P(RouterLoss, LeavesPaddingOut) {
  Problem masked = make_problem(GetParam(), 40, 32);
  Problem rest = masked;
  rest.logits.clear();
  rest.sequence_of.clear();
  std::vector<std::int32_t> order, padding;
  for (std::int32_t t = 0; t < 32; ++t) {
    auto const first = masked.logits.begin() + t * 40;
    bool const real = t % 3 != 0 && t < 29;
    (real ? order : padding).push_back(t);
    if (real) {
      rest.logits.insert(rest.logits.end(), first, first + 40);
      rest.sequence_of.push_back(masked.sequence_of[static_cast<std::size_t>(t)]);
    } else {
      std::fill(first, first + 40, NAN);
    }
  }
  auto const real = static_cast<std::int32_t>(order.size());
  Result const wanted = run(rest, {}, 0, 3);
  std::vector<std::int32_t> const tokens = order;
  order.insert(order.end(), padding.begin(), padding.end());
  for (std::uint64_t const seed : {4, 5}) {
    Result const result = run(masked, order, real, seed);
    EXPECT_EQ(result.losses, wanted.losses);
    for (std::size_t i = 0; i < order.size(); ++i) {
      for (std::size_t e = 0; e < 40; ++e) {
        float const of_token = result.dlogits[static_cast<std::size_t>(order[i]) * 40 + e];
        ASSERT_EQ(of_token, i < tokens.size() ? wanted.dlogits[i * 40 + e] : 0.0f);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, RouterLoss,
                         testing::Values(RouterKind::topk_softmax, RouterKind::sigmoid_bias,
                                         RouterKind::sqrtsoftplus));

}  // namespace
}  // namespace tessera::cuda

// SPDX-License-Identifier: Apache-2.0
// Grouped GEMMs against plain loops, and their rules.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>

#include "tests/api/layer.hpp"

namespace tessera::api_test {
namespace {

struct GroupedGemm : testing::Test {
  static constexpr std::int64_t kRows = 613, kExperts = 5, kM = 37, kN = 21, kK = 18;
  Context context = value_of(Context::create({.num_threads = 3}));
  std::mt19937 generator{7};
  std::vector<std::int64_t> offsets = {0,   0,   300,
                                       301, 301, 600};  // empty experts, a tail of 13 rows
  std::vector<std::byte> workspace;

  Floats random(std::int64_t count) { return random_floats(count, 1, generator); }

  Status run(GroupedGemmArgs args) {
    workspace.assign(value_of(grouped_gemm_workspace_bytes(context, args)), std::byte{0xff});
    args.workspace = {workspace.data(), workspace.size()};
    return grouped_gemm(context, args);
  }
  std::int64_t expert_of(std::int64_t row) const {
    for (std::int64_t e = 0; e < kExperts; ++e) {
      if (row >= offsets[static_cast<std::size_t>(e)] &&
          row < offsets[static_cast<std::size_t>(e + 1)]) {
        return e;
      }
    }
    return -1;
  }
};

float at(Floats const& values, std::int64_t index) {
  return values[static_cast<std::size_t>(index)];
}

TEST_F(GroupedGemm, TakesExtentsOfZero) {
  for (auto const [m, n, k] :
       {std::array{kRows, kN, std::int64_t{0}}, std::array{kRows, std::int64_t{0}, kK}}) {
    Floats const a = random(m * k), b = random(kExperts * n * k);
    Floats c(static_cast<std::size_t>(m * n), std::nanf(""));
    GroupedGemmArgs args;
    args.a = tensor(a.data(), {m, k});
    args.b = tensor(b.data(), {kExperts, n, k});
    args.expert_offsets = tensor(offsets.data(), {kExperts + 1});
    args.c = tensor(c.data(), {m, n});
    Status const status = run(args);
    ASSERT_TRUE(status.ok()) << status.text();
    EXPECT_EQ(c, Floats(c.size(), 0.0f));  // sums of nothing
  }
}

TEST_F(GroupedGemm, VarlenMMatchesPlainLoops) {
  for (bool const transpose : {false, true}) {
    Floats const a = random(kRows * kK), b = random(kExperts * kN * kK),
                 bias = random(kExperts * kN);
    Floats c(kRows * kN, std::nanf(""));
    GroupedGemmArgs args;
    args.transpose_b = transpose;
    args.a = tensor(a.data(), {kRows, kK});
    args.b =
        transpose ? tensor(b.data(), {kExperts, kK, kN}) : tensor(b.data(), {kExperts, kN, kK});
    args.bias = tensor(bias.data(), {kExperts, kN});
    args.expert_offsets = tensor(offsets.data(), {kExperts + 1});
    args.c = tensor(c.data(), {kRows, kN});
    Status const status = run(args);
    ASSERT_TRUE(status.ok()) << status.text();
    for (std::int64_t r = 0; r < kRows; ++r) {
      std::int64_t const e = expert_of(r);
      for (std::int64_t i = 0; i < kN; ++i) {
        double sum = e < 0 ? 0.0 : at(bias, e * kN + i);
        for (std::int64_t k = 0; k < kK && e >= 0; ++k) {
          std::int64_t const place = transpose ? (e * kK + k) * kN + i : (e * kN + i) * kK + k;
          sum += static_cast<double>(at(a, r * kK + k)) * at(b, place);
        }
        if (e < 0) {
          ASSERT_EQ(at(c, r * kN + i), 0.0f);  // rows of no expert
        } else {
          ASSERT_NEAR(at(c, r * kN + i), sum, 1e-4) << r << "," << i;
        }
      }
    }
  }
}

TEST_F(GroupedGemm, VarlenKWritesAndAccumulates) {
  Floats a = random(kRows * kM), b = random(kRows * kN);
  a.back() = b.back() = std::nanf("");  // rows of no expert are not read
  for (GradientMode const mode : {GradientMode::write, GradientMode::accumulate}) {
    bool const adds = mode == GradientMode::accumulate;
    Floats c(kExperts * kM * kN, adds ? 3.0f : std::nanf(""));
    GroupedGemmArgs args;
    args.kind = GroupedGemmKind::varlen_k;
    args.mode = mode;
    args.a = tensor(a.data(), {kRows, kM});
    args.b = tensor(b.data(), {kRows, kN});
    args.expert_offsets = tensor(offsets.data(), {kExperts + 1});
    args.c = tensor(c.data(), {kExperts, kM, kN});
    Status const status = run(args);
    ASSERT_TRUE(status.ok()) << status.text();
    for (std::int64_t e = 0; e < kExperts; ++e) {
      std::int64_t const first = offsets[static_cast<std::size_t>(e)],
                         last = offsets[static_cast<std::size_t>(e + 1)];
      for (std::int64_t m = 0; m < kM; ++m) {
        for (std::int64_t i = 0; i < kN; ++i) {
          double sum = adds ? 3.0 : 0.0;
          for (std::int64_t r = first; r < last; ++r) {
            sum += static_cast<double>(at(a, r * kM + m)) * at(b, r * kN + i);
          }
          float const value = at(c, (e * kM + m) * kN + i);
          if (first == last) {
            ASSERT_EQ(value, adds ? 3.0f : 0.0f);
          } else {
            ASSERT_NEAR(value, sum, 2e-4);
          }
        }
      }
    }
  }
}

TEST_F(GroupedGemm, RefusesWhatDoesNotFit) {
  Floats const a = random(kRows * kK), b = random(kExperts * kN * kK);
  Floats c(kRows * kN, 5.0f);
  GroupedGemmArgs good;
  good.a = tensor(a.data(), {kRows, kK});
  good.b = tensor(b.data(), {kExperts, kN, kK});
  good.expert_offsets = tensor(offsets.data(), {kExperts + 1});
  good.c = tensor(c.data(), {kRows, kN});
  std::vector<std::byte> memory(value_of(grouped_gemm_workspace_bytes(context, good)));
  good.workspace = {memory.data(), memory.size()};
  auto const refused = [&](char const* part, auto&& change) {
    GroupedGemmArgs args = good;
    change(args);
    Status const status = grouped_gemm(context, args);
    EXPECT_NE(std::string(status.text()).find(part), std::string::npos) << status.text();
    for (float const value : c) ASSERT_EQ(value, 5.0f);
  };
  refused("kind=2", [](auto& args) { args.kind = static_cast<GroupedGemmKind>(2); });
  refused("mode=accumulate", [](auto& args) { args.mode = GradientMode::accumulate; });
  refused("ranks", [](auto& args) { args.b.rank = 2; });
  refused("b: shape", [](auto& args) { args.b.shape[2] += 1; });
  refused("c: missing", [](auto& args) { args.c = {}; });
  refused("dtype", [](auto& args) { args.a.dtype = DType::fp16; });
  refused("b: ", [](auto& args) { args.a.dtype = DType::bf16; });
  refused("at least 2", [](auto& args) { args.expert_offsets.shape[0] = 1; });
  std::vector<std::int64_t> bad = offsets;
  bad[2] = kRows + 1;
  refused("expert_offsets[2]=614",
          [&](auto& args) { args.expert_offsets = tensor(bad.data(), {kExperts + 1}); });
  bad = offsets;
  bad[0] = -1;
  refused("expert_offsets[0]=-1",
          [&](auto& args) { args.expert_offsets = tensor(bad.data(), {kExperts + 1}); });
}

}  // namespace
}  // namespace tessera::api_test

// SPDX-License-Identifier: Apache-2.0
// What tests of GEMMs over the rows of experts share: shapes, where an expert's rows are, sums that a result is
// compared with, and runs in several schedules or of random shapes.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <cuda_runtime.h>
#include "cuda/gemm/config.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"
#include "tests/emulator/sm100/random_cases.hpp"

namespace tessera::emulator {

constexpr Bits kPoison = 0xffff;  // what Memory holds where nobody has written

struct Shape {
  std::vector<int> rows;  // of each expert
  int hidden, intermediate;
  int ctas = 2;        // clusters of them where a kernel has clusters
  int other_rows = 0;  // behind those of the experts: pairs without an expert
  bool bias = false;
  bool stores_h = true;  // a forward up projection alone asks
  bool gated = true;     // gradients alone ask, as they do for what follows
  bool stores_a = true;
  bool gathers = true;
  bool accumulates = false;
  int skipped_half = -1;  // of a weight gradient: nobody wants it
  int block = 0;          // of rows of a weight gradient, gate and up in turn; 0: one
  int router_terms = 0;   // of an input gradient: bf16 in which w_router comes; 0: no router's part
};

class ExpertRows {
 public:
  explicit ExpertRows(Shape const& s) : experts_(static_cast<int>(s.rows.size())) {
    for (int const rows : s.rows) offsets_.push_back(offsets_.back() + rows);
    all_ = offsets_.back() + s.other_rows;
  }

  std::int32_t const* offsets() const { return offsets_.data(); }
  int experts() const { return experts_; }
  int all() const { return all_; }  // those without an expert too
  // experts() for a row without one.
  int expert_of(int row) const {
    int expert = 0;
    while (expert < experts_ && row >= offsets_[static_cast<std::size_t>(expert) + 1]) ++expert;
    return expert;
  }

 private:
  int experts_, all_;
  std::vector<std::int32_t> offsets_{0};
};

// One result of a GEMM: `count` products and a bias.
struct Sum {
  Bits const* a;
  Bits const* b;
  int count;
  std::int64_t b_step;
  float bias = 0;
  struct Product {
    float left, right;
  };
  std::vector<Product> more = {};  // added by FMAs, one behind the other

  // As the emulated tensor cores add, in the order of k.
  Bits rounded() const {
    float sum = dot(a, b, count, b_step) + bias;
    for (Product const& product : more) sum = std::fmaf(product.left, product.right, sum);
    return emulator::round(sum);
  }

  // In fp64, and the sum of magnitudes.
  double exact() const {
    return added([](double product) { return product; });
  }
  double size() const {
    return added([](double product) { return std::fabs(product); });
  }

  // Whether rounded() is within half a bf16 of the sum in fp64, and an fp32 rounding for each addition.
  bool agrees_with_fp64() const {
    double const roundings = count + static_cast<double>(more.size());
    double const sum = exact(), allowed = std::fabs(sum) * 0x1p-8 + size() * roundings * 0x1p-24;
    return std::fabs(widen(rounded()) - sum) <= allowed;
  }

 private:
  template <class Of>
  double added(Of of) const {
    double sum = of(bias);
    for (int k = 0; k < count; ++k) sum += of(double{widen(a[k])} * widen(b[k * b_step]));
    for (Product const& product : more) sum += of(double{product.left} * product.right);
    return sum;
  }
};

// x sigmoid(x) and its slope, in fp64.
struct Silu {
  double phi, slope;
  explicit Silu(double x) {
    double const sigmoid = 1 / (1 + std::exp(-x));
    phi = x * sigmoid;
    slope = sigmoid * (1 + x * (1 - sigmoid));
  }
};

inline std::string place(int row, int column) {
  return "row " + std::to_string(row) + " column " + std::to_string(column);
}
inline std::string counter_fault(std::int32_t counter) {
  return counter == 0 ? "" : "the tile counter is left at " + std::to_string(counter);
}

// A Projection has the operands and results of a shape: launch<Config>() enqueues a kernel, compare(k_major) says what
// is wrong with what it has written.
template <class Projection, class Config>
void check(Shape const& shape, Schedule const& schedule) {
  Projection projection(shape);
  ASSERT_EQ(projection.template launch<Config>(), cudaSuccess);
  ASSERT_EQ(run(schedule), "") << "seed " << schedule.seed;
  ASSERT_EQ(projection.compare(Config::gemm.b.major == cuda::gemm::Major::kK), "")
      << "seed " << schedule.seed;
}
template <class Projection, class... Configs>
void check(Shape const& shape) {
  auto const in_all_schedules = [&]<class Config>() {
    for (Schedule const& schedule : kSchedules) {
      ASSERT_NO_FATAL_FAILURE((check<Projection, Config>(shape, schedule)));
    }
  };
  (in_all_schedules.template operator()<Configs>(), ...);
}

struct AtRandom {
  std::optional<bool> gated;  // whether shapes have two halves; else some have one
  // d and n are at most so many units.
  int unit = 8;
  unsigned hidden = 36, intermediate = 24;
  int count = 25;  // of shapes
};

// Any experts, sizes and schedules.
template <class Projection, class... Configs>
void check_at_random(AtRandom const& wanted = {}) {
  RandomCases const cases =
      random_cases({.seed = 11, .count = static_cast<std::uint32_t>(wanted.count)});
  std::mt19937 rng(cases.seed);
  auto const draw = [&](unsigned below) { return static_cast<int>(rng() % below); };
  for (std::uint32_t i = 0; i < cases.count; ++i) {
    Shape shape{.rows = {},
                .hidden = wanted.unit * (1 + draw(wanted.hidden)),
                .intermediate = wanted.unit * (1 + draw(wanted.intermediate))};
    for (int e = draw(5); e >= 0; --e) shape.rows.push_back(draw(3) == 0 ? 0 : draw(200));
    shape.ctas = 1 + draw(3);
    shape.other_rows = draw(2) * draw(70);
    shape.bias = draw(2) != 0;
    shape.stores_h = draw(4) != 0;
    shape.gated = draw(3) != 0;
    if (wanted.gated.has_value()) shape.gated = *wanted.gated;
    shape.stores_a = draw(3) != 0;
    shape.gathers = draw(3) != 0;
    shape.accumulates = draw(2) != 0;
    if (shape.gated) shape.skipped_half = draw(4) - 2;
    if (shape.intermediate % 16 == 0) shape.block = draw(2) * 16;
    shape.router_terms = draw(3);
    Schedule const schedule{
        .seed = rng(), .burst = 1 << draw(7), .copies = 2 << draw(8), .lazy = draw(2) * 0.5};
    SCOPED_TRACE("seed " + std::to_string(cases.seed) + ", case " + std::to_string(i) + ": d " +
                 std::to_string(shape.hidden) + ", n " + std::to_string(shape.intermediate));
    (check<Projection, Configs>(shape, schedule), ...);
    if (testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace tessera::emulator

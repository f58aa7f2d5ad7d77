// SPDX-License-Identifier: Apache-2.0
// Sorted rows of MXFP8 times the weights of their experts, rounded to bf16, as down_projection_fwd and
// up_projection_dgrad multiply them: bit for bit sums in the order of k, and within their rounding of fp64. Rows that
// no expert has, and what lies behind them, nobody writes.
#pragma once

#include <string>

#include "tests/emulator/sm100/mxfp8_operands.hpp"

namespace tessera::emulator {

// Kernel::columns(shape), k(shape); launch<Config>(shape, rows, a, w, d, counter, ctas) enqueues it.
template <class Kernel>
class SortedRowsMx {
 public:
  explicit SortedRowsMx(Shape const& s) : s_(s), rows_(s) {}

  template <class Config>
  cudaError_t launch() {
    int const ctas = s_.ctas * Config::gemm.cluster_m();
    return Kernel::template launch<Config>(s_, rows_, a_, w_, d_.get(), counter_.get(), ctas);
  }

  std::string compare(bool) const {
    for (int r = 0; r < rows_.all(); ++r) {
      int const expert = rows_.expert_of(r);
      for (std::int64_t c = 0; c < columns_; ++c) {
        Bits const stored = d_[r * columns_ + c];
        std::string const where = place(r, static_cast<int>(c));
        if (expert == rows_.experts()) {
          if (stored != kPoison) return where + " was written";
          continue;
        }
        MxSum const sum(a_, r, w_, expert * columns_ + c);
        if (!same(stored, round(sum.value))) return where + ", not its bits";
        if (!sum.agrees_with_fp64(stored)) return where + ", not that of fp64";
      }
    }
    for (std::int64_t i = rows_.all() * columns_; i < static_cast<std::int64_t>(d_.size()); ++i) {
      if (d_[i] != kPoison) return "something was written behind the last row";
    }
    return counter_fault(counter_[0]);
  }

 private:
  Shape s_;
  ExpertRows rows_;
  std::int64_t columns_ = Kernel::columns(s_);
  MxMatrix a_{1, rows_.all(), Kernel::k(s_), MxScales::words, 1, 1.0f, true};
  MxMatrix w_{rows_.experts(), columns_, Kernel::k(s_), MxScales::atoms, 2, 0.25f};
  Memory<Bits> d_{(rows_.all() + 64) * columns_};
  Memory<std::int32_t> counter_{1, 0};
};

}  // namespace tessera::emulator

// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_bound.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>

#include "cli/commands.hpp"

namespace tessera::cli {
namespace {

/// The library whose best of a few runs is fastest.
template <class Run>
GemmLibrary const* fastest_of(std::vector<GemmLibrary> const& libraries, Run&& run) {
  constexpr int kRuns = 3;
  GemmLibrary const* fastest = nullptr;
  double least = 0;
  for (GemmLibrary const& library : libraries) {
    double best = 0;
    for (int i = 0; i < kRuns; ++i) {
      double const start = now_seconds();
      run(library);
      double const seconds = now_seconds() - start;
      if (i == 0 || seconds < best) best = seconds;
    }
    if (fastest == nullptr || best < least) fastest = &library, least = best;
  }
  return fastest;
}

}  // namespace

std::vector<char> BlasBound::filled(std::int64_t count) const {
  std::size_t const element = dtype_bytes(dtype_);
  std::vector<char> values(static_cast<std::size_t>(count) * element);
  for (std::int64_t i = 0; i < count; ++i) {
    // Exact in bf16, which is the upper half of fp32; never 0 in long runs, never denormal.
    auto const bits = std::bit_cast<std::uint32_t>(static_cast<float>(i % 251 - 125) / 128);
    std::uint32_t const stored = dtype_ == DType::bf16 ? bits >> 16 : bits;
    std::memcpy(&values[static_cast<std::size_t>(i) * element], &stored, element);
  }
  return values;
}

GemmOperand BlasBound::input(std::vector<char> const& values, std::int64_t first,
                             std::int64_t columns) const {
  return {values.data() + static_cast<std::size_t>(first) * dtype_bytes(dtype_), columns};
}

BlasBound::BlasBound(Context const& context, MoeDesc const& desc, std::int64_t rows)
    : context_(context),
      dtype_(desc.dtype),
      hidden_(desc.shape.hidden),
      intermediate_(desc.shape.intermediate),
      up_columns_(desc.up_width() * desc.shape.intermediate),
      libraries_(gemm_libraries(desc.dtype)) {
  if (libraries_.empty()) {
    throw CommandError(
        "--dtype bf16: no library to compare with; install oneDNN (libdnnl-dev on Debian and "
        "Ubuntu)",
        kEnvironment);
  }
  std::int64_t const experts = desc.shape.experts;
  for (std::int64_t e = 0; e < experts; ++e) {
    std::int64_t const first = rows * e / experts;
    experts_.push_back({first, rows * (e + 1) / experts - first});
  }
  x_ = filled(rows * hidden_);
  y_ = filled(rows * hidden_);
  h_ = filled(rows * up_columns_);
  a_ = filled(rows * intermediate_);
  w_up_ = filled(experts * up_columns_ * hidden_);
  w_down_ = filled(experts * hidden_ * intermediate_);
  out_h_.resize(rows * up_columns_);
  out_a_.resize(rows * intermediate_);
  out_y_.resize(rows * hidden_);
  dw_up_.resize(experts * up_columns_ * hidden_);
  dw_down_.resize(experts * hidden_ * intermediate_);
  forward_library_ = fastest_of(libraries_, [this](auto const& library) { run_forward(library); });
  backward_library_ =
      fastest_of(libraries_, [this](auto const& library) { run_backward(library); });
}

void BlasBound::run_forward(GemmLibrary const& library) {
  context_.parallel_for(std::ssize(experts_), [&](std::int64_t e) {
    auto const [first, rows] = experts_[e];
    if (rows == 0) return;
    GemmOperand const x = input(x_, first * hidden_, hidden_);
    GemmOperand const a = input(a_, first * intermediate_, intermediate_);
    GemmOperand const w_up = input(w_up_, e * up_columns_ * hidden_, hidden_);
    GemmOperand const w_down = input(w_down_, e * hidden_ * intermediate_, intermediate_);
    library.multiply(rows, up_columns_, hidden_, x, transposed(w_up), &out_h_[first * up_columns_]);
    library.multiply(rows, hidden_, intermediate_, a, transposed(w_down), &out_y_[first * hidden_]);
  });
}

void BlasBound::run_backward(GemmLibrary const& library) {
  context_.parallel_for(std::ssize(experts_), [&](std::int64_t e) {
    auto const [first, rows] = experts_[e];
    if (rows == 0) return;
    GemmOperand const x = input(x_, first * hidden_, hidden_);
    GemmOperand const h = input(h_, first * up_columns_, up_columns_);
    GemmOperand const a = input(a_, first * intermediate_, intermediate_);
    GemmOperand const y = input(y_, first * hidden_, hidden_);
    GemmOperand const w_up = input(w_up_, e * up_columns_ * hidden_, hidden_);
    GemmOperand const w_down = input(w_down_, e * hidden_ * intermediate_, intermediate_);
    library.multiply(rows, intermediate_, hidden_, y, w_down, &out_a_[first * intermediate_]);
    library.multiply(rows, hidden_, up_columns_, h, w_up, &out_y_[first * hidden_]);
    library.multiply(hidden_, intermediate_, rows, transposed(y), a,
                     &dw_down_[e * hidden_ * intermediate_]);
    library.multiply(up_columns_, hidden_, rows, transposed(h), x,
                     &dw_up_[e * up_columns_ * hidden_]);
  });
}

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double copy_bytes_per_second(Context const& context) {
  constexpr std::int64_t kChunk = 1 << 20, kChunks = 128;  // bytes; far beyond the caches
  std::vector<char> from(kChunk * kChunks, 1), to(kChunk * kChunks, 2);
  double best = 0;
  for (int repeat = 0; repeat < 7; ++repeat) {
    double const start = now_seconds();
    context.parallel_for(kChunks, [&](std::int64_t chunk) {
      std::memcpy(&to[chunk * kChunk], &from[chunk * kChunk], kChunk);
    });
    best = std::max(best, 2.0 * kChunk * kChunks / (now_seconds() - start));
  }
  return best;
}

}  // namespace tessera::cli

// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_bound.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "cli/batched_gemm.hpp"
#include "cli/clock.hpp"
#include "cli/commands.hpp"

namespace tessera::cli {
namespace {

constexpr int kTries = 5;

/// Milliseconds of the fastest of a few runs.
double best_of(std::function<void()> const& run) {
  double best = 0;
  for (int i = 0; i < kTries; ++i) {
    double const start = now_seconds();
    run();
    double const ms = (now_seconds() - start) * 1e3;
    if (i == 0 || ms < best) best = ms;
  }
  return best;
}

/// Returns what filled() puts at an index: exact in bf16, never 0 in long runs, never denormal.
float filling(std::int64_t index) { return static_cast<float>(index % 251 - 125) / 128; }

/// A matrix of an operand that filled() made.
struct FilledMatrix {
  std::int64_t first, columns;  ///< its first element's index
  bool transposed = false;
  [[nodiscard]] double at(std::int64_t row, std::int64_t column) const {
    return filling(first + (transposed ? column * columns + row : row * columns + column));
  }
};

/// True if some elements of c [m,n] = a [m,k] b [k,n] are what fp64 sums give, to the rounding of fp32 sums and of the
/// results' type.
bool some_are_right(std::int64_t m, std::int64_t n, std::int64_t k, FilledMatrix const& a,
                    FilledMatrix const& b, void const* c, DType results) {
  constexpr std::int64_t kChecked = 16;
  for (std::int64_t i = 0; i < kChecked; ++i) {
    std::int64_t const at = (m * n - 1) * i / (kChecked - 1), row = at / n, column = at % n;
    double sum = 0, sizes = 0;
    for (std::int64_t j = 0; j < k; ++j) {
      double const product = a.at(row, j) * b.at(j, column);
      sum += product;
      sizes += std::abs(product);
    }
    double value = 0, allowed = std::ldexp(sizes * static_cast<double>(k), -24);
    if (results == DType::bf16) {
      value = std::bit_cast<float>(std::uint32_t{static_cast<std::uint16_t const*>(c)[at]} << 16);
      allowed += std::ldexp(std::abs(sum), -8);
    } else {
      value = static_cast<float const*>(c)[at];
    }
    if (!(std::abs(value - sum) <= allowed)) return false;
  }
  return true;
}

}  // namespace

std::vector<char> BlasBound::filled(std::int64_t count) const {
  std::size_t const element = dtype_bytes(dtype_);
  std::vector<char> values(static_cast<std::size_t>(count) * element);
  for (std::int64_t i = 0; i < count; ++i) {
    auto const bits = std::bit_cast<std::uint32_t>(filling(i));  // bf16 is the upper half of fp32
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
      dtype_(gemm_libraries(desc.dtype).empty() ? DType::fp32 : desc.dtype),
      hidden_(desc.shape.hidden),
      intermediate_(desc.shape.intermediate),
      up_columns_(desc.up_width() * desc.shape.intermediate) {
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
  out_y_.resize(rows * hidden_);
  out_da_.resize(rows * intermediate_);
  out_dx_.resize(rows * hidden_);
  dw_up_.resize(experts * up_columns_ * hidden_);
  dw_down_.resize(experts * hidden_ * intermediate_);
  for (GemmLibrary const& library : gemm_libraries(dtype_)) add_library(library);
  if (rows > 0 && rows % experts == 0) add_batched(rows / experts);
  for (Way& way : ways_) {
    if (dtype_ != desc.dtype) way.name += "-fp32";
    way.forward_ms = best_of(way.forward);
    way.backward_ms = best_of(way.backward);
    check_results(way);
  }
  forward_ = &*std::ranges::min_element(ways_, {}, &Way::forward_ms);
  backward_ = &*std::ranges::min_element(ways_, {}, &Way::backward_ms);
}

BlasBound::Tried BlasBound::tried(double Way::* ms) const {
  Tried out;
  for (Way const& way : ways_) out.emplace_back(way.name, way.*ms);
  return out;
}

void BlasBound::add_library(GemmLibrary const& library) {
  ways_.push_back({library.name, DType::fp32, [this, library] { run_forward(library); },
                   [this, library] { run_backward(library); }});
}

void BlasBound::add_batched(std::int64_t rows) {
  std::int64_t const experts = std::ssize(experts_), d = hidden_, n = intermediate_;
  std::int64_t const threads = context_.num_threads();
  auto const input = [this](std::vector<char>& values, std::int64_t r, std::int64_t c) {
    return MatrixBatch{values.data(), dtype_, r, c};
  };
  auto const output = [this](std::vector<float>& values, std::int64_t r, std::int64_t c) {
    return MatrixBatch{values.data(), dtype_, r, c};
  };
  auto const all = [&](MatrixBatch const& a, MatrixBatch const& b, MatrixBatch const& c) {
    return batched_gemm(experts, a, b, c, static_cast<std::int32_t>(threads));
  };
  auto const x = input(x_, rows, d), h = input(h_, rows, up_columns_);
  auto const a = input(a_, rows, n), y = input(y_, rows, d);
  auto const w_up = input(w_up_, up_columns_, d), w_down = input(w_down_, d, n);
  std::vector<std::function<void()>> const forward = {
      all(x, transposed(w_up), output(out_h_, rows, up_columns_)),
      all(a, transposed(w_down), output(out_y_, rows, d))};
  std::vector<std::function<void()>> const backward = {
      all(y, w_down, output(out_da_, rows, n)), all(h, w_up, output(out_dx_, rows, d)),
      all(transposed(y), a, output(dw_down_, d, n)),
      all(transposed(h), x, output(dw_up_, up_columns_, d))};
  auto const missing = [](std::function<void()> const& gemm) { return !gemm; };
  if (std::ranges::any_of(forward, missing) || std::ranges::any_of(backward, missing)) return;
  auto const in_turn = [](auto const& gemms) {
    return [gemms] {
      for (auto const& gemm : gemms) gemm();
    };
  };
  ways_.push_back({"oneDNN-batched", dtype_, in_turn(forward), in_turn(backward)});
}

void BlasBound::check_results(Way const& way) const {
  std::int64_t const d = hidden_, n = intermediate_, up = up_columns_;
  bool right = true;
  auto const check = [&](std::int64_t m, std::int64_t columns, std::int64_t k,
                         FilledMatrix const& a, FilledMatrix const& b,
                         std::vector<float> const& out, std::int64_t first) {
    auto const offset = static_cast<std::size_t>(first) * dtype_bytes(way.results);
    right =
        right && some_are_right(m, columns, k, a, b,
                                reinterpret_cast<char const*>(out.data()) + offset, way.results);
  };
  for (std::int64_t const e : {std::int64_t{0}, std::ssize(experts_) - 1}) {
    auto const [first, rows] = experts_[e];
    if (rows == 0) continue;
    FilledMatrix const x{first * d, d}, h{first * up, up}, a{first * n, n}, y{first * d, d};
    FilledMatrix const w_up{e * up * d, d}, w_down{e * d * n, n};
    auto const turned = [](FilledMatrix const& m) {
      return FilledMatrix{m.first, m.columns, true};
    };
    check(rows, up, d, x, turned(w_up), out_h_, first * up);
    check(rows, d, n, a, turned(w_down), out_y_, first * d);
    check(rows, n, d, y, w_down, out_da_, first * n);
    check(rows, d, up, h, w_up, out_dx_, first * d);
    check(d, n, rows, turned(y), a, dw_down_, e * d * n);
    check(up, d, rows, turned(h), x, dw_up_, e * up * d);
  }
  if (!right) throw CommandError(way.name + " gives wrong results, so that it is no bound");
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
    library.multiply(rows, intermediate_, hidden_, y, w_down, &out_da_[first * intermediate_]);
    library.multiply(rows, hidden_, up_columns_, h, w_up, &out_dx_[first * hidden_]);
    library.multiply(hidden_, intermediate_, rows, transposed(y), a,
                     &dw_down_[e * hidden_ * intermediate_]);
    library.multiply(up_columns_, hidden_, rows, transposed(h), x,
                     &dw_up_[e * up_columns_ * hidden_]);
  });
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

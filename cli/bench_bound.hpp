// SPDX-License-Identifier: Apache-2.0
// A layer is measured against this: the same GEMMs as plain library calls on contiguous balanced data, one for each
// expert or one for all, whichever is fastest on this machine; and the rate at which this machine copies memory.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cli/gemm_library.hpp"
#include "tessera/context.hpp"
#include "tessera/shape.hpp"

namespace tessera::cli {

class BlasBound {
 public:
  /// `rows` (R) rows spread evenly over the experts. Allocates, tries every way a few times, checks its results and
  /// chooses one for each pass. Where no library multiplies bf16 on this processor, all multiply fp32, and their names
  /// end with "-fp32". Throws CommandError where one is wrong.
  BlasBound(Context const& context, MoeDesc const& desc, std::int64_t rows);
  BlasBound(BlasBound const&) = delete;
  BlasBound& operator=(BlasBound const&) = delete;

  void forward() { forward_->forward(); }     ///< h = x W^T, y = a D^T
  void backward() { backward_->backward(); }  ///< dA = dO D, dx = dh W, dD = dO^T a, dW = dh^T x

  [[nodiscard]] std::string const& forward_name() const { return forward_->name; }
  [[nodiscard]] std::string const& backward_name() const { return backward_->name; }
  /// Name and milliseconds (the least of a few tries) of every way.
  using Tried = std::vector<std::pair<std::string, double>>;
  [[nodiscard]] Tried forward_tried() const { return tried(&Way::forward_ms); }
  [[nodiscard]] Tried backward_tried() const { return tried(&Way::backward_ms); }

 private:
  /// One way to multiply: by a library's calls, one for each expert, or one for all.
  struct Way {
    std::string name;
    DType results;
    std::function<void()> forward, backward;
    double forward_ms = 0, backward_ms = 0;
  };
  struct Expert {
    std::int64_t first_row, rows;
  };
  /// Small non-zero numbers of dtype_.
  [[nodiscard]] std::vector<char> filled(std::int64_t count) const;
  [[nodiscard]] GemmOperand input(std::vector<char> const& values, std::int64_t first,
                                  std::int64_t columns) const;
  void run_forward(GemmLibrary const& library);
  void run_backward(GemmLibrary const& library);
  [[nodiscard]] Tried tried(double Way::* ms) const;
  void add_library(GemmLibrary const& library);
  void add_batched(std::int64_t rows);
  /// Some elements of every result of `way`, just computed, against sums in fp64.
  void check_results(Way const& way) const;

  Context const& context_;
  DType dtype_;  ///< of what is multiplied
  std::int64_t hidden_, intermediate_, up_columns_;
  std::vector<Expert> experts_;
  std::vector<Way> ways_;
  Way const* forward_ = nullptr;
  Way const* backward_ = nullptr;
  std::vector<char> x_, h_, a_, y_, w_up_, w_down_;  // inputs, of dtype_
  // Results, of the way's type. a and y stand for dO D and dh W in backward.
  std::vector<float> out_h_, out_y_, out_da_, out_dx_, dw_up_, dw_down_;
};

/// Bytes per second, read and written bytes both counted, over `context`'s threads.
double copy_bytes_per_second(Context const& context);

}  // namespace tessera::cli

// SPDX-License-Identifier: Apache-2.0
// What a layer is measured against: the same GEMMs as plain library calls, one per expert, on contiguous balanced data,
// by the fastest library of this machine; and the rate at which this machine copies memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/gemm_library.hpp"
#include "tessera/context.hpp"
#include "tessera/shape.hpp"

namespace tessera::cli {

class BlasBound {
 public:
  /// `rows` (R) rows spread evenly over the experts. Allocates, and tries every library once or twice to choose
  /// one for each pass. Throws CommandError where no library multiplies the desc's dtype.
  BlasBound(Context const& context, MoeDesc const& desc, std::int64_t rows);

  void forward() { run_forward(*forward_library_); }  ///< h = x W^T, y = a D^T
  void backward() {
    run_backward(*backward_library_);
  }  ///< dA = dO D, dx = dh W, dD = dO^T a, dW = dh^T x

  [[nodiscard]] std::string const& forward_name() const { return forward_library_->name; }
  [[nodiscard]] std::string const& backward_name() const { return backward_library_->name; }

 private:
  struct Expert {
    std::int64_t first_row, rows;
  };
  /// Small non-zero numbers in the storage type.
  [[nodiscard]] std::vector<char> filled(std::int64_t count) const;
  [[nodiscard]] GemmOperand input(std::vector<char> const& values, std::int64_t first,
                                  std::int64_t columns) const;
  void run_forward(GemmLibrary const& library);
  void run_backward(GemmLibrary const& library);

  Context const& context_;
  DType dtype_;
  std::int64_t hidden_, intermediate_, up_columns_;
  std::vector<Expert> experts_;
  std::vector<GemmLibrary> libraries_;
  GemmLibrary const* forward_library_ = nullptr;
  GemmLibrary const* backward_library_ = nullptr;
  std::vector<char> x_, h_, a_, y_, w_up_, w_down_;  // inputs, of dtype
  std::vector<float> out_h_, out_a_, out_y_, dw_up_, dw_down_;
};

/// Bytes per second, read and written bytes both counted, over `context`'s threads.
double copy_bytes_per_second(Context const& context);

/// Seconds on a clock that only moves forward.
double now_seconds();

}  // namespace tessera::cli

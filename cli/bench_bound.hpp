// SPDX-License-Identifier: Apache-2.0
// What a layer is measured against: the same GEMMs as plain BLIS calls, one per expert, on contiguous balanced data;
// and the rate at which this machine copies memory.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/context.hpp"
#include "tessera/shape.hpp"

namespace tessera::cli {

class BlasBound {
 public:
  /// `rows` (R) rows spread evenly over the experts. Allocates; threads touch their own data.
  BlasBound(Context const& context, MoeDesc const& desc, std::int64_t rows);

  void forward();   ///< h = x W^T, y = a D^T
  void backward();  ///< dA = dO D, dx = dh W, dD = dO^T a, dW = dh^T x

 private:
  struct Expert {
    std::int64_t first_row, rows;
  };
  Context const& context_;
  std::int64_t hidden_, intermediate_, up_columns_;
  std::vector<Expert> experts_;
  std::vector<float> x_, h_, a_, y_, w_up_, w_down_, dw_up_, dw_down_;
};

/// Bytes per second, read and written bytes both counted, over `context`'s threads.
double copy_bytes_per_second(Context const& context);

/// Seconds on a clock that only moves forward.
double now_seconds();

}  // namespace tessera::cli

// SPDX-License-Identifier: Apache-2.0
// tessera bench --device cuda: the layer, its cuBLAS bound and a copy, interleaved in one loop, after a check.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/output.hpp"
#include "tessera/context.hpp"
#include "verify/case.hpp"

namespace tessera::cli {

struct CudaBench {
  struct Job {
    std::string name;
    verify::LayerCase layer_case;
  };
  std::vector<Job> jobs;
  std::vector<std::string> passes;  ///< forward, backward, forward-inference
  double seconds = 5;               ///< for each job
  bool check = true;
  bool partial_combine = false;  ///< of several GPUs
  bool print = true;             ///< a line per row as it comes
  std::string command, commit;
  std::function<void(Json const&)> keep;  ///< gets the results document so far, after each job
};

/// Throws CommandError or std::invalid_argument for what the bench on one GPU does not serve, before any is looked for.
void check_cuda_bench(CudaBench const& bench);

/// The results document. Throws CommandError for what the GPU does not serve.
Json bench_on_cuda(Context const& context, CudaBench const& bench);

}  // namespace tessera::cli

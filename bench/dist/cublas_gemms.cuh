// SPDX-License-Identifier: Apache-2.0
// The GEMMs of a rank by cuBLAS, where it is installed: as many rows for each expert, no activation, nothing gathered.
#pragma once

#include <cstdio>
#include <memory>
#include <vector>

#include "../../src/device/cublas.hpp"
#include "chain_rank.cuh"

namespace tessera::bench {

class CublasGemms {
 public:
  CublasGemms() = default;
  CublasGemms(Rank const& r, int device, ExchangeShape const& s, ActivationKind activation)
      : cublas_(std::make_unique<device::Cublas>()) {
    MoeDesc desc;
    desc.shape = {.tokens = s.max_tokens,
                  .hidden = s.hidden,
                  .intermediate = s.intermediate,
                  .experts = s.local_experts(),
                  .top_k = s.max_top_k};
    desc.activation = {.kind = activation};
    bound_ = std::make_unique<device::CublasBound>(*cublas_, r.stream(), device, desc,
                                                   int64_t{s.max_tokens} * s.max_top_k, false);
    gemms_ = bound_->forward();
    for (auto const& gemm : gemms_) gemm.run();  // it allocates at its first call
    r.stream().synchronize();
  }
  std::vector<device::CublasBound::Gemm> const& gemms() const { return gemms_; }

  static bool installed() {
    try {
      device::Cublas const cublas;
    } catch (device::Error const& error) {
      std::printf("left out: GEMMs by cuBLAS: %s\n", error.what());
      return false;
    }
    return true;
  }

 private:
  std::unique_ptr<device::Cublas> cublas_;
  std::unique_ptr<device::CublasBound> bound_;
  std::vector<device::CublasBound::Gemm> gemms_;
};

}  // namespace tessera::bench

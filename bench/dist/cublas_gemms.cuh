// SPDX-License-Identifier: Apache-2.0
// The GEMMs of a rank by cuBLAS, where it is installed, without activation and nothing gathered: as many rows for each
// expert by one batched call, or the rows that the experts have in the pass by a grouped one.
#pragma once

#include <cstdio>
#include <functional>
#include <memory>
#include <vector>

#include "../../src/device/cublas.hpp"
#include "chain_rank.cuh"

namespace tessera::bench {

class CublasGemms {
 public:
  CublasGemms() = default;
  // `rows`: of each of the rank's experts in the pass.
  CublasGemms(Rank const& r, int device, ExchangeShape const& s, ActivationKind activation,
              std::vector<int> const& rows)
      : cublas_(std::make_unique<device::Cublas>()), grouped_(*cublas_, s, activation, rows) {
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
    run_batched();  // it allocates at its first call
    run_grouped(r.stream());
    r.stream().synchronize();
  }
  void run_batched() const {
    for (auto const& gemm : gemms_) gemm.run();
  }
  void run_grouped(device::Stream const& stream) const { grouped_.run(stream); }

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
  // Rows of the experts one behind the other.
  class Grouped {
   public:
    Grouped() = default;
    Grouped(device::Cublas const& cublas, ExchangeShape const& s, ActivationKind activation,
            std::vector<int> const& rows)
        : cublas_(&cublas),
          hidden_(s.hidden),
          intermediate_(s.intermediate),
          up_columns_((Activation{.kind = activation}.gated() ? 2 : 1) * s.intermediate) {
      int64_t const all = std::accumulate(rows.begin(), rows.end(), int64_t{0});
      x_ = random(all * hidden_, 31);
      h_ = random(all * up_columns_, 32);
      a_ = random(all * intermediate_, 33);
      y_ = random(all * hidden_, 34);
      w_up_ = random(int64_t(rows.size()) * up_columns_ * hidden_, 35);
      w_down_ = random(int64_t(rows.size()) * hidden_ * intermediate_, 36);
      std::vector<void const*> x, w_up, a, w_down;
      std::vector<void*> h, y;
      int64_t before = 0;
      for (size_t e = 0; e < rows.size(); ++e) {
        if (rows[e] == 0) continue;
        rows_.push_back(rows[e]);
        x.push_back(x_->get() + before * hidden_);
        h.push_back(h_->get() + before * up_columns_);
        a.push_back(a_->get() + before * intermediate_);
        y.push_back(y_->get() + before * hidden_);
        w_up.push_back(w_up_->get() + int64_t(e) * up_columns_ * hidden_);
        w_down.push_back(w_down_->get() + int64_t(e) * hidden_ * intermediate_);
        before += rows[e];
      }
      addresses_of_inputs_ = {pointers(x), pointers(w_up), pointers(a), pointers(w_down)};
      addresses_of_results_ = {pointers(h), pointers(y)};
    }
    void run(device::Stream const& stream) const {
      if (rows_.empty()) return;
      cublas_->grouped_gemm(stream, up_columns_, hidden_,
                            {rows_, addresses_of_inputs_[0]->get(), addresses_of_inputs_[1]->get(),
                             addresses_of_results_[0]->get()});
      cublas_->grouped_gemm(stream, hidden_, intermediate_,
                            {rows_, addresses_of_inputs_[2]->get(), addresses_of_inputs_[3]->get(),
                             addresses_of_results_[1]->get()});
    }

   private:
    using Values = std::unique_ptr<DeviceBuffer<bf16>>;
    static Values random(int64_t count, uint64_t seed) {
      auto values = std::make_unique<DeviceBuffer<bf16>>(std::max<int64_t>(count, 1));
      fill_uniform<<<4096, 256>>>(values->get(), count, seed, 0x1p-4f);
      return values;
    }
    template <class Pointer>
    static std::unique_ptr<DeviceBuffer<Pointer>> pointers(std::vector<Pointer> const& host) {
      return std::make_unique<DeviceBuffer<Pointer>>(host);
    }

    device::Cublas const* cublas_ = nullptr;
    int64_t hidden_ = 0, intermediate_ = 0, up_columns_ = 0;
    std::vector<int> rows_;
    Values x_, h_, a_, y_, w_up_, w_down_;
    std::array<std::unique_ptr<DeviceBuffer<void const*>>, 4> addresses_of_inputs_;
    std::array<std::unique_ptr<DeviceBuffer<void*>>, 2> addresses_of_results_;
  };

  std::unique_ptr<device::Cublas> cublas_;
  std::unique_ptr<device::CublasBound> bound_;
  std::vector<device::CublasBound::Gemm> gemms_;
  Grouped grouped_;
};

}  // namespace tessera::bench

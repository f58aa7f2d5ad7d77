// SPDX-License-Identifier: Apache-2.0
// The GEMMs of a rank by cuBLAS, where it is installed, without activation and nothing gathered: as many rows for each
// expert by one batched call, or the rows that the experts have in the pass by a grouped one.
#pragma once

#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>
#include <vector>

#include "../../src/device/cublas.hpp"
#include "chain_rank.cuh"

namespace tessera::bench {

// Of the experts of `owner`, in the pass of every rank's first draw.
inline std::vector<int> rows_of_experts(ExchangeShape const& shape, Pattern routing, int owner) {
  std::vector<int> rows(size_t(shape.local_experts()));
  for (int rank = 0; rank < shape.ranks; ++rank) {
    for (int32_t const id : draw(shape, routing, rank, 1).ids) {
      if (id >= 0 && id < shape.experts && shape.owner(id) == owner) {
        ++rows[size_t(id - owner * shape.local_experts())];
      }
    }
  }
  return rows;
}

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
        : cublas_(&cublas) {
      int64_t const d = s.hidden, n = s.intermediate;
      int64_t const up_columns = (Activation{.kind = activation}.gated() ? 2 : 1) * n;
      int64_t const all = std::accumulate(rows.begin(), rows.end(), int64_t{0});
      for (int const count : rows) {
        if (count > 0) rows_.push_back(count);
      }
      up_ = Product(rows, all, up_columns, d, 31);
      down_ = Product(rows, all, d, n, 34);
    }
    void run(device::Stream const& stream) const {
      if (rows_.empty()) return;
      for (Product const* const product : {&up_, &down_}) product->run(*cublas_, stream, rows_);
    }

   private:
    // c_e = a_e b_e^T for every expert that has rows, on data of its own.
    class Product {
     public:
      Product() = default;
      Product(std::vector<int> const& rows, int64_t all, int64_t n, int64_t k, uint64_t seed)
          : n_(n),
            k_(k),
            a_(random(all * k, seed)),
            b_(random(int64_t(rows.size()) * n * k, seed + 1)),
            c_(random(all * n, seed + 2)) {
        std::vector<void const*> a, b;
        std::vector<void*> c;
        int64_t before = 0;
        for (size_t e = 0; e < rows.size(); ++e) {
          if (rows[e] == 0) continue;
          a.push_back(a_->get() + before * k);
          b.push_back(b_->get() + int64_t(e) * n * k);
          c.push_back(c_->get() + before * n);
          before += rows[e];
        }
        gmem_a_ = std::make_unique<DeviceBuffer<void const*>>(a);
        gmem_b_ = std::make_unique<DeviceBuffer<void const*>>(b);
        gmem_c_ = std::make_unique<DeviceBuffer<void*>>(c);
      }
      void run(device::Cublas const& cublas, device::Stream const& stream,
               std::vector<int> const& rows) const {
        cublas.grouped_gemm(stream, n_, k_, {rows, gmem_a_->get(), gmem_b_->get(), gmem_c_->get()});
      }

     private:
      using Values = std::unique_ptr<DeviceBuffer<bf16>>;
      static Values random(int64_t count, uint64_t seed) {
        auto values = std::make_unique<DeviceBuffer<bf16>>(std::max<int64_t>(count, 1));
        fill_uniform<<<4096, 256>>>(values->get(), count, seed, 0x1p-4f);
        return values;
      }

      int64_t n_ = 0, k_ = 0;
      Values a_, b_, c_;
      std::unique_ptr<DeviceBuffer<void const*>> gmem_a_, gmem_b_;  // of each group
      std::unique_ptr<DeviceBuffer<void*>> gmem_c_;
    };

    device::Cublas const* cublas_ = nullptr;
    std::vector<int> rows_;  // of the experts that have any
    Product up_, down_;
  };

  std::unique_ptr<device::Cublas> cublas_;
  std::unique_ptr<device::CublasBound> bound_;
  std::vector<device::CublasBound::Gemm> gemms_;
  Grouped grouped_;
};

}  // namespace tessera::bench

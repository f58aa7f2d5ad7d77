// SPDX-License-Identifier: Apache-2.0
// FP8 kernels on a GPU: the quantisers give the bytes of the CPU; the projections of e4m3 operands lie within their
// allowance of fp64 on the operands they read, and codes of h are those that the CPU makes of its bf16.
// Exit 0 passed, 1 failed, 77 skipped (no GPU).
#include <cstdint>
#include <limits>
#include <string>

#include "cuda/kernels/down_projection_fwd_e4m3.cuh"
#include "cuda/kernels/quantise.cuh"
#include "cuda/kernels/up_projection_fwd_e4m3.cuh"
#include "cuda/tuning/low_precision.hpp"
#include "low_precision.cuh"

namespace tessera::cuda_test {
namespace {

using cuda::gemm::Element;

void compare(Quantised const& have, Quantised const& want, std::string const& what) {
  int64_t codes = 0, scales = 0;
  for (size_t i = 0; i < want.codes.size(); ++i) {
    codes += have.codes[i].bits != want.codes[i].bits;
  }
  for (size_t i = 0; i < want.scales.size(); ++i) {
    scales += !nan_or_equal(have.scales[i], want.scales[i]);
  }
  expect(codes == 0 && scales == 0, what + ": " + std::to_string(codes) + " codes and " +
                                        std::to_string(scales) + " scales differ");
}

// Every bf16 value is once the largest of a block, and all of them are small ones.
std::vector<Bf16> all_values(int64_t pitch) {
  std::vector<Bf16> x(size_t(65536 * pitch), Bf16{0x7fc0});  // what lies between rows is not read
  for (int64_t row = 0; row < 65536; ++row) {
    for (int64_t c = 0; c < 2 * kBlock; ++c) {
      float const largest = core::to_fp32(Bf16{uint16_t(row)});
      x[size_t(row * pitch + c)] = core::round_to<Bf16>(largest * noise(row * 256 + c, 3));
    }
    x[size_t(row * pitch + row % kBlock)] = Bf16{uint16_t(row)};
  }
  return x;
}

void check_rows(bool pow2) {
  int64_t const rows = 65536, width = 2 * kBlock, pitch = width + 8;
  std::vector<Bf16> const x = all_values(pitch);
  DeviceBuffer const gmem_x(x), codes(size_t(rows * width)), scales(size_t(rows * 2 * 4));
  require(cuda::launch_quantise_rows_kernel({.gmem_x = gmem_x.as<void>(),
                                             .rows = rows,
                                             .width = width,
                                             .pitch = pitch,
                                             .pow2 = pow2,
                                             .gmem_codes = codes.as<void>(),
                                             .gmem_scales = scales.as<float>()},
                                            nullptr),
          "quantise_rows");
  compare({codes.values<E4m3>(), scales.values<float>()},
          on_cpu(x, rows, width, pitch, false, pow2),
          pow2 ? "rows, powers of two" : "rows, fp32 scales");
}

void check_weights(int halves, bool pow2) {
  Weights const w = make_weights(3, halves, 256, 384, pow2);
  DeviceBuffer const values(w.values), codes(w.values.size()),
      scales(w.quantised.scales.size() * 4);
  require(cuda::launch_quantise_weights_kernel(
              {.w = {cuda::contiguous_half(values.as<void>(), w.halves, 0, w.rows, w.width),
                     cuda::contiguous_half(values.as<void>(), w.halves, 1, w.rows, w.width)},
               .rows = w.rows,
               .width = w.width,
               .halves = w.halves,
               .experts = w.experts,
               .pow2 = pow2,
               .gmem_codes = codes.as<void>(),
               .gmem_scales = scales.as<float>()},
              nullptr),
          "quantise_weights");
  compare({codes.values<E4m3>(), scales.values<float>()}, w.quantised,
          std::string("weights in ") + (halves == 2 ? "halves" : "one half") +
              (pow2 ? ", powers of two" : ", fp32 scales"));
}

struct Case {
  char const* name;
  std::vector<int> rows;  // of each expert
  int d, n;
  bool positive = false;  // all of x and w, so that sums grow
};

constexpr int kTokens = 97, kRowsPast = 5;
constexpr int kColumns = 512;  // of y

class Forward {
 public:
  explicit Forward(Case const& c)
      : c_(c),
        w_(make_weights(int(c.rows.size()), 2, c.n, c.d, false)),
        w_down_(make_weights(int(c.rows.size()), 1, kColumns, c.n, false)) {
    std::vector<Bf16> x(size_t(kTokens * c.d));
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t k = 0; k < c.d; ++k) {
        x[size_t(t * c.d + k)] =
            core::round_to<Bf16>(noise(t * c.d + k, 1) * spread(t, k / kBlock));
      }
    }
    for (int64_t k = 0; k < c.d; ++k) x[size_t(4 * c.d + k)] = Bf16{uint16_t(k % 2 << 15)};
    x[size_t(9 * c.d + 77)] = Bf16{0x7fc0};
    if (c.positive) {
      for (Bf16& v : x) v.bits &= 0x7fff;
      for (E4m3& v : w_.quantised.codes) v.bits &= 0x7f;
      for (E4m3& v : w_down_.quantised.codes) v.bits &= 0x7f;
    }
    x_ = on_cpu(x, kTokens, c.d, c.d, false, false);
    offsets_.push_back(0);
    for (int const rows : c.rows) offsets_.push_back(offsets_.back() + rows);
    rows_ = offsets_.back();
    for (int r = 0; r < rows_; ++r) index_.push_back((7 * r + 3) % kTokens);
  }

  void check() {
    int64_t const capacity = rows_ + kRowsPast, pitch = padded_scale_rows(capacity);
    DeviceBuffer const x(x_.codes), x_scales(x_.scales), w(w_.quantised.codes),
        w_scales(w_.quantised.scales), offsets(offsets_), index(index_),
        counter(std::vector<int>{0});
    DeviceBuffer const h(size_t(capacity * 2 * c_.n * 2)), a(size_t(capacity * c_.n * 2)),
        h8(size_t(capacity * 2 * c_.n)), a8(size_t(capacity * c_.n)),
        h_scales(size_t(2 * c_.n / kBlock * pitch * 4)),
        a_scales(size_t(c_.n / kBlock * pitch * 4));
    cuda::UpProjectionFwdE4m3Arguments args = {.gmem_x = x.as<void>(),
                                               .gmem_x_scales = x_scales.as<float>(),
                                               .gmem_gather_index = index.as<int>(),
                                               .gmem_expert_offsets = offsets.as<int>(),
                                               .gmem_w_up = w.as<void>(),
                                               .gmem_w_up_scales = w_scales.as<float>(),
                                               .activation = {.kind = ActivationKind::swiglu},
                                               .gmem_h = h.as<void>(),
                                               .gmem_a = a.as<void>(),
                                               .gmem_h_scales = nullptr,
                                               .gmem_a_scales = nullptr,
                                               .rows = capacity,
                                               .hidden = c_.d,
                                               .intermediate = c_.n,
                                               .experts = int(c_.rows.size()),
                                               .gmem_tile_counter = counter.as<int>()};
    launch<Element::kBf16>(args);
    args.gmem_h = h8.as<void>();
    args.gmem_a = a8.as<void>();
    args.gmem_h_scales = h_scales.as<float>();
    args.gmem_a_scales = a_scales.as<float>();
    launch<Element::kE4m3>(args);
    DeviceBuffer const w_down(w_down_.quantised.codes), w_down_scales(w_down_.quantised.scales),
        y(size_t(capacity * kColumns * 2));
    launch_down({.gmem_a = a8.as<void>(),
                 .gmem_a_scales = a_scales.as<float>(),
                 .gmem_expert_offsets = offsets.as<int>(),
                 .gmem_w_down = w_down.as<void>(),
                 .gmem_w_down_scales = w_down_scales.as<float>(),
                 .gmem_y = y.as<void>(),
                 .rows = capacity,
                 .hidden = kColumns,
                 .intermediate = c_.n,
                 .experts = int(c_.rows.size()),
                 .gmem_tile_counter = counter.as<int>()});
    auto const h_bits = h.values<Bf16>();
    auto const y_bits = y.values<Bf16>();
    Quantised const h_codes{h8.values<E4m3>(), h_scales.values<float>()};
    Quantised const a_codes{a8.values<E4m3>(), a_scales.values<float>()};
    auto const a_bits = a.values<Bf16>();
    int expert = 0;
    for (int r = 0; r < rows_; ++r) {
      while (r >= offsets_[size_t(expert) + 1]) ++expert;
      check_h(h_bits, r, expert);
      check_h_codes(h_bits, h_codes, r, pitch);
      check_a(h_bits, a_bits, a_codes, r, pitch);
      check_y(y_bits, a_codes, r, expert, pitch);
    }
    bool untouched = true;
    for (size_t i = size_t(rows_) * 2 * c_.n; i < h_bits.size(); ++i) {
      untouched = untouched && h_bits[i].bits == 0xffff && h_codes.codes[i].bits == 0xff;
    }
    for (size_t i = size_t(rows_) * c_.n; i < a_bits.size(); ++i) {
      untouched = untouched && a_bits[i].bits == 0xffff && a_codes.codes[i].bits == 0xff;
    }
    for (size_t i = size_t(rows_) * kColumns; i < y_bits.size(); ++i) {
      untouched = untouched && y_bits[i].bits == 0xffff;
    }
    expect(untouched, std::string(c_.name) + ": rows past the last one were written");
    int left = -1;
    require(cudaMemcpy(&left, counter.as<int>(), 4, cudaMemcpyDeviceToHost), "counter");
    expect(left == 0, std::string(c_.name) + ": the tile counter is left");
    std::printf(
        "%s: %lld of %lld elements of h and y have other bits than the model of the tensor cores\n",
        c_.name, (long long)unlike_model_, (long long)rows_ * (2 * c_.n + kColumns));
  }

 private:
  template <Element kOut>
  void launch(cuda::UpProjectionFwdE4m3Arguments const& args) const {
    using Config = cuda::UpProjectionFwdE4m3Config<ActivationKind::swiglu, kOut>;
    int sms = 0;
    require(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "attribute");
    require(cuda::launch_up_projection_fwd_e4m3_config<Config>(args, sms, nullptr), "launch");
    require(cudaDeviceSynchronize(), c_.name);
  }
  void launch_down(cuda::DownProjectionFwdE4m3Arguments const& args) const {
    int sms = 0;
    require(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "attribute");
    require(cuda::launch_down_projection_fwd_e4m3_config<cuda::DownProjectionFwdE4m3Config>(
                args, sms, nullptr),
            "launch of down");
    require(cudaDeviceSynchronize(), c_.name);
  }
  std::string at(char const* what, int row, int64_t column) const {
    return std::string(c_.name) + ": " + what + ", row " + std::to_string(row) + ", column " +
           std::to_string(column);
  }

  void check_h(std::vector<Bf16> const& h, int row, int expert) {
    int64_t const token = index_[size_t(row)], across = c_.d / kBlock;
    RowError error;
    for (int64_t c = 0; c < 2 * c_.n; ++c) {
      int64_t const half = c / c_.n, i = c % c_.n;
      Sum sum;
      for (int64_t k = 0; k < c_.d; ++k) {
        int64_t const w_row = (int64_t{expert} * 2 + half) * c_.n + i;
        int64_t const block = (expert * (c_.n / kBlock) + i / kBlock) * across + k / kBlock;
        sum.add(core::to_fp32(x_.codes[size_t(token * c_.d + k)]) *
                    core::to_fp32(w_.quantised.codes[size_t(w_row * c_.d + k)]),
                x_.scales[size_t(token * across + k / kBlock)] *
                    w_.quantised.scales[size_t(block * 2 + half)]);
      }
      check_sum(h[size_t(row * 2 * c_.n + c)], sum, error, at("h", row, c));
    }
    expect(error.good(), at("h in the norm", row, 0));
  }
  void check_y(std::vector<Bf16> const& y, Quantised const& a, int row, int expert, int64_t pitch) {
    RowError error;
    for (int64_t c = 0; c < kColumns; ++c) {
      Sum sum;
      for (int64_t k = 0; k < c_.n; ++k) {
        int64_t const block =
            (expert * (kColumns / kBlock) + c / kBlock) * (c_.n / kBlock) + k / kBlock;
        sum.add(
            core::to_fp32(a.codes[size_t(row * c_.n + k)]) *
                core::to_fp32(
                    w_down_.quantised.codes[size_t((int64_t{expert} * kColumns + c) * c_.n + k)]),
            a.scales[size_t(k / kBlock * pitch + row)] * w_down_.quantised.scales[size_t(block)]);
      }
      check_sum(y[size_t(row * kColumns + c)], sum, error, at("y", row, c));
    }
    expect(error.good(), at("y in the norm", row, 0));
  }
  void check_sum(Bf16 bits, Sum const& sum, RowError& error, std::string const& where) {
    double const have = core::to_fp32(bits);
    error.add(have, sum.value());
    unlike_model_ += !std::isnan(sum.value()) && bits.bits != sum.modelled().bits;
    expect(std::isnan(sum.value()) ? std::isnan(have)
                                   : std::fabs(have - sum.value()) <= sum.allowance(),
           where);
  }

  void check_h_codes(std::vector<Bf16> const& h, Quantised const& codes, int row,
                     int64_t pitch) const {
    std::vector<Bf16> const own(h.begin() + row * 2 * c_.n, h.begin() + (row + 1) * 2 * c_.n);
    Quantised const want = on_cpu(own, 1, 2 * c_.n, 2 * c_.n, false, false);
    for (int64_t c = 0; c < 2 * c_.n; ++c) {
      expect(codes.codes[size_t(row * 2 * c_.n + c)].bits == want.codes[size_t(c)].bits,
             at("code of h", row, c));
    }
    for (int64_t block = 0; block < 2 * c_.n / kBlock; ++block) {
      expect(nan_or_equal(codes.scales[size_t(block * pitch + row)], want.scales[size_t(block)]),
             at("scale of h", row, block * kBlock));
    }
  }

  // act(h) in fp64; the kernel's sigmoid is off by up to 2^-12.
  void check_a(std::vector<Bf16> const& h, std::vector<Bf16> const& a, Quantised const& codes,
               int row, int64_t pitch) const {
    for (int64_t c0 = 0; c0 < c_.n; c0 += kBlock) {
      double const scale = codes.scales[size_t(c0 / kBlock * pitch + row)];
      double largest = 0;
      bool has_nan = false;
      for (int64_t c = c0; c < c0 + kBlock; ++c) {
        double const g = core::to_fp32(h[size_t(row * 2 * c_.n + c)]);
        double const u = core::to_fp32(h[size_t(row * 2 * c_.n + c_.n + c)]);
        double const want = g / (1 + std::exp(-g)) * u, slack = std::fabs(g * u) * 0x1p-11;
        double const code = core::to_fp32(codes.codes[size_t(row * c_.n + c)]);
        double const bf16 = core::to_fp32(a[size_t(row * c_.n + c)]);
        if (std::isnan(want)) {
          has_nan = true;
          expect(std::isnan(bf16) && std::isnan(code) && std::isnan(scale), at("a of NaN", row, c));
          continue;
        }
        double const ulp =
            std::exp2(std::max(std::floor(std::log2(std::fabs(code) + 1e-30)), -6.0) - 3);
        expect(std::fabs(code * scale - want) <= scale * ulp / 2 * (1 + 0x1p-6) + slack,
               at("code of a", row, c));
        expect(std::fabs(bf16 - want) <= std::fabs(want) * 0x1p-8 + slack, at("a", row, c));
        largest = std::max(largest, std::fabs(want));
      }
      if (has_nan) continue;
      expect(largest == 0 ? scale == 1 : std::fabs(scale * 448 - largest) <= largest * 0x1p-7,
             at("scale of a", row, c0));
    }
  }

  Case c_;
  Weights w_, w_down_;
  Quantised x_;
  std::vector<int> offsets_, index_;
  int rows_ = 0;
  int64_t unlike_model_ = 0;
};

int run() {
  for (bool const pow2 : {false, true}) {
    check_rows(pow2);
    check_weights(1, pow2);
    check_weights(2, pow2);
  }
  for (Case const& c :
       {Case{"ragged", {70, 0, 129, 1, 64}, 256, 256}, Case{"long k", {3, 200}, 2048, 128},
        Case{"one k_tile", {127, 128}, 128, 384}, Case{"positive", {40, 90}, 1024, 128, true}}) {
    int const before = failures;
    Forward(c).check();
    std::printf("%s: %d failures\n", c.name, failures - before);
  }
  std::printf("%d failures: %s\n", failures, failures == 0 ? "passed" : "FAILED");
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda_test

int main() {
  using namespace tessera::cuda_test;
  return has_device() ? run() : kSkipped;
}

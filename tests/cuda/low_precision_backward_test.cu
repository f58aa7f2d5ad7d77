// SPDX-License-Identifier: Apache-2.0
// The gradients of activations of e4m3 operands on a GPU: dh, a' and ds lie within their allowance of fp64 on the
// operands that down_projection_dgrad_e4m3 read, codes of dh are those that the CPU makes of its bf16, dx rows lie
// within theirs of fp64 on these codes; codes of dh over those of h are the same bytes.
// Exit 0 passed, 1 failed, 77 skipped (no GPU).
#include <cstring>
#include <limits>
#include <string>

#include "cuda/kernels/down_projection_dgrad_e4m3.cuh"
#include "cuda/kernels/up_projection_dgrad_e4m3.cuh"
#include "cuda/tuning/low_precision.hpp"
#include "low_precision.cuh"

namespace tessera::cuda_test {
namespace {

struct Case {
  char const* name;
  std::vector<int> rows;  // of each expert
  int d, n;
  bool positive = false;  // all of dO and w, so that sums grow
};

constexpr int kTokens = 97, kRowsPast = 5;

// Weights (E,rows,width) of codes as they are where transposed: any codes are codes of a transpose.
struct Transposed {
  Transposed(int experts, int rows, int width, bool positive)
      : weights(make_weights(experts, 1, rows, width, false)) {
    if (!positive) return;
    for (E4m3& v : weights.quantised.codes) v.bits &= 0x7f;
  }
  // sum += a code of A and its scale times those of row i of an expert, for all of k.
  template <class A>
  void add_products(Sum& sum, int expert, int64_t i, A a) const {
    int64_t const rows = weights.rows, width = weights.width, across = width / kBlock;
    for (int64_t k = 0; k < width; ++k) {
      int64_t const block = (expert * (rows / kBlock) + i / kBlock) * across + k / kBlock;
      auto const [code, scale] = a(k);
      sum.add(core::to_fp32(code) *
                  core::to_fp32(weights.quantised.codes[size_t((expert * rows + i) * width + k)]),
              scale * weights.quantised.scales[size_t(block)]);
    }
  }
  Weights weights;
};
struct Scaled {
  E4m3 code;
  float scale;
};

class Backward {
 public:
  explicit Backward(Case const& c)
      : c_(c),
        w_down_(int(c.rows.size()), c.n, c.d, c.positive),
        w_up_(int(c.rows.size()), c.d, 2 * c.n, c.positive) {
    offsets_.push_back(0);
    for (int const rows : c.rows) offsets_.push_back(offsets_.back() + rows);
    rows_ = offsets_.back();
    pitch_ = padded_scale_rows(rows_ + kRowsPast);
    for (int r = 0; r < rows_; ++r) {
      index_.push_back((7 * r + 3) % kTokens);
      slots_.push_back(rows_ - 1 - r);
      scores_.push_back(r % 11 == 5 ? 0.0f : 0.05f * float(r % 23) - 0.3f);
    }
    std::vector<Bf16> d_o(size_t(kTokens * c.d)), h(size_t(rows_ * 2 * c.n));
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t k = 0; k < c.d; ++k) {
        d_o[size_t(t * c.d + k)] =
            core::round_to<Bf16>(noise(t * c.d + k, 1) * spread(t, k / kBlock));
      }
    }
    for (int64_t i = 0; i < int64_t(h.size()); ++i)
      h[size_t(i)] = core::round_to<Bf16>(3 * noise(i, 4));
    for (int64_t k = 0; k < c.d; ++k) d_o[size_t(4 * c.d + k)] = Bf16{uint16_t(k % 2 << 15)};
    d_o[size_t(9 * c.d + 77)] = Bf16{0x7fc0};
    h[size_t(2 * (2 * c.n) + 5)] = Bf16{0x7fc0};
    if (c.positive) {
      for (Bf16& v : d_o) v.bits &= 0x7fff;
    }
    d_o_ = on_cpu(d_o, kTokens, c.d, c.d, false, false);
    h_ = on_cpu(h, rows_, 2 * c.n, 2 * c.n, false, false);
    h_.codes.resize(size_t((rows_ + kRowsPast) * 2 * c.n), E4m3{0xff});
    std::vector<float> sorted(size_t(2 * c.n / kBlock * pitch_),
                              std::numeric_limits<float>::quiet_NaN());
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t b = 0; b < 2 * c.n / kBlock; ++b) {
        sorted[size_t(b * pitch_ + r)] = h_.scales[size_t(r * (2 * c.n / kBlock) + b)];
      }
    }
    h_.scales = std::move(sorted);
  }

  void check() {
    int64_t const capacity = rows_ + kRowsPast, n = c_.n;
    DeviceBuffer const d_o(d_o_.codes), d_o_scales(d_o_.scales),
        w_down(w_down_.weights.quantised.codes), w_down_scales(w_down_.weights.quantised.scales),
        w_up(w_up_.weights.quantised.codes), w_up_scales(w_up_.weights.quantised.scales),
        offsets(offsets_), index(index_), slots(slots_), scores(scores_),
        counter(std::vector<int>{0});
    DeviceBuffer const h(h_.codes), h_scales(h_.scales), over_h(h_.codes), over_h_scales(h_.scales);
    DeviceBuffer const dh(size_t(capacity * 2 * n * 2)), a(size_t(capacity * n * 2)),
        dh8(size_t(capacity * 2 * n)), dh8_scales(size_t(2 * n / kBlock * pitch_ * 4)),
        partials(size_t(capacity * n / kBlock * 4)), dx(size_t(capacity * c_.d * 2));
    cuda::DownProjectionDgradE4m3Arguments down = {
        .gmem_d_o = d_o.as<void>(),
        .gmem_d_o_scales = d_o_scales.as<float>(),
        .gmem_gather_index = index.as<int>(),
        .gmem_expert_offsets = offsets.as<int>(),
        .gmem_w_down_t = w_down.as<void>(),
        .gmem_w_down_t_scales = w_down_scales.as<float>(),
        .gmem_scores = scores.as<float>(),
        .gmem_sort_permutation = slots.as<int>(),
        .gmem_h = h.as<void>(),
        .gmem_h_scales = h_scales.as<float>(),
        .activation = {.kind = ActivationKind::swiglu},
        .gmem_dh = dh.as<void>(),
        .gmem_dh8 = dh8.as<void>(),
        .gmem_dh8_scales = dh8_scales.as<float>(),
        .gmem_a_scaled = a.as<void>(),
        .gmem_ds_partials = partials.as<float>(),
        .rows = capacity,
        .hidden = c_.d,
        .intermediate = n,
        .experts = int(c_.rows.size()),
        .gmem_tile_counter = counter.as<int>()};
    launch(down);
    cuda::UpProjectionDgradE4m3Arguments const up = {.gmem_dh = dh8.as<void>(),
                                                     .gmem_dh_scales = dh8_scales.as<float>(),
                                                     .gmem_expert_offsets = offsets.as<int>(),
                                                     .gmem_w_up_t = w_up.as<void>(),
                                                     .gmem_w_up_t_scales = w_up_scales.as<float>(),
                                                     .gmem_dx_rows = dx.as<void>(),
                                                     .rows = capacity,
                                                     .hidden = c_.d,
                                                     .intermediate = n,
                                                     .experts = int(c_.rows.size()),
                                                     .gmem_tile_counter = counter.as<int>()};
    launch(up);
    dh_ = dh.values<Bf16>();
    a_ = a.values<Bf16>();
    dx_ = dx.values<Bf16>();
    partials_ = partials.values<float>();
    dh8_ = {dh8.values<E4m3>(), dh8_scales.values<float>()};
    int expert = 0;
    for (int r = 0; r < rows_; ++r) {
      while (r >= offsets_[size_t(expert) + 1]) ++expert;
      check_down(r, expert);
      check_codes(r);
      check_up(r, expert);
    }
    expect(is_poison(dh_, 2 * n) && is_poison(a_, n) && is_poison(dx_, c_.d) &&
               is_poison(dh8_.codes, 2 * n) && is_poison(partials_, n / kBlock),
           std::string(c_.name) + ": rows past the last one were written");

    down.gmem_h = down.gmem_dh8 = over_h.as<void>();
    down.gmem_h_scales = down.gmem_dh8_scales = over_h_scales.as<float>();
    launch(down);
    auto const codes = over_h.values<E4m3>();
    auto const scales = over_h_scales.values<float>();
    bool same = true;
    for (int64_t i = 0; i < rows_ * 2 * n; ++i) {
      same = same && codes[size_t(i)].bits == dh8_.codes[size_t(i)].bits;
    }
    for (int64_t i = 0; i < 2 * n / kBlock * rows_; ++i) {
      int64_t const at = i / rows_ * pitch_ + i % rows_;
      same = same && nan_or_equal(scales[size_t(at)], dh8_.scales[size_t(at)]);
    }
    expect(same, std::string(c_.name) + ": codes over those of h have other bytes");
    int left = -1;
    require(cudaMemcpy(&left, counter.as<int>(), 4, cudaMemcpyDeviceToHost), "counter");
    expect(left == 0, std::string(c_.name) + ": the tile counter is left");
  }

 private:
  void launch(cuda::DownProjectionDgradE4m3Arguments const& args) const {
    using Config = cuda::DownProjectionDgradE4m3Config<ActivationKind::swiglu>;
    int sms = 0;
    require(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "attribute");
    require(cuda::launch_down_projection_dgrad_e4m3_config<Config>(args, sms, nullptr), "launch");
    require(cudaDeviceSynchronize(), c_.name);
  }
  void launch(cuda::UpProjectionDgradE4m3Arguments const& args) const {
    using Config = cuda::UpProjectionDgradE4m3Config;
    int sms = 0;
    require(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "attribute");
    require(cuda::launch_up_projection_dgrad_e4m3_config<Config>(args, sms, nullptr),
            "launch of up");
    require(cudaDeviceSynchronize(), c_.name);
  }
  template <class T>
  bool is_poison(std::vector<T> const& values, int64_t width) const {
    auto const* const bytes = reinterpret_cast<unsigned char const*>(values.data() + rows_ * width);
    for (size_t i = 0; i < (values.size() - size_t(rows_ * width)) * sizeof(T); ++i) {
      if (bytes[i] != 0xff) return false;
    }
    return true;
  }
  std::string at(char const* what, int row, int64_t column) const {
    return std::string(c_.name) + ": " + what + ", row " + std::to_string(row) + ", column " +
           std::to_string(column);
  }
  double h_of(int64_t row, int64_t column) const {
    return double{core::to_fp32(h_.codes[size_t(row * 2 * c_.n + column)])} *
           h_.scales[size_t(column / kBlock * pitch_ + row)];
  }

  // The kernel's sigmoid is off by up to 2^-12, and t by its own allowance, which has a rounding to bf16 in it.
  void check_down(int row, int expert) {
    int64_t const n = c_.n, across = c_.d / kBlock, token = index_[size_t(row)];
    double const s = scores_[size_t(slots_[size_t(row)])];
    double ds = 0, ds_allowed = 0;
    RowError error(5e-3), a_error(4e-3);
    for (int64_t c = 0; c < n; ++c) {
      Sum sum;
      w_down_.add_products(sum, expert, c, [&](int64_t k) {
        return Scaled{d_o_.codes[size_t(token * c_.d + k)],
                      d_o_.scales[size_t(token * across + k / kBlock)]};
      });
      double const t = sum.value(), off = sum.allowance();
      double const g = h_of(row, c), u = h_of(row, n + c), sigmoid = 1 / (1 + std::exp(-g));
      double const slope = sigmoid * (1 + g * (1 - sigmoid)), phi = g * sigmoid;
      double const slack = 0x1p-11;
      expect_near(dh_[size_t(row * 2 * n + c)], s * t * slope * u,
                  std::fabs(s * u) *
                      (off * std::fabs(slope) + slack * (std::fabs(t) + off) * (1 + std::fabs(g))),
                  error, at("dg", row, c));
      expect_near(
          dh_[size_t(row * 2 * n + n + c)], s * t * phi,
          std::fabs(s) * (off * std::fabs(phi) + slack * (std::fabs(t) + off) * std::fabs(g)),
          error, at("du", row, c));
      expect_near(a_[size_t(row * n + c)], s * phi * u, std::fabs(s * g * u) * slack, a_error,
                  at("a'", row, c));
      ds += t * phi * u;
      ds_allowed += off * std::fabs(phi * u) + slack * (std::fabs(t) + off) * std::fabs(g * u);
      if (c % kBlock != kBlock - 1) continue;
      double const have = partials_[size_t(row * (n / kBlock) + c / kBlock)];
      expect(std::isnan(ds) ? std::isnan(have) : std::fabs(have - ds) <= ds_allowed,
             at("ds", row, c));
      ds = ds_allowed = 0;
    }
    expect(error.good(), at("dh in the norm", row, 0));
    expect(a_error.good(), at("a' in the norm", row, 0));
  }
  static void expect_near(Bf16 bits, double want, double allowance, RowError& error,
                          std::string const& where) {
    double const have = core::to_fp32(bits);
    error.add(have, want);
    expect(std::isnan(want) ? std::isnan(have)
                            : std::fabs(have - want) <= std::fabs(want) * 0x1p-8 + allowance,
           where);
  }

  void check_codes(int row) const {
    int64_t const width = 2 * c_.n;
    std::vector<Bf16> const own(dh_.begin() + row * width, dh_.begin() + (row + 1) * width);
    Quantised const want = on_cpu(own, 1, width, width, false, false);
    for (int64_t c = 0; c < width; ++c) {
      expect(dh8_.codes[size_t(row * width + c)].bits == want.codes[size_t(c)].bits,
             at("code of dh", row, c));
    }
    for (int64_t b = 0; b < width / kBlock; ++b) {
      expect(nan_or_equal(dh8_.scales[size_t(b * pitch_ + row)], want.scales[size_t(b)]),
             at("scale of dh", row, b * kBlock));
    }
  }

  void check_up(int row, int expert) {
    RowError error(3e-3);
    for (int64_t c = 0; c < c_.d; ++c) {
      Sum sum;
      w_up_.add_products(sum, expert, c, [&](int64_t k) {
        return Scaled{dh8_.codes[size_t(row * 2 * c_.n + k)],
                      dh8_.scales[size_t(k / kBlock * pitch_ + row)]};
      });
      double const have = core::to_fp32(dx_[size_t(row * c_.d + c)]);
      error.add(have, sum.value());
      expect(std::isnan(sum.value()) ? std::isnan(have)
                                     : std::fabs(have - sum.value()) <= sum.allowance(),
             at("dx", row, c));
    }
    expect(error.good(), at("dx in the norm", row, 0));
  }

  Case c_;
  Transposed w_down_, w_up_;
  Quantised d_o_, h_, dh8_;
  std::vector<int> offsets_, index_, slots_;
  std::vector<float> scores_, partials_;
  std::vector<Bf16> dh_, a_, dx_;
  int rows_ = 0;
  int64_t pitch_ = 0;
};

int run() {
  for (Case const& c :
       {Case{"ragged", {70, 0, 129, 1, 64}, 256, 256}, Case{"long k", {3, 200}, 2048, 256},
        Case{"several tiles", {127, 128}, 512, 768}, Case{"positive", {40, 90}, 1024, 256, true},
        Case{"halves of a tile", {60, 70}, 384, 384}}) {
    int const before = failures;
    Backward(c).check();
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

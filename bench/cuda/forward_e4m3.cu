// SPDX-License-Identifier: Apache-2.0
// The projections of a forward pass with e4m3 operands beside those with bf16, on the same tokens, weights and routing,
// in one process. Up: the kernel that emits codes, or that stores nothing; the one that stores bf16. Down: from these
// codes. And the quantisers of x and of the weights. Kernels run in random order and the host never waits in between.
// Checked first, on rows of all experts: h in bf16 and y against plain kernels in fp32, which read the same codes;
// codes and scales of h are the bytes that the CPU makes of these h; codes of a against act(h) in fp64; two runs have
// equal bytes. The checks must reject the next row.
// Options: e4m3_bench.cuh.
#include "../../src/cuda/kernels/down_projection_fwd.cuh"
#include "../../src/cuda/kernels/down_projection_fwd_e4m3.cuh"
#include "../../src/cuda/kernels/quantise.cuh"
#include "../../src/cuda/kernels/up_projection_fwd.cuh"
#include "../../src/cuda/kernels/up_projection_fwd_e4m3.cuh"
#include "../../src/cuda/tuning/low_precision.hpp"
#include "e4m3_bench.cuh"

namespace tessera::bench {
namespace {

using cuda::DownProjectionFwdE4m3Arguments;
using cuda::UpProjectionFwdE4m3Arguments;
using cuda::gemm::Element;

constexpr ActivationKind kKind = ActivationKind::swiglu;

// h of the rows `gmem_rows`, [i][2n], one thread an element: blocks of 128 products in order, then blocks in order.
__global__ void plain_rows(UpProjectionFwdE4m3Arguments p, int const* gmem_rows, float* gmem_h) {
  int64_t const d = p.hidden, n = p.intermediate;
  int const row = gmem_rows[blockIdx.x], expert = expert_of(p.gmem_expert_offsets, row);
  int64_t const token = p.gmem_gather_index[row];
  auto const* const x = static_cast<E4m3 const*>(p.gmem_x) + token * d;
  for (int64_t c = threadIdx.x; c < 2 * n; c += blockDim.x) {
    int64_t const half = c / n, i = c % n;
    auto const* const w =
        static_cast<E4m3 const*>(p.gmem_w_up) + ((int64_t{expert} * 2 + half) * n + i) * d;
    float all = 0;
    for (int64_t k0 = 0; k0 < d; k0 += kBlock) {
      int64_t const block = (expert * (n / kBlock) + i / kBlock) * (d / kBlock) + k0 / kBlock;
      all = fmaf(dot_of_block(x + k0, w + k0),
                 p.gmem_x_scales[token * (d / kBlock) + k0 / kBlock] *
                     p.gmem_w_up_scales[block * 2 + half],
                 all);
    }
    gmem_h[blockIdx.x * 2 * n + c] = all;
  }
}

// The same of y.
__global__ void plain_down_rows(DownProjectionFwdE4m3Arguments p, int64_t pitch,
                                int const* gmem_rows, float* gmem_y) {
  int64_t const d = p.hidden, n = p.intermediate;
  int const row = gmem_rows[blockIdx.x], expert = expert_of(p.gmem_expert_offsets, row);
  auto const* const a = static_cast<E4m3 const*>(p.gmem_a) + row * n;
  for (int64_t c = threadIdx.x; c < d; c += blockDim.x) {
    auto const* const w = static_cast<E4m3 const*>(p.gmem_w_down) + (expert * d + c) * n;
    float all = 0;
    for (int64_t block = 0; block < n / kBlock; ++block) {
      int64_t const of_w = (expert * (d / kBlock) + c / kBlock) * (n / kBlock) + block;
      all = fmaf(dot_of_block(a + block * kBlock, w + block * kBlock),
                 p.gmem_a_scales[block * pitch + row] * p.gmem_w_down_scales[of_w], all);
    }
    gmem_y[blockIdx.x * d + c] = all;
  }
}

struct Problem {
  explicit Problem(Shape s)
      : shape(s),
        routing(Routing::random(s.tokens, s.experts, s.top_k, 11)),
        rows(int64_t(routing.gather_index.size())),
        pitch(padded_scale_rows(rows)),
        offsets(routing.expert_offsets),
        index(routing.gather_index),
        counter(std::vector<int>{0}),
        x(int64_t{s.tokens} * s.hidden),
        w(int64_t{2} * s.experts * s.intermediate * s.hidden),
        h(rows * 2 * s.intermediate),
        a(rows * s.intermediate),
        w_down(int64_t{s.experts} * s.hidden * s.intermediate),
        y(rows * s.hidden),
        x8(x.count()),
        w8(w.count()),
        h8(h.count()),
        a8(a.count()),
        w_down8(w_down.count()),
        x_scales(x.count() / kBlock),
        w_scales(w.count() / (kBlock * kBlock)),
        w_down_scales(w_down.count() / (kBlock * kBlock)),
        h_scales(2 * s.intermediate / kBlock * pitch),
        a_scales(s.intermediate / kBlock * pitch) {
    fill_uniform<<<4096, 256>>>(x.get(), x.count(), 1, 1.0f);
    fill_uniform<<<4096, 256>>>(w.get(), w.count(), 2, 0x1p-4f);
    fill_uniform<<<4096, 256>>>(w_down.get(), w_down.count(), 3, 0x1p-4f);
    quantise_x();
    quantise_w();
    quantise_w_down();
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  void quantise_x() const {
    quantise_rows(x.get(), shape.tokens, shape.hidden, x8.get(), x_scales.get());
  }
  void quantise_w() const {
    auto args = weights_to_quantise(w.get(), 2, shape.intermediate, shape.hidden, shape.experts);
    args.gmem_codes = w8.get(), args.gmem_scales = w_scales.get();
    TESSERA_CUDA(cuda::launch_quantise_weights_kernel(args, nullptr));
  }
  void quantise_w_down() const {
    auto args =
        weights_to_quantise(w_down.get(), 1, shape.hidden, shape.intermediate, shape.experts);
    args.gmem_codes = w_down8.get(), args.gmem_scales = w_down_scales.get();
    TESSERA_CUDA(cuda::launch_quantise_weights_kernel(args, nullptr));
  }

  UpProjectionFwdE4m3Arguments e4m3(bool to_bf16) const {
    return {.gmem_x = x8.get(),
            .gmem_x_scales = x_scales.get(),
            .gmem_gather_index = index.get(),
            .gmem_expert_offsets = offsets.get(),
            .gmem_w_up = w8.get(),
            .gmem_w_up_scales = w_scales.get(),
            .activation = {.kind = kKind},
            .gmem_h = to_bf16 ? static_cast<void*>(h.get()) : h8.get(),
            .gmem_a = to_bf16 ? static_cast<void*>(a.get()) : a8.get(),
            .gmem_h_scales = h_scales.get(),
            .gmem_a_scales = a_scales.get(),
            .rows = rows,
            .hidden = shape.hidden,
            .intermediate = shape.intermediate,
            .experts = shape.experts,
            .gmem_tile_counter = counter.get()};
  }
  template <Element kOut>
  void launch_e4m3(int sms, bool stores = true) const {
    using Config = cuda::UpProjectionFwdE4m3Config<kKind, kOut>;
    UpProjectionFwdE4m3Arguments args = e4m3(kOut == Element::kBf16);
    if (!stores) args.gmem_h = args.gmem_a = nullptr;
    TESSERA_CUDA(cuda::launch_up_projection_fwd_e4m3_config<Config>(args, sms, nullptr));
  }
  // As the library runs it.
  void launch_bf16(int sms) const {
    using namespace cuda::gemm;
    using Config = cuda::UpProjectionFwdConfig<kKind, Loader::kGather, Major::kK, Boxes::kTile>;
    int64_t const d = shape.hidden, n = shape.intermediate;
    auto const half = [&](int which) {
      return cuda::WeightRows{.gmem = w.get() + which * n * d,
                              .expert_stride = 2 * n * d,
                              .row_stride = d,
                              .column_stride = 1,
                              .block = n};
    };
    cuda::UpProjectionFwdArguments const args = {
        .x = {.gmem = x.get(), .rows = shape.tokens, .pitch = d},
        .gmem_gather_index = index.get(),
        .gmem_expert_offsets = offsets.get(),
        .w_up = {half(0), half(1)},
        .b_up = {},
        .activation = {.kind = kKind},
        .gmem_h = h.get(),
        .gmem_a = a.get(),
        .rows = rows,
        .hidden = d,
        .intermediate = n,
        .experts = shape.experts,
        .gmem_tile_counter = counter.get()};
    TESSERA_CUDA(cuda::launch_up_projection_fwd_config<Config>(args, sms, nullptr));
  }

  DownProjectionFwdE4m3Arguments down_e4m3() const {
    return {.gmem_a = a8.get(),
            .gmem_a_scales = a_scales.get(),
            .gmem_expert_offsets = offsets.get(),
            .gmem_w_down = w_down8.get(),
            .gmem_w_down_scales = w_down_scales.get(),
            .gmem_y = y.get(),
            .rows = rows,
            .hidden = shape.hidden,
            .intermediate = shape.intermediate,
            .experts = shape.experts,
            .gmem_tile_counter = counter.get()};
  }
  void launch_down_e4m3(int sms) const {
    TESSERA_CUDA(cuda::launch_down_projection_fwd_e4m3_config<cuda::DownProjectionFwdE4m3Config>(
        down_e4m3(), sms, nullptr));
  }
  // As the library runs it where n > 256.
  void launch_down_bf16(int sms) const {
    int64_t const d = shape.hidden, n = shape.intermediate;
    cuda::DownProjectionFwdArguments const args = {.gmem_a = a.get(),
                                                   .gmem_expert_offsets = offsets.get(),
                                                   .w_down = {.gmem = w_down.get(),
                                                              .expert_stride = d * n,
                                                              .row_stride = n,
                                                              .column_stride = 1,
                                                              .block = d},
                                                   .b_down = {},
                                                   .gmem_y = y.get(),
                                                   .rows = rows,
                                                   .hidden = d,
                                                   .intermediate = n,
                                                   .experts = shape.experts,
                                                   .gmem_tile_counter = counter.get()};
    TESSERA_CUDA(
        cuda::launch_down_projection_fwd_config<cuda::DownProjectionFwdWide<cuda::gemm::Major::kK>>(
            args, sms, nullptr));
  }

  Shape shape;
  Routing routing;
  int64_t rows, pitch;
  DeviceBuffer<int> offsets, index, counter;
  DeviceBuffer<bf16> x, w, h, a, w_down, y;
  DeviceBuffer<uint8_t> x8, w8, h8, a8, w_down8;
  DeviceBuffer<float> x_scales, w_scales, w_down_scales, h_scales, a_scales;
};

// A few rows of the results, on the host.
struct Row {
  std::vector<float> plain;  // h
  std::vector<float> plain_y;
  std::vector<bf16> h, y;
  std::vector<uint8_t> h8, a8;
  std::vector<float> h_scales, a_scales;
};

class Check {
 public:
  Check(Problem const& p, int sms) : p_(p), sms_(sms) {
    for (int e = 0; e < p.shape.experts; ++e) {  // first and last rows of experts
      int const begin = p.routing.expert_offsets[e], end = p.routing.expert_offsets[e + 1];
      for (int const row : {begin, end - 1}) {
        if (row >= begin && (numbers_.empty() || numbers_.back() != row)) numbers_.push_back(row);
      }
    }
  }

  bool passes() {
    p_.h.poison();
    p_.a.poison();
    poison_codes();
    p_.launch_e4m3<Element::kBf16>(sms_);
    p_.launch_e4m3<Element::kE4m3>(sms_);
    p_.y.poison();
    p_.launch_down_e4m3(sms_);
    unsigned long long const first = sum_of_outputs();
    fetch();
    poison_codes();
    p_.launch_e4m3<Element::kE4m3>(sms_);
    p_.y.poison();
    p_.launch_down_e4m3(sms_);
    bool const repeats = sum_of_outputs() == first;
    bool right = true;
    for (size_t i = 0; i < rows_.size() && right; ++i) right = accepts(rows_[i], i);
    bool rejects = true;
    for (size_t i = 0; i + 1 < rows_.size(); ++i) {
      Row wrong = rows_[i];
      wrong.plain = rows_[i + 1].plain;
      rejects = rejects && !h_is_right(wrong);
      wrong.plain_y = rows_[i + 1].plain_y;
      rejects = rejects && !y_is_right(wrong);
      wrong = rows_[i];
      wrong.h8 = rows_[i + 1].h8;
      rejects = rejects && !codes_are_right(wrong);
      wrong = rows_[i];
      wrong.a8 = rows_[i + 1].a8;
      rejects = rejects && !a_is_right(wrong);
    }
    std::printf(
        "%s: %zu rows %s, %s, other rows %s; largest errors of h %.2e and y %.2e of a row's norm\n",
        p_.shape.name, rows_.size(), right ? "right" : "WRONG",
        repeats ? "equal bytes" : "OTHER BYTES in a second run", rejects ? "rejected" : "ACCEPTED",
        worst_h_, worst_y_);
    return right && repeats && rejects;
  }

 private:
  void poison_codes() const {
    p_.h8.poison();
    p_.a8.poison();
    p_.h_scales.poison();
    p_.a_scales.poison();
  }

  unsigned long long sum_of_outputs() const {
    DeviceBuffer<unsigned long long> sum(std::vector<unsigned long long>{0});
    auto const add = [&](void const* gmem, int64_t bytes) {
      checksum<<<1024, 256>>>(static_cast<uint32_t const*>(gmem), bytes / 4, sum.get());
    };
    add(p_.h8.get(), p_.h8.count());
    add(p_.a8.get(), p_.a8.count());
    add(p_.h_scales.get(), p_.h_scales.count() * 4);
    add(p_.a_scales.get(), p_.a_scales.count() * 4);
    add(p_.y.get(), p_.y.count() * 2);
    unsigned long long host = 0;
    TESSERA_CUDA(cudaMemcpy(&host, sum.get(), sizeof host, cudaMemcpyDeviceToHost));
    return host;
  }

  void fetch() {
    int64_t const n = p_.shape.intermediate;
    DeviceBuffer<int> numbers(numbers_);
    DeviceBuffer<float> plain(int64_t(numbers_.size()) * 2 * n);
    plain_rows<<<unsigned(numbers_.size()), 256>>>(p_.e4m3(true), numbers.get(), plain.get());
    int64_t const d = p_.shape.hidden;
    DeviceBuffer<float> plain_y(int64_t(numbers_.size()) * d);
    plain_down_rows<<<unsigned(numbers_.size()), 256>>>(
        p_.down_e4m3(), padded_scale_rows(p_.down_e4m3().rows), numbers.get(), plain_y.get());
    std::vector<float> const h_scales = read(p_.h_scales.get(), p_.h_scales.count());
    std::vector<float> const a_scales = read(p_.a_scales.get(), p_.a_scales.count());
    for (size_t i = 0; i < numbers_.size(); ++i) {
      int64_t const r = numbers_[i];
      Row row{.plain = read(plain.get() + int64_t(i) * 2 * n, 2 * n),
              .plain_y = read(plain_y.get() + int64_t(i) * d, d),
              .h = read(p_.h.get() + r * 2 * n, 2 * n),
              .y = read(p_.y.get() + r * d, d),
              .h8 = read(p_.h8.get() + r * 2 * n, 2 * n),
              .a8 = read(p_.a8.get() + r * n, n),
              .h_scales = {},
              .a_scales = {}};
      for (int64_t b = 0; b < 2 * n / kBlock; ++b)
        row.h_scales.push_back(h_scales[b * p_.pitch + r]);
      for (int64_t b = 0; b < n / kBlock; ++b) row.a_scales.push_back(a_scales[b * p_.pitch + r]);
      rows_.push_back(std::move(row));
    }
  }

  bool h_is_right(Row const& row) { return is_right(row.h, row.plain, worst_h_); }
  bool y_is_right(Row const& row) { return is_right(row.y, row.plain_y, worst_y_); }
  // One rounding to bf16, and 13 bits of the partial sums, whose errors are about 1.3e-4 of a norm.
  static bool is_right(std::vector<bf16> const& have, std::vector<float> const& plain,
                       double& worst) {
    double norm = 0, difference = 0;
    for (float const v : plain) norm += double(v) * v;
    double const floor = 3e-3 * std::sqrt(norm / double(plain.size()));
    for (size_t c = 0; c < plain.size(); ++c) {
      double const error = std::fabs(double(widen(have[c])) - plain[c]);
      if (!(error <= std::fabs(plain[c]) * 0x1p-8 + floor)) return false;
      difference += error * error;
    }
    worst = std::max(worst, std::sqrt(difference / norm));
    return true;
  }
  static bool codes_are_right(Row const& row) {
    return bench::codes_are_right(row.h, row.h8, row.h_scales);
  }
  bool a_is_right(Row const& row) const {
    size_t const n = row.a8.size();
    for (size_t c0 = 0; c0 < n; c0 += kBlock) {
      double const scale = row.a_scales[c0 / kBlock];
      double largest = 0;
      for (size_t c = c0; c < c0 + kBlock; ++c) {
        double const g = widen(row.h[c]), u = widen(row.h[c + n]);
        double const a = g / (1 + std::exp(-g)) * u;
        double const code = core::to_fp32(E4m3{row.a8[c]});
        double const ulp =
            std::exp2(std::max(std::floor(std::log2(std::fabs(code) + 1e-30)), -6.0) - 3);
        double const allowance = scale * ulp / 2 * (1 + 0x1p-6) + std::fabs(g * u) * 0x1p-11;
        if (!(std::fabs(code * scale - a) <= allowance)) return false;
        largest = std::max(largest, std::fabs(a));
      }
      if (!(std::fabs(scale * 448 - largest) <= largest * 0x1p-7)) return false;
    }
    return true;
  }

  bool accepts(Row const& row, size_t i) {
    bool const h = h_is_right(row), codes = codes_are_right(row), a = a_is_right(row);
    bool const y = y_is_right(row);
    if (h && codes && a && y) return true;
    auto const word = [](bool right) { return right ? "right" : "WRONG"; };
    std::printf("row %d: h %s, its codes %s, a %s, y %s\n", numbers_[i], word(h), word(codes),
                word(a), word(y));
    return false;
  }

  Problem const& p_;
  int sms_;
  std::vector<int> numbers_;
  std::vector<Row> rows_;
  double worst_h_ = 0, worst_y_ = 0;
};

bool bench_shape(Shape const& s, int iters, int sms, std::string& rows) {
  Problem const p(s);
  bool const checked = Check(p, sms).passes();
  double const flops = 4.0 * double(p.rows) * s.intermediate * s.hidden;
  std::vector<Candidate> candidates = {
      {"up bf16", flops, 0, [&] { p.launch_bf16(sms); }, {}},
      {"up e4m3", flops, 0, [&] { p.launch_e4m3<Element::kE4m3>(sms); }, {}},
      {"up e4m3, no epilogue", flops, 0, [&] { p.launch_e4m3<Element::kE4m3>(sms, false); }, {}},
      {"up e4m3, bf16 out", flops, 0, [&] { p.launch_e4m3<Element::kBf16>(sms); }, {}},
      {"down bf16", flops / 2, 0, [&] { p.launch_down_bf16(sms); }, {}},
      {"down e4m3", flops / 2, 0, [&] { p.launch_down_e4m3(sms); }, {}},
      {"quantise x", 0, 3.03 * double(p.x.count()), [&] { p.quantise_x(); }, {}},
      {"quantise w_up", 0, 3.0 * double(p.w.count()), [&] { p.quantise_w(); }, {}},
      {"quantise w_down", 0, 3.0 * double(p.w_down.count()), [&] { p.quantise_w_down(); }, {}}};
  report(s, "forward", candidates, iters, checked, rows);
  return checked;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  return run(argc, argv, bench_shape);
}

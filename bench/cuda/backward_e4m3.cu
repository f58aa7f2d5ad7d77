// SPDX-License-Identifier: Apache-2.0
// The gradients of activations with e4m3 operands beside those with bf16, on the same dO, h, weights and routing, in
// one process: down_projection_dgrad, also where it stores nothing, and up_projection_dgrad of the codes that it made.
// And the quantisers that a backward pass needs. Kernels run in random order and the host never waits in between.
// Checked first, on rows of all experts, against plain kernels in fp32 that read the same codes: dh, a', ds and dx
// rows; codes and scales of dh are the bytes that the CPU makes of these dh; two runs have equal bytes, as has one
// whose codes of dh lie over those of h. The checks must reject the next row.
// Options: e4m3_bench.cuh.
#include "../../src/cuda/kernels/down_projection_dgrad.cuh"
#include "../../src/cuda/kernels/down_projection_dgrad_e4m3.cuh"
#include "../../src/cuda/kernels/quantise.cuh"
#include "../../src/cuda/kernels/up_projection_dgrad.cuh"
#include "../../src/cuda/kernels/up_projection_dgrad_e4m3.cuh"
#include "../../src/cuda/tuning/gemm_backward.hpp"
#include "../../src/cuda/tuning/low_precision.hpp"
#include "e4m3_bench.cuh"

namespace tessera::bench {
namespace {

using cuda::DownProjectionDgradE4m3Arguments;
using cuda::UpProjectionDgradE4m3Arguments;
using cuda::gemm::Boxes;
using cuda::gemm::Major;

constexpr ActivationKind kKind = ActivationKind::swiglu;

// Computes dg, du, a' and the terms of <t, a> for the rows `gmem_rows`, into [i][4][n]; one thread takes a column.
__global__ void plain_down_rows(DownProjectionDgradE4m3Arguments p, int64_t pitch,
                                int const* gmem_rows, float* gmem_out) {
  int64_t const d = p.hidden, n = p.intermediate;
  int const row = gmem_rows[blockIdx.x], expert = expert_of(p.gmem_expert_offsets, row);
  int64_t const token = p.gmem_gather_index[row];
  float const s = p.gmem_scores[p.gmem_sort_permutation[row]];
  for (int64_t c = threadIdx.x; c < n; c += blockDim.x) {
    float t = 0;
    for (int64_t b = 0; b < d / kBlock; ++b) {
      t = fmaf(dot_of_block(
                   static_cast<E4m3 const*>(p.gmem_d_o) + token * d + b * kBlock,
                   static_cast<E4m3 const*>(p.gmem_w_down_t) + (expert * n + c) * d + b * kBlock),
               p.gmem_d_o_scales[token * (d / kBlock) + b] *
                   p.gmem_w_down_t_scales[(expert * (n / kBlock) + c / kBlock) * (d / kBlock) + b],
               t);
    }
    auto const* const h = static_cast<E4m3 const*>(p.gmem_h) + row * 2 * n;
    float const g = core::to_fp32(h[c]) * p.gmem_h_scales[c / kBlock * pitch + row];
    float const u = core::to_fp32(h[n + c]) * p.gmem_h_scales[(n + c) / kBlock * pitch + row];
    float const sigmoid = 1.0f / (1.0f + expf(-g));
    float* const out = gmem_out + blockIdx.x * 4 * n + c;
    out[0] = s * t * u * sigmoid * (1.0f + g * (1.0f - sigmoid));
    out[n] = s * t * g * sigmoid;
    out[2 * n] = s * g * sigmoid * u;
    out[3 * n] = t * g * sigmoid * u;
  }
}

// Computes their dx rows, [i][d].
__global__ void plain_up_rows(UpProjectionDgradE4m3Arguments p, int64_t pitch, int const* gmem_rows,
                              float* gmem_dx) {
  int64_t const d = p.hidden, k = 2 * p.intermediate;
  int const row = gmem_rows[blockIdx.x], expert = expert_of(p.gmem_expert_offsets, row);
  for (int64_t c = threadIdx.x; c < d; c += blockDim.x) {
    float all = 0;
    for (int64_t b = 0; b < k / kBlock; ++b) {
      all = fmaf(
          dot_of_block(static_cast<E4m3 const*>(p.gmem_dh) + row * k + b * kBlock,
                       static_cast<E4m3 const*>(p.gmem_w_up_t) + (expert * d + c) * k + b * kBlock),
          p.gmem_dh_scales[b * pitch + row] *
              p.gmem_w_up_t_scales[(expert * (d / kBlock) + c / kBlock) * (k / kBlock) + b],
          all);
    }
    gmem_dx[blockIdx.x * d + c] = all;
  }
}

// Scales of sorted rows, (blocks,pitch), from (rows,blocks).
__global__ void sort_scales(float const* gmem_in, int64_t rows, int64_t blocks, int64_t pitch,
                            float* gmem_out) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < rows * blocks;
       i += int64_t{gridDim.x} * blockDim.x) {
    gmem_out[i % blocks * pitch + i / blocks] = gmem_in[i];
  }
}

std::vector<int> slots_of(int64_t rows) {
  std::vector<int> out(static_cast<size_t>(rows));
  for (size_t r = 0; r < out.size(); ++r) out[r] = rows % 7 ? int(r * 7 % out.size()) : int(r);
  return out;
}
std::vector<float> scores_of(int64_t rows) {
  std::vector<float> out(static_cast<size_t>(rows));
  for (size_t i = 0; i < out.size(); ++i) out[i] = 0.05f + float(i * 37 % 101) * 0.009f;
  return out;
}

struct Problem {
  explicit Problem(Shape s)
      : shape(s),
        routing(Routing::random(s.tokens, s.experts, s.top_k, 11)),
        rows(int64_t(routing.gather_index.size())),
        pitch(padded_scale_rows(rows)),
        offsets(routing.expert_offsets),
        index(routing.gather_index),
        permutation(slots_of(rows)),
        counter(std::vector<int>{0}),
        scores(scores_of(rows)),
        d_o(int64_t{s.tokens} * s.hidden),
        h(rows * 2 * s.intermediate),
        w_up(int64_t{2} * s.experts * s.intermediate * s.hidden),
        w_down(int64_t{s.experts} * s.hidden * s.intermediate),
        dh(h.count()),
        a_scaled(rows * s.intermediate),
        dx(rows * s.hidden),
        partials(rows * s.intermediate / kBlock),
        d_o8(d_o.count()),
        h8(h.count()),
        dh8(h.count()),
        w_up_t(w_up.count()),
        w_down_t(w_down.count()),
        d_o_scales(d_o.count() / kBlock),
        h_scales(2 * s.intermediate / kBlock * pitch),
        dh8_scales(h_scales.count()),
        w_up_t_scales(w_up.count() / (kBlock * kBlock)),
        w_down_t_scales(w_down.count() / (kBlock * kBlock)) {
    fill_uniform<<<4096, 256>>>(d_o.get(), d_o.count(), 1, 1.0f);
    fill_uniform<<<4096, 256>>>(h.get(), h.count(), 2, 3.0f);
    fill_uniform<<<4096, 256>>>(w_up.get(), w_up.count(), 3, 0x1p-4f);
    fill_uniform<<<4096, 256>>>(w_down.get(), w_down.count(), 4, 0x1p-4f);
    quantise_d_o();
    quantise_w_up();
    quantise_w_down();
    int64_t const blocks = 2 * s.intermediate / kBlock;
    DeviceBuffer<float> scales(rows * blocks);
    quantise_rows(h.get(), rows, 2 * s.intermediate, h8.get(), scales.get());
    sort_scales<<<4096, 256>>>(scales.get(), rows, blocks, pitch, h_scales.get());
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  void quantise_d_o() const {
    quantise_rows(d_o.get(), shape.tokens, shape.hidden, d_o8.get(), d_o_scales.get());
  }
  // x^ of x8, whose place dO8 takes; dx rows lie there afterwards.
  void dequantise_x() const {
    int64_t const d = shape.hidden;
    TESSERA_CUDA(cuda::launch_dequantise_rows_kernel({.gmem_codes = d_o8.get(),
                                                      .gmem_scales = d_o_scales.get(),
                                                      .row_step = d / kBlock,
                                                      .block_step = 1,
                                                      .rows = shape.tokens,
                                                      .width = d,
                                                      .gmem_num_rows = nullptr,
                                                      .gmem_values = dx.get()},
                                                     nullptr));
  }
  void quantise_w_up() const {
    auto args = weights_to_quantise(w_up.get(), 2, shape.intermediate, shape.hidden, shape.experts);
    args.gmem_codes_t = w_up_t.get(), args.gmem_scales_t = w_up_t_scales.get();
    TESSERA_CUDA(cuda::launch_quantise_weights_kernel(args, nullptr));
  }
  void quantise_w_down() const {
    auto args =
        weights_to_quantise(w_down.get(), 1, shape.hidden, shape.intermediate, shape.experts);
    args.gmem_codes_t = w_down_t.get(), args.gmem_scales_t = w_down_t_scales.get();
    TESSERA_CUDA(cuda::launch_quantise_weights_kernel(args, nullptr));
  }

  DownProjectionDgradE4m3Arguments down_e4m3() const {
    return {.gmem_d_o = d_o8.get(),
            .gmem_d_o_scales = d_o_scales.get(),
            .gmem_gather_index = index.get(),
            .gmem_expert_offsets = offsets.get(),
            .gmem_w_down_t = w_down_t.get(),
            .gmem_w_down_t_scales = w_down_t_scales.get(),
            .gmem_scores = scores.get(),
            .gmem_sort_permutation = permutation.get(),
            .gmem_h = h8.get(),
            .gmem_h_scales = h_scales.get(),
            .activation = {.kind = kKind},
            .gmem_dh = dh.get(),
            .gmem_dh8 = dh8.get(),
            .gmem_dh8_scales = dh8_scales.get(),
            .gmem_a_scaled = a_scaled.get(),
            .gmem_ds_partials = partials.get(),
            .rows = rows,
            .hidden = shape.hidden,
            .intermediate = shape.intermediate,
            .experts = shape.experts,
            .gmem_tile_counter = counter.get()};
  }
  void launch_down(DownProjectionDgradE4m3Arguments const& args, int sms) const {
    TESSERA_CUDA(
        (cuda::launch_down_projection_dgrad_e4m3_config<cuda::DownProjectionDgradE4m3Config<kKind>>(
            args, sms, nullptr)));
  }
  void launch_down_e4m3(int sms, bool stores = true) const {
    DownProjectionDgradE4m3Arguments args = down_e4m3();
    if (!stores) {
      args.gmem_dh = args.gmem_dh8 = args.gmem_a_scaled = nullptr;
      args.gmem_dh8_scales = args.gmem_ds_partials = nullptr;
    }
    launch_down(args, sms);
  }
  // Codes of dh over those of h.
  void launch_down_over_h(int sms, uint8_t* gmem_h, float* gmem_h_scales) const {
    DownProjectionDgradE4m3Arguments args = down_e4m3();
    args.gmem_h = args.gmem_dh8 = gmem_h;
    args.gmem_h_scales = args.gmem_dh8_scales = gmem_h_scales;
    launch_down(args, sms);
  }
  UpProjectionDgradE4m3Arguments up_e4m3() const {
    return {.gmem_dh = dh8.get(),
            .gmem_dh_scales = dh8_scales.get(),
            .gmem_expert_offsets = offsets.get(),
            .gmem_w_up_t = w_up_t.get(),
            .gmem_w_up_t_scales = w_up_t_scales.get(),
            .gmem_dx_rows = dx.get(),
            .rows = rows,
            .hidden = shape.hidden,
            .intermediate = shape.intermediate,
            .experts = shape.experts,
            .gmem_tile_counter = counter.get()};
  }
  void launch_up_e4m3(int sms) const {
    TESSERA_CUDA(cuda::launch_up_projection_dgrad_e4m3_config<cuda::UpProjectionDgradE4m3Config>(
        up_e4m3(), sms, nullptr));
  }

  // As the library runs them: no router's part in the rows of dx.
  void launch_down_bf16(int sms) const {
    using cuda::TileWidth;
    int64_t const d = shape.hidden, n = shape.intermediate;
    cuda::DownProjectionDgradArguments const args = {.d_o = {d_o.get(), shape.tokens, d},
                                                     .gmem_gather_index = index.get(),
                                                     .gmem_expert_offsets = offsets.get(),
                                                     .w_down = {.gmem = w_down.get(),
                                                                .expert_stride = d * n,
                                                                .row_stride = n,
                                                                .column_stride = 1,
                                                                .block = d},
                                                     .gmem_scores = scores.get(),
                                                     .gmem_sort_permutation = permutation.get(),
                                                     .gmem_h = h.get(),
                                                     .activation = {.kind = kKind},
                                                     .gmem_dh = dh.get(),
                                                     .gmem_a_scaled = a_scaled.get(),
                                                     .gmem_ds_partials = partials.get(),
                                                     .rows = rows,
                                                     .hidden = d,
                                                     .intermediate = n,
                                                     .experts = shape.experts,
                                                     .gmem_tile_counter = counter.get()};
    using Config =
        cuda::DownProjectionDgradConfig<kKind, Major::kRows, Boxes::kTile, TileWidth::k256>;
    TESSERA_CUDA(cuda::launch_down_projection_dgrad_config<Config>(args, sms, nullptr));
  }
  void launch_up_bf16(int sms) const {
    int64_t const d = shape.hidden, n = shape.intermediate;
    auto const half = [&](int64_t first) {
      return cuda::WeightRows{.gmem = w_up.get() + first * d,
                              .expert_stride = 2 * n * d,
                              .row_stride = d,
                              .column_stride = 1,
                              .block = n};
    };
    cuda::UpProjectionDgradArguments const args = {.gmem_dh = dh.get(),
                                                   .gmem_expert_offsets = offsets.get(),
                                                   .w_up = {half(0), half(n)},
                                                   .gated = true,
                                                   .gmem_dx_rows = dx.get(),
                                                   .rows = rows,
                                                   .hidden = d,
                                                   .intermediate = n,
                                                   .experts = shape.experts,
                                                   .gmem_tile_counter = counter.get()};
    using Config = cuda::UpProjectionDgradConfig<Major::kRows, cuda::RouterPart::kNone>;
    TESSERA_CUDA(cuda::launch_up_projection_dgrad_config<Config>(args, sms, nullptr));
  }

  Shape shape;
  Routing routing;
  int64_t rows, pitch;
  DeviceBuffer<int> offsets, index, permutation, counter;
  DeviceBuffer<float> scores;
  DeviceBuffer<bf16> d_o, h, w_up, w_down, dh, a_scaled, dx;
  DeviceBuffer<float> partials;
  DeviceBuffer<uint8_t> d_o8, h8, dh8, w_up_t, w_down_t;
  DeviceBuffer<float> d_o_scales, h_scales, dh8_scales, w_up_t_scales, w_down_t_scales;
};

// A row of the results, on the host, and what plain kernels make of it.
struct Row {
  std::vector<float> plain, plain_dx;  // dg, du, a' and <t, a>
  std::vector<bf16> dh, a, dx;
  std::vector<float> partials, scales;
  std::vector<uint8_t> codes;
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
    unsigned long long const first = run();
    fetch();
    bool const repeats = run() == first;
    bool const over_h = run_over_h() == first;
    bool right = true;
    for (size_t i = 0; i < rows_.size() && right; ++i) right = accepts(rows_[i], i);
    bool rejects = true;
    for (size_t i = 0; i + 1 < rows_.size(); ++i) {
      Row wrong = rows_[i];
      wrong.plain = rows_[i + 1].plain;
      rejects = rejects && !dh_is_right(wrong) && !a_is_right(wrong) && !ds_is_right(wrong);
      wrong.plain_dx = rows_[i + 1].plain_dx;
      rejects = rejects && !dx_is_right(wrong);
      wrong = rows_[i];
      wrong.codes = rows_[i + 1].codes;
      rejects = rejects && !codes_are_right(wrong);
    }
    std::printf(
        "%s: %zu rows %s, %s, over h %s, other rows %s; largest errors of a row's norm: dh %.2e, "
        "a' %.2e, dx %.2e\n",
        p_.shape.name, rows_.size(), right ? "right" : "WRONG",
        repeats ? "equal bytes" : "OTHER BYTES in a second run",
        over_h ? "equal bytes" : "OTHER BYTES", rejects ? "rejected" : "ACCEPTED", worst_dh_,
        worst_a_, worst_dx_);
    return right && repeats && over_h && rejects;
  }

 private:
  unsigned long long run() const {
    poison();
    p_.launch_down_e4m3(sms_);
    p_.launch_up_e4m3(sms_);
    return sum_of_outputs(p_.dh8.get(), p_.dh8_scales.get());
  }
  unsigned long long run_over_h() const {
    DeviceBuffer<uint8_t> codes(p_.h8.count());
    DeviceBuffer<float> scales(p_.h_scales.count());
    TESSERA_CUDA(cudaMemcpy(codes.get(), p_.h8.get(), p_.h8.count(), cudaMemcpyDeviceToDevice));
    TESSERA_CUDA(cudaMemcpy(scales.get(), p_.h_scales.get(), p_.h_scales.count() * 4,
                            cudaMemcpyDeviceToDevice));
    p_.dh.poison();
    p_.a_scaled.poison();
    p_.partials.poison();
    p_.launch_down_over_h(sms_, codes.get(), scales.get());
    return sum_of_outputs(codes.get(), scales.get());
  }
  void poison() const {
    p_.dh.poison();
    p_.a_scaled.poison();
    p_.dx.poison();
    p_.partials.poison();
    p_.dh8.poison();
    p_.dh8_scales.poison();
  }

  unsigned long long sum_of_outputs(uint8_t const* gmem_codes, float const* gmem_scales) const {
    DeviceBuffer<unsigned long long> sum(std::vector<unsigned long long>{0});
    auto const add = [&](void const* gmem, int64_t bytes) {
      checksum<<<1024, 256>>>(static_cast<uint32_t const*>(gmem), bytes / 4, sum.get());
    };
    add(gmem_codes, p_.dh8.count());
    for (int64_t block = 0; block < 2 * p_.shape.intermediate / kBlock; ++block) {
      add(gmem_scales + block * p_.pitch, p_.rows * 4);  // what is padding differs
    }
    add(p_.dh.get(), p_.dh.count() * 2);
    add(p_.a_scaled.get(), p_.a_scaled.count() * 2);
    add(p_.partials.get(), p_.partials.count() * 4);
    add(p_.dx.get(), p_.dx.count() * 2);
    unsigned long long host = 0;
    TESSERA_CUDA(cudaMemcpy(&host, sum.get(), sizeof host, cudaMemcpyDeviceToHost));
    return host;
  }

  void fetch() {
    int64_t const n = p_.shape.intermediate, d = p_.shape.hidden, blocks = 2 * n / kBlock;
    DeviceBuffer<int> numbers(numbers_);
    auto const grid = unsigned(numbers_.size());
    DeviceBuffer<float> plain(int64_t(grid) * 4 * n), plain_dx(int64_t(grid) * d);
    plain_down_rows<<<grid, 256>>>(p_.down_e4m3(), p_.pitch, numbers.get(), plain.get());
    plain_up_rows<<<grid, 256>>>(p_.up_e4m3(), p_.pitch, numbers.get(), plain_dx.get());
    std::vector<float> const scales = read(p_.dh8_scales.get(), p_.dh8_scales.count());
    for (size_t i = 0; i < numbers_.size(); ++i) {
      int64_t const r = numbers_[i];
      Row row{.plain = read(plain.get() + int64_t(i) * 4 * n, 4 * n),
              .plain_dx = read(plain_dx.get() + int64_t(i) * d, d),
              .dh = read(p_.dh.get() + r * 2 * n, 2 * n),
              .a = read(p_.a_scaled.get() + r * n, n),
              .dx = read(p_.dx.get() + r * d, d),
              .partials = read(p_.partials.get() + r * (n / kBlock), n / kBlock),
              .scales = {},
              .codes = read(p_.dh8.get() + r * 2 * n, 2 * n)};
      for (int64_t b = 0; b < blocks; ++b) row.scales.push_back(scales[b * p_.pitch + r]);
      rows_.push_back(std::move(row));
    }
  }

  // Two roundings to bf16, an error of the sigmoid of 2^-12, and 13 bits of the partial sums.
  static bool is_right(std::vector<bf16> const& have, float const* plain, double& worst) {
    double norm = 0, difference = 0;
    for (size_t c = 0; c < have.size(); ++c) norm += double(plain[c]) * plain[c];
    double const floor = 4e-3 * std::sqrt(norm / double(have.size()));
    for (size_t c = 0; c < have.size(); ++c) {
      double const error = std::fabs(double(widen(have[c])) - plain[c]);
      if (!(error <= std::fabs(plain[c]) * 0x1p-7 + floor)) return false;
      difference += error * error;
    }
    worst = std::max(worst, std::sqrt(difference / norm));
    return true;
  }
  bool dh_is_right(Row const& row) { return is_right(row.dh, row.plain.data(), worst_dh_); }
  bool a_is_right(Row const& row) {
    return is_right(row.a, row.plain.data() + 2 * row.a.size(), worst_a_);
  }
  bool dx_is_right(Row const& row) { return is_right(row.dx, row.plain_dx.data(), worst_dx_); }
  bool ds_is_right(Row const& row) const {
    size_t const n = row.a.size();
    for (size_t b = 0; b < n / kBlock; ++b) {
      double sum = 0, squares = 0;
      for (size_t c = b * kBlock; c < (b + 1) * kBlock; ++c) {
        double const term = row.plain[3 * n + c];
        sum += term;
        squares += term * term;
      }
      if (!(std::fabs(row.partials[b] - sum) <= 1e-2 * std::sqrt(squares))) return false;
    }
    return true;
  }
  static bool codes_are_right(Row const& row) {
    return bench::codes_are_right(row.dh, row.codes, row.scales);
  }

  bool accepts(Row const& row, size_t i) {
    bool const dh = dh_is_right(row), codes = codes_are_right(row), a = a_is_right(row);
    bool const ds = ds_is_right(row), dx = dx_is_right(row);
    if (dh && codes && a && ds && dx) return true;
    auto const word = [](bool right) { return right ? "right" : "WRONG"; };
    std::printf("row %d: dh %s, its codes %s, a' %s, ds %s, dx %s\n", numbers_[i], word(dh),
                word(codes), word(a), word(ds), word(dx));
    return false;
  }

  Problem const& p_;
  int sms_;
  std::vector<int> numbers_;
  std::vector<Row> rows_;
  double worst_dh_ = 0, worst_a_ = 0, worst_dx_ = 0;
};

bool bench_shape(Shape const& s, int iters, int sms, std::string& rows) {
  Problem const p(s);
  bool const checked = Check(p, sms).passes();
  double const flops = 2.0 * double(p.rows) * s.intermediate * s.hidden;
  double const h_bytes = double(p.h.count()), x = double(p.d_o.count());
  double const down_bytes =
      h_bytes * (2 * 33.0 / 32 + 2 + 1) + x * 33 / 32 + double(p.w_down_t.count());
  std::vector<Candidate> candidates = {
      {"down bf16", flops, 0, [&] { p.launch_down_bf16(sms); }, {}},
      {"down e4m3", flops, down_bytes, [&] { p.launch_down_e4m3(sms); }, {}},
      {"down e4m3, nothing stored", flops, 0, [&] { p.launch_down_e4m3(sms, false); }, {}},
      {"up bf16", 2 * flops, 0, [&] { p.launch_up_bf16(sms); }, {}},
      {"up e4m3", 2 * flops, 0, [&] { p.launch_up_e4m3(sms); }, {}},
      {"quantise dO", 0, 3.03 * x, [&] { p.quantise_d_o(); }, {}},
      {"dequantise x", 0, 3.03 * x, [&] { p.dequantise_x(); }, {}},
      {"quantise w_up^T", 0, 3.0 * double(p.w_up.count()), [&] { p.quantise_w_up(); }, {}},
      {"quantise w_down^T", 0, 3.0 * double(p.w_down.count()), [&] { p.quantise_w_down(); }, {}}};
  report(s, "backward", candidates, iters, checked, rows);
  return checked;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  return run(argc, argv, bench_shape);
}

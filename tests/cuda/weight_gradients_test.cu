// SPDX-License-Identifier: Apache-2.0
// Weight gradients in every layout, type and mode, against sums of small integers, which no order and no rounding of
// fp32 can change: all of dw's buffer, with what lies between its elements. Few SMs, so that a CTA's tiles follow each
// other and what it keeps of one meets k loops of any length.
#include <cstdio>
#include <string>
#include <vector>

#include "layer.cuh"
#include "src/cuda/host/projection_backward.hpp"

namespace tessera::cuda_test {
namespace {

using cuda::WeightRows;

constexpr int64_t kTokens = 96;
constexpr int64_t kTail = 64;  // elements behind dw, never written

struct Case {
  char const* name;
  int64_t hidden, intermediate;
  int halves;
  std::vector<int32_t> rows;  // of each expert
  WeightRows dw[2];  // gmem: elements from the buffer's start, plus one; 0: nobody wants the half
  int64_t elements;  // of the buffer
};

// Element `at` of the buffer is a half's first.
void const* first(int64_t at) { return reinterpret_cast<void const*>(at + 1); }

Case concat(char const* name, int64_t d, int64_t n, std::vector<int32_t> rows) {
  auto const experts = static_cast<int64_t>(rows.size());
  WeightRows const dw{.gmem = first(0),
                      .expert_stride = 2 * n * d,
                      .row_stride = d,
                      .column_stride = 1,
                      .block = n};
  Case out{name, d, n, 2, std::move(rows), {dw, dw}, experts * 2 * n * d};
  out.dw[1].gmem = first(n * d);
  return out;
}

Case interleaved(char const* name, int64_t d, int64_t n, std::vector<int32_t> rows) {
  Case out = concat(name, d, n, std::move(rows));
  for (WeightRows& dw : out.dw) dw.row_stride = 2 * d;
  out.dw[1].gmem = first(d);
  return out;
}

Case blocked(char const* name, int64_t d, int64_t n, int64_t block, std::vector<int32_t> rows) {
  Case out = concat(name, d, n, std::move(rows));
  for (WeightRows& dw : out.dw) {
    dw.block = block;
    dw.block_stride = 2 * block * d;
  }
  out.dw[1].gmem = first(block * d);
  return out;
}

Case transposed(char const* name, int64_t d, int64_t n, std::vector<int32_t> rows) {
  Case out = concat(name, d, n, std::move(rows));
  for (WeightRows& dw : out.dw) {
    dw.row_stride = 1;
    dw.column_stride = 2 * n;
  }
  out.dw[1].gmem = first(n);
  return out;
}

// One half, as dw_down lies: (E,d,n), with a gap behind each row.
Case one_half(char const* name, int64_t d, int64_t n, std::vector<int32_t> rows) {
  Case out = concat(name, d, n, std::move(rows));
  out.halves = 1;
  out.dw[0].expert_stride = d * (n + 8);
  out.dw[0].row_stride = 1;
  out.dw[0].column_stride = n + 8;
  out.elements = static_cast<int64_t>(out.rows.size()) * d * (n + 8);
  return out;
}

std::vector<Case> cases() {
  // k loops without rows, and of 1 to 20 k_tiles.
  std::vector<int32_t> const uneven{0, 1, 64, 65, 700, 0, 130, 17, 0, 1270, 0};
  std::vector<Case> out;
  out.push_back(concat("concat", 200, 192, uneven));
  out.push_back(concat("concat, n = 64", 136, 64, uneven));
  out.push_back(concat("concat, no multiple of 64", 72, 40, uneven));
  out.push_back(concat("concat, wide", 392, 320, {300, 0, 257}));
  out.push_back(interleaved("interleaved", 200, 128, uneven));
  out.push_back(blocked("blocks of 16", 200, 192, 16, uneven));
  out.push_back(blocked("blocks of 64", 136, 192, 64, uneven));
  out.push_back(blocked("blocks of 128", 136, 256, 128, uneven));
  out.push_back(transposed("transposed", 200, 192, uneven));
  out.push_back(transposed("transposed, no multiple of 64", 136, 72, uneven));
  out.push_back(one_half("one half", 264, 192, uneven));
  out.push_back(one_half("one half, wide", 144, 512, {0, 190, 640}));
  out.push_back(concat("up alone", 136, 192, uneven));
  out.back().dw[0].gmem = nullptr;
  out.push_back(concat("gate alone", 136, 64, uneven));
  out.back().dw[1].gmem = nullptr;
  out.push_back(concat("strides of two kinds", 136, 128, uneven));
  out.back().dw[1].row_stride = 144;
  for (WeightRows& dw : out.back().dw) dw.expert_stride += 128 * 8;
  out.back().elements += static_cast<int64_t>(uneven.size()) * 128 * 8;
  return out;
}

int small_integer(int64_t i, int seed) {
  return static_cast<int>((static_cast<uint64_t>(i) * 2654435761u + seed * 40503u) >> 7) % 5 - 2;
}

std::vector<__nv_bfloat16> small_integers(int64_t count, int64_t numbers, int seed) {
  std::vector<__nv_bfloat16> out(static_cast<size_t>(count), __float2bfloat16(NAN));
  for (int64_t i = 0; i < numbers; ++i) {
    out[i] = __float2bfloat16(static_cast<float>(small_integer(i, seed)));
  }
  return out;
}

class Gradients {
 public:
  explicit Gradients(Case const& c) : c_(c) {
    offsets_ = {0};
    for (int32_t const r : c.rows) offsets_.push_back(offsets_.back() + r);
    rows_ = offsets_.back();
    capacity_ = rows_ + 70;
    for (int64_t r = 0; r < capacity_; ++r) {
      index_.push_back(static_cast<int32_t>((r * 37 + r / 5) % kTokens));
    }
    left_ = small_integers(kTokens * c.hidden, kTokens * c.hidden, 1);
    int64_t const width = c.halves * c.intermediate;
    right_ = small_integers(capacity_ * width, rows_ * width, 2);
    add_up();
  }

  template <class Element>
  void check(bool accumulates, int sm_count) const {
    bool constexpr kFp32 = std::is_same_v<Element, float>;
    std::vector<Element> expected(static_cast<size_t>(c_.elements + kTail));
    for (size_t i = 0; i < expected.size(); ++i) {
      expected[i] = Element(static_cast<float>(small_integer(static_cast<int64_t>(i), 3)));
    }
    DeviceBuffer const dw(expected), left(left_), right(right_), offsets(offsets_), index(index_),
        counter(std::vector<int32_t>{0});
    for (Sum const& sum : sums_) {
      if (accumulates && !sum.has_rows) continue;
      float const old = accumulates ? static_cast<float>(expected[sum.at]) : 0.0f;
      expected[sum.at] = Element(old + sum.value);
    }
    cuda::UpProjectionWgradArguments args;
    args.left = {left.as<void>(), kTokens, c_.hidden};
    args.gmem_gather_index = index.as<int32_t>();
    args.gmem_expert_offsets = offsets.as<int32_t>();
    args.gmem_right = right.as<void>();
    args.halves = c_.halves;
    for (int half = 0; half < c_.halves; ++half) {
      args.dw[half] = c_.dw[half];
      if (c_.dw[half].gmem != nullptr) args.dw[half].gmem = dw.as<Element>() + start(half);
    }
    args.is_fp32 = kFp32;
    args.accumulates = accumulates;
    args.rows = capacity_;
    args.hidden = c_.hidden;
    args.intermediate = c_.intermediate;
    args.experts = static_cast<int32_t>(c_.rows.size());
    args.gmem_tile_counter = counter.as<int32_t>();
    require(cuda::launch_up_projection_wgrad(args, sm_count, nullptr), c_.name);
    require(cudaDeviceSynchronize(), c_.name);
    std::vector<Element> const found = dw.values<Element>();
    int64_t different = 0;
    for (size_t i = 0; i < found.size(); ++i) {
      if (static_cast<float>(found[i]) == static_cast<float>(expected[i])) continue;
      if (++different == 1) {
        std::printf("%s, %s, %s, %d SMs: element %zu is %g, not %g\n", c_.name,
                    kFp32 ? "fp32" : "bf16", accumulates ? "added" : "written", sm_count, i,
                    static_cast<double>(static_cast<float>(found[i])),
                    static_cast<double>(static_cast<float>(expected[i])));
      }
    }
    EXPECT(different == 0);
  }

 private:
  struct Sum {
    size_t at;  // in the buffer
    float value;
    bool has_rows;
  };

  int64_t start(int half) const { return reinterpret_cast<int64_t>(c_.dw[half].gmem) - 1; }

  void add_up() {
    int64_t const d = c_.hidden, n = c_.intermediate;
    std::vector<int> sum(static_cast<size_t>(d));
    for (int64_t e = 0; e < static_cast<int64_t>(c_.rows.size()); ++e) {
      for (int half = 0; half < c_.halves; ++half) {
        if (c_.dw[half].gmem == nullptr) continue;
        for (int64_t i = 0; i < n; ++i) {
          std::fill(sum.begin(), sum.end(), 0);
          for (int64_t r = offsets_[e]; r < offsets_[e + 1]; ++r) {
            int const b = small_integer((r * c_.halves + half) * n + i, 2);
            for (int64_t c = 0; c < d; ++c) sum[c] += b * small_integer(index_[r] * d + c, 1);
          }
          for (int64_t c = 0; c < d; ++c) {
            int64_t const at =
                start(half) + c_.dw[half].row_offset(e, i) + c * c_.dw[half].column_stride;
            sums_.push_back({static_cast<size_t>(at), static_cast<float>(sum[c]),
                             offsets_[e] != offsets_[e + 1]});
          }
        }
      }
    }
  }

  Case const& c_;
  std::vector<int32_t> offsets_, index_;
  int64_t rows_ = 0, capacity_ = 0;
  std::vector<__nv_bfloat16> left_, right_;
  std::vector<Sum> sums_;
};

int run() {
  if (!has_device()) return kSkipped;
  cudaDeviceProp properties;
  require(cudaGetDeviceProperties(&properties, 0), "properties");
  if (properties.major != 9 || properties.minor != 0) {
    std::printf(
        "skipped: GEMM kernels are for compute capability 9.0, this GPU has %d.%d; run on a Hopper "
        "GPU\n",
        properties.major, properties.minor);
    return kSkipped;
  }
  for (Case const& c : cases()) {
    Gradients const gradients(c);
    for (int const sms : {1, 3, properties.multiProcessorCount}) {
      for (bool const accumulates : {false, true}) {
        gradients.check<float>(accumulates, sms);
        gradients.check<__nv_bfloat16>(accumulates, sms);
      }
    }
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda_test

int main() { return tessera::cuda_test::run(); }

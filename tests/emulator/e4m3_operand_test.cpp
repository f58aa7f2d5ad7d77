// SPDX-License-Identifier: Apache-2.0
// An operand of another element than bf16 takes an addition (e4m3_rows.cuh) and a configuration: the GEMM of one GPU
// and its plain twin read a in e4m3, and give the bits of bf16 rows of the same values.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "cuda/kernels/down_projection_fwd.cuh"
#include "cuda/plain/down_projection_fwd.cuh"
#include "tests/emulator/e4m3_rows.cuh"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::cuda {
namespace {

using core::E4m3;
using emulator::Bits;
using emulator::Memory;
using gemm::Element;

// The names of kernels' configurations.
template <Element kStored>
struct DownOfGathered {
  static constexpr gemm::GemmConfig gemm{
      .a = {.stored = kStored, .loader = gemm::Loader::kGather},
      .epilogue = {.mode = gemm::EpilogueMode::kDeferred},
  };
};
static_assert(gemm::valid(DownOfGathered<Element::kE4m3>::gemm));
// Bytes of memory are those of e4m3, bytes of stages those of bf16.
static_assert(DownOfGathered<Element::kE4m3>::gemm.a_tile_bytes() ==
              DownOfGathered<Element::kBf16>::gemm.a_tile_bytes());
static_assert(gemm::Operand{.element = Element::kE4m3}.bytes(64, 128) == 64 * 128);

constexpr int kHidden = 264, kIntermediate = 144, kExperts = 4;
constexpr std::array<std::int32_t, kExperts + 1> kOffsets{0, 70, 70, 199, 200};
constexpr int kRows = kOffsets[kExperts];

struct Case {
  Memory<E4m3> codes{kRows * kIntermediate};
  Memory<Bits> decoded{kRows * kIntermediate};
  Memory<Bits> w{std::int64_t{kExperts} * kHidden * kIntermediate};
  Memory<std::int32_t> counter{1, 0};

  Case() {
    for (int i = 0; i < kRows * kIntermediate; ++i) {
      // All codes but those of NaN, which would hide whatever is in its row.
      int const code = i * 37 % 254;
      codes[i] = {static_cast<std::uint8_t>(code < 127 ? code : code + 1)};
      decoded[i] = emulator::round(core::to_fp32(codes[i]));
    }
    emulator::fill(w.get(), static_cast<std::int64_t>(w.size()), 1, 0.25f);
  }

  DownProjectionFwdArguments arguments(void const* gmem_a, Bits* gmem_y) const {
    DownProjectionFwdArguments args = {};
    args.gmem_a = gmem_a;
    args.gmem_expert_offsets = kOffsets.data();
    args.w_down = {.gmem = w.get(),
                   .expert_stride = kHidden * kIntermediate,
                   .row_stride = kIntermediate,
                   .column_stride = 1,
                   .block = kHidden};
    args.gmem_y = gmem_y;
    args.rows = kRows;
    args.hidden = kHidden;
    args.intermediate = kIntermediate;
    args.experts = kExperts;
    args.gmem_tile_counter = counter.get();
    return args;
  }
};

std::vector<Bits> bits_of(Memory<Bits> const& y) { return {y.get(), y.get() + y.size()}; }

std::vector<Bits> wanted(Case const& c) {
  std::vector<Bits> y;
  int expert = 0;
  for (int r = 0; r < kRows; ++r) {
    while (r >= kOffsets[static_cast<std::size_t>(expert) + 1]) ++expert;
    for (int i = 0; i < kHidden; ++i) {
      y.push_back(emulator::round(emulator::dot(
          &c.decoded[r * kIntermediate], &c.w[(std::int64_t{expert} * kHidden + i) * kIntermediate],
          kIntermediate)));
    }
  }
  return y;
}

template <Element kStored>
std::vector<Bits> run_gemm(Case const& c, void const* gmem_a, emulator::Schedule const& schedule) {
  Memory<Bits> y(kRows * kHidden);
  EXPECT_EQ(launch_down_projection_fwd_config<DownOfGathered<kStored>>(c.arguments(gmem_a, y.get()),
                                                                       2, nullptr),
            cudaSuccess);
  EXPECT_EQ(emulator::run(schedule), "") << "seed " << schedule.seed;
  return bits_of(y);
}

template <class A>
std::vector<Bits> run_plain(Case const& c, void const* gmem_a) {
  Memory<Bits> y(kRows * kHidden);
  EXPECT_EQ(plain::launch(&down_projection_fwd_plain<A>, kRows * kHidden, nullptr,
                          c.arguments(gmem_a, y.get())),
            cudaSuccess);
  EXPECT_EQ(emulator::run({}), "");
  return bits_of(y);
}

TEST(E4m3Operand, GemmDecodesOnLoad) {
  Case const c;
  std::vector<Bits> const y = wanted(c);
  for (emulator::Schedule const& schedule :
       {emulator::Schedule{.seed = 1}, {.seed = 2, .burst = 64}, {.seed = 3, .copies = 256}}) {
    EXPECT_EQ(run_gemm<Element::kE4m3>(c, c.codes.get(), schedule), y) << schedule.seed;
    EXPECT_EQ(run_gemm<Element::kBf16>(c, c.decoded.get(), schedule), y) << schedule.seed;
  }
}

TEST(E4m3Operand, PlainTwinDecodesOnLoad) {
  Case const c;
  std::vector<Bits> const y = wanted(c);
  EXPECT_EQ(run_plain<E4m3>(c, c.codes.get()), y);
  EXPECT_EQ(run_plain<__nv_bfloat16>(c, c.decoded.get()), y);
}

}  // namespace
}  // namespace tessera::cuda

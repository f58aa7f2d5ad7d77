// SPDX-License-Identifier: Apache-2.0
// The emulator's tensor memory against plain loops, by operands that the test writes by formulas of its own; and every
// mistake that it claims to report, made in a kernel that is right without it.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/arch/cp_async.cuh"
#include "cuda/arch/sm100/tcgen05_alloc.cuh"
#include "cuda/arch/sm100/tcgen05_descriptor.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/sm100/decode.hpp"

namespace tessera::emulator {
namespace {

using namespace cuda::arch;

enum class Mistake {
  none,
  loads_early,
  no_fence_after,
  no_wait_ld,
  no_fence_before,
  no_arrival_wait,
  no_proxy_fence,
  never_freed,
  freed_early,
  freed_twice,
  odd_columns,
  too_many_columns,
  alloc_behind_relinquish,
  alloc_without_room,
  lanes_of_another_warp,
  all_lanes_issue,
  one_arrival_too_many_awaited,
  no_commit,
  version,
  leading_and_stride,
  major,
  adds_to_nothing,
  both_groups,
  not_allocated,
  peer_issues,
  commit_to_one,
  reserved_bit,
  m_of_one,
  scale_byte,
  scales_reused,
  scales_behind,
  scales_of_another,
  scales_swizzled,
  scales_in_lanes,
  scales_under_d,
  peer_ends,
  peer_not_awaited,
  copies_not_fenced,
  relay_without_fence,
};

struct Case {
  int ctas = 1, m = 128, n = 256;
  bool mx = false, b_rows_major = false;
  bool copied = false;  // operands come by cp.async
  Mistake mistake = Mistake::none;
};

// Operands of a tile with four steps of k, and what it should give.
struct Tile {
  int m, n, k, bytes;
  std::vector<std::uint16_t> a, b;               // codes, (m, k) and (n, k)
  std::vector<std::uint8_t> a_scales, b_scales;  // (m, 4) and (n, 4)
  std::vector<float> wanted;

  explicit Tile(Case const& c) : m(c.m), n(c.n), k(c.mx ? 128 : 64), bytes(c.mx ? 1 : 2) {
    std::mt19937 rng(7);
    auto const codes = [&](int count) {
      std::vector<std::uint16_t> v(static_cast<std::size_t>(count));
      // bf16 of a few bits, so that sums are exact; e4m3 without NaN.
      for (auto& code : v) {
        code = static_cast<std::uint16_t>(c.mx ? rng() % 0x7f + (rng() % 2) * 0x80
                                               : 0x3f80 + (rng() % 16) * 8 + (rng() % 2) * 0x8000);
      }
      return v;
    };
    a = codes(m * k);
    b = codes(n * k);
    a_scales.resize(static_cast<std::size_t>(m * 4));
    b_scales.resize(static_cast<std::size_t>(n * 4));
    for (auto& s : a_scales) s = static_cast<std::uint8_t>(120 + rng() % 16);
    for (auto& s : b_scales) s = static_cast<std::uint8_t>(120 + rng() % 16);
    auto const value = [&](std::uint16_t code) {
      if (c.mx) return decode_e4m3(static_cast<std::uint8_t>(code));
      return __uint_as_float(std::uint32_t{code} << 16);
    };
    for (int row = 0; row < m; ++row) {
      for (int column = 0; column < n; ++column) {
        float sum = 0;
        for (int step = 0; step < 4; ++step) {
          float part = 0;
          for (int i = step * k / 4; i < (step + 1) * k / 4; ++i) {
            float const product = value(at(a, row, i)) * value(at(b, column, i));
            (c.mx ? part : sum) += product;
          }
          if (c.mx) {
            int const exponent = a_scales[static_cast<std::size_t>(row * 4 + step)] +
                                 b_scales[static_cast<std::size_t>(column * 4 + step)] - 254;
            sum += part * std::ldexp(1.0f, exponent);
          }
        }
        wanted.push_back(sum);
      }
    }
  }
  std::uint16_t at(std::vector<std::uint16_t> const& v, int row, int i) const {
    return v[static_cast<std::size_t>(row * k + i)];
  }
};

constexpr std::uint32_t kA = 0, kB = 32 * 1024, kAScales = 64 * 1024, kBScales = 65 * 1024,
                        kOperandBytes = 68 * 1024, kBarriers = 80 * 1024;

struct Shared {
  Mbarrier done, empty, gathered, full;
  std::uint32_t tensor;
};

// The share of CTA `rank`, by 128 threads. store_code(address, bytes, code)
template <class Store>
void write_operands(Tile const& t, Case const& c, int rank, int thread, Store store_code) {
  int const rows_a = t.m / c.ctas, rows_b = t.n / c.ctas;
  int const chunk = 16 / t.bytes;
  for (int row = thread; row < rows_a; row += 128) {
    for (int i = 0; i < t.k; ++i) {
      auto const at =
          static_cast<std::uint32_t>(row * 128 + (i / chunk ^ row % 8) * 16 + i % chunk * t.bytes);
      store_code(kA + at, t.bytes, t.at(t.a, rank * rows_a + row, i));
    }
    auto const at = static_cast<std::uint32_t>(row % 32 * 16 + row / 32 * 4);
    for (int s = 0; s < 4; ++s) {
      store_code(kAScales + at + static_cast<std::uint32_t>(s), 1,
                 t.a_scales[static_cast<std::size_t>((rank * rows_a + row) * 4 + s)]);
    }
  }
  for (int row = thread; row < rows_b; row += 128) {
    for (int i = 0; i < t.k; ++i) {
      int const at = c.b_rows_major
                         ? row / 64 * 8192 + i * 128 + (row % 64 / 8 ^ i % 8) * 16 + row % 8 * 2
                         : row * 128 + (i / chunk ^ row % 8) * 16 + i % chunk * t.bytes;
      store_code(kB + static_cast<std::uint32_t>(at), t.bytes, t.at(t.b, rank * rows_b + row, i));
    }
  }
  for (int row = thread; row < t.n; row += 128) {  // of all rows of B in both CTAs
    int const at = row / 128 * 512 + row % 32 * 16 + row % 128 / 32 * 4;
    for (int s = 0; s < 4; ++s) {
      store_code(kBScales + static_cast<std::uint32_t>(at + s), 1,
                 t.b_scales[static_cast<std::size_t>(row * 4 + s)]);
    }
  }
}

void store_in_shared(std::uint32_t at, int bytes, std::uint16_t code) {
  if (bytes == 2) store_shared(at, code);
  if (bytes == 1) store_shared(at, static_cast<std::uint8_t>(code));
}

// Shared memory as write_operands() leaves it.
std::vector<unsigned char> image_of(Tile const& t, Case const& c, int rank) {
  std::vector<unsigned char> image(kOperandBytes);
  for (int thread = 0; thread < 128; ++thread) {
    write_operands(t, c, rank, thread, [&](std::uint32_t at, int bytes, std::uint16_t code) {
      std::memcpy(&image[at], &code, static_cast<std::size_t>(bytes));
    });
  }
  return image;
}
using Images = std::vector<std::vector<unsigned char>>;

template <int kCtas>
void sync() {
  if constexpr (kCtas == 2) {
    cluster_sync();
  } else {
    __syncthreads();
  }
}

template <int kCtas>
void multiply_steps(Case const& c, std::uint32_t tensor) {
  MmaOperand b = c.b_rows_major ? rows_major_boxes(kB) : k_major_tile(kB);
  if (c.mistake == Mistake::leading_and_stride) std::swap(b.leading_bytes, b.stride_bytes);
  std::uint64_t b_bits = b.bits();
  if (c.mistake == Mistake::version) b_bits &= ~(std::uint64_t{1} << 46);
  std::uint32_t const b_step = c.b_rows_major ? kRowsMajorStepBytes : kKMajorStepBytes;
  std::uint32_t const d = c.mistake != Mistake::not_allocated ? tensor : tensor >= 64 ? 0 : 448;
  std::uint32_t const under = c.mistake == Mistake::scales_under_d ? 64 : 256;
  std::uint32_t const a_scales = tensor + under, b_scales = tensor + 260;
  MmaOperand a_atom = scale_atom(kAScales);
  if (c.mistake == Mistake::scales_swizzled) a_atom.swizzle = MmaSwizzle::k128;
  if (c.mx) {
    if (c.mistake != Mistake::scales_behind) tcgen05_cp_scales<kCtas>(a_scales, a_atom.bits());
    tcgen05_cp_scales<kCtas>(b_scales, scale_atom(kBScales).bits());
    if (c.n > 128) tcgen05_cp_scales<kCtas>(b_scales + 4, scale_atom(kBScales + 512).bits());
  }
  for (int step = 0; step < 4; ++step) {
    auto const s = static_cast<std::uint32_t>(step);
    std::uint32_t const accumulate = c.mistake == Mistake::adds_to_nothing ? 1 : s;
    std::uint64_t const a = plus(k_major_tile(kA).bits(), s * kKMajorStepBytes);
    if (c.mx) {
      Mxf8Mma const instruction{.m = c.m,
                                .n = c.n,
                                .a_scale_byte = step,
                                .b_scale_byte = c.mistake == Mistake::scale_byte ? 0 : step};
      std::uint32_t const own = c.mistake == Mistake::scales_of_another ? a_scales + 8
                                : c.mistake == Mistake::scales_in_lanes ? a_scales + tensor_lane(32)
                                                                        : a_scales;
      tcgen05_mma_mxf8<kCtas>(d, a, plus(b_bits, s * b_step), instruction.bits(), own, b_scales,
                              accumulate);
    } else {
      bool const rows_major = c.b_rows_major != (c.mistake == Mistake::major);
      Bf16Mma const instruction{.m = c.mistake == Mistake::m_of_one ? 64 : c.m,
                                .n = c.n,
                                .b_major = rows_major ? MmaMajor::kRows : MmaMajor::kK};
      std::uint32_t const bits =
          instruction.bits() | (c.mistake == Mistake::reserved_bit ? 1u << 29 : 0);
      tcgen05_mma_bf16<kCtas>(d, a, plus(b_bits, s * b_step), bits, accumulate);
    }
  }
  if (c.mistake == Mistake::scales_reused || c.mistake == Mistake::scales_behind) {
    tcgen05_cp_scales<kCtas>(a_scales, scale_atom(kAScales).bits());
  }
}

template <int kCtas>
void allocate(Case const& c, Shared& smem) {
  if (c.mistake == Mistake::odd_columns) tcgen05_alloc<kCtas>(&smem.tensor, 96);
  if (c.mistake == Mistake::too_many_columns) tcgen05_alloc<kCtas>(&smem.tensor, 1024);
  if (c.mistake == Mistake::alloc_behind_relinquish) tcgen05_relinquish<kCtas>();
  tcgen05_alloc<kCtas>(&smem.tensor, c.mistake == Mistake::not_allocated ? 256 : 512);
  if (c.mistake == Mistake::alloc_without_room) tcgen05_alloc<kCtas>(&smem.tensor, 32);
  if (c.mistake == Mistake::both_groups) {
    tcgen05_relinquish<3 - kCtas>();
  } else {
    tcgen05_relinquish<kCtas>();
  }
}

// cp.async arrives at a barrier of its own CTA. One CTA: who multiplies waits there and fences. A pair: a relay in each
// CTA waits, fences and arrives in CTA 0, where who multiplies waits for both.
template <int kCtas>
void bring_operands(Case const& c, Shared& smem, std::vector<unsigned char> const& image) {
  if (warp_idx() != 4) {
    for (std::uint32_t at = threadIdx.x * 16; at < kOperandBytes; at += 128 * 16) {
      cp_async_16(at, &image[at], 16);
    }
    cp_async_arrive(&smem.gathered);
    return;
  }
  mbarrier_wait(&smem.gathered, 0);
  if constexpr (kCtas == 1) {
    if (c.mistake != Mistake::copies_not_fenced) fence_proxy_async_shared();
  } else {
    if (elect_one()) {
      if (c.mistake == Mistake::relay_without_fence) {
        mbarrier_arrive_cluster(&smem.full, 0);
      } else {
        relay_arrive(&smem.full, 0);
      }
    }
    __syncwarp();
    if (cluster_cta_rank() == 0) pair_wait(&smem.full, 0);
  }
}

// Multiplies the tile twice into the same columns; `out` gets both.
template <int kCtas>
void kernel(Case const& c, Tile const& t, Images const& images, std::vector<float>* out) {
  auto& smem = *reinterpret_cast<Shared*>(shared_memory() + kBarriers);
  int const warp = warp_idx(), rank = kCtas == 2 ? static_cast<int>(cluster_cta_rank()) : 0;
  Mistake const mistake = c.mistake;
  if (threadIdx.x == 0) {
    mbarrier_init(&smem.done, mistake == Mistake::one_arrival_too_many_awaited ? 2 : 1);
    mbarrier_init(&smem.empty, 4 * kCtas);
    mbarrier_init(&smem.gathered, 128);
    mbarrier_init(&smem.full, kCtas);
  }
  if (warp == 4) {
    allocate<kCtas>(c, smem);
  } else if (!c.copied) {
    write_operands(t, c, rank, static_cast<int>(threadIdx.x), store_in_shared);
    if (mistake != Mistake::no_proxy_fence) fence_proxy_async_shared();
  }
  tcgen05_fence_before();
  sync<kCtas>();
  tcgen05_fence_after();
  if (c.copied) bring_operands<kCtas>(c, smem, images[static_cast<std::size_t>(rank)]);
  std::uint32_t const tensor = smem.tensor;
  bool const issues = rank == (mistake == Mistake::peer_issues ? 1 : 0);
  for (std::uint32_t round = 0; round < 2; ++round) {
    if (warp == 4 && issues) {
      if (round == 1) {
        if (mistake != Mistake::no_arrival_wait) mbarrier_wait(&smem.empty, 0);
        tcgen05_fence_after();
      }
      if (mistake == Mistake::all_lanes_issue || elect_one()) {
        multiply_steps<kCtas>(c, tensor);
        if (mistake == Mistake::commit_to_one) {
          tcgen05_commit<1>(&smem.done);
        } else if (mistake != Mistake::no_commit) {
          tcgen05_commit<kCtas>(&smem.done);
        }
      }
      __syncwarp();
    } else if (warp < 4) {
      if (mistake != Mistake::loads_early) mbarrier_wait(&smem.done, round);
      if (mistake != Mistake::no_fence_after) tcgen05_fence_after();
      int const lanes = (warp + (mistake == Mistake::lanes_of_another_warp ? 1 : 0)) % 4 * 32;
      int const columns = kCtas == 2 && c.m == 128 ? c.n / 2 : c.n;
      for (int column = 0; column < columns; column += 32) {
        std::uint32_t r[32];
        tcgen05_ld_rows(r, tensor + tensor_lane(lanes) + static_cast<std::uint32_t>(column));
        if (mistake != Mistake::no_wait_ld) tcgen05_wait_ld();
        for (int i = 0; i < 32; ++i) {
          int const lane = lanes + lane_idx();
          // The test's own table: rows of a CTA, or 64 rows whose right half takes the upper lanes.
          bool const halves = kCtas == 2 && c.m == 128;
          int const row = halves ? rank * 64 + lane % 64 : rank * 128 + lane;
          int const n = column + i + (halves ? lane / 64 * (c.n / 2) : 0);
          out[round][static_cast<std::size_t>(row * c.n + n)] = __uint_as_float(r[i]);
        }
      }
      if (mistake != Mistake::no_fence_before) tcgen05_fence_before();
      __syncwarp();
      if (lane_idx() == 0) mbarrier_arrive_cluster(&smem.empty, 0);
    }
  }
  if (mistake == Mistake::freed_early && warp == 4) tcgen05_free<kCtas>(tensor, 512);
  if (mistake == Mistake::peer_ends && rank == 1) return;
  tcgen05_fence_before();
  if (mistake == Mistake::peer_not_awaited) {
    __syncthreads();
  } else {
    sync<kCtas>();
  }
  tcgen05_fence_after();
  if (warp == 4 && mistake != Mistake::never_freed) {
    tcgen05_free<kCtas>(tensor, mistake == Mistake::not_allocated ? 256 : 512);
    if (mistake == Mistake::freed_twice) tcgen05_free<kCtas>(tensor, 512);
  }
}

// What the emulator says, or how D is wrong.
std::string outcome(Case const& c, Schedule const& schedule) {
  Tile const tile(c);
  std::vector<float> out[2];
  for (auto& round : out) round.resize(tile.wanted.size(), std::nanf(""));
  Images images;
  for (int rank = 0; rank < c.ctas; ++rank) images.push_back(image_of(tile, c, rank));
  launch(static_cast<unsigned>(c.ctas), static_cast<unsigned>(c.ctas), 160, 100 * 1024, [&] {
    if (c.ctas == 1) kernel<1>(c, tile, images, out);
    if (c.ctas == 2) kernel<2>(c, tile, images, out);
  });
  std::string said = run(schedule);
  for (int round = 0; round < 2 && said.empty(); ++round) {
    if (out[round] != tile.wanted) said = "D is wrong";
  }
  return said;
}

void expect_right(Case const& c) {
  for (Schedule const& schedule : kSchedules) {
    EXPECT_EQ(outcome(c, schedule), "") << c.ctas << " CTAs, " << c.m << " x " << c.n;
  }
}

TEST(TensorMemory, OneCtaMultipliesBf16) {
  expect_right({});
  expect_right({.n = 64});
  expect_right({.b_rows_major = true});
}

TEST(TensorMemory, APairMultipliesBf16) {
  expect_right({.ctas = 2, .m = 256});
  expect_right({.ctas = 2, .m = 256, .b_rows_major = true});
  expect_right({.ctas = 2, .m = 128});
}

TEST(TensorMemory, ScaledOperandsOf8Bits) {
  expect_right({.n = 128, .mx = true});
  expect_right({.ctas = 2, .m = 256, .n = 128, .mx = true});
  expect_right({.ctas = 2, .m = 256, .n = 256, .mx = true});
}

TEST(TensorMemory, OperandsThatCpAsyncBrings) {
  expect_right({.copied = true});
  expect_right({.ctas = 2, .m = 256, .copied = true});
}

// In every schedule, as what is reported is what a kernel may rely on, not what has happened.
void expect_said(Mistake mistake, std::string const& said, Case c = {}) {
  c.mistake = mistake;
  for (Schedule const& schedule : kSchedules) {
    std::string const got = outcome(c, schedule);
    EXPECT_NE(got.find(said), std::string::npos)
        << static_cast<int>(mistake) << ", seed " << schedule.seed << ": " << got;
  }
}

TEST(TensorMemory, ReportsMissingOrder) {
  expect_said(Mistake::loads_early, "tcgen05.ld of lanes");
  expect_said(Mistake::no_fence_after, "is not known to be complete");
  expect_said(Mistake::no_wait_ld, "loads without a wait::ld");
  expect_said(Mistake::no_fence_before, "is not known to be done");
  // Of the loads by the multiplication, or of the multiplication by the loads.
  expect_said(Mistake::no_arrival_wait, "is not known to be");
  expect_said(Mistake::no_commit, "waits for an mbarrier");
  expect_said(Mistake::one_arrival_too_many_awaited, "waits for an mbarrier");
  expect_said(Mistake::no_proxy_fence, "has not fenced");
  expect_said(Mistake::copies_not_fenced, "that cp.async wrote", {.copied = true});
  expect_said(Mistake::relay_without_fence, "that cp.async wrote",
              {.ctas = 2, .m = 256, .copied = true});
  expect_said(Mistake::scales_reused, "over scales that a multiplication may still read",
              {.n = 128, .mx = true});
}

TEST(TensorMemory, ReportsWrongAllocations) {
  expect_said(Mistake::never_freed, "the CTA ends with 512 columns");
  expect_said(Mistake::freed_early, "tcgen05.dealloc: ");
  expect_said(Mistake::peer_not_awaited, "tcgen05.dealloc: ", {.ctas = 2, .m = 256});
  expect_said(Mistake::freed_twice, "which no alloc gave");
  expect_said(Mistake::odd_columns, "no power of two");
  expect_said(Mistake::too_many_columns, "no power of two");
  expect_said(Mistake::alloc_behind_relinquish, "behind relinquish");
  expect_said(Mistake::alloc_without_room, "waits for ever");
  expect_said(Mistake::not_allocated, "are not allocated", {.n = 64});
}

TEST(TensorMemory, ReportsWrongIssuers) {
  expect_said(Mistake::lanes_of_another_warp, "by a warp that reaches lanes");
  expect_said(Mistake::all_lanes_issue, "several lanes of a warp issue");
  expect_said(Mistake::both_groups, "cta_group 1 and 2 in one kernel");
  expect_said(Mistake::peer_issues, "CTA 1 of a pair issues", {.ctas = 2, .m = 256});
  expect_said(Mistake::commit_to_one, "cta_group 1 and 2 in one kernel", {.ctas = 2, .m = 256});
  expect_said(Mistake::peer_ends, "the CTA ends with", {.ctas = 2, .m = 256});
}

TEST(TensorMemory, ReportsWrongWords) {
  expect_said(Mistake::version, "version 0");
  expect_said(Mistake::reserved_bit, "are reserved");
  expect_said(Mistake::m_of_one, "M = 64");
  expect_said(Mistake::adds_to_nothing, "adds to what nobody has written");
  expect_said(Mistake::leading_and_stride, "D is wrong", {.b_rows_major = true});
  expect_said(Mistake::major, "D is wrong");
  expect_said(Mistake::scale_byte, "D is wrong", {.n = 128, .mx = true});
  Case const mx{.n = 128, .mx = true};
  expect_said(Mistake::scales_behind, "no tcgen05.cp ahead of it", mx);
  expect_said(Mistake::scales_of_another, "no tcgen05.cp ahead of it", mx);
  expect_said(Mistake::scales_swizzled, "an atom of scales has no swizzle", mx);
  expect_said(Mistake::scales_in_lanes, "another lane than 0", mx);
  expect_said(Mistake::scales_under_d, "D lies over them", mx);
}

// The emulator keeps account of 16 warps of a CTA. Kernels without tensor memory may have up to 32.
TEST(TensorMemory, IsNotForMoreWarpsThanHaveAnAccount) {
  std::uint32_t base = 0;
  for (bool const allocates : {false, true}) {
    launch(1, 1, 1024, 0, [&] {
      __syncthreads();
      if (allocates && threadIdx.x / 32 == 31) tcgen05_alloc<1>(&base, 32);
      __syncthreads();
    });
    std::string const said = run({});
    EXPECT_EQ(said.find("more warps than are emulated") != std::string::npos, allocates) << said;
    EXPECT_EQ(said.empty(), !allocates) << said;
  }
}

}  // namespace
}  // namespace tessera::emulator

// SPDX-License-Identifier: Apache-2.0
// The kernels of one instruction set, to be included by the file that is compiled for it: everything here has
// internal linkage, so that no copy compiled for a newer machine serves an older one.
//
//   register tile: kRows x 2 vectors of sums; per word of k, two loads of b and kRows broadcasts of a
//   each sum runs over k in order, so its bits depend on neither the tile nor the vector length
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "cpu/parallel/gemm_kernels.hpp"

// An Isa has kLanes, kRows, kPairs (words are pairs of bf16), Words and Sum (vectors of kLanes words or fp32),
// widened(16-bit const*), broadcast(Word const*), load(Word const*) and multiply_add(a, b, sum).
namespace tessera::cpu {
namespace {

/// Vectors of kLanes 32-bit words, for any instruction set.
template <int kLanes>
struct Vectors {
  typedef Word Words __attribute__((vector_size(kLanes * 4)));

  static void store(void* to, Words const& vector) { std::memcpy(to, &vector, sizeof(vector)); }

  // Step kStep swaps blocks of kStep lanes between vectors that are kStep apart.
  template <int kStep, int... kLane>
  static void swap_blocks(Words& a, Words& b, std::integer_sequence<int, kLane...>) {
    Words const low =
        __builtin_shufflevector(a, b, ((kLane & kStep) != 0 ? kLanes + kLane - kStep : kLane)...);
    b = __builtin_shufflevector(a, b, ((kLane & kStep) != 0 ? kLanes + kLane : kLane + kStep)...);
    a = low;
  }
  template <int kStep = 1>
  static void transpose(Words (&v)[kLanes]) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if ((i & kStep) == 0) {
        swap_blocks<kStep>(v[i], v[i + kStep], std::make_integer_sequence<int, kLanes>());
      }
    }
    if constexpr (2 * kStep < kLanes) transpose<2 * kStep>(v);
  }
};

// --- packing: how words are read from each storage type ------------------------------------------------

/// kLanes bf16 as the lower halves of words; the first `elements` of them, zeros behind.
template <class Isa>
typename Isa::Words load_halves(void const* from, std::int64_t elements) {
  if (elements >= Isa::kLanes) return Isa::widened(from);
  std::uint16_t part[Isa::kLanes] = {};
  std::memcpy(part, from, static_cast<std::size_t>(2 * elements));
  return Isa::widened(part);
}
template <class Isa>
typename Isa::Words load_words(void const* from, std::int64_t bytes) {
  typename Isa::Words out = {};
  if (bytes >= Isa::kLanes * 4) {
    std::memcpy(&out, from, sizeof(out));
  } else {
    std::memcpy(&out, from, static_cast<std::size_t>(bytes));
  }
  return out;
}

template <class Isa>
struct Fp32Words {
  static constexpr int kElementBytes = 4, kPerWord = 1;
  static typename Isa::Words along_k(void const* from, std::int64_t elements) {
    return load_words<Isa>(from, 4 * elements);
  }
  static typename Isa::Words across(void const* from, void const*, std::int64_t elements) {
    return load_words<Isa>(from, 4 * elements);
  }
};

/// bf16 where words are fp32.
template <class Isa>
struct WidenedWords {
  static constexpr int kElementBytes = 2, kPerWord = 1;
  static typename Isa::Words along_k(void const* from, std::int64_t elements) {
    return load_halves<Isa>(from, elements) << 16;
  }
  static typename Isa::Words across(void const* from, void const*, std::int64_t elements) {
    return load_halves<Isa>(from, elements) << 16;
  }
};

/// bf16 where words are pairs; the even k is the lower half.
template <class Isa>
struct PairWords {
  static constexpr int kElementBytes = 2, kPerWord = 2;
  static typename Isa::Words along_k(void const* from, std::int64_t elements) {
    return load_words<Isa>(from, 2 * elements);
  }
  static typename Isa::Words across(void const* even, void const* odd, std::int64_t elements) {
    typename Isa::Words const low = load_halves<Isa>(even, elements);
    return odd == nullptr ? low : low | load_halves<Isa>(odd, elements) << 16;
  }
};

inline char const* source_row(PanelSource const& source, std::int64_t index, int element_bytes) {
  std::int64_t const row = source.gather != nullptr ? source.gather[index] : index;
  return static_cast<char const*>(source.data) + row * source.stride * element_bytes;
}

/// kLanes rows at a time, kLanes words of each, transposed.
template <class Isa, int kWidth, class Reader>
void pack_k_contiguous(PanelSource const& source, std::int64_t first, std::int64_t extent,
                       std::int64_t k, Word* panel) {
  using V = Vectors<Isa::kLanes>;
  constexpr std::int64_t kStep = std::int64_t{Isa::kLanes} * Reader::kPerWord;
  for (int lane = 0; lane < kWidth; lane += Isa::kLanes) {
    char const* rows[Isa::kLanes];
    for (int i = 0; i < Isa::kLanes; ++i) {
      // A lane without a row repeats the first one: nobody reads what it adds up to.
      std::int64_t const row = first + lane + i;
      bool const present = lane + i < kWidth && row < extent;
      rows[i] = source_row(source, present ? row : first, Reader::kElementBytes);
    }
    Word* out = panel + lane;
    std::int64_t at = 0;
    for (; at + kStep <= k; at += kStep) {
      typename Isa::Words words[Isa::kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < Isa::kLanes; ++i) {
        words[i] = Reader::along_k(rows[i] + at * Reader::kElementBytes, kStep);
      }
      V::transpose(words);
#pragma GCC unroll 16
      for (int i = 0; i < Isa::kLanes; ++i, out += kWidth) V::store(out, words[i]);
    }
    if (at == k) continue;
    typename Isa::Words words[Isa::kLanes];
    for (int i = 0; i < Isa::kLanes; ++i) {
      words[i] = Reader::along_k(rows[i] + at * Reader::kElementBytes, k - at);
    }
    V::transpose(words);
    std::int64_t const left = (k - at + Reader::kPerWord - 1) / Reader::kPerWord;
    for (int i = 0; i < left; ++i, out += kWidth) V::store(out, words[i]);
  }
}

template <class Isa, int kWidth, class Reader>
void pack_k_strided(PanelSource const& source, std::int64_t first, std::int64_t extent,
                    std::int64_t k, Word* panel) {
  constexpr int kBytes = Reader::kElementBytes;
  std::int64_t const left = extent - first;
  for (std::int64_t at = 0; at < k; at += Reader::kPerWord, panel += kWidth) {
    char const* const even = source_row(source, at, kBytes) + first * kBytes;
    bool const pair = Reader::kPerWord == 2 && at + 1 < k;
    char const* const odd = pair ? source_row(source, at + 1, kBytes) + first * kBytes : nullptr;
    for (int lane = 0; lane < kWidth; lane += Isa::kLanes) {
      typename Isa::Words words = {};
      if (lane < left) {
        words =
            Reader::across(even + lane * kBytes, pair ? odd + lane * kBytes : nullptr, left - lane);
      }
      Vectors<Isa::kLanes>::store(panel + lane, words);
    }
  }
}

template <class Isa, int kWidth>
void pack(PanelSource const& source, std::int64_t first, std::int64_t extent, std::int64_t k,
          Word* panel) {
  // Vectors that stick out of a narrow panel are overwritten by what follows them.
  static_assert(kWidth < Isa::kLanes || kWidth % Isa::kLanes == 0);
  auto const pack_as = [&]<class Reader>(Reader) {
    source.k_contiguous ? pack_k_contiguous<Isa, kWidth, Reader>(source, first, extent, k, panel)
                        : pack_k_strided<Isa, kWidth, Reader>(source, first, extent, k, panel);
  };
  if constexpr (Isa::kPairs) {
    pack_as(PairWords<Isa>{});
  } else {
    source.dtype == DType::bf16 ? pack_as(WidenedWords<Isa>{}) : pack_as(Fp32Words<Isa>{});
  }
}

// --- multiplying ---------------------------------------------------------------------------------------

/// As core::round_to<Bf16>, kLanes at a time.
template <class Isa>
void store_rounded(typename Isa::Sum const& sum, core::Bf16* out) {
  using Words = typename Isa::Words;
  typedef std::uint16_t Halves __attribute__((vector_size(Isa::kLanes * 2)));
  static_assert(sizeof(Words) == sizeof(sum));
  Words const bits = __builtin_bit_cast(Words, sum);
  Words const rounded = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
  Halves const halves =
      __builtin_convertvector(((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded) >> 16, Halves);
  std::memcpy(out, &halves, sizeof(halves));
}

template <class Isa, int kRows>
void multiply(std::int64_t words, Word const* a, Word const* b, TileResult const& c) {
  using Sum = typename Isa::Sum;
  Sum sum[kRows][2] = {};
  for (std::int64_t w = 0; w < words; ++w, a += Isa::kRows, b += 2 * Isa::kLanes) {
    auto const b0 = Isa::load(b), b1 = Isa::load(b + Isa::kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      auto const value = Isa::broadcast(a + r);
      sum[r][0] = Isa::multiply_add(value, b0, sum[r][0]);
      sum[r][1] = Isa::multiply_add(value, b1, sum[r][1]);
    }
  }
  if (c.dtype == DType::bf16) {
    auto* to = static_cast<core::Bf16*>(c.out);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, to += c.out_stride) {
      store_rounded<Isa>(sum[r][0], to);
      store_rounded<Isa>(sum[r][1], to + Isa::kLanes);
    }
    return;
  }
  auto* row = static_cast<float*>(c.out);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r, row += c.out_stride) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      float* const to = row + half * Isa::kLanes;
      Sum out = sum[r][half];
      if (c.add) {
        Sum old;
        std::memcpy(&old, to, sizeof(old));
        out += old;
      }
      std::memcpy(to, &out, sizeof(out));
    }
  }
}

template <class Isa, class T>
void store_tile(TileStore const& store) {
  constexpr int kPitch = 2 * Isa::kLanes;
  for (int r = 0; r < store.rows; ++r) {
    float const* const from = store.tile + r * kPitch;
    T* const to = static_cast<T*>(store.out) + r * store.out_stride;
    if (store.bias != nullptr) {
      for (int i = 0; i < store.columns; ++i) to[i] = core::round_to<T>(from[i] + store.bias[i]);
    } else {
      for (int i = 0; i < store.columns; ++i) to[i] = core::round_to<T>(from[i]);
    }
  }
}

template <class Isa, class Rows>
struct MultiplyTable;
template <class Isa, int... kRow>
struct MultiplyTable<Isa, std::integer_sequence<int, kRow...>> {
  static constexpr GemmKernels::Multiply kTable[] = {multiply<Isa, kRow + 1>...};
};

template <class Isa>
constexpr GemmKernels make_kernels(char const* name) {
  constexpr int kColumns = 2 * Isa::kLanes;
  return {.name = name,
          .rows = Isa::kRows,
          .columns = kColumns,
          .multiplies_bf16 = Isa::kPairs,
          .pack_rows = pack<Isa, Isa::kRows>,
          .pack_columns = pack<Isa, kColumns>,
          .multiply = MultiplyTable<Isa, std::make_integer_sequence<int, Isa::kRows>>::kTable,
          .store_fp32 = store_tile<Isa, float>,
          .store_bf16 = store_tile<Isa, core::Bf16>};
}

}  // namespace
}  // namespace tessera::cpu

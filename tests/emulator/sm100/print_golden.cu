// SPDX-License-Identifier: Apache-2.0
// Prints golden.inc: descriptors, places in shared memory and places in tensor memory as CuTe computes them, which
// nobody of this project wrote. No build needs it; golden.inc is committed. With the headers of CUTLASS, here 4.2.0:
//   pip install --no-deps nvidia-cutlass==4.2.0.0
//   nvcc -std=c++17 -w -gencode arch=compute_100a,code=sm_100a -I .../cutlass_library/source/include print_golden.cu
//   ./a.out | grep -v ^ERROR > golden.inc
// The program runs on the host alone, where shared memory has no address, of which CuTe complains: it is 0 here.
#include <cstdint>
#include <cstdio>

#include <cute/tensor.hpp>

#include <cutlass/numeric_types.h>
#include <cute/atom/copy_traits_sm100.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm100.hpp>
#include <cutlass/detail/sm100_blockscaled_layout.hpp>

using namespace cute;
using bf16 = cutlass::bfloat16_t;
using e4m3 = cutlass::float_e4m3_t;
using e5m2 = cutlass::float_e5m2_t;

// Points of a tile, spread over its rows and its k.
template <class Visit>
void points(int rows, int columns, Visit visit) {
  for (int i = 0; i < 24; ++i)
    visit(i == 0 ? 0 : (i * 37 + 5) % rows, i == 0 ? 0 : (i * 29 + 3) % columns);
}

// An operand of `rows` x `k` elements: its descriptor at address 0, bytes from one multiplication to the next, and
// where elements lie.
template <class T, UMMA::Major kMajor, class Layout>
void operand(char const* name, Layout const& layout) {
  alignas(1024) static unsigned char memory[128 * 1024];
  auto const whole = make_tensor(make_smem_ptr(reinterpret_cast<T*>(memory)), layout);
  // The descriptor is of one multiplication; all of them have it, but for the address.
  constexpr int kStep = 32 / sizeof(T);
  auto const part = local_tile(whole, make_tile(size<0>(layout), Int<kStep>{}), make_coord(0, 0));
  UMMA::SmemDescriptor desc = UMMA::make_umma_desc<kMajor>(part);
  desc.start_address_ = 0;
  // The swizzle is one of addresses: of the pointer, not of the layout.
  auto const place = [&](int row, int column) {
    return static_cast<unsigned>(reinterpret_cast<unsigned char const*>(&whole(row, column)) -
                                 memory);
  };
  int const k_all = static_cast<int>(size<1>(layout));
  // Swizzles keep the first row where it is in its row: the step is that of (0, kStep) without them.
  unsigned const step = place(0, kStep);
  std::printf("OPERAND(%s, 0x%016llxull, %u, %d, %d, %d)\n", name,
              static_cast<unsigned long long>(desc.desc_), step, static_cast<int>(size<0>(layout)),
              k_all, static_cast<int>(sizeof(T)));
  points(static_cast<int>(size<0>(layout)), k_all, [&](int row, int column) {
    std::printf("PLACE(%s, %d, %d, %u)\n", name, row, column, place(row, column));
  });
}

template <class A, class B, int kM, int kN, UMMA::Major kA, UMMA::Major kB>
void bf16_instruction(char const* a, char const* b) {
  std::printf("BF16(%d, %d, %s, %s, 0x%08xu)\n", kM, kN, a, b,
              static_cast<uint32_t>(UMMA::make_instr_desc<A, B, float, kM, kN, kA, kB>()));
}

template <class A, class B, int kM, int kN>
void mxf8_instruction(char const* a, char const* b) {
  for (uint32_t byte = 0; byte < 4; ++byte) {
    uint64_t const both =
        UMMA::make_runtime_instr_desc_block_scaled<A, B, float, cutlass::float_ue8m0_t, kM, kN,
                                                   UMMA::Major::K, UMMA::Major::K>(
            byte << 30, (3 - byte) << 30);
    std::printf("MXF8(%d, %d, %s, %s, %u, %u, 0x%08xu)\n", kM, kN, a, b, byte, 3 - byte,
                static_cast<uint32_t>(both >> 32));
  }
}

// Which rows of A and B CTA `rank` holds, and where D lies in it, as rows and columns of the whole tile.
template <class Mma, int kM, int kN>
void accumulators(int ctas) {
  auto const mma = make_tiled_mma(Mma{});
  for (int rank = 0; rank < ctas; ++rank) {
    auto const slice = mma.get_slice(rank);
    auto const all = make_identity_tensor(make_shape(Int<kM>{}, Int<kN>{}));
    auto const own = slice.partition_C(all);
    auto const fragment = slice.make_fragment_C(own);
    int const count = static_cast<int>(size(own));
    auto const a = slice.partition_A(make_identity_tensor(make_shape(Int<kM>{}, _16{})));
    auto const b = slice.partition_B(make_identity_tensor(make_shape(Int<kN>{}, _16{})));
    std::printf("SHARE(%d, %d, %d, %d, %d, %d, %d, %d)\n", ctas, kM, kN, rank,
                static_cast<int>(get<0>(a(0))), static_cast<int>(size(a)) / 16,
                static_cast<int>(get<0>(b(0))), static_cast<int>(size(b)) / 16);
    for (int i = 0; i < 16; ++i) {
      int const at = i * (count / 16) + i * 331 % (count / 16);
      auto const coordinate = own(at);
      auto const address =
          static_cast<uint32_t>(raw_pointer_cast(fragment.data())) + fragment.layout()(at);
      std::printf("ACCUMULATOR(%d, %d, %d, %d, %d, %d, %u, %u)\n", ctas, kM, kN, rank,
                  static_cast<int>(get<0>(coordinate)), static_cast<int>(get<1>(coordinate)),
                  address >> 16, address & 0xffffu);
    }
  }
}

// The scales of `rows` x 512 elements in memory, and those of a k_tile of 128 in shared and in tensor memory.
using e8m0 = cutlass::float_ue8m0_t;
void scales_in_memory(int rows, int k) {
  auto const layout = cutlass::detail::Sm1xxBlockScaledConfig<32>::tile_atom_to_shape_SFA(
      make_shape(rows, 0, k, 1));
  points(rows, k, [&](int row, int column) {
    std::printf("SCALE(%d, %d, %d, %d, %d)\n", rows, k, row, column,
                static_cast<int>(layout(row, column, 0)));
  });
}

// What tcgen05.cp is told of an atom, and where a scale of rows x 128 lies behind the address of tensor memory.
template <class Fragment, class Copy, class Layout>
void scales_in_tensor_memory(char const* name, int rows, Layout const& layout) {
  alignas(1024) static e8m0 memory[2048];
  auto const shared = make_tensor(make_smem_ptr(memory), layout);
  auto const tensor = Fragment::make(shape(layout));
  auto const from = make_tensor(shared.data(), filter_zeros(shared.layout()));
  auto const to = make_tensor(tensor.data(), filter_zeros(tensor.layout()));
  auto const copy = make_utccp_copy(Copy{}, to).get_slice(0);
  auto const words = get_utccp_smem_desc_tensor<Copy>(copy.partition_S(from));
  UMMA::SmemDescriptor desc = words(0);
  desc.start_address_ = 0;
  std::printf("ATOM(%s, 0x%016llxull)\n", name, static_cast<unsigned long long>(desc.desc_));
  points(rows, 128, [&](int row, int k) {
    // ((rows of 32, 32s) .., (k of a scale, 1)), 1, blocks
    auto const at = make_coord(make_coord(row, k % 32), 0, k / 32);
    auto const place = static_cast<unsigned>(tensor.layout()(at));
    constexpr unsigned kLane = TMEM::DP<e8m0>{};
    std::printf("TENSOR_SCALE(%s, %d, %d, %d, %u, %u, %u)\n", name, row, k,
                static_cast<int>(layout(at)), place / kLane, place % kLane / 4, place % 4);
  });
}
template <class Mma, class Copy, int kM, int kN>
void scales_of(char const* a, char const* b) {
  using Config = cutlass::detail::Sm1xxBlockScaledConfig<32>;
  using Tile = Shape<Int<kM>, Int<kN>, _128>;
  using Tiled = decltype(make_tiled_mma(Mma{}));
  constexpr int kCtas = size(typename Tiled::AtomThrID{});
  scales_in_tensor_memory<typename Tiled::FrgTypeSFA, Copy>(
      a, kM / kCtas, Config::deduce_smem_layoutSFA(Tiled{}, Tile{}));
  scales_in_tensor_memory<typename Tiled::FrgTypeSFB, Copy>(
      b, kN, Config::deduce_smem_layoutSFB(Tiled{}, Tile{}));
}

int main() {
  using UMMA::Major;
  std::printf(
      "// SPDX-License-Identifier: Apache-2.0\n// Printed by print_golden.cu with CuTe of CUTLASS "
      "4.2.0.\n");
  auto const wide = [](auto atom, auto rows, auto k) {
    return tile_to_shape(atom, make_shape(rows, k));
  };
  // Boxes of 64 rows x 64 k lie one after the other, as TMA brings them: k grows inside a box.
  auto const boxes = [](auto atom, auto rows, auto k) {
    return tile_to_shape(atom, make_shape(rows, k), Step<_2, _1>{});
  };
  operand<bf16, Major::K>("bf16_k_128", wide(UMMA::Layout_K_SW128_Atom<bf16>{}, _128{}, _64{}));
  operand<bf16, Major::K>("bf16_k_256", wide(UMMA::Layout_K_SW128_Atom<bf16>{}, _256{}, _64{}));
  operand<bf16, Major::MN>("bf16_rows_128",
                           boxes(UMMA::Layout_MN_SW128_Atom<bf16>{}, _128{}, _64{}));
  operand<bf16, Major::MN>("bf16_rows_256",
                           boxes(UMMA::Layout_MN_SW128_Atom<bf16>{}, _256{}, _64{}));
  operand<bf16, Major::K>("bf16_k_swizzle64",
                          wide(UMMA::Layout_K_SW64_Atom<bf16>{}, _128{}, _32{}));
  operand<bf16, Major::K>("bf16_k_plain", wide(UMMA::Layout_K_INTER_Atom<bf16>{}, _128{}, _64{}));
  operand<e4m3, Major::K>("e4m3_k_128", wide(UMMA::Layout_K_SW128_Atom<e4m3>{}, _128{}, _128{}));
  operand<e4m3, Major::MN>("e4m3_rows_256",
                           boxes(UMMA::Layout_MN_SW128_Atom<e4m3>{}, _256{}, _128{}));
  bf16_instruction<bf16, bf16, 128, 256, Major::K, Major::K>("kK", "kK");
  bf16_instruction<bf16, bf16, 128, 128, Major::K, Major::K>("kK", "kK");
  bf16_instruction<bf16, bf16, 128, 64, Major::K, Major::MN>("kK", "kRows");
  bf16_instruction<bf16, bf16, 256, 256, Major::K, Major::K>("kK", "kK");
  bf16_instruction<bf16, bf16, 256, 256, Major::K, Major::MN>("kK", "kRows");
  bf16_instruction<bf16, bf16, 256, 256, Major::MN, Major::MN>("kRows", "kRows");
  bf16_instruction<bf16, bf16, 256, 128, Major::MN, Major::MN>("kRows", "kRows");
  mxf8_instruction<e4m3, e4m3, 256, 256>("kE4m3", "kE4m3");
  mxf8_instruction<e4m3, e4m3, 128, 256>("kE4m3", "kE4m3");
  mxf8_instruction<e4m3, e4m3, 256, 128>("kE4m3", "kE4m3");
  mxf8_instruction<e4m3, e4m3, 128, 128>("kE4m3", "kE4m3");
  mxf8_instruction<e4m3, e5m2, 256, 256>("kE4m3", "kE5m2");
  mxf8_instruction<e5m2, e4m3, 256, 128>("kE5m2", "kE4m3");
  accumulators<SM100_MMA_F16BF16_SS<bf16, bf16, float, 128, 256, Major::K, Major::K>, 128, 256>(1);
  accumulators<SM100_MMA_F16BF16_2x1SM_SS<bf16, bf16, float, 256, 256, Major::K, Major::K>, 256,
               256>(2);
  accumulators<SM100_MMA_F16BF16_2x1SM_SS<bf16, bf16, float, 128, 256, Major::K, Major::K>, 128,
               256>(2);
  scales_in_memory(128, 128);
  scales_in_memory(384, 640);
  scales_of<SM100_MMA_MXF8F6F4_SS<e4m3, e4m3, float, e8m0, 128, 128, Major::K, Major::K>,
            SM100_UTCCP_4x32dp128bit_1cta, 128, 128>("one_a_128", "one_b_128");
  scales_of<SM100_MMA_MXF8F6F4_2x1SM_SS<e4m3, e4m3, float, e8m0, 256, 256, Major::K, Major::K>,
            SM100_UTCCP_4x32dp128bit_2cta, 256, 256>("pair_a_256", "pair_b_256");
  return 0;
}

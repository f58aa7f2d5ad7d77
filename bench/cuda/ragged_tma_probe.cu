// SPDX-License-Identifier: Apache-2.0
// Do ragged tensor maps clip at the end of a segment, a row known on the device only?
//   lowered base   one extra dimension of stride s, base lowered by X*s (host/tensor_map.hpp)
//   wrapped        two extra dimensions of strides s and 2^34 - s: 2^30 * (2^34 - s) elements wrap
//                  modulo 2^64 bytes to -2^30 * s, so the base stays where the tensor is
// Each is tried for stores (rows past the end keep their old values) and loads (they read as zero).
#include "../../src/cuda/arch/proxy_fence.cuh"
#include "../../src/cuda/arch/tma.cuh"
#include "../../src/cuda/host/tensor_map.hpp"
#include "support.cuh"

namespace tessera::bench {
namespace {

constexpr int kRows = 64;
constexpr int kColumns = 64;
constexpr int kPitch = 192;  // elements; the box covers the middle third

struct Slab {
  alignas(1024) uint16_t value[kRows * kColumns];
  cuda::arch::Mbarrier full;
};

__device__ int swizzled(int row, int column) {
  return row * kColumns + (((column / 8) ^ (row & 7)) * 8) + column % 8;
}

__global__ void store_slab(__grid_constant__ CUtensorMap const map, int c1, int c2, int c3) {
  __shared__ Slab smem;
  for (int i = threadIdx.x; i < kRows * kColumns; i += blockDim.x) {
    smem.value[swizzled(i / kColumns, i % kColumns)] = uint16_t(0x4000 + i);
  }
  cuda::arch::fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    cuda::arch::tma_store(&map, smem.value, kColumns, c1, c2, c3);
    cuda::arch::tma_store_commit();
    cuda::arch::tma_store_wait_read<0>();
  }
}

__global__ void load_slab(__grid_constant__ CUtensorMap const map, int c1, int c2, int c3,
                          uint16_t* out) {
  __shared__ Slab smem;
  if (threadIdx.x == 0) {
    cuda::arch::mbarrier_init(&smem.full, 1);
    cuda::arch::mbarrier_fence_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    cuda::arch::mbarrier_arrive_expect_tx(&smem.full, kRows * kColumns * 2);
    cuda::arch::tma_load(smem.value, &map, &smem.full, kColumns, c1, c2, c3);
  }
  cuda::arch::mbarrier_wait(&smem.full, 0);
  for (int i = threadIdx.x; i < kRows * kColumns; i += blockDim.x) {
    out[i] = smem.value[swizzled(i / kColumns, i % kColumns)];
  }
}

enum class Form { kLoweredBase, kWrapped };

struct Ragged {
  CUtensorMap map;
  Form form;
  int64_t extent;

  Ragged(Form f, uint16_t* gmem, int64_t rows)
      : form(f), extent(f == Form::kLoweredBase ? rows : int64_t{1} << 30) {
    uint64_t const s = kPitch * 2;
    if (f == Form::kLoweredBase) {
      TESSERA_CUDA(
          cuda::host::make_tensor_map(map, reinterpret_cast<char*>(gmem) - rows * int64_t(s),
                                      {.rank = 4,
                                       .extent = {kPitch, 1, uint64_t(extent), uint64_t(rows) + 1},
                                       .stride_bytes = {s, s, s},
                                       .box = {kColumns, 1, kRows, 1}}));
    } else {
      TESSERA_CUDA(cuda::host::make_tensor_map(
          map, gmem,
          {.rank = 4,
           .extent = {kPitch, uint64_t(extent), uint64_t(extent), uint64_t(extent) + 1},
           .stride_bytes = {s, s, (uint64_t{1} << 35) - s},
           .box = {kColumns, kRows, 1, 1}}));
    }
  }
  // Coordinates 1..3 of row `row` of a segment that ends at `end`.
  void coordinates(int row, int end, int (&c)[3]) const {
    if (form == Form::kLoweredBase) {
      c[0] = 0;
      c[1] = int(extent) + row - end;
      c[2] = end;
    } else {
      c[0] = int(extent) + row - end;
      c[1] = end;
      c[2] = int(extent);
    }
  }
};

// Returns the number of wrong elements.
int64_t probe(Form form, bool store, int rows, int row, int end) {
  std::vector<uint16_t> host(int64_t{rows} * kPitch);
  for (size_t i = 0; i < host.size(); ++i) host[i] = uint16_t(1 + i % 0x3fff);
  DeviceBuffer<uint16_t> gmem(host);
  Ragged const ragged(form, gmem.get(), rows);
  int c[3];
  ragged.coordinates(row, end, c);
  int64_t wrong = 0;
  if (store) {
    store_slab<<<1, 128>>>(ragged.map, c[0], c[1], c[2]);
    TESSERA_CUDA(cudaDeviceSynchronize());
    std::vector<uint16_t> got(host.size());
    TESSERA_CUDA(cudaMemcpy(got.data(), gmem.get(), got.size() * 2, cudaMemcpyDeviceToHost));
    for (int r = 0; r < rows; ++r) {
      for (int col = 0; col < kPitch; ++col) {
        bool const inside = r >= row && r < std::min(end, row + kRows) && col / kColumns == 1;
        uint16_t const want = inside ? uint16_t(0x4000 + (r - row) * kColumns + col % kColumns)
                                     : host[int64_t{r} * kPitch + col];
        wrong += got[int64_t{r} * kPitch + col] != want;
      }
    }
  } else {
    DeviceBuffer<uint16_t> out(kRows * kColumns);
    out.poison();
    load_slab<<<1, 128>>>(ragged.map, c[0], c[1], c[2], out.get());
    TESSERA_CUDA(cudaDeviceSynchronize());
    std::vector<uint16_t> got(kRows * kColumns);
    TESSERA_CUDA(cudaMemcpy(got.data(), out.get(), got.size() * 2, cudaMemcpyDeviceToHost));
    for (int r = 0; r < kRows; ++r) {
      for (int col = 0; col < kColumns; ++col) {
        uint16_t const want =
            row + r < end ? host[int64_t{row + r} * kPitch + kColumns + col] : uint16_t{0};
        wrong += got[r * kColumns + col] != want;
      }
    }
  }
  return wrong;
}

}  // namespace
}  // namespace tessera::bench

int main() {
  using namespace tessera::bench;
  struct Case {
    int rows, row, end;
  };
  Case const cases[] = {{300, 0, 1},     {300, 17, 24},   {300, 100, 163}, {300, 100, 164},
                        {300, 200, 290}, {300, 280, 300}, {300, 299, 300}, {64, 0, 64}};
  int failures = 0;
  for (Form form : {Form::kLoweredBase, Form::kWrapped}) {
    for (bool store : {true, false}) {
      int64_t wrong = 0;
      for (Case const& c : cases) wrong += probe(form, store, c.rows, c.row, c.end);
      std::printf("%-12s %-5s %s (%lld wrong elements)\n",
                  form == Form::kLoweredBase ? "lowered base" : "wrapped", store ? "store" : "load",
                  wrong ? "FAILS" : "clips", static_cast<long long>(wrong));
      failures += wrong != 0;
    }
  }
  return failures ? 1 : 0;
}

// SPDX-License-Identifier: Apache-2.0
// What a k loop of e4m3 wgmmas costs on Hopper when its partial sums are promoted to fp32 after every 128 products.
//
// Persistent CTAs of a TMA producer and two consumer warpgroups multiply tiles of 128 x 256 whose operands lie in L2;
// nothing is stored but the last tile. Forms of the loop, each with stages of 48 KB and 128 bytes of k in each row:
//   bf16          m64n256k16, one group in flight behind the next, as the library's GEMMs do it; 64 of k in a stage
//   fp8           m64n256k32 in the same way, into one accumulator, without scales: the most that could be had
//   fp8-halves    m64n128k32 into a partial sum, which is scaled and added to the accumulator, twice a stage; a
//                 warpgroup waits for each of its groups, so that the other's fill the tensor cores meanwhile
// The forms run in turns. Prints cycles of a stage (1024 is the tensor cores' own time), the clock, and TFLOP/s; checks
// the last tile against a plain kernel.
#include <cuda_fp8.h>

#include <cstring>

#include "../../src/cuda/arch/bulk_copy.cuh"
#include "../../src/cuda/arch/dynamic_shared.cuh"
#include "../../src/cuda/arch/setmaxnreg.cuh"
#include "../../src/cuda/arch/tma.cuh"
#include "../../src/cuda/arch/warp.cuh"
#include "../../src/cuda/arch/wgmma_e4m3.cuh"
#include "../../src/cuda/host/driver.hpp"
#include "support.cuh"

namespace tessera::bench {
namespace {

using namespace cuda;

enum class Form { kBf16, kFp8, kFp8Halves };
constexpr char const* kFormNames[] = {"bf16", "fp8", "fp8-halves"};

constexpr int kRowBytes = 128;  // of k in a stage
constexpr int kTileM = 128, kTileN = 256;
constexpr int kRows = 8192;        // of A and of B
constexpr int kDepthBytes = 2048;  // k of both, in bytes: with kRows twice 16 MB, which L2 holds
constexpr int kStagesOfTile = kDepthBytes / kRowBytes;

template <int kStages>
struct Storage {
  alignas(1024) uint8_t a[kStages][kTileM * kRowBytes];
  alignas(1024) uint8_t b[kStages][kTileN * kRowBytes];
  alignas(16) float row_scales[kStages][kTileM];
  alignas(16) float weight_scales[kStages][4];  // gate, up, and two that make it 16 bytes
  arch::Mbarrier full[kStages], empty[kStages];
};

struct Params {
  CUtensorMap a, b;
  float const* gmem_row_scales;     // [stage of k][kRows]
  float const* gmem_weight_scales;  // [stage of k][kRows / kTileN][4]
  float* gmem_d;                    // last tile of each CTA, [grid][kTileM][kTileN]
  long long* gmem_cycles;           // [grid]
  int tiles;
};

struct Place {
  int m, n;
};
// Neighbours share operands, as in a raster of the library.
__device__ __host__ Place place_of(int cta, int tile) {
  int const unit = cta + tile * 132;
  return {unit % (kRows / kTileM), unit / (kRows / kTileM) % (kRows / kTileN)};
}

template <Form kForm, int kStages>
__device__ __forceinline__ void produce(Storage<kStages>& smem, Params const& p) {
  int stage = 0;
  uint32_t phase = 0;
  for (int tile = 0; tile < p.tiles; ++tile) {
    Place const place = place_of(blockIdx.x, tile);
    for (int k = 0; k < kStagesOfTile; ++k) {
      arch::mbarrier_wait(&smem.empty[stage], phase ^ 1);
      constexpr uint32_t kScaleBytes = kForm == Form::kFp8Halves ? kTileM * 4 + 16 : 0;
      arch::mbarrier_arrive_expect_tx(&smem.full[stage],
                                      (kTileM + kTileN) * kRowBytes + kScaleBytes);
      arch::tma_load(smem.a[stage], &p.a, &smem.full[stage], k * kRowBytes, place.m * kTileM);
      arch::tma_load(smem.b[stage], &p.b, &smem.full[stage], k * kRowBytes, place.n * kTileN);
      if constexpr (kForm == Form::kFp8Halves) {
        arch::bulk_load(smem.row_scales[stage],
                        p.gmem_row_scales + int64_t{k} * kRows + place.m * kTileM, kTileM * 4,
                        &smem.full[stage]);
        arch::bulk_load(smem.weight_scales[stage],
                        p.gmem_weight_scales + (k * (kRows / kTileN) + place.n) * 4, 16,
                        &smem.full[stage]);
      }
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
  }
}

// d += partial, its columns of gate and of up by their own weight scale.
__device__ __forceinline__ void promote(float (&d)[64], float const (&partial)[64], bool first,
                                        float const* row_scales, float gate, float up) {
  int const row = arch::lane_idx() / 4;
  float const above = row_scales[row], below = row_scales[row + 8];
  float const scales[2][2] = {{above * gate, below * gate}, {above * up, below * up}};
  TESSERA_UNROLL
  for (int i = 0; i < 64; ++i) {
    d[i] = fmaf(partial[i], scales[i / 32][i / 2 % 2], first ? 0.0f : d[i]);
  }
}

template <Form kForm, int kStages>
__device__ __forceinline__ void consume(Storage<kStages>& smem, Params const& p, int consumer) {
  float acc[2][64];
  int stage = 0;
  uint32_t phase = 0;
  int const first_row = consumer * 64 + arch::warp_in_warpgroup() * 16;
  auto const release = [&](int s) {
    if (threadIdx.x % arch::kWarpgroupThreads == 0) arch::mbarrier_arrive(&smem.empty[s]);
  };
  long long const start = clock64();
  for (int tile = 0; tile < p.tiles; ++tile) {
    int previous = 0;
    for (int k = 0; k < kStagesOfTile; ++k) {
      arch::mbarrier_wait(&smem.full[stage], phase);
      uint64_t const a = arch::wgmma_descriptor_k_major(smem.a[stage] + consumer * 64 * kRowBytes);
      uint64_t const b = arch::wgmma_descriptor_k_major(smem.b[stage]);
      if constexpr (kForm == Form::kFp8Halves) {
        constexpr uint64_t kHalf = 128 * kRowBytes / 16;
        float const gate = smem.weight_scales[stage][0], up = smem.weight_scales[stage][1];
        TESSERA_UNROLL
        for (int half = 0; half < 2; ++half) {
          float partial[64];
          arch::wgmma_fence();
          TESSERA_UNROLL
          for (int step = 0; step < 4; ++step) {
            arch::wgmma_e4m3_m64n128k32(partial, a + step * arch::kWgmmaDescriptorK16,
                                        b + half * kHalf + step * arch::kWgmmaDescriptorK16, step);
          }
          arch::wgmma_commit();
          arch::wgmma_wait<0>();
          promote(acc[half], partial, k == 0, smem.row_scales[stage] + first_row, gate, up);
        }
        release(stage);
      } else {
        arch::wgmma_fence();
        TESSERA_UNROLL
        for (int step = 0; step < 4; ++step) {
          uint64_t const a_step = a + step * arch::kWgmmaDescriptorK16;
          uint64_t const b_step = b + step * arch::kWgmmaDescriptorK16;
          if constexpr (kForm == Form::kBf16) {
            arch::wgmma_m64n256k16<false, false>(acc[0], acc[1], a_step, b_step, k | step);
          } else {
            arch::wgmma_e4m3_m64n256k32(acc[0], acc[1], a_step, b_step, k | step);
          }
        }
        arch::wgmma_commit();
        if (k > 0) {
          arch::wgmma_wait<1>();
          release(previous);
        }
        previous = stage;
      }
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
    if constexpr (kForm != Form::kFp8Halves) {
      arch::wgmma_wait<0>();
      release(previous);
    }
    if (tile + 1 == p.tiles) {
      if (threadIdx.x == 128) p.gmem_cycles[blockIdx.x] = clock64() - start;
      float* const d = p.gmem_d + int64_t{blockIdx.x} * kTileM * kTileN;
      for (int i = 0; i < 128; ++i) {
        int const j = i % 64;
        int const row = first_row + arch::lane_idx() / 4 + (j / 2 % 2) * 8;
        int const column = i / 64 * 128 + j / 4 * 8 + arch::lane_idx() % 4 * 2 + j % 2;
        d[row * kTileN + column] = acc[i / 64][j];
      }
    }
  }
}

template <Form kForm, int kStages>
__global__ void __launch_bounds__(384, 1) probe(__grid_constant__ Params const p) {
  TESSERA_DYNAMIC_SHARED(smem_raw);
  auto& smem = *reinterpret_cast<Storage<kStages>*>(smem_raw);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      arch::mbarrier_init(&smem.full[s], 1);
      arch::mbarrier_init(&smem.empty[s], 2);
    }
    arch::mbarrier_fence_init();
  }
  __syncthreads();
  int const warpgroup = arch::warpgroup_idx();
  if (warpgroup == 0) {
    arch::release_registers<40>();
    if (arch::warp_idx() == 0 && arch::elect_one()) produce<kForm>(smem, p);
  } else {
    arch::acquire_registers<232>();
    consume<kForm>(smem, p, warpgroup - 1);
  }
}

// About normal, from an index alone: the sum of four uniform numbers, of variance 1.
__device__ float normal(uint64_t i, uint64_t seed) {
  float sum = 0;
  for (int part = 0; part < 4; ++part) {
    uint64_t z = (i * 4 + part + seed * 0x632be59bd9b4e019ull) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    sum += float(z >> 40) * 0x1p-23f - 1.0f;
  }
  return sum * 0.8660254f;
}

// Codes as a block of 128 normal numbers has them: its largest one, about 2.9, becomes 448.
__global__ void fill(uint8_t* gmem, int64_t bytes, uint64_t seed, bool is_fp8) {
  int64_t const step = int64_t{gridDim.x} * blockDim.x;
  int64_t const first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < (is_fp8 ? bytes : bytes / 2); i += step) {
    if (is_fp8) {
      gmem[i] = __nv_fp8_e4m3(normal(i, seed) * (448 / 2.9f)).__x;
    } else {
      reinterpret_cast<bf16*>(gmem)[i] = __float2bfloat16(normal(i, seed));
    }
  }
}

__global__ void fill_scales(float* gmem, int count, uint64_t seed) {
  int const i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) gmem[i] = (1.5f + 0.25f * normal(i, seed)) * 2.9f / 448;
}

template <Form kForm>
__global__ void plain_tile(Params p, uint8_t const* gmem_a, uint8_t const* gmem_b, int cta,
                           float* gmem_out) {
  Place const place = place_of(cta, p.tiles - 1);
  int const row = blockIdx.x, column = threadIdx.x;
  int64_t const a = int64_t{place.m * kTileM + row} * kDepthBytes;
  int64_t const b = int64_t{place.n * kTileN + column} * kDepthBytes;
  double sum = 0;
  for (int i = 0; i < kDepthBytes; i += kForm == Form::kBf16 ? 2 : 1) {
    if constexpr (kForm == Form::kBf16) {
      sum += double(__bfloat162float(*reinterpret_cast<bf16 const*>(gmem_a + a + i))) *
             __bfloat162float(*reinterpret_cast<bf16 const*>(gmem_b + b + i));
    } else {
      __nv_fp8_e4m3 x, y;
      x.__x = gmem_a[a + i];
      y.__x = gmem_b[b + i];
      double scale = 1;
      if constexpr (kForm == Form::kFp8Halves) {
        int const k = i / kRowBytes;
        scale = double(p.gmem_row_scales[k * kRows + place.m * kTileM + row]) *
                p.gmem_weight_scales[(k * (kRows / kTileN) + place.n) * 4 + column / 64 % 2];
      }
      sum += double(float(x)) * double(float(y)) * scale;
    }
  }
  gmem_out[row * kTileN + column] = float(sum);
}

CUtensorMap map_of(uint8_t const* gmem, int box_rows) {
  static auto* const encode =
      host::driver_function<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled", 12000);
  CUtensorMap map;
  uint64_t const extent[] = {kDepthBytes, kRows}, stride[] = {kDepthBytes};
  uint32_t const box[] = {kRowBytes, uint32_t(box_rows)}, element_stride[] = {1, 1};
  CUresult const result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<uint8_t*>(gmem), extent, stride,
             box, element_stride, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) std::fprintf(stderr, "no tensor map\n"), std::exit(1);
  return map;
}

struct Turn {
  double cycles, mhz, tflops;
};

template <Form kForm, int kStages>
class Runner {
 public:
  Runner(int seconds_ms) : milliseconds_(seconds_ms) {
    for (auto const& [to, seed] : {std::pair{a_.get(), 1}, {b_.get(), 2}}) {
      fill<<<1024, 256>>>(to, int64_t{kRows} * kDepthBytes, seed, kForm != Form::kBf16);
    }
    fill_scales<<<kStagesOfTile * kRows / 256, 256>>>(row_scales_.get(), kStagesOfTile * kRows, 3);
    int const weight_scales = kStagesOfTile * (kRows / kTileN) * 4;
    fill_scales<<<(weight_scales + 255) / 256, 256>>>(weight_scales_.get(), weight_scales, 4);
    p_ = {map_of(a_.get(), kTileM),
          map_of(b_.get(), kTileN),
          row_scales_.get(),
          weight_scales_.get(),
          d_.get(),
          cycles_.get(),
          256};
    TESSERA_CUDA(cudaFuncSetAttribute(probe<kForm, kStages>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      sizeof(Storage<kStages>)));
  }

  // Largest error of CTA 5's last tile over the largest value of it.
  double error() {
    launch();
    DeviceBuffer<float> expected(kTileM * kTileN);
    plain_tile<kForm><<<kTileM, kTileN>>>(p_, a_.get(), b_.get(), 5, expected.get());
    std::vector<float> right(kTileM * kTileN), got(right);
    TESSERA_CUDA(
        cudaMemcpy(right.data(), expected.get(), right.size() * 4, cudaMemcpyDeviceToHost));
    TESSERA_CUDA(cudaMemcpy(got.data(), d_.get() + 5 * right.size(), right.size() * 4,
                            cudaMemcpyDeviceToHost));
    double largest = 0, error = 0;
    for (size_t i = 0; i < right.size(); ++i) {
      largest = std::max(largest, std::fabs(double(right[i])));
      error = std::max(error, std::fabs(double(right[i]) - got[i]));
    }
    return error / largest;
  }

  Turn turn() {
    cudaEvent_t start, end;
    TESSERA_CUDA(cudaEventCreate(&start));
    TESSERA_CUDA(cudaEventCreate(&end));
    double total = 0, last = 0;
    while (total < milliseconds_) {
      TESSERA_CUDA(cudaEventRecord(start));
      launch();
      TESSERA_CUDA(cudaEventRecord(end));
      TESSERA_CUDA(cudaEventSynchronize(end));
      float ms = 0;
      TESSERA_CUDA(cudaEventElapsedTime(&ms, start, end));
      total += last = ms;
    }
    std::vector<long long> cycles(kGrid);
    TESSERA_CUDA(cudaMemcpy(cycles.data(), cycles_.get(), kGrid * 8, cudaMemcpyDeviceToHost));
    std::sort(cycles.begin(), cycles.end());
    double const stages = double(p_.tiles) * kStagesOfTile;
    double const flops =
        2.0 * kTileM * kTileN * kRowBytes / (kForm == Form::kBf16 ? 2 : 1) * stages * kGrid;
    return {double(cycles[kGrid / 2]) / stages, double(cycles[kGrid / 2]) / last / 1e3,
            flops / last / 1e9};
  }

 private:
  static constexpr int kGrid = 132;

  void launch() {
    probe<kForm, kStages><<<kGrid, 384, sizeof(Storage<kStages>)>>>(p_);
    TESSERA_CUDA(cudaGetLastError());
  }

  double milliseconds_;
  DeviceBuffer<uint8_t> a_{int64_t{kRows} * kDepthBytes}, b_{int64_t{kRows} * kDepthBytes};
  DeviceBuffer<float> row_scales_{kStagesOfTile * kRows},
      weight_scales_{kStagesOfTile * (kRows / kTileN) * 4};
  DeviceBuffer<float> d_{int64_t{kGrid} * kTileM * kTileN};
  DeviceBuffer<long long> cycles_{kGrid};
  Params p_{};
};

int run(int turn_ms, int rounds) {
  Runner<Form::kBf16, 4> bf16_loop(turn_ms);
  Runner<Form::kFp8, 4> fp8_loop(turn_ms);
  Runner<Form::kFp8Halves, 4> halves(turn_ms);
  Runner<Form::kFp8Halves, 3> halves3(turn_ms);
  double const errors[] = {bf16_loop.error(), fp8_loop.error(), halves.error(), halves3.error()};
  // One accumulator keeps 13 bits of a sum of 2048 products.
  double const allowed[] = {1e-5, 1e-2, 2e-3, 2e-3};
  std::vector<std::vector<Turn>> turns(4);
  for (int r = 0; r < rounds; ++r) {
    turns[0].push_back(bf16_loop.turn());
    turns[1].push_back(fp8_loop.turn());
    turns[2].push_back(halves.turn());
    turns[3].push_back(halves3.turn());
  }
  int bad = 0;
  std::printf("[");
  for (int f = 0; f < 4; ++f) {
    auto const median = [&](double Turn::* field) {
      std::vector<double> values;
      for (Turn const& t : turns[f]) values.push_back(t.*field);
      std::sort(values.begin(), values.end());
      return values[values.size() / 2];
    };
    bool const good = errors[f] <= allowed[f];
    bad += good ? 0 : 1;
    std::printf(
        "%s\n  {\"form\": \"%s\", \"stages\": %d, \"cycles_of_a_stage\": %.1f, \"mhz\": %.0f, "
        "\"tflops\": %.0f, \"error\": %.2e, \"checked\": %s}",
        f ? "," : "", kFormNames[std::min(f, 2)], f == 3 ? 3 : 4, median(&Turn::cycles),
        median(&Turn::mhz), median(&Turn::tflops), errors[f], good ? "true" : "false");
  }
  std::printf("\n]\n");
  return bad ? 1 : 0;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  return tessera::bench::run(argc > 1 ? std::atoi(argv[1]) : 1000,
                             argc > 2 ? std::atoi(argv[2]) : 5);
}

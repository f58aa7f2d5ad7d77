// SPDX-License-Identifier: Apache-2.0
// Measures what a k loop of e4m3 wgmmas costs on Hopper if its partial sums are promoted to fp32 every 128 products.
//
// Persistent CTAs of a TMA producer and two consumer warpgroups multiply tiles of 128 x 256 whose operands lie in L2;
// nothing is stored but the last tile. Forms of the loop, each with stages of 48 KB and 128 bytes of k in each row:
//   bf16          m64n256k16, one group in flight behind the next, as the library's GEMMs do it; 64 of k in a stage
//   fp8           m64n256k32 in the same way, into one accumulator, without scales: the most that could be had
//   fp8-halves    m64n128k32 into a partial sum, which is scaled and added to the accumulator, twice a stage; a
//                 warpgroup waits for each of its groups, so that the other's fill the tensor cores meanwhile
//   fp8-quarters  m64n64k32 into two partial sums in turn: one is added up under the multiplications of the other
//   fp8-192       m64n192k32 into a partial sum as large as the accumulator, tiles of 128 x 192
// The forms run in turns. Prints cycles of a stage and of the tensor cores alone (N/2 for each 32 of k), the clock, and
// TFLOP/s; checks the last tile against a plain kernel.
#include <cuda_fp8.h>

#include <cstring>

#include "../../src/cuda/arch/bulk_copy.cuh"
#include "../../src/cuda/arch/dynamic_shared.cuh"
#include "../../src/cuda/arch/setmaxnreg.cuh"
#include "../../src/cuda/arch/sm90/wgmma_e4m3.cuh"
#include "../../src/cuda/arch/tma.cuh"
#include "../../src/cuda/arch/warp.cuh"
#include "../../src/cuda/host/driver.hpp"
#include "support.cuh"

namespace tessera::bench {
namespace {

using namespace cuda;

enum class Form { kBf16, kFp8, kFp8Halves, kFp8Quarters, kFp8Whole192 };
constexpr char const* kFormNames[] = {"bf16", "fp8", "fp8-halves", "fp8-quarters", "fp8-192"};
consteval bool promotes(Form form) { return form != Form::kBf16 && form != Form::kFp8; }
consteval int tile_n(Form form) { return form == Form::kFp8Whole192 ? 192 : 256; }

constexpr int kRowBytes = 128;  // of k in a stage
constexpr int kTileM = 128;
constexpr int kRows = 7680;        // of A and of B: whole tiles of 128, 192 and 256
constexpr int kDepthBytes = 2048;  // k of both, in bytes: with kRows twice 16 MB, which L2 holds
constexpr int kStagesOfTile = kDepthBytes / kRowBytes;

template <Form kForm, int kStages>
struct Storage {
  alignas(1024) uint8_t a[kStages][kTileM * kRowBytes];
  alignas(1024) uint8_t b[kStages][tile_n(kForm) * kRowBytes];
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
template <Form kForm>
__device__ __host__ Place place_of(int cta, int tile) {
  constexpr int kTileN = tile_n(kForm);
  int const unit = cta + tile * 132;
  return {unit % (kRows / kTileM), unit / (kRows / kTileM) % (kRows / kTileN)};
}

template <Form kForm, int kStages>
__device__ __forceinline__ void produce(Storage<kForm, kStages>& smem, Params const& p) {
  constexpr int kTileN = tile_n(kForm);
  int stage = 0;
  uint32_t phase = 0;
  for (int tile = 0; tile < p.tiles; ++tile) {
    Place const place = place_of<kForm>(blockIdx.x, tile);
    for (int k = 0; k < kStagesOfTile; ++k) {
      arch::mbarrier_wait(&smem.empty[stage], phase ^ 1);
      constexpr uint32_t kScaleBytes = promotes(kForm) ? kTileM * 4 + 16 : 0;
      arch::mbarrier_arrive_expect_tx(&smem.full[stage],
                                      (kTileM + kTileN) * kRowBytes + kScaleBytes);
      arch::tma_load(smem.a[stage], &p.a, &smem.full[stage], k * kRowBytes, place.m * kTileM);
      arch::tma_load(smem.b[stage], &p.b, &smem.full[stage], k * kRowBytes, place.n * kTileN);
      if constexpr (promotes(kForm)) {
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

// Scales of a thread's two rows and of the gate and up columns, multiplied.
struct Scales {
  float of[2][2];  // [gate, up][upper, lower row]
  __device__ __forceinline__ Scales(float const* row_scales, float const* weight_scales) {
    int const row = arch::lane_idx() / 4;
    float const above = row_scales[row], below = row_scales[row + 8];
    float const gate = weight_scales[0], up = weight_scales[1];
    of[0][0] = above * gate, of[0][1] = below * gate, of[1][0] = above * up, of[1][1] = below * up;
  }
};

// d += partial, whose first register belongs to d[first]. Columns come as 64 of gate, 64 of up, and so on.
template <int kCount, int kAll>
__device__ __forceinline__ void promote(float (&d)[kAll], float const (&partial)[kCount], int first,
                                        Scales const& scales) {
  TESSERA_UNROLL
  for (int i = 0; i < kCount; ++i) {
    int const j = first + i;
    d[j] = fmaf(partial[i], scales.of[j / 32 % 2][j / 2 % 2], d[j]);
  }
}

template <Form kForm, int kStages>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(Storage<kForm, kStages>& smem, int consumer)
      : smem_(smem),
        consumer_(consumer),
        first_row_(consumer * 64 + arch::warp_in_warpgroup() * 16) {}

  static constexpr int kTileN = tile_n(kForm);
  static constexpr int kRegisters = kTileN / 2;

  __device__ __forceinline__ void multiply_tile(float (&acc)[kRegisters]) {
    if constexpr (promotes(kForm)) {
      TESSERA_UNROLL
      for (int i = 0; i < kRegisters; ++i) acc[i] = 0;
    }
    if constexpr (kForm == Form::kFp8Quarters) {
      multiply_quarters(acc);
    } else if constexpr (promotes(kForm)) {
      multiply_parts(acc);
    } else {
      multiply_plainly(acc);
    }
  }

  __device__ __forceinline__ int first_row() const { return first_row_; }

 private:
  __device__ __forceinline__ void wait_full() { arch::mbarrier_wait(&smem_.full[stage_], phase_); }
  __device__ __forceinline__ void advance() {
    if (++stage_ == kStages) stage_ = 0, phase_ ^= 1;
  }
  __device__ __forceinline__ void release(int stage) {
    if (threadIdx.x % arch::kWarpgroupThreads == 0) arch::mbarrier_arrive(&smem_.empty[stage]);
  }
  __device__ __forceinline__ uint64_t a() const {
    return arch::wgmma_descriptor_k_major(smem_.a[stage_] + consumer_ * 64 * kRowBytes);
  }
  __device__ __forceinline__ uint64_t b(int row) const {
    return arch::wgmma_descriptor_k_major(smem_.b[stage_] + row * kRowBytes);
  }
  __device__ __forceinline__ Scales scales() const {
    return {smem_.row_scales[stage_] + first_row_, smem_.weight_scales[stage_]};
  }

  // Calls multiply(a, b, step) for the four steps of a stage, as one group.
  template <class Multiply>
  __device__ __forceinline__ void issue(int row, Multiply multiply) {
    uint64_t const first_a = a(), first_b = b(row);
    arch::wgmma_fence();
    TESSERA_UNROLL
    for (int step = 0; step < 4; ++step) {
      multiply(first_a + step * arch::kWgmmaDescriptorK16,
               first_b + step * arch::kWgmmaDescriptorK16, step);
    }
    arch::wgmma_commit();
  }

  __device__ __forceinline__ void multiply_plainly(float (&acc)[kRegisters]) {
    auto& low = *reinterpret_cast<float (*)[64]>(&acc[0]);
    auto& high = *reinterpret_cast<float (*)[64]>(&acc[64]);
    int previous = 0;
    for (int k = 0; k < kStagesOfTile; ++k, advance()) {
      wait_full();
      issue(0, [&](uint64_t a, uint64_t b, int step) {
        if constexpr (kForm == Form::kBf16) {
          arch::wgmma_m64n256k16<false, false>(low, high, a, b, k | step);
        } else {
          arch::wgmma_e4m3_m64n256k32(low, high, a, b, k | step);
        }
      });
      if (k > 0) {
        arch::wgmma_wait<1>();
        release(previous);
      }
      previous = stage_;
    }
    arch::wgmma_wait<0>();
    release(previous);
  }

  __device__ __forceinline__ void multiply_parts(float (&acc)[kRegisters]) {
    constexpr int kParts = kForm == Form::kFp8Halves ? 2 : 1;
    for (int k = 0; k < kStagesOfTile; ++k) {
      wait_full();
      Scales const factors = scales();
      int const now = stage_;
      TESSERA_UNROLL
      for (int part = 0; part < kParts; ++part) {
        float partial[kRegisters / kParts];
        issue(part * 128, [&](uint64_t a, uint64_t b, int step) {
          if constexpr (kForm == Form::kFp8Halves) {
            arch::wgmma_e4m3_m64n128k32(partial, a, b, step);
          } else {
            arch::wgmma_e4m3_m64n192k32(partial, a, b, step);
          }
        });
        arch::wgmma_wait<0>();
        if (part == kParts - 1) release(now);
        promote(acc, partial, part * kRegisters / kParts, factors);
      }
      advance();
    }
  }

  // A group is in flight while the one before it is added up.
  __device__ __forceinline__ void multiply_quarters(float (&acc)[kRegisters]) {
    float partial[2][32];
    auto const begin = [&](float (&to)[32], int quarter) {
      issue(quarter * 64,
            [&](uint64_t a, uint64_t b, int step) { arch::wgmma_e4m3_m64n64k32(to, a, b, step); });
    };
    for (int k = 0; k < kStagesOfTile; ++k) {
      wait_full();
      Scales const factors = scales();
      begin(partial[0], 0);
      TESSERA_UNROLL
      for (int quarter = 0; quarter < 4; ++quarter) {
        if (quarter < 3) {
          begin(partial[(quarter + 1) % 2], quarter + 1);
          arch::wgmma_wait<1>();
        } else {
          arch::wgmma_wait<0>();
          release(stage_);
        }
        promote(acc, partial[quarter % 2], quarter * 32, factors);
      }
      advance();
    }
  }

  Storage<kForm, kStages>& smem_;
  int const consumer_, first_row_;
  int stage_ = 0;
  uint32_t phase_ = 0;
};

template <Form kForm, int kStages>
__device__ __forceinline__ void consume(Storage<kForm, kStages>& smem, Params const& p, int index) {
  constexpr int kTileN = tile_n(kForm);
  constexpr int kRegisters = kTileN / 2;
  Consumer<kForm, kStages> consumer(smem, index);
  int const first_row = consumer.first_row();
  float acc[kRegisters];
  long long const start = clock64();
  for (int tile = 0; tile < p.tiles; ++tile) {
    consumer.multiply_tile(acc);
    if (tile + 1 == p.tiles) {
      if (threadIdx.x == 128) p.gmem_cycles[blockIdx.x] = clock64() - start;
      float* const d = p.gmem_d + int64_t{blockIdx.x} * kTileM * kTileN;
      TESSERA_UNROLL
      for (int i = 0; i < kRegisters; ++i) {
        int const row = first_row + arch::lane_idx() / 4 + (i / 2 % 2) * 8;
        int const column = i / 4 * 8 + arch::lane_idx() % 4 * 2 + i % 2;
        d[row * kTileN + column] = acc[i];
      }
    }
  }
}

template <Form kForm, int kStages>
__global__ void __launch_bounds__(384, 1) probe(__grid_constant__ Params const p) {
  TESSERA_DYNAMIC_SHARED(smem_raw);
  auto& smem = *reinterpret_cast<Storage<kForm, kStages>*>(smem_raw);
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
  constexpr int kTileN = tile_n(kForm);
  Place const place = place_of<kForm>(cta, p.tiles - 1);
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
      if constexpr (promotes(kForm)) {
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

struct Row {
  Form form;
  int stages, tensor_cores_alone;
  double error;
  std::vector<Turn> turns;
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
                                      sizeof(Storage<kForm, kStages>)));
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
  static constexpr int kTileN = tile_n(kForm);

  void launch() {
    probe<kForm, kStages><<<kGrid, 384, sizeof(Storage<kForm, kStages>)>>>(p_);
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

template <Form kForm, int kStages>
void take_turn(Row& row, Runner<kForm, kStages>& runner) {
  if (row.turns.empty()) row = {kForm, kStages, 4 * tile_n(kForm), runner.error(), {}};
  row.turns.push_back(runner.turn());
}

double median(Row const& row, double Turn::* field) {
  std::vector<double> values;
  for (Turn const& t : row.turns) values.push_back(t.*field);
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int run(int turn_ms, int rounds) {
  Runner<Form::kBf16, 4> bf16_loop(turn_ms);
  Runner<Form::kFp8, 4> fp8_loop(turn_ms);
  Runner<Form::kFp8Halves, 4> halves(turn_ms);
  Runner<Form::kFp8Halves, 3> halves_3(turn_ms);
  Runner<Form::kFp8Quarters, 4> quarters(turn_ms);
  Runner<Form::kFp8Quarters, 3> quarters_3(turn_ms);
  Runner<Form::kFp8Whole192, 4> whole_192(turn_ms);
  std::vector<Row> rows(7);
  for (int r = 0; r < rounds; ++r) {
    take_turn(rows[0], bf16_loop);
    take_turn(rows[1], fp8_loop);
    take_turn(rows[2], halves);
    take_turn(rows[3], halves_3);
    take_turn(rows[4], quarters);
    take_turn(rows[5], quarters_3);
    take_turn(rows[6], whole_192);
  }
  int bad = 0;
  std::printf("[");
  for (Row const& row : rows) {
    // One accumulator keeps 13 bits of a sum of 2048 products.
    double const allowed = row.form == Form::kBf16 ? 1e-5 : row.form == Form::kFp8 ? 1e-2 : 2e-3;
    bool const good = row.error <= allowed;
    bad += good ? 0 : 1;
    std::printf(
        "%s\n  {\"form\": \"%s\", \"stages\": %d, \"cycles_of_a_stage\": %.1f, "
        "\"tensor_cores_alone\": %d, "
        "\"mhz\": %.0f, \"tflops\": %.0f, \"error\": %.2e, \"checked\": %s}",
        &row == rows.data() ? "" : ",", kFormNames[int(row.form)], row.stages,
        median(row, &Turn::cycles), row.tensor_cores_alone, median(row, &Turn::mhz),
        median(row, &Turn::tflops), row.error, good ? "true" : "false");
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

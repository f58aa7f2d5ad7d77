// SPDX-License-Identifier: Apache-2.0
// What the GPU benchmarks share: device buffers, random data, routing, comparison with the plain
// twin, timing. Programs of this folder may print and exit; the library never does.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace tessera::bench {

using bf16 = __nv_bfloat16;

inline void check(cudaError_t error, char const* what, char const* file, int line) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s:%d: %s: %s\n", file, line, what, cudaGetErrorString(error));
  std::exit(1);
}
#define TESSERA_CUDA(call) ::tessera::bench::check((call), #call, __FILE__, __LINE__)

template <typename T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(int64_t count) : count_(count) {
    TESSERA_CUDA(cudaMalloc(&data_, std::max<int64_t>(count, 1) * sizeof(T)));
  }
  explicit DeviceBuffer(std::vector<T> const& host) : DeviceBuffer(int64_t(host.size())) {
    TESSERA_CUDA(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  DeviceBuffer(DeviceBuffer const&) = delete;
  ~DeviceBuffer() { cudaFree(data_); }

  T* get() const { return data_; }
  int64_t count() const { return count_; }
  void poison() const { TESSERA_CUDA(cudaMemset(data_, 0xff, count_ * sizeof(T))); }  // all NaN

 private:
  T* data_ = nullptr;
  int64_t count_ = 0;
};

// Uniform in [-scale, scale], from the element's index and the seed alone.
template <class T>
__global__ void fill_uniform(T* gmem, int64_t count, uint64_t seed, float scale) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t z = (uint64_t(i) + seed * 0x632be59bd9b4e019ull) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    gmem[i] = T(scale * (float(z >> 40) * 0x1p-23f - 1.0f));
  }
}

// Materialises x in expert order, 16 bytes per thread.
__global__ void permute_rows(uint4* gmem_out, uint4 const* gmem_x, int const* gather_index,
                             int64_t rows, int row_chunks) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < rows * row_chunks;
       i += int64_t{gridDim.x} * blockDim.x) {
    gmem_out[i] = gmem_x[int64_t{gather_index[i / row_chunks]} * row_chunks + i % row_chunks];
  }
}

// Rows of each expert in token order.
struct Routing {
  std::vector<int> expert_offsets;
  std::vector<int> gather_index;

  static Routing from_choices(std::vector<int> const& expert_of_slot, int experts, int top_k) {
    Routing r;
    r.expert_offsets.assign(experts + 1, 0);
    for (int e : expert_of_slot) ++r.expert_offsets[e + 1];
    std::partial_sum(r.expert_offsets.begin(), r.expert_offsets.end(), r.expert_offsets.begin());
    std::vector<int> next(r.expert_offsets.begin(), r.expert_offsets.end() - 1);
    r.gather_index.resize(expert_of_slot.size());
    for (size_t slot = 0; slot < expert_of_slot.size(); ++slot) {
      r.gather_index[next[expert_of_slot[slot]]++] = int(slot) / top_k;
    }
    return r;
  }

  // Every token chooses top_k distinct experts, all choices equally likely.
  static Routing random(int tokens, int experts, int top_k, uint64_t seed) {
    std::mt19937_64 rng(seed);
    std::vector<int> ids(experts);
    std::iota(ids.begin(), ids.end(), 0);
    std::vector<int> choices;
    for (int t = 0; t < tokens; ++t) {
      for (int k = 0; k < top_k; ++k) {
        std::swap(ids[k], ids[k + rng() % (experts - k)]);
        choices.push_back(ids[k]);
      }
    }
    return from_choices(choices, experts, top_k);
  }

  // Every expert gets tokens * top_k / experts rows: shuffled decks of all experts, dealt in turn.
  static Routing balanced(int tokens, int experts, int top_k, uint64_t seed) {
    std::mt19937_64 rng(seed);
    std::vector<int> deck(experts);
    std::iota(deck.begin(), deck.end(), 0);
    std::vector<int> choices;
    while (int64_t(choices.size()) < int64_t{tokens} * top_k) {
      std::shuffle(deck.begin(), deck.end(), rng);
      choices.insert(choices.end(), deck.begin(), deck.end());
    }
    choices.resize(int64_t{tokens} * top_k);
    return from_choices(choices, experts, top_k);
  }
};

// Outcome of a comparison with fp32 values of the same rows.
struct Deviation {
  unsigned bad_elements;   // outside the allowance, or NaN
  unsigned bad_canaries;   // rows past the end that were written
  unsigned worst_row_e7;   // largest ||out - ref|| / ||ref|| of a row, in units of 1e-7
  unsigned worst_element;  // largest |out - ref| / allowance, in units of 1e-3
  bool ok(double row_limit) const {
    return bad_elements == 0 && bad_canaries == 0 && worst_row_e7 < row_limit * 1e7;
  }
};

// One block per row. Allowance per element: one bf16 rounding doubled (2^-8), an absolute floor for
// the order of the fp32 sum, and `product_scale` times |g*u| for an approximate sigmoid.
__global__ void compare_rows(bf16 const* out, float const* ref, float const* ref_gate_up,
                             int64_t rows, int64_t columns, float floor, float product_scale,
                             Deviation* result) {
  int64_t const row = blockIdx.x;
  if (row >= rows) {
    for (int64_t c = threadIdx.x; c < columns; c += blockDim.x) {
      if (__bfloat16_as_ushort(out[row * columns + c]) != 0xffff) {
        atomicAdd(&result->bad_canaries, 1u);
      }
    }
    return;
  }
  float difference = 0;
  float norm = 0;
  float worst = 0;
  unsigned bad = 0;
  for (int64_t c = threadIdx.x; c < columns; c += blockDim.x) {
    float const r = ref[row * columns + c];
    float const delta = fabsf(__bfloat162float(out[row * columns + c]) - r);
    float allowance = fabsf(r) * 0x1p-8f + floor;
    if (ref_gate_up != nullptr) {
      float const* const gate_up = ref_gate_up + row * 2 * columns + c;
      allowance += product_scale * fabsf(gate_up[0] * gate_up[columns]);
    }
    if (!(delta <= allowance)) ++bad;
    worst = fmaxf(worst, delta / allowance);
    difference += delta * delta;
    norm += r * r;
  }
  for (int d = 16; d > 0; d /= 2) {
    difference += __shfl_xor_sync(0xffffffffu, difference, d);
    norm += __shfl_xor_sync(0xffffffffu, norm, d);
    worst = fmaxf(worst, __shfl_xor_sync(0xffffffffu, worst, d));
    bad += __shfl_xor_sync(0xffffffffu, bad, d);
  }
  __shared__ float sums[2][32];
  int const warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) {
    sums[0][warp] = difference;
    sums[1][warp] = norm;
    if (bad) atomicAdd(&result->bad_elements, bad);
    atomicMax(&result->worst_element, unsigned(fminf(worst, 4e6f) * 1e3f));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < int(blockDim.x) / 32; ++w) {
      difference += sums[0][w];
      norm += sums[1][w];
    }
    float const error = norm > 0 ? sqrtf(difference / norm) : (difference > 0 ? 1.0f : 0.0f);
    atomicMax(&result->worst_row_e7, unsigned(fminf(error, 400.0f) * 1e7f));
  }
}

__global__ void count_differences(uint16_t const* a, uint16_t const* b, int64_t count,
                                  unsigned* differences) {
  unsigned mine = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    mine += a[i] != b[i];
  }
  if (mine) atomicAdd(differences, mine);
}

inline bool same_bits(DeviceBuffer<bf16> const& a, DeviceBuffer<bf16> const& b) {
  DeviceBuffer<unsigned> differences(std::vector<unsigned>{0});
  count_differences<<<4096, 256>>>(reinterpret_cast<uint16_t const*>(a.get()),
                                   reinterpret_cast<uint16_t const*>(b.get()), a.count(),
                                   differences.get());
  unsigned host = 1;
  TESSERA_CUDA(cudaMemcpy(&host, differences.get(), sizeof host, cudaMemcpyDeviceToHost));
  return host == 0;
}

struct Quantiles {
  float median, p10, p90;
};

inline Quantiles quantiles(std::vector<float> ms) {
  std::sort(ms.begin(), ms.end());
  auto const at = [&](double q) { return ms[size_t(q * double(ms.size() - 1) + 0.5)]; };
  return {at(0.5), at(0.1), at(0.9)};
}

class Timer {
 public:
  Timer() {
    TESSERA_CUDA(cudaEventCreate(&begin_));
    TESSERA_CUDA(cudaEventCreate(&end_));
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  template <typename Launch>
  void record(Launch&& launch) {
    TESSERA_CUDA(cudaEventRecord(begin_));
    launch();
    TESSERA_CUDA(cudaEventRecord(end_));
  }
  float ms() const {
    float elapsed = 0;
    TESSERA_CUDA(cudaEventSynchronize(end_));
    TESSERA_CUDA(cudaEventElapsedTime(&elapsed, begin_, end_));
    return elapsed;
  }

 private:
  cudaEvent_t begin_, end_;
};

inline std::string read_command(char const* command) {
  std::string text;
  if (FILE* pipe = popen(command, "r")) {
    char line[256];
    while (std::fgets(line, sizeof line, pipe)) text += line;
    pclose(pipe);
  }
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

// A results file: what ran where, `protocol` in words, `ceilings` as JSON members if any, and the rows as JSON objects.
inline void write_results(std::string const& path, std::string const& command,
                          std::string const& protocol, std::string const& rows,
                          std::string const& ceilings = "") {
  cudaDeviceProp device{};
  TESSERA_CUDA(cudaGetDeviceProperties(&device, 0));
  char const* const commit = std::getenv("COMMIT");
  FILE* const file = std::fopen(path.c_str(), "w");
  if (file == nullptr) {
    std::fprintf(stderr, "cannot write %s\n", path.c_str());
    std::exit(1);
  }
  std::fprintf(
      file,
      "{\"command\": \"%s\", \"commit\": \"%s\", \"device\": \"%s\", \"driver\": \"%s\", "
      "\"clocks_mhz\": [%s], \"date\": \"%s\",\n \"protocol\": \"%s\",\n",
      command.c_str(), commit != nullptr ? commit : "", device.name,
      read_command("nvidia-smi -i 0 --query-gpu=driver_version --format=csv,noheader").c_str(),
      read_command("nvidia-smi -i 0 --query-gpu=clocks.sm,clocks.mem --format=csv,noheader,nounits")
          .c_str(),
      read_command("date +%F").c_str(), protocol.c_str());
  if (!ceilings.empty()) std::fprintf(file, " \"ceilings\": {%s},\n", ceilings.c_str());
  std::fprintf(file, " \"rows\": [%s\n]}\n", rows.c_str());
  std::fclose(file);
}

}  // namespace tessera::bench

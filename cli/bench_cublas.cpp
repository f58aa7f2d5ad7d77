// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_cublas.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cli/commands.hpp"

namespace tessera::cli {
namespace {

constexpr char kLibrary[] = "libcublas.so.13";
// Values of cuBLAS's enums, which are part of its ABI.
constexpr int kTranspose = 1, kNoTranspose = 0;  // cublasOperation_t
constexpr int kBf16 = 14;                        // CUDA_R_16BF
constexpr int kFp32Sums = 68;                    // CUBLAS_COMPUTE_32F
constexpr int kDefaultAlgorithm = -1;            // CUBLAS_GEMM_DEFAULT

void require(int status, char const* what) {
  if (status != 0) throw CommandError(fmt::format("{}: status {}", what, status), kEnvironment);
}

device::Memory random_bf16(device::Stream const& stream, std::int32_t device, std::int64_t count,
                           std::uint64_t seed, float scale) {
  auto memory = device::allocate(device, 2 * static_cast<std::size_t>(count), device::Kind::device);
  stream.fill_uniform(memory.get(), count, seed, scale);
  return memory;
}

}  // namespace

struct Cublas::Functions {
  void* library = nullptr;
  int (*create)(void**) = nullptr;
  int (*destroy)(void*) = nullptr;
  int (*set_stream)(void*, void*) = nullptr;
  int (*gemm)(void*, int, int, int, int, int, void const*, void const*, int, int, long long,
              void const*, int, int, long long, void const*, void*, int, int, long long, int, int,
              int) = nullptr;
};

Cublas::Cublas() : functions_(std::make_unique<Functions>()) {
  Functions& f = *functions_;
  f.library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (f.library == nullptr) {
    throw CommandError(
        fmt::format("{}: not found, the bound needs it; install cuBLAS 13 or name its folder in "
                    "LD_LIBRARY_PATH",
                    kLibrary),
        kEnvironment);
  }
  auto const find = [&](char const* name, auto& function) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(f.library, name));
    if (function == nullptr)
      throw CommandError(fmt::format("{} lacks {}", kLibrary, name), kEnvironment);
  };
  find("cublasCreate_v2", f.create);
  find("cublasDestroy_v2", f.destroy);
  find("cublasSetStream_v2", f.set_stream);
  find("cublasGemmStridedBatchedEx", f.gemm);
  require(f.create(&handle_), "cublasCreate");
}

Cublas::~Cublas() {
  if (handle_ != nullptr) functions_->destroy(handle_);
  ::dlclose(functions_->library);
}

void Cublas::batched_gemm(device::Stream const& stream, std::int64_t batch, std::int64_t m,
                          std::int64_t n, std::int64_t k, void const* a, void const* b,
                          void* c) const {
  float const one = 1, zero = 0;
  require(functions_->set_stream(handle_, stream.handle().native), "cublasSetStream");
  // cuBLAS is column-major: c^T [n,m] = b [n,k] a^T [k,m].
  auto const narrow = [](std::int64_t value) { return static_cast<int>(value); };
  require(functions_->gemm(handle_, kTranspose, kNoTranspose, narrow(n), narrow(m), narrow(k), &one,
                           b, kBf16, narrow(k), n * k, a, kBf16, narrow(k), m * k, &zero, c, kBf16,
                           narrow(n), m * n, narrow(batch), kFp32Sums, kDefaultAlgorithm),
          "cublasGemmStridedBatchedEx");
}

CublasBound::CublasBound(Cublas const& cublas, device::Stream const& stream, std::int32_t device,
                         MoeDesc const& desc, std::int64_t rows)
    : cublas_(cublas),
      experts_(desc.shape.experts),
      rows_(std::max<std::int64_t>(1, (rows + experts_ / 2) / experts_)),
      hidden_(desc.shape.hidden),
      intermediate_(desc.shape.intermediate),
      up_columns_(desc.up_width() * intermediate_) {
  auto const values = [&](std::int64_t count, std::uint64_t seed, std::int64_t fan_in) {
    return random_bf16(stream, device, experts_ * count, seed,
                       3 / std::sqrt(static_cast<float>(fan_in)));
  };
  x_ = values(rows_ * hidden_, 11, 9);
  h_ = values(rows_ * up_columns_, 12, 9);
  a_ = values(rows_ * intermediate_, 13, 9);
  y_ = values(rows_ * hidden_, 14, 9);
  w_up_ = values(up_columns_ * hidden_, 15, hidden_);
  w_down_ = values(hidden_ * intermediate_, 16, intermediate_);
}

void CublasBound::up(device::Stream const& stream) const {
  cublas_.batched_gemm(stream, experts_, rows_, up_columns_, hidden_, x_.get(), w_up_.get(),
                       h_.get());
}

void CublasBound::down(device::Stream const& stream) const {
  cublas_.batched_gemm(stream, experts_, rows_, hidden_, intermediate_, a_.get(), w_down_.get(),
                       y_.get());
}

double gemm_ceiling_tflops(Cublas const& cublas, device::Stream const& stream,
                           std::int32_t device) {
  constexpr std::int64_t kSize = 8192;
  constexpr int kWarmUps = 20, kTimes = 10;
  auto const a = random_bf16(stream, device, kSize * kSize, 21, 1);
  auto const b = random_bf16(stream, device, kSize * kSize, 22, 1);
  auto const c = random_bf16(stream, device, kSize * kSize, 23, 1);
  std::vector<device::Event> events(kTimes + 1);
  for (int i = 0; i < kWarmUps + kTimes; ++i) {
    if (i >= kWarmUps) events[static_cast<std::size_t>(i - kWarmUps)].record(stream);
    cublas.batched_gemm(stream, 1, kSize, kSize, kSize, a.get(), b.get(), c.get());
  }
  events[kTimes].record(stream);
  stream.synchronize();
  std::vector<double> ms;
  for (std::size_t i = 1; i < events.size(); ++i) ms.push_back(events[i].since(events[i - 1]));
  std::nth_element(ms.begin(), ms.begin() + kTimes / 2, ms.end());
  constexpr double kFlops = 2.0 * kSize * kSize * kSize;
  return kFlops / ms[kTimes / 2] * 1e-9;
}

}  // namespace tessera::cli

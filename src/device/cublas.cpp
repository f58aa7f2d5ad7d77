// SPDX-License-Identifier: Apache-2.0
#include "device/cublas.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace tessera::device {
namespace {

constexpr char kLibrary[] = "libcublas.so.13";
// Values of cuBLAS's enums, which are part of its ABI.
constexpr int kTranspose = 1, kNoTranspose = 0;  // cublasOperation_t
constexpr int kBf16 = 14;                        // CUDA_R_16BF
constexpr int kFp32Sums = 68;                    // CUBLAS_COMPUTE_32F
constexpr int kDefaultAlgorithm = -1;            // CUBLAS_GEMM_DEFAULT

void require(int status, char const* what) {
  if (status != 0) throw Error(std::string(what) + ": status " + std::to_string(status));
}

Memory random_bf16(Stream const& stream, std::int32_t device, std::int64_t count,
                   std::uint64_t seed, float scale) {
  auto memory = allocate(device, 2 * static_cast<std::size_t>(count), Kind::device);
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
  int (*grouped_gemm)(void*, int const*, int const*, int const*, int const*, int const*,
                      void const*, void const* const*, int, int const*, void const* const*, int,
                      int const*, void const*, void* const*, int, int const*, int, int const*,
                      int) = nullptr;
};

Cublas::Cublas() : functions_(std::make_unique<Functions>()) {
  Functions& f = *functions_;
  f.library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (f.library == nullptr) {
    throw Error(std::string(kLibrary) +
                ": not found, the bound needs it; install cuBLAS 13 or name its folder in "
                "LD_LIBRARY_PATH");
  }
  auto const find = [&](char const* name, auto& function) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(f.library, name));
    if (function == nullptr) throw Error(std::string(kLibrary) + " lacks " + name);
  };
  find("cublasCreate_v2", f.create);
  find("cublasDestroy_v2", f.destroy);
  find("cublasSetStream_v2", f.set_stream);
  find("cublasGemmStridedBatchedEx", f.gemm);
  find("cublasGemmGroupedBatchedEx", f.grouped_gemm);
  require(f.create(&handle_), "cublasCreate");
}

Cublas::~Cublas() {
  if (handle_ != nullptr) functions_->destroy(handle_);
  ::dlclose(functions_->library);
}

void Cublas::batched_gemm(Stream const& stream, std::int64_t batch, std::int64_t m, std::int64_t n,
                          std::int64_t k, Operand a, Operand b, void* c) const {
  float const one = 1, zero = 0;
  require(functions_->set_stream(handle_, stream.handle().native), "cublasSetStream");
  // cuBLAS is column-major: c^T [n,m] = b^T [n,k] a^T [k,m]; what is row-major it sees transposed already.
  auto const narrow = [](std::int64_t value) { return static_cast<int>(value); };
  auto const operation = [](Operand const& operand) {
    return operand.transposed ? kTranspose : kNoTranspose;
  };
  require(functions_->gemm(handle_, operation(b), operation(a), narrow(n), narrow(m), narrow(k),
                           &one, b.data, kBf16, narrow(b.transposed ? k : n), n * k, a.data, kBf16,
                           narrow(a.transposed ? m : k), m * k, &zero, c, kBf16, narrow(n), m * n,
                           narrow(batch), kFp32Sums, kDefaultAlgorithm),
          "cublasGemmStridedBatchedEx");
}

void Cublas::grouped_gemm(Stream const& stream, std::int64_t n, std::int64_t k,
                          Groups const& groups) const {
  std::size_t const count = groups.rows.size();
  std::vector<int> const transposed(count, kTranspose), plain(count, kNoTranspose),
      one_each(count, 1);
  std::vector<int> const columns(count, static_cast<int>(n)), depths(count, static_cast<int>(k));
  std::vector<float> const ones(count, 1.0f), zeros(count, 0.0f);
  require(functions_->set_stream(handle_, stream.handle().native), "cublasSetStream");
  // Column-major, as above: c^T [n,rows] = b [n,k] a^T [k,rows].
  require(functions_->grouped_gemm(handle_, transposed.data(), plain.data(), columns.data(),
                                   groups.rows.data(), depths.data(), ones.data(), groups.b, kBf16,
                                   depths.data(), groups.a, kBf16, depths.data(), zeros.data(),
                                   groups.c, kBf16, columns.data(), static_cast<int>(count),
                                   one_each.data(), kFp32Sums),
          "cublasGemmGroupedBatchedEx");
}

CublasBound::CublasBound(Cublas const& cublas, Stream const& stream, std::int32_t device,
                         MoeDesc const& desc, std::int64_t rows, bool backward)
    : cublas_(cublas),
      stream_(stream),
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
  if (!backward) return;
  auto const result = [&](std::int64_t count) {
    return allocate(device, 2 * static_cast<std::size_t>(experts_ * count), Kind::device);
  };
  da_ = result(rows_ * intermediate_);
  dx_ = result(rows_ * hidden_);
  dw_ = result(up_columns_ * hidden_);
}

std::vector<CublasBound::Gemm> CublasBound::forward() const {
  auto const gemm = [this](std::int64_t n, std::int64_t k, void const* a, void const* w, void* c) {
    cublas_.batched_gemm(stream_, experts_, rows_, n, k, {a}, {w, true}, c);
  };
  return {{"up_projection_fwd",
           [=, this] { gemm(up_columns_, hidden_, x_.get(), w_up_.get(), h_.get()); }},
          {"down_projection_fwd",
           [=, this] { gemm(hidden_, intermediate_, a_.get(), w_down_.get(), y_.get()); }}};
}

// y stands for dO. No result is an operand: values would grow from call to call.
std::vector<CublasBound::Gemm> CublasBound::backward() const {
  auto const dgrad = [this](std::int64_t n, std::int64_t k, void const* a, void const* w, void* c) {
    cublas_.batched_gemm(stream_, experts_, rows_, n, k, {a}, {w}, c);
  };
  auto const wgrad = [this](std::int64_t m, std::int64_t n, void const* a, void const* b) {
    cublas_.batched_gemm(stream_, experts_, m, n, rows_, {a, true}, {b}, dw_.get());
  };
  return {
      {"down_projection_dgrad",
       [=, this] { dgrad(intermediate_, hidden_, y_.get(), w_down_.get(), da_.get()); }},
      {"down_projection_wgrad", [=, this] { wgrad(hidden_, intermediate_, y_.get(), a_.get()); }},
      {"up_projection_dgrad",
       [=, this] { dgrad(hidden_, up_columns_, h_.get(), w_up_.get(), dx_.get()); }},
      {"up_projection_wgrad", [=, this] { wgrad(up_columns_, hidden_, h_.get(), x_.get()); }}};
}

double gemm_ceiling_tflops(Cublas const& cublas, Stream const& stream, std::int32_t device) {
  constexpr std::int64_t kSize = 8192;
  constexpr int kWarmUps = 20, kTimes = 10;
  auto const a = random_bf16(stream, device, kSize * kSize, 21, 1);
  auto const b = random_bf16(stream, device, kSize * kSize, 22, 1);
  auto const c = random_bf16(stream, device, kSize * kSize, 23, 1);
  std::vector<Event> events(kTimes + 1);
  for (int i = 0; i < kWarmUps + kTimes; ++i) {
    if (i >= kWarmUps) events[static_cast<std::size_t>(i - kWarmUps)].record(stream);
    cublas.batched_gemm(stream, 1, kSize, kSize, kSize, {a.get()}, {b.get(), true}, c.get());
  }
  events[kTimes].record(stream);
  stream.synchronize();
  std::vector<double> ms;
  for (std::size_t i = 1; i < events.size(); ++i) ms.push_back(events[i].since(events[i - 1]));
  std::nth_element(ms.begin(), ms.begin() + kTimes / 2, ms.end());
  constexpr double kFlops = 2.0 * kSize * kSize * kSize;
  return kFlops / ms[kTimes / 2] * 1e-9;
}

}  // namespace tessera::device

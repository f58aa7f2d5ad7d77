// SPDX-License-Identifier: Apache-2.0
// GEMM of Tessera, BLIS, OpenBLAS and oneDNN on one thread, fp32 and bf16, at the shapes of a layer's experts: what
// docs/adr/0001-cpu-gemm-library.md and docs/adr/0009-own-gemm-kernels.md are decided on. The libraries are opened at
// run time, so that none of them is needed to build this. Every result is compared with a plain loop first; the
// libraries take turns. b is stored transposed, as weights are.
//
//   bench_gemm_libraries [--blis FILE] [--openblas FILE] [--onednn FILE] > RESULTS.json
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/parallel/gemm.hpp"

namespace {

using tessera::core::Bf16;

struct Shape {
  int m, n, k;
};
constexpr Shape kShapes[] = {{256, 256, 256}, {256, 512, 256}, {256, 256, 512}, {512, 512, 512},
                             {251, 512, 512}, {64, 512, 256},  {16, 512, 256}};
constexpr int kWarmUps = 10, kRepeats = 301;

// c (m x n) = a (m x k) b^T, b (n x k): fp32 or bf16, row-major; c is fp32.
using Gemm = std::function<void(Shape, void const* a, void const* b, float* c)>;

struct Library {
  std::string name;
  Gemm gemm;
  std::vector<double> ms;
};

void* open_symbol(std::string const& file, char const* symbol) {
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* const found = library == nullptr ? nullptr : dlsym(library, symbol);
  if (found == nullptr) std::fprintf(stderr, "left out: %s\n", dlerror());
  return found;
}

Gemm open_cblas(std::string const& file) {
  using Function =
      void (*)(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha,
               void const* a, int lda, void const* b, int ldb, float beta, float* c, int ldc);
  auto* const sgemm = reinterpret_cast<Function>(open_symbol(file, "cblas_sgemm"));
  if (sgemm == nullptr) return {};
  return [sgemm](Shape s, void const* a, void const* b, float* c) {
    constexpr int kRowMajor = 101, kNoTranspose = 111, kTranspose = 112;
    sgemm(kRowMajor, kNoTranspose, kTranspose, s.m, s.n, s.k, 1, a, s.k, b, s.k, 0, c, s.n);
  };
}

Gemm open_onednn(std::string const& file, char const* symbol) {
  using Function = int (*)(char transpose_a, char transpose_b, std::int64_t m, std::int64_t n,
                           std::int64_t k, float alpha, void const* a, std::int64_t lda,
                           void const* b, std::int64_t ldb, float beta, float* c, std::int64_t ldc);
  auto* const function = reinterpret_cast<Function>(open_symbol(file, symbol));
  if (function == nullptr) return {};
  return [function](Shape s, void const* a, void const* b, float* c) {
    function('N', 'T', s.m, s.n, s.k, 1, a, s.k, b, s.k, 0, c, s.n);
  };
}

/// Workspace is the caller's, made once for all shapes.
template <class T>
Gemm tessera_gemm() {
  namespace cpu = tessera::cpu;
  std::vector<float> scratch(16);
  for (Shape const s : kShapes) {
    scratch.resize(
        std::max<std::size_t>(scratch.size(), 16 + cpu::gemm_scratch_floats(s.m, s.n, s.k)));
  }
  return [scratch](Shape s, void const* a, void const* b, float* c) mutable {
    auto const address = reinterpret_cast<std::uintptr_t>(scratch.data());
    auto* const aligned = reinterpret_cast<float*>((address + 63) / 64 * 64);
    cpu::MatrixView<T const> const left{static_cast<T const*>(a), s.k, 1};
    cpu::MatrixView<T const> const right{static_cast<T const*>(b), s.k, 1};
    cpu::gemm(s.m, s.n, s.k, cpu::left_operand(left), cpu::right_operand(right.transposed()),
              cpu::result(cpu::Matrix{c, s.n, 1}), aligned);
  };
}

std::vector<float> uniform(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> distribution(-1, 1);
  std::vector<float> values(count);
  for (float& value : values) value = distribution(random);
  return values;
}

bool correct(Shape s, std::vector<float> const& a, std::vector<float> const& b,
             std::vector<float> const& c) {
  for (int row = 0; row < s.m; ++row) {
    for (int column = 0; column < s.n; ++column) {
      double sum = 0;
      for (int i = 0; i < s.k; ++i) sum += double{a[row * s.k + i]} * b[column * s.k + i];
      if (!(std::abs(sum - c[row * s.n + column]) < 1e-4 * s.k)) return false;
    }
  }
  return true;
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1) + 0.5)];
}

double time_ms(Library const& library, Shape s, void const* a, void const* b, float* c) {
  auto const begin = std::chrono::steady_clock::now();
  library.gemm(s, a, b, c);
  std::chrono::duration<double, std::milli> const elapsed =
      std::chrono::steady_clock::now() - begin;
  return elapsed.count();
}

/// Rounds the values to T, and returns them stored so.
template <class T>
std::vector<T> stored(std::vector<float>& values) {
  std::vector<T> out;
  for (float& value : values) {
    out.push_back(tessera::core::round_to<T>(value));
    value = tessera::core::to_fp32(out.back());
  }
  return out;
}

template <class T>
void bench_shape(Shape s, char const* dtype, std::vector<Library>& libraries, bool& first) {
  auto a = uniform(std::size_t(s.m) * s.k, 1), b = uniform(std::size_t(s.k) * s.n, 2);
  auto const stored_a = stored<T>(a), stored_b = stored<T>(b);
  for (Library& library : libraries) {
    std::vector<float> c(std::size_t(s.m) * s.n, NAN);
    library.gemm(s, stored_a.data(), stored_b.data(), c.data());
    bool const checked = correct(s, a, b, c);
    if (!checked) std::fprintf(stderr, "%s: wrong result\n", library.name.c_str());
    if (!checked) std::exit(1);
    library.ms.clear();
  }
  std::vector<float> c(std::size_t(s.m) * s.n);
  for (int repeat = -kWarmUps; repeat < kRepeats; ++repeat) {
    for (Library& library : libraries) {
      double const ms = time_ms(library, s, stored_a.data(), stored_b.data(), c.data());
      if (repeat >= 0) library.ms.push_back(ms);
    }
  }
  for (Library const& library : libraries) {
    double const ms = quantile(library.ms, 0.5);
    std::printf(
        "%s\n  {\"shape\": [%d, %d, %d], \"dtype\": \"%s\", \"impl\": \"%s\", "
        "\"ms\": %.5f, \"ms_p10\": %.5f, \"ms_p90\": %.5f, \"gflops\": %.1f, "
        "\"checked\": true}",
        first ? "" : ",", s.m, s.n, s.k, dtype, library.name.c_str(), ms, quantile(library.ms, 0.1),
        quantile(library.ms, 0.9), 2e-6 * s.m * s.n * s.k / ms);
    first = false;
  }
}

}  // namespace

int main(int argc, char** argv) {
  setenv("OPENBLAS_NUM_THREADS", "1", 1);
  setenv("OMP_NUM_THREADS", "1", 1);
  std::map<std::string, std::string> files = {
      {"--blis", "libblis.so.4"}, {"--openblas", "libopenblas.so.0"}, {"--onednn", "libdnnl.so.2"}};
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 == argc || !files.contains(argv[i])) {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      return 2;
    }
    files[argv[i]] = argv[i + 1];
  }
  auto const found = [](std::initializer_list<std::pair<char const*, Gemm>> all) {
    std::vector<Library> libraries;
    for (auto const& [name, gemm] : all) {
      if (gemm) libraries.push_back({name, gemm, {}});
    }
    return libraries;
  };
  auto fp32 = found({{"tessera", tessera_gemm<float>()},
                     {"blis", open_cblas(files["--blis"])},
                     {"openblas", open_cblas(files["--openblas"])},
                     {"onednn", open_onednn(files["--onednn"], "dnnl_sgemm")}});
  auto bf16 = found({{"tessera", tessera_gemm<Bf16>()},
                     {"onednn", open_onednn(files["--onednn"], "dnnl_gemm_bf16bf16f32")}});
  std::printf(
      "{\"command\": \"bench_gemm_libraries\", \"protocol\": \"one thread, row-major, b "
      "transposed, "
      "operands in cache, median of %d after %d warm-ups, libraries interleaved\",\n \"rows\": [",
      kRepeats, kWarmUps);
  bool first = true;
  for (Shape const s : kShapes) {
    bench_shape<float>(s, "fp32", fp32, first);
    bench_shape<Bf16>(s, "bf16", bf16, first);
  }
  std::printf("\n]}\n");
  return 0;
}

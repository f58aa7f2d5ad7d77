// SPDX-License-Identifier: Apache-2.0
// fp32 GEMM of BLIS, OpenBLAS and oneDNN on one thread, at the shapes of a layer's experts: what
// docs/adr/0001-cpu-gemm-library.md is decided on. The libraries are opened at run time, so that none of them
// is needed to build this. Every result is compared with a plain loop first; the libraries take turns.
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
#include <map>
#include <random>
#include <string>
#include <vector>

namespace {

struct Shape {
  int m, n, k;
};
constexpr Shape kShapes[] = {{256, 256, 256}, {256, 512, 256}, {256, 256, 512},
                             {512, 512, 512}, {64, 512, 256},  {16, 512, 256}};
constexpr int kWarmUps = 10, kRepeats = 301;

// c (m x n) = a (m x k) b (k x n), row-major.
using Gemm = std::function<void(Shape, float const* a, float const* b, float* c)>;

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
               float const* a, int lda, float const* b, int ldb, float beta, float* c, int ldc);
  auto* const sgemm = reinterpret_cast<Function>(open_symbol(file, "cblas_sgemm"));
  if (sgemm == nullptr) return {};
  return [sgemm](Shape s, float const* a, float const* b, float* c) {
    constexpr int kRowMajor = 101, kNoTranspose = 111;
    sgemm(kRowMajor, kNoTranspose, kNoTranspose, s.m, s.n, s.k, 1, a, s.k, b, s.n, 0, c, s.n);
  };
}

Gemm open_onednn(std::string const& file) {
  using Function =
      int (*)(char transpose_a, char transpose_b, std::int64_t m, std::int64_t n, std::int64_t k,
              float alpha, float const* a, std::int64_t lda, float const* b, std::int64_t ldb,
              float beta, float* c, std::int64_t ldc);
  auto* const sgemm = reinterpret_cast<Function>(open_symbol(file, "dnnl_sgemm"));
  if (sgemm == nullptr) return {};
  return [sgemm](Shape s, float const* a, float const* b, float* c) {
    sgemm('N', 'N', s.m, s.n, s.k, 1, a, s.k, b, s.n, 0, c, s.n);
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
      for (int i = 0; i < s.k; ++i) sum += double{a[row * s.k + i]} * b[i * s.n + column];
      if (!(std::abs(sum - c[row * s.n + column]) < 1e-4 * s.k)) return false;
    }
  }
  return true;
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1) + 0.5)];
}

double time_ms(Library const& library, Shape s, float const* a, float const* b, float* c) {
  auto const begin = std::chrono::steady_clock::now();
  library.gemm(s, a, b, c);
  std::chrono::duration<double, std::milli> const elapsed =
      std::chrono::steady_clock::now() - begin;
  return elapsed.count();
}

void bench_shape(Shape s, std::vector<Library>& libraries, bool& first) {
  auto const a = uniform(std::size_t(s.m) * s.k, 1), b = uniform(std::size_t(s.k) * s.n, 2);
  for (Library& library : libraries) {
    std::vector<float> c(std::size_t(s.m) * s.n, NAN);
    library.gemm(s, a.data(), b.data(), c.data());
    bool const checked = correct(s, a, b, c);
    if (!checked) std::fprintf(stderr, "%s: wrong result\n", library.name.c_str());
    if (!checked) std::exit(1);
    library.ms.clear();
  }
  std::vector<float> c(std::size_t(s.m) * s.n);
  for (int repeat = -kWarmUps; repeat < kRepeats; ++repeat) {
    for (Library& library : libraries) {
      double const ms = time_ms(library, s, a.data(), b.data(), c.data());
      if (repeat >= 0) library.ms.push_back(ms);
    }
  }
  for (Library const& library : libraries) {
    double const ms = quantile(library.ms, 0.5);
    std::printf(
        "%s\n  {\"shape\": [%d, %d, %d], \"dtype\": \"fp32\", \"impl\": \"%s\", "
        "\"ms\": %.5f, \"ms_p10\": %.5f, \"ms_p90\": %.5f, \"gflops\": %.1f, "
        "\"checked\": true}",
        first ? "" : ",", s.m, s.n, s.k, library.name.c_str(), ms, quantile(library.ms, 0.1),
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
  std::vector<Library> libraries;
  for (auto& [name, gemm] : {std::pair{"blis", open_cblas(files["--blis"])},
                             std::pair{"openblas", open_cblas(files["--openblas"])},
                             std::pair{"onednn", open_onednn(files["--onednn"])}}) {
    if (gemm) libraries.push_back({name, gemm, {}});
  }
  if (libraries.empty()) return 3;
  std::printf(
      "{\"command\": \"bench_gemm_libraries\", \"protocol\": \"one thread, row-major, operands "
      "in cache, median of %d after %d warm-ups, libraries interleaved\",\n \"rows\": [",
      kRepeats, kWarmUps);
  bool first = true;
  for (Shape s : kShapes) bench_shape(s, libraries, first);
  std::printf("\n]}\n");
  return 0;
}

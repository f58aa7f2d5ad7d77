// SPDX-License-Identifier: Apache-2.0
#include "cli/gemm_library.hpp"

#include <blis.h>
#include <dlfcn.h>

#include <initializer_list>

namespace tessera::cli {
namespace {

/// The first of the files that is installed; never closed, as its functions are kept.
void* open_first(std::initializer_list<char const*> files) {
  for (char const* const file : files) {
    if (void* const library = dlopen(file, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  return nullptr;
}

template <class Function>
Function* symbol(void* library, char const* name) {
  return library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library, name));
}

GemmLibrary blis() {
  return {"BLIS", [](std::int64_t m, std::int64_t n, std::int64_t k, GemmOperand const& a,
                     GemmOperand const& b, float* c) {
            float one = 1, zero = 0;
            auto* const from_a = static_cast<float*>(const_cast<void*>(a.data));
            auto* const from_b = static_cast<float*>(const_cast<void*>(b.data));
            bli_sgemm(a.transposed ? BLIS_TRANSPOSE : BLIS_NO_TRANSPOSE,
                      b.transposed ? BLIS_TRANSPOSE : BLIS_NO_TRANSPOSE, m, n, k, &one, from_a,
                      a.columns, 1, from_b, b.columns, 1, &zero, c, n, 1);
          }};
}

void add_openblas(std::vector<GemmLibrary>& libraries) {
  using Gemm = void(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha,
                    void const* a, int lda, void const* b, int ldb, float beta, float* c, int ldc);
  void* const library = open_first({"libopenblas.so.0"});
  auto* const gemm = symbol<Gemm>(library, "cblas_sgemm");
  if (gemm == nullptr) return;
  if (auto* const set_threads = symbol<void(int)>(library, "openblas_set_num_threads")) {
    set_threads(1);  // the calls come from threads of their own
  }
  libraries.push_back(
      {"OpenBLAS", [gemm](std::int64_t m, std::int64_t n, std::int64_t k, GemmOperand const& a,
                          GemmOperand const& b, float* c) {
         constexpr int kRowMajor = 101, kPlain = 111, kTransposed = 112;
         auto const narrow = [](std::int64_t size) { return static_cast<int>(size); };
         gemm(kRowMajor, a.transposed ? kTransposed : kPlain, b.transposed ? kTransposed : kPlain,
              narrow(m), narrow(n), narrow(k), 1, a.data, narrow(a.columns), b.data,
              narrow(b.columns), 0, c, narrow(n));
       }});
}

void add_onednn(DType dtype, std::vector<GemmLibrary>& libraries) {
  // Row-major, as declared in dnnl.h; the bf16 function has the same arguments, and an fp32 result.
  using Gemm = int(char transpose_a, char transpose_b, std::int64_t m, std::int64_t n,
                   std::int64_t k, float alpha, void const* a, std::int64_t lda, void const* b,
                   std::int64_t ldb, float beta, float* c, std::int64_t ldc);
  void* const library = open_first({"libdnnl.so.3", "libdnnl.so.2"});
  auto* const gemm =
      symbol<Gemm>(library, dtype == DType::bf16 ? "dnnl_gemm_bf16bf16f32" : "dnnl_sgemm");
  // On processors that it has no kernel for, AVX2 without AVX-512 for one, the bf16 function refuses every product.
  constexpr std::uint32_t kZero = 0;
  float result = 1;
  if (gemm == nullptr || gemm('N', 'N', 1, 1, 1, 1, &kZero, 1, &kZero, 1, 0, &result, 1) != 0)
    return;
  auto* const set_threads = symbol<void(int)>(library, "omp_set_num_threads");
  libraries.push_back(
      {"oneDNN", [gemm, set_threads](std::int64_t m, std::int64_t n, std::int64_t k,
                                     GemmOperand const& a, GemmOperand const& b, float* c) {
         if (set_threads != nullptr) set_threads(1);  // a setting of the calling thread
         gemm(a.transposed ? 'T' : 'N', b.transposed ? 'T' : 'N', m, n, k, 1, a.data, a.columns,
              b.data, b.columns, 0, c, n);
       }});
}

}  // namespace

std::vector<GemmLibrary> gemm_libraries(DType dtype) {
  std::vector<GemmLibrary> libraries;
  if (dtype == DType::fp32) {
    libraries.push_back(blis());
    add_openblas(libraries);
  }
  add_onednn(dtype, libraries);
  return libraries;
}

}  // namespace tessera::cli

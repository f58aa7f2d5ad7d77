// SPDX-License-Identifier: Apache-2.0
#include "cli/batched_gemm.hpp"

#ifdef TESSERA_ONEDNN
#include <dlfcn.h>

#include <oneapi/dnnl/dnnl.hpp>
#endif

namespace tessera::cli {

#ifdef TESSERA_ONEDNN
namespace {

dnnl::memory::desc description(std::int64_t batch, MatrixBatch const& m) {
  auto const type =
      m.dtype == DType::bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
  if (m.transposed) {
    return {{batch, m.columns, m.rows}, type, {m.rows * m.columns, 1, m.columns}};
  }
  return {{batch, m.rows, m.columns}, type, {m.rows * m.columns, m.columns, 1}};
}

dnnl::matmul::primitive_desc primitive(dnnl::engine const& engine, dnnl::memory::desc const& a,
                                       dnnl::memory::desc const& b, dnnl::memory::desc const& c) {
#if DNNL_VERSION_MAJOR >= 3
  return {engine, a, b, c};
#else
  return {dnnl::matmul::desc(a, b, c), engine};
#endif
}

}  // namespace

std::function<void()> batched_gemm(std::int64_t batch, MatrixBatch const& a, MatrixBatch const& b,
                                   MatrixBatch const& c, std::int32_t threads) {
  // A setting of the calling thread, of OpenMP builds only.
  auto* const set_threads =
      reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set_threads != nullptr) set_threads(threads);  // also decides how the code cuts the work
  try {
    dnnl::engine const engine(dnnl::engine::kind::cpu, 0);
    auto const memory = [&engine, batch](MatrixBatch const& m) {
      return dnnl::memory(description(batch, m), engine, m.data);
    };
    dnnl::matmul const matmul(
        primitive(engine, description(batch, a), description(batch, b), description(batch, c)));
    return [matmul, set_threads, threads, stream = dnnl::stream(engine),
            arguments = std::unordered_map<int, dnnl::memory>{{DNNL_ARG_SRC, memory(a)},
                                                              {DNNL_ARG_WEIGHTS, memory(b)},
                                                              {DNNL_ARG_DST, memory(c)}}]() {
      if (set_threads != nullptr) set_threads(threads);
      dnnl::stream on = stream;
      matmul.execute(on, arguments);
      on.wait();
    };
  } catch (dnnl::error const&) {
    return {};  // these types are not served on this machine
  }
}
#else
std::function<void()> batched_gemm(std::int64_t, MatrixBatch const&, MatrixBatch const&,
                                   MatrixBatch const&, std::int32_t) {
  return {};
}
#endif

}  // namespace tessera::cli

// SPDX-License-Identifier: Apache-2.0
// grouped_gemm by the GEMMs of a layer: varlen-M is down_projection_fwd (a, b as w_down, c as y), varlen-K
// down_projection_wgrad (a as a_scaled, b as the rows of d_o, c as dw_down).
#include <cuda_runtime_api.h>

#include "cuda/layer/arguments.hpp"
#include "cuda/layer/backend.hpp"
#include "cuda/layer/plan.hpp"
#include "cuda/layer/routing_tables.hpp"
#include "cuda/layer/sequence.hpp"

namespace tessera::cuda {
namespace {

struct Sizes {
  std::int64_t rows, experts;
};

Sizes sizes_of(GroupedGemmArgs const& args) noexcept {
  return {args.a.shape[0], args.expert_offsets.shape[0] - 1};
}

struct GroupedGemmMemory {
  std::int32_t const* gmem_expert_offsets;
  std::int32_t* gmem_tile_counters;
};

void add_varlen_m(GroupedGemmArgs const& args, GroupedGemmMemory const& memory,
                  Sequence& sequence) noexcept {
  auto const [rows, experts] = sizes_of(args);
  std::int64_t const gemm_n = args.c.shape[1];
  sequence.select(
      "grouped_gemm",
      DownProjectionFwdArguments{
          .gmem_a = args.a.data,
          .gmem_expert_offsets = memory.gmem_expert_offsets,
          .w_down = weight_rows(args.b, args.transpose_b ? 2 : 1, args.transpose_b ? 1 : 2, gemm_n),
          .b_down = args.bias.present() ? weight_rows(args.bias, 1, -1, gemm_n) : WeightRows{},
          .gmem_y = args.c.data,
          .rows = rows,
          .hidden = gemm_n,
          .intermediate = args.a.shape[1],
          .experts = static_cast<std::int32_t>(experts),
          .gmem_tile_counter = memory.gmem_tile_counters + kDownProjectionCounter});
  sequence.add("rows of no expert", [&](cudaStream_t stream) {
    return launch_zero_tail({memory.gmem_expert_offsets + experts, args.c.data, rows,
                             gemm_n * static_cast<std::int64_t>(dtype_bytes(DType::bf16))},
                            stream);
  });
}

void add_varlen_k(GroupedGemmArgs const& args, GroupedGemmMemory const& memory,
                  Sequence& sequence) noexcept {
  auto const [rows, experts] = sizes_of(args);
  std::int64_t const gemm_m = args.a.shape[1];
  sequence.select("grouped_gemm", DownProjectionWgradArguments{
                                      {.left = matrix_rows(args.b),
                                       .gmem_gather_index = nullptr,
                                       .gmem_expert_offsets = memory.gmem_expert_offsets,
                                       .gmem_right = args.a.data,
                                       .halves = 1,
                                       .dw = {weight_rows(args.c, 1, 2, gemm_m)},
                                       .is_fp32 = false,
                                       .accumulates = args.mode == GradientMode::accumulate,
                                       .rows = rows,
                                       .hidden = args.b.shape[1],
                                       .intermediate = gemm_m,
                                       .experts = static_cast<std::int32_t>(experts),
                                       .gmem_tile_counter = memory.gmem_tile_counters +
                                                            kDownProjectionWgradCounter}});
}

}  // namespace

std::size_t grouped_gemm_workspace_bytes(GroupedGemmArgs const& args) noexcept {
  return plan_grouped_gemm(sizes_of(args).experts).bytes;
}

Status grouped_gemm(DeviceContext const& device, GroupedGemmArgs const& args,
                    Stream stream) noexcept {
  DeviceGuard const guard(device.index(), ContextChoice::any_of_device);
  TESSERA_TRY(guard.status());
  nvtx3::scoped_range_in<NvtxDomain> const range{"grouped_gemm"};
  auto const [rows, experts] = sizes_of(args);
  GroupedGemmPlan const plan = plan_grouped_gemm(experts);
  std::byte* const base = core::WorkspacePlan::align(args.workspace.data);
  GroupedGemmMemory const memory{plan.expert_offsets.in(base), plan.counters.in(base)};
  Sequence sequence(device, stream);
  sequence.add("expert offsets", [&](cudaStream_t native) {
    GroupedRows checked{.groups = integers(args.expert_offsets),
                        .grouping = RowGrouping::offsets,
                        .gmem_row_scores = nullptr,
                        .rows = rows,
                        .experts = experts,
                        .tables = {},
                        .gmem_error = device.gmem_error(),
                        .cleared = tile_counters(memory.gmem_tile_counters)};
    checked.tables.expert_offsets = plan.expert_offsets.in(base);
    return launch_grouped_offsets(checked, native);
  });
  args.kind == GroupedGemmKind::varlen_m ? add_varlen_m(args, memory, sequence)
                                         : add_varlen_k(args, memory, sequence);
  return sequence.status();
}

}  // namespace tessera::cuda

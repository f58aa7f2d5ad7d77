// SPDX-License-Identifier: Apache-2.0
// The layers that the CUDA backend serves; no device is asked.
#include "cuda/layer/backend.hpp"

#include <utility>

#include "core/router_groups.hpp"
#include "cuda/host/kernel_limits.hpp"
#include "tessera/names.hpp"

namespace tessera::cuda {
namespace {

constexpr std::int64_t kMaxGroups = 32;  // one lane of a warp each

Status check_router(MoeDesc const& desc) noexcept {
  if (desc.router.kind == RouterKind::group_limited && !desc.router.replay &&
      core::router_groups(desc).groups > kMaxGroups) {
    return Status::unsupported("groups=%lld: the CUDA backend serves up to %lld; use device cpu",
                               static_cast<long long>(core::router_groups(desc).groups),
                               static_cast<long long>(kMaxGroups));
  }
  if ((desc.rounds_tokens() || desc.experts_choose()) && desc.shape.experts > kMaxChoosingExperts) {
    return Status::unsupported(
        "experts=%lld: with token rounding or expert choice the CUDA backend serves up to %d; "
        "use device cpu",
        static_cast<long long>(desc.shape.experts), kMaxChoosingExperts);
  }
  return {};
}

// The kernels that multiply codes hold segments in shared memory, and sizes in 32 bits.
constexpr std::int64_t kMaxQuantisedRows = std::int64_t{1} << 30;
constexpr std::int64_t kMaxQuantisedColumns = std::int64_t{1} << 22;
constexpr std::int64_t kMaxGathered = std::int64_t{1} << 36;  // elements of x
constexpr std::int64_t kQuantisedTile = 256;                  // sizes of which such layers have run

Status at_most(char const* name, std::int64_t value, std::int64_t limit) noexcept {
  if (value <= limit) return {};
  return Status::unsupported(
      "%s=%lld with precision=fp8: the CUDA backend serves up to %lld; use precision native", name,
      static_cast<long long>(value), static_cast<long long>(limit));
}

/// Refuses what the kernels of quantised operands do not compute.
Status check_precision(MoeDesc const& desc) noexcept {
  if (desc.precision == Precision::mxfp8) {
    return Status::unsupported(
        "precision=mxfp8: Hopper's tensor cores have no blocks of 32; use fp8, native or device "
        "cpu");
  }
  if (desc.activation.kind != ActivationKind::swiglu) {
    return Status::unsupported(
        "activation=%s with precision=fp8: the CUDA backend serves swiglu; use precision native",
        name_of(kActivationNames, desc.activation.kind));
  }
  if (desc.bias) {
    return Status::unsupported(
        "bias with precision=fp8: the CUDA backend adds none to such products; use precision "
        "native");
  }
  if (desc.pow2_scales) {
    return Status::unsupported(
        "pow2_scales with precision=fp8: the CUDA backend makes fp32 scales; leave it out");
  }
  bool const in_turns =
      desc.layout.order == GateUpOrder::interleaved || desc.layout.order == GateUpOrder::blocked;
  if (desc.layout.orientation == WeightOrientation::transposed && in_turns) {
    return Status::unsupported(
        "layout transposed, columns of gate and up in turns, with precision=fp8: the CUDA backend "
        "reads no such columns; use another layout or precision native");
  }
  MoeShape const& s = desc.shape;
  for (auto const& [name, value] :
       {std::pair{"hidden", s.hidden}, std::pair{"intermediate", s.intermediate}}) {
    if (value % kQuantisedTile == 0) continue;
    return Status::unsupported(
        "%s=%lld with precision=fp8: the CUDA backend needs a multiple of %lld; pad it or use "
        "precision native",
        name, static_cast<long long>(value), static_cast<long long>(kQuantisedTile));
  }
  TESSERA_TRY(at_most("experts", s.experts, kMaxGemmSegments));
  TESSERA_TRY(at_most("slots", desc.num_slots(), kMaxQuantisedRows));
  TESSERA_TRY(at_most("hidden", s.hidden, kMaxQuantisedColumns));
  TESSERA_TRY(at_most("intermediate", s.intermediate, kMaxQuantisedColumns));
  return at_most("tokens*hidden", s.tokens * s.hidden, kMaxGathered);
}

}  // namespace

Status check_storage(DType dtype) noexcept {
  if (dtype == DType::bf16) return {};
  return Status::unsupported("dtype=%s: the CUDA backend stores bf16; convert the tensors to bf16",
                             dtype == DType::fp32 ? "fp32" : "fp16");
}

Status check_supported(MoeDesc const& desc) noexcept {
  TESSERA_TRY(check_storage(desc.dtype));
  if (desc.quantises()) TESSERA_TRY(check_precision(desc));
  return check_router(desc);
}

Status check_supported(GroupedGemmArgs const& args) noexcept {
  TESSERA_TRY(check_storage(args.a.dtype));
  for (std::int64_t const size :
       {args.a.shape[1], args.b.shape[1], args.b.shape[args.b.rank - 1]}) {
    if (size == 0) {
      return Status::unsupported(
          "grouped_gemm: a has %lld columns, b %lld; the CUDA backend needs 1",
          static_cast<long long>(args.a.shape[1]),
          static_cast<long long>(args.b.shape[args.b.rank - 1]));
    }
  }
  return {};
}

}  // namespace tessera::cuda

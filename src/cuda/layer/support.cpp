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
constexpr std::int64_t kMaxGathered = std::int64_t{1} << 36;  // elements of a matrix whose rows are
constexpr std::int64_t kFp8Tile = 256;                        // sizes of which such layers have run
constexpr std::int64_t kMxRows = 32;  // that lie side by side where a layout has blocks of rows

Status at_most(char const* name, std::int64_t value, std::int64_t limit,
               char const* precision) noexcept {
  if (value <= limit) return {};
  return Status::unsupported(
      "%s=%lld with precision=%s: the CUDA backend serves up to %lld; use precision native", name,
      static_cast<long long>(value), precision, static_cast<long long>(limit));
}

/// Refuses weights of which the quantisers read no lines.
Status check_quantised_layout(WeightLayout const& layout, Precision precision,
                              char const* name) noexcept {
  bool const is_blocked = layout.order == GateUpOrder::blocked;
  bool const in_turns = layout.order == GateUpOrder::interleaved || is_blocked;
  if (layout.orientation == WeightOrientation::transposed && in_turns) {
    return Status::unsupported(
        "layout transposed, columns of gate and up in turns, with precision=%s: the CUDA backend "
        "reads no such columns; use another layout or precision native",
        name);
  }
  if (precision == Precision::mxfp8 && is_blocked && layout.block % kMxRows != 0) {
    return Status::unsupported(
        "layout blocked:%lld with precision=mxfp8: the CUDA backend reads blocks of a multiple of "
        "%lld rows; use another layout or precision native",
        static_cast<long long>(layout.block), static_cast<long long>(kMxRows));
  }
  return {};
}

/// Refuses what the kernels of quantised operands do not compute, those of fp8 on sm_90a and of mxfp8 on sm_100a.
Status check_precision(MoeDesc const& desc) noexcept {
  char const* const precision = name_of(kPrecisionNames, desc.precision);
  bool const is_mxfp8 = desc.precision == Precision::mxfp8;
  if (desc.activation.kind != ActivationKind::swiglu) {
    return Status::unsupported(
        "activation=%s with precision=%s: the CUDA backend serves swiglu; use precision native",
        name_of(kActivationNames, desc.activation.kind), precision);
  }
  if (desc.bias) {
    return Status::unsupported(
        "bias with precision=%s: the CUDA backend adds none to such products; use precision "
        "native",
        precision);
  }
  if (desc.pow2_scales) {
    return Status::unsupported(
        "pow2_scales with precision=fp8: the CUDA backend makes fp32 scales; leave it out");
  }
  TESSERA_TRY(check_quantised_layout(desc.layout, desc.precision, precision));
  MoeShape const& s = desc.shape;
  std::int64_t const tile = is_mxfp8 ? kMxTile : kFp8Tile;
  for (auto const& [name, value] :
       {std::pair{"hidden", s.hidden}, std::pair{"intermediate", s.intermediate}}) {
    if (value % tile == 0) continue;
    return Status::unsupported(
        "%s=%lld with precision=%s: the CUDA backend needs a multiple of %lld; pad it or use "
        "precision native",
        name, static_cast<long long>(value), precision, static_cast<long long>(tile));
  }
  TESSERA_TRY(at_most("experts", s.experts, kMaxGemmSegments, precision));
  TESSERA_TRY(at_most("slots", desc.num_slots(), kMaxQuantisedRows, precision));
  TESSERA_TRY(at_most("hidden", s.hidden, kMaxQuantisedColumns, precision));
  TESSERA_TRY(at_most("intermediate", s.intermediate, kMaxQuantisedColumns, precision));
  if (is_mxfp8) {  // rows of dh are gathered too
    TESSERA_TRY(at_most("slots*2*intermediate", desc.num_slots() * 2 * s.intermediate, kMaxGathered,
                        precision));
  }
  return at_most("tokens*hidden", s.tokens * s.hidden, kMaxGathered, precision);
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

// SPDX-License-Identifier: Apache-2.0
// The layers that the CUDA backend serves; no device is asked.
#include "cuda/layer/backend.hpp"

#include "core/router_groups.hpp"
#include "cuda/host/choice_limits.hpp"
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

}  // namespace

Status check_storage(DType dtype) noexcept {
  if (dtype == DType::bf16) return {};
  return Status::unsupported("dtype=%s: the CUDA backend stores bf16; convert the tensors to bf16",
                             dtype == DType::fp32 ? "fp32" : "fp16");
}

Status check_supported(MoeDesc const& desc) noexcept {
  if (desc.quantises()) {
    return Status::unsupported(
        "precision=%s: on a GPU there is no fp8 layer yet; use precision native",
        name_of(kPrecisionNames, desc.precision));
  }
  TESSERA_TRY(check_storage(desc.dtype));
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

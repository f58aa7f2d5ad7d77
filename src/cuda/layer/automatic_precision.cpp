// SPDX-License-Identifier: Apache-2.0
// Precision::automatic takes fp8 where it is served and expected to be faster. No device is asked, and no data: bits
// depend on the answer.
#include "core/desc_check.hpp"
#include "cuda/layer/backend.hpp"
#include "cuda/tuning/precision.hpp"

namespace tessera::cuda {
namespace {

using Int = long long;  // for %lld

Status at_least(char const* name, std::int64_t value, std::int64_t least) noexcept {
  if (value >= least) return {};
  return Status::unsupported("%s=%lld: fp8 is expected to be faster from %lld on", name,
                             static_cast<Int>(value), static_cast<Int>(least));
}

}  // namespace

Status check_gains_by_fp8(Architecture architecture, MoeDesc const& given) noexcept {
  MoeDesc desc = given;
  desc.precision = Precision::fp8;
  TESSERA_TRY(core::check_desc(desc));
  TESSERA_TRY(check_multiplies_codes(architecture, desc.precision));
  TESSERA_TRY(check_supported(desc));
  MoeShape const& s = desc.shape;
  // Rows that token rounding adds or drops are left out.
  bool const varies = s.variable_experts || desc.experts_choose();
  std::int64_t const rows = varies ? desc.num_slots() : s.tokens * s.top_k;
  std::int64_t const per_token = s.tokens == 0 ? 0 : rows / s.tokens;
  TESSERA_TRY(at_least("hidden", s.hidden, kFp8Sizes.hidden));
  TESSERA_TRY(at_least("intermediate", s.intermediate, kFp8Sizes.intermediate));
  TESSERA_TRY(at_least("experts per token * intermediate", per_token * s.intermediate,
                       kFp8Sizes.columns_per_token));
  if (desc.weight_codes) {
    return at_least("rows per expert", rows / s.experts, kFp8Sizes.rows_per_expert_with_codes);
  }
  return at_least("rows per expert", rows / s.experts, kFp8Sizes.rows_per_expert);
}

}  // namespace tessera::cuda

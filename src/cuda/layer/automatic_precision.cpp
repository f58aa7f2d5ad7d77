// SPDX-License-Identifier: Apache-2.0
// Precision::automatic takes fp8 where it is served and expected to be faster. No device is asked, and no data: bits
// depend on the answer.
#include <algorithm>
#include <cstdint>
#include <span>

#include "core/desc_check.hpp"
#include "cuda/layer/backend.hpp"
#include "cuda/tuning/precision.hpp"

namespace tessera::cuda {
namespace {

using Int = long long;  // for %lld

struct Quantity {
  char const* name;
  std::int64_t value;
  std::int64_t Fp8Sizes::* least;

  /// Says how many times as large it would have to be.
  [[nodiscard]] double short_by(Fp8Sizes const& sizes) const noexcept {
    return static_cast<double>(sizes.*least) /
           static_cast<double>(std::max<std::int64_t>(value, 1));
  }
};

/// Ok where every quantity reaches some layer's; else what is furthest from the layer that is nearest.
Status reaches(std::span<Fp8Sizes const> gaining, std::span<Quantity const> quantities) noexcept {
  Quantity const* furthest = nullptr;
  Fp8Sizes const* nearest = nullptr;
  for (Fp8Sizes const& sizes : gaining) {
    auto const less = [&](Quantity const& a, Quantity const& b) {
      return a.short_by(sizes) < b.short_by(sizes);
    };
    Quantity const& worst = *std::ranges::max_element(quantities, less);
    if (worst.value >= sizes.*worst.least) return {};
    if (nearest == nullptr || worst.short_by(sizes) < furthest->short_by(*nearest)) {
      furthest = &worst;
      nearest = &sizes;
    }
  }
  return Status::unsupported("%s=%lld: fp8 is expected to be faster from %lld on", furthest->name,
                             static_cast<Int>(furthest->value),
                             static_cast<Int>(nearest->*furthest->least));
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
  Quantity const quantities[] = {{"hidden", s.hidden, &Fp8Sizes::hidden},
                                 {"intermediate", s.intermediate, &Fp8Sizes::intermediate},
                                 {"experts per token * intermediate", per_token * s.intermediate,
                                  &Fp8Sizes::columns_per_token},
                                 {"rows per expert", rows / s.experts, &Fp8Sizes::rows_per_expert}};
  return desc.weight_codes ? reaches(kFp8SizesWithCodes, quantities)
                           : reaches(kFp8Sizes, quantities);
}

}  // namespace tessera::cuda

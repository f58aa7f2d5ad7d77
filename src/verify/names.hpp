// SPDX-License-Identifier: Apache-2.0
// The names of test options on the command line, and the command that reproduces a case.
#pragma once

#include <string>

#include "tessera/low_precision.hpp"
#include "tessera/names.hpp"
#include "verify/case.hpp"

namespace tessera::verify {

using tessera::kActivationNames, tessera::kDTypeNames, tessera::kLayoutNames,
    tessera::kPrecisionNames, tessera::kRouterNames, tessera::kRoundingNames, tessera::layout_name,
    tessera::name_of, tessera::Named;

inline constexpr Named<DType> kIdsDTypeNames[] = {{"int32", DType::int32}, {"int64", DType::int64}};

inline constexpr Named<ScaleRule> kScaleNames[] = {
    {"fp32", ScaleRule::fp32}, {"pow2", ScaleRule::pow2}, {"rceil", ScaleRule::rceil}};

inline constexpr Named<SavePolicy> kSaveNames[] = {{"h", SavePolicy::h}, {"x", SavePolicy::x}};

inline constexpr Named<RoutingPattern> kPatternNames[] = {
    {"random", RoutingPattern::random},
    {"balanced", RoutingPattern::balanced},
    {"zipf", RoutingPattern::zipf},
    {"shuffled-zipf", RoutingPattern::shuffled_zipf},
    {"one-expert", RoutingPattern::one_expert},
    {"one-token-each", RoutingPattern::one_token_each},
    {"empty", RoutingPattern::empty},
    {"file", RoutingPattern::file},
};

/// "random", "zipf:1.5", "file:ids.json", ...
std::string routing_name(RoutingSpec const& routing);

/// The options of `tessera verify` (and bench, explain) that stand for `layer_case`.
std::string case_options(LayerCase const& layer_case);

}  // namespace tessera::verify

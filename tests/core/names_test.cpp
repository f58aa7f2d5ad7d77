// SPDX-License-Identifier: Apache-2.0
#include "tessera/names.hpp"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Names, OfEveryLayoutComeBack) {
  for (auto const& [name, value] : kLayoutNames) {
    WeightLayout layout = value;
    if (layout.order == GateUpOrder::blocked) layout.block = 32;
    EXPECT_EQ(layout_named(layout_name(layout)), layout) << name;
  }
  EXPECT_EQ(layout_name({GateUpOrder::blocked, WeightOrientation::transposed, 8}),
            "transposed-blocked:8");
}

TEST(Names, ThatAreNotLayoutsAreNone) {
  for (char const* text : {"", "diagonal", "blocked", "blocked:", "blocked:0", "blocked:-1",
                           "blocked:3x", "blocked:99999999999", "concat:2", "concat:"}) {
    EXPECT_EQ(layout_named(text), std::nullopt) << text;
  }
}

TEST(Names, AreOneForEachValue) {
  EXPECT_EQ(value_named(kRoundingNames, "nr-f"), Rounding::nr_f);
  EXPECT_STREQ(name_of(kRouterNames, RouterKind::group_limited), "group-limited");
  EXPECT_EQ(value_named(kDTypeNames, "fp8"), std::nullopt);
  EXPECT_EQ(names_text(kDTypeNames), "fp32 bf16 fp16");
  EXPECT_STREQ(name_of(kDTypeNames, DType::int64), "unknown");
}

}  // namespace
}  // namespace tessera

// SPDX-License-Identifier: Apache-2.0
#include "tessera/status.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>

namespace tessera {
namespace {

TEST(Status, IsOkUnlessMadeOtherwise) {
  Status const status;
  EXPECT_TRUE(status.ok());
  EXPECT_STREQ(status.text(), "");
}

TEST(Status, CarriesCodeAndText) {
  Status const status = Status::invalid("n=%d: rows need a multiple of %d", 100, 8);
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_STREQ(status.text(), "n=100: rows need a multiple of 8");
}

TEST(Status, DoesNotReadAPlainTextAsAFormat) {
  EXPECT_STREQ(Status::unsupported("100%s").text(), "100%s");
}

TEST(Status, CutsLongText) {
  std::string const longer(2 * Status::kTextBytes, 'x');
  EXPECT_EQ(std::strlen(Status::invalid("%s", longer.c_str()).text()),
            static_cast<std::size_t>(Status::kTextBytes - 1));
}

Status fails() { return Status::unsupported("no"); }
Status passes_on() {
  TESSERA_TRY(Status());
  TESSERA_TRY(fails());
  return Status::invalid("not reached");
}

TEST(Status, TryReturnsTheFirstFailure) { EXPECT_EQ(passes_on().code(), StatusCode::unsupported); }

TEST(Expected, HoldsAValueOrAStatus) {
  Expected<std::unique_ptr<int>> value(std::make_unique<int>(7));
  ASSERT_TRUE(value.ok());
  EXPECT_TRUE(value.status().ok());
  std::unique_ptr<int> const taken = std::move(value).value();
  EXPECT_EQ(*taken, 7);

  Expected<std::unique_ptr<int>> const none(fails());
  EXPECT_FALSE(none.ok());
  EXPECT_STREQ(none.status().text(), "no");
}

TEST(Expected, MovesEitherSide) {
  Expected<std::string> value(std::string(100, 'a'));
  Expected<std::string> const moved(std::move(value));
  ASSERT_TRUE(moved.ok());
  EXPECT_EQ(moved.value().size(), 100u);
  Expected<std::string> failure(fails());
  Expected<std::string> const moved_failure(std::move(failure));
  EXPECT_EQ(moved_failure.status().code(), StatusCode::unsupported);
}

}  // namespace
}  // namespace tessera

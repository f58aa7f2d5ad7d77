// SPDX-License-Identifier: Apache-2.0
#include "expert_parallel/plan/fault.hpp"

#include <gtest/gtest.h>

#include <string>

namespace tessera::expert_parallel {
namespace {

TEST(Fault, NoneIsOk) { EXPECT_TRUE(fault_status({}, 30).ok()); }

TEST(Fault, OneThatIsBeingWrittenIsNoneYet) {
  Fault fault = {};
  fault.claimed = 1;
  fault.rank = 2;
  EXPECT_TRUE(fault_status(fault, 30).ok());
}

TEST(Fault, SaysWhoWaitedWhereForWhat) {
  Fault const fault = {.raised = 1,
                       .claimed = 1,
                       .site = Site::publish,
                       .rank = 2,
                       .cta = 17,
                       .peer = 3,
                       .epoch = 40,
                       .expected = 40,
                       .seen = 39,
                       .aborted_by = 0};
  Status const status = fault_status(fault, 30);
  EXPECT_EQ(status.code(), StatusCode::device_error);
  EXPECT_STREQ(status.text(),
               "rank 2 waited 30 s at publish in pass 40 (CTA 17): the word of rank 3 is 39, "
               "expected 40; a rank has died or launched other passes: rebuild the group");
}

TEST(Fault, NamesTheRankThatGaveUpFirst) {
  Fault const fault = {.raised = 1,
                       .claimed = 1,
                       .site = Site::ack,
                       .rank = 1,
                       .cta = 0,
                       .peer = 0,
                       .epoch = 8,
                       .expected = 6,
                       .seen = 5,
                       .aborted_by = 1};
  EXPECT_STREQ(fault_status(fault, 30).text(),
               "rank 1 left pass 8 at ack: rank 0 had given up; rebuild the group");
}

TEST(Fault, SaysHowManyRowsThereAre) {
  Fault const fault = {.raised = 1,
                       .claimed = 1,
                       .site = Site::rows,
                       .rank = 1,
                       .cta = 0,
                       .peer = -1,
                       .epoch = 8,
                       .expected = 64,
                       .seen = 70,
                       .aborted_by = 0};
  EXPECT_STREQ(fault_status(fault, 30).text(),
               "rank 1 has 70 rows in pass 8, and memory for 64: rebuild the group, with more");
}

TEST(Fault, AWordOfThisGpuIsItsOwn) {
  Fault fault = {};
  fault.raised = 1;
  fault.site = Site::route_scan;
  fault.rank = 5;
  fault.peer = -1;
  EXPECT_NE(std::string(fault_status(fault, 1).text()).find("the word of rank 5"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::expert_parallel

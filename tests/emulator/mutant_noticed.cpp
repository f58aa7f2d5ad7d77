// SPDX-License-Identifier: Apache-2.0
// Ends a mutant's program as soon as a test has said what it has to say of the mutant: TESSERA_NOTICE, a part of a
// failure's text or of the line that names the test. mutant_runner.py links it.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

class Noticed : public testing::EmptyTestEventListener {
 public:
  explicit Noticed(char const* notice) : notice_(notice) {}

  void OnTestStart(testing::TestInfo const& test) override {
    line_ = std::string("[  FAILED  ] ") + test.test_suite_name() + "." + test.name();
  }
  void OnTestPartResult(testing::TestPartResult const& result) override {
    std::string const text = result.message();
    if (!result.failed() || (text + '\n' + line_).find(notice_) == std::string::npos) return;
    std::printf("%s\n", line_.c_str());
    std::fflush(nullptr);
    std::_Exit(1);
  }

 private:
  std::string notice_, line_;
};

bool const listens = [] {
  char const* const notice = std::getenv("TESSERA_NOTICE");
  if (notice != nullptr) testing::UnitTest::GetInstance()->listeners().Append(new Noticed(notice));
  return true;
}();

}  // namespace

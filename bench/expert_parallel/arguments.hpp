// SPDX-License-Identifier: Apache-2.0
// The arguments of a program here, flag by flag.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string>

namespace tessera::bench {

class Arguments {
 public:
  Arguments(int argc, char** argv) : argc_(argc), argv_(argv) {}

  // To the next flag, if there is one.
  bool next() { return ++at_ < argc_; }

  // Whether this is the flag.
  bool is(char const* flag) const { return argv_[at_] == std::string(flag); }

  // Whether this is the flag, and a value follows, which is taken.
  bool takes(char const* flag, std::string& value) {
    if (!is(flag) || at_ + 1 == argc_) return false;
    value = argv_[++at_];
    return true;
  }
  bool takes(char const* flag, int& value) {
    std::string text;
    if (!takes(flag, text)) return false;
    value = std::atoi(text.c_str());
    return true;
  }
  bool takes(char const* flag, double& value) {
    std::string text;
    if (!takes(flag, text)) return false;
    value = std::atof(text.c_str());
    return true;
  }
  // One of `values`, by its name.
  template <class Values, class Value, class Name>
  bool takes(char const* flag, Values const& values, Name name, Value& value) {
    if (!is(flag) || at_ + 1 == argc_) return false;
    std::string const text = argv_[at_ + 1];
    auto const found = std::ranges::find_if(values, [&](auto const& v) { return text == name(v); });
    if (found == std::end(values)) return false;
    value = *found;
    ++at_;
    return true;
  }

  // Exit code 2, with a line.
  int refuse() const {
    std::fprintf(stderr, "unknown option, or no value: %s\n", argv_[at_]);
    return 2;
  }

 private:
  int argc_;
  char** argv_;
  int at_ = 0;
};

}  // namespace tessera::bench

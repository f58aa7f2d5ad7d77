// SPDX-License-Identifier: Apache-2.0
// Errors of the world outside the program, as one line: rule, offending values, remedy.
#pragma once

#include <stdexcept>
#include <string>

#include "tessera/status.hpp"

namespace tessera::lm {

/// Bad input: a file, an option or a checkpoint breaks a rule.
struct InputError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The machine lacks something: disk space, a device, memory.
struct EnvironmentError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Throws what `status` reports, unless it is ok.
inline void check(Status const& status) {
  if (status.ok()) return;
  bool const input =
      status.code() == StatusCode::invalid_argument || status.code() == StatusCode::unsupported;
  if (input) throw InputError(status.text());
  throw EnvironmentError(status.text());
}

/// The value of `expected`; throws its Status otherwise.
template <class T>
T take(Expected<T> expected) {
  check(expected.status());
  return std::move(expected).value();
}

}  // namespace tessera::lm

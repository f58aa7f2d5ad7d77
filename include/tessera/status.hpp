// SPDX-License-Identifier: Apache-2.0
// Errors as values: every public call returns a Status or an Expected<T>; nothing is printed or thrown.
#pragma once

#include <cstdint>
#include <cstdio>
#include <new>
#include <type_traits>
#include <utility>

namespace tessera {

/// Says what kind of failure a Status reports. The numbers are part of the C ABI.
enum class StatusCode : std::int32_t {
  ok = 0,
  invalid_argument = 1,  ///< the call breaks a rule; the text names rule, values and remedy
  unsupported = 2,       ///< a valid request that this build or device does not serve (yet)
  environment = 3,       ///< device, driver or library missing
  device_error = 4,      ///< the device reported a failure
  out_of_memory = 5,     ///< no host memory for a context, explanation, window or group
  internal = 6,          ///< a defect in Tessera; please report it
};

/// The outcome of a call: a code and one line "rule: offending values; remedy".
/// Holds its text inline, so that making, copying and returning one never allocates.
class [[nodiscard]] Status {
 public:
  static constexpr int kTextBytes = 384;

  Status() noexcept = default;  // ok

  /// A failure with printf-style text; text beyond kTextBytes - 1 characters is cut.
  template <class... Values>
  static Status error(StatusCode code, char const* format, Values... values) noexcept {
    Status status;
    status.code_ = code;
    if constexpr (sizeof...(Values) == 0) {
      std::snprintf(status.text_, kTextBytes, "%s", format);
    } else {
      std::snprintf(status.text_, kTextBytes, format, values...);
    }
    return status;
  }
  template <class... Values>
  static Status invalid(char const* format, Values... values) noexcept {
    return error(StatusCode::invalid_argument, format, values...);
  }
  template <class... Values>
  static Status unsupported(char const* format, Values... values) noexcept {
    return error(StatusCode::unsupported, format, values...);
  }

  [[nodiscard]] bool ok() const noexcept { return code_ == StatusCode::ok; }
  [[nodiscard]] StatusCode code() const noexcept { return code_; }
  /// "" when ok.
  [[nodiscard]] char const* text() const noexcept { return text_; }

 private:
  StatusCode code_ = StatusCode::ok;
  char text_[kTextBytes] = {};
};

/// A value, or the Status that says why there is none. Reading the wrong side is undefined: test ok().
template <class T>
class [[nodiscard]] Expected {
 public:
  Expected(T value) noexcept(std::is_nothrow_move_constructible_v<T>) : ok_(true) {
    new (&value_) T(std::move(value));
  }
  Expected(Status status) noexcept : ok_(false) { new (&status_) Status(status); }
  Expected(Expected&& other) noexcept : ok_(other.ok_) {
    if (ok_) {
      new (&value_) T(std::move(other.value_));
    } else {
      new (&status_) Status(other.status_);
    }
  }
  Expected(Expected const&) = delete;
  Expected& operator=(Expected const&) = delete;
  Expected& operator=(Expected&&) = delete;
  ~Expected() {
    if (ok_) {
      value_.~T();
    } else {
      status_.~Status();
    }
  }

  [[nodiscard]] bool ok() const noexcept { return ok_; }
  [[nodiscard]] Status status() const noexcept { return ok_ ? Status() : status_; }
  T& value() & noexcept { return value_; }
  T const& value() const& noexcept { return value_; }
  T&& value() && noexcept { return std::move(value_); }

 private:
  bool ok_;
  union {
    T value_;
    Status status_;
  };
};

}  // namespace tessera

/// Returns the Status of `expression` from the enclosing function unless it is ok.
#define TESSERA_TRY(expression)                                                \
  do {                                                                         \
    if (::tessera::Status tessera_status = (expression); !tessera_status.ok()) \
      return tessera_status;                                                   \
  } while (false)

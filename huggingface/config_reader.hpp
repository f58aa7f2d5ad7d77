// SPDX-License-Identifier: Apache-2.0
// The fields of one config.json, with errors that name them.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace tessera::huggingface {

class ConfigReader {
 public:
  /// Holds `config` by reference. Throws lm::InputError unless it is an object with a model_type.
  explicit ConfigReader(nlohmann::json const& config);

  [[nodiscard]] std::string const& model_type() const noexcept { return model_type_; }

  /// True if the field is there and not null.
  [[nodiscard]] bool has(char const* key) const;
  /// A size in [1, 2^24].
  [[nodiscard]] std::int64_t size(char const* key) const;
  [[nodiscard]] std::int64_t size_or(char const* key, std::int64_t otherwise) const;
  /// As size, 0 allowed.
  [[nodiscard]] std::int64_t count_or(char const* key, std::int64_t otherwise) const;
  /// A size, or a list of sizes that are all equal: one for each layer.
  [[nodiscard]] std::int64_t size_of_all(char const* key) const;
  [[nodiscard]] bool flag(char const* key) const;
  [[nodiscard]] bool flag_or(char const* key, bool otherwise) const;
  [[nodiscard]] double number(char const* key) const;
  [[nodiscard]] double number_or(char const* key, double otherwise) const;
  [[nodiscard]] std::string text(char const* key) const;
  /// A list of layer indices in [0, layers); absent: empty.
  [[nodiscard]] std::vector<std::int64_t> layer_list(char const* key, std::int64_t layers) const;
  /// One name per layer, each among `known`; absent: nothing.
  [[nodiscard]] std::optional<std::vector<std::string>> layer_names(
      char const* key, std::int64_t layers, std::vector<std::string> const& known) const;

  /// Two names for one size: both may be there if they agree.
  [[nodiscard]] std::int64_t size_of_either(char const* key, char const* other) const;
  /// The field, where it is there, must be `wanted`: the model is not one that is understood otherwise.
  void require(char const* key, nlohmann::json const& wanted) const;

  /// "<model_type>: <text>" as an error.
  [[noreturn]] void fail(std::string const& text) const;

 private:
  [[nodiscard]] nlohmann::json const& member(char const* key) const;
  [[nodiscard]] std::int64_t integer(char const* key, std::int64_t least) const;

  nlohmann::json const& config_;
  std::string model_type_;
};

}  // namespace tessera::huggingface

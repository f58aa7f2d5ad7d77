// SPDX-License-Identifier: Apache-2.0
// The shape and routing flags that verify, bench and explain share.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cli/commands.hpp"
#include "tessera/context.hpp"
#include "tessera/names.hpp"
#include "verify/case.hpp"

namespace tessera::cli {

/// The value that `text` names in `names`. Throws CommandError with the choices where none has that name.
template <class Value, std::size_t kCount>
Value named(char const* flag, std::string const& text, Named<Value> const (&names)[kCount]) {
  std::string choices;
  for (auto const& candidate : names) {
    if (text == candidate.name) return candidate.value;
    choices += (choices.empty() ? "" : " ") + std::string(candidate.name);
  }
  throw CommandError(fmt::format("--{} {}: not known; choose one of: {}", flag, text, choices));
}

/// Throws CommandError where one of the flags `names` was given, which `command` does not read; `reason` says why.
void refuse_flags(CLI::App const& command, std::span<std::string_view const> names,
                  std::string const& reason);

/// The flags of ShapeFlags that say with what data a layer runs: what has no data does not read them. --routing is
/// another one, but a file fixes a shape.
inline constexpr std::string_view kDataFlags[] = {
    "--sentinels",  "--padding", "--repeat-experts", "--router-bias", "--aux-dlogits",
    "--accumulate", "--seed",    "--step",           "--layer"};

/// The flags of a layer that quantises its operands.
inline constexpr std::string_view kPrecisionFlags[] = {"--precision", "--scales"};

/// The layout that --layout names. Throws CommandError for a name that is not known.
WeightLayout read_layout(std::string const& text);

/// Puts what --precision auto takes on this context in its place. Throws CommandError where the library refuses `desc`.
void resolve_precision(Context const& context, MoeDesc& desc);

class ShapeFlags {
 public:
  /// Declares the flags on `command`, which must outlive neither this object nor the parse.
  void add_to(CLI::App& command);

  /// The case that the flags describe. Throws CommandError for values that are not known or contradict
  /// each other; whether the library serves the case is the library's answer to give.
  [[nodiscard]] verify::LayerCase layer_case() const;

  /// Throws CommandError for a flag of data, where `command` has none.
  void refuse_data(CLI::App const& command) const;

  /// True if a flag that fixes the shape was given.
  [[nodiscard]] bool any_shape() const noexcept;

  [[nodiscard]] bool has_layout() const noexcept { return !layout_.empty(); }

  /// The same with what --precision auto takes on this context.
  [[nodiscard]] verify::LayerCase layer_case(Context const& context) const;

  /// The context for --device and --threads.
  [[nodiscard]] Context context() const;
  /// The same with another number of threads.
  [[nodiscard]] Context context(std::int32_t num_threads) const;

  [[nodiscard]] std::uint64_t seed() const noexcept { return seed_; }
  /// Returns how all cases of --random quantise, if --precision says so. Throws CommandError for auto.
  [[nodiscard]] std::optional<Precision> quantised_cases() const;
  [[nodiscard]] std::string const& device() const noexcept { return device_; }
  [[nodiscard]] bool on_cuda() const noexcept { return device_.starts_with("cuda"); }

 private:
  [[nodiscard]] std::int32_t device_index() const;
  void read_routing(verify::LayerCase& layer_case) const;
  void read_precision(MoeDesc& desc) const;

  std::optional<std::int64_t> tokens_, hidden_, intermediate_, experts_, top_k_;
  std::string activation_ = "swiglu", layout_, dtype_, router_dtype_, device_ = "cpu";
  std::string precision_ = "native", scales_;
  std::string router_, round_ = "none", routing_ = "random", ids_dtype_ = "int32", save_ = "h";
  Activation activation_options_;
  bool bias_ = false, normalize_scores_ = false, router_bias_ = false;
  bool variable_experts_ = false, repeat_experts_ = false, accumulate_ = false;
  bool replay_ = false, aux_dlogits_ = false, unproven_kernels_ = false;
  std::int64_t capacity_ = 0, column_chunk_ = 0;
  std::uint32_t layer_ = 0;
  std::int32_t groups_ = 0, top_groups_ = 0, tile_ = 128, threads_ = 0;
  float route_scale_ = 1;
  double sentinels_ = 0, padding_ = 0;
  std::uint64_t seed_ = 1, step_ = 0;
};

}  // namespace tessera::cli

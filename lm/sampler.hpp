// SPDX-License-Identifier: Apache-2.0
// Draws bytes from the model: p ~ exp(logit / temperature) over the `top_k` likeliest bytes, of these the
// fewest whose probability reaches `top_p`.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "lm/model.hpp"

namespace tessera::lm {

struct SamplingOptions {
  std::int64_t tokens = 400;
  double temperature = 0.8;  ///< 0: always the likeliest byte
  double top_p = 0.95;
  std::int64_t top_k = 0;  ///< 0: all
  std::uint64_t seed = 1;
};

/// Throws InputError for values out of range.
void validate(SamplingOptions const& options);

/// The byte chosen from 256 logits by a uniform number in [0, 1). Throws InputError where one is not finite.
std::uint8_t choose_byte(std::span<float const> logits, SamplingOptions const& options,
                         double uniform);

/// Continues a prompt of at least one byte. `each`, if given, sees every byte as it comes and may return
/// false to stop. Returns the new bytes.
std::string generate(Model& model, std::span<float const> parameters, std::string_view prompt,
                     SamplingOptions const& options,
                     std::function<bool(char)> const& each = nullptr);

}  // namespace tessera::lm

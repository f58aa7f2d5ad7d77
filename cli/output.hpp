// SPDX-License-Identifier: Apache-2.0
// Results on stdout: text for people, or one JSON document. Progress and notes on stderr.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "tessera/moe.hpp"

namespace tessera::cli {

using Json = nlohmann::ordered_json;

/// Prints the document and a newline. Bytes that are not UTF-8 become U+FFFD: JSON cannot hold them. Throws
/// CommandError where stdout cannot be written.
void print_json(Json const& document);

/// Prints text for people, with the same check.
void print_text(std::string const& text);

/// Prints progress or a note on stderr. Lost where that cannot be written: no work ends for it.
void print_note(std::string_view text) noexcept;

/// A note where the layer's router cannot learn (scores_are_constant in router.hpp), with the remedy.
void note_constant_scores(MoeDesc const& desc);

/// "1.4 MiB".
std::string bytes_text(double bytes);

/// {"tokens": T, "hidden": d, "intermediate": n, "experts": E, "top_k": K}
Json shape_json(MoeShape const& shape);

/// {"x": .., "h": .., "routing": ..}, with the scales of both where operands are quantised.
Json saved_json(MoeDesc const& desc, SavedBytes const& saved);

/// "2026-01-31", of UTC.
std::string today();

/// Bytes of memory in this machine; 0 where the system does not say.
double physical_memory_bytes() noexcept;

/// Throws CommandError (exit 3) where `bytes` is more than this machine has.
void require_memory(double bytes);

}  // namespace tessera::cli

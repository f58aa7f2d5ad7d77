// SPDX-License-Identifier: Apache-2.0
// Text to train on: files, folders or stdin. The last kHeldOutPercent of every file are held out: no byte of
// them is ever in a training batch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "lm/model.hpp"

namespace tessera::lm {

inline constexpr int kHeldOutPercent = 8;

struct Corpus {
  std::vector<std::uint8_t> train;     ///< the beginnings of all files
  std::vector<std::uint8_t> held_out;  ///< their ends
  std::int64_t files = 0;
  std::int64_t skipped = 0;  ///< files in folders that are not text or not readable

  /// Identifies the text and its split.
  [[nodiscard]] std::uint64_t fingerprint() const;
};

/// Appends one document to the corpus, split.
void add_document(Corpus& corpus, std::span<std::uint8_t const> text);

/// Reads `sources` in order: a file, a folder ("-" is stdin). Folders are walked in the order of their
/// names; hidden entries, links, build output (build*, runs, node_modules, __pycache__), folders of runs, the folder
/// `exclude` and files with NUL bytes are skipped. A file reached twice counts once. Throws InputError.
Corpus read_corpus(std::span<std::string const> sources, std::filesystem::path const& exclude = {});

/// Throws InputError unless both parts of the split can fill a window of `context` bytes and its targets.
void require_enough(Corpus const& corpus, std::int64_t context);

/// Windows of `length` + 1 bytes as inputs and targets.
class Windows {
 public:
  Windows(std::int64_t sequences, std::int64_t length)
      : length_(length),
        inputs_(static_cast<std::size_t>(sequences * length)),
        targets_(inputs_.size()) {}

  void set(std::int64_t sequence, std::span<std::uint8_t const> text, std::int64_t start);
  /// The first `sequences` windows.
  [[nodiscard]] Batch batch(std::int64_t sequences) const;

 private:
  std::int64_t length_;
  std::vector<std::uint8_t> inputs_, targets_;
};

/// Fills `windows` with the training batch of `step`, drawn uniformly from (seed, step, sequence).
void draw_batch(std::span<std::uint8_t const> text, std::uint64_t seed, std::int64_t step,
                std::int64_t sequences, std::int64_t length, Windows& windows);

}  // namespace tessera::lm

// SPDX-License-Identifier: Apache-2.0
#include "lm/corpus.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <system_error>

#include "lm/checkpoint.hpp"
#include "lm/error.hpp"
#include "lm/files.hpp"
#include "lm/random.hpp"

namespace tessera::lm {

namespace fs = std::filesystem;

namespace {

constexpr std::size_t kMaxFileBytes = std::size_t{1} << 32;

std::span<std::uint8_t const> bytes_of(std::string const& text) {
  return {reinterpret_cast<std::uint8_t const*>(text.data()), text.size()};
}

std::string read_stdin() {
  std::string text;
  char buffer[1 << 16];
  while (std::size_t const count = std::fread(buffer, 1, sizeof buffer, stdin)) {
    text.append(buffer, count);
    if (text.size() > kMaxFileBytes) throw InputError("stdin: more than 4 GiB of text");
  }
  if (std::ferror(stdin) != 0) throw InputError("stdin: cannot be read");
  return text;
}

bool skips_folder(std::string const& name) {
  return name.starts_with("build") || name == "runs" || name == "node_modules" ||
         name == "__pycache__";
}

class Reader {
 public:
  explicit Reader(fs::path const& exclude) {
    std::error_code error;
    if (!exclude.empty()) exclude_ = fs::weakly_canonical(exclude, error);
  }

  void add_file(fs::path const& path) {
    if (seen_before(path)) return;
    add_document(corpus_, bytes_of(read_file(path, kMaxFileBytes)));
  }

  void add_folder(fs::path const& folder) {
    std::error_code error;
    if (!exclude_.empty() && fs::weakly_canonical(folder, error) == exclude_) return;
    std::vector<fs::directory_entry> entries;
    fs::directory_iterator iterator(folder, error);
    if (error) {
      throw InputError(fmt::format("{}: cannot be read: {}", folder.string(), error.message()));
    }
    for (; iterator != fs::directory_iterator(); iterator.increment(error)) {
      entries.push_back(*iterator);
      if (error) break;
    }
    std::sort(entries.begin(), entries.end());
    for (fs::directory_entry const& entry : entries) add_entry(entry);
  }

  Corpus& corpus() { return corpus_; }

 private:
  void add_entry(fs::directory_entry const& entry) {
    std::error_code error;
    std::string const name = entry.path().filename().string();
    if (name.starts_with('.') || entry.is_symlink(error)) return;
    if (entry.is_directory(error)) {
      if (!skips_folder(name) && !fs::exists(entry.path() / kStateFile, error)) {
        add_folder(entry.path());
      }
    } else if (entry.is_regular_file(error)) {
      add_text(entry.path());
    }
  }

  // A file that nobody named: only if it is text.
  void add_text(fs::path const& path) {
    std::string text;
    try {
      text = read_file(path, kMaxFileBytes);
    } catch (InputError const&) {
      ++corpus_.skipped;
      return;
    }
    if (text.find('\0') != std::string::npos) {
      ++corpus_.skipped;
    } else if (!seen_before(path)) {
      add_document(corpus_, bytes_of(text));
    }
  }

  bool seen_before(fs::path const& path) {
    std::error_code error;
    return !seen_.insert(fs::weakly_canonical(path, error)).second;
  }

  Corpus corpus_;
  fs::path exclude_;
  std::set<fs::path> seen_;
};

}  // namespace

std::uint64_t Corpus::fingerprint() const {
  std::uint64_t hash = mix(train.size());
  for (std::uint8_t const byte : train) hash = mix(hash ^ byte);
  hash = mix(hash ^ held_out.size());
  for (std::uint8_t const byte : held_out) hash = mix(hash ^ byte);
  return hash;
}

void add_document(Corpus& corpus, std::span<std::uint8_t const> text) {
  std::size_t const held_out = text.size() * kHeldOutPercent / 100;
  auto const boundary = text.end() - static_cast<std::ptrdiff_t>(held_out);
  corpus.train.insert(corpus.train.end(), text.begin(), boundary);
  corpus.held_out.insert(corpus.held_out.end(), boundary, text.end());
  ++corpus.files;
}

Corpus read_corpus(std::span<std::string const> sources, fs::path const& exclude) {
  Reader reader(exclude);
  for (std::string const& source : sources) {
    std::error_code error;
    if (source == "-") {
      add_document(reader.corpus(), bytes_of(read_stdin()));
    } else if (fs::is_directory(source, error)) {
      reader.add_folder(source);
    } else {
      reader.add_file(source);
    }
  }
  return std::move(reader.corpus());
}

void require_enough(Corpus const& corpus, std::int64_t context) {
  std::size_t const window = static_cast<std::size_t>(context) + 1;
  if (corpus.train.size() >= window && corpus.held_out.size() >= window) return;
  throw InputError(
      fmt::format("{} bytes of text in {} files: {} for training and {} held out, each needs at "
                  "least {}; give more "
                  "text with --text or lower --context",
                  corpus.train.size() + corpus.held_out.size(), corpus.files, corpus.train.size(),
                  corpus.held_out.size(), window));
}

void Windows::set(std::int64_t sequence, std::span<std::uint8_t const> text, std::int64_t start) {
  auto const window = text.subspan(static_cast<std::size_t>(start));
  std::copy_n(window.begin(), length_, inputs_.begin() + sequence * length_);
  std::copy_n(window.begin() + 1, length_, targets_.begin() + sequence * length_);
}

Batch Windows::batch(std::int64_t sequences) const {
  auto const count = static_cast<std::size_t>(sequences * length_);
  return {sequences, length_, std::span(inputs_).first(count), std::span(targets_).first(count)};
}

void draw_batch(std::span<std::uint8_t const> text, std::uint64_t seed, std::int64_t step,
                std::int64_t sequences, std::int64_t length, Windows& windows) {
  auto const starts = static_cast<double>(static_cast<std::int64_t>(text.size()) - length);
  for (std::int64_t sequence = 0; sequence < sequences; ++sequence) {
    auto const index = static_cast<std::uint64_t>(step * sequences + sequence);
    double const unit = random_unit(seed, Stream::batches, index);
    windows.set(sequence, text, static_cast<std::int64_t>(unit * starts));
  }
}

}  // namespace tessera::lm

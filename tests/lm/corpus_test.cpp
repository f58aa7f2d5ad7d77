// SPDX-License-Identifier: Apache-2.0
#include "lm/corpus.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "lm/checkpoint.hpp"
#include "lm/evaluation.hpp"
#include "tests/lm/support.hpp"

namespace tessera::lm {
namespace {

namespace fs = std::filesystem;

std::string as_text(std::span<std::uint8_t const> bytes) { return {bytes.begin(), bytes.end()}; }

TEST(Corpus, HoldsOutTheEndOfEveryFileAndNothingElse) {
  TemporaryFolder const folder;
  // Every byte pair of "file" is unique to its place, so that a leak would show.
  std::string first, second;
  for (int i = 0; i < 200; ++i) first += static_cast<char>('a' + i % 26);
  for (int i = 0; i < 50; ++i) second += static_cast<char>('A' + i % 26);
  write_text(folder.path() / "a.txt", first);
  write_text(folder.path() / "b.txt", second);
  std::string const source = folder.path().string();
  Corpus const corpus = read_corpus(std::span(&source, 1));
  EXPECT_EQ(corpus.files, 2);
  EXPECT_EQ(as_text(corpus.train), first.substr(0, 184) + second.substr(0, 46));
  EXPECT_EQ(as_text(corpus.held_out), first.substr(184) + second.substr(46));
}

TEST(Corpus, TrainingBatchesNeverTouchHeldOutBytes) {
  Corpus corpus;
  // Held-out bytes are digits, training bytes are not.
  std::string const text = std::string(920, 'x') + std::string(80, '7');
  add_document(corpus, {reinterpret_cast<std::uint8_t const*>(text.data()), text.size()});
  add_document(corpus, {reinterpret_cast<std::uint8_t const*>(text.data()), text.size()});
  ASSERT_EQ(corpus.held_out.size(), 160u);
  Windows windows(8, 32);
  for (std::int64_t step = 0; step < 200; ++step) {
    draw_batch(corpus.train, 1, step, 8, 32, windows);
    Batch const batch = windows.batch(8);
    EXPECT_EQ(std::count(batch.inputs.begin(), batch.inputs.end(), '7'), 0);
    EXPECT_EQ(std::count(batch.targets.begin(), batch.targets.end(), '7'), 0);
  }
}

TEST(Corpus, DrawsEveryWindowAndFollowsSeedAndStepAlone) {
  std::vector<std::uint8_t> text(40);
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<std::uint8_t>(i);
  std::set<int> starts;
  Windows windows(4, 8), again(4, 8);
  for (std::int64_t step = 0; step < 100; ++step) {
    draw_batch(text, 5, step, 4, 8, windows);
    for (int i = 0; i < 4; ++i) {
      auto const sequence = static_cast<std::size_t>(8 * i);
      starts.insert(windows.batch(4).inputs[sequence]);
      EXPECT_EQ(windows.batch(4).targets[sequence], windows.batch(4).inputs[sequence] + 1);
    }
  }
  EXPECT_EQ(starts.size(), 32u);  // 0 .. 31: the last window's targets end with the text
  draw_batch(text, 5, 99, 4, 8, again);
  EXPECT_TRUE(std::ranges::equal(windows.batch(4).inputs, again.batch(4).inputs));
  draw_batch(text, 6, 99, 4, 8, again);
  EXPECT_FALSE(std::ranges::equal(windows.batch(4).inputs, again.batch(4).inputs));
}

TEST(Corpus, SkipsWhatIsNotTextInFolders) {
  TemporaryFolder const folder;
  write_text(folder.path() / "kept.md", "words");
  write_text(folder.path() / "deep" / "kept.cpp", "code");
  write_text(folder.path() / "binary.o", std::string("\0\1\2", 3));
  write_text(folder.path() / ".hidden", "no");
  write_text(folder.path() / ".git" / "config", "no");
  write_text(folder.path() / "build-debug" / "made.txt", "no");
  write_text(folder.path() / "runs" / "loss.csv", "no");
  write_text(folder.path() / "out" / "sample.txt", "no");
  fs::create_symlink(folder.path(), folder.path() / "loop");
  std::vector<std::string> const sources = {folder.path().string(),
                                            (folder.path() / "kept.md").string()};
  Corpus const corpus = read_corpus(sources, folder.path() / "out");
  EXPECT_EQ(corpus.files, 2);
  EXPECT_EQ(corpus.skipped, 1);
  EXPECT_EQ(as_text(corpus.train), "codewords");
}

TEST(Corpus, SkipsRunsInFoldersUnlessTheyAreNamed) {
  TemporaryFolder const folder;
  fs::path const run = folder.path() / "experiment";
  fs::create_directory(run);
  write_text(folder.path() / "a.txt", "text");
  write_text(run / "sample.txt", "what a model wrote");
  std::string const source = folder.path().string(), named = run.string();
  EXPECT_EQ(read_corpus(std::span(&source, 1)).files, 2);
  write_text(run / kStateFile, "state");
  EXPECT_EQ(read_corpus(std::span(&source, 1)).files, 1);
  EXPECT_EQ(read_corpus(std::span(&named, 1)).files, 2);
}

TEST(Corpus, NamesWhatCannotBeRead) {
  std::string const missing = "/nonexistent/text";
  try {
    read_corpus(std::span(&missing, 1));
    FAIL();
  } catch (InputError const& error) {
    EXPECT_NE(std::string(error.what()).find(missing), std::string::npos);
  }
}

TEST(Corpus, TooLittleTextSaysHowMuchIsNeeded) {
  Corpus corpus;
  corpus.train = random_text(1000, 1);
  corpus.held_out = random_text(64, 2);
  EXPECT_NO_THROW(require_enough(corpus, 63));
  EXPECT_THROW(require_enough(corpus, 64), InputError);
}

TEST(Corpus, FingerprintSeesTextAndSplit) {
  Corpus corpus;
  corpus.train = random_text(100, 1);
  corpus.held_out = random_text(10, 2);
  Corpus other = corpus;
  EXPECT_EQ(corpus.fingerprint(), other.fingerprint());
  other.held_out.insert(other.held_out.begin(), other.train.back());
  other.train.pop_back();
  EXPECT_NE(corpus.fingerprint(), other.fingerprint());
}

TEST(Bigram, IsTheSmoothedCrossEntropyOfAKnownText) {
  // Training pairs of "abab": ab twice, ba once. Held out "aba": p(b|a) = 2.5/130, p(a|b) = 1.5/129.
  std::vector<std::uint8_t> const train = {'a', 'b', 'a', 'b'}, held_out = {'a', 'b', 'a'};
  double const expected = -(std::log2(2.5 / 130) + std::log2(1.5 / 129)) / 2;
  EXPECT_NEAR(bigram_bits_per_byte(train, held_out, 1), expected, 1e-12);
  EXPECT_NEAR(bigram_bits_per_byte(train, held_out, 2), expected, 1e-12);
  EXPECT_NEAR(bigram_bits_per_byte(train, held_out, 1, 1), -std::log2(2.5 / 130), 1e-12);
  // A byte that was never seen predicts nothing: 8 bits.
  std::vector<std::uint8_t> const unseen = {'x', 'y'};
  EXPECT_NEAR(bigram_bits_per_byte(train, unseen, 1), 8, 1e-12);
}

TEST(Evaluation, WeighsEveryWindowAlike) {
  ModelConfig const config = small_config();
  Context const context = cpu_context(2);
  Model model(context, config);
  std::vector<float> const parameters = initial_parameters(model.layout(), 1);
  // 18 windows: a full batch and a short one.
  std::vector<std::uint8_t> const text = random_text(18 * config.context + 5, 3);
  double bits = 0;
  for (std::int64_t i = 0; i < 18; ++i) {
    auto const window = std::span(text).subspan(static_cast<std::size_t>(i * config.context),
                                                static_cast<std::size_t>(config.context) + 1);
    bits += model_bits_per_byte(model, parameters, {window}).value() / 18;
  }
  EXPECT_NEAR(model_bits_per_byte(model, parameters, {text}).value(), bits, 1e-6);
  EXPECT_NEAR(model_bits_per_byte(model, parameters, {text, 0, 4}).value(), bits, 1e-6);
}

TEST(Evaluation, TellsOfItsProgressAndEndsWhenStopped) {
  ModelConfig const config = small_config();
  Context const context = cpu_context(2);
  Model model(context, config);
  std::vector<float> const parameters = initial_parameters(model.layout(), 1);
  std::vector<std::uint8_t> const text = random_text(18 * config.context + 5, 3);
  std::atomic<bool> stop = false;
  std::vector<std::int64_t> seen;
  HeldOut held_out{.text = text, .batch = 4, .stop = &stop};
  held_out.report = [&](std::int64_t done, std::int64_t windows) {
    EXPECT_EQ(windows, 18);
    seen.push_back(done);
    stop = seen.size() == 6;
  };
  EXPECT_TRUE(model_bits_per_byte(model, parameters, held_out));
  EXPECT_EQ(seen, (std::vector<std::int64_t>{4, 8, 12, 16, 18}));
  EXPECT_FALSE(model_bits_per_byte(model, parameters, held_out));
  EXPECT_EQ(seen.size(), 6u);
}

}  // namespace
}  // namespace tessera::lm

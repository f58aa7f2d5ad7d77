// SPDX-License-Identifier: Apache-2.0
// The program itself: tessera train and tessera generate, their exit codes, files and answer to Ctrl-C.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <nlohmann/json.hpp>
#include <thread>

#include "lm/checkpoint.hpp"
#include "lm/run_folder.hpp"
#include "lm/trainer.hpp"
#include "tests/lm/support.hpp"

namespace tessera::lm {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

using Arguments = std::vector<std::string>;

struct Result {
  int exit_code = -1;
  std::string out, err;
};

class Program : public testing::Test {
 protected:
  Program() { write_text(text_, std::string(random_text_of(8000))); }

  // Starts the program with its streams in files.
  pid_t start(Arguments arguments, std::string const& input = "/dev/null") {
    arguments.insert(arguments.begin(), TESSERA_PROGRAM);
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    int const flags = O_WRONLY | O_CREAT | O_TRUNC;
    posix_spawn_file_actions_addopen(&actions, 0, input.c_str(), O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, out_.c_str(), flags, 0644);
    posix_spawn_file_actions_addopen(&actions, 2, err_.c_str(), flags, 0644);
    pid_t child = -1;
    EXPECT_EQ(::posix_spawn(&child, pointers[0], &actions, nullptr, pointers.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    return child;
  }
  Result wait_for(pid_t child) {
    int status = 0;
    ::waitpid(child, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), read_text(out_),
            read_text(err_)};
  }
  Result run(Arguments const& arguments, std::string const& input = "/dev/null") {
    return wait_for(start(arguments, input));
  }

  // Until the program that was started prints its first progress line, or ends without one.
  void await_first_step(pid_t child) const {
    siginfo_t ended = {};
    while (read_text(err_).find("step ") == std::string::npos) {
      ::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOHANG | WNOWAIT);
      ASSERT_EQ(ended.si_pid, 0) << "ended before its first step: " << read_text(err_);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  // A small model on the test's text.
  [[nodiscard]] Arguments training(std::string const& out, Arguments const& more = {}) const {
    Arguments arguments = {"train",
                           "--text",
                           text_.string(),
                           "--out",
                           out,
                           "--steps",
                           "12",
                           "--hidden",
                           "16",
                           "--intermediate",
                           "8",
                           "--layers",
                           "2",
                           "--heads",
                           "2",
                           "--kv-heads",
                           "1",
                           "--head-dim",
                           "8",
                           "--context",
                           "32",
                           "--batch",
                           "4",
                           "--experts",
                           "4",
                           "--eval-every",
                           "5",
                           "--threads",
                           "2"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  // Fails with exit code 2 and one line that names `word`.
  void refused(Arguments const& arguments, std::string const& word) {
    Result const result = run(arguments);
    EXPECT_EQ(result.exit_code, 2) << word;
    EXPECT_EQ(result.out, "") << word;
    std::string const last = result.err.substr(result.err.rfind('\n', result.err.size() - 2) + 1);
    EXPECT_NE(last.find("tessera: "), std::string::npos) << last;
    EXPECT_NE(last.find(word), std::string::npos) << last;
  }

  static std::string random_text_of(std::int64_t size) {
    auto const bytes = random_text(size, 1);
    return {bytes.begin(), bytes.end()};
  }

  TemporaryFolder folder_;
  fs::path text_ = folder_.path() / "text.txt";
  fs::path out_ = folder_.path() / "stdout", err_ = folder_.path() / "stderr";
  std::string run_ = (folder_.path() / "run").string();
};

TEST_F(Program, TrainsAndLeavesEveryFile) {
  Result const result = run(training(run_, {"--json"}));
  ASSERT_EQ(result.exit_code, 0) << result.err;
  json const summary = json::parse(result.out);  // nothing else is on stdout
  EXPECT_EQ(summary.at("end"), "finished");
  EXPECT_EQ(summary.at("step"), 12);
  for (char const* key : {"held_out_bits_per_byte", "bigram_bits_per_byte", "expert_balance",
                          "moe_zeroed_bits_per_byte", "tokens_per_second"}) {
    EXPECT_TRUE(summary.at(key).is_number()) << key;
  }
  for (char const* name : {kModelFile, kConfigFile, kStateFile, kLossFile, kExpertLoadFile,
                           kPlotScript, kSampleFile}) {
    EXPECT_TRUE(fs::exists(fs::path(run_) / name)) << name;
    EXPECT_NE(result.err.find(name), std::string::npos) << name;
  }
  EXPECT_NE(result.err.find("tessera train --resume " + run_), std::string::npos);
  EXPECT_NE(result.err.find("tessera generate --checkpoint " + run_), std::string::npos);
  EXPECT_EQ(result.err.find('\r'), std::string::npos);  // no redrawing into a file
  EXPECT_EQ(result.err.find('\033'), std::string::npos);
}

TEST_F(Program, BalancesByABiasOrALoss) {
  Result const biased = run(training(run_, {"--json", "--router", "sigmoid-bias"}));
  ASSERT_EQ(biased.exit_code, 0) << biased.err;
  EXPECT_NE(biased.err.find("selection bias that moves by 0.001 a step\n"), std::string::npos)
      << biased.err;
  json const summary = json::parse(biased.out);
  EXPECT_EQ(summary.at("balance_loss"), 0);
  EXPECT_EQ(summary.at("bias_rate"), 0.001);
  EXPECT_TRUE(summary.at("idle_experts").is_number_integer());
  Result const both =
      run(training(run_ + "_b", {"--json", "--router", "sigmoid-bias", "--balance", "0.5"}));
  EXPECT_EQ(json::parse(both.out).at("balance_loss"), 0.5) << both.err;
  Result const softmax = run(training(run_ + "_c", {"--json"}));
  EXPECT_EQ(json::parse(softmax.out).at("balance_loss"), 0.01) << softmax.err;
  EXPECT_TRUE(json::parse(softmax.out).at("bias_rate").is_null());
}

TEST_F(Program, ResumesBitForBit) {
  std::string const other = run_ + "_b";
  ASSERT_EQ(run(training(run_)).exit_code, 0);
  Arguments first = training(other);
  first[6] = "6";
  ASSERT_EQ(run(first).exit_code, 0);
  Result const resumed = run({"train", "--resume", other, "--steps", "12", "--threads", "1"});
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  for (auto const& entry : fs::directory_iterator(run_)) {
    std::string const name = entry.path().filename().string();
    EXPECT_TRUE(read_text(entry.path()) == read_text(fs::path(other) / name)) << name;
  }
}

TEST_F(Program, TrainsAndGeneratesWithAnyRouterAndRounding) {
  for (Arguments const& options :
       {Arguments{"--router", "sigmoid-bias", "--normalize-scores", "--route-scale", "2.5"},
        Arguments{"--router", "group-limited", "--groups", "2", "--top-groups", "1"},
        Arguments{"--router", "expert-choice", "--z-loss", "0.001"},
        Arguments{"--round", "nr-f", "--tile", "16"}}) {
    fs::remove_all(run_);
    Result const result = run(training(run_, options));
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_NE(result.err.find(options[1]), std::string::npos) << result.err;
    bool const qwen = options[0] == "--round";
    EXPECT_EQ(result.err.find("not for transformers") == std::string::npos, qwen) << result.err;
    EXPECT_EQ(run({"generate", "--checkpoint", run_, "--tokens", "5"}).exit_code, 0);
    EXPECT_EQ(run({"train", "--resume", run_, "--steps", "13"}).exit_code, 0);
  }
}

TEST_F(Program, NotesWhereTilesAreTooLargeToRound) {
  Result const result = run(training(run_, {"--round", "nr-f"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.err.find("fewer than two tiles of 128"), std::string::npos) << result.err;
}

TEST_F(Program, ReadsTextFromStdin) {
  Arguments arguments = training(run_);
  arguments[2] = "-";
  Result const result = run(arguments, text_.string());
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.err.find("1 files, 7360 bytes to train on, 640 held out"), std::string::npos)
      << result.err;
  EXPECT_NE(result.err.find("the same text on stdin"), std::string::npos) << result.err;
}

TEST_F(Program, SavesAndEndsOnASignal) {
  for (int const signal : {SIGINT, SIGTERM}) {
    fs::remove_all(run_);
    Arguments arguments = training(run_, {"--json"});
    arguments[6] = "1000000";
    pid_t const child = start(arguments);
    await_first_step(child);
    ::kill(child, signal);
    Result const result = wait_for(child);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(json::parse(result.out).at("end"), "stopped");
    EXPECT_NE(result.err.find("/tessera train --resume " + run_), std::string::npos);
    TrainingState const state = load_state(run_);
    EXPECT_GT(state.step, 0);
    EXPECT_LT(state.step, 1000000);
    EXPECT_EQ(load_model(run_).parameters, state.parameters);
  }
}

TEST_F(Program, PrintsWhatTheMoeBlocksBringWithOneSign) {
  Arguments arguments = training(run_);
  arguments[6] = "1";  // hardly trained: the blocks do harm
  Result const result = run(arguments);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.err.find("(-0."), std::string::npos) << result.err;
}

TEST_F(Program, EndsItsEvaluationOnASignal) {
  write_text(text_, random_text_of(4'000'000));  // takes many times as long as the steps
  Arguments arguments = training(run_, {"--json", "--held-out-windows", "0"});
  arguments[6] = "1";
  pid_t const child = start(arguments);
  await_first_step(child);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  ::kill(child, SIGINT);
  Result const result = wait_for(child);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  json const summary = json::parse(result.out);
  EXPECT_EQ(summary.at("end"), "finished");
  EXPECT_TRUE(summary.at("moe_zeroed_bits_per_byte").is_null()) << summary;
  EXPECT_NE(result.err.find("stopped while evaluating"), std::string::npos) << result.err;
  EXPECT_EQ(load_state(run_).step, 1);
}

TEST_F(Program, StopsWhenTheTimeIsUp) {
  Arguments arguments = training(run_, {"--seconds", "0.3", "--json"});
  arguments[6] = "1000000";
  Result const result = run(arguments);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(json::parse(result.out).at("end"), "out-of-time");
  EXPECT_TRUE(json::parse(result.out).at("held_out_bits_per_byte").is_number());
}

TEST_F(Program, EndsItsEvaluationWhenTheTimeIsUp) {
  write_text(text_, random_text_of(40'000'000));  // evaluating what is held out of it takes minutes
  Arguments arguments = training(run_, {"--seconds", "0.3", "--json", "--held-out-windows", "0"});
  arguments[6] = "1000000";
  Result const result = run(arguments);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  json const summary = json::parse(result.out);
  EXPECT_EQ(summary.at("end"), "out-of-time");
  std::int64_t const windows = summary.at("held_out_windows");
  EXPECT_GE(windows, kEvaluationWindows);
  EXPECT_LT(windows, summary.at("held_out_bytes").get<std::int64_t>() / 32 / 2);
  EXPECT_GT(summary.at("held_out_bits_per_byte"), 0);
  EXPECT_NE(result.err.find("windows of held-out text, spread evenly"), std::string::npos);
}

TEST_F(Program, JudgesAsManyWindowsAsWanted) {
  double of_others = 0;
  for (std::int64_t const wanted : {0, 3}) {
    Arguments arguments = training(run_, {"--json", "--held-out-windows", std::to_string(wanted)});
    arguments[6] = "1";
    Result const result = run(arguments);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    json const summary = json::parse(result.out);
    std::int64_t const all = (summary.at("held_out_bytes").get<std::int64_t>() - 1) / 32;
    ASSERT_GT(all, 3);
    EXPECT_EQ(summary.at("held_out_windows"), wanted == 0 ? all : wanted);
    EXPECT_EQ(result.err.find("--held-out-windows 0 takes all") != std::string::npos, wanted != 0)
        << result.err;
    EXPECT_NE(summary.at("held_out_bits_per_byte"), of_others);
    of_others = summary.at("held_out_bits_per_byte");
  }
}

TEST_F(Program, KeepsAnEarlierRun) {
  ASSERT_EQ(run(training(run_)).exit_code, 0);
  std::string const before = read_text(fs::path(run_) / kModelFile);
  ASSERT_EQ(run(training(run_, {"--seed", "2"})).exit_code, 0);
  EXPECT_EQ(read_text(fs::path(run_ + "-1") / kModelFile), before);
  EXPECT_NE(read_text(fs::path(run_) / kModelFile), before);
}

TEST_F(Program, LocksItsFolderWhileItRuns) {
  ASSERT_EQ(run(training(run_)).exit_code, 0);
  std::string const earlier = read_text(fs::path(run_) / kStateFile);
  Arguments endless = training(run_);
  endless[6] = "1000000";
  for (Arguments const& arguments :
       {endless,
        {"train", "--resume", run_, "--steps", "1000000"},
        {"train", "--resume", run_ + "-1", "--steps", "1000000", "--out", run_ + "_b"}}) {
    fs::path const written = arguments.back() == run_ + "_b" ? arguments.back() : run_;
    write_text(err_, "");
    pid_t const child = start(arguments);
    await_first_step(child);
    EXPECT_THROW(FolderLock{written}, InputError) << written;
    ::kill(child, SIGTERM);
    EXPECT_EQ(wait_for(child).exit_code, 0);
    EXPECT_NO_THROW(FolderLock{written}) << written;
  }
  EXPECT_EQ(read_text(fs::path(run_ + "-1") / kStateFile), earlier);
}

TEST_F(Program, RefusesAFolderThatAnotherRunWrites) {
  std::string const other = run_ + "_b",
                    message = ": another run is writing there; choose another --out";
  ASSERT_EQ(run(training(other)).exit_code, 0);
  fs::create_directory(run_);
  {
    FolderLock const lock{run_};  // before its first save
    refused(training(run_), run_ + message);
    EXPECT_TRUE(fs::is_empty(run_));
  }
  ASSERT_EQ(run(training(run_)).exit_code, 0);
  std::string const state = read_text(fs::path(run_) / kStateFile);
  {
    FolderLock const lock{run_};
    refused(training(run_, {"--seed", "2"}), run_ + message);
    refused({"train", "--resume", run_, "--steps", "14"}, run_ + message);
    refused({"train", "--resume", other, "--steps", "14", "--out", run_}, run_ + message);
    EXPECT_EQ(read_text(fs::path(run_) / kStateFile), state);
    EXPECT_FALSE(fs::exists(run_ + "-1"));
    // Whoever only reads there is free to.
    EXPECT_EQ(run({"train", "--resume", run_, "--steps", "14", "--out", other}).exit_code, 0);
  }
  EXPECT_EQ(run({"train", "--resume", run_, "--steps", "14"}).exit_code, 0);
}

TEST_F(Program, ResumedElsewhereKeepsBothRuns) {
  std::string const other = run_ + "_b";
  ASSERT_EQ(run(training(run_)).exit_code, 0);
  ASSERT_EQ(run(training(other, {"--seed", "2"})).exit_code, 0);
  std::string const source = read_text(fs::path(run_) / kStateFile);
  std::string const earlier = read_text(fs::path(other) / kStateFile);
  ASSERT_EQ(run({"train", "--resume", run_, "--steps", "14", "--out", other}).exit_code, 0);
  EXPECT_EQ(read_text(fs::path(run_) / kStateFile), source);
  EXPECT_EQ(read_text(fs::path(other + "-1") / kStateFile), earlier);
  EXPECT_EQ(load_state(other).step, 14);
}

TEST_F(Program, RefusesBadTraining) {
  write_text(folder_.path() / "short.txt", "too little");
  refused({"train"}, "--text");
  refused({"train", "--text", (folder_.path() / "missing").string()}, "missing");
  refused({"train", "--text", (folder_.path() / "short.txt").string()}, "--context");
  refused(training(text_.string()), "--out");
  refused(training("/proc/run"), "--out");
  Arguments steps = training(run_);
  for (char const* value : {"0", "-3", "many", "99999999999999999999"}) {
    steps[6] = value;
    refused(steps, "steps");
  }
  refused(training(run_, {"--lr", "0"}), "lr");
  refused(training(run_, {"--lr", "nan"}), "lr");
  refused(training(run_, {"--seconds", "nan"}), "nan");
  refused(training(run_, {"--router", "best"}), "router");
  refused(training(run_, {"--round", "best"}), "round");
  refused(training(run_, {"--router", "given"}), "router given");
  refused(training(run_, {"--router", "group-limited", "--groups", "3"}), "groups");
  refused(training(run_, {"--groups", "2"}), "--groups with --router topk-softmax");
  refused(training(run_, {"--normalize-scores"}), "--normalize-scores");
  refused(training(run_, {"--router", "expert-choice", "--bias-rate", "0.1"}), "--bias-rate");
  refused(training(run_, {"--router", "sigmoid-bias", "--top-groups", "1"}), "--top-groups");
  refused(training(run_, {"--round", "up", "--tile", "0"}), "tile");
  refused(training(run_, {"--router", "expert-choice", "--round", "up"}), "round");
  refused(training(run_, {"--z-loss", "-1"}), "z-loss");
  refused(training(run_, {"--top-k", "5"}), "top-k");
  refused(training(run_, {"--threads", "-1"}), "thread");
  EXPECT_FALSE(fs::exists(fs::path(run_) / kStateFile));
}

TEST_F(Program, RefusedTrainingMovesNoEarlierRun) {
  ASSERT_EQ(run(training(run_)).exit_code, 0);
  Arguments huge = training(run_);
  huge[12] = "1000";   // layers
  huge[22] = "65536";  // batch
  refused(huge, "GB of the machine's");
  EXPECT_TRUE(fs::exists(fs::path(run_) / kStateFile));
  EXPECT_FALSE(fs::exists(run_ + "-1"));
}

TEST_F(Program, ResumesWithTextWhosePathIsNotUtf8) {
  fs::path const text = folder_.path() / "t\xff.txt";
  fs::rename(text_, text);
  Arguments arguments = training(run_);
  arguments[2] = text.string();
  ASSERT_EQ(run(arguments).exit_code, 0);
  refused({"train", "--resume", run_, "--steps", "13"}, "name it with --text");
  EXPECT_EQ(run({"train", "--resume", run_, "--steps", "13", "--text", text.string()}).exit_code,
            0);
}

TEST_F(Program, RefusesBadResumption) {
  ASSERT_EQ(run(training(run_)).exit_code, 0);
  std::string const state = read_text(fs::path(run_) / kStateFile);
  refused({"train", "--resume", run_ + "x"}, "--resume");
  refused({"train", "--resume", run_, "--hidden", "32"}, "--hidden");
  refused({"train", "--resume", run_, "--router", "softmax-topk"}, "--router");
  refused({"train", "--resume", run_, "--round", "nr-f"}, "--round");
  refused({"train", "--resume", run_, "--normalize-scores"}, "--normalize-scores");
  refused({"train", "--resume", run_, "--steps", "5"}, "--steps");
  write_text(text_, random_text_of(8001));
  refused({"train", "--resume", run_}, "text");
  EXPECT_EQ(read_text(fs::path(run_) / kStateFile), state);  // nothing is lost
}

TEST_F(Program, GeneratesFromACheckpoint) {
  ASSERT_EQ(run(training(run_)).exit_code, 0);
  Arguments const arguments = {"generate", "--checkpoint", run_, "--prompt",
                               "abc",      "--tokens",     "40"};
  Result const plain = run(arguments);
  EXPECT_EQ(plain.exit_code, 0) << plain.err;
  EXPECT_EQ(plain.out.size(), 3u + 40 + 1);
  EXPECT_EQ(plain.out.substr(0, 3), "abc");
  EXPECT_EQ(run(arguments).out, plain.out);

  Arguments with_json = arguments;
  with_json.push_back("--json");
  json const document = json::parse(run(with_json).out);
  EXPECT_EQ(document.at("prompt"), "abc");
  EXPECT_EQ(document.at("tokens"), 40);
}

TEST_F(Program, RefusesBadGeneration) {
  ASSERT_EQ(run(training(run_)).exit_code, 0);
  auto const with = [&](Arguments const& more) {
    Arguments arguments = {"generate", "--checkpoint", run_};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  };
  refused({"generate"}, "--checkpoint");
  refused({"generate", "--checkpoint", run_ + "x"}, kConfigFile);
  refused(with({"--prompt", ""}), "--prompt");
  refused(with({"--tokens", "-1"}), "tokens");
  refused(with({"--temperature", "-1"}), "temperature");
  refused(with({"--temperature", "nan"}), "temperature");
  refused(with({"--top-p", "0"}), "top-p");
  refused(with({"--top-k", "300"}), "top-k");
  std::string const model = read_text(fs::path(run_) / kModelFile);
  write_text(fs::path(run_) / kModelFile, model.substr(0, model.size() / 2));
  refused(with({}), kModelFile);
}

}  // namespace
}  // namespace tessera::lm

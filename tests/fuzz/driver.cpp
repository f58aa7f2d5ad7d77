// SPDX-License-Identifier: Apache-2.0
// Runs a fuzz target without libFuzzer: every file of a corpus folder as it is, then seeded mutations of
// them, a bounded number. The target decides by not crashing; sanitizers see the rest.
//   usage: <target> CORPUS_FOLDER [count] [seed] [first]
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size);

namespace {

constexpr std::size_t kMaxBytes = 1 << 16;
char reproduction[128];

// A crash names the run that repeats it.
void report_crash(int signal) {
  std::size_t const length = std::char_traits<char>::length(reproduction);
  if (::write(STDERR_FILENO, reproduction, length) < 0) ::_exit(1);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void run(std::string const& input, std::uint64_t seed, std::uint64_t number) {
  std::snprintf(reproduction, sizeof reproduction, "\nfails on: CORPUS_FOLDER 1 %llu %llu\n",
                static_cast<unsigned long long>(seed), static_cast<unsigned long long>(number));
  LLVMFuzzerTestOneInput(reinterpret_cast<std::uint8_t const*>(input.data()), input.size());
}

class Mutator {
 public:
  Mutator(std::vector<std::string> const& corpus, std::uint64_t seed, std::uint64_t number)
      : corpus_(corpus), random_(seed * 0x9e3779b97f4a7c15u + number) {}

  std::string make() {
    std::string input = pick(corpus_);
    for (std::uint64_t left = 1 + below(6); left > 0; --left) mutate(input);
    input.resize(std::min(input.size(), kMaxBytes));
    return input;
  }

 private:
  std::uint64_t below(std::uint64_t bound) { return random_() % bound; }
  std::string const& pick(std::vector<std::string> const& from) { return from[below(from.size())]; }

  void mutate(std::string& input) {
    std::size_t const at = below(input.size() + 1);
    std::size_t const length = std::min<std::size_t>(1 + below(16), input.size() - at);
    switch (below(8)) {
      case 0:
        input.resize(at);
        break;
      case 1:
        input.erase(at, length);
        break;
      case 2:
        input.insert(at, 1 + below(4), static_cast<char>(below(256)));
        break;
      case 3:
        input.insert(at, input.substr(at, length));
        break;
      case 4:
        input.insert(at, pick(tokens_));
        break;
      case 5:
        replace_number(input, at);
        break;
      case 6:
        splice(input, at);
        break;
      default:
        if (at < input.size()) input[at] = static_cast<char>(input[at] ^ (1 << below(8)));
    }
  }
  // The next run of digits becomes another number.
  void replace_number(std::string& input, std::size_t at) {
    std::size_t const first = input.find_first_of("0123456789", at);
    if (first == std::string::npos) return;
    std::size_t const last = input.find_first_not_of("0123456789", first);
    input.replace(first, (last == std::string::npos ? input.size() : last) - first, pick(numbers_));
  }
  void splice(std::string& input, std::size_t at) {
    std::string const& other = pick(corpus_);
    input = input.substr(0, at) + other.substr(below(other.size() + 1));
  }

  std::vector<std::string> const& corpus_;
  std::mt19937_64 random_;
  std::vector<std::string> const tokens_ = {"{",    "}",     "[",    "]",    "\"",      ":",
                                            ",",    "null",  "true", "[[[[", "{\"a\":", "\\u0000",
                                            "\xff", "1e999", "-1",   ".5",   "\"x\":{}"};
  std::vector<std::string> const numbers_ = {"0",
                                             "1",
                                             "-1",
                                             "2",
                                             "255",
                                             "256",
                                             "4294967295",
                                             "4294967296",
                                             "9223372036854775807",
                                             "9223372036854775808",
                                             "18446744073709551615",
                                             "99999999999999999999999",
                                             "1e308",
                                             "0.5"};
};

std::vector<std::string> read_corpus(char const* folder) {
  std::vector<std::filesystem::path> paths;
  for (auto const& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry);
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> corpus;
  for (auto const& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return corpus;
}

}  // namespace

int main(int argc, char** argv) {
  auto const argument = [&](int i, std::uint64_t otherwise) {
    return argc > i ? std::strtoull(argv[i], nullptr, 10) : otherwise;
  };
  std::uint64_t const count = argument(2, 10'000), seed = argument(3, 1), begin = argument(4, 0);
  std::vector<std::string> const corpus =
      argc > 1 ? read_corpus(argv[1]) : std::vector<std::string>();
  if (corpus.empty()) {
    std::fprintf(stderr, "usage: %s CORPUS_FOLDER [count] [seed] [first]\n", argv[0]);
    return 2;
  }
  for (int const signal : {SIGSEGV, SIGABRT, SIGFPE, SIGBUS}) std::signal(signal, report_crash);
  for (std::string const& input : corpus) run(input, seed, begin);
  for (std::uint64_t number = begin; number < begin + count; ++number) {
    run(Mutator(corpus, seed, number).make(), seed, number);
  }
  std::printf("%zu corpus files and %llu mutations of seed %llu\n", corpus.size(),
              static_cast<unsigned long long>(count), static_cast<unsigned long long>(seed));
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
// Passes over hosts from C++ on a CPU, for tests/python/several_hosts_calls.py, which compares them with Python's.
//
//   hosts_program FOLDER
//
// FOLDER/desc says hosts, ranks of each, 1 if counted, max_tokens, hidden, intermediate, experts, top_k and the tokens
// of each rank; FOLDER has x, topk_ids, topk_weights, d_o, w_up and w_down of all ranks, in bf16, int32 and fp32.
// Results go to FOLDER/o, dx, dscores, dw_up and dw_down, the last three in fp32.
#include <algorithm>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/expert_parallel/host_runs.hpp"

namespace {

using namespace tessera;
using namespace tessera::expert_parallel::hosts;

template <class T>
std::vector<T> read_file(std::string const& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> const bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}
template <class T>
void append_to_file(std::string const& path, std::vector<T> const& values) {
  std::ofstream file(path, std::ios::binary | std::ios::app);
  file.write(reinterpret_cast<char const*>(values.data()),
             static_cast<std::streamsize>(values.size() * sizeof(T)));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
    return 2;
  }
  std::string const folder = std::string(argv[1]) + "/";
  std::ifstream desc(folder + "desc");
  Problem p{};
  int counted = 0;
  desc >> p.hosts >> p.ranks >> counted >> p.max_tokens >> p.hidden >> p.intermediate >>
      p.experts >> p.top_k;
  p.begins = {0};
  for (std::int64_t tokens = 0; desc >> tokens;) {
    p.tokens.push_back(tokens);
    p.begins.push_back(p.begins.back() + tokens);
  }
  if (p.tokens.size() != static_cast<std::size_t>(p.hosts) * static_cast<std::size_t>(p.ranks)) {
    std::fprintf(stderr, "no desc\n");
    return 2;
  }
  p.x = read_file<Bits>(folder + "x");
  p.ids = read_file<std::int32_t>(folder + "topk_ids");
  p.scores = read_file<float>(folder + "topk_weights");
  p.d_o = read_file<Bits>(folder + "d_o");
  p.w_up = read_file<Bits>(folder + "w_up");
  p.w_down = read_file<Bits>(folder + "w_down");
  std::vector<std::vector<std::int64_t>> sent;
  Results const results = run(p, counted != 0, sent);
  append_to_file(folder + "o", results.o);
  append_to_file(folder + "dx", results.dx);
  append_to_file(folder + "dscores", results.dscores);
  for (Gradients const& gradients : results.gradients) {
    append_to_file(folder + "dw_up", gradients.up);
    append_to_file(folder + "dw_down", gradients.down);
  }
  for (auto const& of_rank : sent) {
    for (std::int64_t const bytes : of_rank) std::printf("%lld ", static_cast<long long>(bytes));
    std::printf("\n");
  }
  return 0;
}

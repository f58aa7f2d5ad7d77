// SPDX-License-Identifier: Apache-2.0
// The file of results of a program here: rows of JSON, and what they were measured with.
#pragma once

#include <cstdio>
#include <cstring>
#include <string>

namespace tessera::bench {

// What a command prints, without the last line's end.
inline std::string output_of(std::string const& command) {
  std::string text;
  if (FILE* const pipe = popen(command.c_str(), "r")) {
    char line[256];
    while (std::fgets(line, sizeof line, pipe)) text += line;
    pclose(pipe);
  }
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

// The arguments but those that say where results go and what was compiled.
inline std::string command_line(char const* program, int argc, char** argv) {
  std::string line = program;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--out") == 0 || std::strcmp(argv[i], "--commit") == 0 ||
        std::strcmp(argv[i], "--nccl") == 0) {
      ++i;
    } else {
      line += std::string(" ") + argv[i];
    }
  }
  return line;
}

struct Results {
  std::string command, commit, protocol;
  int gpus;
  std::string rows;  // JSON objects with commas between them
};
// Exit code: 0, or 2 where the file cannot be written.
inline int write_results(std::string const& path, Results const& r) {
  auto const query = [](std::string const& fields) {
    return output_of("nvidia-smi -i 0 --format=csv,noheader,nounits --query-gpu=" + fields);
  };
  FILE* const file = std::fopen(path.c_str(), "w");
  if (file == nullptr) {
    std::fprintf(stderr, "cannot write %s\n", path.c_str());
    return 2;
  }
  std::fprintf(file,
               "{\"command\": \"%s --out FILE\", \"commit\": \"%s\", \"device\": \"%dx %s\", "
               "\"driver\": \"%s\", \"clocks_mhz\": [%s], \"date\": \"%s\",\n \"protocol\": "
               "\"%s\",\n \"rows\": [%s\n]}\n",
               r.command.c_str(), r.commit.c_str(), r.gpus, query("name").c_str(),
               query("driver_version").c_str(), query("clocks.sm,clocks.mem").c_str(),
               output_of("date +%F").c_str(), r.protocol.c_str(), r.rows.c_str());
  std::fclose(file);
  return 0;
}

}  // namespace tessera::bench

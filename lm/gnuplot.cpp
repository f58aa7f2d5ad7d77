// SPDX-License-Identifier: Apache-2.0
#include "lm/gnuplot.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

namespace tessera::lm {

namespace {

// Its exit status, or -1 if it could not be started.
int run_gnuplot(std::filesystem::path const& folder, std::string script) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addchdir_np(&actions, folder.c_str());
  for (int const descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    posix_spawn_file_actions_addopen(&actions, descriptor, "/dev/null", O_RDWR, 0);
  }
  std::string program = "gnuplot";
  char* const arguments[] = {program.data(), script.data(), nullptr};
  pid_t child = 0;
  int const failure =
      ::posix_spawnp(&child, program.c_str(), &actions, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failure != 0) return -1;
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

}  // namespace

std::string draw_with_gnuplot(std::filesystem::path const& folder, std::string const& script,
                              std::string const& picture) {
  int const status = run_gnuplot(folder, script);
  if (status == -1 || status == 127) {
    return fmt::format("gnuplot is not installed: no {}; {} can draw it later", picture, script);
  }
  return status == 0 ? "" : fmt::format("gnuplot failed on {}: no plot", script);
}

}  // namespace tessera::lm

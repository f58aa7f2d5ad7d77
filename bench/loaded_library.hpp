// SPDX-License-Identifier: Apache-2.0
// A build of libtessera.so by its C ABI, for benchmarks of builds against each other.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <type_traits>
#include <utility>

#include "tessera/tessera.h"

namespace tessera::bench {

[[noreturn]] inline void fail(std::string const& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::exit(2);
}

// By its path: of a name without a slash the loader takes the first library that it has loaded under that soname.
inline void* load_build(std::string const& file) {
  std::string const path =
      std::filesystem::exists(file) ? std::filesystem::absolute(file).string() : file;
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) fail(dlerror());
  return handle;
}

// device_kind: TESSERA_CPU or TESSERA_CUDA, its first.
struct LoadedLibrary {
  LoadedLibrary(std::string name_, std::string const& file, int device_kind, int threads)
      : name(std::move(name_)) {
    void* const handle = load_build(file);
    auto const find = [&](auto& function, char const* symbol) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, symbol));
      if (function == nullptr) fail(file + " has no " + symbol);
    };
    find(last_error, "tessera_last_error");
    find(workspace, "tessera_moe_workspace");
    find(saved, "tessera_moe_saved");
    find(forward, "tessera_moe_forward");
    find(backward, "tessera_moe_backward");
    decltype(&tessera_context_create) create = nullptr;
    find(create, "tessera_context_create");
    check(create(device_kind, 0, threads, &context));
  }
  void check(int status) const {
    if (status != TESSERA_OK) fail(name + ": " + last_error());
  }

  std::string name;
  tessera_context* context = nullptr;
  decltype(&tessera_last_error) last_error = nullptr;
  decltype(&tessera_moe_workspace) workspace = nullptr;
  decltype(&tessera_moe_saved) saved = nullptr;
  decltype(&tessera_moe_forward) forward = nullptr;
  decltype(&tessera_moe_backward) backward = nullptr;
};

}  // namespace tessera::bench

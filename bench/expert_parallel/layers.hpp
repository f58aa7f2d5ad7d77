// SPDX-License-Identifier: Apache-2.0
// The layers that programs here measure, by name, and how they are chosen on a command line.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "tessera/shape.hpp"

namespace tessera::bench {

struct NamedLayer {
  std::string name;
  int tokens, hidden, intermediate, experts, top_k;
  ActivationKind activation = ActivationKind::swiglu;
};

// What stands between the commas of a list.
inline std::vector<std::string> items(std::string const& list) {
  std::vector<std::string> all;
  std::stringstream in(list);
  for (std::string item; std::getline(in, item, ',');) all.push_back(item);
  return all;
}

// Whether a list with commas has it; an empty list has everything.
inline bool among(std::string const& list, std::string const& item) {
  return list.empty() || ("," + list + ",").find("," + item + ",") != std::string::npos;
}

// Those that `names` lists, with each number of tokens per GPU that `tokens` lists, if any.
inline std::vector<NamedLayer> named_layers(std::string const& names, std::string const& tokens) {
  std::vector<NamedLayer> all;
  for (std::string const& number : items(tokens.empty() ? "8192,4096" : tokens)) {
    int const t = std::atoi(number.c_str());
    for (NamedLayer const& layer :
         {NamedLayer{"Qwen3-30B", t, 2048, 768, 128, 8},
          {"FlashDMoE-swiglu", t, 2048, 2048, 32, 2},
          {"FlashDMoE", t, 2048, 2048, 32, 2, ActivationKind::gelu},
          {"DSv3", t, 7168, 2048, 256, 8},
          {"gpt-oss", t, 2880, 2880, 128, 4, ActivationKind::clamped_swiglu}}) {
      if (t > 0 && among(names, layer.name)) all.push_back(layer);
    }
  }
  return all;
}

// Exit code 2, with a line.
inline int refuse_none(std::string const& names, std::string const& tokens) {
  std::fprintf(stderr, "--config %s --tokens %s: no such layer\n", names.c_str(), tokens.c_str());
  return 2;
}

}  // namespace tessera::bench

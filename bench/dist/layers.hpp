// SPDX-License-Identifier: Apache-2.0
// The layers that programs here measure, by name, and how they are chosen on a command line.
#pragma once

#include <string>
#include <vector>

#include "tessera/shape.hpp"

namespace tessera::bench {

struct NamedLayer {
  std::string name;
  int tokens, hidden, intermediate, experts, top_k;
  ActivationKind activation = ActivationKind::swiglu;
};

// At 8192 and 4096 tokens per GPU.
inline std::vector<NamedLayer> named_layers() {
  std::vector<NamedLayer> all;
  for (int const tokens : {8192, 4096}) {
    for (NamedLayer const& layer : {NamedLayer{"Qwen3-30B", tokens, 2048, 768, 128, 8},
                                    {"FlashDMoE-swiglu", tokens, 2048, 2048, 32, 2},
                                    {"FlashDMoE", tokens, 2048, 2048, 32, 2, ActivationKind::gelu},
                                    {"DSv3", tokens, 7168, 2048, 256, 8}}) {
      all.push_back(layer);
    }
  }
  return all;
}

// Those whose names and numbers of tokens are in lists with commas; an empty list has everything.
inline void keep_listed(std::vector<NamedLayer>& layers, std::string const& names,
                        std::string const& tokens) {
  auto const among = [](std::string const& list, std::string const& item) {
    return list.empty() || ("," + list + ",").find("," + item + ",") != std::string::npos;
  };
  std::erase_if(layers, [&](NamedLayer const& layer) {
    return !among(names, layer.name) || !among(tokens, std::to_string(layer.tokens));
  });
}

}  // namespace tessera::bench

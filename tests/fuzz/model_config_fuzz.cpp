// SPDX-License-Identifier: Apache-2.0
// Whatever a published config.json says: a model whose numbers hang together, or an InputError.
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string_view>

#include "huggingface/model.hpp"
#include "lm/error.hpp"
#include "lm/json.hpp"

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  using namespace tessera;
  try {
    std::string_view const text(reinterpret_cast<char const*>(data), size);
    huggingface::Model const model = huggingface::read_model(lm::parse_json(text, "config.json"));
    bool const sound = !model.moe_layers.empty() && model.moe_layers.back() < model.layers &&
                       model.active_parameters() > 0 &&
                       model.active_parameters() <= model.parameters.total();
    if (!sound) std::abort();
  } catch (lm::InputError const&) {
  }
  return 0;
}

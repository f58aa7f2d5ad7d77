// SPDX-License-Identifier: Apache-2.0
// Whatever the text: a valid config that survives being written and read, or an InputError.
#include "lm/config.hpp"

#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "lm/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  using namespace tessera::lm;
  try {
    ModelConfig const config = parse_config({reinterpret_cast<char const*>(data), size});
    validate(config);
    if (parse_config(to_json(config).dump()) != config) std::abort();
  } catch (InputError const&) {
  }
  return 0;
}

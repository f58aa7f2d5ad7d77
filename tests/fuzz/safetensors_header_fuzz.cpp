// SPDX-License-Identifier: Apache-2.0
// The header's text alone, so that mutations may change its length: tensors that tile the data, or an
// InputError.
#include <cstdint>
#include <cstdlib>

#include "lm/error.hpp"
#include "lm/safetensors.hpp"

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  using namespace tessera::lm;
  constexpr std::uint64_t kDataBytes = 20;
  try {
    SafetensorsHeader const header =
        parse_safetensors_header({reinterpret_cast<char const*>(data), size}, kDataBytes);
    std::uint64_t next = 0;
    for (TensorEntry const& tensor : header.tensors) {
      if (tensor.begin != next || tensor.end < tensor.begin) std::abort();
      next = tensor.end;
    }
    if (next != kDataBytes) std::abort();
  } catch (InputError const&) {
  }
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
// Whatever the bytes: a checked header whose tensors can all be read, or an InputError.
#include "lm/safetensors.hpp"

#include <cstdlib>
#include <vector>

#include "lm/error.hpp"
#include "tests/fuzz/file_of.hpp"

namespace {

void read_all(tessera::lm::SafetensorsFile& file, std::size_t file_bytes) {
  std::uint64_t bytes = 0;
  for (auto const& tensor : file.tensors()) {
    if (tensor.end < tensor.begin || tensor.end > file.data_bytes()) std::abort();
    bytes += tensor.end - tensor.begin;
    if (tensor.dtype != "F32") continue;
    std::vector<float> values((tensor.end - tensor.begin) / sizeof(float));
    try {
      file.read(tensor.name, tensor.shape, values);
    } catch (tessera::lm::InputError const&) {  // NaN
    }
  }
  if (bytes != file.data_bytes() || bytes > file_bytes) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  tessera::fuzz::FileOf const input(data, size);
  try {
    tessera::lm::SafetensorsFile file(input.path());
    read_all(file, size);
  } catch (tessera::lm::InputError const&) {
  }
  return 0;
}

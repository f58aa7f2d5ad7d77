// SPDX-License-Identifier: Apache-2.0
// Tensor maps by all that they are made of: a map depends on nothing but its key, so none that is kept is ever stale.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tessera::cuda::host {

// Each key has one place, which keys that meet there take from each other. Threads share the places; one that finds a
// place in use makes its map anew and keeps nothing.
class KeptTensorMaps {
 public:
  static constexpr size_t kKeyWords = 14;
  using Key = std::array<uint64_t, kKeyWords>;

  // map: what make(map) -> cudaError_t has made for the key, now or before. Failures are not kept.
  template <class Make>
  cudaError_t find_or_make(CUtensorMap& map, Key const& key, Make&& make) noexcept {
    Place& place = places_[place_of(key)];
    if (place.in_use.exchange(true, std::memory_order_acquire)) return make(map);
    cudaError_t error = cudaSuccess;
    if (place.is_set && place.key == key) {
      map = place.map;
    } else {
      error = make(map);
      if (error == cudaSuccess) {
        place.map = map;
        place.key = key;
        place.is_set = true;
      }
    }
    place.in_use.store(false, std::memory_order_release);
    return error;
  }

  // A sum of products, which do not wait for each other; its upper bits depend on every word.
  static size_t place_of(Key const& key) noexcept {
    uint64_t sum = 0;
    uint64_t factor = 0x9e3779b97f4a7c15;
    for (uint64_t const word : key) {
      sum += (word ^ word >> 32) * factor;
      factor += 0x3c6ef372fe94f82a;  // stays odd
    }
    return size_t(sum >> (64 - kPlaceBits));
  }

 private:
  // 1 MB, of which pages that nobody has come to take no memory. A training step has about 18 maps for each layer.
  static constexpr int kPlaceBits = 12;
  struct Place {
    CUtensorMap map;
    Key key;
    std::atomic<bool> in_use;
    bool is_set;
  };
  Place places_[size_t{1} << kPlaceBits] = {};
};

}  // namespace tessera::cuda::host

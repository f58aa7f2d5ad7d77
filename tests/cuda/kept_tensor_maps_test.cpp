// SPDX-License-Identifier: Apache-2.0
// Tensor maps are made once for what they are made of, and for all of it, on a driver that this file plays. Compiled
// with the CUDA headers of the emulator.
#include "cuda/host/kept_tensor_maps.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "cuda/host/tensor_map.hpp"

namespace tessera::cuda::host {
namespace {

std::atomic<int> encoded = 0;
unsigned long long context = 1;

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* gmem,
                cuuint64_t const* extent, cuuint64_t const* stride_bytes, cuuint32_t const* box,
                cuuint32_t const*, CUtensorMapInterleave, CUtensorMapSwizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  ++encoded;
  *map = {};
  map->rank = static_cast<int>(rank);
  map->element_bytes = type;
  map->base = reinterpret_cast<std::uint64_t>(gmem);
  for (cuuint32_t i = 0; i < 5; ++i) {
    map->extent[i] = extent[i];
    map->box[i] = box[i];
    map->stride_bytes[i] = i == 0 ? context : stride_bytes[i - 1];
  }
  return gmem == nullptr ? 1 : CUDA_SUCCESS;
}

CUresult context_id(CUcontext, unsigned long long* id) {
  *id = context;
  return CUDA_SUCCESS;
}

bool equal(CUtensorMap const& a, CUtensorMap const& b) {
  return a.base == b.base && a.rank == b.rank && a.element_bytes == b.element_bytes &&
         std::memcmp(a.extent, b.extent, sizeof a.extent) == 0 &&
         std::memcmp(a.box, b.box, sizeof a.box) == 0 &&
         std::memcmp(a.stride_bytes, b.stride_bytes, sizeof a.stride_bytes) == 0;
}

CUtensorMap map_of(std::uint64_t base) {
  CUtensorMap map = {};
  map.base = base;
  return map;
}

KeptTensorMaps::Key key_of(std::uint64_t number) {
  KeptTensorMaps::Key key = {};
  key[0] = 256 * number;
  key[5] = number % 7;
  return key;
}

TEST(KeptTensorMaps, MakesAMapOnce) {
  KeptTensorMaps kept;
  for (int call = 0; call < 3; ++call) {
    CUtensorMap map = {};
    EXPECT_EQ(kept.find_or_make(map, key_of(1),
                                [&](CUtensorMap& made) {
                                  EXPECT_EQ(call, 0);
                                  made = map_of(17);
                                  return cudaSuccess;
                                }),
              cudaSuccess);
    EXPECT_EQ(map.base, 17U);
  }
}

TEST(KeptTensorMaps, AFailureIsNotKept) {
  KeptTensorMaps kept;
  for (int call = 0; call < 3; ++call) {
    CUtensorMap map = {};
    cudaError_t const wanted = call < 2 ? cudaErrorInvalidValue : cudaSuccess;
    EXPECT_EQ(kept.find_or_make(map, key_of(2), [&](CUtensorMap&) { return wanted; }), wanted);
  }
}

TEST(KeptTensorMaps, AMapInUseIsMadeAnew) {
  KeptTensorMaps kept;
  int made = 0;
  CUtensorMap outer = {}, inner = {};
  auto const make = [&](CUtensorMap& map) {
    map = map_of(static_cast<std::uint64_t>(++made));
    return cudaSuccess;
  };
  kept.find_or_make(outer, key_of(3), [&](CUtensorMap& map) {
    EXPECT_EQ(kept.find_or_make(inner, key_of(3), make), cudaSuccess);
    return make(map);
  });
  EXPECT_EQ(inner.base, 1U);
  EXPECT_EQ(outer.base, 2U);
  kept.find_or_make(inner, key_of(3), make);
  EXPECT_EQ(inner.base, 2U) << "the one that had the place";
}

TEST(KeptTensorMaps, KeysOfOnePlaceTakeItFromEachOther) {
  KeptTensorMaps kept;
  KeptTensorMaps::Key const first = key_of(4);
  std::uint64_t other = 5;
  while (KeptTensorMaps::place_of(key_of(other)) != KeptTensorMaps::place_of(first)) ++other;
  int made = 0;
  for (std::uint64_t const number : {std::uint64_t{4}, other, std::uint64_t{4}, other}) {
    CUtensorMap map = {};
    kept.find_or_make(map, key_of(number), [&](CUtensorMap& out) {
      ++made;
      out = map_of(number);
      return cudaSuccess;
    });
    EXPECT_EQ(map.base, number);
  }
  EXPECT_EQ(made, 4);
}

TEST(KeptTensorMaps, ThreadsGetTheirOwn) {
  KeptTensorMaps kept;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::uint64_t state = t + 1;
      for (int i = 0; i < 20000; ++i) {
        state = state * 6364136223846793005U + 1442695040888963407U;
        std::uint64_t const number = (state >> 33) % 8192;  // twice as many as places
        CUtensorMap map = {};
        kept.find_or_make(map, key_of(number), [&](CUtensorMap& out) {
          out = map_of(number);
          return cudaSuccess;
        });
        if (map.base != number) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// A layer has about 18 maps in a step: most of those of a stack of 48 layers have a place to themselves.
TEST(KeptTensorMaps, MapsOfAStackOfLayersHavePlacesOfTheirOwn) {
  std::vector<int> keys(4096);
  int alone = 0;
  for (std::uint64_t i = 0; i < 864; ++i) {
    KeptTensorMaps::Key key = {0x7f0000000000 + (i << 21), 1, 4, 64 + (std::uint64_t{64} << 32)};
    if (keys.at(KeptTensorMaps::place_of(key))++ == 0) ++alone;
  }
  EXPECT_GT(alone, 700) << "a random choice has about 780 in a place that none before them had";
}

TEST(TensorMaps, EveryPartOfAShapeCounts) {
  TensorMapShape const shape{.rank = 5,
                             .extent = {64, 32, 16, 8, 4},
                             .stride_bytes = {128, 256, 512, 1024},
                             .box = {64, 8, 4, 2, 1}};
  std::vector<TensorMapShape> shapes{shape};
  auto const vary = [&](auto change) {
    shapes.push_back(shape);
    change(shapes.back());
  };
  vary([](TensorMapShape& s) { s.rank = 4; });
  vary([](TensorMapShape& s) { s.is_fp32 = true; });
  vary([](TensorMapShape& s) { s.is_bytes = true; });
  for (int i = 0; i < 5; ++i) {
    vary([i](TensorMapShape& s) { ++s.extent[i]; });
    vary([i](TensorMapShape& s) { s.extent[i] += std::uint64_t{1} << 32; });
    vary([i](TensorMapShape& s) { ++s.box[i]; });
    if (i < 4) vary([i](TensorMapShape& s) { s.stride_bytes[i] += 16; });
    if (i < 4) vary([i](TensorMapShape& s) { s.stride_bytes[i] += std::uint64_t{1} << 33; });
  }
  char memory[2] = {};
  std::vector<CUtensorMap> made;
  int const before = encoded;
  for (TensorMapShape const& each : shapes) {
    for (char const& base : memory) {
      for (unsigned long long const of : {1, 2}) {
        context = of;
        CUtensorMap map = {}, again = {}, wanted = {};
        EXPECT_EQ(make_tensor_map(map, &base, each), cudaSuccess);
        EXPECT_EQ(make_tensor_map(again, &base, each), cudaSuccess);
        EXPECT_EQ(encode_tensor_map(wanted, &base, each), cudaSuccess);
        EXPECT_TRUE(equal(map, wanted) && equal(again, wanted));
        made.push_back(map);
      }
    }
  }
  EXPECT_EQ(encoded - before, static_cast<int>(2 * made.size())) << "by two of three calls";
  context = 1;
}

TEST(TensorMaps, AFailureIsReportedEachTime) {
  TensorMapShape const shape{.rank = 2, .extent = {64, 32}, .stride_bytes = {128}, .box = {64, 8}};
  CUtensorMap map = {};
  for (int call = 0; call < 2; ++call) {
    EXPECT_EQ(make_tensor_map(map, nullptr, shape), cudaErrorInvalidValue);
  }
}

}  // namespace
}  // namespace tessera::cuda::host

cudaError_t cudaGetDriverEntryPointByVersion(char const* name, void** entry, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  namespace host = tessera::cuda::host;
  bool const is_encode = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *entry =
      is_encode ? reinterpret_cast<void*>(host::encode) : reinterpret_cast<void*>(host::context_id);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

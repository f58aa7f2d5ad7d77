// SPDX-License-Identifier: Apache-2.0
#include "verify/memory.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace tessera::verify {
namespace {

TEST(Memory, OutputsAreNanAndAlignedToTheirElementsOnly) {
  Memory memory(kPoisons[1]);
  Tensor const tensor = memory.output(DType::fp32, {3, 5});
  for (int i = 0; i < 15; ++i) EXPECT_TRUE(std::isnan(static_cast<float*>(tensor.data)[i]));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data) % 64, 8u);
  EXPECT_EQ(memory.bytes(), 60u);
  EXPECT_TRUE(memory.intact());
  Memory aligned(kPoisons[0], Alignment::cache_line);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(aligned.buffer(1).data) % 64, 0u);
}

TEST(Memory, EveryByteIsPoisoned) {
  for (std::uint32_t const poison : kPoisons) {
    for (std::size_t const bytes : {0, 1, 3, 4, 5, 63, 16384, 16390, 50003}) {
      GuardedBuffer const buffer(bytes, poison, Alignment::element, {});
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < bytes; ++i) {
        wrong += buffer.data()[i] != std::byte(poison >> 8 * (i % sizeof(poison)) & 0xff);
      }
      EXPECT_EQ(wrong, 0u) << bytes;
      EXPECT_TRUE(buffer.intact());
    }
  }
}

TEST(Memory, WritesToInputsShow) {
  Memory memory(kPoisons[0]);
  std::vector<float> const values = {1, 2, 3};
  ConstTensor const tensor = memory.input(DType::fp32, {3}, values);
  EXPECT_TRUE(memory.intact());
  const_cast<float*>(static_cast<float const*>(tensor.data))[1] = 5;
  EXPECT_FALSE(memory.intact());
}

#if !defined(__SANITIZE_ADDRESS__)  // which stops at the write itself
TEST(Memory, WritesBesideBuffersShow) {
  for (int const offset : {-1, 8}) {
    Memory memory(kPoisons[0]);
    Buffer const buffer = memory.buffer(8);
    // The compiler must not know that this leaves the buffer.
    char* volatile const data = static_cast<char*>(buffer.data);
    data[offset] = 0;
    EXPECT_FALSE(memory.intact()) << offset;
  }
}
#endif

}  // namespace
}  // namespace tessera::verify

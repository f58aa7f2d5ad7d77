// SPDX-License-Identifier: Apache-2.0
#include "core/tensor_check.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

namespace tessera::core {
namespace {

struct TensorCheckTest : testing::Test {
  std::vector<float> memory = std::vector<float>(64);
  Tensor good = tensor(memory.data(), {4, 6});

  std::string text_for(Tensor const& tensor) {
    TensorCheck check{{}};
    check.output("o", tensor, DType::fp32, {4, 6});
    return check.finish().text();
  }
  void expect_refused(std::function<void(Tensor&)> const& change, char const* part) {
    Tensor tensor = good;
    change(tensor);
    EXPECT_NE(text_for(tensor).find(part), std::string::npos) << text_for(tensor);
  }
};

TEST_F(TensorCheckTest, AcceptsWhatItShould) {
  EXPECT_EQ(text_for(good), "");
  Tensor padded = good;
  padded.stride[0] = 9;
  EXPECT_EQ(text_for(padded), "");
}

TEST_F(TensorCheckTest, NamesEveryBrokenRule) {
  expect_refused([](Tensor& t) { t.rank = 0; }, "missing");
  expect_refused([](Tensor& t) { t.rank = 3; }, "rank 3");
  expect_refused([](Tensor& t) { t.data = nullptr; }, "null");
  expect_refused([](Tensor& t) { t.dtype = DType::bf16; }, "bf16");
  expect_refused([](Tensor& t) { t.device.kind = DeviceKind::cuda; },
                 "o: on cuda:0, but the call's context is on cpu; ");
  expect_refused([](Tensor& t) { t.shape[0] = 5; }, "[5,6]");
  expect_refused([](Tensor& t) { t.shape[1] = -6; }, "[4,-6]");
  expect_refused([](Tensor& t) { t.stride[1] = 2; }, "stride 2");
  expect_refused([](Tensor& t) { t.stride[0] = 5; }, "stride 5");
  expect_refused([](Tensor& t) { t.stride[0] = 0; }, "stride 0");
  expect_refused([](Tensor& t) { t.stride[0] = -6; }, "stride -6");
  expect_refused([](Tensor& t) { t.stride[0] = std::int64_t{1} << 62; }, "2^");
  expect_refused([](Tensor& t) { t.data = static_cast<char*>(t.data) + 2; }, "multiple of 4");
  expect_refused([](Tensor& t) { t.data = reinterpret_cast<void*>(~std::uintptr_t{15}); },
                 "address space");
}

TEST_F(TensorCheckTest, FindsOverlapWithWrittenMemoryOnly) {
  auto const overlap = [&](std::size_t shift, bool written) {
    TensorCheck check{{}};
    check.input("x", tensor(memory.data(), {4, 6}), DType::fp32, {4, 6});
    ConstTensor const second = tensor(memory.data() + shift, {4, 6});
    if (written) {
      check.output("o", tensor(memory.data() + shift, {4, 6}), DType::fp32, {4, 6});
    } else {
      check.input("w", second, DType::fp32, {4, 6});
    }
    return std::string(check.finish().text());
  };
  EXPECT_EQ(overlap(0, false), "");
  EXPECT_EQ(overlap(24, true), "");
  EXPECT_NE(overlap(23, true).find("overlap"), std::string::npos);
}

TEST_F(TensorCheckTest, ChecksBuffers) {
  auto const text = [&](Buffer buffer) {
    TensorCheck check{{}};
    check.buffer("routing", buffer, 16, 4, true);
    return std::string(check.finish().text());
  };
  EXPECT_EQ(text({memory.data(), 16}), "");
  EXPECT_NE(text({memory.data(), 15}).find("at least 16"), std::string::npos);
  EXPECT_NE(text({nullptr, 16}).find("null"), std::string::npos);
  EXPECT_NE(text({reinterpret_cast<char*>(memory.data()) + 1, 16}).find("multiple of 4"),
            std::string::npos);
}

TEST_F(TensorCheckTest, EmptyTensorsMayBeNull) {
  TensorCheck check{{}};
  check.output("o", tensor(static_cast<float*>(nullptr), {0, 6}), DType::fp32, {0, 6});
  EXPECT_TRUE(check.finish().ok());
}

}  // namespace
}  // namespace tessera::core

// SPDX-License-Identifier: Apache-2.0
// Nothing is allocated behind the caller's back: C++ allocations are counted, and the workspace query
// covers what a call writes.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "tests/api/layer.hpp"

namespace {
std::atomic<long> allocations{0};
}

void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
void* operator new(std::size_t bytes, std::nothrow_t const&) noexcept {
  ++allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace tessera::api_test {
namespace {

TEST(Memory, CallsDoNotAllocate) {
  Context const context = value_of(Context::create({.num_threads = 2}));
  for (Router const& router :
       {Router{.kind = RouterKind::topk_softmax}, Router{.kind = RouterKind::expert_choice},
        Router{.kind = RouterKind::topk_softmax, .round = Rounding::nr_s, .tile = 4}}) {
    MoeDesc desc = small_desc();
    desc.router = router;
    Layer layer(context, desc);
    long const before = allocations;
    Status const forward = layer.run_forward();
    Status const backward = layer.run_backward();
    layer.forward.x.shape[0] = 1;
    Status const refused = layer.run_forward();
    long const after = allocations;
    EXPECT_TRUE(forward.ok()) << forward.text();
    EXPECT_TRUE(backward.ok()) << backward.text();
    EXPECT_FALSE(refused.ok());
    EXPECT_EQ(after, before);
    EXPECT_GT(before, 0);  // the counter counts
  }
}

TEST(Memory, WorkspaceIsNotExceededAtAnyAddress) {
  Context const context = value_of(Context::create({.num_threads = 2}));
  for (std::size_t const shift : {0u, 1u, 7u, 63u}) {
    Layer layer(context, small_desc(RouterKind::topk_softmax));
    std::vector<unsigned char> memory(layer.backward_workspace.size() + 64 + 64, 0xab);
    layer.backward.workspace.data = memory.data() + shift;
    ASSERT_TRUE(layer.run_forward().ok());
    ASSERT_TRUE(layer.run_backward().ok());
    for (std::size_t i = 0; i < shift; ++i) ASSERT_EQ(memory[i], 0xab);
    for (std::size_t i = shift + layer.backward_workspace.size(); i < memory.size(); ++i) {
      ASSERT_EQ(memory[i], 0xab);
    }
  }
}

TEST(Memory, SavedBytesAreTheFormula) {
  MoeDesc desc;
  desc.shape = {.tokens = 24576, .hidden = 1536, .intermediate = 256, .experts = 128, .top_k = 8};
  desc.dtype = DType::bf16;
  auto const saved = value_of(saved_bytes(desc));
  std::size_t const slots = 24576 * 8;
  EXPECT_EQ(saved.x, 2u * 24576 * 1536);
  EXPECT_EQ(saved.h, 4 * slots * 256);
  EXPECT_EQ(saved.routing, 16 * slots + 4 * 129);
  desc.router.kind = RouterKind::topk_softmax;
  EXPECT_EQ(value_of(routing_bytes(desc)), 20 * slots + 4 * 129);
  // Token rounding: P is a bound; offsets, logits and the choice before rounding are kept.
  desc.router.round = Rounding::nr_f;
  std::size_t const bound = slots + 128 * 63, logits = 24576 * 128;
  EXPECT_EQ(value_of(saved_bytes(desc)).h, 4 * bound * 256);
  EXPECT_EQ(value_of(routing_bytes(desc)),
            (20 * bound + 4 * 129 + 4 * 24577 + 15) / 16 * 16 + 4 * logits + 4 * slots);
  desc.router = {};
  desc.shape.variable_experts = true;
  desc.shape.slots = 1000;
  EXPECT_EQ(value_of(routing_bytes(desc)), 16000u + 4 * 129 + 4 * 24577);
}

// Whatever number of experts and tokens comes before them, as kernels read and write 16 bytes at once.
TEST(Memory, SavedLogitsAreAligned) {
  for (std::int64_t tokens = 5; tokens < 9; ++tokens) {
    for (std::int64_t experts = 8; experts < 12; ++experts) {
      for (Rounding const round : {Rounding::none, Rounding::nr_f}) {
        MoeDesc desc;
        desc.shape = {
            .tokens = tokens, .hidden = 8, .intermediate = 8, .experts = experts, .top_k = 3};
        desc.dtype = DType::bf16;
        desc.router.kind =
            round == Rounding::none ? RouterKind::softmax_topk : RouterKind::topk_softmax;
        desc.router.round = round;
        if (round != Rounding::none) desc.router.tile = 4;
        std::vector<std::uint64_t> memory(value_of(routing_bytes(desc)) / 8 + 1);
        RoutingView const view = value_of(routing_view(desc, {memory.data(), 8 * memory.size()}));
        EXPECT_EQ((reinterpret_cast<std::byte*>(view.logits) -
                   reinterpret_cast<std::byte*>(view.expert_offsets)) %
                      16,
                  0);
      }
    }
  }
}

// Whatever memory held before: torch compares tables of equal calls byte by byte.
TEST(Memory, TablesAreWrittenAsAWhole) {
  Context const context = value_of(Context::create({.num_threads = 2}));
  for (Router const& router :
       {Router{.kind = RouterKind::topk_softmax}, Router{.kind = RouterKind::sigmoid_bias},
        Router{.kind = RouterKind::softmax_topk}, Router{.kind = RouterKind::expert_choice},
        Router{.kind = RouterKind::topk_softmax, .round = Rounding::nr_s, .tile = 4}}) {
    for (std::int64_t experts = 4; experts < 8; ++experts) {
      SCOPED_TRACE(testing::Message()
                   << "router " << static_cast<int>(router.kind) << ", experts " << experts);
      MoeDesc desc = small_desc();
      desc.router = router;
      desc.shape.experts = experts;
      Layer first(context, desc), second(context, desc);
      std::ranges::fill(first.routing, std::byte{0xff});
      std::ranges::fill(second.routing, std::byte{0x5a});
      ASSERT_TRUE(first.run_forward().ok());
      ASSERT_TRUE(second.run_forward().ok());
      EXPECT_TRUE(first.routing == second.routing);
    }
  }
}

// The three shapes whose saved bytes docs/numerics.md states.
TEST(Memory, CodesHalveWhatIsSaved) {
  Context const context = value_of(Context::create({.num_threads = 2}));
  for (MoeShape const shape :
       {MoeShape{24576, 1536, 256, 128, 8}, MoeShape{32768, 2048, 768, 128, 8},
        MoeShape{32768, 4096, 1536, 128, 8}}) {
    MoeDesc bf16;
    bf16.shape = shape;
    bf16.dtype = DType::bf16;
    auto const plain = value_of(saved_bytes(bf16));
    for (Precision const precision : {Precision::fp8, Precision::mxfp8}) {
      MoeDesc desc = bf16;
      desc.precision = precision;
      auto const saved = value_of(saved_bytes(desc));
      EXPECT_EQ(32 * (saved.x + saved.x_scale), 33 * plain.x / 2);
      EXPECT_EQ(32 * (saved.h + saved.h_scale), 33 * plain.h / 2);
      EXPECT_EQ(saved.routing, plain.routing);
      double const ratio = static_cast<double>(saved.total()) / static_cast<double>(plain.total());
      EXPECT_LE(ratio, 0.5215);
      desc.save = SavePolicy::x;
      EXPECT_EQ(value_of(saved_bytes(desc)).total(), saved.x + saved.x_scale + saved.routing);
      desc.save = SavePolicy::none;
      EXPECT_EQ(value_of(saved_bytes(desc)).total(), 0u);
      // No pass takes more than a layer in bf16 does, beside one expert's weights in fp32 and scratch.
      desc.save = SavePolicy::h;
      for (Pass const pass : {Pass::forward, Pass::backward, Pass::backward_input}) {
        EXPECT_LE(value_of(workspace_bytes(context, desc, pass)),
                  value_of(workspace_bytes(context, bf16, pass)) +
                      12u * static_cast<std::size_t>(shape.hidden * shape.intermediate) +
                      (32u << 20));
      }
    }
    bf16.precision = Precision::automatic;  // without a device nobody knows what it takes
    auto const unknown = saved_bytes(bf16);
    ASSERT_FALSE(unknown.ok());
    EXPECT_NE(std::string(unknown.status().text()).find("chosen_precision()"), std::string::npos);
    EXPECT_EQ(value_of(chosen_precision(context, bf16)), Precision::native);
    EXPECT_EQ(value_of(saved_bytes(context, bf16)).total(), plain.total());
    EXPECT_EQ(value_of(routing_bytes(bf16)), plain.routing);
  }
  // The scales of h are rows of a multiple of 4.
  MoeDesc odd;
  odd.shape = {.tokens = 3, .hidden = 128, .intermediate = 256, .experts = 4, .top_k = 1};
  odd.dtype = DType::bf16;
  odd.precision = Precision::fp8;
  EXPECT_EQ(value_of(saved_bytes(odd)).h_scale, 4u * 4 * 4);
}

TEST(Memory, XAndHDoNotGrowWithGranularity) {
  for (DType const dtype : {DType::fp32, DType::bf16}) {
    std::size_t const expected = dtype_bytes(dtype) * 24576 * (1536 + 2 * 2048);
    for (std::int64_t top_k = 1; top_k <= 64; top_k *= 2) {
      MoeDesc desc;
      desc.dtype = dtype;
      desc.shape = {.tokens = 24576,
                    .hidden = 1536,
                    .intermediate = 2048 / top_k,
                    .experts = 16 * top_k,
                    .top_k = top_k};
      auto const saved = value_of(saved_bytes(desc));
      EXPECT_EQ(saved.x + saved.h, expected) << "top_k " << top_k;
      EXPECT_EQ(saved.routing, 16u * 24576 * top_k + 4 * (16 * top_k + 1));
    }
  }
}

TEST(Memory, DhTakesThePlaceOfH) {
  Context const context = value_of(Context::create({.num_threads = 2}));
  MoeDesc desc;
  desc.shape = {.tokens = 4096, .hidden = 1536, .intermediate = 256, .experts = 128, .top_k = 8};
  desc.dtype = DType::bf16;
  MoeDesc over = desc, recomputed = desc;
  over.overwrite_h = true;
  recomputed.save = SavePolicy::x;
  auto const bytes = [&](MoeDesc const& of, Pass pass) {
    return value_of(workspace_bytes(context, of, pass));
  };
  std::size_t const h = value_of(saved_bytes(desc)).h;
  EXPECT_EQ(bytes(over, Pass::backward) + h, bytes(desc, Pass::backward));
  for (Pass const pass : {Pass::backward, Pass::backward_input, Pass::backward_weights}) {
    EXPECT_LT(bytes(recomputed, pass), bytes(desc, pass) + h / 8);  // no second place for h
  }
}

// Proportions of 7B-n256: d = 6n, K = 8. y and dx rows are most of the workspace.
TEST(Memory, ColumnChunksHalveTheWorkspace) {
  Context const context = value_of(Context::create({.num_threads = 2}));
  MoeDesc desc;
  desc.shape = {.tokens = 24576, .hidden = 1536, .intermediate = 256, .experts = 128, .top_k = 8};
  MoeDesc chunked = desc;
  chunked.column_chunk = 384;
  for (DType const dtype : {DType::fp32, DType::bf16}) {
    desc.dtype = chunked.dtype = dtype;
    for (Pass const pass : {Pass::forward, Pass::backward}) {
      auto const whole = value_of(workspace_bytes(context, desc, pass));
      EXPECT_LE(2 * value_of(workspace_bytes(context, chunked, pass)), whole);
    }
  }
}

}  // namespace
}  // namespace tessera::api_test

// SPDX-License-Identifier: Apache-2.0
// Columns of y and dx rows in chunks: which ones, what kernels are given of them, what of the workspace they spare.
// Needs the CUDA headers, no GPU.
#include <gtest/gtest.h>

#include "cuda/layer/arguments.hpp"
#include "cuda/layer/backend.hpp"
#include "cuda/layer/plan.hpp"
#include "small_weights.hpp"

namespace tessera::cuda {
namespace {

// Kernels that are given some columns find what those of the whole call find there.
TEST(ColumnsOf, AreThoseOfTheWholeCall) {
  constexpr Columns kSome{2, 3};
  for (GateUpOrder const order : {GateUpOrder::concat, GateUpOrder::up_first,
                                  GateUpOrder::interleaved, GateUpOrder::blocked}) {
    for (WeightOrientation const orientation :
         {WeightOrientation::rows, WeightOrientation::transposed}) {
      MoeDesc const desc = desc_of({order, orientation, order == GateUpOrder::blocked ? 4 : 0},
                                   ActivationKind::swiglu);
      SCOPED_TRACE(static_cast<int>(order));
      ExpertWeights const weights = weights_without_memory(desc);
      WeightViews const views = weight_views(desc, weights);
      DownProjectionFwdArguments down{};
      down.w_down = views.w_down;
      down.b_down = views.b_down;
      down = columns_of(down, kSome);
      UpProjectionDgradArguments up{};
      up.w_up[0] = views.w_up[0];
      up.w_up[1] = views.w_up[1];
      ConstTensor const w_router = weights.w_down;
      up.w_router = {w_router.data, kExperts, kHidden};
      up = columns_of(up, kSome);
      EXPECT_EQ(down.hidden, kSome.count);
      EXPECT_EQ(up.hidden, kSome.count);
      EXPECT_EQ(
          static_cast<char const*>(up.w_router.gmem) - static_cast<char const*>(w_router.data),
          2 * kSome.first);
      EXPECT_EQ(up.w_router.pitch, kHidden);
      for (std::int64_t e = 0; e < kExperts; ++e) {
        for (std::int64_t c = 0; c < kSome.count; ++c) {
          EXPECT_EQ(place(down.b_down, weights.b_down, e, c, 0),
                    place(views.b_down, weights.b_down, e, kSome.first + c, 0));
          for (std::int64_t i = 0; i < kIntermediate; ++i) {
            EXPECT_EQ(place(down.w_down, weights.w_down, e, c, i),
                      place(views.w_down, weights.w_down, e, kSome.first + c, i));
            for (int half = 0; half < 2; ++half) {
              EXPECT_EQ(place(up.w_up[half], weights.w_up, e, i, c),
                        place(views.w_up[half], weights.w_up, e, i, kSome.first + c));
            }
          }
        }
      }
    }
  }
  std::uint16_t o[kHidden];
  AggregateArguments sums{};
  sums.gmem_o = o;
  sums.o_pitch = 7;
  sums = columns_of(sums, kSome);
  EXPECT_EQ(sums.gmem_o, o + kSome.first);
  EXPECT_EQ(sums.o_pitch, 7);
  EXPECT_EQ(sums.hidden, kSome.count);
}

TEST(ColumnChunks, CoverAllColumnsInPiecesOf16Bytes) {
  MoeDesc desc = desc_of({}, ActivationKind::swiglu);
  desc.bias = false;
  for (std::int64_t const hidden : {8, 72, 100, 1536}) {
    desc.shape.hidden = hidden;
    for (std::int64_t const chunk : {0, 1, 7, 8, 9, 50, 64, 768, 1536, 4000}) {
      desc.column_chunk = chunk;
      std::int64_t next = 0, last = 0;
      for_each_column_chunk(desc, [&](Columns columns, bool is_last) {
        EXPECT_EQ(columns.first, next);
        next += columns.count;
        last += is_last;
        EXPECT_EQ(is_last, next == hidden);
        if (chunk == 0 || chunk >= hidden) {
          EXPECT_EQ(columns.count, hidden);
        } else {
          EXPECT_LE(columns.count, chunk);
          EXPECT_TRUE(chunk < 8 || columns.first % 8 == 0);
        }
      });
      EXPECT_EQ(next, hidden);
      EXPECT_EQ(last, 1);
    }
  }
}

TEST(ColumnChunks, TakeTheirRowsFromTheWorkspace) {
  MoeDesc desc = desc_of({}, ActivationKind::swiglu);
  desc.shape = {.tokens = 512, .hidden = 1536, .intermediate = 256, .experts = 8, .top_k = 2};
  MoeDesc chunked = desc;
  chunked.column_chunk = 770;  // 768 of them
  auto const rows = static_cast<std::size_t>(desc.num_slots());
  for (Pass const pass : {Pass::forward, Pass::backward, Pass::backward_input}) {
    EXPECT_EQ(workspace_bytes(desc, pass, 0) - workspace_bytes(chunked, pass, 0), 2 * rows * 768);
  }
  chunked.column_chunk = 8;  // a_scaled is larger then, in whole backward passes
  EXPECT_EQ(workspace_bytes(desc, Pass::backward, 0) - workspace_bytes(chunked, Pass::backward, 0),
            2 * rows * (1536 - 256));
}

}  // namespace
}  // namespace tessera::cuda

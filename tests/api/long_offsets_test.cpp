// SPDX-License-Identifier: Apache-2.0
// Offsets beyond 2^32 elements, without the memory for them: rows of every tensor that may have them apart lie so far
// apart, in mappings of which only pages that are used have memory; and bytes of workspaces and tables where rows times
// columns are more than 2^31 grow as their formulas say.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <string>

#include "tests/api/layer.hpp"

namespace tessera::api_test {
namespace {

// Cut to 32 bits, signed or not, it is 16: rows would lie on each other.
constexpr std::int64_t kPitch = (std::int64_t{1} << 32) + 16;

/// A tensor whose rows are kPitch elements apart.
class Spread {
 public:
  explicit Spread(ConstTensor const& like) {
    view_.dtype = like.dtype;
    view_.rank = like.rank;
    std::int64_t rows = 1;
    for (int axis = like.rank - 1; axis >= 0; --axis) {
      view_.shape[axis] = like.shape[axis];
      view_.stride[axis] = axis == like.rank - 1 ? 1 : rows * kPitch;
      if (axis < like.rank - 1) rows *= like.shape[axis];
    }
    bytes_ = static_cast<std::size_t>(rows * kPitch) * dtype_bytes(like.dtype);
    view_.data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (view_.data == MAP_FAILED) throw std::runtime_error("mmap");
    copy(like, view_);
  }
  Spread(Spread const&) = delete;
  Spread& operator=(Spread const&) = delete;
  ~Spread() { munmap(view_.data, bytes_); }

  [[nodiscard]] Tensor view() const { return view_; }

  /// Row by row, of tensors of one shape whose rows are contiguous.
  static void copy(ConstTensor const& from, Tensor const& to) {
    auto const width =
        static_cast<std::size_t>(from.shape[from.rank - 1]) * dtype_bytes(from.dtype);
    std::int64_t const inner = from.rank == 3 ? from.shape[1] : 1;
    std::int64_t const rows = from.rank == 1 ? 1 : from.shape[0] * inner;
    for (std::int64_t row = 0; row < rows; ++row) {
      std::memcpy(static_cast<std::byte*>(to.data) + offset(to, row, inner),
                  static_cast<std::byte const*>(from.data) + offset(from, row, inner), width);
    }
  }

 private:
  template <class View>
  static std::int64_t offset(View const& view, std::int64_t row, std::int64_t inner) {
    std::int64_t const elements = view.rank == 3
                                      ? row / inner * view.stride[0] + row % inner * view.stride[1]
                                  : view.rank == 2 ? row * view.stride[0]
                                                   : 0;
    return elements * static_cast<std::int64_t>(dtype_bytes(view.dtype));
  }
  Tensor view_;
  std::size_t bytes_;
};

/// The tensors of a layer's calls that may have rows apart, moved there.
struct Apart {
  explicit Apart(Layer& layer) {
    for (ConstTensor* const tensor :
         {&layer.forward.x, &layer.forward.w_router, &layer.forward.weights.w_up,
          &layer.forward.weights.w_down, &layer.forward.weights.b_up, &layer.forward.weights.b_down,
          &layer.forward.topk_ids, &layer.forward.topk_weights, &layer.backward.d_o}) {
      if (tensor->present()) *tensor = spreads.emplace_back(*tensor).view();
    }
    for (Tensor* const tensor : {&layer.forward.o, &layer.backward.dx}) {
      *tensor = spreads.emplace_back(*tensor).view();
    }
    layer.backward.x = layer.forward.x;
    layer.backward.w_router = layer.forward.w_router;
    layer.backward.weights = layer.forward.weights;
  }
  std::deque<Spread> spreads;
};

TEST(LongOffsets, RowsOfTensorsBeyond32Bits) {
  Context const context = value_of(Context::create({.num_threads = 2}));
  for (RouterKind const kind : {RouterKind::given, RouterKind::topk_softmax,
                                RouterKind::sigmoid_bias, RouterKind::expert_choice}) {
    for (GateUpOrder const order : {GateUpOrder::concat, GateUpOrder::interleaved}) {
      MoeDesc desc = small_desc(kind);
      desc.layout.order = order;
      Layer near(context, desc), far(context, desc);
      Apart const apart(far);
      for (Layer* const layer : {&near, &far}) {
        Status const forward = layer->run_forward();
        ASSERT_TRUE(forward.ok()) << forward.text();
        Status const backward = layer->run_backward();
        ASSERT_TRUE(backward.ok()) << backward.text();
      }
      Floats const no_o = far.o;
      Spread::copy(far.forward.o, tensor(far.o.data(), {desc.shape.tokens, desc.shape.hidden}));
      Spread::copy(far.backward.dx, tensor(far.dx.data(), {desc.shape.tokens, desc.shape.hidden}));
      EXPECT_NE(far.o, no_o);
      EXPECT_EQ(far.o, near.o);
      EXPECT_EQ(far.h, near.h);
      EXPECT_EQ(far.dx, near.dx);
      EXPECT_EQ(far.dw_up, near.dw_up);
      EXPECT_EQ(far.dw_down, near.dw_down);
      EXPECT_EQ(far.db_up, near.db_up);
      EXPECT_EQ(far.dscores, near.dscores);
      EXPECT_EQ(far.dw_router, near.dw_router);
    }
  }
}

/// Bytes of what a call needs and keeps.
std::vector<double> bytes_of(Context const& context, MoeDesc const& desc) {
  std::vector<double> out;
  for (Pass const pass :
       {Pass::forward, Pass::backward, Pass::backward_input, Pass::backward_weights}) {
    out.push_back(static_cast<double>(value_of(workspace_bytes(context, desc, pass))));
  }
  out.push_back(static_cast<double>(value_of(routing_bytes(desc))));
  return out;
}

// From 2^14 tokens, 2^29 elements of y, to 2^27, 2^42: each doubling adds twice what the one before added, but for
// alignment and what threads have.
TEST(LongOffsets, BytesGrowWithTheTokens) {
  Context const context = value_of(Context::create({.num_threads = 2}));
  for (RouterKind const kind :
       {RouterKind::given, RouterKind::topk_softmax, RouterKind::group_limited}) {
    for (DType const dtype : {DType::fp32, DType::bf16}) {
      MoeDesc desc;
      desc.dtype = dtype;
      desc.router.kind = kind;
      std::vector<double> before, added;
      for (int log2 = 14; log2 <= 27; ++log2) {
        desc.shape = {.tokens = std::int64_t{1} << log2,
                      .hidden = 4096,
                      .intermediate = 1024,
                      .experts = 64,
                      .top_k = 8};
        std::vector<double> const bytes = bytes_of(context, desc);
        std::vector<double> more;
        for (std::size_t i = 0; i < before.size(); ++i) more.push_back(bytes[i] - before[i]);
        for (std::size_t i = 0; i < added.size(); ++i) {
          EXPECT_NEAR(more[i], 2 * added[i], 0.01 * added[i] + 4096)
              << i << " at 2^" << log2 << " tokens";
        }
        // y or dx rows in forward and backward, at least; offsets of rows in the tables.
        double const rows = 8 * std::ldexp(1, log2);
        double const size = static_cast<double>(dtype_bytes(dtype));
        EXPECT_GE(bytes[0], rows * 4096 * size);
        EXPECT_GE(bytes[1], rows * 4096 * size);
        EXPECT_GE(bytes[4], 4 * rows);
        EXPECT_LE(*std::max_element(bytes.begin(), bytes.end()), 16 * rows * 4096 * size);
        before = bytes;
        added = more;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::api_test

// SPDX-License-Identifier: Apache-2.0
// Columns of y and dx rows in chunks: the bits of all columns at once, forward and backward, in poisoned memory, and a
// workspace that is smaller by the rows that do not exist.
#include <cstring>
#include <functional>

#include "first_gpu.cuh"
#include "layer.cuh"

namespace tessera::cuda_test {
namespace {

constexpr int64_t kHidden = 384;

MoeDesc desc_of(RouterKind kind, int64_t tokens, bool bias) {
  MoeDesc desc = small_desc(kind);
  desc.shape = {
      .tokens = tokens, .hidden = kHidden, .intermediate = 192, .experts = 24, .top_k = 3};
  desc.bias = bias;
  return desc;
}

// Bytes of o, h, tables and all gradients after a step.
Bytes bytes_of_step(Layer const& layer, bool split) {
  layer.poison(nullptr);
  EXPECT_OK(layer.forward(nullptr));
  Bytes all = layer.results();
  EXPECT_OK(split ? layer.split_backward(nullptr) : layer.backward(nullptr));
  synchronize(nullptr);
  Bytes const gradients = layer.gradients();
  all.insert(all.end(), gradients.begin(), gradients.end());
  return all;
}

void chunks_have_the_bits_of_all_columns(Context const& context) {
  constexpr int64_t kTokens = 1500;
  std::vector<float> aux(static_cast<size_t>(kTokens * 24));
  for (size_t i = 0; i < aux.size(); ++i) aux[i] = 0.01f * static_cast<float>(i * 7 % 11) - 0.05f;
  DeviceBuffer const aux_buffer(aux);
  struct Variant {
    char const* name;
    RouterKind kind;
    int64_t tokens = kTokens;
    bool bias = false, split = false;
    std::function<void(Layer&)> change = [](Layer&) {};
  };
  Variant const variants[] = {
      {"all", RouterKind::topk_softmax},
      {"softmax over all", RouterKind::softmax_topk},
      {"biases", RouterKind::topk_softmax, kTokens, true},
      {"two calls", RouterKind::topk_softmax, kTokens, false, true},
      {"few tokens", RouterKind::topk_softmax, 5},
      {"other losses", RouterKind::topk_softmax, kTokens, false, false,
       [&](Layer& layer) {
         layer.backward_args.aux_dlogits =
             tensor(aux_buffer.as<float const>(), {kTokens, 24}, layer.device());
       }},
      {"no dw_up", RouterKind::topk_softmax, kTokens, false, false,
       [](Layer& layer) { layer.backward_args.gradients.dw_up = {}; }},
      {"no dw_down", RouterKind::topk_softmax, kTokens, false, false,
       [](Layer& layer) { layer.backward_args.gradients.dw_down = {}; }},
  };
  for (Variant const& variant : variants) {
    MoeDesc desc = desc_of(variant.kind, variant.tokens, variant.bias);
    Layer whole(context, desc);
    variant.change(whole);
    Bytes const expected = bytes_of_step(whole, variant.split);
    for (int64_t const chunk : {int64_t{192}, int64_t{100}, int64_t{8}, kHidden, 2 * kHidden}) {
      desc.column_chunk = chunk;
      Layer chunked(context, desc);
      variant.change(chunked);
      for (int i = 0; i < 3; ++i) {
        if (bytes_of_step(chunked, variant.split) == expected) continue;
        std::printf("%s, column_chunk %lld: other bits\n", variant.name,
                    static_cast<long long>(chunk));
        ++failures;
        break;
      }
    }
  }
}

// Rows of the size of a few bytes have no fast kernel: sums in another order.
void few_columns_at_a_time(Context const& context) {
  MoeDesc desc = desc_of(RouterKind::topk_softmax, 96, true);
  Layer const whole(context, desc);
  EXPECT_OK(whole.step(nullptr));
  desc.column_chunk = 3;
  Layer const chunked(context, desc);
  chunked.poison(nullptr);
  EXPECT_OK(chunked.step(nullptr));
  synchronize(nullptr);
  Bytes const wanted = whole.o(), found = chunked.o();
  double squares = 0, differences = 0;
  for (size_t i = 0; i < wanted.size(); i += 2) {
    auto const value = [i](Bytes const& from) {
      __nv_bfloat16 out;
      std::memcpy(&out, from.data() + i, 2);
      return static_cast<double>(__bfloat162float(out));
    };
    squares += value(wanted) * value(wanted);
    differences += (value(wanted) - value(found)) * (value(wanted) - value(found));
  }
  EXPECT(squares > 0);
  EXPECT(differences < 1e-4 * squares);
}

void workspace_shrinks(Context const& context) {
  MoeDesc desc = desc_of(RouterKind::topk_softmax, 4096, false);
  MoeDesc chunked = desc;
  chunked.column_chunk = 100;  // 96 of them
  auto const rows = static_cast<size_t>(desc.num_slots());
  for (Pass const pass : {Pass::forward, Pass::backward, Pass::backward_input}) {
    size_t const all = workspace_bytes(context, desc, pass).value(),
                 fewer = workspace_bytes(context, chunked, pass).value();
    // a_scaled, of 192 columns, has the place of dx rows in a whole backward pass
    size_t const left = pass == Pass::backward ? 192 : 96;
    EXPECT(all - fewer >= rows * 2 * (kHidden - left) - 1024);
    EXPECT(all - fewer <= rows * 2 * (kHidden - left) + 1024);
  }
}

int run(Context const& context) {
  chunks_have_the_bits_of_all_columns(context);
  few_columns_at_a_time(context);
  workspace_shrinks(context);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda_test

int main() { return tessera::cuda_test::on_first_gpu(tessera::cuda_test::run); }

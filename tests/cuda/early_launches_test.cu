// SPDX-License-Identifier: Apache-2.0
// Kernels of a whole backward pass start while those ahead end (docs/adr/0019-early-launches-in-backward.md); in two
// calls none does. The bits are equal, whichever of them a call needs, and in poisoned memory again and again.
#include <functional>

#include "first_gpu.cuh"
#include "layer.cuh"

namespace tessera::cuda_test {
namespace {

void run_variants(Context const& context) {
  constexpr int kRepeats = 5;
  MoeShape const s{.tokens = 1500, .hidden = 384, .intermediate = 192, .experts = 24, .top_k = 3};
  std::vector<float> aux(static_cast<size_t>(s.tokens * s.experts));
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < s.tokens; ++t) {
    for (int64_t e = 0; e < s.experts; ++e) {
      aux[t * s.experts + e] = 0.01f * static_cast<float>((t * 7 + e * 3) % 11 - 5);
    }
    for (int64_t k = 0; k < s.top_k; ++k) {
      ids.push_back(static_cast<int32_t>((t * t + 8 * k) % s.experts));
    }
  }
  DeviceBuffer const aux_buffer(aux), ids_buffer(ids);
  DeviceBuffer const scores_buffer(std::vector<float>(ids.size(), 0.4f));
  struct Variant {
    char const* name;
    RouterKind kind;
    bool bias;
    std::function<void(Layer&)> change;
  };
  auto const none = [](Layer&) {};
  Variant const variants[] = {
      {"all", RouterKind::topk_softmax, false, none},
      {"softmax over all", RouterKind::softmax_topk, false, none},
      {"biases", RouterKind::topk_softmax, true, none},
      {"other losses", RouterKind::topk_softmax, false,
       [&](Layer& layer) {
         layer.backward_args.aux_dlogits =
             tensor(aux_buffer.as<float const>(), {s.tokens, s.experts}, layer.device());
       }},
      {"ids given", RouterKind::given, false,
       [&](Layer& layer) {
         layer.args.topk_ids =
             tensor(ids_buffer.as<int32_t const>(), {s.tokens, s.top_k}, layer.device());
         layer.args.topk_weights =
             tensor(scores_buffer.as<float const>(), {s.tokens, s.top_k}, layer.device());
       }},
      {"no dw_up", RouterKind::topk_softmax, false,
       [](Layer& layer) { layer.backward_args.gradients.dw_up = {}; }},
      {"no dw_down", RouterKind::topk_softmax, false,
       [](Layer& layer) { layer.backward_args.gradients.dw_down = {}; }},
      {"no dw_router", RouterKind::topk_softmax, false,
       [](Layer& layer) { layer.backward_args.gradients.dw_router = {}; }},
      {"no dx", RouterKind::topk_softmax, false, [](Layer& layer) { layer.backward_args.dx = {}; }},
  };
  for (Variant const& variant : variants) {
    MoeDesc desc = small_desc(variant.kind);
    desc.shape = s;
    desc.bias = variant.bias;
    Layer layer(context, desc);
    variant.change(layer);
    EXPECT_OK(layer.forward(nullptr));
    layer.poison(nullptr);
    EXPECT_OK(layer.split_backward(nullptr));
    synchronize(nullptr);
    Bytes const expected = layer.gradients();
    int different = 0;
    for (int i = 0; i < kRepeats; ++i) {
      layer.poison(nullptr);
      EXPECT_OK(layer.backward(nullptr));
      synchronize(nullptr);
      different += layer.gradients() == expected ? 0 : 1;
    }
    if (different != 0) {
      std::printf("%s: %d of %d differ from two calls\n", variant.name, different, kRepeats);
    }
    EXPECT(different == 0);
  }
}

int run(Context const& context) {
  run_variants(context);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda_test

int main() { return tessera::cuda_test::on_first_gpu(tessera::cuda_test::run); }

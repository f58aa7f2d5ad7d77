// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "lm/checkpoint.hpp"
#include "tests/lm/training.hpp"

namespace tessera::lm {
namespace {

// Every router and rounding: learns, repeats bit for bit, and goes on from its checkpoint.
struct Routing {
  char const* what;
  Router router;
  Rounding rounding = Rounding::none;
};

void PrintTo(Routing const& routing, std::ostream* stream) { *stream << routing.what; }

class TrainingWith : public testing::TestWithParam<Routing> {};

TEST_P(TrainingWith, LearnsAndResumes) {
  Corpus const corpus = small_corpus();
  TemporaryFolder const folder;
  TrainingOptions options = small_options(60);
  options.rate = 1e-2;
  options.z_loss = 1e-3;
  options.bias_rate = 3e-3;
  options.model.router = GetParam().router;
  options.rounding = GetParam().rounding;
  options.tile = 16;
  TrainingState state = initial_state(options, source_of(corpus));
  train(state, corpus, folder.path(), 2);
  EXPECT_LT(state.history.held_out.back(),
            5.2f);  // the text has 4.37 bits, letters alone 4.7; 8 at first

  TrainingState halved = initial_state(options, source_of(corpus));
  halved.options.steps = 25;
  train(halved, corpus, folder.path(), 1);
  TrainingState resumed = load_state(folder.path());
  EXPECT_EQ(resumed.options.model, options.model);
  EXPECT_EQ(resumed.options.z_loss, options.z_loss);
  EXPECT_EQ(resumed.options.bias_rate, options.bias_rate);
  resumed.options.steps = 60;
  train(resumed, corpus, folder.path(), 3);
  EXPECT_EQ(resumed.parameters, state.parameters);
  EXPECT_EQ(load_model(folder.path()).parameters, state.parameters);
}

INSTANTIATE_TEST_SUITE_P(
    Routers, TrainingWith,
    testing::Values(Routing{"softmax-topk", {.kind = RouterKind::softmax_topk}},
                    Routing{"sigmoid-bias",
                            {.kind = RouterKind::sigmoid_bias, .normalize_scores = true}},
                    Routing{"group-limited", {.kind = RouterKind::group_limited, .route_scale = 2}},
                    Routing{"sqrtsoftplus", {.kind = RouterKind::sqrtsoftplus}},
                    Routing{"expert-choice", {.kind = RouterKind::expert_choice}},
                    Routing{"nr-f", {.kind = RouterKind::topk_softmax}, Rounding::nr_f},
                    Routing{"sr-f", {.kind = RouterKind::softmax_topk}, Rounding::sr_f},
                    Routing{"nr-s", {.kind = RouterKind::topk_softmax}, Rounding::nr_s},
                    Routing{"balance-f", {.kind = RouterKind::topk_softmax}, Rounding::balance_f},
                    Routing{"up", {.kind = RouterKind::sigmoid_bias}, Rounding::up},
                    Routing{"down", {.kind = RouterKind::topk_softmax}, Rounding::down}));

}  // namespace
}  // namespace tessera::lm

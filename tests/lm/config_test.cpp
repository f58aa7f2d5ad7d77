// SPDX-License-Identifier: Apache-2.0
#include "lm/config.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "lm/parameters.hpp"
#include "tests/lm/support.hpp"

namespace tessera::lm {
namespace {

using nlohmann::json;

TEST(Config, ComesBackFromItsJson) {
  for (RouterKind const router : {RouterKind::softmax_topk_renorm, RouterKind::softmax_topk}) {
    ModelConfig config = small_config();
    config.router.kind = router;
    EXPECT_EQ(parse_config(to_json(config).dump()), config);
  }
}

TEST(Config, OfRoutersThatQwen3MoeLacksIsOurOwn) {
  ModelConfig config = small_config();
  EXPECT_EQ(to_json(config)["model_type"], "qwen3_moe");
  for (Router const& router :
       {Router{.kind = RouterKind::sigmoid_bias, .route_scale = 2.5f, .normalize_scores = true},
        Router{.kind = RouterKind::group_limited, .groups = 4, .top_groups = 2},
        Router{.kind = RouterKind::topk_softmax, .route_scale = 0.5f},
        Router{.kind = RouterKind::expert_choice}}) {
    config.router = router;
    json const object = to_json(config);
    EXPECT_EQ(object["model_type"], "tessera_moe");  // transformers must not read it as Qwen3-MoE
    EXPECT_EQ(object["architectures"], json::array());
    EXPECT_EQ(parse_config(object.dump()), config);
  }
}

TEST(Config, TakesTheNameOfTheExpertsThatTransformersSaves) {
  json object = to_json(small_config());
  object["num_local_experts"] = 5;
  EXPECT_EQ(config_from_json(object).experts, 5);
  object["num_local_experts"] = 6;
  EXPECT_THROW(config_from_json(object), InputError);
  object.erase("num_experts");
  EXPECT_EQ(config_from_json(object).experts, 6);
  object["num_local_experts"] = 0;
  EXPECT_THROW(config_from_json(object), InputError);
}

TEST(Config, TakesRotationsWithoutScalingAlone) {
  json object = to_json(small_config());
  object.erase("rope_theta");
  for (json const& good :
       {json{{"rope_theta", 5e4}}, json{{"rope_theta", 5e4}, {"rope_type", "default"}},
        json{{"rope_theta", 5e4}, {"partial_rotary_factor", 1.0}}}) {
    object["rope_parameters"] = good;
    EXPECT_EQ(config_from_json(object).rope_theta, 5e4) << good;
  }
  for (json const& bad :
       {json{{"rope_theta", 5e4}, {"rope_type", "yarn"}}, json{{"rope_theta", 5e4}, {"factor", 4}},
        json{{"rope_theta", 5e4}, {"partial_rotary_factor", 0.5}},
        json{{"full_attention", {{"rope_theta", 5e4}}}}, json::object(), json(1)}) {
    object["rope_parameters"] = bad;
    EXPECT_THROW(config_from_json(object), InputError) << bad;
  }
  object["rope_parameters"] = nullptr;
  object["rope_theta"] = 7;
  EXPECT_EQ(config_from_json(object).rope_theta, 7);
}

TEST(Config, RefusesABrokenRouter) {
  ModelConfig config = small_config();
  config.router.kind = RouterKind::sqrtsoftplus;
  for (auto const& [key, value] : {std::pair<char const*, json>{"kind", "psychic"},
                                   {"kind", 3},
                                   {"route_scale", "2"},
                                   {"normalize_scores", 1},
                                   {"groups", -1},
                                   {"top_groups", nullptr}}) {
    json object = to_json(config);
    object["tessera_router"][key] = value;
    EXPECT_THROW(parse_config(object.dump()), InputError) << key << " " << value;
    object["tessera_router"] = value;
    EXPECT_THROW(parse_config(object.dump()), InputError);
    object.erase("tessera_router");
    EXPECT_THROW(parse_config(object.dump()), InputError);
  }
  // What a run may have, its checkpoint can be read with.
  config.router.route_scale = 1e7f;
  EXPECT_THROW(validate(config), InputError);
  config.router.route_scale = -1e6f;
  EXPECT_EQ(parse_config(to_json(config).dump()), config);
  config.router.kind = RouterKind::given;
  EXPECT_THROW(validate(config), InputError);
}

TEST(Config, CountsItsParameters) {
  ModelConfig biased = small_config();
  biased.router.kind = RouterKind::sigmoid_bias;
  for (ModelConfig const& config : {ModelConfig{}, small_config(), biased}) {
    ParameterLayout const layout(config);
    EXPECT_EQ(parameter_count(config), layout.size());
    EXPECT_EQ(slice_count(config), static_cast<std::int64_t>(layout.slices().size()));
  }
}

TEST(Config, SlicesFollowEachOther) {
  ParameterLayout const layout(small_config());
  std::int64_t next = 0;
  for (NamedSlice const& slice : layout.slices()) {
    EXPECT_EQ(slice.offset, next) << slice.name;
    next += slice.size;
  }
  EXPECT_EQ(next, layout.size());
}

TEST(Config, NamesRoutersAndRounding) {
  for (int i = 0; i < 8; ++i) {
    auto const router = static_cast<RouterKind>(i);
    EXPECT_EQ(router_from_name(router_name(router)), router);
  }
  for (int i = 0; i < 7; ++i) {
    auto const rounding = static_cast<Rounding>(i);
    EXPECT_EQ(rounding_from_name(rounding_name(rounding)), rounding);
  }
  EXPECT_THROW(router_from_name("topk"), InputError);
  EXPECT_THROW(rounding_from_name(""), InputError);
}

TEST(Config, RefusesEveryBadMember) {
  json const good = to_json(small_config());
  ASSERT_NO_THROW(config_from_json(good));
  struct Change {
    char const* key;
    json value;
  };
  std::vector<Change> const changes = {{"model_type", "llama"},
                                       {"model_type", 3},
                                       {"vocab_size", 32000},
                                       {"hidden_size", 0},
                                       {"hidden_size", -4},
                                       {"hidden_size", 1 << 30},
                                       {"hidden_size", 1e300},
                                       {"hidden_size", "128"},
                                       {"hidden_size", nullptr},
                                       {"num_hidden_layers", 9223372036854775807LL},
                                       {"num_hidden_layers", ~0ull},
                                       {"num_experts", 0},
                                       {"num_experts_per_tok", 6},
                                       {"num_key_value_heads", 3},
                                       {"head_dim", 7},
                                       {"moe_intermediate_size", json::array()},
                                       {"max_position_embeddings", 0},
                                       {"rms_norm_eps", -1},
                                       {"rope_theta", 0},
                                       {"rope_theta", "big"},
                                       {"hidden_act", "gelu"},
                                       {"tie_word_embeddings", false},
                                       {"attention_bias", true},
                                       {"decoder_sparse_step", 2},
                                       {"mlp_only_layers", json{0}},
                                       {"norm_topk_prob", "yes"},
                                       {"use_sliding_window", true},
                                       {"rope_scaling", json{{"type", "yarn"}}}};
  for (Change const& change : changes) {
    json bad = good;
    bad[change.key] = change.value;
    EXPECT_THROW(config_from_json(bad), InputError) << change.key << " = " << change.value;
  }
  for (auto const& [key, value] : good.items()) {
    json without = good;
    without.erase(key);
    try {
      config_from_json(without);  // either a default stands in, or one line says what is missing
    } catch (InputError const& error) {
      EXPECT_NE(std::string(error.what()).find(key), std::string::npos) << error.what();
    }
  }
}

TEST(Config, RefusesTextThatIsNotItsJson) {
  EXPECT_THROW(parse_config(""), InputError);
  EXPECT_THROW(parse_config("[]"), InputError);
  EXPECT_THROW(parse_config("null"), InputError);
  EXPECT_THROW(parse_config(std::string(1 << 20, '[')), InputError);
  EXPECT_THROW(parse_config("{\"a\":1,\"a\":2}"), InputError);
  std::string const good = to_json(small_config()).dump();
  EXPECT_THROW(parse_config(good.substr(0, good.size() / 2)), InputError);
}

TEST(Config, RefusesTotalsThatAreTooLarge) {
  ModelConfig config = small_config();
  config.hidden = config.intermediate = 1 << 16;
  config.experts = 1 << 12;
  EXPECT_THROW(validate(config), InputError);
  config = small_config();
  config.context = 1 << 16;
  config.head_dim = 1 << 12;
  EXPECT_THROW(validate(config), InputError);
}

}  // namespace
}  // namespace tessera::lm

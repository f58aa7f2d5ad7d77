// SPDX-License-Identifier: Apache-2.0
// config.json of eight families, with the fields and values that their authors published; the parameters that
// they announced; and configurations that leave something out or contradict themselves.
#include "huggingface/model.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "huggingface/expert_names.hpp"
#include "lm/error.hpp"
#include "lm/files.hpp"
#include "tessera/moe.hpp"

namespace tessera::huggingface {
namespace {

using nlohmann::json;

std::string config_path(std::string const& name) {
  return std::string(TESSERA_CONFIGS) + "/" + name + ".json";
}
json config(std::string const& name) {
  return json::parse(lm::read_file(config_path(name), 1 << 20));
}

struct Published {
  char const* name;
  std::int64_t total;      ///< exact: the sum over the tensors of the published checkpoint
  double active_billions;  ///< as announced
  double last_place;       ///< of that figure, in billions; some are rounded, some cut
  int embeddings;          ///< in that figure: 2 both, 1 the head, 0 none
  std::int64_t moe_layers;
  RouterKind router;
};

void PrintTo(Published const& published, std::ostream* stream) { *stream << published.name; }

class PublishedModel : public testing::TestWithParam<Published> {};

TEST_P(PublishedModel, HasItsParameters) {
  Published const& published = GetParam();
  Model const model = load_model_config(config_path(published.name));
  EXPECT_EQ(model.parameters.total(), published.total);
  std::int64_t parameters = model.active_parameters();
  if (published.embeddings < 2) parameters -= model.parameters.embedding;
  if (published.embeddings < 1) parameters -= model.parameters.head;
  double const active = static_cast<double>(parameters) * 1e-9;
  EXPECT_LE(std::abs(active - published.active_billions),
            std::max(0.01 * published.active_billions, published.last_place))
      << active;
  EXPECT_EQ(static_cast<std::int64_t>(model.moe_layers.size()), published.moe_layers);
  EXPECT_EQ(model.moe.router.kind, published.router);
  MoeDesc desc = model.moe;
  desc.shape.tokens = 1024;
  EXPECT_TRUE(saved_bytes(desc).ok()) << saved_bytes(desc).status().text();
}

INSTANTIATE_TEST_SUITE_P(
    All, PublishedModel,
    testing::Values(
        Published{"mixtral-8x7b", 46'702'792'704, 12.9, 0.1, 2, 32,
                  RouterKind::softmax_topk_renorm},
        Published{"qwen1.5-moe-a2.7b", 14'315'784'192, 2.7, 0.1, 2, 24, RouterKind::softmax_topk},
        Published{"qwen3-30b-a3b", 30'532'122'624, 3.3, 0.1, 2, 48,
                  RouterKind::softmax_topk_renorm},
        Published{"qwen3-next-80b-a3b", 79'674'391'296, 3, 1, 2, 48,
                  RouterKind::softmax_topk_renorm},
        Published{"olmoe-1b-7b", 6'919'161'856, 1.3, 0.1, 2, 16, RouterKind::softmax_topk},
        Published{"deepseek-v3", 671'026'419'200, 37, 1, 2, 58, RouterKind::group_limited},
        Published{"glm-4.5-air", 106'852'251'264, 12, 1, 0, 45, RouterKind::sigmoid_bias},
        Published{"gpt-oss-20b", 20'914'757'184, 3.61, 0.01, 1, 24, RouterKind::topk_softmax}));

TEST(Model, KnowsGroupsScalesAndSharedExperts) {
  Model const deepseek = read_model(config("deepseek-v3"));
  EXPECT_EQ(deepseek.moe.router.groups, 8);
  EXPECT_EQ(deepseek.moe.router.top_groups, 4);
  EXPECT_FLOAT_EQ(deepseek.moe.router.route_scale, 2.5f);
  EXPECT_TRUE(deepseek.moe.router.normalize_scores);
  EXPECT_EQ(deepseek.shared_intermediate, 2048);
  EXPECT_EQ(deepseek.moe_layers.front(), 3);  // three dense layers before
  EXPECT_EQ(deepseek.notes.size(), 2u);       // next-token layer, FP8

  Model const qwen = read_model(config("qwen1.5-moe-a2.7b"));
  EXPECT_EQ(qwen.shared_intermediate, 5632);

  Model const gpt_oss = read_model(config("gpt-oss-20b"));
  EXPECT_TRUE(gpt_oss.moe.bias);
  EXPECT_EQ(gpt_oss.moe.activation.kind, ActivationKind::clamped_swiglu);
  EXPECT_EQ(gpt_oss.moe.layout.orientation, WeightOrientation::transposed);
  EXPECT_EQ(gpt_oss.moe.layout.order, GateUpOrder::interleaved);
}

TEST(Model, DenseLayersAreNotMoe) {
  json changed = config("qwen3-30b-a3b");
  std::int64_t const total = read_model(changed).parameters.total();
  changed["mlp_only_layers"] = {0u, 5u};
  Model const model = read_model(changed);
  EXPECT_EQ(model.moe_layers.size(), 46u);
  // A dense MLP of 6144 instead of 128 experts of 768 and their router.
  EXPECT_EQ(total - model.parameters.total(),
            2 * (128 * 3 * 2048 * 768 + 128 * 2048 - 3 * 2048 * 6144));
  changed["decoder_sparse_step"] = 2;  // layers 1, 3, 5, ...
  EXPECT_EQ(read_model(changed).moe_layers.size(), 23u);
}

TEST(Model, TiedEmbeddingsCountOnceAndMultiply) {
  json changed = config("olmoe-1b-7b");
  Model const apart = read_model(changed);
  changed["tie_word_embeddings"] = true;
  Model const tied = read_model(changed);
  EXPECT_EQ(apart.parameters.total() - tied.parameters.total(), 50304 * 2048);
  EXPECT_EQ(apart.forward_flops_per_token(), tied.forward_flops_per_token());
}

struct Bad {
  char const* name;
  char const* key;
  char const* value;  ///< as JSON; empty: the key is taken out
  char const* named;  ///< what the message names besides the key
};

void PrintTo(Bad const& bad, std::ostream* stream) { *stream << bad.name << " " << bad.key; }

class BadConfig : public testing::TestWithParam<Bad> {};

TEST_P(BadConfig, IsRefusedByName) {
  Bad const& bad = GetParam();
  json changed = config(bad.name);
  changed.erase(bad.key);
  if (*bad.value != '\0') changed[bad.key] = json::parse(bad.value);
  try {
    (void)read_model(changed);
    FAIL() << "accepted";
  } catch (lm::InputError const& error) {
    std::string const text = error.what();
    EXPECT_NE(text.find(bad.key), std::string::npos) << text;
    EXPECT_NE(text.find(bad.named), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Missing, BadConfig,
    testing::Values(Bad{"mixtral-8x7b", "num_local_experts", "", "missing"},
                    Bad{"mixtral-8x7b", "model_type", "", "missing"},
                    Bad{"qwen1.5-moe-a2.7b", "shared_expert_intermediate_size", "", "missing"},
                    Bad{"qwen3-30b-a3b", "norm_topk_prob", "", "missing"},
                    Bad{"qwen3-30b-a3b", "moe_intermediate_size", "null", "missing"},
                    Bad{"qwen3-next-80b-a3b", "linear_num_key_heads", "", "missing"},
                    Bad{"olmoe-1b-7b", "vocab_size", "", "missing"},
                    Bad{"deepseek-v3", "kv_lora_rank", "", "missing"},
                    Bad{"deepseek-v3", "intermediate_size", "", "missing"},
                    Bad{"glm-4.5-air", "n_group", "", "missing"},
                    Bad{"gpt-oss-20b", "hidden_act", "", "missing"}));

INSTANTIATE_TEST_SUITE_P(
    Contradicting, BadConfig,
    testing::Values(Bad{"mixtral-8x7b", "num_experts_per_tok", "9", "num_local_experts = 8"},
                    Bad{"mixtral-8x7b", "num_key_value_heads", "7", "num_attention_heads = 32"},
                    Bad{"mixtral-8x7b", "hidden_size", "4100", "head_dim"},
                    Bad{"qwen3-30b-a3b", "mlp_only_layers", "[48]", "num_hidden_layers = 48"},
                    Bad{"qwen3-30b-a3b", "decoder_sparse_step", "49", "no layer with experts"},
                    Bad{"qwen3-30b-a3b", "shared_expert_intermediate_size", "512", "only 0"},
                    Bad{"qwen3-30b-a3b", "num_local_experts", "64", "num_experts = 128"},
                    Bad{"qwen3-next-80b-a3b", "layer_types", "[\"full_attention\"]", "1 entries"},
                    Bad{"qwen3-next-80b-a3b", "linear_num_value_heads", "33",
                        "linear_num_key_heads = 16"},
                    Bad{"deepseek-v3", "n_group", "7", "n_routed_experts = 256"},
                    Bad{"deepseek-v3", "topk_group", "9", "n_group = 8"},
                    Bad{"deepseek-v3", "num_experts_per_tok", "129", "topk_group = 4"},
                    Bad{"deepseek-v3", "scoring_func", "\"softmax\"", "sigmoid"},
                    Bad{"deepseek-v3", "moe_layer_freq", "2", "only 1"},
                    Bad{"glm-4.5-air", "first_k_dense_replace", "46", "num_hidden_layers = 46"},
                    Bad{"gpt-oss-20b", "experts_per_token", "8", "num_experts_per_tok = 4"},
                    Bad{"gpt-oss-20b", "hidden_act", "\"gelu\"", "silu"}));

INSTANTIATE_TEST_SUITE_P(
    Malformed, BadConfig,
    testing::Values(Bad{"olmoe-1b-7b", "hidden_size", "0", "hidden_size = 0"},
                    Bad{"olmoe-1b-7b", "hidden_size", "-4", "-4"},
                    Bad{"olmoe-1b-7b", "hidden_size", "99999999999999999999", "[1, "},
                    Bad{"olmoe-1b-7b", "num_hidden_layers", "16777216", "at most 4096"},
                    Bad{"olmoe-1b-7b", "hidden_size", "2048.5", "2048.5"},
                    Bad{"olmoe-1b-7b", "hidden_size", "\"2048\"", "integer"},
                    Bad{"olmoe-1b-7b", "norm_topk_prob", "1", "true or false"},
                    Bad{"olmoe-1b-7b", "hidden_act", "\"tanh\"", "tanh"},
                    Bad{"olmoe-1b-7b", "model_type", "\"llama\"", "qwen3_moe"},
                    Bad{"qwen3-30b-a3b", "mlp_only_layers", "3", "list"}));

// Each is read, or refused by what is missing or what is not served; none is "not known".
TEST(Model, EveryFamilyThatConvertKnowsIsKnown) {
  int walked = 0;
  for (std::string_view const type : native_model_types()) {
    ++walked;
    for (json const& config :
         {json{{"model_type", type}}, json{{"model_type", type}, {"text_config", {}}}}) {
      try {
        read_model(config);
        ADD_FAILURE() << type << ": read without a field";
      } catch (lm::InputError const& error) {
        std::string const text = error.what();
        EXPECT_EQ(text.find("is not known"), std::string::npos) << text;
        bool const says = text.find(" is missing; take config.json") != std::string::npos ||
                          text.find("; for one of its layers leave --hf out") != std::string::npos;
        EXPECT_TRUE(says) << text;
      }
    }
  }
  EXPECT_GE(walked, 28);
}

TEST(Model, OfSeveralPartsIsItsLanguageModel) {
  json inner = config("qwen3-30b-a3b");
  Model const alone = read_model(inner);
  inner.erase("tie_word_embeddings");
  for (bool const named : {true, false}) {
    if (!named) inner.erase("model_type");
    if (named) inner["model_type"] = "qwen3_vl_moe_text";
    Model const nested = read_model({{"model_type", "qwen3_vl_moe"}, {"text_config", inner}});
    EXPECT_EQ(nested.parameters.total(), alone.parameters.total());
    ASSERT_EQ(nested.notes.size(), alone.notes.size() + 1);
    EXPECT_NE(nested.notes.back().find("text_config alone"), std::string::npos);
    Model const tied = read_model(
        {{"model_type", "qwen3_vl_moe"}, {"text_config", inner}, {"tie_word_embeddings", true}});
    EXPECT_EQ(tied.parameters.head, 0);
  }
}

TEST(Model, NamesTheFileInErrors) {
  try {
    (void)load_model_config("/no/such/config.json");
    FAIL() << "accepted";
  } catch (lm::InputError const& error) {
    EXPECT_NE(std::string(error.what()).find("/no/such/config.json"), std::string::npos);
  }
  EXPECT_THROW((void)read_model(json::array()), lm::InputError);
}

}  // namespace
}  // namespace tessera::huggingface

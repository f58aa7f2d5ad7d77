// SPDX-License-Identifier: Apache-2.0
#include "lm/checkpoint.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <nlohmann/json.hpp>

#include "lm/files.hpp"
#include "lm/run_folder.hpp"
#include "lm/safetensors.hpp"
#include "tests/lm/support.hpp"

namespace tessera::lm {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

TrainingState some_state() {
  TrainingOptions options{.model = small_config(), .steps = 30, .eval_every = 5};
  options.seed = ~std::uint64_t{0};
  TrainingState state = initial_state(options, {.paths = {"a b", "-"}, .fingerprint = ~0ull});
  state.step = 12;
  state.moments.first[3] = 0.5f;
  state.history.loss.assign(12, 3.5f);
  state.history.balance.assign(12, 1.5f);
  state.history.held_out.assign(2, 3.25f);
  state.history.expert_load.assign(1 * 2 * 5, 1.0f);
  return state;
}

class Checkpoint : public testing::Test {
 protected:
  Checkpoint() { save_run(folder_.path(), state_); }
  [[nodiscard]] fs::path file(char const* name) const { return folder_.path() / name; }
  void edit_config(char const* key, json const& value) {
    json config = json::parse(read_text(file(kConfigFile)));
    config[key] = value;
    write_text(file(kConfigFile), config.dump());
  }
  TemporaryFolder folder_;
  TrainingState state_ = some_state();
};

TEST_F(Checkpoint, ModelComesBackAsSaved) {
  LoadedModel const model = load_model(folder_.path());
  EXPECT_EQ(model.parameters, state_.parameters);
  ModelConfig expected = state_.options.model;
  expected.router.kind = RouterKind::softmax_topk_renorm;  // the same router by Hugging Face's name
  EXPECT_EQ(model.config, expected);
}

TEST_F(Checkpoint, HasHuggingFaceNamesAndShapes) {
  SafetensorsFile model(file(kModelFile));
  EXPECT_EQ(model.metadata().at("format"), "pt");
  std::vector<float> gate(16 * 32);
  std::int64_t const shape[] = {16, 32};
  for (char const* name : {"model.layers.1.mlp.experts.4.gate_proj.weight",
                           "model.layers.1.mlp.experts.4.up_proj.weight"}) {
    EXPECT_NO_THROW(model.read(name, shape, gate)) << name;
  }
  // up_proj of expert 4 lies n rows behind its gate_proj in w_up.
  LayerOffsets const at = ParameterLayout(state_.options.model).layer(1);
  EXPECT_EQ(gate[5],
            state_.parameters[static_cast<std::size_t>(at.w_up + (4 * 2 + 1) * 16 * 32 + 5)]);
}

TEST_F(Checkpoint, StateComesBackAsSaved) {
  TrainingState const loaded = load_state(folder_.path());
  EXPECT_EQ(loaded.options, state_.options);
  EXPECT_EQ(loaded.step, 12);
  EXPECT_EQ(loaded.text.paths, state_.text.paths);
  EXPECT_EQ(loaded.text.fingerprint, state_.text.fingerprint);
  EXPECT_EQ(loaded.parameters, state_.parameters);
  EXPECT_EQ(loaded.moments.first, state_.moments.first);
  EXPECT_EQ(loaded.history.held_out, state_.history.held_out);
  EXPECT_EQ(loaded.history.expert_load, state_.history.expert_load);
}

TEST_F(Checkpoint, ConfigOfAnotherModelIsRefused) {
  for (auto const& [key, value] :
       std::initializer_list<std::pair<char const*, int>>{{"num_hidden_layers", 1},
                                                          {"num_hidden_layers", 1024},
                                                          {"num_experts", 4096},
                                                          {"hidden_size", 65536},
                                                          {"moe_intermediate_size", 17},
                                                          {"num_key_value_heads", 4}}) {
    std::string const before = read_text(file(kConfigFile));
    edit_config(key, value);
    EXPECT_THROW(load_model(folder_.path()), InputError) << key << " = " << value;
    write_text(file(kConfigFile), before);
  }
}

TEST_F(Checkpoint, InAnotherTypeIsRefusedByItsName) {
  std::string const header =
      safetensors_header({}, std::vector<TensorEntry>{{"lm_head.weight", "BF16", {2}, 0, 4}});
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(header.size());
  write_text(file(kModelFile), bytes + header + "1234");
  try {
    load_model(folder_.path());
    ADD_FAILURE();
  } catch (InputError const& error) {
    EXPECT_NE(std::string(error.what()).find("lm_head.weight is BF16"), std::string::npos)
        << error.what();
  }
}

TEST_F(Checkpoint, CutOffOrMissingFilesAreRefused) {
  for (char const* name : {kModelFile, kConfigFile}) {
    std::string const whole = read_text(file(name));
    for (std::size_t const length :
         {std::size_t{0}, std::size_t{4}, whole.size() / 2, whole.size() - 2}) {
      write_text(file(name), whole.substr(0, length));
      EXPECT_THROW(load_model(folder_.path()), InputError) << name << " " << length;
    }
    fs::remove(file(name));
    EXPECT_THROW(load_model(folder_.path()), InputError) << name;
    write_text(file(name), whole);
  }
  EXPECT_NO_THROW(load_model(folder_.path()));
  std::string const state = read_text(file(kStateFile));
  write_text(file(kStateFile), state.substr(0, state.size() - 1));
  EXPECT_THROW(load_state(folder_.path()), InputError);
  fs::remove(file(kStateFile));
  EXPECT_THROW(load_state(folder_.path()), InputError);
}

TEST_F(Checkpoint, StateWithABadDescriptionIsRefused) {
  SafetensorsFile reader(file(kStateFile));
  std::string const key = reader.metadata().begin()->first;
  json const good = json::parse(reader.metadata().at(key));
  std::vector<float> const none;
  auto const with = [&](std::string const& description) {
    std::vector<TensorData> const tensors = {{"parameters", {0}, none}};
    write_safetensors(file(kStateFile), {{key, description}}, tensors);
  };
  for (std::string const& description : {std::string("{"), std::string("[]"), std::string("{}"),
                                         std::string(5000, '['), good.dump()}) {
    with(description);  // the last one is good, but the tensors are missing
    EXPECT_THROW(load_state(folder_.path()), InputError) << description.substr(0, 40);
  }
  for (auto const& [name, value] : good.items()) {
    json bad = good;
    bad[name] = name == "text" ? json{1} : json(-1);
    with(bad.dump());
    EXPECT_THROW(load_state(folder_.path()), InputError) << name;
  }
  write_safetensors(file(kStateFile), {}, {});
  EXPECT_THROW(load_state(folder_.path()), InputError);
}

TEST_F(Checkpoint, AFailedWriteLeavesTheOldFile) {
  std::string const before = read_text(file(kModelFile));
  struct rlimit limit{};
  ::getrlimit(RLIMIT_FSIZE, &limit);
  struct rlimit const small{100, limit.rlim_max};
  auto const previous = std::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &small);  // as a full disk
  EXPECT_THROW(save_model(folder_.path(), state_.options.model, state_.parameters),
               EnvironmentError);
  ::setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, previous);
  EXPECT_EQ(read_text(file(kModelFile)), before);
  for (auto const& entry : fs::directory_iterator(folder_.path())) {
    EXPECT_NE(entry.path().filename().string()[0], '.') << entry.path();  // no temporary is left
  }
}

TEST(RunFolder, KeepsAnEarlierRunUnderANewName) {
  TemporaryFolder const parent;
  fs::path const folder = parent.path() / "runs" / "latest";
  EXPECT_EQ(prepare_folder(folder).kept, "");
  EXPECT_EQ(prepare_folder(folder).kept, "");  // empty: nothing to keep
  for (int const number : {1, 2}) {
    write_text(folder / kStateFile, "run");
    EXPECT_EQ(prepare_folder(folder.string() + "/").kept,
              folder.string() + "-" + std::to_string(number));
    EXPECT_TRUE(fs::is_empty(folder));
  }
  EXPECT_EQ(read_text(folder.string() + "-1/" + kStateFile), "run");
}

TEST(RunFolder, KeepsWhateverARunWouldWriteOver) {
  std::vector<char const*> names(std::begin(kRunFiles), std::end(kRunFiles));
  names.push_back(kIndexFile);
  for (char const* name : names) {
    TemporaryFolder const parent;
    fs::path const folder = parent.path() / "model";
    write_text(folder / name, "precious");
    write_text(folder / "model-00001-of-00002.safetensors", "shard");
    EXPECT_EQ(prepare_folder(folder).kept, folder.string() + "-1") << name;
    EXPECT_EQ(read_text(folder.string() + "-1/" + name), "precious");
    EXPECT_TRUE(fs::is_empty(folder));
  }
}

TEST(RunFolder, MovesNothingWhereAnotherRunWrites) {
  TemporaryFolder const parent;
  fs::path const folder = parent.path() / "run";
  {
    PreparedFolder const running = prepare_folder(folder);
    EXPECT_THROW(prepare_folder(folder), InputError);  // nothing is saved yet
    write_text(folder / kStateFile, "first");
    EXPECT_THROW(prepare_folder(folder), InputError);
    EXPECT_EQ(read_text(folder / kStateFile), "first");
    EXPECT_FALSE(fs::exists(folder.string() + "-1"));
  }
  PreparedFolder const second = prepare_folder(folder);
  EXPECT_EQ(second.kept, folder.string() + "-1");
  EXPECT_THROW(FolderLock{folder}, InputError);  // the new folder is locked
  EXPECT_NO_THROW(FolderLock{second.kept});      // and the old one no longer
}

TEST(RunFolder, ALockGoesWithItsOwner) {
  TemporaryFolder const folder;
  FolderLock first(folder.path());
  FolderLock second = std::move(first);
  EXPECT_THROW(FolderLock{folder.path()}, InputError);
  second = FolderLock();
  EXPECT_NO_THROW(FolderLock{folder.path()});
  EXPECT_THROW(FolderLock{folder.path() / "missing"}, InputError);
}

TEST(RunFolder, RefusesWhatCannotBeAFolder) {
  TemporaryFolder const parent;
  write_text(parent.path() / "file", "");
  EXPECT_THROW(prepare_folder(parent.path() / "file"), InputError);
  EXPECT_THROW(prepare_folder(parent.path() / "file" / "below"), InputError);
  EXPECT_THROW(prepare_folder("/proc/tessera"), InputError);
}

TEST(RunFolder, CsvFilesHoldTheHistory) {
  TrainingState const state = some_state();
  std::string const loss = loss_csv(state);
  EXPECT_EQ(std::count(loss.begin(), loss.end(), '\n'), 13);
  EXPECT_NE(loss.find("\n5,3.50000,3.25000,"), std::string::npos);
  EXPECT_NE(loss.find("\n6,3.50000,,"), std::string::npos);
  std::string const load = expert_load_csv(state);
  EXPECT_EQ(load.substr(0, 34), "layer,step,expert,load\n0,10,0,1.00");
  EXPECT_NE(load.find("\n\n\n1,10,0,1.0000\n"), std::string::npos);
}

}  // namespace
}  // namespace tessera::lm

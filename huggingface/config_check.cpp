// SPDX-License-Identifier: Apache-2.0
#include "huggingface/config_check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "lm/error.hpp"
#include "lm/files.hpp"
#include "lm/json.hpp"
#include "lm/text.hpp"

namespace tessera::huggingface {

namespace {

using nlohmann::json;

constexpr std::size_t kMaxConfigBytes = 1 << 20;
constexpr std::int64_t kMaxLayers = 1 << 12;

// Families whose every layer has experts unless a field says otherwise.
constexpr std::string_view kAllLayers[] = {
    "aria",      "aria_text",  "flex_olmo",   "gpt_oss",      "granitemoe", "jetmoe",
    "minimax",   "minimax_m2", "mixtral",     "olmoe",        "phimoe",     "qwen2_moe",
    "qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_vl_moe", "tessera_moe"};
constexpr char const* kExpertCounts[] = {"num_experts", "num_local_experts", "n_routed_experts",
                                         "moe_num_experts"};
constexpr char const* kBlockTypes = "layers_block_type";
constexpr char const* kPattern = "hybrid_override_pattern";
constexpr char const* kLatentSize = "moe_latent_size";
constexpr char const* kSharedCounts[] = {"n_shared_experts", "num_shared_experts",
                                         "moe_num_shared_experts"};
constexpr std::pair<std::string_view, char const*> kDtypes[] = {
    {"bfloat16", "BF16"}, {"float16", "F16"}, {"float32", "F32"}, {"float64", "F64"}};

struct Place {
  std::string stem;  // "model.layers"
  std::int64_t layer;
};

// Where a prefix stands: its last component that is a number, and what is before it.
std::optional<Place> place_of(std::string_view prefix) {
  for (std::size_t end = prefix.size(); end > 0;) {
    std::size_t const dot = prefix.rfind('.', end - 1);
    std::size_t const begin = dot == std::string_view::npos ? 0 : dot + 1;
    std::int64_t layer = 0;
    auto const [stop, error] = std::from_chars(prefix.data() + begin, prefix.data() + end, layer);
    if (error == std::errc{} && stop == prefix.data() + end && layer >= 0) {
      return Place{std::string(prefix.substr(0, begin == 0 ? 0 : dot)), layer};
    }
    if (begin == 0) break;
    end = dot;
  }
  return std::nullopt;
}

// Modules that predict further tokens stand apart and count layers of their own.
bool predicts_further(std::string_view stem) {
  return stem.starts_with("mtp.") || stem.find(".mtp.") != std::string_view::npos;
}

class Check {
 public:
  Check(CheckpointFolder const& checkpoint, ExpertGroups const& groups)
      : checkpoint_(checkpoint),
        groups_(groups),
        path_((checkpoint.path() / "config.json").string()),
        whole_(lm::parse_json(lm::read_file(path_, kMaxConfigBytes), path_, 64)) {
    if (!whole_.is_object()) throw lm::InputError(path_ + ": not a JSON object");
    type_ = lm::json_string(whole_, "model_type");
    for (char const* key : {"thinker_config", "text_config"}) {
      auto const inner = text().find(key);
      if (inner != text().end() && inner->is_object()) text_ = &*inner;
    }
  }

  void run() const {
    for (auto const& [prefix, group] : groups_.groups()) {
      check_gate(group);
      check_sizes(group);
      check_router(group);
      check_shared(group);
    }
    check_layers();
  }

 private:
  [[nodiscard]] json const& text() const { return text_ == nullptr ? whole_ : *text_; }

  [[noreturn]] void refuse(std::string const& rule) const {
    throw lm::InputError(
        fmt::format("{}: {}; take config.json and all weight files of one model", path_, rule));
  }

  [[nodiscard]] json const* field(char const* key) const {
    auto const found = text().find(key);
    return found == text().end() || found->is_null() ? nullptr : &*found;
  }

  [[nodiscard]] std::int64_t count_of(char const* key, json const& value) const {
    bool const fits = value.is_number_integer() && value >= 0 && value <= (1 << 24);
    if (fits) return value.get<std::int64_t>();
    refuse(fmt::format("{} = {}: must be an integer in [0, {}]", key,
                       lm::printable(value.dump(-1, ' ', false, json::error_handler_t::replace)),
                       1 << 24));
  }

  // A number that holds for all layers, or one of a list with an entry for each.
  [[nodiscard]] std::optional<std::int64_t> count(char const* key, std::int64_t layer = -1) const {
    json const* const value = field(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_array()) return count_of(key, *value);
    auto const layers = field("num_hidden_layers");
    bool const per_layer = layers != nullptr && *layers == value->size() && layer >= 0 &&
                           layer < static_cast<std::int64_t>(value->size());
    if (!per_layer) return std::nullopt;
    return count_of(key, (*value)[static_cast<std::size_t>(layer)]);
  }

  void compare(char const* key, std::int64_t layer, std::int64_t held, char const* noun,
               std::string const& prefix) const {
    auto const stated = count(key, layer);
    if (!stated || *stated == held) return;
    refuse(fmt::format("{} = {}, but the files hold {} {} in {}", key, *stated, noun, held,
                       lm::printable(prefix, 120)));
  }

  [[nodiscard]] std::optional<std::int64_t> latent_size() const { return count(kLatentSize); }

  // The size of the rows that the block gets, which its router and shared experts read.
  [[nodiscard]] std::int64_t block_hidden(ExpertGroup const& group) const {
    return latent_size() ? count("hidden_size").value_or(group.hidden) : group.hidden;
  }

  // The field that states how wide an expert is.
  [[nodiscard]] char const* width_key() const {
    if (field("moe_intermediate_size") != nullptr) return "moe_intermediate_size";
    for (auto const& [key, value] : text().items()) {
      auto const has = [&](char const* word) { return key.find(word) != std::string::npos; };
      bool const other = (has("moe") || has("expert")) && !has("shared") &&
                         (has("intermediate") || has("ffn") || has("hidden"));
      if (other) return nullptr;  // a field of another family: intermediate_size is of dense layers
    }
    return "intermediate_size";
  }

  // All gate projections may be lost with a shard, so that what is left looks like experts without a gate.
  void check_gate(ExpertGroup const& group) const {
    auto const native = native_form(type_);
    bool const gated = native ? native->gated : groups_.groups().begin()->second.gated;
    if (group.gated == gated) return;
    std::string const stated = native ? fmt::format("model_type = \"{}\"", type_)
                                      : lm::printable(groups_.groups().begin()->first, 120);
    refuse(fmt::format("{} has experts {} a gate, but the files hold {} gate projections in {}",
                       stated, gated ? "with" : "without", gated ? "no" : "also",
                       lm::printable(group.prefix, 120)));
  }

  void check_sizes(ExpertGroup const& group) const {
    auto const place = place_of(group.prefix);
    std::int64_t const layer = place ? place->layer : -1;
    for (char const* key : kExpertCounts) {
      compare(key, layer, group.experts, "experts:", group.prefix);
    }
    // Nemotron's experts may work on rows that were projected to a smaller size before.
    char const* const hidden = latent_size() ? kLatentSize : "hidden_size";
    compare(hidden, layer, group.hidden, "experts of hidden size", group.prefix);
    if (char const* const key = width_key()) {
      compare(key, layer, group.intermediate, "experts of intermediate size", group.prefix);
    }
    for (json const* config : {&text(), &whole_}) {
      for (char const* key : {"dtype", "torch_dtype"}) {
        auto const stated = config->find(key);
        if (stated == config->end() || !stated->is_string()) continue;
        std::string name = stated->get<std::string>();
        if (name.starts_with("torch.")) name.erase(0, 6);
        for (auto const& [known, dtype] : kDtypes) {
          if (known != name || group.dtype == dtype) continue;
          refuse(fmt::format("{} = \"{}\", but the files hold {} in {}", key, known, group.dtype,
                             lm::printable(group.prefix, 120)));
        }
      }
    }
  }

  [[nodiscard]] static std::string block_of(ExpertGroup const& group) {
    std::string_view const experts = "experts";
    std::string const& prefix = group.prefix;
    if (!prefix.ends_with(experts)) return prefix + ".";
    return prefix.substr(0, prefix.size() - experts.size());
  }

  void check_shape(std::string const& name, std::vector<std::int64_t> const& wanted,
                   std::string const& why) const {
    StoredTensor const* const tensor = checkpoint_.find(name);
    if (tensor == nullptr) refuse(fmt::format("{}, but {} is missing", why, lm::printable(name)));
    if (tensor->entry->shape == wanted) return;
    refuse(fmt::format("{}, but {} is [{}] instead of [{}]", why, lm::printable(name),
                       lm::joined(tensor->entry->shape, ", "), lm::joined(wanted, ", ")));
  }

  void check_router(ExpertGroup const& group) const {
    for (char const* name : {"gate.weight", "router.weight", "router.layer.weight"}) {
      std::string const router = block_of(group) + name;
      StoredTensor const* const tensor = checkpoint_.find(router);
      if (tensor == nullptr || tensor->entry->shape.size() != 2) continue;
      std::int64_t const hidden = block_hidden(group);
      check_shape(router, {group.experts, hidden},
                  fmt::format("the files hold {} experts, the layer has hidden size {}",
                              group.experts, hidden));
    }
  }

  void check_shared(ExpertGroup const& group) const {
    if (auto const width = count("shared_expert_intermediate_size")) {
      check_shared(group, "shared_expert", *width,
                   fmt::format("shared_expert_intermediate_size = {}", *width));
    }
    for (char const* key : kSharedCounts) {
      auto const shared = count(key);
      if (!shared) continue;
      // One module stands for all shared experts; Nemotron states its width as a whole.
      auto whole = count("moe_shared_expert_intermediate_size");
      if (whole && *shared > 0) {
        check_shared(group, "shared_experts", *whole,
                     fmt::format("moe_shared_expert_intermediate_size = {}", *whole));
        continue;
      }
      std::int64_t const width = count("moe_intermediate_size").value_or(group.intermediate);
      check_shared(group, "shared_experts", *shared * width, fmt::format("{} = {}", key, *shared));
    }
  }

  void check_shared(ExpertGroup const& group, char const* module, std::int64_t width,
                    std::string const& stated) const {
    std::string const shared = block_of(group) + "shared";
    std::string const block = block_of(group) + module + ".";
    bool any = false, usual = false;
    for (StoredTensor const& tensor : checkpoint_.tensors()) {
      any = any || tensor.entry->name.starts_with(shared);
      usual = usual || (tensor.entry->name.starts_with(block) &&
                        tensor.entry->name.ends_with("_proj.weight"));
    }
    if (width == 0 && usual) refuse(fmt::format("{}, but the files hold {}*", stated, block));
    if (width == 0) return;
    if (!any) refuse(fmt::format("{}, but {} has no shared experts", stated, block));
    if (!usual) return;  // other names, whose shapes are not known here
    std::int64_t const hidden = block_hidden(group);
    if (group.gated) check_shape(block + "gate_proj.weight", {width, hidden}, stated);
    check_shape(block + "up_proj.weight", {width, hidden}, stated);
    check_shape(block + "down_proj.weight", {hidden, width}, stated);
  }

  // Returns whether config.json says that `layer` has experts, and the fields that say so; nothing where it does not
  // tell.
  [[nodiscard]] std::optional<std::pair<bool, std::string>> stated_sparse(
      std::int64_t layer, std::int64_t layers) const {
    auto const at = static_cast<std::size_t>(layer);
    auto const listed = [&](char const* key) {
      json const* const list = field(key);
      return list != nullptr && list->is_array() &&
             std::find(list->begin(), list->end(), layer) != list->end();
    };
    auto const divides = [&](char const* key, std::int64_t otherwise) {
      std::int64_t const step = count(key).value_or(otherwise);
      if (step == 0) refuse(fmt::format("{} = 0: must be at least 1", key));
      return step;
    };
    if (json const* const pattern = field(kPattern); pattern != nullptr && pattern->is_string()) {
      return std::pair{pattern->get_ref<std::string const&>()[at] == 'E', std::string(kPattern)};
    }
    for (char const* key : {"mlp_layer_types", "moe_layer_freq", kBlockTypes}) {
      json const* const list = field(key);
      if (list == nullptr || !list->is_array()) continue;
      if (list->size() != static_cast<std::size_t>(layers)) {
        refuse(fmt::format("{} has {} entries, but num_hidden_layers = {}", key, list->size(),
                           layers));
      }
      json const& entry = (*list)[at];
      return std::pair{entry == "sparse" || entry == "moe" || entry == 1, std::string(key)};
    }
    if (json const* const list = field("moe_layers"); list != nullptr && list->is_array()) {
      return std::pair{listed("moe_layers"), "moe_layers"};
    }
    if (field("moe_layer_start_index") != nullptr) {
      json const* const end = field("moe_layer_end_index");
      std::int64_t const last =
          end == nullptr || *end == -1 ? layers - 1 : count_of("moe_layer_end_index", *end);
      bool const sparse = layer >= *count("moe_layer_start_index") && layer <= last &&
                          (layer + 1) % divides("moe_layer_interval", 1) == 0;
      return std::pair{sparse, "moe_layer_start_index, moe_layer_end_index, moe_layer_interval"};
    }
    if (field("expert_layer_period") != nullptr) {
      return std::pair{
          layer % divides("expert_layer_period", 1) == count("expert_layer_offset").value_or(0),
          "expert_layer_period, expert_layer_offset"};
    }
    for (char const* key : {"first_k_dense_replace", "num_dense_layers", "moe_layer_num_skipped"}) {
      auto const dense = count(key);
      if (!dense) continue;
      return std::pair{layer >= *dense && layer % divides("moe_layer_freq", 1) == 0,
                       fmt::format("{} = {}", key, *dense)};
    }
    if (field("decoder_sparse_step") != nullptr || field("mlp_only_layers") != nullptr) {
      return std::pair{
          !listed("mlp_only_layers") && (layer + 1) % divides("decoder_sparse_step", 1) == 0,
          "decoder_sparse_step, mlp_only_layers"};
    }
    if (std::find(std::begin(kAllLayers), std::end(kAllLayers), type_) != std::end(kAllLayers)) {
      return std::pair{true, fmt::format("model_type = \"{}\"", type_)};
    }
    return std::nullopt;
  }

  // Nemotron states every layer by its kind, in a list or in a word of letters, and need not state their number.
  [[nodiscard]] std::optional<std::int64_t> stated_layers() const {
    auto const stated = count("num_hidden_layers");
    for (char const* key : {kBlockTypes, kPattern}) {
      json const* const kinds = field(key);
      if (kinds == nullptr || !(kinds->is_array() || kinds->is_string())) continue;
      auto const listed = static_cast<std::int64_t>(
          kinds->is_array() ? kinds->size() : kinds->get_ref<std::string const&>().size());
      if (!stated || *stated == listed) return listed;
      refuse(fmt::format("{} has {} entries, but num_hidden_layers = {}", key, listed, *stated));
    }
    return stated;
  }

  void check_layers() const {
    auto const layers = stated_layers();
    if (!layers) return;
    if (*layers > kMaxLayers) {
      refuse(fmt::format("num_hidden_layers = {}: at most {}", *layers, kMaxLayers));
    }
    std::int64_t const further = count("num_nextn_predict_layers").value_or(0);
    std::map<std::string, std::set<std::int64_t>> found;
    for (auto const& [prefix, group] : groups_.groups()) {
      auto const place = place_of(prefix);
      if (!place || predicts_further(place->stem + ".")) continue;
      found[place->stem].insert(place->layer);
    }
    for (auto const& [stem, held] : found) {
      if (*held.rbegin() >= *layers + further) {
        refuse(fmt::format("num_hidden_layers = {}, but the files hold experts in {}.{}", *layers,
                           lm::printable(stem), *held.rbegin()));
      }
      for (std::int64_t layer = 0; layer < *layers; ++layer) {
        auto const stated = stated_sparse(layer, *layers);
        if (!stated || stated->first == held.contains(layer)) continue;
        refuse(
            fmt::format("num_hidden_layers = {} with {}: layer {} has {}, but the files hold {} "
                        "in {}.{}",
                        *layers, stated->second, layer, stated->first ? "experts" : "no experts",
                        stated->first ? "none" : "experts", lm::printable(stem), layer));
      }
    }
  }

  CheckpointFolder const& checkpoint_;
  ExpertGroups const& groups_;
  std::string path_;
  json whole_;
  json const* text_ = nullptr;
  std::string type_;
};

}  // namespace

void check_against_config(CheckpointFolder const& checkpoint, ExpertGroups const& groups) {
  Check(checkpoint, groups).run();
}

}  // namespace tessera::huggingface

// SPDX-License-Identifier: Apache-2.0
#include "huggingface/conversion_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

#include "lm/checkpoint.hpp"
#include "lm/error.hpp"
#include "lm/files.hpp"
#include "lm/json.hpp"
#include "tessera/names.hpp"

namespace tessera::huggingface {

namespace fs = std::filesystem;

namespace {

constexpr std::size_t kMaxConfigBytes = 1 << 20;
constexpr char const* kLayoutKey = "tessera_layout";  // in the metadata of converted files

std::string model_type_of(fs::path const& folder) {
  fs::path const path = folder / "config.json";
  std::string const text = lm::read_file(path, kMaxConfigBytes);
  return lm::json_string(lm::parse_json(text, path.string(), 64), "model_type");
}

// The order of gate and up is not in names or shapes, but follows from the model type. Transposition is.
WeightLayout stacked_layout(CheckpointFolder const& checkpoint, StoredTensor const& gate_up) {
  auto const native = native_form(model_type_of(checkpoint.path()));
  bool const known = native && native->naming == Naming::stacked;
  std::string name = gate_up.entry->name;
  constexpr std::string_view kGateUp = "gate_up_proj";
  name.replace(name.size() - kGateUp.size(), kGateUp.size(), "down_proj");
  StoredTensor const* const down = checkpoint.find(name);
  bool const matrices =
      down != nullptr && down->entry->shape.size() == 3 && gate_up.entry->shape.size() == 3;
  if (!matrices) return known ? native->layout : WeightLayout{};
  // [E,2N,D] beside [E,D,N], or [E,D,2N] beside [E,N,D].
  bool const transposed = gate_up.entry->shape[1] == down->entry->shape[2] &&
                          gate_up.entry->shape[2] == 2 * down->entry->shape[1];
  if (!transposed) return WeightLayout{};
  return known ? native->layout : WeightLayout{{}, WeightOrientation::transposed, 0};
}

// The form that follows from the tensors' names.
ExpertForm form_by_names(CheckpointFolder const& checkpoint) {
  for (Naming const naming :
       {Naming::stacked, Naming::per_expert, Naming::per_expert_w123, Naming::stacked_linear,
        Naming::stacked_linear_mlp, Naming::stacked_fc}) {
    for (StoredTensor const& tensor : checkpoint.tensors()) {
      auto const parsed = parse_expert_name(naming, tensor.entry->name, false);
      if (!parsed) continue;
      if (naming != Naming::stacked) return {naming, hugging_face_layout(naming)};
      // Without a gate both orientations have fitting shapes; transformers stores rows.
      if (parsed->part == Part::up) return {naming, WeightLayout{}};
      bool const decides = parsed->part == Part::gate_up && !parsed->bias;
      if (decides) return {naming, stacked_layout(checkpoint, tensor)};
    }
  }
  throw lm::InputError(fmt::format(
      "{}: no expert weights: no tensor has one of the names {}; convert reads models whose "
      "experts have these names",
      checkpoint.path().string(), known_spellings()));
}

class Planner {
 public:
  Planner(CheckpointFolder const& checkpoint, ExpertGroups const& groups,
          std::optional<Conversion> const& conversion, ConvertOptions const& options)
      : checkpoint_(checkpoint), groups_(groups), conversion_(conversion), options_(options) {}

  [[nodiscard]] ConversionPlan plan() const {
    ConversionPlan plan;
    if (!options_.layout) {
      plan.form = conversion_ ? conversion_->before : native();
      if (conversion_) {
        restore(plan);
      } else {
        lay_out(plan, {{"format", "pt"}});
      }
      return plan;
    }
    plan.form = {Naming::tessera, *options_.layout};
    for (auto const& [prefix, group] : groups_.groups()) {
      check_order(group);
      check_block(group);
    }
    lay_out(plan, {{"format", "pt"}, {kLayoutKey, layout_name(*options_.layout)}});
    Conversion record = conversion_ ? *conversion_ : recorded();
    record.now = plan.form;
    if (record.before.naming != Naming::tessera) plan.conversion = to_text(record);
    return plan;
  }

 private:
  [[nodiscard]] ExpertForm native() const {
    std::string const type = model_type_of(checkpoint_.path());
    if (auto const form = native_form(type)) return {form->naming, form->layout};
    if (groups_.form().naming != Naming::tessera) return groups_.form();
    throw lm::InputError(fmt::format(
        "{}: model_type \"{}\": which names its experts had is not known without {}; put that file "
        "back",
        (checkpoint_.path() / "config.json").string(), lm::printable(type), kConversionFile));
  }

  // The layer's own rule: an order of gate and up, or their separation, matters to gated activations only.
  void check_order(ExpertGroup const& group) const {
    WeightLayout const& layout = *options_.layout;
    bool const plain =
        layout.order == GateUpOrder::concat && layout.orientation != WeightOrientation::separate;
    if (group.gated || plain) return;
    throw lm::InputError(
        fmt::format("layout {}: the experts of {} have no gate, so there is no order of gate and "
                    "up; take concat or transposed",
                    layout_name(layout), lm::printable(group.prefix, 120)));
  }

  void check_block(ExpertGroup const& group) const {
    WeightLayout const& layout = *options_.layout;
    if (layout.order == GateUpOrder::blocked && group.intermediate % layout.block != 0) {
      throw lm::InputError(fmt::format("layout {}: {} does not divide n = {} of {}",
                                       layout_name(layout), layout.block, group.intermediate,
                                       lm::printable(group.prefix)));
    }
  }

  // The checkpoint as it stands, for the way back.
  [[nodiscard]] Conversion recorded() const {
    Conversion record{{}, groups_.form(), checkpoint_.index_text(), {}};
    for (std::size_t i = 0; i < checkpoint_.file_names().size(); ++i) {
      record.files.push_back({checkpoint_.file_names()[i], checkpoint_.file(i).header_text()});
    }
    return record;
  }

  // Returns where the group's experts stand in the new form. The way back to a recorded form changes no prefix.
  [[nodiscard]] std::string new_prefix(ExpertGroup const& group, ExpertForm const& form) const {
    return conversion_ ? group.prefix : native_prefix(form.naming, group.prefix);
  }

  // All tensors of one layer's experts in the new form: as Hugging Face sorts them, expert by expert.
  [[nodiscard]] std::vector<Output> expert_outputs(ExpertGroup const& group,
                                                   ExpertForm const& form) const {
    bool const per_expert = is_per_expert(form.naming);
    std::vector<Part> const parts = parts_of(form, group);
    std::vector<Output> outputs;
    for (std::int64_t e = 0; e < (per_expert ? group.experts : 1); ++e) {
      for (bool const bias : {false, true}) {
        if (bias && !group.bias) continue;
        for (Part const part : parts) {
          ExpertTensor const tensor{group.prefix, part, bias, per_expert ? e : -1};
          ExpertTensor named = tensor;
          named.prefix = new_prefix(group, form);
          std::string const name = expert_name(form.naming, named);
          if (name.empty()) {
            throw lm::InputError(fmt::format("{} has biases: {} names have no place for them",
                                             lm::printable(group.prefix),
                                             naming_name(form.naming)));
          }
          auto parsed = parse_expert_name(form.naming, name, form.separate());
          bool const whole = parsed && parsed->part == Part::gate_up && !group.gated;
          if (whole)
            parsed->part = Part::up;  // the name of w_up does not say whether gate is in it
          if (parsed != named) {
            throw lm::InputError(fmt::format(
                "experts {}: {} names have no place for them; is config.json of this model?",
                lm::printable(group.prefix, 120), naming_name(form.naming)));
          }
          outputs.push_back({{.name = name,
                              .dtype = group.dtype,
                              .shape = part_shape(group, form.layout, part, bias, !per_expert)},
                             tensor});
        }
      }
    }
    return outputs;
  }

  // The modules around experts whose names change, "layers.0.mlp." -> "layers.0.block_sparse_moe.": what else is in
  // them, the router, moves along.
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> moved_blocks(
      ExpertForm const& form) const {
    std::vector<std::pair<std::string, std::string>> moved;
    for (auto const& [prefix, group] : groups_.groups()) {
      std::string const native = new_prefix(group, form);
      std::string_view const experts = "experts";
      if (native == prefix || !native.ends_with(experts)) continue;
      moved.emplace_back(prefix.substr(0, prefix.size() - experts.size()),
                         native.substr(0, native.size() - experts.size()));
    }
    return moved;
  }

  // Tensors in the order of the source, experts where their first tensor stands; files cut at shard_bytes.
  void lay_out(ConversionPlan& plan, lm::Metadata const& metadata) const {
    std::vector<Output> outputs;
    auto const moved = moved_blocks(plan.form);
    std::set<std::string> done;
    ExpertForm const& now = groups_.form();
    for (StoredTensor const& tensor : checkpoint_.tensors()) {
      auto const parsed = parse_expert_name(now.naming, tensor.entry->name, now.separate());
      if (!parsed) {
        Output copied{*tensor.entry, std::nullopt, tensor.entry->name};
        for (auto const& [from, to] : moved) {
          if (copied.source.starts_with(from)) copied.entry.name.replace(0, from.size(), to);
        }
        outputs.push_back(std::move(copied));
      } else if (done.insert(parsed->prefix).second) {
        auto experts = expert_outputs(groups_.group(parsed->prefix), plan.form);
        std::move(experts.begin(), experts.end(), std::back_inserter(outputs));
      }
    }
    std::set<std::string_view> names;
    for (Output const& output : outputs) {
      if (names.insert(output.entry.name).second) continue;
      throw lm::InputError(fmt::format("tensor {}: two tensors would have this name",
                                       lm::printable(output.entry.name, 120)));
    }
    cut(plan, std::move(outputs));
    for (OutputFile& file : plan.files) {
      std::vector<lm::TensorEntry> entries;
      for (Output const& output : file.tensors) entries.push_back(output.entry);
      file.header = lm::safetensors_header(metadata, entries);
    }
    if (plan.files.size() > 1) plan.index = index_of(plan.files);
  }

  void cut(ConversionPlan& plan, std::vector<Output> outputs) const {
    std::uint64_t end = 0;
    for (Output& output : outputs) {
      std::uint64_t bytes = lm::element_bytes(output.entry.dtype);
      for (std::int64_t const extent : output.entry.shape) {
        bytes *= static_cast<std::uint64_t>(extent);
      }
      bool const full = end > 0 && end + bytes > options_.shard_bytes;
      if (plan.files.empty() || full) {
        plan.files.emplace_back();
        end = 0;
      }
      output.entry.begin = end;
      output.entry.end = end += bytes;
      plan.files.back().tensors.push_back(std::move(output));
    }
    if (plan.files.size() == 1) {
      plan.files.front().name = lm::kModelFile;
      return;
    }
    for (std::size_t i = 0; i < plan.files.size(); ++i) {
      plan.files[i].name =
          fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, plan.files.size());
    }
  }

  [[nodiscard]] static std::string index_of(std::vector<OutputFile> const& files) {
    std::uint64_t total = 0;
    nlohmann::json map = nlohmann::json::object();
    for (OutputFile const& file : files) {
      total += file.tensors.back().entry.end;
      for (Output const& output : file.tensors) map[output.entry.name] = file.name;
    }
    nlohmann::ordered_json const index = {{"metadata", {{"total_size", total}}},
                                          {"weight_map", map}};
    return index.dump(2) + "\n";
  }

  // Files and headers as the conversion file has them. Every tensor of the checkpoint must find its place.
  void restore(ConversionPlan& plan) const {
    plan.index = conversion_->index;
    std::map<std::string, Output> wanted;  // expert tensors by name
    for (auto const& [prefix, group] : groups_.groups()) {
      for (Output& output : expert_outputs(group, plan.form)) {
        std::string const name = output.entry.name;
        wanted.emplace(name, std::move(output));
      }
    }
    std::size_t copied = 0;
    std::set<std::string> seen;
    for (Conversion::File const& file : conversion_->files) {
      OutputFile& made = plan.files.emplace_back(OutputFile{file.name, file.header, {}});
      for (lm::TensorEntry const& entry : header_of(file).tensors) {
        if (!seen.insert(entry.name).second) does_not_fit(entry.name);
        auto const found = wanted.extract(entry.name);
        StoredTensor const* const stored = found ? nullptr : checkpoint_.find(entry.name);
        lm::TensorEntry const* const source = found               ? &found.mapped().entry
                                              : stored != nullptr ? stored->entry
                                                                  : nullptr;
        if (source == nullptr || source->dtype != entry.dtype || source->shape != entry.shape) {
          does_not_fit(entry.name);
        }
        made.tensors.push_back({entry, found ? found.mapped().expert : std::nullopt, entry.name});
        copied += found ? 0 : 1;
      }
    }
    std::size_t others = 0;
    ExpertForm const& now = groups_.form();
    for (StoredTensor const& tensor : checkpoint_.tensors()) {
      others += parse_expert_name(now.naming, tensor.entry->name, now.separate()) ? 0 : 1;
    }
    if (!wanted.empty()) does_not_fit(wanted.begin()->first);
    if (copied != others) does_not_fit(fmt::format("{} instead of {} others", others, copied));
  }

  [[nodiscard]] static lm::SafetensorsHeader header_of(Conversion::File const& file) {
    // The end of the last tensor is not known from the header alone: take what it claims.
    auto const object = lm::parse_json(file.header, file.name);
    std::uint64_t bytes = 0;
    for (auto const& [name, value] : object.items()) {
      if (!value.is_object() || !value.contains("data_offsets")) continue;
      auto const& offsets = value["data_offsets"];
      if (offsets.is_array() && offsets.size() == 2 && offsets[1].is_number_unsigned()) {
        bytes = std::max(bytes, offsets[1].get<std::uint64_t>());
      }
    }
    return lm::parse_safetensors_header(file.header, bytes);
  }

  [[noreturn]] void does_not_fit(std::string const& tensor) const {
    throw lm::InputError(fmt::format(
        "tensor {}: the checkpoint is no longer what {} describes; delete that file to convert "
        "without it",
        lm::printable(tensor, 120), (checkpoint_.path() / kConversionFile).string()));
  }

  CheckpointFolder const& checkpoint_;
  ExpertGroups const& groups_;
  std::optional<Conversion> const& conversion_;
  ConvertOptions const& options_;
};

}  // namespace

ExpertForm source_form(CheckpointFolder const& checkpoint,
                       std::optional<Conversion> const& conversion) {
  auto const& metadata = checkpoint.file(0).metadata();
  if (conversion) {
    ExpertForm const& now = conversion->now;
    auto const layout = metadata.find(kLayoutKey);
    bool const agree = layout == metadata.end() ||
                       (now.naming == Naming::tessera && layout->second == layout_name(now.layout));
    if (agree) return now;
    throw lm::InputError(
        fmt::format("{}: {} is \"{}\" in its metadata, {} says otherwise; delete that file to "
                    "convert without it",
                    (checkpoint.path() / checkpoint.file_names()[0]).string(), kLayoutKey,
                    lm::printable(layout->second), kConversionFile));
  }
  if (auto const layout = metadata.find(kLayoutKey); layout != metadata.end()) {
    if (auto const known = layout_named(layout->second)) return {Naming::tessera, *known};
    throw lm::InputError(fmt::format("{}: {} \"{}\" in its metadata is no layout",
                                     (checkpoint.path() / checkpoint.file_names()[0]).string(),
                                     kLayoutKey, lm::printable(layout->second)));
  }
  return form_by_names(checkpoint);
}

ConversionPlan plan_conversion(CheckpointFolder const& checkpoint, ExpertGroups const& groups,
                               std::optional<Conversion> const& conversion,
                               ConvertOptions const& options) {
  return Planner(checkpoint, groups, conversion, options).plan();
}

}  // namespace tessera::huggingface

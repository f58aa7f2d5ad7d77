// SPDX-License-Identifier: Apache-2.0
#include "huggingface/expert_groups.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "lm/error.hpp"
#include "lm/json.hpp"
#include "lm/text.hpp"

namespace tessera::huggingface {

namespace {

[[noreturn]] void refuse(std::string const& name, std::string const& why) {
  throw lm::InputError(fmt::format("tensor {}: {}", lm::printable(name, 120), why));
}

}  // namespace

std::vector<Part> parts_of(ExpertForm const& form, ExpertGroup const& group) {
  if (!group.gated) return {Part::up, Part::down};
  if (form.separate()) return {Part::gate, Part::up, Part::down};
  return {Part::gate_up, Part::down};
}

std::vector<std::int64_t> part_shape(ExpertGroup const& group, WeightLayout const& layout,
                                     Part part, bool bias, bool stacked) {
  std::int64_t const n = group.intermediate, d = group.hidden;
  std::int64_t const rows = part == Part::down ? d : part == Part::gate_up ? 2 * n : n;
  std::vector<std::int64_t> shape;
  if (stacked) shape.push_back(group.experts);
  shape.push_back(rows);
  if (!bias) {
    shape.push_back(part == Part::down ? n : d);
    if (layout.orientation == WeightOrientation::transposed) {
      std::swap(shape[shape.size() - 2], shape[shape.size() - 1]);
    }
  }
  return shape;
}

ExpertGroups::ExpertGroups(CheckpointFolder& checkpoint, ExpertForm const& form)
    : checkpoint_(checkpoint), form_(form) {
  for (StoredTensor const& tensor : checkpoint.tensors()) {
    auto const parsed = parse_expert_name(form.naming, tensor.entry->name, form.separate());
    if (!parsed) continue;
    ExpertGroup& group = groups_[parsed->prefix];
    group.prefix = parsed->prefix;
    group.tensors.emplace(ExpertGroup::Key{parsed->part, parsed->bias, parsed->expert}, tensor);
    if (is_per_expert(form.naming)) group.experts = std::max(group.experts, parsed->expert + 1);
    group.bias = group.bias || parsed->bias;
  }
  for (auto& [prefix, group] : groups_) check(group);
  if (!groups_.empty()) refuse_leftovers();
}

// Tensors of experts in another form would be copied as they are, beside or against those that are converted.
void ExpertGroups::refuse_leftovers() const {
  for (StoredTensor const& tensor : checkpoint_.tensors()) {
    std::string const& name = tensor.entry->name;
    if (parse_expert_name(form_.naming, name, form_.separate())) continue;
    // JetMoE's attention chooses among projections that it calls experts: they stay as they are.
    bool const of_attention = name.find("self_attention.experts.") != std::string::npos;
    bool const of_experts =
        name.starts_with("experts.") || name.find(".experts.") != std::string::npos;
    bool const among_experts = (of_experts && !of_attention) ||
                               parse_expert_name(Naming::stacked_linear, name, false) ||
                               parse_expert_name(Naming::stacked_linear_mlp, name, false);
    if (among_experts) {
      refuse(name, fmt::format("is among the experts, whose names are {} otherwise; convert takes "
                               "checkpoints of one form",
                               naming_name(form_.naming)));
    }
  }
}

ExpertGroup const& ExpertGroups::group(std::string const& prefix) const {
  auto const found = groups_.find(prefix);
  if (found == groups_.end()) {
    throw lm::InputError(
        fmt::format("experts {}: not in the checkpoint", lm::printable(prefix, 120)));
  }
  return found->second;
}

// Sizes come from the first down tensor; everything else has to agree with it.
void ExpertGroups::check(ExpertGroup& group) const {
  bool const per_expert = is_per_expert(form_.naming);
  auto const down = group.tensors.lower_bound({Part::down, false, -1});
  bool const has_down = down != group.tensors.end() && std::get<0>(down->first) == Part::down &&
                        !std::get<1>(down->first);
  if (!has_down) refuse(group.prefix, "has no down projection; is a shard missing?");
  std::vector<std::int64_t> shape = down->second.entry->shape;
  std::size_t const rank = per_expert ? 2 : 3;
  if (shape.size() != rank || std::count(shape.begin(), shape.end(), 0) > 0) {
    refuse(down->second.entry->name, fmt::format("shape [{}]: must have {} dimensions, none empty",
                                                 lm::joined(shape, ", "), rank));
  }
  if (!per_expert) group.experts = shape.front();
  if (form_.layout.orientation == WeightOrientation::transposed) {
    std::swap(shape[rank - 2], shape[rank - 1]);
  }
  group.hidden = shape[rank - 2];
  group.intermediate = shape[rank - 1];
  group.dtype = down->second.entry->dtype;
  if (form_.layout.order == GateUpOrder::blocked && group.intermediate % form_.layout.block != 0) {
    refuse(down->second.entry->name, fmt::format("n = {}: blocks of {} must divide it",
                                                 group.intermediate, form_.layout.block));
  }

  find_gate(group);
  std::size_t expected = 0;
  for (Part const part : parts_of(form_, group)) {
    for (bool const bias : {false, true}) {
      if (bias && !group.bias) continue;
      auto const wanted = part_shape(group, form_.layout, part, bias, !per_expert);
      for (std::int64_t e = 0; e < (per_expert ? group.experts : 1); ++e) {
        std::int64_t const expert = per_expert ? e : -1;
        auto const found = group.tensors.find({part, bias, expert});
        ExpertTensor const tensor{group.prefix, part, bias, expert};
        if (found == group.tensors.end()) {
          refuse(expert_name(form_.naming, tensor), "is missing; is a shard missing?");
        }
        lm::TensorEntry const& entry = *found->second.entry;
        if (entry.shape != wanted || entry.dtype != group.dtype) {
          refuse(entry.name, fmt::format("{} [{}] does not fit {} [{}], as {} has it", entry.dtype,
                                         lm::joined(entry.shape, ", "), group.dtype,
                                         lm::joined(wanted, ", "), down->second.entry->name));
        }
        ++expected;
      }
    }
  }
  if (expected != group.tensors.size()) {
    refuse(group.prefix,
           fmt::format("has {} tensors instead of {}", group.tensors.size(), expected));
  }
}

// Experts without a gate have up alone: by its name, or by n rows where Tessera's w_up of a gated layer has 2n.
void ExpertGroups::find_gate(ExpertGroup& group) const {
  auto const has = [&](Part part) {
    return std::any_of(group.tensors.begin(), group.tensors.end(),
                       [part](auto const& tensor) { return std::get<0>(tensor.first) == part; });
  };
  bool const by_name = has(Part::up) && !has(Part::gate) && !has(Part::gate_up);
  if (by_name) group.gated = false;
  auto const up = group.tensors.find({Part::gate_up, false, -1});
  if (form_.naming != Naming::tessera || up == group.tensors.end()) return;
  ExpertGroup alone = group;
  alone.gated = false;
  if (up->second.entry->shape != part_shape(alone, form_.layout, Part::up, false, true)) return;
  group.gated = false;
  for (bool const bias : {false, true}) {
    auto tensor = group.tensors.extract({Part::gate_up, bias, -1});
    if (!tensor) continue;
    std::get<0>(tensor.key()) = Part::up;
    group.tensors.insert(std::move(tensor));
  }
}

// The stored bytes of `part` of one expert.
void ExpertGroups::load(ExpertGroup const& group, Part part, bool bias, std::int64_t expert,
                        std::vector<std::byte>& block) {
  bool const per_expert = is_per_expert(form_.naming);
  StoredTensor const& tensor = group.tensors.at({part, bias, per_expert ? expert : -1});
  std::uint64_t const bytes = tensor.entry->end - tensor.entry->begin;
  std::uint64_t const one = per_expert ? bytes : bytes / static_cast<std::uint64_t>(group.experts);
  block.resize(one);
  checkpoint_.read(tensor, per_expert ? 0 : static_cast<std::uint64_t>(expert) * one, block);
}

void ExpertGroups::load_gate_up(ExpertGroup const& group, bool bias, std::int64_t expert) {
  std::tuple const wanted{&group, bias, expert};
  if (unpacked_ == wanted) return;
  unpacked_ = {nullptr, false, -1};
  load(group, Part::gate_up, bias, expert, block_);
  WeightLayout layout = form_.layout;
  if (bias) layout.orientation = WeightOrientation::rows;  // one column either way
  BlockShape const shape{group.intermediate, bias ? 1 : group.hidden,
                         lm::element_bytes(group.dtype)};
  gate_.resize(shape.matrix_bytes());
  up_.resize(shape.matrix_bytes());
  unpack_gate_up(shape, layout, block_, gate_, up_);
  unpacked_ = wanted;
}

ConstBytes ExpertGroups::matrix(ExpertGroup const& group, Part part, bool bias,
                                std::int64_t expert) {
  if (part != Part::down && group.gated && !form_.separate()) {
    load_gate_up(group, bias, expert);
    return part == Part::gate ? gate_ : up_;
  }
  bool const transposed = form_.layout.orientation == WeightOrientation::transposed && !bias;
  load(group, part, bias, expert, transposed ? block_ : matrix_);
  if (transposed) {
    matrix_.resize(block_.size());
    bool const down = part == Part::down;
    transpose(down ? group.intermediate : group.hidden, down ? group.hidden : group.intermediate,
              lm::element_bytes(group.dtype), block_, matrix_);
  }
  return matrix_;
}

}  // namespace tessera::huggingface

// SPDX-License-Identifier: Apache-2.0
// The expert weights of a checkpoint, layer by layer, whatever their names and layout.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "huggingface/checkpoint_folder.hpp"
#include "huggingface/expert_names.hpp"
#include "huggingface/weight_blocks.hpp"
#include "tessera/shape.hpp"

namespace tessera::huggingface {

/// Names and layout together.
struct ExpertForm {
  Naming naming = Naming::tessera;
  WeightLayout layout = {};
  [[nodiscard]] bool separate() const noexcept {
    return layout.orientation == WeightOrientation::separate;
  }
};

/// The experts of one layer.
struct ExpertGroup {
  using Key = std::tuple<Part, bool, std::int64_t>;  // part, bias, expert or -1

  std::string prefix;
  std::int64_t experts = 0;
  std::int64_t intermediate = 0, hidden = 0;
  std::string dtype;
  bool bias = false;
  bool gated = true;  ///< else no gate: up is [n,d] alone
  std::map<Key, StoredTensor> tensors;
};

class ExpertGroups {
 public:
  /// Finds and checks all groups: every expert whole, shapes and types agreeing. Throws lm::InputError naming
  /// the tensor, also where there is none. Holds `checkpoint` by reference.
  ExpertGroups(CheckpointFolder& checkpoint, ExpertForm const& form);

  [[nodiscard]] ExpertForm const& form() const noexcept { return form_; }
  [[nodiscard]] std::map<std::string, ExpertGroup> const& groups() const noexcept {
    return groups_;
  }
  [[nodiscard]] ExpertGroup const& group(std::string const& prefix) const;

  /// The logical matrix of one expert: gate or up [n,d], down [d,n]; biases [n] and [d]. Valid until the next
  /// call.
  ConstBytes matrix(ExpertGroup const& group, Part part, bool bias, std::int64_t expert);

 private:
  void check(ExpertGroup& group) const;
  void find_gate(ExpertGroup& group) const;
  void refuse_leftovers() const;
  [[nodiscard]] std::vector<std::int64_t> stored_shape(ExpertGroup const& group, Part part,
                                                       bool bias) const;
  void load(ExpertGroup const& group, Part part, bool bias, std::int64_t expert,
            std::vector<std::byte>& block);
  void load_gate_up(ExpertGroup const& group, bool bias, std::int64_t expert);

  CheckpointFolder& checkpoint_;
  ExpertForm form_;
  std::map<std::string, ExpertGroup> groups_;
  std::vector<std::byte> block_, matrix_, gate_, up_;
  std::tuple<ExpertGroup const*, bool, std::int64_t> unpacked_{nullptr, false,
                                                               -1};  // in gate_, up_
};

/// Returns what `form` has for every expert of `group`, or for all of them at once.
std::vector<Part> parts_of(ExpertForm const& form, ExpertGroup const& group);

/// The shape of the tensor that holds `part` of one expert, or of all where `stacked`.
std::vector<std::int64_t> part_shape(ExpertGroup const& group, WeightLayout const& layout,
                                     Part part, bool bias, bool stacked);

}  // namespace tessera::huggingface

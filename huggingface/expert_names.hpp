// SPDX-License-Identifier: Apache-2.0
// Names of expert weights in checkpoints: one table of naming schemes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/shape.hpp"

namespace tessera::huggingface {

/// Says what a tensor holds of an expert. gate_up: both, in the order of a WeightLayout; up alone where there is no
/// gate.
enum class Part { gate, up, gate_up, down };

/// A naming scheme.
enum class Naming {
  tessera,     ///< <prefix>.w_up, .w_gate, .w_down, .b_up, .b_gate, .b_down: all experts stacked
  per_expert,  ///< <prefix>.<e>.gate_proj.weight, up_proj, down_proj: Qwen, OLMoE, DeepSeek, GLM-4
  per_expert_w123,  ///< <prefix>.<e>.w1.weight gate, w3 up, w2 down: Mixtral
  stacked,  ///< <prefix>.gate_up_proj or .up_proj, .down_proj, _bias: gpt-oss, transformers 5
  stacked_linear,      ///< <prefix>.input_linear.weight, .output_linear.weight: Granite
  stacked_linear_mlp,  ///< the same in a module "mlp": JetMoE
  stacked_fc,          ///< <prefix>.fc1.weight gate and up, fc2 down: Aria
};

/// The name in conversion files: "per-expert".
char const* naming_name(Naming naming) noexcept;
std::optional<Naming> naming_named(std::string_view name) noexcept;

/// Returns how Hugging Face names the experts' tensors, for messages: "experts.<e>.gate_proj.weight, ...".
char const* known_spellings() noexcept;

/// The layout of a Hugging Face naming whose layout does not depend on the model; separate stands for one tensor
/// per matrix, experts without a gate included.
WeightLayout hugging_face_layout(Naming naming) noexcept;

/// True if each expert has tensors of its own.
bool is_per_expert(Naming naming) noexcept;

struct ExpertTensor {
  std::string prefix;  ///< "model.layers.3.mlp.experts"
  Part part = Part::down;
  bool bias = false;
  std::int64_t expert = -1;  ///< -1: all, stacked
  bool operator==(ExpertTensor const&) const = default;
};

/// Returns what `name` means under `naming`; nothing if it names no expert weight. `separate`: gate and up of the
/// tessera scheme are apart.
std::optional<ExpertTensor> parse_expert_name(Naming naming, std::string_view name, bool separate);

/// The inverse.
std::string expert_name(Naming naming, ExpertTensor const& tensor);

/// Says how Hugging Face's checkpoints of a model type name and lay out their experts.
struct NativeForm {
  Naming naming;
  WeightLayout layout;  ///< per-expert namings: separate
  bool gated = true;    ///< else its experts have up and down alone
};
std::optional<NativeForm> native_form(std::string_view model_type) noexcept;

/// The model types that native_form knows.
std::vector<std::string_view> native_model_types();

/// Returns where the experts of `prefix` stand under a Hugging Face naming: transformers 5 calls the modules of Granite
/// and Mixtral otherwise than their checkpoints do.
std::string native_prefix(Naming naming, std::string_view prefix);

}  // namespace tessera::huggingface

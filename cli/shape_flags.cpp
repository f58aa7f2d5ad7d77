// SPDX-License-Identifier: Apache-2.0
#include "cli/shape_flags.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "cli/commands.hpp"
#include "cli/output.hpp"
#include "cli/routing_file.hpp"
#include "tessera/moe.hpp"
#include "tessera/names.hpp"
#include "tessera/router.hpp"
#include "verify/names.hpp"

namespace tessera::cli {
namespace {

double number(char const* flag, std::string const& text) {
  double value = 0;
  auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !std::isfinite(value)) {
    throw CommandError(fmt::format("--{}: '{}' is not a number", flag, text));
  }
  return value;
}

/// "name" or "name:value".
struct NameAndValue {
  std::string name, value;
};
NameAndValue split(std::string const& text) {
  auto const colon = text.find(':');
  if (colon == std::string::npos) return {text, ""};
  return {text.substr(0, colon), text.substr(colon + 1)};
}

verify::RoutingSpec read_pattern(std::string const& text) {
  auto const [name, value] = split(text);
  verify::RoutingSpec routing;
  routing.pattern = named("routing", name, verify::kPatternNames);
  bool const takes_value = verify::has_popularities(routing.pattern) ||
                           routing.pattern == verify::RoutingPattern::empty ||
                           routing.pattern == verify::RoutingPattern::file;
  if (takes_value == value.empty()) {
    throw CommandError(fmt::format(
        "--routing {}: zipf:S, shuffled-zipf:S, empty:FRACTION and file:PATH take a value, the "
        "others none",
        text));
  }
  if (routing.pattern == verify::RoutingPattern::file) {
    routing.path = value;
    return routing;
  }
  if (takes_value) routing.parameter = number("routing", value);
  bool const fraction = routing.pattern == verify::RoutingPattern::empty;
  if (routing.parameter < 0 || routing.parameter > (fraction ? 1 : 100)) {
    throw CommandError(fmt::format("--routing {}: {}", text,
                                   fraction ? "a fraction is in [0, 1]" : "S is in [0, 100]"));
  }
  return routing;
}

}  // namespace

void refuse_flags(CLI::App const& command, std::span<std::string_view const> names,
                  std::string const& reason) {
  for (std::string_view const name : names) {
    if (command.get_option(std::string(name))->count() == 0) continue;
    throw CommandError(
        fmt::format("{} with {}: {}; leave it out", name, command.get_name(), reason));
  }
}

WeightLayout read_layout(std::string const& text) {
  if (auto const layout = layout_named(text)) return *layout;
  throw CommandError(
      fmt::format("--layout {}: not known; choose one of: {}; blocked layouts, and only they, name "
                  "their block, as in blocked:32",
                  text, names_text(kLayoutNames)));
}

void resolve_precision(Context const& context, MoeDesc& desc) {
  if (desc.precision != Precision::automatic) return;
  MoeDesc asked = desc;
  if (!asked.rounds_tokens())
    asked.router.tile = Router().tile;  // in a plan it is that of waste too
  desc.precision = value_of(chosen_precision(context, asked));
  print_note(fmt::format("note: --precision auto takes {} here; explain says why\n",
                         name_of(kPrecisionNames, desc.precision)));
}

void ShapeFlags::add_to(CLI::App& command) {
  auto* const shape = command.add_option_group("Shape");
  shape->add_option("--tokens", tokens_, "T (default 512)")->type_name("T");
  shape->add_option("--hidden", hidden_, "d (default 128)")->type_name("d");
  shape->add_option("--intermediate", intermediate_, "n per expert (default 64)")->type_name("n");
  shape->add_option("--experts", experts_, "E (default 16)")->type_name("E");
  shape->add_option("--top-k", top_k_, "experts per token (default 2)")->type_name("K");
  shape
      ->add_option("--activation", activation_,
                   "swiglu geglu geglu-erf reglu clamped-swiglu relu relu2 silu gelu gelu-erf")
      ->capture_default_str();
  shape->add_option("--alpha", activation_options_.alpha, "of clamped-swiglu")
      ->capture_default_str();
  shape->add_option("--limit", activation_options_.limit, "of clamped-swiglu")
      ->capture_default_str();
  shape->add_option("--up-offset", activation_options_.up_offset, "of clamped-swiglu")
      ->capture_default_str();
  shape->add_option("--layout", layout_,
                    "concat interleaved up-first transposed separate blocked:B, "
                    "transposed-interleaved transposed-up-first transposed-blocked:B "
                    "(default concat; bench --config gpt-oss-20b: transposed-interleaved)");
  shape->add_flag("--bias", bias_, "biases of both projections");
  shape->add_option("--dtype", dtype_, "storage type: fp32 bf16 (default fp32, on a GPU bf16)");
  shape->add_option("--router-dtype", router_dtype_,
                    "storage type of the router: fp32 bf16 (default: as --dtype)");
  shape
      ->add_option("--precision", precision_,
                   "native fp8 mxfp8 auto: whether operands of bf16 layers are quantised; auto: "
                   "fp8 where --device is expected to be faster with it")
      ->capture_default_str();
  shape->add_option("--scales", scales_, "of --precision fp8: fp32 pow2 (default fp32)");

  auto* const routing = command.add_option_group("Routing");
  routing->add_option("--router", router_,
                      "topk-softmax softmax-topk softmax-topk-renorm sigmoid-bias group-limited "
                      "sqrtsoftplus expert-choice given (default topk-softmax; given with file:)");
  routing
      ->add_option("--routing", routing_,
                   "what the data's routing looks like: random balanced zipf:S "
                   "shuffled-zipf:S one-expert one-token-each empty:FRACTION file:PATH")
      ->capture_default_str();
  routing->add_option("--round", round_, "token rounding: none nr-f sr-f nr-s balance-f up down")
      ->capture_default_str();
  routing->add_option("--tile", tile_, "M of token rounding")->capture_default_str();
  routing->add_option("--step", step_, "of the stochastic roundings")->capture_default_str();
  routing->add_option("--layer", layer_, "of the stochastic roundings")->capture_default_str();
  routing->add_option("--capacity", capacity_,
                      "of expert-choice: tokens per expert (default: tokens*top-k/experts)");
  routing->add_flag("--replay", replay_, "given ids, scored by the router");
  routing->add_flag("--aux-dlogits", aux_dlogits_, "another loss of the logits adds its gradient");
  routing->add_option("--groups", groups_, "of group-limited (default: from experts)");
  routing->add_option("--top-groups", top_groups_, "of group-limited (default: from top-k)");
  routing->add_option("--route-scale", route_scale_, "every score is multiplied by it")
      ->capture_default_str();
  routing->add_flag("--normalize-scores", normalize_scores_,
                    "for softmax-topk, sigmoid-bias, sqrtsoftplus and group-limited");
  routing->add_flag("--router-bias", router_bias_, "a bias on the router's logits");
  routing->add_option("--sentinels", sentinels_, "fraction of given ids outside [0, E)");
  routing->add_option("--padding", padding_, "fraction of the tokens that a mask leaves out");
  routing->add_flag("--repeat-experts", repeat_experts_, "given ids may repeat within a token");
  routing->add_flag("--variable-experts", variable_experts_, "given ids: counts vary by token");
  routing->add_option("--ids-dtype", ids_dtype_, "of given ids: int32 int64")
      ->capture_default_str();

  auto* const run = command.add_option_group("Run");
  run->add_option("--device", device_, "cpu, cuda or cuda:N")->capture_default_str();
  run->add_flag(
      "--unproven-kernels", unproven_kernels_,
      "take a GPU whose kernels have been emulated and never run on hardware (10.0: B200)");
  run->add_option("--threads", threads_, "CPU threads (default: all the process may use)");
  run->add_option("--save", save_, "what forward saves: h, or x (h is recomputed)")
      ->capture_default_str();
  run->add_option("--column-chunk", column_chunk_,
                  "columns of hidden whose y or dx rows exist at a time (default: all)");
  run->add_flag("--accumulate", accumulate_, "weight gradients add to their buffers");
  run->add_option("--seed", seed_, "of the data")->capture_default_str();
}

void ShapeFlags::refuse_data(CLI::App const& command) const {
  std::string const reason = "it is of the data of a run, and this command runs no layer";
  refuse_flags(command, kDataFlags, reason);
  constexpr std::string_view kRouting[] = {"--routing"};
  if (!routing_.starts_with("file:")) refuse_flags(command, kRouting, reason);
}

bool ShapeFlags::any_shape() const noexcept {
  return tokens_ || hidden_ || intermediate_ || experts_ || top_k_;
}

verify::LayerCase ShapeFlags::layer_case() const {
  verify::LayerCase out;
  MoeDesc& desc = out.desc;
  desc.shape.tokens = tokens_.value_or(512);
  desc.shape.hidden = hidden_.value_or(128);
  desc.shape.intermediate = intermediate_.value_or(64);
  desc.shape.experts = experts_.value_or(16);
  desc.shape.top_k = top_k_.value_or(2);
  desc.shape.variable_experts = variable_experts_;
  desc.dtype = named("dtype",
                     !dtype_.empty() ? dtype_
                     : on_cuda()     ? "bf16"
                                     : "fp32",
                     verify::kDTypeNames);
  if (!router_dtype_.empty()) {
    desc.router_dtype = named("router-dtype", router_dtype_, verify::kDTypeNames);
  }
  read_precision(desc);
  desc.activation = activation_options_;
  desc.activation.kind = named("activation", activation_, verify::kActivationNames);
  if (has_layout()) desc.layout = read_layout(layout_);
  desc.bias = bias_;
  desc.router.round = named("round", round_, verify::kRoundingNames);
  desc.router.tile = tile_;
  desc.router.groups = groups_;
  desc.router.top_groups = top_groups_;
  desc.router.route_scale = route_scale_;
  desc.router.normalize_scores = normalize_scores_;
  if (draws(desc.router)) desc.router.seed = seed_;
  desc.router.step = step_;
  desc.router.layer = layer_;
  desc.router.capacity = capacity_;
  desc.router.replay = replay_;
  desc.ids_dtype = named("ids-dtype", ids_dtype_, verify::kIdsDTypeNames);
  desc.column_chunk = column_chunk_;
  desc.save = named("save", save_, verify::kSaveNames);
  if (!(sentinels_ >= 0 && sentinels_ <= 1)) {
    throw CommandError(fmt::format("--sentinels {}: a fraction is in [0, 1]", sentinels_));
  }
  out.sentinel_fraction = sentinels_;
  if (!(padding_ >= 0 && padding_ <= 1)) {
    throw CommandError(fmt::format("--padding {}: a fraction is in [0, 1]", padding_));
  }
  out.padding_fraction = padding_;
  out.repeat_experts = repeat_experts_;
  out.router_bias = router_bias_;
  out.aux_dlogits = aux_dlogits_;
  out.gradient_mode = accumulate_ ? GradientMode::accumulate : GradientMode::write;
  out.seed = seed_;
  read_routing(out);
  return out;
}

verify::LayerCase ShapeFlags::layer_case(Context const& context) const {
  verify::LayerCase out = layer_case();
  resolve_precision(context, out.desc);
  return out;
}

void ShapeFlags::read_precision(MoeDesc& desc) const {
  desc.precision = named("precision", precision_, kPrecisionNames);
  if (scales_.empty()) return;
  if (desc.precision != Precision::fp8) {
    throw CommandError(fmt::format(
        "--scales {} with --precision {}: only fp8 has a choice of scales; leave it out", scales_,
        precision_));
  }
  if (scales_ == "rceil") {
    throw CommandError("--scales rceil: of mxfp8, which has no other; choose one of: fp32 pow2");
  }
  desc.pow2_scales = named("scales", scales_, verify::kScaleNames) == ScaleRule::pow2;
}

std::optional<Precision> ShapeFlags::quantised_cases() const {
  auto const precision = named("precision", precision_, kPrecisionNames);
  if (precision == Precision::native) return std::nullopt;
  if (precision != Precision::automatic) return precision;
  throw CommandError(
      "--precision auto with --random: cases are drawn as fp8, mxfp8 or native; choose one");
}

void ShapeFlags::read_routing(verify::LayerCase& layer_case) const {
  layer_case.routing = read_pattern(routing_);
  bool const file = layer_case.routing.pattern == verify::RoutingPattern::file;
  std::string const router = !router_.empty() ? router_ : file ? "given" : "topk-softmax";
  MoeDesc& desc = layer_case.desc;
  desc.router.kind = named("router", router, verify::kRouterNames);
  if (!file) return;
  RoutingTable table = read_routing_file(layer_case.routing.path);
  if ((tokens_ && *tokens_ != table.tokens) || (top_k_ && *top_k_ != table.top_k)) {
    throw CommandError(fmt::format(
        "--routing {}: the file has {} tokens with top_k {}; leave out --tokens and --top-k",
        routing_, table.tokens, table.top_k));
  }
  desc.shape.tokens = table.tokens;
  desc.shape.top_k = table.top_k;
  desc.shape.variable_experts = table.variable_experts;
  layer_case.routing.topk_ids = std::move(table.topk_ids);
  layer_case.routing.topk_weights = std::move(table.topk_weights);
  layer_case.routing.token_offsets = std::move(table.token_offsets);
}

std::int32_t ShapeFlags::device_index() const {
  std::string_view const text = device_;
  std::int32_t index = -1;
  if (text.starts_with("cuda:")) {
    auto const [end, error] = std::from_chars(text.data() + 5, text.data() + text.size(), index);
    if (error != std::errc() || end != text.data() + text.size()) index = -1;
  }
  if (index < 0) throw CommandError(fmt::format("--device {}: a GPU is cuda or cuda:N", device_));
  return index;
}

Context ShapeFlags::context() const { return context(threads_); }

Context ShapeFlags::context(std::int32_t num_threads) const {
  ContextOptions options;
  if (on_cuda()) {
    options.device.kind = DeviceKind::cuda;
    if (device_ != "cuda") options.device.index = device_index();
  } else if (device_ != "cpu") {
    throw CommandError(fmt::format("--device {}: not known; choose cpu, cuda or cuda:N", device_));
  }
  options.num_threads = num_threads;
  options.unproven_kernels = unproven_kernels_;
  return value_of(Context::create(options));
}

}  // namespace tessera::cli

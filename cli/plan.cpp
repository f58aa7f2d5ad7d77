// SPDX-License-Identifier: Apache-2.0
// tessera plan: what a layer, or a whole published model, costs: parameters, FLOPs, memory, tile waste; and what
// training it on a cluster will.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <optional>
#include <string_view>

#include "cli/commands.hpp"
#include "cli/lm_command.hpp"
#include "cli/output.hpp"
#include "cli/plan_cluster.hpp"
#include "cli/plan_layer.hpp"
#include "cli/plan_plot.hpp"
#include "cli/shape_flags.hpp"
#include "huggingface/model.hpp"
#include "lm/text.hpp"
#include "tessera/moe.hpp"
#include "tessera/names.hpp"
#include "tessera/work.hpp"

namespace tessera::cli {
namespace {

using huggingface::Model;

constexpr std::int64_t kModelTokens = 32768;  // where --hf is given without --tokens

struct Flags {
  ShapeFlags shape;
  ClusterFlags cluster;
  std::string hf, plot;
  bool json = false;
};

struct Subject {
  MoeDesc desc;
  std::optional<Model> model;
};

// These flags are read beside config.json.
constexpr std::string_view kReadWithModel[] = {
    "--tokens", "--dtype", "--router-dtype", "--precision", "--scales", "--tile", "--round"};

void refuse_ignored(CLI::App const& command) {
  for (CLI::App const* group : command.get_subcommands([](CLI::App const*) { return true; })) {
    if (group->get_group() == kClusterGroup) continue;
    for (CLI::Option const* option : group->get_options()) {
      std::string const name = option->get_name();
      bool const read = std::find(std::begin(kReadWithModel), std::end(kReadWithModel), name) !=
                        std::end(kReadWithModel);
      if (read || option->count() == 0) continue;
      throw CommandError(fmt::format(
          "{} with --hf: config.json fixes the layer, apart from --tokens, --dtype, "
          "--router-dtype, --precision, --scales, --round and --tile; leave out one of them",
          name));
    }
  }
}

// The layer of --hf, with the tokens, dtypes, tile and rounding of the flags.
Subject model_subject(Flags const& flags, CLI::App const& command) {
  refuse_ignored(command);
  Subject subject;
  subject.model = huggingface::load_model_config(flags.hf);
  MoeDesc const given = flags.shape.layer_case().desc;
  subject.desc = subject.model->moe;
  subject.desc.shape.tokens =
      command.get_option("--tokens")->count() > 0 ? given.shape.tokens : kModelTokens;
  if (command.get_option("--dtype")->count() > 0) subject.desc.dtype = given.dtype;
  if (subject.desc.router.kind != RouterKind::given) {
    subject.desc.router_dtype = given.router_dtype;
  }
  subject.desc.precision = given.precision;
  subject.desc.pow2_scales = given.pow2_scales;
  subject.desc.router.tile = given.router.tile;
  subject.desc.router.round = given.router.round;
  return subject;
}

Subject read_subject(Flags const& flags, CLI::App const& command) {
  Subject subject;
  if (flags.hf.empty()) {
    flags.shape.refuse_data(command);
    constexpr std::string_view kThreads[] = {"--threads"};
    refuse_flags(command, kThreads, "a plan does not depend on it");
    subject.desc = flags.shape.layer_case().desc;
  } else {
    subject = model_subject(flags, command);
  }
  if (subject.desc.router.tile < 1) {
    throw CommandError(
        fmt::format("--tile {}: a tile has at least one row", subject.desc.router.tile));
  }
  if (subject.desc.precision == Precision::automatic) {
    resolve_precision(flags.shape.context(), subject.desc);
  }
  saved_by_layer(subject.desc);  // every rule of the library for a layer
  return subject;
}

double tile_waste(MoeDesc const& desc, std::int64_t tokens) {
  // Rounding makes every M_e a multiple of the tile.
  if (desc.rounds_tokens()) return 0;
  if (desc.experts_choose())
    return expected_tile_waste(desc.expert_capacity(), 1, 1, desc.router.tile);
  return expected_tile_waste(tokens, desc.shape.experts, desc.shape.top_k, desc.router.tile);
}

// Whole numbers without a fraction.
Json whole(double value) { return static_cast<std::int64_t>(value); }

Json memory_json(MoeDesc const& desc) {
  Json list = Json::array();
  auto const known = [](std::optional<double> const& bytes) {
    return bytes ? whole(*bytes) : Json();
  };
  auto const plans = memory_plans(desc);
  for (MemoryPlan const& plan : plans) {
    auto const layers = layers_for_lower_peak(plan, plans.front());
    list.push_back({{"policy", plan.policy},
                    {"keeps", plan.keeps},
                    {"saved_bytes", whole(plan.saved)},
                    {"forward_transient_bytes", known(plan.forward_transient)},
                    {"backward_transient_bytes", known(plan.backward_transient)},
                    {"lower_peak_from_layers", layers ? Json(*layers) : Json()}});
  }
  return list;
}

Json layer_json(MoeDesc const& desc) {
  MoeShape const& s = desc.shape;
  double const rows = routed_rows(desc);
  SavedBytes const saved = saved_by_layer(desc);
  Json waste = Json::array();
  for (std::int64_t tokens = 512; tokens <= 131072; tokens *= 4) {
    waste.push_back({{"tokens", tokens}, {"waste", tile_waste(desc, tokens)}});
  }
  return {{"shape", shape_json(s)},
          {"dtype", name_of(kDTypeNames, desc.dtype)},
          {"precision", name_of(kPrecisionNames, desc.precision)},
          {"activation", name_of(kActivationNames, desc.activation.kind)},
          {"layout", layout_name(desc.layout)},
          {"bias", desc.bias},
          {"router", name_of(kRouterNames, desc.router.kind)},
          {"round", name_of(kRoundingNames, desc.router.round)},
          {"expert_parameters", whole(expert_parameters(desc))},
          {"router_parameters", s.hidden * s.experts},
          {"flops",
           {{"forward", work::forward_flops(desc, rows)},
            {"backward", work::backward_flops(desc, rows)},
            {"router_forward", work::route(desc).flops}}},
          {"saved_bytes", saved_json(desc, saved)},
          {"memory", memory_json(desc)},
          {"granularity", static_cast<double>(s.hidden) / static_cast<double>(s.intermediate)},
          {"rows_per_expert", rows / static_cast<double>(s.experts)},
          {"arithmetic_intensity",
           {{"gemms", arithmetic_intensity(desc)}, {"layer", layer_arithmetic_intensity(desc)}}},
          {"tile",
           {{"rows", desc.router.tile},
            {"waste", tile_waste(desc, s.tokens)},
            {"waste_against_tokens", waste}}}};
}

Json model_json(Model const& model, MoeDesc const& desc) {
  huggingface::Parameters const& p = model.parameters;
  auto const moe_layers = static_cast<double>(model.moe_layers.size());
  double const forward = static_cast<double>(desc.shape.tokens) * model.forward_flops_per_token();
  Json memory = Json::array();
  for (MemoryPlan const& plan : memory_plans(desc)) {
    memory.push_back({{"policy", plan.policy}, {"saved_bytes", whole(moe_layers * plan.saved)}});
  }
  return {{"model_type", model.model_type},
          {"layers", model.layers},
          {"moe_layers", model.moe_layers.size()},
          {"vocabulary", model.vocabulary},
          {"shared_intermediate", model.shared_intermediate},
          {"parameters",
           {{"total", p.total()},
            {"active", model.active_parameters()},
            {"embedding", p.embedding},
            {"head", p.head},
            {"attention", p.attention},
            {"norms", p.norms},
            {"dense_mlp", p.dense_mlp},
            {"router", p.router},
            {"shared_experts", p.shared_experts},
            {"routed_experts", p.routed_experts}}},
          {"flops", {{"forward", forward}, {"backward", 2 * forward}}},
          {"memory", memory},
          {"notes", model.notes}};
}

// "30.53 B": in thousands, millions, billions, trillions, by the unit's letters.
std::string scaled(double value, std::array<char const*, 4> units) {
  double scale = 1e3;
  std::size_t unit = 0;
  while (unit + 1 < units.size() && value >= 1000 * scale) {
    scale *= 1e3;
    ++unit;
  }
  return fmt::format("{:.2f} {}", value / scale, units[unit]);
}

std::string parameters_text(double count) { return scaled(count, {"K", "M", "B", "T"}); }
std::string flops_text(double flops) {
  return scaled(flops * 1e-3, {"MFLOP", "GFLOP", "TFLOP", "PFLOP"});
}

std::string memory_text(MoeDesc const& desc, double layers) {
  auto const known = [](std::optional<double> const& bytes) {
    return bytes ? bytes_text(*bytes) : std::string("-");
  };
  std::string text =
      fmt::format("{:<23}{:>10} {:>13} {:>14}", "memory", "saved", "+ in forward", "+ in backward");
  text += layers > 0 ? fmt::format(" {:>16}  keeps\n", "saved, all MoE") : "  keeps\n";
  auto const plans = memory_plans(desc);
  for (MemoryPlan const& plan : plans) {
    text += fmt::format("  {:<21}{:>10} {:>13} {:>14}", plan.policy, bytes_text(plan.saved),
                        known(plan.forward_transient), known(plan.backward_transient));
    if (layers > 0) text += fmt::format(" {:>16}", bytes_text(layers * plan.saved));
    text += fmt::format("  {}\n", plan.keeps);
  }
  for (MemoryPlan const& plan : plans) {
    auto const from = layers_for_lower_peak(plan, plans.front());
    if (!from || *from == 1) continue;
    text += fmt::format(
        "note: {} needs more than {} during backward: a stack peaks lower from {} layers on\n",
        plan.policy, plans.front().policy, *from);
  }
  return text;
}

std::string layer_text(MoeDesc const& desc, double layers) {
  MoeShape const& s = desc.shape;
  double const rows = routed_rows(desc);
  double const forward = work::forward_flops(desc, rows);
  double const per_expert = rows / static_cast<double>(s.experts);
  std::string text = fmt::format(
      "layer             T {}, d {}, n {}, E {}, K {}; {}, {}, {}\n"
      "parameters        {} in experts, {} in the router\n"
      "work              forward {}, backward {}, router forward {}\n"
      "intensity         {:.0f} FLOP/byte in the forward GEMMs, {:.0f} with h and aggregate\n"
      "tile waste        {:.1f} % of the rows: tiles of {}, {:.1f} rows per expert\n",
      s.tokens, s.hidden, s.intermediate, s.experts, s.top_k,
      name_of(kActivationNames, desc.activation.kind), name_of(kDTypeNames, desc.dtype),
      name_of(kRouterNames, desc.router.kind), parameters_text(expert_parameters(desc)),
      parameters_text(static_cast<double>(s.hidden * s.experts)), flops_text(forward),
      flops_text(2 * forward), flops_text(work::route(desc).flops), arithmetic_intensity(desc),
      layer_arithmetic_intensity(desc), 100 * tile_waste(desc, s.tokens), desc.router.tile,
      per_expert);
  text += memory_text(desc, layers);
  if (desc.router.round != Rounding::none && per_expert < 2 * desc.router.tile) {
    text += fmt::format(
        "note: {:.1f} rows per expert are fewer than two tiles of {}: rounding changes the "
        "routing much; take more tokens or a smaller --tile\n",
        per_expert, desc.router.tile);
  }
  return text;
}

std::string model_text(Model const& model, MoeDesc const& desc) {
  huggingface::Parameters const& p = model.parameters;
  auto const share = [](char const* name, std::int64_t count) {
    return count == 0 ? std::string()
                      : fmt::format(", {} {}", name, parameters_text(static_cast<double>(count)));
  };
  double const forward = static_cast<double>(desc.shape.tokens) * model.forward_flops_per_token();
  std::string text = fmt::format(
      "model             {}: {} layers, {} with experts\n"
      "parameters        {} in all, {} active: experts {}{}{}{}{}{}{}{}\n"
      "work of {} tokens: forward {}, backward {}, attention scores not counted\n",
      model.model_type, model.layers, model.moe_layers.size(),
      parameters_text(static_cast<double>(p.total())),
      parameters_text(static_cast<double>(model.active_parameters())),
      parameters_text(static_cast<double>(p.routed_experts)), share("shared", p.shared_experts),
      share("routers", p.router), share("dense MLPs", p.dense_mlp), share("attention", p.attention),
      share("norms", p.norms), share("embedding", p.embedding), share("head", p.head),
      desc.shape.tokens, flops_text(forward), flops_text(2 * forward));
  for (std::string const& note : model.notes) text += fmt::format("note: {}\n", note);
  return text;
}

// Predicts training. Beside the flags of --cluster it reads only the sizes of a layer, and refuses all others.
int plan_training(Flags const& flags, CLI::App const& command) {
  constexpr std::string_view kSizes[] = {"--hidden", "--intermediate", "--experts", "--top-k"};
  for (CLI::App const* group : command.get_subcommands([](CLI::App const*) { return true; })) {
    if (group->get_group() == kClusterGroup) continue;
    for (CLI::Option const* option : group->get_options()) {
      std::string const name = option->get_name();
      bool const size = std::find(std::begin(kSizes), std::end(kSizes), name) != std::end(kSizes);
      if (option->count() == 0 || (size && flags.hf.empty())) continue;
      throw CommandError(fmt::format(
          "{} with --cluster{}: {}; leave it out", name, size ? " and --hf" : "",
          size                 ? "config.json fixes it"
          : name == "--tokens" ? "a GPU's tokens are --sequences of --context"
                               : "a step is predicted in bf16 with SwiGLU, for any routing"));
    }
  }
  if (!flags.plot.empty()) {
    throw CommandError("--plot with --cluster: it draws a layer; leave out one of them");
  }
  std::optional<Model> model;
  if (!flags.hf.empty()) model = huggingface::load_model_config(flags.hf);
  return flags.cluster.plan(model, flags.shape.layer_case().desc.shape, command, flags.json);
}

int plan(Flags const& flags, CLI::App const& command) {
  if (ClusterFlags::given(command)) return plan_training(flags, command);
  flags.cluster.refuse_without_cluster(command);
  Subject const subject = read_subject(flags, command);
  MoeDesc const& desc = subject.desc;
  note_constant_scores(desc);
  if (flags.json) {
    Json document = {{"layer", layer_json(desc)}};
    if (subject.model) document["model"] = model_json(*subject.model, desc);
    print_json(document);
  } else {
    double const layers = subject.model ? static_cast<double>(subject.model->moe_layers.size()) : 0;
    std::string const model = subject.model ? model_text(*subject.model, desc) + '\n' : "";
    print_text(model + layer_text(desc, layers));
  }
  if (!flags.plot.empty()) draw_plan(flags.plot, desc);
  return kOk;
}

}  // namespace

void add_plan(CLI::App& app) {
  CLI::App& command = *app.add_subcommand(
      "plan",
      "Parameters, FLOPs, memory and tile waste of a layer or a model; time of training one");
  auto const flags = std::make_shared<Flags>();
  command.add_option("--hf", flags->hf,
                     "config.json of a model on Hugging Face (" +
                         lm::joined(huggingface::model_types(), " ") +
                         "); T is 32768 unless --tokens says otherwise");
  command.add_option("--plot", flags->plot,
                     "draw memory against granularity and tile waste against T as FILE.svg");
  flags->shape.add_to(command);
  flags->cluster.add_to(command);
  command.add_flag("--json", flags->json, "the result as JSON on stdout");
  run_with(command, "tessera plan --hf config.json --tokens 32768 --plot plan.svg",
           [flags, &command] { return with_lm_errors([&] { return plan(*flags, command); }); });
}

}  // namespace tessera::cli

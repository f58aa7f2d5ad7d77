// SPDX-License-Identifier: Apache-2.0
// tessera verify: a layer, or many random ones, against the fp64 reference.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>

#include "cli/commands.hpp"
#include "cli/output.hpp"
#include "cli/shape_flags.hpp"
#include "verify/names.hpp"
#include "verify/random_cases.hpp"
#include "verify/runner.hpp"

namespace tessera::cli {
namespace {

struct VerifyFlags {
  ShapeFlags shape;
  std::int64_t random = 0;
  bool json = false;
};

/// Names of the comparisons that a report lists; a router's logits and scores serve the verdict only.
bool is_reported(std::string const& name) { return name != "logits" && name != "scores"; }

Json result_json(verify::CaseResult const& result, std::string const& device) {
  bool const quantises = result.desc.quantises();
  Json tensors = Json::object();
  for (auto const& [name, c] : result.tensors) {
    if (!is_reported(name)) continue;
    tensors[name] = {{"rel_error", c.rel_error},
                     {"naive_rel_error", c.naive_rel_error},
                     {"worst_row_ratio", c.worst_row_ratio},
                     {"ok", c.ok}};
    if (!quantises) continue;
    tensors[name]["sqnr_db"] = result.sqnr_db.at(name);
    tensors[name]["recipe_sqnr_db"] = result.recipe_sqnr_db.at(name);
  }
  Json document = {{"ok", result.ok},
                   {"shape", shape_json(result.desc.shape)},
                   {"routed_rows", result.routed_rows},
                   {"device", device},
                   {"dtype", verify::name_of(verify::kDTypeNames, result.desc.dtype)}};
  if (result.desc.precision != Precision::native) {
    document["precision"] = verify::name_of(verify::kPrecisionNames, result.desc.precision);
  }
  if (quantises) {
    document["scales"] = verify::name_of(verify::kScaleNames, scale_rule(result.desc));
  }
  document["tensors"] = tensors;
  document["saved_bytes"] = result.saved_bytes;
  document["saved_bytes_formula"] = result.saved_bytes_formula;
  document["transient_peak_bytes"] = result.transient_peak_bytes;
  document["bitwise_repeat"] = result.bitwise_repeat;
  if (!result.ok) document["failures"] = result.failures;
  return document;
}

std::string command_of(verify::LayerCase const& layer_case) {
  return "tessera verify " + verify::case_options(layer_case);
}

std::string verdict(bool ok) {
  if (!use_colour(stdout)) return ok ? "ok  " : "FAIL";
  return ok ? "\033[32mok\033[0m  " : "\033[31mFAIL\033[0m";
}

/// About what the data, the reference and two runs of the library take.
double memory_needed(MoeDesc const& desc) {
  auto const size = [](std::int64_t value) { return static_cast<double>(value); };
  MoeShape const& s = desc.shape;
  double const weights =
      size(desc.up_width() + 1) * size(s.experts) * size(s.hidden) * size(s.intermediate);
  double const slots =
      s.variable_experts ? 2 * size(s.tokens) * size(s.top_k) : size(desc.num_slots());
  double const rows =
      slots * (size(desc.up_width() + 2) * size(s.intermediate) + 2 * size(s.hidden));
  return 80 * weights + 40 * rows + 64 * size(s.tokens) * size(s.hidden + s.experts);
}

int verify_one(VerifyFlags const& flags, Context const& context, Context const& repeat) {
  verify::LayerCase const layer_case = flags.shape.layer_case(context);
  check(workspace_bytes(context, layer_case.desc, Pass::forward).status());
  require_memory(memory_needed(layer_case.desc));
  auto const result = value_of(verify::verify_case(context, repeat, layer_case));
  note_constant_scores(layer_case.desc);
  if (flags.json) {
    print_json(result_json(result, flags.shape.device()));
  } else {
    std::string text = fmt::format("{:<10} {:>10} {:>12} {:>16}\n", "tensor", "rel_error",
                                   "naive_error", "worst_row_ratio");
    for (auto const& [name, c] : result.tensors) {
      if (!is_reported(name)) continue;
      text += fmt::format("{:<10} {:>10.2e} {:>12.2e} {:>16.3f}  {}", name, c.rel_error,
                          c.naive_rel_error, c.worst_row_ratio, verdict(c.ok));
      if (result.desc.quantises()) {
        text += fmt::format("  {:.1f} dB, recipe {:.1f}", result.sqnr_db.at(name),
                            result.recipe_sqnr_db.at(name));
      }
      text += '\n';
    }
    text += fmt::format(
        "routed rows {}, {}; saved {} B (formula {} B), transient peak {}\n", result.routed_rows,
        result.bitwise_repeat ? "repeats bit for bit" : "does NOT repeat", result.saved_bytes,
        result.saved_bytes_formula, bytes_text(static_cast<double>(result.transient_peak_bytes)));
    text += verdict(result.ok) + "\n";
    print_text(text);
  }
  for (auto const& failure : result.failures) print_note(fmt::format("{}\n", failure));
  if (!result.ok) print_note(fmt::format("reproduce: {}\n", command_of(layer_case)));
  return result.ok ? kOk : kCheckFailed;
}

/// The tensor that came closest to, or went furthest beyond, what is allowed, by row or by element.
std::string worst_tensor(verify::CaseResult const& result) {
  std::string worst = "none";
  double most = -1;
  for (auto const& [name, c] : result.tensors) {
    double const ratio = std::max(c.worst_row_ratio, c.worst_element_ratio);
    if (ratio > most) {
      most = ratio;
      worst = fmt::format("{:.2f} {}", ratio, name);
    }
  }
  return worst;
}

std::string case_line(std::size_t number, verify::LayerCase const& layer_case, bool ok,
                      std::string const& worst) {
  MoeDesc const& desc = layer_case.desc;
  MoeShape const& s = desc.shape;
  std::string extras;
  if (desc.quantises()) {
    extras += fmt::format(" {}", verify::name_of(verify::kPrecisionNames, desc.precision));
    if (desc.pow2_scales) extras += ":pow2";
  }
  if (desc.bias) extras += " bias";
  if (layer_case.sentinel_fraction > 0) extras += " sentinels";
  if (layer_case.padding_fraction > 0) extras += " padding";
  if (s.variable_experts) extras += " variable";
  if (desc.rounds_tokens()) {
    extras += fmt::format(" {}:{}", verify::name_of(verify::kRoundingNames, desc.router.round),
                          desc.router.tile);
  }
  if (desc.router.replay) extras += " replay";
  if (layer_case.aux_dlogits) extras += " aux-dlogits";
  if (layer_case.repeat_experts) extras += " repeats";
  if (desc.ids_dtype == DType::int64) extras += " int64";
  if (layer_case.gradient_mode == GradientMode::accumulate) extras += " accumulate";
  return fmt::format("{:>4} {} T={} d={} n={} E={} K={} {} {} {} {} {}{}  worst {}\n", number,
                     verdict(ok), s.tokens, s.hidden, s.intermediate, s.experts, s.top_k,
                     verify::name_of(verify::kRouterNames, desc.router.kind),
                     verify::name_of(verify::kActivationNames, desc.activation.kind),
                     verify::layout_name(desc.layout),
                     verify::name_of(verify::kDTypeNames, desc.dtype),
                     verify::routing_name(layer_case.routing), extras, worst);
}

int verify_random(VerifyFlags const& flags, Context const& context, Context const& repeat) {
  auto const cases = verify::random_cases(context, flags.random, flags.shape.seed(),
                                          flags.shape.quantised_cases());
  if (cases.empty()) throw CommandError("--random: this device serves no layer", kEnvironment);
  Json documents = Json::array();
  std::int64_t failed = 0, large = 0;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    verify::LayerCase const& layer_case = cases[i].layer_case;
    auto const result = verify::verify_case(context, repeat, layer_case);
    bool const ok = result.ok() && result.value().ok;
    large += cases[i].large ? 1 : 0;
    failed += ok ? 0 : 1;
    if (!flags.json) {
      print_text(
          case_line(i + 1, layer_case, ok, result.ok() ? worst_tensor(result.value()) : "-"));
    } else {
      Json document = result.ok() ? result_json(result.value(), flags.shape.device())
                                  : Json{{"ok", false}, {"error", result.status().text()}};
      document["command"] = command_of(layer_case);
      documents.push_back(std::move(document));
    }
    if (ok) continue;
    if (!result.ok()) print_note(fmt::format("  {}\n", result.status().text()));
    if (result.ok()) {
      for (auto const& failure : result.value().failures)
        print_note(fmt::format("  {}\n", failure));
    }
    print_note(fmt::format("  reproduce: {}\n", command_of(layer_case)));
  }
  auto const pairs = verify::pair_coverage(context, cases);
  auto const count = static_cast<std::int64_t>(cases.size());
  if (flags.json) {
    print_json({{"ok", failed == 0},
                {"seed", flags.shape.seed()},
                {"passed", count - failed},
                {"failed", failed},
                {"large", large},
                {"pairs", pairs.possible},
                {"pairs_covered", pairs.covered},
                {"cases", documents}});
  } else {
    print_text(fmt::format(
        "{} of {} cases passed, {} with T >= 512 and E >= 32; {} of {} option pairs covered\n",
        count - failed, count, large, pairs.covered, pairs.possible));
  }
  return failed == 0 ? kOk : kCheckFailed;
}

// --random draws layers and data: a flag that fixes a part of them would be ignored. Groups are subcommands to CLI11.
void refuse_layer_flags(CLI::App const& command) {
  constexpr std::string_view kAllowed[] = {
      "--random", "--seed", "--device", "--threads", "--json", "--precision", "--unproven-kernels"};
  for (CLI::Option const* option : command.get_options()) {
    std::string const name = option->get_name();
    if (option->count() == 0 || std::ranges::find(kAllowed, name) != std::end(kAllowed)) continue;
    throw CommandError(
        fmt::format("{} with --random: every case draws its own; leave it out", name));
  }
  for (CLI::App const* group : command.get_subcommands([](CLI::App const*) { return true; })) {
    refuse_layer_flags(*group);
  }
}

}  // namespace

void add_verify(CLI::App& app) {
  auto* const command =
      app.add_subcommand("verify", "Forward and backward of a layer against the fp64 reference");
  auto const flags = std::make_shared<VerifyFlags>();
  flags->shape.add_to(*command);
  command
      ->add_option(
          "--random", flags->random,
          "N random supported cases drawn from --seed, with --precision all of fp8 or mxfp8")
      ->check(CLI::Range(1, 100000))
      ->type_name("N");
  command->add_flag("--json", flags->json, "the result as JSON on stdout");
  run_with(*command,
           "tessera verify --tokens 512 --experts 32 --top-k 4 --layout interleaved --bias",
           [flags, command] {
             if (flags->random > 0) refuse_layer_flags(*command);
             Context const context = flags->shape.context();
             Context const repeat = flags->shape.context(context.num_threads() == 1 ? 3 : 1);
             return flags->random > 0 ? verify_random(*flags, context, repeat)
                                      : verify_one(*flags, context, repeat);
           });
}

}  // namespace tessera::cli

// SPDX-License-Identifier: Apache-2.0
// tessera explain: which implementation serves a call, op by op, and what every other one was refused for.
#include <fmt/format.h>

#include <memory>

#include "cli/commands.hpp"
#include "cli/output.hpp"
#include "cli/shape_flags.hpp"
#include "tessera/backend.hpp"
#include "tessera/moe.hpp"
#include "tessera/names.hpp"

namespace tessera::cli {
namespace {

Json op_json(OpExplanation const& op) {
  Json candidates = Json::array();
  for (auto const& candidate : op.candidates) {
    candidates.push_back(
        {{"name", candidate.name}, {"chosen", candidate.chosen}, {"reason", candidate.reason}});
  }
  return {{"op", op.op},
          {"gemm", {op.gemm_m, op.gemm_n, op.gemm_k}},
          {"flops", op.flops},
          {"bytes", op.bytes},
          {"candidates", candidates}};
}

std::string op_text(OpExplanation const& op) {
  std::string text = fmt::format("  {:<22}", op.op);
  if (op.gemm_m != 0)
    text += fmt::format(" {} x {} x {} per expert,", op.gemm_m, op.gemm_n, op.gemm_k);
  text += fmt::format(" {:.3g} MFLOP, {}\n", op.flops * 1e-6, bytes_text(op.bytes));
  for (auto const& candidate : op.candidates) {
    text += fmt::format("    {} {}: {}\n", candidate.chosen ? "->" : "no", candidate.name,
                        candidate.reason);
  }
  return text;
}

int explain_layer(ShapeFlags const& flags, CLI::App const& command, bool json) {
  flags.refuse_data(command);
  Context const context = flags.context();
  MoeDesc desc = flags.layer_case().desc;
  Json passes = Json::object();
  std::string text;
  for (auto const& [name, pass] :
       {std::pair{"forward", Pass::forward}, {"backward", Pass::backward}}) {
    auto const ops = value_of(explain(context, desc, pass));
    auto const workspace = value_of(workspace_bytes(context, desc, pass));
    Json list = Json::array();
    text += fmt::format("{}: workspace {}\n", name, bytes_text(static_cast<double>(workspace)));
    for (auto const& op : ops) {
      list.push_back(op_json(op));
      text += op_text(op);
    }
    passes[name] = {{"workspace_bytes", workspace}, {"ops", list}};
  }
  auto const saved = value_of(saved_bytes(context, desc));
  desc.precision = value_of(chosen_precision(context, desc));
  text += fmt::format(
      "saved between them: x {}, h {}, routing {}", bytes_text(static_cast<double>(saved.x)),
      bytes_text(static_cast<double>(saved.h)), bytes_text(static_cast<double>(saved.routing)));
  if (desc.quantises()) {
    text +=
        fmt::format(", scales of x {} and of h {}", bytes_text(static_cast<double>(saved.x_scale)),
                    bytes_text(static_cast<double>(saved.h_scale)));
  }
  text += "\n";
  if (!json) {
    print_text(text);
    return kOk;
  }
  print_json({{"shape", shape_json(desc.shape)},
              {"device", flags.device()},
              {"precision", name_of(kPrecisionNames, desc.precision)},
              {"saved_bytes", saved_json(desc, saved)},
              {"passes", passes}});
  return kOk;
}

}  // namespace

void add_explain(CLI::App& app) {
  auto* const command =
      app.add_subcommand("explain", "Which implementation serves a layer, and why");
  auto const flags = std::make_shared<ShapeFlags>();
  auto const json = std::make_shared<bool>(false);
  flags->add_to(*command);
  command->add_flag("--json", *json, "the result as JSON on stdout");
  run_with(*command,
           "tessera explain --tokens 4096 --hidden 512 --intermediate 256 --experts 64 --top-k 8",
           [flags, command, json] { return explain_layer(*flags, *command, *json); });
}

}  // namespace tessera::cli

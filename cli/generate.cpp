// SPDX-License-Identifier: Apache-2.0
// tessera generate: bytes sampled from a checkpoint, as they come.
#include <memory>
#include <string>

#include "cli/commands.hpp"
#include "cli/lm_command.hpp"
#include "cli/output.hpp"
#include "lm/checkpoint.hpp"
#include "lm/model.hpp"
#include "lm/sampler.hpp"

namespace tessera::cli {
namespace {

struct GenerateFlags {
  std::string checkpoint;
  std::string prompt = "\n";
  lm::SamplingOptions sampling;
  std::int32_t threads = 0;
  bool json = false;
};

int generate(GenerateFlags const& flags) {
  if (flags.prompt.empty()) {
    throw CommandError("--prompt is empty: the model continues at least one byte");
  }
  lm::validate(flags.sampling);
  StopSignals const signals;
  lm::LoadedModel const loaded = lm::load_model(flags.checkpoint);
  Context const context = make_context(flags.threads);
  lm::Model model(context, loaded.config);

  if (!flags.json) print_text(flags.prompt);
  std::string const text =
      lm::generate(model, loaded.parameters, flags.prompt, flags.sampling, [&](char byte) {
        if (!flags.json) print_text(std::string(1, byte));
        return !StopSignals::requested();
      });
  if (flags.json) {
    print_json({{"prompt", flags.prompt},
                {"text", text},
                {"tokens", text.size()},
                {"seed", flags.sampling.seed}});
  } else {
    print_text("\n");
  }
  return kOk;
}

}  // namespace

void add_generate(CLI::App& app) {
  CLI::App& command =
      *app.add_subcommand("generate", "Continue a prompt with a trained checkpoint");
  auto const flags = std::make_shared<GenerateFlags>();
  lm::SamplingOptions& sampling = flags->sampling;
  command
      .add_option("--checkpoint", flags->checkpoint, "folder of config.json and model.safetensors")
      ->required();
  command.add_option("--prompt", flags->prompt, "text to continue (default: a line break)");
  command.add_option("--tokens", sampling.tokens, "bytes to generate")->capture_default_str();
  command.add_option("--temperature", sampling.temperature, "0: always the likeliest byte")
      ->capture_default_str();
  command.add_option("--top-p", sampling.top_p, "likeliest bytes that make up this probability")
      ->capture_default_str();
  command.add_option("--top-k", sampling.top_k, "this many likeliest bytes; 0: all")
      ->capture_default_str();
  command.add_option("--seed", sampling.seed, "equal seeds, equal text")->capture_default_str();
  command.add_option("--threads", flags->threads, "0: all cores; results do not depend on it")
      ->capture_default_str();
  command.add_flag("--json", flags->json, "the text as JSON on stdout");
  run_with(command, "tessera generate --checkpoint runs/latest --prompt \"The \" --tokens 200",
           [flags] { return with_lm_errors([&] { return generate(*flags); }); });
}

}  // namespace tessera::cli

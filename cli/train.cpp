// SPDX-License-Identifier: Apache-2.0
// tessera train: a small MoE language model over bytes, trained on the CPU through the library's layers.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "cli/clock.hpp"
#include "cli/commands.hpp"
#include "cli/lm_command.hpp"
#include "cli/output.hpp"
#include "cli/train_progress.hpp"
#include "cli/train_summary.hpp"
#include "lm/checkpoint.hpp"
#include "lm/corpus.hpp"
#include "lm/evaluation.hpp"
#include "lm/files.hpp"
#include "lm/moe_block.hpp"
#include "lm/run_folder.hpp"
#include "lm/sampler.hpp"
#include "lm/text.hpp"
#include "lm/trainer.hpp"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

struct Flags {
  std::vector<std::string> text;
  std::string out = "runs/latest";
  std::string resume;
  lm::TrainingOptions training;
  std::string router = "topk-softmax";
  std::string round = "none";
  std::int64_t save_every = 400;
  std::int64_t held_out_windows = 2048;  // 0: all
  double seconds = 0;
  std::int32_t threads = 0;
  bool json = false;
  std::vector<CLI::Option*> fixed;  // options that a resumed run takes from its checkpoint
  CLI::Option* steps = nullptr;
  CLI::Option* balance = nullptr;
  CLI::Option* out_option = nullptr;
};

std::string absolute(std::string const& path) {
  return path == "-" ? path : fs::absolute(path).lexically_normal().string();
}

lm::Corpus read_text(std::vector<std::string> const& paths, fs::path const& out) {
  lm::Corpus corpus = lm::read_corpus(paths, out);
  print_note(fmt::format(
      "text: {} files, {} bytes to train on, {} held out (the last {} % of every file){}\n",
      corpus.files, corpus.train.size(), corpus.held_out.size(), lm::kHeldOutPercent,
      corpus.skipped > 0 ? fmt::format(", {} files skipped: not text", corpus.skipped) : ""));
  return corpus;
}

// Makes an empty folder for a new run.
lm::FolderLock prepare(fs::path const& folder) {
  lm::PreparedFolder prepared = lm::prepare_folder(folder);
  if (!prepared.kept.empty()) {
    print_note(fmt::format("note: the earlier run in {} is now {}\n", folder.string(),
                           prepared.kept.string()));
  }
  return std::move(prepared.lock);
}

// A flag that the run does not read would be ignored, and written into the checkpoint.
void refuse_ignored(Flags const& flags, lm::TrainingOptions const& options) {
  RouterKind const kind = options.model.router.kind;
  bool const biased = lm::has_selection_bias(options.model);
  bool const grouped = kind == RouterKind::group_limited;
  std::string const router = fmt::format("--router {}", lm::router_name(kind));
  struct Read {
    std::string_view name;
    bool is_read;
    std::string chosen;
  };
  Read const read[] = {{"--groups", grouped, router},
                       {"--top-groups", grouped, router},
                       {"--normalize-scores", biased || kind == RouterKind::softmax_topk, router},
                       {"--bias-rate", biased, router},
                       // Its experts have equal counts, so that the loss is a constant.
                       {"--balance", kind != RouterKind::expert_choice, router},
                       {"--tile", options.rounding != Rounding::none, "--round none"}};
  for (CLI::Option const* option : flags.fixed) {
    for (auto const& [name, is_read, chosen] : read) {
      if (is_read || option->count() == 0 || option->get_name() != name) continue;
      throw CommandError(
          fmt::format("{} with {}: it would change nothing; leave it out", name, chosen));
    }
  }
}

TrainRun start(Flags const& flags) {
  if (flags.text.empty()) {
    throw CommandError("--text is missing: name files or folders to train on, or - for stdin");
  }
  lm::TrainingOptions options = flags.training;
  options.model.router.kind = lm::router_from_name(flags.router);
  options.rounding = lm::rounding_from_name(flags.round);
  refuse_ignored(flags, options);
  if (lm::has_selection_bias(options.model) && options.bias_rate > 0 &&
      flags.balance->count() == 0) {
    options.balance = 0;  // one means is enough
  }
  lm::validate(options);
  lm::require_memory(options);

  TrainRun run{
      .folder = flags.out, .state = {}, .corpus = read_text(flags.text, flags.out), .lock = {}};
  lm::require_enough(run.corpus, options.model.context);
  lm::TextSource source{.paths = {}, .fingerprint = run.corpus.fingerprint()};
  for (std::string const& path : flags.text) source.paths.push_back(absolute(path));
  run.state = lm::initial_state(options, std::move(source));
  run.lock = prepare(run.folder);
  return run;
}

// The text of the run to go on with. Its paths may have moved, or have bytes that the checkpoint could not hold.
lm::Corpus read_text_again(TrainRun const& run, bool named) {
  try {
    return read_text(run.state.text.paths, run.folder);
  } catch (lm::InputError const& error) {
    if (named) throw;
    throw lm::InputError(
        fmt::format("{}; if the text is elsewhere now, name it with --text", error.what()));
  }
}

TrainRun resume(Flags const& flags) {
  for (CLI::Option const* option : flags.fixed) {
    if (option->count() > 0) {
      throw CommandError(fmt::format("{} with --resume: the checkpoint fixes it; leave it out",
                                     option->get_name()));
    }
  }
  fs::path const folder = flags.out_option->count() > 0 ? flags.out : flags.resume;
  std::error_code error;
  bool const in_place = fs::equivalent(folder, flags.resume, error);
  // Locked before the state is read: nobody saves a later one in between.
  lm::FolderLock lock = in_place ? lm::FolderLock(folder) : lm::FolderLock();
  TrainRun run{.folder = folder,
               .state = lm::load_state(flags.resume),
               .corpus = {},
               .lock = std::move(lock)};
  lm::TrainingOptions& options = run.state.options;
  std::int64_t const span = options.schedule_span();
  if (flags.steps->count() > 0) options.steps = flags.training.steps;
  lm::validate(options);
  lm::require_memory(options);
  if (options.steps < run.state.step) {
    throw CommandError(fmt::format("--steps {}: the run in {} has done {} already", options.steps,
                                   flags.resume, run.state.step));
  }
  if (options.schedule_span() != span) {
    print_note(
        fmt::format("note: the learning rate now falls over {} steps instead of {}: not what one "
                    "uninterrupted run would have done\n",
                    options.schedule_span(), span));
  }
  if (!flags.text.empty()) {
    run.state.text.paths.clear();
    for (std::string const& path : flags.text) run.state.text.paths.push_back(absolute(path));
  }
  run.corpus = read_text_again(run, !flags.text.empty());
  if (run.corpus.fingerprint() != run.state.text.fingerprint) {
    throw CommandError(fmt::format(
        "the text is not what the run in {} was trained on ({}); restore it, or start a new run",
        flags.resume, lm::joined(run.state.text.paths, " ")));
  }
  if (in_place) {
    lm::make_writable_folder(run.folder);
  } else {
    run.lock = prepare(run.folder);
  }
  print_note(fmt::format("resuming {} after step {}\n", flags.resume, run.state.step));
  return run;
}

std::string routing_text(lm::TrainingOptions const& o) {
  std::string const router = lm::router_name(o.model.router.kind);
  if (o.rounding == Rounding::none) return router;
  return fmt::format("{}, {} to {}", router, lm::rounding_name(o.rounding), o.tile);
}

// Says what keeps the experts in use.
std::string balance_text(lm::TrainingOptions const& o) {
  std::string text;
  auto const add = [&text](std::string const& part) { text += (text.empty() ? "" : ", ") + part; };
  if (lm::has_selection_bias(o.model) && o.bias_rate > 0) {
    add(fmt::format("a selection bias that moves by {:g} a step", o.bias_rate));
  }
  if (o.balance > 0) add(fmt::format("a loss of factor {:g}", o.balance));
  if (o.model.router.kind == RouterKind::expert_choice) add("the experts' capacity");
  return text.empty() ? "nothing" : text;
}

void announce(lm::TrainingOptions const& o, Context const& context, double bigram) {
  lm::ModelConfig const& c = o.model;
  print_note(fmt::format(
      "model: {} layers, hidden {}, {} experts of {} (top {}, {}), context {}, {:.2f} M "
      "parameters\n"
      "training: {} steps of {} x {} bytes on {} threads; held-out bigram {:.3f} bits/byte\n"
      "balance:  by {}\n",
      c.layers, c.hidden, c.experts, c.intermediate, c.top_k, routing_text(o), c.context,
      static_cast<double>(lm::parameter_count(c)) * 1e-6, o.steps, o.batch, c.context,
      context.num_threads(), bigram, balance_text(o)));
  std::int64_t const rows = o.batch * c.context * c.top_k;  // of all experts together
  if (o.rounding != Rounding::none && rows < 2 * o.tile * c.experts) {
    print_note(
        fmt::format("note: {} rows per expert are fewer than two tiles of {}: rounding changes the "
                    "routing much; take a smaller --tile or a larger --batch\n",
                    rows / c.experts, o.tile));
  }
  note_constant_scores(
      lm::moe_desc(c, o.batch * c.context, {.rounding = o.rounding, .tile = o.tile}, 0, true));
  if (!lm::is_qwen3_moe(c)) {
    print_note(fmt::format(
        "note: Qwen3-MoE has no router {}: the checkpoint is for tessera generate, not for "
        "transformers\n",
        lm::router_name(c.router.kind)));
  }
}

// Seconds of a run with --seconds that evaluating held-out text may take, and then those that the sample may take.
double seconds_to_conclude(double seconds, double left) {
  constexpr double kShare = 0.1, kMin = 1;
  return std::max({kShare * seconds, kMin, left});
}

// Counts how many windows can be evaluated in that time, with MoE blocks and without: each time forward alone, which
// takes less than half of a training step.
std::int64_t windows_within(double seconds, double tokens_per_second, std::int64_t context) {
  double const windows = seconds * tokens_per_second / static_cast<double>(context);
  return std::max(lm::kEvaluationWindows, static_cast<std::int64_t>(std::min(windows, 1e15)));
}

// Evaluates on held-out text, at most that many windows where it is not 0, and writes the sample.
void conclude(TrainRun const& run, std::int64_t max_windows, double seconds, lm::Trainer& trainer,
              TrainProgress& progress, TrainSummary& summary) {
  lm::Model& model = trainer.model();
  auto const& parameters = run.state.parameters;
  std::int64_t const context = run.state.options.model.context;
  std::int64_t const all = lm::count_windows(run.corpus.held_out.size(), context);
  summary.windows = max_windows > 0 ? std::min(all, max_windows) : all;
  if (seconds > 0) {
    std::int64_t const within = windows_within(seconds, summary.tokens_per_second, context);
    summary.lacks_time = within < summary.windows;
    summary.windows = std::min(summary.windows, within);
  }
  if (summary.windows < all) {
    summary.bigram =
        lm::bigram_bits_per_byte(run.corpus.train, run.corpus.held_out, context, summary.windows);
  }
  auto const evaluate = [&](char const* name, bool moe) {
    return lm::model_bits_per_byte(
        model, parameters,
        {.text = run.corpus.held_out,
         .max_windows = summary.windows,
         .batch = run.state.options.batch,
         .stop = &StopSignals::requested(),
         .report = [&](std::int64_t done,
                       std::int64_t windows) { progress.evaluation(name, done, windows); }},
        moe);
  };
  summary.held_out = evaluate("held-out text", true);
  summary.without_moe = evaluate("held-out text without MoE", false);
  progress.finish();
  if (StopSignals::requested()) return;
  double const end = now_seconds() + seconds;
  std::string const prompt = "\n";
  std::string const sample = lm::generate(
      model, parameters, prompt, {.tokens = 600, .seed = run.state.options.seed},
      [&](char) { return !StopSignals::requested() && (seconds == 0 || now_seconds() < end); });
  lm::write_atomically(run.folder / lm::kSampleFile, sample + "\n");
}

int train(Flags const& flags) {
  ignore_broken_pipes();
  StopSignals const signals;
  Context const context = make_context(flags.threads);
  double const begin = now_seconds();
  TrainRun run = flags.resume.empty() ? start(flags) : resume(flags);
  TrainSummary summary;
  summary.bigram = lm::bigram_bits_per_byte(run.corpus.train, run.corpus.held_out,
                                            run.state.options.model.context);
  announce(run.state.options, context, summary.bigram);

  lm::Trainer trainer(context, run.state, run.corpus);
  TrainProgress progress;
  summary.end = trainer.run({.save_every = flags.save_every,
                             .seconds = flags.seconds,
                             .stop = &StopSignals::requested(),
                             .save = [&] { lm::save_run(run.folder, run.state); },
                             .report = [&](lm::Progress const& p) { progress.report(p); }});
  progress.finish();
  summary.tokens_per_second = trainer.tokens_per_second();
  summary.load = trainer.load();
  double const bigram = summary.bigram;  // of the whole held-out text
  if (summary.end != lm::RunEnd::stopped) {
    double const seconds =
        flags.seconds > 0
            ? seconds_to_conclude(flags.seconds, flags.seconds - (now_seconds() - begin))
            : 0;
    conclude(run, flags.held_out_windows, seconds, trainer, progress, summary);
  }
  summary.plot_problem = lm::draw_curve(run.folder, run.state, bigram);
  print_train_summary(run, summary);
  if (flags.json) print_json(train_summary_json(run, summary));
  return kOk;
}

void add_model_flags(CLI::App& command, Flags& flags) {
  lm::ModelConfig& model = flags.training.model;
  auto const fixed = [&](auto const& name, auto& value, char const* what) {
    CLI::Option* const option = command.add_option(name, value, what)->capture_default_str();
    option->group("Model");
    flags.fixed.push_back(option);
  };
  fixed("--router", flags.router,
        "topk-softmax softmax-topk softmax-topk-renorm sigmoid-bias group-limited sqrtsoftplus "
        "expert-choice (held-out text and generate then let tokens choose: softmax-topk)");
  fixed("--round", flags.round,
        "token rounding in training: none nr-f sr-f nr-s balance-f up down");
  fixed("--tile", flags.training.tile, "rows that --round rounds to");
  fixed("--groups", model.router.groups, "of group-limited; 0: from experts");
  fixed("--top-groups", model.router.top_groups, "of group-limited; 0: from top-k");
  fixed("--route-scale", model.router.route_scale, "every score is multiplied by it");
  CLI::Option* const normalize =
      command.add_flag("--normalize-scores", model.router.normalize_scores,
                       "for softmax-topk, sigmoid-bias, sqrtsoftplus and group-limited");
  normalize->group("Model");
  flags.fixed.push_back(normalize);
  fixed("--experts", model.experts, "experts per layer");
  fixed("--top-k", model.top_k, "experts per byte");
  fixed("--hidden", model.hidden, "width of the residual stream");
  fixed("--intermediate", model.intermediate, "width of an expert");
  fixed("--layers", model.layers, "layers");
  fixed("--heads", model.heads, "query heads");
  fixed("--kv-heads", model.kv_heads, "key and value heads; divide the query heads");
  fixed("--head-dim", model.head_dim, "width of a head");
  fixed("--context", model.context, "bytes that a prediction sees");
}

void add_training_flags(CLI::App& command, Flags& flags) {
  lm::TrainingOptions& training = flags.training;
  auto const option = [&](char const* name, auto& value, char const* what) {
    return command.add_option(name, value, what)->capture_default_str()->group("Training");
  };
  flags.steps = option("--steps", training.steps, "steps in all");
  flags.fixed.push_back(option("--batch", training.batch, "windows of --context bytes per step"));
  flags.fixed.push_back(option("--lr", training.rate, "peak learning rate"));
  flags.balance = option("--balance", training.balance,
                         "factor of the experts' balance loss; 0 where a selection bias balances");
  flags.fixed.push_back(flags.balance);
  flags.fixed.push_back(option("--bias-rate", training.bias_rate,
                               "by which a step moves selection biases (sigmoid-bias, "
                               "sqrtsoftplus, group-limited)"));
  flags.fixed.push_back(option("--z-loss", training.z_loss, "factor of the routers' z-loss"));
  flags.fixed.push_back(option("--warmup", training.warmup, "steps of linear warm-up"));
  flags.fixed.push_back(option("--seed", training.seed, "of weights, batches and the sample"));
  flags.fixed.push_back(
      option("--eval-every", training.eval_every, "steps between looks at held-out text"));
  option("--save-every", flags.save_every, "steps between saves")->check(CLI::Range(1, 10'000'000));
  option("--held-out-windows", flags.held_out_windows,
         "windows of held-out text, spread evenly, that are judged at the end; 0: all")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1'000'000'000}));
  option("--seconds", flags.seconds,
         "stop training after that time, held-out text and the sample after a tenth of it each; "
         "0: never")
      ->check(number_in(0, 1e9));
  option("--threads", flags.threads, "0: all cores; results do not depend on it");
}

}  // namespace

void add_train(CLI::App& app) {
  CLI::App& command = *app.add_subcommand("train", "Train a small MoE language model on text");
  auto const flags = std::make_shared<Flags>();
  command.add_option(
      "--text", flags->text,
      "files and folders (their text files), or - for stdin; the end of each file is "
      "held out");
  flags->out_option = command.add_option("--out", flags->out, "folder for everything that is made")
                          ->capture_default_str();
  command.add_option("--resume", flags->resume, "go on with the run in this folder, bit for bit");
  command.add_flag("--json", flags->json, "a summary as JSON on stdout");
  add_model_flags(command, *flags);
  add_training_flags(command, *flags);
  run_with(command, "tessera train --text docs README.md --out runs/docs",
           [flags] { return with_lm_errors([&] { return train(*flags); }); });
}

}  // namespace tessera::cli

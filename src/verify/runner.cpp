// SPDX-License-Identifier: Apache-2.0
#include "verify/runner.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <stdexcept>

#include "core/router_groups.hpp"
#include "tessera/router.hpp"
#include "verify/candidate.hpp"
#include "verify/low_precision.hpp"
#include "verify/memory.hpp"
#include "verify/names.hpp"

namespace tessera::verify {
namespace {

/// Given scores come back bit for bit; a router's are judged as a tensor.
void check_given_scores(LayerData const& data, CandidateResult& run,
                        std::vector<std::string>& failures) {
  std::vector<float> const scores = std::move(run.tensors.at("scores"));
  run.tensors.erase("scores");
  if (scores.size() != data.scores.size() ||
      (!scores.empty() &&
       std::memcmp(scores.data(), data.scores.data(), scores.size() * sizeof(float)) != 0)) {
    failures.emplace_back("routing: scores are not those given");
  }
}

/// Ids to replay come back, every sentinel as -1.
void check_replayed_ids(LayerData const& data, CandidateResult const& run,
                        std::vector<std::string>& failures) {
  std::vector<std::int64_t> ids = data.topk_ids;
  for (std::int64_t& id : ids) id = id >= 0 && id < data.desc.shape.experts ? id : -1;
  if (run.choice.topk_ids != ids) failures.emplace_back("routing: topk_ids are not those given");
}

/// Lists what is wrong with the router's choice, from its own logits: those are judged as a tensor.
std::vector<std::string> choice_failures(LayerData const& data, reference::Inputs const& inputs,
                                         CandidateResult const& run) {
  MoeDesc const& desc = data.desc;
  auto const& values = run.tensors.at("logits");
  std::vector<double> const logits(values.begin(), values.end());
  if (!desc.experts_choose()) {
    auto failures = selection_failures(
        desc, reference::router_keys(inputs, reference::router_logits(inputs)),
        desc.rounds_tokens() ? run.choice.unrounded_ids : run.choice.topk_ids, data.token_mask);
    if (!failures.empty() || !desc.rounds_tokens()) return failures;
  }
  return slot_failures(desc, pair_scores(inputs, logits), run.choice);
}

/// The context whose threads compute what the result is judged by.
Context const& judging_context(Context const& context) {
  if (context.device().kind == DeviceKind::cpu) return context;
  static Context const host = std::move(Context::create()).value();
  return host;
}

}  // namespace

Expected<CaseResult> verify_case(Context const& context, Context const& repeat_context,
                                 LayerCase const& layer_case) {
  // The library judges the shape before data of that shape is made.
  auto const supported = workspace_bytes(context, layer_case.desc, Pass::forward);
  if (!supported.ok()) return supported.status();
  LayerData data;
  try {
    data = make_data(layer_case);
  } catch (std::invalid_argument const& error) {
    return Status::invalid("%s", error.what());
  }
  // The fast kernels of a GPU and those of quantised operands need aligned rows, its plain ones do not.
  bool const on_gpu = context.device().kind == DeviceKind::cuda;
  bool const needs_lines = layer_case.seed % 4 != 0 || layer_case.desc.quantises();
  Alignment const alignment = on_gpu && needs_lines ? Alignment::cache_line : Alignment::element;
  auto first = run_candidate(context, data, kPoisons[0], alignment);
  if (!first.ok()) return first.status();
  auto const second = run_candidate(repeat_context, data, kPoisons[1], alignment);
  if (!second.ok()) return second.status();

  CandidateResult& run = first.value();
  CaseResult result;
  result.desc = data.desc;
  result.failures = run.failures;
  result.saved_bytes = run.saved_bytes;
  result.saved_bytes_formula = saved_bytes_formula(data.desc);
  result.transient_peak_bytes = run.transient_bytes;
  if (result.saved_bytes != result.saved_bytes_formula) {
    result.failures.push_back("saved bytes: " + std::to_string(result.saved_bytes) +
                              ", the formula gives " + std::to_string(result.saved_bytes_formula));
  }
  std::string const parts = differing_parts(run, second.value());
  result.bitwise_repeat = parts.empty();
  if (!parts.empty()) result.failures.push_back("other bits in the repeat: " + parts);
  judge_run(judging_context(context), data, run, result);
  result.outputs = std::move(run.tensors);
  result.ok = result.failures.empty();
  return result;
}

void judge_run(Context const& context, LayerData const& data, CandidateResult& run,
               CaseResult& result) {
  auto const add = [&result](std::vector<std::string> const& more) {
    result.failures.insert(result.failures.end(), more.begin(), more.end());
  };
  add(padding_failures(data, run));
  reference::Inputs const inputs = reference_inputs(data, run.choice);
  if (router_chooses(data.desc)) {
    auto const failures = choice_failures(data, inputs, run);
    add(failures);
    if (!failures.empty()) return;  // nothing to replay
  } else if (data.desc.router.replay) {
    check_replayed_ids(data, run, result.failures);
  } else {
    check_given_scores(data, run, result.failures);
  }
  auto const forward = reference::forward(inputs);
  for (std::int64_t t = 0; t < data.desc.shape.tokens; ++t) {
    if (!is_padding(data, t)) continue;
    std::int64_t const experts = data.desc.shape.experts;
    for (std::int64_t i = t * experts; i < (t + 1) * experts; ++i) {
      run.tensors.at("logits")[i] = static_cast<float>(forward.logits[i]);
    }
  }
  add(metadata_failures(forward.metadata, run.metadata));

  auto const backward =
      reference::backward(inputs, forward, std::vector<double>(data.d_o.begin(), data.d_o.end()));
  auto const ref = reference_tensors(data, forward, backward);
  bool const quantises = data.desc.quantises();
  auto naives = quantises ? recipe_samples(data, inputs)
                          : naive_samples(context, data, inputs, forward.metadata);
  result.routed_rows = forward.metadata.rows();
  result.tensors = judge(data, inputs, forward, ref, naives, run.tensors);
  if (quantises && !all_ok(result.tensors)) {  // these samples are rarely needed
    auto more = flipped_samples(data, inputs);
    std::move(more.begin(), more.end(), std::back_inserter(naives));
    result.tensors = judge(data, inputs, forward, ref, naives, run.tensors);
  }
  for (auto const& [name, comparison] : result.tensors) {
    if (!comparison.ok) result.failures.push_back(name + ": " + comparison.reason);
  }
  if (!quantises) return;
  for (auto const& [name, values] : run.tensors) {
    result.sqnr_db[name] = sqnr_db(ref.at(name), values);
    result.recipe_sqnr_db[name] = sqnr_db(ref.at(name), naives.front().at(name));
  }
  add(lost_db(ref, naives, run.tensors, data.desc.num_slots()));
}

std::vector<std::string> padding_failures(LayerData const& data, CandidateResult const& run) {
  MoeShape const& s = data.desc.shape;
  std::pair<char const*, std::int64_t> const rows[] = {
      {"o", s.hidden}, {"dx", s.hidden}, {"dscores", s.top_k}, {"dlogits", s.experts}};
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    if (!is_padding(data, t)) continue;
    std::string const where = "padding: token " + std::to_string(t);
    for (std::int64_t k = 0; k < s.top_k; ++k) {
      if (run.choice.topk_ids[t * s.top_k + k] != -1) return {where + " has an expert"};
    }
    for (auto const& [name, width] : rows) {
      auto const first = run.tensors.at(name).begin() + t * width;
      bool const zeros = std::all_of(first, first + width, [](float v) { return v == 0; });
      if (!zeros) return {where + ": " + name + " is not 0"};
    }
  }
  return {};
}

std::size_t saved_bytes_formula(MoeDesc const& desc) {
  auto const size = [](std::int64_t value) { return static_cast<std::size_t>(value); };
  MoeShape const& s = desc.shape;
  std::size_t const slots = size(desc.num_slots()), element = dtype_bytes(desc.dtype);
  std::size_t const width = size(desc.up_width() * s.intermediate);
  std::size_t bytes = 0;
  if (desc.quantises()) {  // of 33/32 bytes each, up to the padding of h's fp32 scales
    std::size_t const x = size(s.tokens * s.hidden), block = size(desc.scale_block());
    std::size_t const scale = block == 128 ? 4 : 1;
    std::size_t const rows = block == 128 ? (slots + 3) / 4 * 4 : slots;
    bytes = x + x / block * scale;
    if (desc.save == SavePolicy::h) bytes += slots * width + rows * (width / block) * scale;
  } else {
    bytes = element * size(s.tokens * s.hidden);
    if (desc.save == SavePolicy::h) bytes += element * slots * width;
  }
  std::size_t tables = 16 * slots + 4 * size(s.experts + 1);
  bool const rounded = desc.rounds_tokens();
  RouterKind const kind = resolved(desc.router).kind;
  if (s.variable_experts || rounded || desc.experts_choose()) tables += 4 * size(s.tokens + 1);
  if (kind != RouterKind::given) tables += 4 * slots;
  if (rounded || kind == RouterKind::softmax_topk || kind == RouterKind::expert_choice) {
    tables = (tables + 15) / 16 * 16;  // logits are read and written 16 bytes at a time
    tables += 4 * size(s.tokens * s.experts);
  } else if (kind == RouterKind::sigmoid_bias || kind == RouterKind::group_limited ||
             kind == RouterKind::sqrtsoftplus) {
    tables += 4 * slots;
  }
  if (rounded) tables += 4 * size(s.tokens * s.top_k);
  bytes += tables;
  return bytes;
}

std::vector<std::string> metadata_failures(reference::Metadata const& ref,
                                           reference::Metadata const& out) {
  std::vector<std::string> failures;
  auto const compare = [&failures](char const* name, std::vector<std::int64_t> const& want,
                                   std::vector<std::int64_t> const& have) {
    if (want == have) return;
    std::size_t at = 0;
    while (at < std::min(want.size(), have.size()) && want[at] == have[at]) ++at;
    std::string text = std::string("routing: ") + name + "[" + std::to_string(at) + "]";
    if (at < have.size()) text += " is " + std::to_string(have[at]);
    if (at < want.size()) text += ", should be " + std::to_string(want[at]);
    failures.push_back(text);
  };
  compare("expert_offsets", ref.expert_offsets, out.expert_offsets);
  compare("sort_permutation", ref.sort_permutation, out.sort_permutation);
  compare("gather_index", ref.gather_index, out.gather_index);
  compare("inverse_permutation", ref.inverse_permutation, out.inverse_permutation);
  if (!out.token_offsets.empty()) compare("token_offsets", ref.token_offsets, out.token_offsets);
  return failures;
}

/// Holds which groups of one token fp32 may keep, and which it must: sums closer than `slack` may fall either way.
struct KeptGroups {
  std::vector<char> may, must;
  std::int64_t size = 0;  ///< experts per group
};

KeptGroups kept_groups(MoeDesc const& desc, double const* keys, double slack) {
  if (desc.router.kind != RouterKind::group_limited) return {{1}, {1}, desc.shape.experts};
  auto const [groups, top_groups] = core::router_groups(desc);
  std::vector<double> const sums = reference::group_sums(desc, keys);
  KeptGroups out{{}, {}, desc.shape.experts / groups};
  for (double const own : sums) {
    auto const above =
        std::count_if(sums.begin(), sums.end(), [&](double sum) { return sum > own + 2 * slack; });
    auto const near =
        std::count_if(sums.begin(), sums.end(), [&](double sum) { return sum >= own - 2 * slack; });
    out.may.push_back(above < top_groups);
    out.must.push_back(near - 1 < top_groups);
  }
  return out;
}

std::vector<std::string> selection_failures(MoeDesc const& desc, std::vector<double> const& keys,
                                            std::vector<std::int64_t> const& topk_ids,
                                            std::vector<std::uint8_t> const& token_mask) {
  MoeShape const& s = desc.shape;
  double const relative = std::ldexp(std::sqrt(static_cast<double>(s.hidden)), -20);
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    if (!token_mask.empty() && token_mask[static_cast<std::size_t>(t)] == 0) continue;
    double const* const key = &keys[t * s.experts];
    std::int64_t const* const ids = &topk_ids[t * s.top_k];
    double largest = 1;
    for (std::int64_t e = 0; e < s.experts; ++e) largest = std::max(largest, std::abs(key[e]));
    double const slack = relative * largest;
    KeptGroups const kept = kept_groups(desc, key, slack);
    std::vector<char> chosen(s.experts, 0);
    std::string const where = "router: token " + std::to_string(t);
    for (std::int64_t k = 0; k < s.top_k; ++k) {
      if (ids[k] < 0 || ids[k] >= s.experts) return {where + ": id out of range"};
      if (chosen[ids[k]] != 0) return {where + ": an expert is chosen twice"};
      chosen[ids[k]] = 1;
      if (!kept.may[ids[k] / kept.size]) return {where + ": a chosen expert's group is not kept"};
      if (k > 0 && key[ids[k]] > key[ids[k - 1]] + slack) {
        return {where + ": slots are not in descending key"};
      }
      if (k > 0 && key[ids[k]] == key[ids[k - 1]] && ids[k] < ids[k - 1]) {
        return {where + ": a tie went to the higher expert"};
      }
    }
    for (std::int64_t e = 0; e < s.experts; ++e) {
      if (chosen[e] == 0 && kept.must[e / kept.size] && key[e] > key[ids[s.top_k - 1]] + slack) {
        return {where + ": expert " + std::to_string(e) + " has a larger key than a chosen one"};
      }
    }
  }
  return {};
}

}  // namespace tessera::verify

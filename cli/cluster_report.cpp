// SPDX-License-Identifier: Apache-2.0
#include "cli/cluster_report.hpp"

#include <fmt/format.h>

#include <string_view>

#include "cli/cluster_assumptions.hpp"
#include "cli/cluster_layout.hpp"

namespace tessera::cli {
namespace {

Json bytes_json(PeakBytes const& peak) {
  return {{"state", peak.state},       {"gathered", peak.gathered}, {"saved", peak.saved},
          {"exchange", peak.exchange}, {"loss", peak.loss},         {"runtime", peak.runtime}};
}

Json terms_json(StepTerms const& t) {
  auto const ms = [](double seconds) { return seconds * 1e3; };
  return {{"experts", ms(t.experts)},
          {"attention", ms(t.attention)},
          {"projections", ms(t.projections)},
          {"elementwise", ms(t.elementwise)},
          {"router", ms(t.router)},
          {"exchange", ms(t.exchange)},
          {"head", ms(t.head)},
          {"optimizer", ms(t.optimizer)},
          {"gather of a layer", ms(t.gather)},
          {"reduction of a layer", ms(t.reduce)}};
}

Json row_json(ClusterPlan const& plan, ClusterRow const& row) {
  Json json = {{"impl", row.experts.impl},
               {"sequences", row.batch.sequences},
               {"largest_sequences", row.largest},
               {"fits", row.fits},
               {"ms", row.prediction.seconds * 1e3},
               {"tokens_per_s_per_gpu", row.tokens_per_s()},
               {"tokens_per_day", plan.per_day(row)},
               {"peak_bytes", row.prediction.peak.total()},
               {"saved_bytes_per_token_and_layer", row.saved},
               {"memory_bytes", bytes_json(row.prediction.peak)},
               {"terms_ms", terms_json(row.prediction.terms)},
               {"experts_ms", row.experts.ms * row.experts.slower},
               {"experts_tokens", row.experts.tokens},
               {"experts_measured", row.experts.measured},
               {"experts_source", row.experts.source}};
  if (plan.cluster.hosts > 1) {
    json["tokens_per_day_with_stragglers"] = {plan.per_day(row) / kStragglers[1],
                                              plan.per_day(row) / kStragglers[0]};
  }
  return json;
}

Json rates_json(RateSet const& set, GpuRates const& gpu) {
  return {{"name", set.name},
          {"dense_flops_per_s", gpu.dense},
          {"attention_flops_per_s", gpu.attention},
          {"elementwise_bytes_per_s", gpu.elementwise},
          {"copies_bytes_per_s", gpu.copies},
          {"optimizer_bytes_per_s", gpu.optimizer},
          {"link_bytes_per_s", gpu.link},
          {"network_bytes_per_s", gpu.network},
          {"slowdown", set.slowdown},
          {"logits_rows", set.logits_rows}};
}

ExpertsLayout layout_of(ClusterPlan const& plan) {
  return experts_layout(plan.model, plan.cluster, plan.rows.front().batch.tokens());
}

Json layout_json(ClusterPlan const& plan) {
  ExpertsLayout const layout = layout_of(plan);
  auto const ms = [&](double bytes) { return bytes / plan.gpu->network * 1e3; };
  Json json = {{"advice", layout.advice()},
               {"tokens_per_gpu", layout.tokens},
               {"within_host_bytes_per_layer", layout.within_host_bytes},
               {"within_host_ms_per_layer", ms(layout.within_host_bytes)},
               {"over_hosts_possible", layout.divisible}};
  if (layout.divisible) {
    json["over_hosts_bytes_per_layer"] = layout.over_hosts_bytes;
    json["over_hosts_ms_per_layer"] = ms(layout.over_hosts_bytes);
    json["equal_tokens_per_gpu"] = layout.equal_tokens;
  }
  return json;
}

std::string layout_text(ClusterPlan const& plan) {
  ExpertsLayout const layout = layout_of(plan);
  auto const sent = [&](double bytes) {
    return fmt::format("{:.0f} MB, {:.2f} ms", bytes * 1e-6, bytes / plan.gpu->network * 1e3);
  };
  std::string text = fmt::format(
      "experts' place    {} sends fewer bytes to other hosts; of a GPU, a layer and a step, "
      "calculated:\n"
      "  within a host   {}: weights and gradients, beside compute, where FSDP shards their state "
      "over the hosts\n",
      layout.over_hosts() ? "over the hosts" : "within each host", sent(layout.within_host_bytes));
  if (!layout.divisible) {
    return text +
           fmt::format(
               "  over hosts      not possible: experts are a multiple of all GPUs, and a host "
               "has at most {} GPUs and at least as many experts as a token\n",
               kMaxRanks);
  }
  return text + fmt::format(
                    "  over hosts      {}: rows of {:.0f} tokens, beside nothing, with "
                    "tessera.ExpertParallel(hosts=); as much with {:.0f} tokens\n",
                    sent(layout.over_hosts_bytes), layout.tokens, layout.equal_tokens);
}

char const* sharding_name(Sharding sharding) {
  return sharding == Sharding::fsdp ? "fsdp" : "hsdp";
}

std::string rows_text(ClusterPlan const& plan) {
  bool const hosts = plan.cluster.hosts > 1;
  std::string text = fmt::format("{:<18}{:>9} {:>8} {:>10} {:>13} {:>15}{}\n", "experts",
                                 "sequences", "largest", "step", "tokens/s/GPU", "B tokens/day",
                                 hosts ? "    with stragglers      peak" : "      peak");
  for (ClusterRow const& row : plan.rows) {
    text += fmt::format("  {:<16}{:>9} {:>8} ", row.experts.impl, row.batch.sequences, row.largest);
    if (!row.fits) {
      text += fmt::format("  does not fit: {} of {}\n", bytes_text(row.prediction.peak.total()),
                          bytes_text(plan.gpu->memory));
      continue;
    }
    double const day = plan.per_day(row) * 1e-9;
    text += fmt::format("{:>7.1f} ms {:>13.0f} {:>15.1f}", row.prediction.seconds * 1e3,
                        row.tokens_per_s(), day);
    if (hosts)
      text += fmt::format(" {:>11.1f} to {:.1f}", day / kStragglers[1], day / kStragglers[0]);
    text += fmt::format(" {:>9}{}\n", bytes_text(row.prediction.peak.total()),
                        row.experts.measured ? "" : " *");
  }
  for (ClusterRow const& row : plan.rows) {
    text += fmt::format("  {}{}: a layer of {} tokens takes {:.2f} ms, {}\n",
                        row.experts.measured ? "" : "* ", row.experts.impl, row.experts.tokens,
                        row.experts.ms * row.experts.slower, row.experts.source);
  }
  return text;
}

std::string detail_text(ClusterRow const& row) {
  StepTerms const& t = row.prediction.terms;
  PeakBytes const& p = row.prediction.peak;
  std::string text = fmt::format(
      "step of {}, ms   experts {:.1f}, attention {:.1f}, projections {:.1f}, elementwise and "
      "copies "
      "{:.1f}, head {:.1f}, optimizer {:.1f}",
      row.experts.impl, t.experts * 1e3, t.attention * 1e3, t.projections * 1e3,
      t.elementwise * 1e3, t.head * 1e3, t.optimizer * 1e3);
  if (t.router > 0) text += fmt::format(", router {:.1f}", t.router * 1e3);
  if (t.exchange > 0) text += fmt::format(", rows of experts sent {:.1f}", t.exchange * 1e3);
  text += fmt::format("; a layer is gathered in {:.2f}, its gradients reduced in {:.2f}\n",
                      t.gather * 1e3, t.reduce * 1e3);
  text += fmt::format(
      "memory of {}   state {}, layers gathered {}, saved {}, loss {}, CUDA and NCCL {}",
      row.experts.impl, bytes_text(p.state), bytes_text(p.gathered), bytes_text(p.saved),
      bytes_text(p.loss), bytes_text(p.runtime));
  if (p.exchange > 0) text += fmt::format(", rows of experts sent {}", bytes_text(p.exchange));
  return text + '\n';
}

}  // namespace

Json cluster_plan_json(ClusterPlan const& plan) {
  Json rows = Json::array(), assumptions = Json::array();
  for (ClusterRow const& row : plan.rows) rows.push_back(row_json(plan, row));
  for (Assumption const& a : assumptions_of(plan.model, plan.cluster, *plan.set, *plan.gpu)) {
    assumptions.push_back(
        {{"of", a.of}, {"basis", a.basis}, {"text", a.text}, {"source", a.source}});
  }
  TrainingModel const& m = plan.model;
  Json document = {{"cluster",
                    {{"hosts", plan.cluster.hosts},
                     {"gpus", plan.cluster.gpus},
                     {"gpu", plan.gpu->name},
                     {"memory_bytes", plan.gpu->memory},
                     {"sharding", sharding_name(plan.cluster.sharding)},
                     {"expert_parallel", plan.cluster.expert_parallel}}},
                   {"model",
                    {{"layers", m.layers},
                     {"hidden", m.hidden},
                     {"heads", m.heads},
                     {"kv_heads", m.kv_heads},
                     {"head_size", m.head_size},
                     {"intermediate", m.intermediate},
                     {"experts", m.experts},
                     {"top_k", m.top_k},
                     {"vocabulary", m.vocabulary},
                     {"tied", m.tied},
                     {"layer_parameters", m.layer_parameters()},
                     {"parameters", m.parameters()}}},
                   {"batch",
                    {{"context", plan.batch.context},
                     {"recompute", plan.batch.recompute},
                     {"keep_gathered", plan.batch.keep_gathered},
                     {"regime", plan.regime()}}},
                   {"rates", rates_json(*plan.set, *plan.gpu)},
                   {"predictions", rows},
                   {"assumptions", assumptions}};
  if (plan.cluster.hosts > 1) document["experts_layout"] = layout_json(plan);
  if (has_published(plan.cluster, *plan.gpu)) {
    document["published"] = {{"what", kPublished.what},
                             {"tokens_per_day", kPublished.tokens_per_day},
                             {"tokens_per_s_per_gpu", kPublished.tokens_per_s_per_gpu},
                             {"not_named", kPublished.not_named}};
  }
  return document;
}

std::string cluster_plan_text(ClusterPlan const& plan) {
  TrainingModel const& m = plan.model;
  Cluster const& c = plan.cluster;
  std::string text = fmt::format(
      "cluster           {} x {} {} of {}; {}{}\n"
      "model             {} layers, d {}, n {}, E {}, K {}, {} heads of {}, {} of keys and values, "
      "vocabulary {}{}: {:.2f} B parameters\n"
      "batch             {} a GPU, {} tokens each; {}{} ({})\n",
      c.hosts, c.gpus, plan.gpu->name, bytes_text(plan.gpu->memory),
      c.sharding == Sharding::fsdp ? "state sharded over all GPUs (fsdp)"
                                   : "state sharded within a host, copied to all hosts (hsdp)",
      c.expert_parallel ? ", experts spread over the GPUs of a host" : "", m.layers, m.hidden,
      m.intermediate, m.experts, m.top_k, m.heads, m.head_size, m.kv_heads, m.vocabulary,
      m.tied ? ", tied" : "", m.parameters() * 1e-9,
      plan.batch.sequences == 0 ? "the most sequences that fit"
                                : fmt::format("{} sequences", plan.batch.sequences),
      plan.batch.context, plan.batch.recompute ? "blocks recomputed" : "nothing recomputed",
      plan.batch.keep_gathered ? ", layers stay gathered" : "", plan.regime());
  text += '\n' + rows_text(plan);
  text += '\n' + detail_text(plan.rows.front());
  if (c.hosts > 1) text += '\n' + layout_text(plan);
  text += fmt::format("\nrates             {}\n", plan.set->name);
  for (Assumption const& a : assumptions_of(m, c, *plan.set, *plan.gpu)) {
    text += fmt::format("  {:<11}{:<14}{}{}\n", a.basis, a.of, a.text,
                        a.source.empty() ? "" : " [" + a.source + "]");
  }
  if (has_published(c, *plan.gpu)) {
    text += fmt::format(
        "\npublished: {}: {:.0f} B tokens/day, {:.0f} tokens/s per GPU; it names no {}: a figure "
        "to "
        "stand beside these, not to be divided by them\n",
        kPublished.what, kPublished.tokens_per_day * 1e-9, kPublished.tokens_per_s_per_gpu,
        kPublished.not_named);
  }
  return text;
}

std::string too_large(ClusterPlan const& plan) {
  ClusterRow const& row = plan.rows.front();
  if (row.largest == 0) {
    return fmt::format(
        "not one sequence of {} tokens fits beside {} of {} on a GPU with {}; take more GPUs, "
        "{}fewer "
        "--layers or a shorter --context",
        plan.batch.context,
        bytes_text(row.prediction.peak.total() - row.prediction.peak.saved -
                   row.prediction.peak.exchange),
        "state and buffers", bytes_text(plan.gpu->memory),
        plan.batch.recompute ? "" : "--recompute, ");
  }
  return fmt::format("--sequences {}: {} needs {}, a GPU has {}; the largest that fits is {}",
                     plan.batch.sequences, row.experts.impl,
                     bytes_text(row.prediction.peak.total()), bytes_text(plan.gpu->memory),
                     row.largest);
}

}  // namespace tessera::cli

// SPDX-License-Identifier: Apache-2.0
#include "cli/plan_layer.hpp"

#include <algorithm>
#include <cmath>

#include "cli/commands.hpp"
#include "tessera/moe.hpp"

namespace tessera::cli {
namespace {

struct Sizes {
  double b, w, tokens, hidden, intermediate, experts, top_k;
  double slots;  // P: the rows that buffers hold
};

Sizes sizes(MoeDesc const& desc) {
  MoeShape const& s = desc.shape;
  auto const real = [](std::int64_t value) { return static_cast<double>(value); };
  return {static_cast<double>(dtype_bytes(desc.dtype)),
          real(desc.up_width()),
          real(s.tokens),
          real(s.hidden),
          real(s.intermediate),
          real(s.experts),
          real(s.top_k),
          real(desc.num_slots())};
}

MemoryPlan tessera_plan(MoeDesc desc, SavePolicy save, bool overwrite_h, char const* policy,
                        char const* keeps) {
  desc.precision = Precision::native;
  desc.pow2_scales = false;
  desc.save = save;
  desc.overwrite_h = overwrite_h;
  Sizes const s = sizes(desc);
  double const dh = overwrite_h ? 0 : s.b * s.w * s.slots * s.intermediate;
  return {.policy = policy,
          .keeps = keeps,
          .saved = static_cast<double>(saved_by_layer(desc).total()),
          .forward_transient = s.b * s.slots * (s.intermediate + s.hidden),
          .backward_transient = dh + s.b * s.slots * std::max(s.intermediate, s.hidden),
          .has_curve = !overwrite_h};
}

// As a GPU has it: codes are a byte, with an fp32 scale for each 128 of a row, each 128 x 128 of weights; in mxfp8 with
// a byte for each 32 of either. Forward: a8 and w_down, then w_up and y in one place. Backward: dh8; dO8 and w_down,
// then w_up in one place; x and dh in bf16; a' and then dx rows.
MemoryPlan quantised_plan(MoeDesc desc, Precision precision, bool keeps_x, char const* policy,
                          char const* keeps) {
  Sizes const s = sizes(desc);
  double const code = 33.0 / 32;
  double const of_weights = precision == Precision::fp8 ? 1 + 4.0 / (128 * 128) : code;
  double const rows = s.tokens * s.hidden;
  double const weights = of_weights * s.experts * s.hidden * s.intermediate;
  desc.precision = precision;
  desc.pow2_scales = false;
  desc.save = SavePolicy::h;
  desc.column_chunk = 0;
  SavedBytes const saved = saved_by_layer(desc);
  double const h_and_tables = static_cast<double>(saved.h + saved.h_scale + saved.routing);
  double const x = keeps_x ? s.b * rows : static_cast<double>(saved.x + saved.x_scale);
  double const y = s.b * s.slots * s.hidden;
  double const of_dgrads =
      code * s.w * s.slots * s.intermediate + std::max(code * rows + weights, s.w * weights);
  return {
      .policy = policy,
      .keeps = keeps,
      .saved = x + h_and_tables,
      .forward_transient = code * s.slots * s.intermediate + weights + std::max(s.w * weights, y),
      .backward_transient = (keeps_x ? 0 : s.b * rows) + of_dgrads +
                            s.b * s.w * s.slots * s.intermediate +
                            s.b * s.slots * std::max(s.intermediate, s.hidden),
      .has_curve = false};
}

bool has_whole_blocks(MoeDesc const& desc) {
  return desc.dtype == DType::bf16 && desc.shape.hidden % 128 == 0 &&
         desc.shape.intermediate % 128 == 0;
}

// Bytes per row and expert of the forward GEMMs alone, for M_e rows.
double gemm_bytes(Sizes const& s, double m) {
  return s.b * (2 * m * s.hidden + 2 * m * s.intermediate + (s.w + 1) * s.intermediate * s.hidden);
}

double gemm_flops(Sizes const& s, double m) {
  return (2 * s.w + 2) * m * s.intermediate * s.hidden;
}

}  // namespace

SavedBytes saved_by_layer(MoeDesc desc) {
  if (!desc.rounds_tokens()) desc.router.tile = Router().tile;
  return value_of(saved_bytes(desc));
}

std::vector<MemoryPlan> memory_plans(MoeDesc const& desc) {
  Sizes const s = sizes(desc);
  double const x = s.b * s.tokens * s.hidden, rows_d = s.b * s.slots * s.hidden,
               rows_n = s.b * s.slots * s.intermediate;
  std::vector<MemoryPlan> plans = {
      tessera_plan(desc, SavePolicy::h, false, "tessera", "x, h, routing tables"),
      tessera_plan(desc, SavePolicy::h, true, "tessera-over-h",
                   "x, h, routing tables; dh in the memory of h"),
      tessera_plan(desc, SavePolicy::x, false, "tessera-save-x", "x, routing tables; h recomputed"),
      {.policy = "momoe-keeps-none", .keeps = "x; the rest recomputed", .saved = x},
      {.policy = "momoe-keeps-all",
       .keeps = "x, h, R rows of d",
       .saved = x + s.w * rows_n + rows_d},
      {.policy = "megatron",
       .keeps = "x, R rows of d, h, a",
       .saved = x + rows_d + (s.w + 1) * rows_n},
      {.policy = "scattermoe",
       .keeps = "x, R rows of d, h, the factors of a",
       .saved = x + rows_d + 2 * s.w * rows_n}};
  if (has_whole_blocks(desc)) {
    plans.insert(
        plans.begin() + 3,
        {quantised_plan(desc, Precision::fp8, false, "tessera-fp8", "x8, h8, routing tables"),
         quantised_plan(desc, Precision::mxfp8, false, "tessera-mxfp8", "x8, h8, routing tables"),
         quantised_plan(desc, Precision::fp8, true, "tessera-fp8-keeps-x",
                        "x in bf16, h8, routing tables (not served yet)")});
  }
  return plans;
}

std::optional<std::int64_t> layers_for_lower_peak(MemoryPlan const& plan, MemoryPlan const& base) {
  double const gained = base.saved - plan.saved;
  if (!plan.backward_transient || !base.backward_transient || gained <= 0) return std::nullopt;
  double const more = std::max(0.0, *plan.backward_transient - *base.backward_transient);
  return static_cast<std::int64_t>(more / gained) + 1;
}

double routed_rows(MoeDesc const& desc) {
  bool const exact = desc.shape.variable_experts || desc.experts_choose();
  return static_cast<double>(exact ? desc.num_slots() : desc.shape.tokens * desc.shape.top_k);
}

double expert_parameters(MoeDesc const& desc) {
  Sizes const s = sizes(desc);
  double const biases = desc.bias ? s.w * s.intermediate + s.hidden : 0;
  return s.experts * ((s.w + 1) * s.intermediate * s.hidden + biases);
}

double arithmetic_intensity(MoeDesc const& desc) {
  Sizes const s = sizes(desc);
  double const m = routed_rows(desc) / s.experts;
  return m == 0 ? 0 : gemm_flops(s, m) / gemm_bytes(s, m);
}

double layer_arithmetic_intensity(MoeDesc const& desc) {
  Sizes const s = sizes(desc);
  double const m = routed_rows(desc) / s.experts;
  double const h_and_aggregate =
      s.b * (s.w * m * s.intermediate + m * s.hidden + m * s.hidden / s.top_k);
  return m == 0 ? 0 : gemm_flops(s, m) / (gemm_bytes(s, m) + h_and_aggregate);
}

double expected_tile_waste(std::int64_t tokens, std::int64_t experts, std::int64_t top_k,
                           std::int64_t tile) {
  if (tokens == 0) return 0;
  if (top_k == experts) {  // no chance in it
    std::int64_t const padded = (tokens + tile - 1) / tile * tile;
    return static_cast<double>(padded - tokens) / static_cast<double>(tokens);
  }
  auto const trials = static_cast<double>(tokens);
  double const chance = static_cast<double>(top_k) / static_cast<double>(experts);
  double const mean = trials * chance;
  // Beyond twelve deviations and a dozen counts nothing shows in fp64.
  double const reach = 12 * std::sqrt(mean * (1 - chance)) + 12;
  auto const first = static_cast<std::int64_t>(std::max(0.0, std::floor(mean - reach)));
  auto const last = static_cast<std::int64_t>(std::min(trials, std::ceil(mean + reach)));
  double mass = 0, padded = 0;
  for (std::int64_t count = first; count <= last; ++count) {
    auto const k = static_cast<double>(count);
    double const p =
        std::exp(std::lgamma(trials + 1) - std::lgamma(k + 1) - std::lgamma(trials - k + 1) +
                 k * std::log(chance) + (trials - k) * std::log1p(-chance));
    mass += p;
    padded += p * static_cast<double>((count + tile - 1) / tile * tile);
  }
  return std::max(0.0, padded / mass / mean - 1);
}

std::vector<MoeDesc> granularities(MoeDesc const& desc) {
  MoeShape const& s = desc.shape;
  std::vector<MoeDesc> list;
  std::int64_t const width = s.intermediate * s.top_k;  // n*K
  for (std::int64_t top_k = 1; top_k <= 64 && width % top_k == 0; top_k *= 2) {
    MoeDesc finer = desc;
    finer.shape.top_k = top_k;
    finer.shape.intermediate = width / top_k;
    finer.shape.experts = std::max(top_k, s.experts * top_k / s.top_k);
    finer.layout = {};                                  // a block need not divide the new n
    finer.router = {.kind = RouterKind::topk_softmax};  // groups need not divide the new E
    list.push_back(finer);
  }
  return list;
}

}  // namespace tessera::cli

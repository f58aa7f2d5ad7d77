// SPDX-License-Identifier: Apache-2.0
// The layer on a GPU is accepted, and every mutant of it is rejected: the GPU computes from inputs in which one thing
// is wrong, and is judged by the right ones. Mutants that need a fault inside a kernel rather than in its inputs are
// made from the GPU's results. Exit 0 passed, 1 failed, 77 skipped (no GPU).
#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "verify/candidate.hpp"
#include "verify/names.hpp"
#include "verify/runner.hpp"
#include "verify/storage.hpp"
#include "verify/tolerance.hpp"

namespace tessera::verify {
namespace {

LayerCase mutant_case(std::uint64_t seed) {
  LayerCase out;
  out.desc.shape = {.tokens = 96, .hidden = 72, .intermediate = 40, .experts = 8, .top_k = 3};
  out.desc.dtype = DType::bf16;
  out.desc.bias = true;
  out.routing = {.pattern = RoutingPattern::empty, .parameter = 0.125};
  out.sentinel_fraction = 0.1;
  out.gradient_mode = GradientMode::accumulate;
  out.seed = seed;
  return out;
}

struct Mutant {
  char const* name;
  std::vector<std::string> shows_in;       ///< each of these must fail
  std::function<void(LayerData&)> change;  ///< of what the GPU reads
};

/// Zeroes the last `count` of each run of `length` values.
void zero_tails(std::vector<float>& values, std::int64_t length, std::int64_t count) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (static_cast<std::int64_t>(i) % length >= length - count) values[i] = 0;
  }
}

/// Exchanges two neighbouring runs of `length` values.
void swap_runs(std::vector<float>& values, std::int64_t length) {
  std::swap_ranges(values.begin(), values.begin() + length, values.begin() + length);
}

bool is_sentinel(LayerData const& data, std::int64_t id) {
  return id < 0 || id >= data.desc.shape.experts;
}

/// The last token reads what belongs to the one before it.
void repeat_last_row(std::vector<float>& values, std::int64_t d) {
  std::copy_n(values.end() - 2 * d, d, values.end() - d);
}

using Names = std::vector<std::string>;

std::vector<Mutant> const kMutants = {
    {"2 neighbour row", {"o"}, [](LayerData& data) { swap_runs(data.x, data.desc.shape.hidden); }},
    {"2 neighbour row of dO",
     {"dx"},
     [](LayerData& data) { swap_runs(data.d_o, data.desc.shape.hidden); }},
    {"3 swapped experts",
     {"o", "dx", "dscores", "dw_up", "dw_down"},
     [](LayerData& data) {
       MoeShape const& s = data.desc.shape;
       swap_runs(data.w_up, 2 * s.intermediate * s.hidden);
       swap_runs(data.w_down, s.intermediate * s.hidden);
     }},
    {"4 lost tail of d",
     {"o", "dx", "dscores", "dw_up"},
     [](LayerData& data) { zero_tails(data.w_up, data.desc.shape.hidden, 4); }},
    {"4 lost tail of n",
     {"o", "dx", "dscores"},
     [](LayerData& data) { zero_tails(data.w_down, data.desc.shape.intermediate, 4); }},
    {"5 ignored scores",
     {"o", "dx", "dw_up", "dw_down", "db_up", "db_down"},
     [](LayerData& data) { std::fill(data.scores.begin(), data.scores.end(), 1); }},
    {"7 swapped gate and up",
     {"o", "dx", "dscores", "dw_up"},
     [](LayerData& data) { data.desc.layout.order = GateUpOrder::up_first; }},
    {"8 missing slot",
     {"o", "dx"},
     [](LayerData& data) {
       std::size_t slot = 0;
       while (is_sentinel(data, data.topk_ids[slot])) ++slot;
       data.scores[slot] = 0;
     }},
    {"10 b_down missing",
     {"o", "dscores"},
     [](LayerData& data) { std::fill(data.b_down.begin(), data.b_down.end(), 0); }},
    {"11 computed sentinel",
     {"o", "dx", "dscores", "dw_up", "dw_down"},
     [](LayerData& data) {
       for (std::size_t j = 0; j < data.topk_ids.size(); ++j) {
         if (!is_sentinel(data, data.topk_ids[j])) continue;
         data.topk_ids[j] = 0;
         data.scores[j] = 0.5f;
       }
     }},
    {"13 ignored accumulate",
     {"dw_up", "dw_down", "db_up", "db_down"},
     [](LayerData& data) { data.gradient_mode = GradientMode::write; }},
    {"14 wrong token",
     {"o"},
     [](LayerData& data) { repeat_last_row(data.x, data.desc.shape.hidden); }},
    {"14 wrong token of dO",
     {"dx"},
     [](LayerData& data) { repeat_last_row(data.d_o, data.desc.shape.hidden); }},
};

/// Results made wrong after the kernels: what no input can bring about.
struct ResultMutant {
  char const* name;
  Names shows_in;
  std::function<void(LayerData const&, reference::Metadata const&, std::vector<float>&)> change;
};

std::vector<ResultMutant> const kResultMutants = {
    {"1 all zeros",
     {"o", "dx", "dscores", "dw_up", "dw_down", "db_up", "db_down"},
     [](LayerData const&, reference::Metadata const&, std::vector<float>& values) {
       std::fill(values.begin(), values.end(), 0);
     }},
    {"6 stale row",
     {"o", "dx"},
     [](LayerData const& data, reference::Metadata const&, std::vector<float>& rows) {
       std::int64_t const d = data.desc.shape.hidden;
       std::copy_n(rows.begin() + d, d, rows.begin());
     }},
    {"9 scaled ds",
     {"dscores"},
     [](LayerData const& data, reference::Metadata const&, std::vector<float>& dscores) {
       for (std::size_t j = 0; j < dscores.size(); ++j) {
         if (!is_sentinel(data, data.topk_ids[j])) dscores[j] *= data.scores[j];
       }
     }},
    {"12 touched empty expert",
     {"dw_up", "dw_down", "db_up", "db_down"},
     [](LayerData const& data, reference::Metadata const& metadata, std::vector<float>& values) {
       std::int64_t const experts = data.desc.shape.experts;
       std::size_t const each = values.size() / static_cast<std::size_t>(experts);
       for (std::int64_t e = 0; e < experts; ++e) {
         if (metadata.expert_offsets[e] != metadata.expert_offsets[e + 1]) continue;
         values[static_cast<std::size_t>(e) * each] += 1;
       }
     }},
};

int failures = 0;

void expect(bool holds, std::string const& what) {
  if (holds) return;
  ++failures;
  std::printf("%s\n", what.c_str());
}

void check_seed(Context const& context, Context const& host, std::uint64_t seed) {
  LayerData const data = make_data(mutant_case(seed));
  auto const inputs = reference_inputs(data);
  auto const forward = reference::forward(inputs);
  auto const backward =
      reference::backward(inputs, forward, reference::Values(data.d_o.begin(), data.d_o.end()));
  auto const ref = reference_tensors(data, forward, backward);
  auto const naives = naive_samples(host, data, inputs, forward.metadata);
  auto const run = [&](LayerData const& read) {
    auto result = run_candidate(context, read, kPoisons[0], Alignment::cache_line);
    expect(result.ok(), result.status().text());
    if (!result.ok()) return Tensors();
    result.value().tensors.erase("scores");
    return std::move(result.value().tensors);
  };
  auto const judged = [&](Tensors const& out) {
    return judge(data, inputs, forward, ref, naives, out);
  };
  auto const expect_rejected = [&](char const* name, Names const& shows_in, Tensors const& out) {
    auto const results = judged(out);
    for (std::string const& tensor : shows_in) {
      expect(results.contains(tensor) && !results.at(tensor).ok,
             std::string(name) + " passes in " + tensor);
    }
  };
  Tensors const right = run(data);
  for (auto const& [name, result] : judged(right)) {
    expect(result.ok, "the layer itself is rejected: " + name + ": " + result.reason);
  }
  for (Mutant const& mutant : kMutants) {
    LayerData changed = data;
    mutant.change(changed);
    expect_rejected(mutant.name, mutant.shows_in, run(changed));
  }
  for (ResultMutant const& mutant : kResultMutants) {
    Tensors changed = right;
    for (std::string const& tensor : mutant.shows_in) {
      mutant.change(data, forward.metadata, changed.at(tensor));
    }
    expect_rejected(mutant.name, mutant.shows_in, changed);
  }
}

int run() {
  constexpr int kSkipped = 77;
  auto const context = Context::create({{DeviceKind::cuda, 0}});
  if (!context.ok()) {
    std::printf("%s\n", context.status().text());
    return kSkipped;
  }
  Context const host = std::move(Context::create()).value();
  for (std::uint64_t seed = 1; seed <= 3; ++seed) check_seed(context.value(), host, seed);
  std::printf("%zu mutants, %s\n", kMutants.size() + kResultMutants.size(),
              failures == 0 ? "all rejected" : "NOT all rejected");
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::verify

int main() { return tessera::verify::run(); }

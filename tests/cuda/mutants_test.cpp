// SPDX-License-Identifier: Apache-2.0
// The layer on a GPU is accepted, and every mutant of it is rejected: the GPU computes from inputs in which one thing
// is wrong, and is judged by the right ones. Mutants that need a fault inside a kernel rather than in its inputs are
// made from the GPU's results. Exit 0 passed, 1 failed, 77 skipped (no GPU).
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
  out.seed = seed;
  return out;
}

struct Mutant {
  char const* name;
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

std::vector<Mutant> const kMutants = {
    {"2 neighbour row", [](LayerData& data) { swap_runs(data.x, data.desc.shape.hidden); }},
    {"3 swapped experts",
     [](LayerData& data) {
       MoeShape const& s = data.desc.shape;
       swap_runs(data.w_up, 2 * s.intermediate * s.hidden);
       swap_runs(data.w_down, s.intermediate * s.hidden);
     }},
    {"4 lost tail of d", [](LayerData& data) { zero_tails(data.w_up, data.desc.shape.hidden, 4); }},
    {"4 lost tail of n",
     [](LayerData& data) { zero_tails(data.w_down, data.desc.shape.intermediate, 4); }},
    {"5 ignored scores",
     [](LayerData& data) { std::fill(data.scores.begin(), data.scores.end(), 1); }},
    {"7 swapped gate and up",
     [](LayerData& data) { data.desc.layout.order = GateUpOrder::up_first; }},
    {"8 missing slot",
     [](LayerData& data) {
       std::size_t slot = 0;
       while (is_sentinel(data, data.topk_ids[slot])) ++slot;
       data.scores[slot] = 0;
     }},
    {"10 b_down missing",
     [](LayerData& data) { std::fill(data.b_down.begin(), data.b_down.end(), 0); }},
    {"11 computed sentinel",
     [](LayerData& data) {
       for (std::size_t j = 0; j < data.topk_ids.size(); ++j) {
         if (!is_sentinel(data, data.topk_ids[j])) continue;
         data.topk_ids[j] = 0;
         data.scores[j] = 0.5f;
       }
     }},
    {"14 wrong token",
     [](LayerData& data) {
       std::int64_t const d = data.desc.shape.hidden;
       std::copy_n(data.x.end() - 2 * d, d, data.x.end() - d);
     }},
};

/// Results made wrong after the kernels: what no input can bring about.
std::vector<std::pair<char const*, std::function<void(std::vector<float>&, std::int64_t)>>> const
    kResultMutants = {
        {"1 all zeros",
         [](std::vector<float>& o, std::int64_t) { std::fill(o.begin(), o.end(), 0); }},
        {"6 stale row",
         [](std::vector<float>& o, std::int64_t d) { std::copy_n(o.begin() + d, d, o.begin()); }},
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
  auto const ref = reference_tensors(data, forward, reference::Backward{});
  auto const naives = naive_samples(host, data, inputs, forward.metadata);
  auto const run = [&](LayerData const& read) {
    auto result = run_candidate(context, read, kPoisons[0], Alignment::cache_line);
    expect(result.ok(), result.status().text());
    return result.ok() ? std::move(result.value().tensors.at("o")) : std::vector<float>();
  };
  auto const accepts = [&](std::vector<float> o) {
    Tensors out;
    out["o"] = std::move(o);
    return all_ok(judge(data, inputs, forward, ref, naives, out));
  };
  std::vector<float> const o = run(data);
  expect(accepts(o), "the layer itself is rejected");
  for (Mutant const& mutant : kMutants) {
    LayerData changed = data;
    mutant.change(changed);
    expect(!accepts(run(changed)), std::string(mutant.name) + " passes");
  }
  for (auto const& [name, change] : kResultMutants) {
    std::vector<float> changed = o;
    change(changed, data.desc.shape.hidden);
    expect(!accepts(changed), std::string(name) + " passes");
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

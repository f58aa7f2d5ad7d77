// SPDX-License-Identifier: Apache-2.0
// The workspace of layers that quantise: what is alive at a time lies apart, and the sum is what `tessera plan` says.
// Needs the CUDA headers, no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/layer/backend.hpp"
#include "cuda/layer/plan.hpp"

namespace tessera::cuda {
namespace {

/// What an op has in the workspace at a time.
struct Place {
  char const* name;
  std::size_t offset, bytes;
};
template <class T>
Place place_of(char const* name, core::Region<T> const& region, std::int64_t elements) {
  return {name, region.offset, sizeof(T) * static_cast<std::size_t>(elements)};
}
void add_codes(std::vector<Place>& places, char const* name, CodesRegion const& region,
               std::int64_t rows, std::int64_t width, std::int64_t scales) {
  places.push_back(place_of(name, region.codes, rows * width));
  places.push_back(place_of(name, region.scales, scales));
}
void expect_apart(std::vector<Place> places, std::size_t workspace, char const* when) {
  std::sort(places.begin(), places.end(),
            [](Place const& a, Place const& b) { return a.offset < b.offset; });
  for (std::size_t i = 0; i < places.size(); ++i) {
    std::size_t const end = places[i].offset + places[i].bytes;
    std::size_t const next =
        i + 1 < places.size() ? places[i + 1].offset : workspace - core::WorkspacePlan::kAlignment;
    EXPECT_LE(end, next) << when << ": " << places[i].name;
  }
}

MoeDesc quantised_desc(std::int64_t intermediate, SavePolicy save) {
  MoeDesc desc;
  desc.shape = {
      .tokens = 301, .hidden = 512, .intermediate = intermediate, .experts = 6, .top_k = 2};
  desc.dtype = DType::bf16;
  desc.router.kind = RouterKind::topk_softmax;
  desc.precision = Precision::fp8;
  desc.save = save;
  return desc;
}

// Codes and what is made of them have places of their own while they are read.
TEST(QuantisedPlans, KeepWhatIsReadAtATimeApart) {
  std::int64_t const t = 301, d = 512, e = 6, p = 602, p4 = 604;
  for (std::int64_t const n : {256, 768}) {
    std::int64_t const up = e * 2 * n * d, of_up = up / (128 * 128), half = up / 2;
    for (SavePolicy const save : {SavePolicy::h, SavePolicy::x, SavePolicy::none}) {
      MoeDesc const desc = quantised_desc(n, save);
      constexpr std::size_t kTables = 5000;
      ForwardPlan const f = plan_forward(desc, kTables);
      std::vector<Place> places = {place_of("counters", f.counters, kNumTileCounters)};
      if (save == SavePolicy::none) {
        places.push_back(place_of("tables", f.routing, static_cast<std::int64_t>(kTables)));
      }
      add_codes(places, "a8", f.a8, p, n, p4 * n / 128);
      add_codes(places, "w_down", f.w_down, 1, half, of_up / 2);
      std::vector<Place> down = places;
      down.push_back(place_of("y", f.y, p * d));
      expect_apart(down, f.bytes, "down_projection_fwd");
      if (save == SavePolicy::none) add_codes(places, "x8", f.x8, t, d, t * d / 128);
      add_codes(places, "w_up", f.w_up, 1, up, of_up);
      expect_apart(places, f.bytes, "up_projection_fwd");
      if (save == SavePolicy::none) continue;

      for (Pass const pass : {Pass::backward, Pass::backward_input}) {
        bool const whole = pass == Pass::backward;
        BackwardPlan const b = plan_backward(desc, pass);
        std::vector<Place> always = {place_of("counters", b.counters, kNumTileCounters)};
        if (whole) always.push_back(place_of("x", b.x, t * d));
        std::vector<Place> makes_h = always;
        if (save == SavePolicy::x) {
          add_codes(makes_h, "w_up", b.w_up, 1, up, of_up);
          add_codes(makes_h, "h8", b.h8, p, 2 * n, p4 * 2 * n / 128);
          std::vector<Place> into_dh = makes_h;
          if (whole) into_dh.push_back(place_of("dh", b.dh, p * 2 * n));
          expect_apart(into_dh, b.bytes, "h8 again");
        }
        if (whole) always.push_back(place_of("dh", b.dh, p * 2 * n));
        add_codes(always, "dh8", b.dh8, p, 2 * n, p4 * 2 * n / 128);
        std::vector<Place> dgrad = always;
        add_codes(dgrad, "d_o8", b.d_o8, t, d, t * d / 128);
        add_codes(dgrad, "w_down_t", b.w_down_t, 1, half, of_up / 2);
        if (whole) dgrad.push_back(place_of("a_scaled", b.a_or_dx, p * n));
        dgrad.push_back(place_of("ds_partials", b.ds_partials, p * n / 128));
        expect_apart(dgrad, b.bytes, "down_projection_dgrad");
        add_codes(always, "w_up_t", b.w_up_t, 1, up, of_up);
        always.push_back(place_of("dx rows", b.a_or_dx, p * d));
        expect_apart(always, b.bytes, "up_projection_dgrad");
      }
    }
  }
}

// y lies where the codes of w_up were, and w_up where dO and w_down were: as `tessera plan` counts.
TEST(QuantisedPlans, ShareTheMemoryOfWhatIsDead) {
  MoeDesc desc = quantised_desc(768, SavePolicy::h);
  desc.shape = {.tokens = 32768, .hidden = 2048, .intermediate = 768, .experts = 128, .top_k = 8};
  desc.router = {};
  auto const mib = [&](Pass pass) {
    return static_cast<double>(workspace_bytes(desc, pass, 0)) / (1 << 20);
  };
  EXPECT_NEAR(mib(Pass::forward), 1414, 4);
  EXPECT_NEAR(mib(Pass::backward), 2700, 8);  // and ds_partials
  desc.weight_codes =
      true;  // no codes of w_down in forward; dO8 alone of what backward makes codes of
  EXPECT_NEAR(mib(Pass::forward), 1222, 4);
  EXPECT_NEAR(mib(Pass::backward), 2382, 8);
}

// With codes that are handed in backward has the scales of the transposes alone, beside d_o8 and the dx rows.
TEST(QuantisedPlans, TurnedScalesLieApart) {
  MoeDesc desc = quantised_desc(256, SavePolicy::x);
  desc.weight_codes = true;
  std::int64_t const t = 301, d = 512, n = 256, e = 6, p = 602, p4 = 604;
  BackwardPlan const b = plan_backward(desc, Pass::backward);
  std::vector<Place> places = {place_of("counters", b.counters, kNumTileCounters),
                               place_of("x", b.x, t * d), place_of("dh", b.dh, p * 2 * n)};
  add_codes(places, "h8", b.h8, p, 2 * n, p4 * 2 * n / 128);
  std::vector<Place> down = places;
  add_codes(down, "d_o8", b.d_o8, t, d, t * d / 128);
  down.push_back(place_of("w_down_t scales", b.w_down_t.scales, e * n * d / (128 * 128)));
  down.push_back(place_of("a_scaled", b.a_or_dx, p * n));
  expect_apart(down, b.bytes, "down_projection_dgrad");
  places.push_back(place_of("w_up_t scales", b.w_up_t.scales, e * 2 * n * d / (128 * 128)));
  places.push_back(place_of("dx rows", b.a_or_dx, p * d));
  expect_apart(places, b.bytes, "up_projection_dgrad");
}

}  // namespace
}  // namespace tessera::cuda

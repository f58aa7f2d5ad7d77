// SPDX-License-Identifier: Apache-2.0
// The workspace of layers that quantise: what is alive at a time lies apart, and the sum is what `tessera plan` says.
// Needs the CUDA headers, no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
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
/// Of rows of `width`; `sorted`: of fp8, in columns of scales.
void add_codes(std::vector<Place>& places, char const* name, CodesRegion const& region,
               MoeDesc const& desc, std::int64_t rows, std::int64_t width, bool is_sorted) {
  bool const is_mxfp8 = desc.precision == Precision::mxfp8;
  std::int64_t const scale_rows = is_sorted && !is_mxfp8 ? (rows + 3) / 4 * 4 : rows;
  places.push_back(place_of(name, region.codes, rows * width));
  places.push_back(place_of(name, region.scales,
                            is_mxfp8 ? scale_rows * width / 32 : 4 * (scale_rows * width / 128)));
}
std::int64_t bytes_of_weight_scales(MoeDesc const& desc, std::int64_t elements) {
  return desc.precision == Precision::mxfp8 ? elements / 32 : 4 * (elements / (128 * 128));
}
void add_weights(std::vector<Place>& places, char const* name, CodesRegion const& region,
                 MoeDesc const& desc, std::int64_t elements) {
  places.push_back(place_of(name, region.codes, elements));
  places.push_back(place_of(name, region.scales, bytes_of_weight_scales(desc, elements)));
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

MoeDesc quantised_desc(std::int64_t intermediate, SavePolicy save,
                       Precision precision = Precision::fp8) {
  MoeDesc desc;
  desc.shape = {
      .tokens = 301, .hidden = 512, .intermediate = intermediate, .experts = 6, .top_k = 2};
  desc.dtype = DType::bf16;
  desc.router.kind = RouterKind::topk_softmax;
  desc.precision = precision;
  desc.save = save;
  return desc;
}

// Codes and what is made of them have places of their own while they are read.
void expect_read_at_a_time_apart(Precision precision, std::initializer_list<std::int64_t> sizes) {
  std::int64_t const t = 301, d = 512, e = 6, p = 602;
  for (std::int64_t const n : sizes) {
    std::int64_t const up = e * 2 * n * d, half = up / 2;
    for (SavePolicy const save : {SavePolicy::h, SavePolicy::x, SavePolicy::none}) {
      MoeDesc const desc = quantised_desc(n, save, precision);
      constexpr std::size_t kTables = 5000;
      ForwardPlan const f = plan_forward(desc, kTables);
      std::vector<Place> places = {place_of("counters", f.counters, kNumTileCounters)};
      if (save == SavePolicy::none) {
        places.push_back(place_of("tables", f.routing, static_cast<std::int64_t>(kTables)));
      }
      add_codes(places, "a8", f.a8, desc, p, n, true);
      add_weights(places, "w_down", f.w_down, desc, half);
      std::vector<Place> down = places;
      down.push_back(place_of("y", f.y, p * d));
      expect_apart(down, f.bytes, "down_projection_fwd");
      if (save == SavePolicy::none) add_codes(places, "x8", f.x8, desc, t, d, false);
      add_weights(places, "w_up", f.w_up, desc, up);
      expect_apart(places, f.bytes, "up_projection_fwd");
      if (save == SavePolicy::none) continue;

      for (Pass const pass : {Pass::backward, Pass::backward_input}) {
        bool const whole = pass == Pass::backward;
        BackwardPlan const b = plan_backward(desc, pass);
        std::vector<Place> always = {place_of("counters", b.counters, kNumTileCounters)};
        if (whole) always.push_back(place_of("x", b.x, t * d));
        std::vector<Place> makes_h = always;
        if (save == SavePolicy::x) {
          add_weights(makes_h, "w_up", b.w_up, desc, up);
          add_codes(makes_h, "h8", b.h8, desc, p, 2 * n, true);
          std::vector<Place> into_dh = makes_h;
          if (whole) into_dh.push_back(place_of("dh", b.dh, p * 2 * n));
          expect_apart(into_dh, b.bytes, "h8 again");
        }
        if (whole) always.push_back(place_of("dh", b.dh, p * 2 * n));
        add_codes(always, "dh8", b.dh8, desc, p, 2 * n, true);
        std::vector<Place> dgrad = always;
        add_codes(dgrad, "d_o8", b.d_o8, desc, t, d, false);
        add_weights(dgrad, "w_down_t", b.w_down_t, desc, half);
        if (whole) dgrad.push_back(place_of("a_scaled", b.a_or_dx, p * n));
        dgrad.push_back(place_of("ds_partials", b.ds_partials, p * n / 128));
        expect_apart(dgrad, b.bytes, "down_projection_dgrad");
        add_weights(always, "w_up_t", b.w_up_t, desc, up);
        always.push_back(place_of("dx rows", b.a_or_dx, p * d));
        expect_apart(always, b.bytes, "up_projection_dgrad");
      }
    }
  }
}

TEST(QuantisedPlans, KeepWhatIsReadAtATimeApart) {
  expect_read_at_a_time_apart(Precision::fp8, {256, 768});
  expect_read_at_a_time_apart(Precision::mxfp8, {128, 384});
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
  desc.precision = Precision::mxfp8;
  EXPECT_NEAR(mib(Pass::forward), 1420, 4);
  EXPECT_NEAR(mib(Pass::backward), 2712, 8);
  desc.precision = Precision::fp8;
  desc.weight_codes =
      true;  // no codes of w_down in forward; dO8 alone of what backward makes codes of
  EXPECT_NEAR(mib(Pass::forward), 1222, 4);
  EXPECT_NEAR(mib(Pass::backward), 2382, 8);
}

// With codes that are handed in backward has the scales of the transposes alone, beside d_o8 and the dx rows.
TEST(QuantisedPlans, TurnedScalesLieApart) {
  MoeDesc desc = quantised_desc(256, SavePolicy::x);
  desc.weight_codes = true;
  std::int64_t const t = 301, d = 512, n = 256, e = 6, p = 602;
  BackwardPlan const b = plan_backward(desc, Pass::backward);
  std::vector<Place> places = {place_of("counters", b.counters, kNumTileCounters),
                               place_of("x", b.x, t * d), place_of("dh", b.dh, p * 2 * n)};
  add_codes(places, "h8", b.h8, desc, p, 2 * n, true);
  std::vector<Place> down = places;
  add_codes(down, "d_o8", b.d_o8, desc, t, d, false);
  down.push_back(
      place_of("w_down_t scales", b.w_down_t.scales, bytes_of_weight_scales(desc, e * n * d)));
  down.push_back(place_of("a_scaled", b.a_or_dx, p * n));
  expect_apart(down, b.bytes, "down_projection_dgrad");
  places.push_back(
      place_of("w_up_t scales", b.w_up_t.scales, bytes_of_weight_scales(desc, e * 2 * n * d)));
  places.push_back(place_of("dx rows", b.a_or_dx, p * d));
  expect_apart(places, b.bytes, "up_projection_dgrad");
}

}  // namespace
}  // namespace tessera::cuda

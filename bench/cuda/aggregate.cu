// SPDX-License-Identifier: Apache-2.0
// aggregate against the device's copy rate, the library's choice and others for few slots: every result is compared
// with the plain twin bit for bit, then timed, interleaved with a device copy of as many bytes (half read, half
// written).
// bound_ms = (2Rd + 2Td) bytes over the copy rate measured between the same launches.
//
//   aggregate [--config NAME] [--iters N] [--json FILE]
#include <cstring>
#include <memory>

#include "../../src/cuda/kernels/aggregate.cuh"
#include "support.cuh"

namespace tessera::bench {
namespace {

struct Shape {
  char const* name;
  int tokens, hidden, intermediate, experts, top_k;
  int64_t rows() const { return int64_t{tokens} * top_k; }
  int64_t bytes() const { return 2 * (rows() + tokens) * hidden; }
};

constexpr Shape kShapes[] = {
    {"1.4B-n256", 40960, 768, 256, 128, 8},   {"7B-n256", 24576, 1536, 256, 128, 8},
    {"30B-n256", 32768, 4096, 256, 256, 16},  {"OLMoE", 32768, 2048, 1024, 64, 8},
    {"Qwen3Next", 32768, 2048, 512, 512, 10}, {"TR-a", 16384, 1536, 1024, 128, 2},
    {"7B-n1024", 24576, 1536, 1024, 32, 2},   {"7B-n512", 24576, 1536, 512, 64, 4},
    {"30B-n1024", 32768, 4096, 1024, 64, 4},
};

template <int kSlots, int kSlices, int kCtas>
struct AggregateVariant {
  static constexpr cuda::AggregateConfig config{
      .slots_in_flight = kSlots, .slices = kSlices, .warps = 8, .ctas_per_sm = kCtas};
};

struct Variant {
  char const* name;  // empty: the library's choice
  cudaError_t (*launch)(cuda::AggregateArguments const&, cudaStream_t);
  int most_slots;  // above, it is left out
};

constexpr Variant kVariants[] = {
    {"", cuda::launch_aggregate<bf16>, 1 << 30},
    {"2 slots", cuda::launch_aggregate_config<AggregateVariant<2, 1, 6>, bf16>, 2},
    {"2 slots, 2 slices", cuda::launch_aggregate_config<AggregateVariant<2, 2, 5>, bf16>, 2},
    {"2 slots, 3 slices", cuda::launch_aggregate_config<AggregateVariant<2, 3, 4>, bf16>, 2},
    {"4 slots, 2 slices", cuda::launch_aggregate_config<AggregateVariant<4, 2, 4>, bf16>, 4},
};

struct Options {
  std::string config, json, command;
  int iters = 60;
};

constexpr int kSets = 2;  // rotated, so that no launch finds its inputs in L2
constexpr int kWarmUps = 20;

// Slot -> row: the rows of a token in expert order.
std::vector<int32_t> inverse_permutation(Shape const& s, Routing const& routing) {
  std::vector<int32_t> inverse(size_t(s.rows()));
  std::vector<int> taken(size_t(s.tokens));
  for (size_t row = 0; row < routing.gather_index.size(); ++row) {
    int const token = routing.gather_index[row];
    inverse[int64_t{token} * s.top_k + taken[token]++] = int32_t(row);
  }
  return inverse;
}

struct Problem {
  explicit Problem(Shape const& s)
      : shape(s),
        scores(std::vector<float>(size_t(s.rows()), 0.25f)),
        inverse(inverse_permutation(s, Routing::random(s.tokens, s.experts, s.top_k, 11))) {
    for (int set = 0; set < kSets; ++set) {
      y.emplace_back(std::make_unique<DeviceBuffer<bf16>>(s.rows() * s.hidden));
      o.emplace_back(std::make_unique<DeviceBuffer<bf16>>(int64_t{s.tokens} * s.hidden));
      copy_from.emplace_back(std::make_unique<DeviceBuffer<char>>(s.bytes() / 2));
      copy_to.emplace_back(std::make_unique<DeviceBuffer<char>>(s.bytes() / 2));
      fill_uniform<<<4096, 256>>>(y[set]->get(), y[set]->count(), 1 + set, 1.0f);
    }
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  cuda::AggregateArguments arguments(int set) const {
    return {.gmem_y = y[set]->get(),
            .gmem_scores = scores.get(),
            .gmem_inverse_permutation = inverse.get(),
            .gmem_token_offsets = nullptr,
            .gmem_o = o[set]->get(),
            .o_pitch = shape.hidden,
            .adds_to_o = false,
            .tokens = shape.tokens,
            .hidden = shape.hidden,
            .top_k = shape.top_k};
  }
  void copy(int set) const {
    TESSERA_CUDA(cudaMemcpyAsync(copy_to[set]->get(), copy_from[set]->get(), shape.bytes() / 2,
                                 cudaMemcpyDeviceToDevice));
  }

  Shape shape;
  DeviceBuffer<float> scores;
  DeviceBuffer<int32_t> inverse;
  std::vector<std::unique_ptr<DeviceBuffer<bf16>>> y, o;
  std::vector<std::unique_ptr<DeviceBuffer<char>>> copy_from, copy_to;
};

std::vector<bf16> output_of(Problem const& p, decltype(Variant::launch) launch) {
  p.o[0]->poison();
  TESSERA_CUDA(launch(p.arguments(0), nullptr));
  std::vector<bf16> host(size_t(p.o[0]->count()));
  TESSERA_CUDA(
      cudaMemcpy(host.data(), p.o[0]->get(), host.size() * sizeof(bf16), cudaMemcpyDeviceToHost));
  return host;
}

struct Candidate {
  Variant const* variant;  // null: the copy
  bool checked = true;
  std::vector<float> ms{};
};

// The variants for the shape's K, and the copy, which comes last.
std::vector<Candidate> candidates_of(Problem const& p) {
  std::vector<bf16> const plain = output_of(p, cuda::launch_aggregate_plain<bf16>);
  std::vector<Candidate> out;
  for (Variant const& variant : kVariants) {
    if (p.shape.top_k > variant.most_slots) continue;
    std::vector<bf16> const own = output_of(p, variant.launch);
    out.push_back(
        {&variant, std::memcmp(plain.data(), own.data(), plain.size() * sizeof(bf16)) == 0});
  }
  out.push_back({nullptr});
  return out;
}

void time_interleaved(Problem const& p, int iters, std::vector<Candidate>& candidates) {
  Timer timer;
  std::mt19937 random(1);
  std::vector<size_t> order(candidates.size());
  std::iota(order.begin(), order.end(), size_t{0});
  for (int i = -kWarmUps; i < iters; ++i) {
    int const set = (i + kWarmUps) % kSets;
    std::shuffle(order.begin(), order.end(), random);
    for (size_t const next : order) {
      Candidate& c = candidates[next];
      timer.record([&] {
        if (c.variant == nullptr) return p.copy(set);
        TESSERA_CUDA(c.variant->launch(p.arguments(set), nullptr));
      });
      float const ms = timer.ms();
      if (i >= 0) c.ms.push_back(ms);
    }
  }
}

std::string bench_shape(Shape const& s, int iters, double& copy_tbps) {
  Problem const p(s);
  std::vector<Candidate> candidates = candidates_of(p);
  time_interleaved(p, iters, candidates);
  float const copy_ms = quantiles(candidates.back().ms).median;
  candidates.pop_back();
  copy_tbps = std::max(copy_tbps, double(s.bytes()) / (double(copy_ms) * 1e9));
  std::string rows;
  for (Candidate const& c : candidates) {
    Quantiles const t = quantiles(c.ms);
    std::printf("%-10s %-18s %8.4f ms, copy %8.4f ms, %5.2f TB/s, of copy %.3f%s\n", s.name,
                c.variant->name, t.median, copy_ms, double(s.bytes()) / (double(t.median) * 1e9),
                copy_ms / t.median, c.checked ? "" : "  DIFFERS FROM THE PLAIN TWIN");
    char row[768];
    std::snprintf(
        row, sizeof row,
        "%s\n  {\"config\": \"%s\", \"shape\": [%d, %d, %d, %d, %d], \"dtype\": \"bf16\", "
        "\"gpus\": 1, \"routing\": \"random\", \"router\": \"given\", \"round\": \"none\", "
        "\"pass\": \"aggregate\", \"impl\": \"tessera\", \"variant\": \"%s\", \"ms\": %.4f, "
        "\"ms_p10\": %.4f, \"ms_p90\": %.4f, \"bound_ms\": %.4f, \"aggregate_floor_ms\": %.4f, "
        "\"checked\": %s}",
        rows.empty() ? "" : ",", s.name, s.tokens, s.hidden, s.intermediate, s.experts, s.top_k,
        c.variant->name, t.median, t.p10, t.p90, copy_ms, copy_ms, c.checked ? "true" : "false");
    rows += row;
  }
  return rows;
}

void write_json(Options const& options, double copy_tbps, std::string const& rows) {
  char ceilings[40];
  std::snprintf(ceilings, sizeof ceilings, "\"copy_tbps\": %.3f", copy_tbps);
  write_results(options.json, options.command,
                "median of " + std::to_string(options.iters) + " after " +
                    std::to_string(kWarmUps) +
                    " warm-ups, interleaved with a copy in random order, two sets of buffers "
                    "rotated, uniform random data",
                rows, ceilings);
}

int run(Options const& options) {
  std::string rows;
  double copy_tbps = 0;
  for (Shape const& s : kShapes) {
    if (!options.config.empty() && options.config != s.name) continue;
    if (!rows.empty()) rows += ",";
    rows += bench_shape(s, options.iters, copy_tbps);
  }
  if (!options.json.empty()) write_json(options, copy_tbps, rows);
  return rows.find("\"checked\": false") == std::string::npos ? 0 : 1;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  tessera::bench::Options options;
  for (int i = 0; i < argc; ++i) options.command += (i ? " " : "") + std::string(argv[i]);
  for (int i = 1; i < argc; ++i) {
    std::string const flag = argv[i];
    bool const has_value = i + 1 < argc;
    if (flag == "--config" && has_value) {
      options.config = argv[++i];
    } else if (flag == "--json" && has_value) {
      options.json = argv[++i];
    } else if (flag == "--iters" && has_value && std::atoi(argv[i + 1]) > 0) {
      options.iters = std::atoi(argv[++i]);
    } else {
      std::fprintf(stderr, "unknown option %s\n", flag.c_str());
      return 2;
    }
  }
  return tessera::bench::run(options);
}

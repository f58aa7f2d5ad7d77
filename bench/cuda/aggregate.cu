// SPDX-License-Identifier: Apache-2.0
// aggregate against the device's copy rate, the library's choice and others for few slots: every result is compared
// with the plain twin bit for bit, then timed, interleaved with a device copy of as many bytes (half read, half
// written).
// bound_ms = (2Rd + 2Td) bytes over the copy rate measured between the same launches.
// With --varying every shape has K slots a token, and again numbers of slots that vary as after token rounding: of 100
// tokens 8 have one more and 8 have one less. Both are timed in turns, and beside the library's choice the ring with
// other sizes of items, and the kernel of a fixed number.
//
//   aggregate [--config NAME] [--iters N] [--varying] [--json FILE]
#include <cstring>
#include <memory>
#include <span>

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

// The library's ring with so many slots in an item.
template <int kSlots>
struct RingVariant : cuda::AggregateRing {
  static constexpr int item_slots(int) { return kSlots; }
};

// The kernel of a fixed number of slots, whatever their number.
cudaError_t launch_without_ring(cuda::AggregateArguments const& args, cudaStream_t stream) {
  return cuda::with_aggregate_config(args.top_k, [&]<class Config>(Config) {
    return cuda::launch_aggregate_config<Config, bf16>(args, stream);
  });
}

// On all SMs, behind nothing.
cudaError_t launch_beside(cuda::AggregateArguments const& args, cudaStream_t stream) {
  static DeviceBuffer<uint32_t> const counter(std::vector<uint32_t>{0});
  static int const sms = [] {
    int device = 0, count = 0;
    TESSERA_CUDA(cudaGetDevice(&device));
    TESSERA_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
  }();
  return cuda::launch_aggregate_beside<bf16>({args, counter.get()}, sms, stream);
}

struct Variant {
  char const* name;  // empty: the library's choice
  cudaError_t (*launch)(cuda::AggregateArguments const&, cudaStream_t);
  int most_slots;  // above, it is left out
  bool varies = false;
};

constexpr Variant kVariants[] = {
    {"", cuda::launch_aggregate<bf16>, 1 << 30},
    {"2 slots", cuda::launch_aggregate_config<AggregateVariant<2, 1, 6>, bf16>, 2},
    {"2 slots, 2 slices", cuda::launch_aggregate_config<AggregateVariant<2, 2, 5>, bf16>, 2},
    {"2 slots, 3 slices", cuda::launch_aggregate_config<AggregateVariant<2, 3, 4>, bf16>, 2},
    {"4 slots, 2 slices", cuda::launch_aggregate_config<AggregateVariant<4, 2, 4>, bf16>, 4},
};

constexpr Variant kVaryingVariants[] = {
    {"", cuda::launch_aggregate<bf16>, 1 << 30},
    {"beside", launch_beside, 1 << 30},
    {"varying", cuda::launch_aggregate<bf16>, 1 << 30, true},
    {"varying, beside", launch_beside, 1 << 30, true},
    {"varying, no ring", launch_without_ring, 1 << 30, true},
    {"varying, items of 16 slots", cuda::launch_aggregate_ring_config<RingVariant<16>, bf16>,
     1 << 30, true},
    {"varying, items of 32 slots", cuda::launch_aggregate_ring_config<RingVariant<32>, bf16>,
     1 << 30, true},
    {"varying, items of 64 slots", cuda::launch_aggregate_ring_config<RingVariant<64>, bf16>,
     1 << 30, true},
    {"varying, items of 128 slots", cuda::launch_aggregate_ring_config<RingVariant<128>, bf16>,
     1 << 30, true},
};

struct Options {
  std::string config, json, command;
  int iters = 60;
  bool varying = false;
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

// Two tokens of 25 give their last slot to another one, so that the number of slots stays.
std::vector<int32_t> varying_offsets(Shape const& s) {
  std::vector<int32_t> offsets{0};
  for (int t = 0; t < s.tokens; ++t) {
    bool const whole = t - t % 25 + 25 <= s.tokens;
    int const at = t % 25;
    int const more = !whole ? 0 : at == 3 || at == 14 ? 1 : at == 9 || at == 20 ? -1 : 0;
    offsets.push_back(offsets.back() + s.top_k + more);
  }
  return offsets;
}

struct Problem {
  explicit Problem(Shape const& s)
      : shape(s),
        scores(std::vector<float>(size_t(s.rows()), 0.25f)),
        inverse(inverse_permutation(s, Routing::random(s.tokens, s.experts, s.top_k, 11))),
        offsets(varying_offsets(s)) {
    for (int set = 0; set < kSets; ++set) {
      y.emplace_back(std::make_unique<DeviceBuffer<bf16>>(s.rows() * s.hidden));
      o.emplace_back(std::make_unique<DeviceBuffer<bf16>>(int64_t{s.tokens} * s.hidden));
      copy_from.emplace_back(std::make_unique<DeviceBuffer<char>>(s.bytes() / 2));
      copy_to.emplace_back(std::make_unique<DeviceBuffer<char>>(s.bytes() / 2));
      fill_uniform<<<4096, 256>>>(y[set]->get(), y[set]->count(), 1 + set, 1.0f);
    }
    TESSERA_CUDA(cudaDeviceSynchronize());
  }

  cuda::AggregateArguments arguments(int set, bool varies) const {
    return {.gmem_y = y[set]->get(),
            .gmem_scores = scores.get(),
            .gmem_inverse_permutation = inverse.get(),
            .gmem_token_offsets = varies ? offsets.get() : nullptr,
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
  DeviceBuffer<int32_t> inverse, offsets;
  std::vector<std::unique_ptr<DeviceBuffer<bf16>>> y, o;
  std::vector<std::unique_ptr<DeviceBuffer<char>>> copy_from, copy_to;
};

std::vector<bf16> output_of(Problem const& p, decltype(Variant::launch) launch, bool varies) {
  p.o[0]->poison();
  TESSERA_CUDA(launch(p.arguments(0, varies), nullptr));
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
std::vector<Candidate> candidates_of(Problem const& p, std::span<Variant const> variants) {
  std::vector<bf16> const plain[] = {output_of(p, cuda::launch_aggregate_plain<bf16>, false),
                                     output_of(p, cuda::launch_aggregate_plain<bf16>, true)};
  std::vector<Candidate> out;
  for (Variant const& variant : variants) {
    if (p.shape.top_k > variant.most_slots) continue;
    std::vector<bf16> const own = output_of(p, variant.launch, variant.varies);
    out.push_back({&variant, std::memcmp(plain[variant.varies].data(), own.data(),
                                         own.size() * sizeof(bf16)) == 0});
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
        TESSERA_CUDA(c.variant->launch(p.arguments(set, c.variant->varies), nullptr));
      });
      float const ms = timer.ms();
      if (i >= 0) c.ms.push_back(ms);
    }
  }
}

std::string bench_shape(Shape const& s, Options const& options, double& copy_tbps) {
  Problem const p(s);
  std::vector<Candidate> candidates =
      options.varying ? candidates_of(p, kVaryingVariants) : candidates_of(p, kVariants);
  time_interleaved(p, options.iters, candidates);
  float const copy_ms = quantiles(candidates.back().ms).median;
  candidates.pop_back();
  copy_tbps = std::max(copy_tbps, double(s.bytes()) / (double(copy_ms) * 1e9));
  std::string rows;
  for (Candidate const& c : candidates) {
    Quantiles const t = quantiles(c.ms);
    std::printf("%-10s %-27s %8.4f ms, copy %8.4f ms, %5.2f TB/s, of copy %.3f%s\n", s.name,
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
    rows += bench_shape(s, options, copy_tbps);
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
    } else if (flag == "--varying") {
      options.varying = true;
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

// SPDX-License-Identifier: Apache-2.0
// route, metadata and router_loss, compared with their plain twins, and choose_tokens, which makes the tables as well,
// its rows with its rule; then timed. Token rounding is timed with its route, too: in two calls, and where the layer
// has one for both as route_and_rank, whose slots are compared with those of the two. Each is replayed as a graph of
// kRepeats calls over rotating buffers larger than L2 and divided: launches included, gaps of an eager stream not.
// bound_ms = the bytes of the op over the copy rate given.
//
//   routing [--json FILE] [--copy-tbps X]
#include <cstring>
#include <memory>

#include "../../src/cuda/host/choose_tokens.hpp"
#include "../../src/cuda/host/metadata.hpp"
#include "../../src/cuda/host/route.hpp"
#include "../../src/cuda/host/router_loss.hpp"
#include "support.cuh"

namespace tessera::bench {
namespace {

constexpr int kSets = 8, kRepeats = 24, kReplays = 60, kWarmUps = 20;

struct Shape {
  char const* name;
  int tokens, hidden, intermediate, experts, top_k;
  int64_t slots() const { return int64_t{tokens} * top_k; }
};

constexpr Shape kShapes[] = {
    {"7B-n256", 24576, 1536, 256, 128, 8}, {"30B-n256", 32768, 4096, 256, 256, 16},
    {"OLMoE", 32768, 2048, 1024, 64, 8},   {"Qwen3Next", 32768, 2048, 512, 512, 10},
    {"TR-a", 16384, 1536, 1024, 128, 2},   {"TR-b", 16384, 4096, 1024, 256, 4},
};

__global__ void fill_logits(float* gmem, int64_t count, uint64_t seed) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t z = (uint64_t(i) + seed * 0x632be59bd9b4e019ull) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    gmem[i] = float((z ^ (z >> 31)) >> 40) * 0x1p-22f - 2.0f;
  }
}

struct Problem {
  explicit Problem(Shape const& s)
      : shape(s),
        workspace(workspace_words(s)),
        choice_workspace(int64_t(cuda::choose_tokens_workspace_bytes(s.tokens, s.experts) + 3) / 4),
        chosen_ids(most_slots(s)),
        chosen_scores(most_slots(s)),
        token_offsets(s.tokens + 1),
        topk_counts(s.experts),
        chosen_tables(3 * most_slots(s) + s.experts + 1),
        costs(s.experts + 1),  // the last one stands for z / S
        partial_losses(cuda::kRouterLosses * cuda::loss_blocks(s.tokens)),
        losses(2) {
    fill_logits<<<1, 256>>>(costs.get(), costs.count(), 0);
    for (int set = 0; set < kSets; ++set) {
      logits.push_back(std::make_unique<DeviceBuffer<float>>(int64_t{s.tokens} * s.experts));
      fill_logits<<<512, 256>>>(logits[set]->get(), logits[set]->count(), uint64_t(set) + 1);
      dlogits.push_back(std::make_unique<DeviceBuffer<float>>(logits[set]->count()));
      weights.push_back(std::make_unique<DeviceBuffer<float>>(s.slots()));
      tables.push_back(std::make_unique<DeviceBuffer<int32_t>>(4 * s.slots() + s.experts + 1));
    }
    TESSERA_CUDA(cudaDeviceSynchronize());
  }
  static int64_t workspace_words(Shape const& s) {
    return int64_t(cuda::metadata_workspace_bytes(s.slots(), s.experts) + 3) / 4;
  }
  static MoeDesc rounded(Shape const& s, Rounding round) {
    MoeDesc desc;
    desc.shape = {s.tokens, s.hidden, s.intermediate, s.experts, s.top_k};
    desc.router.kind = RouterKind::topk_softmax;
    desc.router.round = round;
    return desc;
  }
  static int64_t most_slots(Shape const& s) { return rounded(s, Rounding::up).num_slots(); }
  int32_t* ids(int set) const { return tables[set]->get(); }

  cuda::RouteArguments route(int set) const {
    cuda::RouteArguments args{};
    args.gmem_logits = logits[set]->get();
    args.gmem_topk_ids = ids(set);
    args.gmem_topk_weights = weights[set]->get();
    args.tokens = shape.tokens;
    args.experts = shape.experts;
    args.top_k = shape.top_k;
    args.kind = RouterKind::topk_softmax;
    args.route_scale = 1;
    return args;
  }
  cuda::MetadataArguments metadata(int set) const {
    int64_t const slots = shape.slots();
    cuda::MetadataArguments args{};
    args.gmem_ids = ids(set);
    args.slots = slots;
    args.tokens = shape.tokens;
    args.top_k = shape.top_k;
    args.experts = shape.experts;
    args.gmem_sort_permutation = ids(set) + slots;
    args.gmem_gather_index = ids(set) + 2 * slots;
    args.gmem_inverse_permutation = ids(set) + 3 * slots;
    args.gmem_expert_offsets = ids(set) + 4 * slots;
    args.gmem_workspace = workspace.get();
    return args;
  }

  // Of the choice that route(set) left.
  cuda::ChooseTokensArguments choose_tokens(int set, Rounding round) const {
    MoeDesc const desc = rounded(shape, round);
    cuda::ChooseTokensArguments args{};
    args.gmem_logits = logits[set]->get();
    args.gmem_topk_ids = ids(set);
    args.gmem_member_scores = weights[set]->get();
    args.tokens = shape.tokens;
    args.experts = shape.experts;
    args.top_k = shape.top_k;
    args.router = desc.router;
    args.slots = desc.num_slots();
    args.gmem_token_offsets = token_offsets.get();
    args.gmem_ids = chosen_ids.get();
    args.gmem_scores = chosen_scores.get();
    args.gmem_topk_counts = topk_counts.get();
    args.gmem_workspace = choice_workspace.get();
    args.tables.gmem_sort_permutation = chosen_tables.get();
    args.tables.gmem_gather_index = chosen_tables.get() + most_slots(shape);
    args.tables.gmem_inverse_permutation = chosen_tables.get() + 2 * most_slots(shape);
    args.tables.gmem_expert_offsets = chosen_tables.get() + 3 * most_slots(shape);
    return args;
  }

  cuda::RouterLossArguments router_loss(int set, RouterKind kind) const {
    cuda::RouterLossArguments args{};
    args.gmem_logits = logits[set]->get();
    args.gmem_cost = costs.get();
    args.gmem_dlogits = dlogits[set]->get();
    args.logits_pitch = args.dlogits_pitch = args.experts = shape.experts;
    args.gmem_losses = losses.get();
    args.gmem_partials = partial_losses.get();
    args.tokens = shape.tokens;
    args.kind = kind;
    args.d_loss = 1;
    return args;
  }

  Shape shape;
  std::vector<std::unique_ptr<DeviceBuffer<float>>> logits, dlogits, weights;
  std::vector<std::unique_ptr<DeviceBuffer<int32_t>>> tables;
  DeviceBuffer<int32_t> workspace, choice_workspace, chosen_ids;
  DeviceBuffer<float> chosen_scores;
  DeviceBuffer<int32_t> token_offsets, topk_counts, chosen_tables;
  DeviceBuffer<float> costs, partial_losses, losses;
};

struct Outputs {
  std::vector<int32_t> tables;
  std::vector<float> weights;
};

Outputs outputs_of(Problem const& p, bool plain) {
  p.tables[0]->poison();
  p.weights[0]->poison();
  TESSERA_CUDA(plain ? cuda::launch_route_plain(p.route(0), nullptr)
                     : cuda::launch_route(p.route(0), nullptr));
  TESSERA_CUDA(plain ? cuda::launch_metadata_plain(p.metadata(0), nullptr)
                     : cuda::launch_metadata(p.metadata(0), nullptr));
  Outputs out{std::vector<int32_t>(size_t(p.tables[0]->count())),
              std::vector<float>(size_t(p.weights[0]->count()))};
  TESSERA_CUDA(cudaMemcpy(out.tables.data(), p.tables[0]->get(), out.tables.size() * 4,
                          cudaMemcpyDeviceToHost));
  TESSERA_CUDA(cudaMemcpy(out.weights.data(), p.weights[0]->get(), out.weights.size() * 4,
                          cudaMemcpyDeviceToHost));
  return out;
}

bool same_as_plain(Problem const& p) {
  Outputs const plain = outputs_of(p, true), kernel = outputs_of(p, false);
  return plain.tables == kernel.tables &&
         std::memcmp(plain.weights.data(), kernel.weights.data(), plain.weights.size() * 4) == 0;
}

template <class T>
std::vector<T> host_copy(DeviceBuffer<T> const& buffer, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  TESSERA_CUDA(
      cudaMemcpy(values.data(), buffer.get(), values.size() * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

bool same_losses_as_plain(Problem const& p, RouterKind kind) {
  auto const result = [&](auto&& launch) {
    p.dlogits[0]->poison();
    p.losses.poison();
    TESSERA_CUDA(launch(p.router_loss(0, kind), nullptr));
    std::vector<float> values = host_copy(*p.dlogits[0], p.dlogits[0]->count());
    for (float const loss : host_copy(p.losses, 2)) values.push_back(loss);
    return values;
  };
  return result(cuda::launch_router_loss) == result(cuda::launch_router_loss_plain);
}

// Rows of every expert: the multiple of the tile below or above what the top-k choice gave it; each row with its slot.
bool is_rounded(Problem const& p, Rounding round) {
  cuda::ChooseTokensArguments const args = p.choose_tokens(0, round);
  TESSERA_CUDA(cuda::launch_choose_tokens(args, nullptr));
  int32_t const used = host_copy(p.token_offsets, args.tokens + 1).back();
  std::vector<int32_t> rows(size_t(args.experts));
  for (int32_t const id : host_copy(p.chosen_ids, used)) ++rows[size_t(id)];
  std::vector<int32_t> const counts = host_copy(p.topk_counts, args.experts);
  for (size_t e = 0; e < rows.size(); ++e) {
    int const tile = args.router.tile;
    if (rows[e] % tile != 0 || std::abs(rows[e] - counts[e]) >= tile) return false;
  }
  std::vector<int32_t> const tables = host_copy(p.chosen_tables, p.chosen_tables.count());
  auto const most = size_t(Problem::most_slots(p.shape));
  int32_t const *slot_of = tables.data(), *row_of = slot_of + 2 * most, *offsets = row_of + most;
  for (size_t e = 0; e < rows.size(); ++e) {
    if (offsets[e + 1] - offsets[e] != rows[e]) return false;
  }
  for (int32_t row = 0; row < used; ++row) {
    if (slot_of[row] < 0 || slot_of[row] >= used || row_of[slot_of[row]] != row) return false;
  }
  return true;
}

// The choice and its rounding, as the layer makes them: in two calls, or with the ranks made beside the choice.
void launch_rounded(Problem const& p, int set, Rounding round, bool in_one, cudaStream_t stream) {
  cuda::ChooseTokensArguments choice = p.choose_tokens(set, round);
  choice.has_ranks = in_one;
  TESSERA_CUDA(in_one ? cuda::launch_route_and_rank(p.route(set), choice, stream)
                      : cuda::launch_route(p.route(set), stream));
  TESSERA_CUDA(cuda::launch_choose_tokens(choice, stream));
}

bool same_in_one(Problem const& p, Rounding round) {
  auto const slots = [&](bool in_one) {
    p.tables[0]->poison();
    p.weights[0]->poison();
    p.choice_workspace.poison();
    launch_rounded(p, 0, round, in_one, nullptr);
    std::vector<int32_t> values = host_copy(p.chosen_ids, p.chosen_ids.count());
    for (auto const* buffer : {&p.token_offsets, &p.chosen_tables}) {
      for (int32_t const value : host_copy(*buffer, buffer->count())) values.push_back(value);
    }
    for (float const score : host_copy(p.chosen_scores, p.chosen_scores.count())) {
      values.push_back(__builtin_bit_cast(int32_t, score));
    }
    return values;
  };
  return slots(true) == slots(false);
}

// ms of one call.
template <class Launch>
Quantiles time_graph(Launch&& launch) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  cudaEvent_t begin, end;
  TESSERA_CUDA(cudaStreamCreate(&stream));
  TESSERA_CUDA(cudaEventCreate(&begin));
  TESSERA_CUDA(cudaEventCreate(&end));
  TESSERA_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kRepeats; ++i) launch(i % kSets, stream);
  TESSERA_CUDA(cudaStreamEndCapture(stream, &graph));
  TESSERA_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  std::vector<float> ms;
  for (int i = -kWarmUps; i < kReplays; ++i) {
    TESSERA_CUDA(cudaEventRecord(begin, stream));
    TESSERA_CUDA(cudaGraphLaunch(replay, stream));
    TESSERA_CUDA(cudaEventRecord(end, stream));
    TESSERA_CUDA(cudaEventSynchronize(end));
    float elapsed = 0;
    TESSERA_CUDA(cudaEventElapsedTime(&elapsed, begin, end));
    if (i >= 0) ms.push_back(elapsed / kRepeats);
  }
  TESSERA_CUDA(cudaGraphExecDestroy(replay));
  TESSERA_CUDA(cudaGraphDestroy(graph));
  TESSERA_CUDA(cudaStreamDestroy(stream));
  return quantiles(std::move(ms));
}

std::string row(Shape const& s, char const* pass, double bytes, double copy_tbps,
                Quantiles const& t, bool checked, char const* round = "none",
                char const* router = "topk-softmax") {
  double const bound = bytes / (copy_tbps * 1e9);
  std::printf("%-10s %-13s %-12s round %-9s %7.2f us, bound %6.2f us%s\n", s.name, pass, router,
              round, 1e3 * t.median, 1e3 * bound, checked ? "" : "  WRONG");
  char text[512];
  std::snprintf(text, sizeof text,
                "\n  {\"config\": \"%s\", \"shape\": [%d, %d, %d, %d, %d], \"dtype\": \"fp32\", "
                "\"gpus\": 1, \"routing\": \"random\", \"router\": \"%s\", \"round\": "
                "\"%s\", \"pass\": \"%s\", \"impl\": \"tessera\", \"variant\": \"graph\", \"ms\": "
                "%.5f, \"ms_p10\": %.5f, \"ms_p90\": %.5f, \"bound_ms\": %.5f, \"checked\": %s}",
                s.name, s.tokens, s.hidden, s.intermediate, s.experts, s.top_k, router, round, pass,
                t.median, t.p10, t.p90, bound, checked ? "true" : "false");
  return text;
}

std::string bench_shape(Shape const& s, double copy_tbps) {
  Problem const p(s);
  bool const checked = same_as_plain(p);
  for (int set = 0; set < kSets; ++set) TESSERA_CUDA(cuda::launch_route(p.route(set), nullptr));
  TESSERA_CUDA(cudaDeviceSynchronize());
  auto const route = [&](int set, cudaStream_t stream) {
    TESSERA_CUDA(cuda::launch_route(p.route(set), stream));
  };
  auto const metadata = [&](int set, cudaStream_t stream) {
    TESSERA_CUDA(cuda::launch_metadata(p.metadata(set), stream));
  };
  double const slots = double(s.slots());
  double const route_bytes = 4.0 * s.tokens * s.experts + 8 * slots;
  double const metadata_bytes = 16 * slots + 4.0 * s.experts;
  std::string rows = row(s, "route", route_bytes, copy_tbps, time_graph(route), checked);
  rows += "," + row(s, "metadata", metadata_bytes, copy_tbps, time_graph(metadata), checked);
  for (auto const& [kind, name] : {std::pair{RouterKind::topk_softmax, "topk-softmax"},
                                   {RouterKind::sigmoid_bias, "sigmoid-bias"}}) {
    auto const losses = [&](int set, cudaStream_t stream) {
      TESSERA_CUDA(cuda::launch_router_loss(p.router_loss(set, kind), stream));
    };
    rows += "," + row(s, "router_loss", 8.0 * s.tokens * s.experts, copy_tbps, time_graph(losses),
                      same_losses_as_plain(p, kind), "none", name);
  }
  // Logits and ids in, ranks out and in, slots and tables out.
  double const choice_bytes = 12.0 * s.tokens * s.experts + 28 * slots;
  for (auto const& [round, name] : {std::pair{Rounding::nr_f, "nr-f"},
                                    {Rounding::nr_s, "nr-s"},
                                    {Rounding::balance_f, "balance-f"}}) {
    auto const choose = [&](int set, cudaStream_t stream) {
      TESSERA_CUDA(cuda::launch_choose_tokens(p.choose_tokens(set, round), stream));
    };
    bool const rounded = is_rounded(p, round);
    rows +=
        "," + row(s, "choose_tokens", choice_bytes, copy_tbps, time_graph(choose), rounded, name);
    auto const time_both = [&](char const* pass, bool in_one, bool right) {
      auto const both = [&](int set, cudaStream_t stream) {
        launch_rounded(p, set, round, in_one, stream);
      };
      rows +=
          "," + row(s, pass, route_bytes + choice_bytes, copy_tbps, time_graph(both), right, name);
    };
    time_both("route, choose", false, rounded);
    if (cuda::route_ranks_pairs(p.route(0))) {
      time_both("route_and_rank", true, same_in_one(p, round));
    }
  }
  return rows;
}

int run(char const* json, double copy_tbps, std::string const& command) {
  std::string rows;
  for (Shape const& s : kShapes) rows += (rows.empty() ? "" : ",") + bench_shape(s, copy_tbps);
  bool const checked = rows.find("\"checked\": false") == std::string::npos;
  if (json == nullptr) return checked ? 0 : 1;
  char ceilings[40];
  std::snprintf(ceilings, sizeof ceilings, "\"copy_tbps\": %.3f", copy_tbps);
  write_results(json, command,
                "median of " + std::to_string(kReplays) + " replays of a graph of " +
                    std::to_string(kRepeats) + " calls over " + std::to_string(kSets) +
                    " rotating sets, after " + std::to_string(kWarmUps) + " warm-ups",
                rows, ceilings);
  return checked ? 0 : 1;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  char const* json = nullptr;
  double copy_tbps = 4.25;  // bench/results/archive/h200/2026-11-21-aggregate.json
  std::string command = argv[0];
  for (int i = 1; i < argc; ++i) {
    command += std::string(" ") + argv[i];
    if (std::strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
      json = argv[++i];
    } else if (std::strcmp(argv[i], "--copy-tbps") == 0 && i + 1 < argc &&
               std::atof(argv[i + 1]) > 0) {
      copy_tbps = std::atof(argv[++i]);
    } else {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      return 2;
    }
  }
  return tessera::bench::run(json, copy_tbps, command);
}

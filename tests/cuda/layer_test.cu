// SPDX-License-Identifier: Apache-2.0
// The layer on a GPU through the public API, in memory that the host cannot address: repeats bit for bit beside other
// work, threads, graphs, strides, grouped rows, bad device values, refusals. What is right is `tessera verify`'s job.
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "first_gpu.cuh"
#include "layer.cuh"

namespace tessera::cuda_test {
namespace {

// A second stream copies without end while the layer repeats, eagerly and by graph replay.
void repeats_beside_other_work(Context const& context) {
  constexpr int kRepeats = 1000;
  constexpr size_t kHogBytes = size_t{64} << 20;
  Layer const layer(context, small_desc(RouterKind::softmax_topk));
  cudaStream_t stream, hog;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  require(cudaStreamCreateWithFlags(&hog, cudaStreamNonBlocking), "stream");
  DeviceBuffer const from(kHogBytes), to(kHogBytes);
  EXPECT_OK(layer.step(stream));
  synchronize(stream);
  Bytes const first = layer.everything();
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  EXPECT_OK(layer.step(stream));
  require(cudaStreamEndCapture(stream, &graph), "capture");
  require(cudaGraphInstantiate(&replay, graph, 0), "graph");
  for (bool const by_graph : {false, true}) {
    int different = 0;
    for (int i = 0; i < kRepeats; ++i) {
      require(
          cudaMemcpyAsync(to.as<void>(), from.as<void>(), kHogBytes, cudaMemcpyDeviceToDevice, hog),
          "hog");
      layer.poison(stream);
      if (by_graph) {
        require(cudaGraphLaunch(replay, stream), "graph");
      } else {
        EXPECT_OK(layer.step(stream));
      }
      synchronize(stream);
      different += layer.everything() == first ? 0 : 1;
    }
    if (different != 0) std::printf("%d of %d repeats differ\n", different, kRepeats);
    EXPECT(different == 0);
  }
  require(cudaDeviceSynchronize(), "device");
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  cudaStreamDestroy(hog);
}

// Host threads share a Context, each with its own stream and layer.
void threads_do_not_disturb_each_other(Context const& context) {
  constexpr int kThreads = 4;
  Layer const alone(context, small_desc(RouterKind::topk_softmax));
  EXPECT_OK(alone.step(nullptr));
  require(cudaDeviceSynchronize(), "device");
  Bytes const expected = alone.everything();
  std::vector<std::thread> threads;
  std::vector<int> different(kThreads, 0);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Layer const own(context, small_desc(RouterKind::topk_softmax));
      cudaStream_t stream;
      require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
      for (int i = 0; i < 50; ++i) {
        own.poison(stream);
        if (!own.step(stream).ok()) ++different[t];
        synchronize(stream);
        if (own.everything() != expected) ++different[t];
      }
      cudaStreamDestroy(stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int const count : different) EXPECT(count == 0);
}

// A thread may have done nothing on a GPU before, and may have left an error of its own unread.
void threads_need_no_call_before(Context const& context) {
  Layer const layer(context, small_desc(RouterKind::topk_softmax));
  EXPECT_OK(layer.step(nullptr));
  require(cudaDeviceSynchronize(), "device");
  Bytes const expected = layer.everything();
  Status first, behind_an_error;
  for (bool const fails : {false, true}) {
    layer.poison(nullptr);
    require(cudaDeviceSynchronize(), "device");
    std::thread([&] {
      if (fails) cudaSetDevice(-1);
      (fails ? behind_an_error : first) = layer.step(nullptr);
    }).join();
    require(cudaDeviceSynchronize(), "device");
    EXPECT(layer.everything() == expected);
  }
  EXPECT_OK(first);
  EXPECT_OK(behind_an_error);
}

// ||a - b|| / ||b|| of two rows of bf16.
double difference(unsigned char const* a, unsigned char const* b, int64_t count) {
  double error = 0, norm = 0;
  for (int64_t i = 0; i < count; ++i) {
    __nv_bfloat16 own, other;
    std::memcpy(&own, a + 2 * i, 2);
    std::memcpy(&other, b + 2 * i, 2);
    double const x = __bfloat162float(own), y = __bfloat162float(other);
    error += (x - y) * (x - y);
    norm += y * y;
  }
  return std::sqrt(error / norm);
}

// Rows apart in x, o and logits give the results of contiguous ones and leave the gaps alone: the same bits where the
// gap keeps rows on 16 bytes, else those of the plain twins.
void strides_are_followed(Context const& context) {
  MoeDesc const desc = small_desc(RouterKind::sigmoid_bias);
  MoeShape const& s = desc.shape;
  Layer const plain(context, desc);
  EXPECT_OK(plain.forward(nullptr));
  require(cudaDeviceSynchronize(), "device");
  Bytes const narrow = plain.o();
  for (int64_t const gap : {16, 11}) {
    int64_t const d = s.hidden, pitch = d + gap, logits_pitch = s.experts + 3;
    Layer strided(context, desc);
    auto const x = values(s.tokens * d, 1);
    std::vector<__nv_bfloat16> wide(static_cast<size_t>(s.tokens * pitch));
    for (int64_t t = 0; t < s.tokens; ++t) {
      std::copy_n(x.begin() + t * d, d, wide.begin() + t * pitch);
    }
    DeviceBuffer const wide_x(wide);
    DeviceBuffer const wide_o(2 * static_cast<size_t>(s.tokens * pitch));
    DeviceBuffer const logits(4 * static_cast<size_t>(s.tokens * logits_pitch));
    strided.args.x.data = wide_x.as<void>();
    strided.args.x.stride[0] = pitch;
    strided.args.o.data = wide_o.as<void>();
    strided.args.o.stride[0] = pitch;
    strided.args.logits = tensor(logits.as<float>(), {s.tokens, s.experts}, strided.device());
    strided.args.logits.stride[0] = logits_pitch;
    EXPECT_OK(strided.forward(nullptr));
    require(cudaDeviceSynchronize(), "device");
    Bytes const apart = wide_o.bytes(), stored = logits.bytes();
    for (int64_t t = 0; t < s.tokens; ++t) {
      auto const* const row = &apart[2 * t * pitch];
      if (gap % 8 == 0) EXPECT(std::memcmp(row, &narrow[2 * t * d], 2 * d) == 0);
      EXPECT(difference(row, &narrow[2 * t * d], d) < 0x1p-7);
      EXPECT(std::count(row + 2 * d, row + 2 * pitch, kPoison) == 2 * gap);
      auto const* const own_logits = &stored[4 * t * logits_pitch];
      EXPECT(std::count(own_logits, own_logits + 4 * s.experts, kPoison) < 4 * s.experts);
      EXPECT(std::count(own_logits + 4 * s.experts, own_logits + 4 * logits_pitch, kPoison) ==
             4 * (logits_pitch - s.experts));
    }
  }
}

// Rows of dO, dx, dlogits and aux_dlogits apart: the gradients of contiguous ones, and gaps that nobody writes.
void strides_are_followed_backward(Context const& context) {
  MoeDesc const desc = small_desc(RouterKind::sqrtsoftplus);
  MoeShape const& s = desc.shape;
  int64_t const d = s.hidden, pitch = d + 11, logits_pitch = s.experts + 3;
  std::vector<float> aux(static_cast<size_t>(s.tokens * s.experts));
  std::vector<float> wide_aux(static_cast<size_t>(s.tokens * logits_pitch));
  auto const d_o = values(s.tokens * d, 5);
  std::vector<__nv_bfloat16> wide_d_o(static_cast<size_t>(s.tokens * pitch));
  for (int64_t t = 0; t < s.tokens; ++t) {
    std::copy_n(d_o.begin() + t * d, d, wide_d_o.begin() + t * pitch);
    for (int64_t e = 0; e < s.experts; ++e) {
      float const value = 0.01f * static_cast<float>((t * 7 + e * 3) % 11 - 5);
      aux[t * s.experts + e] = wide_aux[t * logits_pitch + e] = value;
    }
  }
  DeviceBuffer const narrow_aux_buffer(aux), wide_aux_buffer(wide_aux), d_o_buffer(wide_d_o);
  DeviceBuffer const dx(2 * static_cast<size_t>(s.tokens * pitch));
  DeviceBuffer const dlogits(4 * static_cast<size_t>(s.tokens * logits_pitch));
  Layer plain(context, desc), strided(context, desc);
  plain.backward_args.aux_dlogits =
      tensor(narrow_aux_buffer.as<float const>(), {s.tokens, s.experts}, plain.device());
  EXPECT_OK(plain.step(nullptr));
  MoeBackwardArgs& args = strided.backward_args;
  args.aux_dlogits =
      tensor(wide_aux_buffer.as<float const>(), {s.tokens, s.experts}, strided.device());
  args.aux_dlogits.stride[0] = args.dlogits.stride[0] = logits_pitch;
  args.d_o.data = d_o_buffer.as<void>();
  args.dx.data = dx.as<void>();
  args.dlogits.data = dlogits.as<void>();
  args.d_o.stride[0] = args.dx.stride[0] = pitch;
  EXPECT_OK(strided.step(nullptr));
  require(cudaDeviceSynchronize(), "device");
  Bytes const narrow = plain.gradients(), apart = dx.bytes(), stored = dlogits.bytes();
  std::vector<unsigned char> own_dlogits(4 * static_cast<size_t>(s.tokens * s.experts));
  require(cudaMemcpy(own_dlogits.data(), plain.backward_args.dlogits.data, own_dlogits.size(),
                     cudaMemcpyDeviceToHost),
          "copy");
  for (int64_t t = 0; t < s.tokens; ++t) {
    auto const* const row = &apart[2 * t * pitch];
    EXPECT(difference(row, &narrow[2 * t * d], d) < 0x1p-7);
    EXPECT(std::count(row + 2 * d, row + 2 * pitch, kPoison) == 2 * (pitch - d));
    auto const* const logits = &stored[4 * t * logits_pitch];
    for (int64_t e = 0; e < s.experts; ++e) {
      float own, other;
      std::memcpy(&own, logits + 4 * e, 4);
      std::memcpy(&other, &own_dlogits[4 * (t * s.experts + e)], 4);
      EXPECT(std::abs(own - other) <= 1e-4f * (1 + std::abs(other)));
    }
    EXPECT(std::count(logits + 4 * s.experts, logits + 4 * logits_pitch, kPoison) ==
           4 * (logits_pitch - s.experts));
  }
}

// route() gives the ids and weights that the layer uses.
void route_agrees_with_the_layer(Context const& context) {
  MoeDesc desc = small_desc(RouterKind::group_limited);
  desc.ids_dtype = DType::int64;
  MoeShape const& s = desc.shape;
  Layer const layer(context, desc);
  EXPECT_OK(layer.forward(nullptr));
  DeviceBuffer const ids(8 * static_cast<size_t>(desc.num_slots()));
  DeviceBuffer const weights(4 * static_cast<size_t>(desc.num_slots()));
  size_t const bytes = workspace_bytes(context, desc, Pass::route).value();
  DeviceBuffer const workspace(bytes);
  RouteArgs args;
  args.x = layer.args.x;
  args.w_router = layer.args.w_router;
  args.topk_ids = tensor(ids.as<int64_t>(), {s.tokens, s.top_k}, layer.device());
  args.topk_weights = tensor(weights.as<float>(), {s.tokens, s.top_k}, layer.device());
  args.workspace = {workspace.as<void>(), bytes};
  EXPECT_OK(route(context, desc, args));
  require(cudaDeviceSynchronize(), "device");
  RoutingView const tables = routing_view(desc, layer.args.routing).value();
  auto const slots = static_cast<size_t>(desc.num_slots());
  std::vector<int32_t> used_ids(slots);
  std::vector<float> used_weights(slots);
  require(cudaMemcpy(used_ids.data(), tables.topk_ids, 4 * slots, cudaMemcpyDeviceToHost), "copy");
  require(cudaMemcpy(used_weights.data(), tables.scores, 4 * slots, cudaMemcpyDeviceToHost),
          "copy");
  Bytes const given_ids = ids.bytes(), given_weights = weights.bytes();
  EXPECT(std::memcmp(given_weights.data(), used_weights.data(), 4 * slots) == 0);
  for (size_t j = 0; j < slots; ++j) {
    int64_t id;
    std::memcpy(&id, &given_ids[8 * j], sizeof(id));
    EXPECT(id == used_ids[j]);
  }
}

// A layer that is given its own choice again scores and computes it as before, bit for bit, backward too.
void replayed_ids_score_alike(Context const& context) {
  for (RouterKind const kind : {RouterKind::topk_softmax, RouterKind::softmax_topk,
                                RouterKind::sigmoid_bias, RouterKind::sqrtsoftplus}) {
    MoeDesc desc = small_desc(kind);
    desc.router.normalize_scores = kind == RouterKind::sigmoid_bias;
    desc.router.route_scale = 2.5f;
    MoeShape const& s = desc.shape;
    Layer const chosen(context, desc);
    EXPECT_OK(chosen.step(nullptr));
    desc.router.replay = true;
    Layer replayed(context, desc);
    replayed.args.topk_ids = tensor(routing_view(desc, chosen.args.routing).value().topk_ids,
                                    {s.tokens, s.top_k}, replayed.device());
    EXPECT_OK(replayed.step(nullptr));
    require(cudaDeviceSynchronize(), "device");
    EXPECT(replayed.everything() == chosen.everything());
  }
}

struct GroupedCase {
  RowGrouping grouping;
  std::vector<int64_t> groups;
  bool sound;
  int64_t bad_index;
};

MoeDesc grouped_desc(RowGrouping grouping, DType ids) {
  MoeDesc desc = small_desc(RouterKind::given);
  desc.shape.tokens = 50;
  desc.shape.top_k = 1;
  desc.shape.experts = 4;
  desc.grouping = grouping;
  desc.ids_dtype = ids;
  return desc;
}

template <class T>
std::vector<T> as(std::vector<int64_t> const& from) {
  return {from.begin(), from.end()};
}

// With scores and without.
void tables_are_those_of_forward(Context const& context, MoeDesc const& desc, Layer& layer) {
  DeviceBuffer const tables(routing_bytes(desc).value());
  DeviceBuffer const scores(std::vector<float>(50, 0.25f));
  for (bool const has_scores : {false, true}) {
    if (has_scores) layer.args.row_scores = tensor(scores.as<float>(), {50}, layer.device());
    EXPECT_OK(layer.forward(nullptr));
    EXPECT_OK(routing_of_groups(
        context, desc,
        {layer.args.expert_offsets, layer.args.row_scores, {tables.as<void>(), tables.size()}}));
    require(cudaDeviceSynchronize(), "device");
    EXPECT(tables.bytes() == layer.routing());
  }
}

// Rows 0..9 of expert 0, none of 1, 10..39 of 2, 40..44 of 3, then a tail of no expert.
void grouped_rows_equal_given_ids(Context const& context) {
  std::vector<int64_t> ids;
  for (int r = 0; r < 50; ++r) ids.push_back(r < 10 ? 0 : r < 40 ? 2 : r < 45 ? 3 : 4);
  MoeDesc by_ids = grouped_desc(RowGrouping::slots, DType::int64);
  Layer given(context, by_ids);
  DeviceBuffer const device_ids(ids), ones(std::vector<float>(50, 1.0f));
  given.args.topk_ids = tensor(device_ids.as<int64_t>(), {50, 1}, given.device());
  given.args.topk_weights = tensor(ones.as<float>(), {50, 1}, given.device());
  EXPECT_OK(given.step(nullptr));
  require(cudaDeviceSynchronize(), "device");
  Bytes const expected = given.o(), gradients = given.gradients();
  EXPECT(std::count(expected.begin() + 2 * 45 * 72, expected.end(), 0) == 2 * 5 * 72);

  GroupedCase const cases[] = {
      {RowGrouping::offsets, {0, 10, 10, 40, 45}, true, 0},
      {RowGrouping::ends, {10, 10, 40, 45}, true, 0},
      {RowGrouping::counts, {10, 0, 30, 5}, true, 0},
      {RowGrouping::offsets, {0, 10, 5, 40, 45}, false, 2},
      {RowGrouping::offsets, {1, 10, 10, 40, 45}, false, 0},
      {RowGrouping::offsets, {0, 10, 10, 40, 51}, false, 4},
      {RowGrouping::ends, {10, -3, 40, 45}, false, 1},
      {RowGrouping::ends, {10, 10, 40, int64_t{1} << 40}, false, 3},
      {RowGrouping::counts, {10, 0, 30, 11}, false, 3},
      {RowGrouping::counts, {-1, 0, 30, 5}, false, 0},
  };
  for (GroupedCase const& c : cases) {
    for (DType const dtype : {DType::int64, DType::int32}) {
      bool const wide = c.groups.back() > INT32_MAX;
      if (wide && dtype == DType::int32) continue;
      Layer grouped(context, grouped_desc(c.grouping, dtype));
      DeviceBuffer const groups64(c.groups), groups32(as<int32_t>(c.groups));
      auto const count = static_cast<int64_t>(c.groups.size());
      grouped.args.expert_offsets =
          dtype == DType::int64
              ? ConstTensor(tensor(groups64.as<int64_t>(), {count}, grouped.device()))
              : ConstTensor(tensor(groups32.as<int32_t>(), {count}, grouped.device()));
      EXPECT_OK(grouped.step(nullptr));
      require(cudaDeviceSynchronize(), "device");
      Status const found = check_device_values(context);
      if (c.sound) {
        EXPECT_OK(found);
        EXPECT(grouped.o() == expected);
        EXPECT(grouped.gradients() == gradients);
        tables_are_those_of_forward(context, grouped_desc(c.grouping, dtype), grouped);
      } else {
        EXPECT(found.code() == StatusCode::invalid_argument);
        std::string const at = "as grouping says)[" + std::to_string(c.bad_index) + "]";
        EXPECT(std::string(found.text()).find(at) != std::string::npos);
        EXPECT_OK(check_device_values(context));  // reported once
      }
    }
  }
}

void bad_token_offsets_are_reported(Context const& context) {
  MoeDesc desc = small_desc(RouterKind::given);
  desc.shape.tokens = 4;
  desc.shape.variable_experts = true;
  desc.shape.slots = 6;
  std::vector<int32_t> const ids{0, 1, 2, 3, 4, 5};
  std::vector<float> const weights(6, 0.5f);
  struct Case {
    std::vector<int32_t> offsets;
    char const* text;
  };
  for (Case const& c :
       {Case{{0, 2, 2, 5, 6}, ""}, Case{{0, 3, 2, 5, 6}, "token_offsets[2]: an offset of 2"},
        Case{{0, 2, 2, 5, 7}, "token_offsets[4]: an offset of 7"},
        Case{{-2, 2, 2, 5, 6}, "token_offsets[0]: an offset of -1"}}) {
    Layer layer(context, desc);
    DeviceBuffer const device_ids(ids), device_weights(weights), offsets(c.offsets);
    layer.args.topk_ids = tensor(device_ids.as<int32_t>(), {6}, layer.device());
    layer.args.topk_weights = tensor(device_weights.as<float>(), {6}, layer.device());
    layer.args.token_offsets = tensor(offsets.as<int32_t>(), {5}, layer.device());
    EXPECT_OK(layer.forward(nullptr));
    require(cudaDeviceSynchronize(), "device");
    std::string const text = check_device_values(context).text();
    if (!text.starts_with(c.text) || text.empty() != (*c.text == '\0')) {
      std::printf("'%s' is no '%s'\n", text.c_str(), c.text);
      ++failures;
    }
  }
}

void refusals_name_their_reason(Context const& context) {
  MoeDesc desc = small_desc(RouterKind::topk_softmax);
  EXPECT(moe_backward(context, desc, {}).code() == StatusCode::invalid_argument);
  Layer short_of_memory(context, desc);
  --short_of_memory.backward_args.workspace.bytes;
  EXPECT(short_of_memory.backward(nullptr).code() == StatusCode::invalid_argument);
  EXPECT(grouped_gemm(context, {}).code() == StatusCode::invalid_argument);
  Layer layer(context, desc);
  layer.args.x.device = {};  // claims to be on the CPU
  EXPECT(layer.forward(nullptr).code() == StatusCode::invalid_argument);
  Layer small(context, desc);
  --small.args.workspace.bytes;
  EXPECT(small.forward(nullptr).code() == StatusCode::invalid_argument);
  desc.dtype = DType::fp32;
  EXPECT(workspace_bytes(context, desc, Pass::forward).status().code() == StatusCode::unsupported);
  EXPECT(Context::create({{DeviceKind::cuda, 1000}}).status().code() == StatusCode::environment);
}

// Where there are several GPUs: the same bits on each, and the caller's current device stays.
void devices_agree(Context const& first) {
  int devices = 0;
  require(cudaGetDeviceCount(&devices), "devices");
  Layer const layer(first, small_desc(RouterKind::topk_softmax));
  EXPECT_OK(layer.step(nullptr));
  require(cudaDeviceSynchronize(), "device");
  Bytes const expected = layer.everything();
  for (int index = 1; index < devices; ++index) {
    auto const other = Context::create({{DeviceKind::cuda, index}});
    if (!other.ok()) continue;
    require(cudaSetDevice(index), "device");
    Layer const there(other.value(), small_desc(RouterKind::topk_softmax));
    cudaStream_t stream;
    require(cudaStreamCreate(&stream), "stream");
    require(cudaSetDevice(0), "device");
    EXPECT_OK(there.step(stream));
    int current = -1;
    require(cudaGetDevice(&current), "device");
    EXPECT(current == 0);
    synchronize(stream);
    EXPECT(there.everything() == expected);
    cudaStreamDestroy(stream);
  }
}

int run(Context const& context) {
  struct Test {
    char const* name;
    void (*body)(Context const&);
  };
  for (Test const& test :
       {Test{"refusals", refusals_name_their_reason},
        Test{"grouped rows", grouped_rows_equal_given_ids},
        Test{"token offsets", bad_token_offsets_are_reported},
        Test{"strides", strides_are_followed}, Test{"strides back", strides_are_followed_backward},
        Test{"route", route_agrees_with_the_layer}, Test{"replay", replayed_ids_score_alike},
        Test{"threads", threads_do_not_disturb_each_other},
        Test{"fresh threads", threads_need_no_call_before}, Test{"devices", devices_agree},
        Test{"repeats", repeats_beside_other_work}}) {
    int const before = failures;
    test.body(context);
    std::printf("%-14s %s\n", test.name, failures == before ? "ok" : "FAILED");
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda_test

int main() { return tessera::cuda_test::on_first_gpu(tessera::cuda_test::run); }

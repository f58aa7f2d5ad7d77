// SPDX-License-Identifier: Apache-2.0
// Builds of the library against each other: the layer as a whole, forward and backward, in one process and in random
// order, through the C ABI. Every build works on the same tensors and has its own outputs, which are compared with the
// first one's: in the norm (checked), and value by value (equal_to_first). of_first is the median over the rounds of
// its time over the first one's in the same round; host_us is what a call takes on the host, the GPU being busy with
// what came before.
//
//   libraries --library NAME=PATH --library NAME=PATH .. [--main-grad NAME=PATH].. [--config NAME].. [--rounds N]
//             [--json FILE] [--zipf S | --shuffled-zipf S]
//             [--tokens T,T.. --hidden d --intermediate n --experts E --top-k K] [--behind reads] [--as graphs]
//             [--round nr-f]
// --main-grad: a build whose weight gradients are fp32 and added to.
// --behind reads: forward passes alone, each behind a reading of 512 MiB: caches hold clean lines of other memory, as
// behind another layer of a model that decodes, and not what the pass before has left or written.
// --as graphs: a pass is a graph that is replayed, and host_us the replay's.
// --round nr-f: token rounding to multiples of 128 rows.
// --zipf: expert e is as popular as 1 / (e+1)^S; or the same popularities in no order.
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <sstream>

#include "../loaded_library.hpp"
#include "support.cuh"
#include "tessera/shape.hpp"
#include "tessera/tessera.h"

namespace tessera::bench {
namespace {

constexpr int kWarmUps = 10;
constexpr int64_t kFillBytes = int64_t{256} << 20;  // takes longer than a call does on the host
constexpr int64_t kReadBytes = int64_t{512} << 20;  // the same

__global__ void read_all(uint4 const* gmem, int64_t count, uint32_t* gmem_sum) {
  uint32_t sum = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    sum += gmem[i].x;
  }
  if (sum != 0) *gmem_sum = sum;  // never: they are zeros
}

struct Config {
  std::string name;
  MoeShape shape;
};

constexpr MoeShape shape_of(int64_t tokens, int64_t hidden, int64_t intermediate, int64_t experts,
                            int64_t top_k) {
  return {.tokens = tokens,
          .hidden = hidden,
          .intermediate = intermediate,
          .experts = experts,
          .top_k = top_k};
}

Config const kConfigs[] = {
    {"1.4B-n256", shape_of(40960, 768, 256, 128, 8)},
    {"7B-n256", shape_of(24576, 1536, 256, 128, 8)},
    {"7B-n512", shape_of(24576, 1536, 512, 64, 4)},
    {"7B-n1024", shape_of(24576, 1536, 1024, 32, 2)},
    {"30B-n256", shape_of(32768, 4096, 256, 256, 16)},
    {"30B-n1024", shape_of(32768, 4096, 1024, 64, 4)},
    {"120B-n512", shape_of(32768, 4096, 512, 256, 16)},
    {"Qwen3Next", shape_of(32768, 2048, 512, 512, 10)},
    {"Qwen3-30B", shape_of(32768, 2048, 768, 128, 8)},
    {"OLMoE", shape_of(32768, 2048, 1024, 64, 8)},
};

struct Library : LoadedLibrary {
  Library(std::string name_, std::string const& file, bool main_grad_)
      : LoadedLibrary(std::move(name_), file, TESSERA_CUDA, 1), main_grad(main_grad_) {}

  bool main_grad;  // weight gradients are fp32 and added to, else bf16 and written
};

template <class Element>
tessera_tensor tensor_of(DeviceBuffer<Element> const& buffer,
                         std::initializer_list<int64_t> shape) {
  tessera_tensor out{};
  out.data = buffer.get();
  out.dtype = std::is_same_v<Element, float> ? TESSERA_FP32 : TESSERA_BF16;
  out.device_kind = TESSERA_CUDA;
  out.rank = int32_t(shape.size());
  std::copy(shape.begin(), shape.end(), out.shape);
  int64_t stride = 1;
  for (int axis = out.rank - 1; axis >= 0; --axis) {
    out.stride[axis] = stride;
    stride *= out.shape[axis];
  }
  return out;
}

struct Popularities {
  double exponent = 0;
  bool shuffled = false;
  std::string name() const {
    if (exponent == 0) return "random";
    char text[48];
    std::snprintf(text, sizeof text, "%szipf:%g", shuffled ? "shuffled-" : "", exponent);
    return text;
  }
  // The logarithm of each expert's.
  std::vector<float> logarithms(int64_t experts) const {
    std::vector<float> out;
    for (int64_t e = 0; e < experts; ++e) out.push_back(float(-exponent * std::log(double(e + 1))));
    std::mt19937 random(1);
    if (shuffled) std::shuffle(out.begin(), out.end(), random);
    return out;
  }
};

// A column of ones in x meets one of popularities in w_router: logits gain them.
__global__ void set_popularities(bf16* x, bf16* w_router, float const* popularity, int64_t tokens,
                                 int64_t experts, int64_t hidden) {
  int64_t const i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < tokens) x[i * hidden] = __float2bfloat16_rn(1);
  if (i < experts) w_router[i * hidden] = __float2bfloat16_rn(popularity[i]);
}

// What all builds read.
struct Inputs {
  Inputs(Config const& config, Popularities const& popularities)
      : shape(config.shape),
        x(shape.tokens * shape.hidden),
        d_o(shape.tokens * shape.hidden),
        w_router(shape.experts * shape.hidden),
        w_up(shape.experts * 2 * shape.intermediate * shape.hidden),
        w_down(shape.experts * shape.intermediate * shape.hidden) {
    auto const fill = [](DeviceBuffer<bf16> const& to, uint64_t seed, double fan_in) {
      fill_uniform<<<4096, 256>>>(to.get(), to.count(), seed, float(std::sqrt(3.0 / fan_in)));
    };
    fill(x, 1, 3);
    fill(d_o, 2, 3);
    fill(w_router, 3, double(shape.hidden));
    fill(w_up, 4, double(shape.hidden));
    fill(w_down, 5, double(shape.intermediate));
    if (popularities.exponent != 0) {
      DeviceBuffer<float> const popularity(popularities.logarithms(shape.experts));
      int64_t const most = std::max(shape.tokens, shape.experts);
      set_popularities<<<unsigned((most + 255) / 256), 256>>>(
          x.get(), w_router.get(), popularity.get(), shape.tokens, shape.experts, shape.hidden);
    }
    TESSERA_CUDA(cudaDeviceSynchronize());
  }
  MoeShape shape;
  DeviceBuffer<bf16> x, d_o, w_router, w_up, w_down;
};

// An array that a build writes, in one of two types.
struct Output {
  Output(char const* name_, int64_t count, bool is_fp32_)
      : name(name_), is_fp32(is_fp32_), fp32(is_fp32 ? count : 0), rounded(is_fp32 ? 0 : count) {}
  tessera_tensor tensor(std::initializer_list<int64_t> shape) const {
    return is_fp32 ? tensor_of(fp32, shape) : tensor_of(rounded, shape);
  }
  // What was there before the first call: zeros to add to, or NaN.
  void prepare() const {
    rounded.poison();
    TESSERA_CUDA(cudaMemset(fp32.get(), 0, size_t(fp32.count()) * sizeof(float)));
  }
  char const* name;
  bool is_fp32;
  DeviceBuffer<float> fp32;
  DeviceBuffer<bf16> rounded;
};

// One build's calls, and what it writes.
class Layer {
 public:
  Layer(Library const& library, Inputs const& in, bool rounds)
      : library_(library),
        desc_(desc_of(in.shape, rounds)),
        routing_(saved_bytes(2)),
        workspace_(std::max(workspace_bytes(TESSERA_PASS_FORWARD),
                            workspace_bytes(TESSERA_PASS_BACKWARD))),
        h_(saved_bytes(1) / int64_t(sizeof(bf16))),
        o_("o", in.x.count(), false),
        dx_("dx", in.x.count(), false),
        dw_router_("dw_router", in.w_router.count(), library.main_grad),
        dw_up_("dw_up", in.w_up.count(), library.main_grad),
        dw_down_("dw_down", in.w_down.count(), library.main_grad) {
    MoeShape const& s = in.shape;
    int64_t const t = s.tokens, d = s.hidden, n = s.intermediate, e = s.experts;
    forward_.size = sizeof forward_;
    forward_.x = tensor_of(in.x, {t, d});
    forward_.w_router = tensor_of(in.w_router, {e, d});
    forward_.weights.w_up = tensor_of(in.w_up, {e, 2 * n, d});
    forward_.weights.w_down = tensor_of(in.w_down, {e, d, n});
    forward_.o = o_.tensor({t, d});
    forward_.h = tensor_of(h_, {h_.count() / (2 * n), 2 * n});
    forward_.routing = {routing_.get(), size_t(routing_.count())};
    forward_.workspace = {workspace_.get(), size_t(workspace_.count())};
    backward_.size = sizeof backward_;
    backward_.d_o = tensor_of(in.d_o, {t, d});
    backward_.x = forward_.x;
    backward_.h = forward_.h;
    backward_.routing = forward_.routing;
    backward_.w_router = forward_.w_router;
    backward_.weights = forward_.weights;
    backward_.dx = dx_.tensor({t, d});
    backward_.dw_up = dw_up_.tensor({e, 2 * n, d});
    backward_.dw_down = dw_down_.tensor({e, d, n});
    backward_.dw_router = dw_router_.tensor({e, d});
    backward_.accumulate = library.main_grad ? 1 : 0;
    backward_.workspace = forward_.workspace;
  }
  ~Layer() {
    for (cudaGraphExec_t const graph : graphs_) {
      if (graph != nullptr) cudaGraphExecDestroy(graph);
    }
  }
  Layer(Layer const&) = delete;
  Layer& operator=(Layer const&) = delete;

  // From here on run() replays. Until both graphs are there it enqueues, for them.
  void capture() {
    cudaStream_t stream;
    TESSERA_CUDA(cudaStreamCreate(&stream));
    cudaGraphExec_t graphs[2];
    for (int pass = 0; pass < 2; ++pass) {
      cudaGraph_t graph;
      TESSERA_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      run(pass == 1, stream);
      TESSERA_CUDA(cudaStreamEndCapture(stream, &graph));
      TESSERA_CUDA(cudaGraphInstantiate(&graphs[pass], graph, 0));
      TESSERA_CUDA(cudaGraphDestroy(graph));
    }
    std::copy(graphs, graphs + 2, graphs_);
    TESSERA_CUDA(cudaStreamDestroy(stream));
  }
  void run(bool backward, cudaStream_t stream) const {
    if (graphs_[backward] != nullptr) {
      TESSERA_CUDA(cudaGraphLaunch(graphs_[backward], stream));
      return;
    }
    library_.check(backward ? library_.backward(library_.context, &desc_, &backward_, stream)
                            : library_.forward(library_.context, &desc_, &forward_, stream));
  }
  std::vector<Output const*> outputs() const {
    return {&o_, &dx_, &dw_router_, &dw_up_, &dw_down_};
  }
  Library const& library() const { return library_; }

 private:
  static tessera_moe_desc desc_of(MoeShape const& s, bool rounds) {
    tessera_moe_desc desc{};
    desc.size = sizeof desc;
    desc.tokens = s.tokens;
    desc.hidden = s.hidden;
    desc.intermediate = s.intermediate;
    desc.experts = s.experts;
    desc.top_k = s.top_k;
    desc.dtype = TESSERA_BF16;
    desc.router = int32_t(RouterKind::topk_softmax);
    if (rounds) desc.round = int32_t(Rounding::nr_f);
    return desc;
  }
  int64_t saved_bytes(int which) const {
    size_t bytes[3] = {};
    library_.check(library_.saved(&desc_, &bytes[0], &bytes[1], &bytes[2]));
    return int64_t(bytes[which]);
  }
  int64_t workspace_bytes(int pass) const {
    size_t bytes = 0;
    library_.check(library_.workspace(library_.context, &desc_, pass, &bytes));
    return int64_t(bytes);
  }

  Library const& library_;
  tessera_moe_desc desc_;
  DeviceBuffer<char> routing_, workspace_;
  DeviceBuffer<bf16> h_;
  Output o_, dx_, dw_router_, dw_up_, dw_down_;
  tessera_forward_args forward_{};
  tessera_backward_args backward_{};
  cudaGraphExec_t graphs_[2] = {};  // of both passes, once captured
};

// sums[0] of (a-b)^2, sums[1] of b^2; differences that are no numbers count as such.
template <class A, class B>
__global__ void add_squares(A const* a, B const* b, int64_t count, double* sums) {
  double difference = 0, size = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    double const ref = float(b[i]), delta = float(a[i]) - ref;
    difference += delta * delta;
    size += ref * ref;
  }
  atomicAdd(&sums[0], difference);
  atomicAdd(&sums[1], size);
}

// ||a - b|| / ||b||.
template <class A, class B>
double distance(DeviceBuffer<A> const& a, DeviceBuffer<B> const& b) {
  DeviceBuffer<double> sums(std::vector<double>{0, 0});
  add_squares<<<1024, 256>>>(a.get(), b.get(), a.count(), sums.get());
  double host[2];
  TESSERA_CUDA(cudaMemcpy(host, sums.get(), sizeof host, cudaMemcpyDeviceToHost));
  return std::sqrt(host[0] / host[1]);
}

double distance(Output const& a, Output const& b) {
  if (a.is_fp32) return b.is_fp32 ? distance(a.fp32, b.fp32) : distance(a.fp32, b.rounded);
  return b.is_fp32 ? distance(a.rounded, b.fp32) : distance(a.rounded, b.rounded);
}

// Builds may round differently: both are within some 2^-9 of what is right.
struct Agreement {
  bool close = true, equal = true;  // in the norm; in every value
};
Agreement agreement(Layer const& own, Layer const& first, std::string const& config) {
  Agreement all;
  for (size_t i = 0; i < own.outputs().size(); ++i) {
    Output const& output = *own.outputs()[i];
    double const error = distance(output, *first.outputs()[i]);
    all.equal = all.equal && error == 0;
    if (error <= 0x1p-7) continue;
    std::printf("%s %s: %s differs by %.2e of its norm\n", config.c_str(),
                own.library().name.c_str(), output.name, error);
    all.close = false;
  }
  return all;
}

// How passes are run.
struct How {
  int rounds = 60;
  bool behind_reads = false, as_graphs = false, rounds_tokens = false;
};

struct Times {
  std::vector<float> ms, of_first, host_us;
};

// [pass][library]
std::vector<std::vector<Times>> time_all(std::vector<std::unique_ptr<Layer>> const& layers,
                                         How const& how) {
  bool const behind_reads = how.behind_reads;
  DeviceBuffer<char> const scratch(behind_reads ? kReadBytes : kFillBytes);
  DeviceBuffer<uint32_t> const sum(1);
  TESSERA_CUDA(cudaMemset(scratch.get(), 0, size_t(scratch.count())));
  cudaStream_t stream;
  TESSERA_CUDA(cudaStreamCreate(&stream));
  size_t const count = layers.size();
  std::vector<cudaEvent_t> begin(2 * count), end(2 * count);
  for (auto* events : {&begin, &end}) {
    for (cudaEvent_t& event : *events) TESSERA_CUDA(cudaEventCreate(&event));
  }
  std::vector<std::vector<Times>> times(2, std::vector<Times>(count));
  std::vector<size_t> order;
  for (size_t i = 0; i < 2 * count; i += behind_reads ? 2 : 1) order.push_back(i);
  std::mt19937 random(1);
  for (int round = -kWarmUps; round < how.rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (size_t i = 0; i < order.size() && !behind_reads; ++i) {
      TESSERA_CUDA(cudaMemsetAsync(scratch.get(), 0, kFillBytes, stream));
    }
    for (size_t const next : order) {
      if (behind_reads) {
        read_all<<<1024, 512, 0, stream>>>(reinterpret_cast<uint4 const*>(scratch.get()),
                                           kReadBytes / 16, sum.get());
      }
      TESSERA_CUDA(cudaEventRecord(begin[next], stream));
      auto const called = std::chrono::steady_clock::now();
      layers[next / 2]->run(next % 2 == 1, stream);
      std::chrono::duration<float, std::micro> const host =
          std::chrono::steady_clock::now() - called;
      TESSERA_CUDA(cudaEventRecord(end[next], stream));
      if (round >= 0) times[next % 2][next / 2].host_us.push_back(host.count());
    }
    TESSERA_CUDA(cudaStreamSynchronize(stream));
    if (round < 0) continue;
    for (size_t pass = 0; pass < (behind_reads ? 1 : 2); ++pass) {
      float first = 0;
      for (size_t i = 0; i < count; ++i) {
        float ms = 0;
        TESSERA_CUDA(cudaEventElapsedTime(&ms, begin[2 * i + pass], end[2 * i + pass]));
        if (i == 0) first = ms;
        times[pass][i].ms.push_back(ms);
        times[pass][i].of_first.push_back(ms / first);
      }
    }
  }
  for (auto* events : {&begin, &end}) {
    for (cudaEvent_t const event : *events) TESSERA_CUDA(cudaEventDestroy(event));
  }
  TESSERA_CUDA(cudaStreamDestroy(stream));
  return times;
}

std::string bench_config(Config const& config, std::vector<Library> const& libraries,
                         Popularities const& popularities, How const& how) {
  Inputs const inputs(config, popularities);
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<Agreement> checked;
  for (Library const& library : libraries) {
    layers.push_back(std::make_unique<Layer>(library, inputs, how.rounds_tokens));
    for (Output const* output : layers.back()->outputs()) output->prepare();
    layers.back()->run(false, nullptr);
    layers.back()->run(true, nullptr);
    TESSERA_CUDA(cudaDeviceSynchronize());
    checked.push_back(agreement(*layers.back(), *layers.front(), config.name));
    if (how.as_graphs) layers.back()->capture();
  }
  std::vector<std::vector<Times>> const times = time_all(layers, how);
  std::string rows;
  MoeShape const& s = config.shape;
  for (size_t pass = 0; pass < (how.behind_reads ? 1 : 2); ++pass) {
    for (size_t i = 0; i < layers.size(); ++i) {
      Quantiles const t = quantiles(times[pass][i].ms), ratio = quantiles(times[pass][i].of_first);
      float const host_us = quantiles(times[pass][i].host_us).median;
      char const* const of = pass == 0 ? "forward" : "backward";
      std::printf("%-10s %-8s %-16s %8.4f ms  %.4f (%.4f to %.4f)  host %6.1f us%s\n",
                  config.name.c_str(), of, libraries[i].name.c_str(), t.median, ratio.median,
                  ratio.p10, ratio.p90, host_us,
                  !checked[i].close  ? "  DIFFERS"
                  : checked[i].equal ? "  equal"
                                     : "  close");
      char row[512];
      std::snprintf(
          row, sizeof row,
          "%s\n  {\"config\": \"%s\", \"shape\": [%lld, %lld, %lld, %lld, %lld], "
          "\"dtype\": \"bf16\", \"gpus\": 1, \"routing\": \"%s\", \"router\": "
          "\"topk-softmax\", \"round\": \"%s\", \"pass\": \"%s\", \"impl\": \"tessera\", "
          "\"variant\": \"%s\", \"ms\": "
          "%.5f, "
          "\"ms_p10\": %.5f, \"ms_p90\": %.5f, \"of_first\": %.5f, \"host_us\": %.1f, \"checked\": "
          "%s, \"equal_to_first\": %s}",
          rows.empty() ? "" : ",", config.name.c_str(), (long long)s.tokens, (long long)s.hidden,
          (long long)s.intermediate, (long long)s.experts, (long long)s.top_k,
          popularities.name().c_str(), how.rounds_tokens ? "nr-f" : "none", of,
          libraries[i].name.c_str(), t.median, t.p10, t.p90, ratio.median, host_us,
          checked[i].close ? "true" : "false", checked[i].equal ? "true" : "false");
      rows += row;
    }
  }
  std::fflush(stdout);
  return rows;
}

void write_json(std::string const& path, std::string const& command, How const& how,
                std::string const& rows) {
  write_results(path, command,
                std::to_string(how.rounds) + " rounds after " + std::to_string(kWarmUps) +
                    " warm-ups; a round runs every build and " +
                    (how.behind_reads ? "its forward pass once, each behind a reading of 512 MiB"
                                      : "pass once, behind 256 MiB of fills for each") +
                    ", in random order" + (how.as_graphs ? ", as a graph" : "") +
                    "; of_first: "
                    "median of the ratio to the first build in the same round; host_us: median of "
                    "a call on the host",
                rows);
}

Config const& config_of(std::string const& name) {
  for (Config const& config : kConfigs) {
    if (name == config.name) return config;
  }
  fail("--config " + name + ": not one of this program's");
}

// --tokens and the other dimensions: a config per number of tokens, none without any of these.
std::vector<Config> configs_of(std::string const& tokens, MoeShape shape) {
  if (tokens.empty() && shape == MoeShape{}) return {};
  if (shape.hidden <= 0 || shape.intermediate <= 0 || shape.top_k <= 0 ||
      shape.experts < shape.top_k) {
    fail("--hidden, --intermediate, --experts and --top-k: all, above 0, K at most E");
  }
  std::vector<Config> out;
  std::istringstream list(tokens);
  for (std::string item; std::getline(list, item, ',');) {
    shape.tokens = std::atoll(item.c_str());
    if (shape.tokens <= 0) fail("--tokens " + tokens + ": T above 0, several with commas between");
    out.push_back({"T=" + item, shape});
  }
  if (out.empty()) fail("--hidden and the others: --tokens is missing");
  return out;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  std::vector<Library> libraries;
  std::vector<Config> configs;
  tessera::MoeShape shape{};
  std::string command, json, rows, tokens;
  How how;
  Popularities popularities;
  for (int i = 0; i < argc; ++i) command += (i ? " " : "") + std::string(argv[i]);
  for (int i = 1; i < argc; i += 2) {
    std::string const flag = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    size_t const equals = value.find('=');
    auto const is = [&](char const* name) { return flag == name && !value.empty(); };
    if ((is("--library") || is("--main-grad")) && equals != std::string::npos) {
      libraries.emplace_back(value.substr(0, equals), value.substr(equals + 1), is("--main-grad"));
    } else if (is("--config")) {
      configs.push_back(config_of(value));
    } else if (is("--tokens")) {
      tokens = value;
    } else if (is("--hidden")) {
      shape.hidden = std::atoll(value.c_str());
    } else if (is("--intermediate")) {
      shape.intermediate = std::atoll(value.c_str());
    } else if (is("--experts")) {
      shape.experts = std::atoll(value.c_str());
    } else if (is("--top-k")) {
      shape.top_k = std::atoll(value.c_str());
    } else if (is("--rounds") && std::atoi(value.c_str()) > 0) {
      how.rounds = std::atoi(value.c_str());
    } else if ((is("--zipf") || is("--shuffled-zipf")) && std::atof(value.c_str()) > 0) {
      popularities = {std::atof(value.c_str()), flag == "--shuffled-zipf"};
    } else if (flag == "--behind" && value == "reads") {
      how.behind_reads = true;
    } else if (flag == "--as" && value == "graphs") {
      how.as_graphs = true;
    } else if (flag == "--round" && value == "nr-f") {
      how.rounds_tokens = true;
    } else if (is("--json")) {
      json = value;
    } else {
      std::fprintf(stderr, "unknown option %s %s\n", flag.c_str(), value.c_str());
      return 2;
    }
  }
  if (libraries.empty()) {
    std::fprintf(stderr, "no --library NAME=PATH\n");
    return 2;
  }
  for (Config& config : configs_of(tokens, shape)) configs.push_back(std::move(config));
  if (configs.empty()) {
    for (char const* name : {"7B-n256", "7B-n1024", "30B-n1024"})
      configs.push_back(config_of(name));
  }
  for (Config const& config : configs) {
    rows += (rows.empty() ? "" : ",") + bench_config(config, libraries, popularities, how);
  }
  if (!json.empty()) write_json(json, command, how, rows);
  return rows.find("\"checked\": false") == std::string::npos ? 0 : 1;
}

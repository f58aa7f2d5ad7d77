// SPDX-License-Identifier: Apache-2.0
// Builds of the library against each other on the CPU: forward and backward of the experts, in one process and in
// random order, through the C ABI. Every build works on the same tensors and has its own outputs, whose bits are
// compared with the first one's. Times are those that the process ran, all threads together: other programs disturb
// them less than the clock on the wall. of_first is the median over the rounds of a build's time over the first one's
// in the same round.
//
//   bench_cpu_libraries --library NAME=FILE --library NAME=FILE .. [--config NAME].. [--dtype fp32|bf16] [--rounds N]
//                       [--threads N] [--json FILE]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "../loaded_library.hpp"
#include "core/bf16.hpp"
#include "tessera/shape.hpp"
#include "tessera/tessera.h"

namespace {

using tessera::MoeShape;
using tessera::bench::fail;
using tessera::bench::LoadedLibrary;
using tessera::core::Bf16;

constexpr int kWarmUps = 3;

struct Config {
  char const* name;
  MoeShape shape;
};
constexpr Config kConfigs[] = {
    {"cpu-small", {.tokens = 2048, .hidden = 256, .intermediate = 128, .experts = 32, .top_k = 4}},
    {"cpu-mid", {.tokens = 4096, .hidden = 512, .intermediate = 256, .experts = 64, .top_k = 8}},
};

/// A contiguous tensor and its memory.
class Array {
 public:
  Array(std::initializer_list<std::int64_t> shape, int dtype) {
    view_.dtype = dtype;
    view_.device_kind = TESSERA_CPU;
    view_.rank = static_cast<std::int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), view_.shape);
    std::int64_t stride = 1;
    for (int axis = view_.rank - 1; axis >= 0; --axis) {
      view_.stride[axis] = stride;
      stride *= view_.shape[axis];
    }
    count_ = static_cast<std::size_t>(stride);
    bytes_.assign(count_ * (dtype == TESSERA_BF16 ? 2 : 4), 0);
    view_.data = bytes_.data();
  }
  void fill_uniform(unsigned seed, double limit) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> distribution(static_cast<float>(-limit),
                                                       static_cast<float>(limit));
    for (std::size_t i = 0; i < count_; ++i) {
      float const value = distribution(random);
      if (view_.dtype == TESSERA_BF16) {
        static_cast<Bf16*>(view_.data)[i] = tessera::core::round_to<Bf16>(value);
      } else {
        static_cast<float*>(view_.data)[i] = value;
      }
    }
  }
  [[nodiscard]] tessera_tensor const& view() const { return view_; }
  [[nodiscard]] bool operator==(Array const& other) const { return bytes_ == other.bytes_; }
  [[nodiscard]] double norm_of_difference(Array const& other) const {
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < count_; ++i) {
      double const own = at(i), ref = other.at(i);
      difference += (own - ref) * (own - ref);
      size += ref * ref;
    }
    return std::sqrt(difference / size);
  }
  template <class T>
  [[nodiscard]] T* data() {
    return static_cast<T*>(view_.data);
  }

 private:
  [[nodiscard]] double at(std::size_t i) const {
    return view_.dtype == TESSERA_BF16 ? tessera::core::to_fp32(static_cast<Bf16*>(view_.data)[i])
                                       : static_cast<float*>(view_.data)[i];
  }
  tessera_tensor view_{};
  std::size_t count_ = 0;
  std::vector<char> bytes_;
};

/// What all builds read.
struct Inputs {
  Inputs(MoeShape const& s, int dtype_)
      : shape(s),
        dtype(dtype_),
        x({s.tokens, s.hidden}, dtype),
        d_o({s.tokens, s.hidden}, dtype),
        ids({s.tokens, s.top_k}, TESSERA_INT32),
        scores({s.tokens, s.top_k}, TESSERA_FP32),
        w_up({s.experts, 2 * s.intermediate, s.hidden}, dtype),
        w_down({s.experts, s.hidden, s.intermediate}, dtype) {
    x.fill_uniform(1, 1.7);
    d_o.fill_uniform(2, 1.0);
    scores.fill_uniform(3, 1.0);
    w_up.fill_uniform(4, std::sqrt(3.0 / static_cast<double>(s.hidden)));
    w_down.fill_uniform(5, std::sqrt(3.0 / static_cast<double>(s.intermediate)));
    std::mt19937 random(6);
    std::vector<std::int32_t> experts(static_cast<std::size_t>(s.experts));
    std::iota(experts.begin(), experts.end(), 0);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      std::shuffle(experts.begin(), experts.end(), random);
      std::copy_n(experts.begin(), s.top_k, ids.data<std::int32_t>() + t * s.top_k);
    }
  }
  MoeShape shape;
  int dtype;
  Array x, d_o, ids, scores, w_up, w_down;
};

/// One build's calls, and what it writes.
class Layer {
 public:
  Layer(LoadedLibrary const& library, Inputs const& in)
      : library_(library),
        desc_(desc_of(in)),
        o_({in.shape.tokens, in.shape.hidden}, in.dtype),
        h_({in.shape.tokens * in.shape.top_k, 2 * in.shape.intermediate}, in.dtype),
        dx_({in.shape.tokens, in.shape.hidden}, in.dtype),
        dscores_({in.shape.tokens * in.shape.top_k}, TESSERA_FP32),
        dw_up_({in.shape.experts, 2 * in.shape.intermediate, in.shape.hidden}, in.dtype),
        dw_down_({in.shape.experts, in.shape.hidden, in.shape.intermediate}, in.dtype) {
    std::size_t x_bytes = 0, h_bytes = 0, routing_bytes = 0, forward_bytes = 0, backward_bytes = 0;
    library.check(library.saved(&desc_, &x_bytes, &h_bytes, &routing_bytes));
    library.check(library.workspace(library.context, &desc_, TESSERA_PASS_FORWARD, &forward_bytes));
    library.check(
        library.workspace(library.context, &desc_, TESSERA_PASS_BACKWARD, &backward_bytes));
    routing_.resize(routing_bytes);
    workspace_.resize(std::max(forward_bytes, backward_bytes));
    forward_.size = sizeof forward_;
    forward_.x = in.x.view();
    forward_.topk_ids = in.ids.view();
    forward_.topk_weights = in.scores.view();
    forward_.weights.w_up = in.w_up.view();
    forward_.weights.w_down = in.w_down.view();
    forward_.o = o_.view();
    forward_.h = h_.view();
    forward_.routing = {routing_.data(), routing_.size()};
    forward_.workspace = {workspace_.data(), workspace_.size()};
    backward_.size = sizeof backward_;
    backward_.d_o = in.d_o.view();
    backward_.x = in.x.view();
    backward_.h = h_.view();
    backward_.routing = forward_.routing;
    backward_.weights = forward_.weights;
    backward_.dx = dx_.view();
    backward_.dscores = dscores_.view();
    backward_.dw_up = dw_up_.view();
    backward_.dw_down = dw_down_.view();
    backward_.workspace = forward_.workspace;
  }
  void forward() const {
    library_.check(library_.forward(library_.context, &desc_, &forward_, nullptr));
  }
  void backward() const {
    library_.check(library_.backward(library_.context, &desc_, &backward_, nullptr));
  }
  /// Whether all outputs have the other's bits; fails where they are further away than roundings are.
  [[nodiscard]] bool same_bits(Layer const& other) const {
    bool same = true;
    Array const* const own[] = {&o_, &h_, &dx_, &dscores_, &dw_up_, &dw_down_};
    Array const* const first[] = {&other.o_,       &other.h_,     &other.dx_,
                                  &other.dscores_, &other.dw_up_, &other.dw_down_};
    for (int i = 0; i < 6; ++i) {
      if (*own[i] == *first[i]) continue;
      same = false;
      double const error = own[i]->norm_of_difference(*first[i]);
      if (!(error < 0x1p-7)) fail(library_.name + ": output " + std::to_string(i) + " is wrong");
    }
    return same;
  }
  [[nodiscard]] std::string const& name() const { return library_.name; }

 private:
  static tessera_moe_desc desc_of(Inputs const& in) {
    tessera_moe_desc desc{};
    desc.size = sizeof desc;
    desc.tokens = in.shape.tokens;
    desc.hidden = in.shape.hidden;
    desc.intermediate = in.shape.intermediate;
    desc.experts = in.shape.experts;
    desc.top_k = in.shape.top_k;
    desc.dtype = in.dtype;
    return desc;
  }

  LoadedLibrary const& library_;
  tessera_moe_desc desc_;
  Array o_, h_, dx_, dscores_, dw_up_, dw_down_;
  std::vector<char> routing_, workspace_;
  tessera_forward_args forward_{};
  tessera_backward_args backward_{};
};

double cpu_ms() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1) + 0.5)];
}

constexpr char const* kPasses[] = {"forward", "backward", "forward+backward"};
struct Times {
  std::vector<double> ms[3];  ///< of each pass
};

double median_ratio(std::vector<double> const& own, std::vector<double> const& first) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < own.size(); ++i) ratios.push_back(own[i] / first[i]);
  return quantile(ratios, 0.5);
}

std::vector<Times> time_all(std::vector<std::unique_ptr<Layer>> const& layers, int rounds) {
  std::vector<Times> times(layers.size());
  std::vector<std::size_t> order(layers.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::mt19937 random(1);
  for (int round = -kWarmUps; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (std::size_t const next : order) {
      double const begin = cpu_ms();
      layers[next]->forward();
      double const between = cpu_ms();
      layers[next]->backward();
      double const end = cpu_ms();
      if (round < 0) continue;
      times[next].ms[0].push_back(between - begin);
      times[next].ms[1].push_back(end - between);
      times[next].ms[2].push_back(end - begin);
    }
  }
  return times;
}

std::string bench_config(Config const& config, int dtype,
                         std::vector<LoadedLibrary> const& libraries, int rounds) {
  Inputs const inputs(config.shape, dtype);
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<bool> same;
  for (LoadedLibrary const& library : libraries) {
    layers.push_back(std::make_unique<Layer>(library, inputs));
    layers.back()->forward();
    layers.back()->backward();
    same.push_back(layers.back()->same_bits(*layers.front()));
  }
  std::vector<Times> const times = time_all(layers, rounds);
  MoeShape const& s = config.shape;
  char const* const type = dtype == TESSERA_BF16 ? "bf16" : "fp32";
  std::string rows;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    std::printf("%-9s %s %-14s", config.name, type, layers[i]->name().c_str());
    for (int pass = 0; pass < 3; ++pass) {
      std::vector<double> const& own = times[i].ms[pass];
      double const ms = quantile(own, 0.5), p10 = quantile(own, 0.1), p90 = quantile(own, 0.9);
      double const of_first = median_ratio(own, times[0].ms[pass]);
      std::printf("  %8.2f %8.2f (%.3f)", ms, p10, of_first);
      char row[512];
      std::snprintf(row, sizeof row,
                    "%s\n  {\"config\": \"%s\", \"shape\": [%lld, %lld, %lld, %lld, %lld], "
                    "\"dtype\": \"%s\", \"routing\": \"random\", \"router\": \"given\", \"pass\": "
                    "\"%s\", \"impl\": \"tessera\", \"variant\": \"%s\", \"ms\": %.3f, \"ms_p10\": "
                    "%.3f, \"ms_p90\": %.3f, \"of_first\": %.4f, \"bits_of_first\": %s, "
                    "\"checked\": true}",
                    rows.empty() ? "" : ",", config.name, (long long)s.tokens, (long long)s.hidden,
                    (long long)s.intermediate, (long long)s.experts, (long long)s.top_k, type,
                    kPasses[pass], layers[i]->name().c_str(), ms, p10, p90, of_first,
                    same[i] ? "true" : "false");
      rows += row;
    }
    std::printf("%s\n", same[i] ? "" : "  other bits");
  }
  std::fflush(stdout);
  return rows;
}

std::string processor() {
  std::ifstream lines("/proc/cpuinfo");
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

void write_json(std::string const& path, std::string const& command, int rounds, int threads,
                std::string const& rows) {
  std::FILE* const file = std::fopen(path.c_str(), "w");
  if (file == nullptr) fail(path + ": cannot be written");
  char date[16];
  std::time_t const now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
  std::fprintf(
      file,
      "{\"command\": \"%s\", \"device\": \"%s\", \"date\": \"%s\", \"threads\": %d,\n"
      " \"protocol\": \"CPU time of the process, %d rounds after %d; a round runs every build "
      "once, "
      "in random order; of_first: median of the ratio to the first build in the same round\",\n"
      " \"rows\": [%s\n]}\n",
      command.c_str(), processor().c_str(), date, threads, rounds, kWarmUps, rows.c_str());
  std::fclose(file);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::pair<std::string, std::string>> files;
  std::vector<Config> configs;
  std::string dtypes = "fp32,bf16", json, command = "bench_cpu_libraries";
  int rounds = 60, threads = 1;
  for (int i = 1; i < argc; i += 2) {
    std::string const option = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (option == "--library") {
      std::size_t const equals = value.find('=');
      if (equals == std::string::npos) fail("--library " + value + ": NAME=FILE");
      files.emplace_back(value.substr(0, equals), value.substr(equals + 1));
    } else if (option == "--config") {
      auto const* const found = std::find_if(std::begin(kConfigs), std::end(kConfigs),
                                             [&](Config const& c) { return value == c.name; });
      if (found == std::end(kConfigs)) fail("--config " + value + ": cpu-small or cpu-mid");
      configs.push_back(*found);
    } else if (option == "--dtype") {
      dtypes = value;
    } else if (option == "--rounds") {
      rounds = std::atoi(value.c_str());
    } else if (option == "--threads") {
      threads = std::atoi(value.c_str());
    } else if (option == "--json") {
      json = value;
      continue;
    } else {
      fail("unknown option " + option);
    }
    command += " " + option + " " + (option == "--library" ? files.back().first : value);
  }
  if (files.empty() || rounds < 1 || threads < 1) {
    fail("--library NAME=FILE: at least one; --rounds and --threads: at least 1");
  }
  if (configs.empty()) configs.assign(std::begin(kConfigs), std::end(kConfigs));
  std::vector<LoadedLibrary> libraries;
  for (auto const& [name, file] : files) libraries.emplace_back(name, file, TESSERA_CPU, threads);
  std::printf("ms of CPU time: median, tenth percentile (of_first), forward, backward, both\n");
  std::string rows;
  for (Config const& config : configs) {
    for (auto const& [name, dtype] :
         {std::pair{"fp32", TESSERA_FP32}, std::pair{"bf16", TESSERA_BF16}}) {
      if (dtypes.find(name) == std::string::npos) continue;
      std::string const more = bench_config(config, dtype, libraries, rounds);
      rows += (rows.empty() ? "" : ",") + more;
    }
  }
  if (!json.empty()) write_json(json, command, rounds, threads, rows);
  return 0;
}

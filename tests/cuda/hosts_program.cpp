// SPDX-License-Identifier: Apache-2.0
// One rank of experts over several hosts, from C++: tests/python/cuda_several_hosts_test.py starts one of these for
// each GPU, in hosts that they pretend, and compares what it writes with what Python has made of the same tensors.
//
//   cuda_hosts_program FOLDER HOST HOSTS RANK RANKS DEVICE SECONDS [dies|stalls|captured]
//
// FOLDER/desc says max_tokens hidden intermediate experts top_k of all hosts, FOLDER/<rank>.<name> are tensors of the
// rank host*RANKS + rank: tokens, x, topk_ids, topk_weights, d_o, w_up, w_down; results go to
// FOLDER/<rank>.<exchange>.<name>. With dies or stalls the last host is lost after a first pass; with
// captured a pass is captured and replayed.
#include <cuda_runtime.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <tessera/tessera.hpp>
#include <thread>
#include <vector>

#include "examples/cpp/support.hpp"

namespace {

using namespace examples;
using namespace tessera;

struct Arguments {
  std::string folder, then;
  HostPlace place;
  int ranks, device;
  double seconds;
  [[nodiscard]] std::string file(std::string const& name) const {
    return folder + "/" + std::to_string(place.host * ranks + place.rank) + "." + name;
  }
};

std::vector<char> read_file(std::string const& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("no file " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}
void write_file(std::string const& path, std::vector<char> const& bytes) {
  std::ofstream file(path, std::ios::binary);
  if (!file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()))) {
    throw std::runtime_error("cannot write " + path);
  }
}

// Made by the rank that is first, read by the others once it is whole.
PeerGroupId agree(Arguments const& a, std::string const& name, bool first) {
  std::string const path = a.folder + "/" + name;
  PeerGroupId id;
  if (first) {
    id = value_of(PeerWindow::make_id());
    write_file(path + ".part", {std::begin(id.bytes), std::end(id.bytes)});
    std::filesystem::rename(path + ".part", path);
    return id;
  }
  for (int waited = 0; !std::filesystem::exists(path); ++waited) {
    if (waited == 3000) throw std::runtime_error("the first rank has made no " + path);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::vector<char> const bytes = read_file(path);
  std::memcpy(id.bytes, bytes.data(), sizeof id.bytes);
  return id;
}

// Tensors of this rank's GPU. They live as long as the program.
struct Gpu {
  Device device;
  Tensor make(DType dtype, std::initializer_list<std::int64_t> shape) const {
    Tensor made = tensor(static_cast<void*>(nullptr), dtype, shape, device);
    std::size_t const bytes = dtype_bytes(dtype) * static_cast<std::size_t>(made.elements());
    require(cudaMalloc(&made.data, bytes + 16));
    require(cudaMemset(made.data, 0, bytes + 16));
    return made;
  }
  Tensor load(std::string const& path, DType dtype,
              std::initializer_list<std::int64_t> shape) const {
    Tensor const made = make(dtype, shape);
    std::vector<char> const bytes = read_file(path);
    if (bytes.size() != dtype_bytes(dtype) * static_cast<std::size_t>(made.elements())) {
      throw std::runtime_error("another size: " + path);
    }
    require(cudaMemcpy(made.data, bytes.data(), bytes.size(), cudaMemcpyDefault));
    return made;
  }
  void save(std::string const& path, Tensor const& from) const {
    std::vector<char> bytes(dtype_bytes(from.dtype) * static_cast<std::size_t>(from.elements()));
    require(cudaMemcpy(bytes.data(), from.data, bytes.size(), cudaMemcpyDefault));
    write_file(path, bytes);
  }
  Buffer bytes(std::size_t count) const {
    Tensor const memory = make(DType::uint8, {static_cast<std::int64_t>(count)});
    return {memory.data, count};
  }
};

// What a rank says that has waited in vain: the text of each call that reports it.
void report_loss(HostsExperts& experts, HostsForwardArgs const& args,
                 std::chrono::steady_clock::time_point start) {
  Status const synchronized =
      cudaDeviceSynchronize() == cudaSuccess ? Status() : Status::invalid("the stream has failed");
  std::chrono::duration<double> const seconds = std::chrono::steady_clock::now() - start;
  std::printf("after %.1f s: %s%s\n", seconds.count(), experts.check().text(), synchronized.text());
  std::printf("then: %s\n", experts.forward(args).text());
  std::fflush(stdout);
  _exit(0);  // the others are lost, too
}

// Replays of a captured pass on x and on -x, which stands in its place then.
void run_captured(HostsExperts& experts, HostsForwardArgs args, Tensor const& x) {
  args.saved = nullptr;
  std::size_t const bytes = 2 * static_cast<std::size_t>(x.elements());
  auto const results = [&] {
    std::vector<char> o(bytes);
    require(cudaDeviceSynchronize());
    require(cudaMemcpy(o.data(), args.o.data, bytes, cudaMemcpyDefault));
    require(cudaMemset(args.o.data, 0xff, bytes));
    return o;
  };
  std::vector<char> const first_x = [&] {
    std::vector<char> copy(bytes);
    require(cudaMemcpy(copy.data(), x.data, bytes, cudaMemcpyDefault));
    return copy;
  }();
  std::vector<char> other_x = first_x;
  for (std::size_t i = 1; i < bytes; i += 2) other_x[i] = static_cast<char>(other_x[i] ^ 0x80);
  auto const set_x = [&](std::vector<char> const& values) {
    require(cudaMemcpy(x.data, values.data(), bytes, cudaMemcpyDefault));
  };
  std::vector<std::vector<char>> wanted;
  cudaStream_t stream = nullptr;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (auto const& values : {first_x, other_x}) {
    set_x(values);
    require(experts.forward(args, {stream}));
    wanted.push_back(results());
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t made = nullptr;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  Status const captured = experts.forward(args, {stream});
  require(cudaStreamEndCapture(stream, &graph));
  require(captured);
  require(cudaGraphInstantiate(&made, graph, 0));
  for (int i : {0, 1, 0}) {
    set_x(i == 0 ? first_x : other_x);
    require(cudaGraphLaunch(made, stream));
    if (results() != wanted[static_cast<std::size_t>(i)]) {
      throw std::runtime_error("a captured pass has other bits");
    }
  }
  require(cudaGraphExecDestroy(made));
  require(cudaGraphDestroy(graph));
  require(experts.check());
  std::printf("captured: the same bits\n");
}

void run(Arguments const& a) {
  require(cudaSetDevice(a.device));
  std::ifstream file(a.folder + "/desc");
  std::int64_t max_tokens = 0, d = 0, n = 0, experts = 0, top_k = 0;
  if (!(file >> max_tokens >> d >> n >> experts >> top_k)) throw std::runtime_error("no desc");
  std::vector<char> const count = read_file(a.file("tokens"));
  std::int64_t const tokens = std::stoll(std::string(count.begin(), count.end()));
  std::int64_t const own = experts / a.place.hosts / a.ranks;
  Gpu const gpu{{DeviceKind::cuda, a.device}};
  Context const context = value_of(Context::create({.device = gpu.device}));
  Tensor const x = gpu.load(a.file("x"), DType::bf16, {tokens, d});
  Tensor const ids = gpu.load(a.file("topk_ids"), DType::int32, {tokens, top_k});
  Tensor const scores = gpu.load(a.file("topk_weights"), DType::fp32, {tokens, top_k});
  Tensor const d_o = gpu.load(a.file("d_o"), DType::bf16, {tokens, d});
  Tensor const w_up = gpu.load(a.file("w_up"), DType::bf16, {own, 2 * n, d});
  Tensor const w_down = gpu.load(a.file("w_down"), DType::bf16, {own, d, n});
  for (auto const exchange : {HostExchange::all_rows, HostExchange::counted}) {
    std::string const name = exchange == HostExchange::counted ? "counted" : "static";
    HostsDesc const desc = {.place = a.place,
                            .exchange = exchange,
                            .within = {.rank = a.place.rank,
                                       .ranks = a.ranks,
                                       .max_tokens = max_tokens,
                                       .hidden = d,
                                       .intermediate = n,
                                       .experts = experts / a.place.hosts,
                                       .top_k = top_k,
                                       .time_limit = a.seconds + 10,
                                       .training = true}};
    PeerGroupId const of_host =
        agree(a, name + ".host" + std::to_string(a.place.host), a.place.rank == 0);
    PeerGroupId const of_rail =
        agree(a, name + ".rail" + std::to_string(a.place.rank), a.place.host == 0);
    auto window = value_of(PeerWindow::open(context, a.place.rank, a.ranks, of_host,
                                            value_of(ExpertParallel::window_bytes(desc.within))));
    auto rail = value_of(HostRail::open(context, a.place, of_rail, a.seconds));
    auto inner = value_of(ExpertParallel::create(
        context, desc.within, window.addresses(),
        gpu.bytes(value_of(ExpertParallel::workspace_bytes(context, desc.within)))));
    std::optional<HostsExperts> made = value_of(
        HostsExperts::create(context, desc, std::move(inner), std::move(rail),
                             gpu.bytes(value_of(HostsExperts::workspace_bytes(context, desc)))));
    HostsExperts& session = *made;
    Tensor const o = gpu.make(DType::bf16, {tokens, d}), dx = gpu.make(DType::bf16, {tokens, d});
    Tensor const dscores = gpu.make(DType::fp32, {tokens, top_k});
    Tensor const dw_up = gpu.make(DType::fp32, {own, 2 * n, d});
    Tensor const dw_down = gpu.make(DType::fp32, {own, d, n});
    HostsSaved saved;
    saved.memory = gpu.bytes(value_of(HostsExperts::saved_bytes(desc)));
    HostsForwardArgs const forward = {.x = x,
                                      .topk_ids = ids,
                                      .topk_weights = scores,
                                      .w_up = w_up,
                                      .w_down = w_down,
                                      .o = o,
                                      .saved = &saved};
    require(session.forward(forward));
    require(cudaDeviceSynchronize());
    if (a.then == "captured") {
      run_captured(session, forward, x);
      require(session.rail().close());
      made.reset();
      require(window.close());
      return;
    }
    if (!a.then.empty()) {
      if (a.place.host + 1 == a.place.hosts) {
        // What it has sent has come when it dies.
        double const seconds = a.then == "stalls" ? a.seconds + 16 : 1;
        std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
        _exit(0);
      }
      auto const start = std::chrono::steady_clock::now();
      static_cast<void>(session.forward(forward));  // may say it already
      report_loss(session, forward, start);
    }
    require(session.backward({.d_o = d_o,
                              .x = x,
                              .w_up = w_up,
                              .w_down = w_down,
                              .saved = &saved,
                              .dx = dx,
                              .dscores = dscores,
                              .dw_up = dw_up,
                              .dw_down = dw_down}));
    require(cudaDeviceSynchronize());
    require(session.check());
    std::string const prefix = name + ".";
    gpu.save(a.file(prefix + "o"), o);
    gpu.save(a.file(prefix + "x"), dx);
    gpu.save(a.file(prefix + "topk_weights"), dscores);
    gpu.save(a.file(prefix + "w_up"), dw_up);
    gpu.save(a.file(prefix + "w_down"), dw_down);
    std::string sent;
    for (std::int64_t const bytes : session.rail().bytes_sent()) {
      sent += " " + std::to_string(bytes);
    }
    std::printf("%s sent%s\n", name.c_str(), sent.c_str());
    require(session.rail().close());
    if (session.forward(forward).code() != StatusCode::invalid_argument) {
      throw std::runtime_error("a pass without a rail");
    }
    made.reset();
    require(window.close());
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 8 || argc > 9) {
    std::fprintf(stderr,
                 "usage: %s FOLDER HOST HOSTS RANK RANKS DEVICE SECONDS [dies|stalls|captured]\n",
                 argv[0]);
    return 2;
  }
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  try {
    run({.folder = argv[1],
         .then = argc > 8 ? argv[8] : "",
         .place = {std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4])},
         .ranks = std::atoi(argv[5]),
         .device = std::atoi(argv[6]),
         .seconds = std::atof(argv[7])});
  } catch (std::exception const& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}

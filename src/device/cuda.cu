// SPDX-License-Identifier: Apache-2.0
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cxxabi.h>

#include <cstdlib>
#include <new>

#include "device/device.hpp"

namespace tessera::device {
namespace {

void require(cudaError_t error, char const* what) {
  if (error != cudaSuccess) throw Error(std::string(what) + ": " + cudaGetErrorString(error));
}

cudaStream_t native_of(Stream const& stream) {
  return static_cast<cudaStream_t>(stream.handle().native);
}

/// A driver function, found at run time: nothing links against libcuda.
template <class Function>
Function* driver_function(char const* name, unsigned version) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  require(cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess) throw Error(std::string(name) + ": not in this driver");
  return reinterpret_cast<Function*>(entry);
}

std::string kernel_name(cudaGraphNode_t node) {
  static auto* const get_params =
      driver_function<CUresult(CUgraphNode, CUDA_KERNEL_NODE_PARAMS_v2*)>(
          "cuGraphKernelNodeGetParams", 12000);
  static auto* const kernel_get_name =
      driver_function<CUresult(char const**, CUkernel)>("cuKernelGetName", 12030);
  static auto* const function_get_name =
      driver_function<CUresult(char const**, CUfunction)>("cuFuncGetName", 12030);
  CUDA_KERNEL_NODE_PARAMS_v2 params{};
  char const* mangled = nullptr;
  if (get_params(node, &params) != CUDA_SUCCESS) return "unknown";
  CUresult const result = params.func != nullptr ? function_get_name(&mangled, params.func)
                                                 : kernel_get_name(&mangled, params.kern);
  if (result != CUDA_SUCCESS) return "unknown";
  int status = 0;
  char* const readable = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string const name = status == 0 ? readable : mangled;
  std::free(readable);
  return name;
}

cudaGraph_t capture(Stream const& stream, std::function<void()> const& body) {
  cudaStream_t const native = native_of(stream);
  require(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal), "graph capture");
  cudaGraph_t graph = nullptr;
  try {
    body();
  } catch (...) {
    cudaStreamEndCapture(native, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  require(cudaStreamEndCapture(native, &graph), "graph capture");
  return graph;
}

/// Owns nothing afterwards: the graph is destroyed.
cudaGraphExec_t instantiate(cudaGraph_t graph) {
  cudaGraphExec_t executable = nullptr;
  cudaError_t const error = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  require(error, "graph");
  return executable;
}

/// Nodes of a chain, first to last.
std::vector<cudaGraphNode_t> chain_of(cudaGraph_t graph) {
  std::size_t count = 0;
  require(cudaGraphGetNodes(graph, nullptr, &count), "graph nodes");
  std::vector<cudaGraphNode_t> nodes(1);
  std::size_t roots = 1;
  require(cudaGraphGetRootNodes(graph, nodes.data(), &roots), "graph roots");
  while (nodes.size() < count) {
    cudaGraphNode_t next = nullptr;
    std::size_t followers = 1;
    cudaGraphEdgeData edge{};
    require(cudaGraphNodeGetDependentNodes(nodes.back(), &next, &edge, &followers), "graph edge");
    if (followers != 1) throw Error("graph: its nodes are no chain");
    nodes.push_back(next);
  }
  return nodes;
}

__global__ void uniform_values(__nv_bfloat16* gmem, std::int64_t count, std::uint64_t seed,
                               float scale) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    gmem[i] = __float2bfloat16_rn(uniform_value(static_cast<std::uint64_t>(i), seed, scale));
  }
}

__global__ void stamp(long long* gmem_cycles) { *gmem_cycles = clock64(); }

// Openings may wrap around. A spin is a read of the host's memory, about a microsecond.
__global__ void wait_until(std::uint32_t const volatile* opened, std::uint32_t opening) {
  constexpr int kMaxSpins = 10'000'000;
  for (int i = 0; i < kMaxSpins && static_cast<std::int32_t>(*opened - opening) < 0; ++i) {
  }
}

}  // namespace

void Release::operator()(std::byte* memory) const noexcept { cudaFree(memory); }

Memory allocate(std::int32_t device, std::size_t bytes, Kind kind) {
  require(cudaSetDevice(device), "current device");
  void* memory = nullptr;
  std::size_t const size = bytes == 0 ? 1 : bytes;
  require(kind == Kind::managed ? cudaMallocManaged(&memory, size) : cudaMalloc(&memory, size),
          "device memory");
  return Memory(static_cast<std::byte*>(memory));
}

void enable_peer_access(std::int32_t device, std::int32_t peer) {
  if (device == peer) return;
  require(cudaSetDevice(device), "current device");
  cudaError_t const error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return;
  }
  require(error,
          ("peer access of cuda:" + std::to_string(device) + " to cuda:" + std::to_string(peer))
              .c_str());
}

void upload(void* to, void const* from, std::size_t bytes) {
  require(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copy to the device");
}

void download(void* to, void const* from, std::size_t bytes) {
  require(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copy from the device");
}

Stream::Stream(std::int32_t device) {
  require(cudaSetDevice(device), "current device");
  cudaStream_t native = nullptr;
  require(cudaStreamCreateWithFlags(&native, cudaStreamNonBlocking), "stream");
  native_ = native;
}
Stream::~Stream() {
  if (native_ != nullptr) cudaStreamDestroy(native_of(*this));
}
void Stream::synchronize() const { require(cudaStreamSynchronize(native_of(*this)), "stream"); }
void Stream::fill_uniform(void* bf16, std::int64_t count, std::uint64_t seed, float scale) const {
  constexpr unsigned kCtas = 4096, kThreads = 256;
  uniform_values<<<kCtas, kThreads, 0, native_of(*this)>>>(static_cast<__nv_bfloat16*>(bf16), count,
                                                           seed, scale);
  require(cudaGetLastError(), "random values");
}
void Stream::fill(void* to, int value, std::size_t bytes) const {
  require(cudaMemsetAsync(to, value, bytes, native_of(*this)), "fill");
}
void Stream::copy(void* to, void const* from, std::size_t bytes) const {
  require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, native_of(*this)), "copy");
}

Graph::Graph(Stream const& stream, std::function<void()> const& body)
    : executable_(instantiate(capture(stream, body))) {}
Graph::~Graph() {
  if (executable_ != nullptr) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable_));
}
void Graph::launch(Stream const& stream) const {
  require(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable_), native_of(stream)),
          "graph launch");
}

std::vector<KernelGraph> kernel_graphs(Stream const& stream, std::function<void()> const& body) {
  cudaGraph_t const graph = capture(stream, body);
  std::vector<cudaGraphNode_t> const nodes = chain_of(graph);
  std::vector<KernelGraph> kernels;
  for (cudaGraphNode_t const node : nodes) {
    cudaGraphNodeType type{};
    require(cudaGraphNodeGetType(node, &type), "graph node");
    if (type != cudaGraphNodeTypeKernel) continue;
    cudaGraph_t clone = nullptr;
    require(cudaGraphClone(&clone, graph), "graph clone");
    for (cudaGraphNode_t const other : nodes) {
      if (other == node) continue;
      cudaGraphNode_t cloned = nullptr;
      require(cudaGraphNodeFindInClone(&cloned, other, clone), "graph clone");
      require(cudaGraphDestroyNode(cloned), "graph node");
    }
    kernels.push_back({kernel_name(node), Graph(static_cast<void*>(instantiate(clone)))});
  }
  cudaGraphDestroy(graph);
  return kernels;
}

Event::Event() {
  cudaEvent_t native = nullptr;
  require(cudaEventCreate(&native), "event");
  native_ = native;
}
Event::~Event() {
  if (native_ != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(native_));
}
void Event::record(Stream const& stream) const {
  require(cudaEventRecord(static_cast<cudaEvent_t>(native_), native_of(stream)), "event");
}
float Event::since(Event const& start) const {
  float ms = 0;
  require(cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(start.native_),
                               static_cast<cudaEvent_t>(native_)),
          "event");
  return ms;
}

Stopwatch::Stopwatch(std::int32_t device)
    : stamps_(allocate(device, 2 * sizeof(long long), Kind::device)) {
  cudaFuncAttributes attributes;  // loads the kernel now: later that might wait for a held stream
  require(cudaFuncGetAttributes(&attributes, stamp), "stamp");
}
void Stopwatch::start(Stream const& stream) const {
  stamp<<<1, 1, 0, native_of(stream)>>>(reinterpret_cast<long long*>(stamps_.get()));
  require(cudaGetLastError(), "stamp");
  start_.record(stream);
}
void Stopwatch::stop(Stream const& stream) const {
  stop_.record(stream);
  stamp<<<1, 1, 0, native_of(stream)>>>(reinterpret_cast<long long*>(stamps_.get()) + 1);
  require(cudaGetLastError(), "stamp");
  end_.record(stream);
}
float Stopwatch::mhz() const {
  long long stamps[2];
  download(stamps, stamps_.get(), sizeof stamps);
  float const mhz = static_cast<float>(stamps[1] - stamps[0]) / (1e3f * end_.since(start_));
  return mhz > 100 && mhz < 4000 ? mhz : 0;
}

Gate::Gate() {
  void* memory = nullptr;
  require(cudaHostAlloc(&memory, sizeof *opened_, cudaHostAllocPortable), "pinned memory");
  opened_ = new (memory) std::uint32_t volatile {0};
}
Gate::~Gate() { cudaFreeHost(const_cast<std::uint32_t*>(opened_)); }
void Gate::hold(Stream const& stream, std::uint32_t opening) const {
  wait_until<<<1, 1, 0, native_of(stream)>>>(opened_, opening);
  require(cudaGetLastError(), "gate");
}
void Gate::open() noexcept { *opened_ = *opened_ + 1; }

Facts facts(std::int32_t device) {
  cudaDeviceProp properties;
  require(cudaGetDeviceProperties(&properties, device), "device");
  int version = 0;
  require(cudaDriverGetVersion(&version), "driver");
  return {properties.name,
          "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10),
          properties.totalGlobalMem, static_cast<std::size_t>(properties.l2CacheSize)};
}

std::size_t free_bytes() {
  std::size_t free = 0, total = 0;
  require(cudaMemGetInfo(&free, &total), "device memory");
  return free;
}

}  // namespace tessera::device

// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include "device/device.hpp"

namespace tessera::device {
namespace {

void require(cudaError_t error, char const* what) {
  if (error != cudaSuccess) throw Error(std::string(what) + ": " + cudaGetErrorString(error));
}

cudaStream_t native_of(Stream const& stream) {
  return static_cast<cudaStream_t>(stream.handle().native);
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
void Stream::fill(void* to, int value, std::size_t bytes) const {
  require(cudaMemsetAsync(to, value, bytes, native_of(*this)), "fill");
}
void Stream::copy(void* to, void const* from, std::size_t bytes) const {
  require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, native_of(*this)), "copy");
}

Graph::Graph(Stream const& stream, std::function<void()> const& body) {
  cudaStream_t const native = native_of(stream);
  require(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal), "graph capture");
  try {
    body();
  } catch (...) {
    cudaGraph_t left = nullptr;
    cudaStreamEndCapture(native, &left);
    if (left != nullptr) cudaGraphDestroy(left);
    throw;
  }
  cudaGraph_t graph = nullptr;
  require(cudaStreamEndCapture(native, &graph), "graph capture");
  cudaGraphExec_t executable = nullptr;
  cudaError_t const error = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  require(error, "graph");
  executable_ = executable;
}
Graph::~Graph() {
  if (executable_ != nullptr) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable_));
}
void Graph::launch(Stream const& stream) const {
  require(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable_), native_of(stream)),
          "graph launch");
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

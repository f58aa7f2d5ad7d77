// SPDX-License-Identifier: Apache-2.0
// Memory, streams, graphs and clocks of CUDA devices for programs and tests that call the library; never part of it.
// No CUDA headers: a build without CUDA has the same functions (none.cpp), which throw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tessera/context.hpp"

namespace tessera::device {

/// A CUDA call that failed: which, and why.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Memory of `device`. `managed`: one address for host and device, which move it to where it is used; the host may
/// read and write it while no work runs.
enum class Kind { device, managed };
struct Release {
  void operator()(std::byte* memory) const noexcept;
};
using Memory = std::unique_ptr<std::byte[], Release>;
Memory allocate(std::int32_t device, std::size_t bytes, Kind kind);

/// Lets kernels of `device` address the memory of `peer`.
void enable_peer_access(std::int32_t device, std::int32_t peer);

/// Copies that are finished on return.
void upload(void* to, void const* from, std::size_t bytes);
void download(void* to, void const* from, std::size_t bytes);

#if defined(__CUDACC__)
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif

/// Element `index` of a tensor of values spread evenly over [-scale, scale), before its rounding to bf16.
TESSERA_HOST_DEVICE inline float uniform_value(std::uint64_t index, std::uint64_t seed,
                                               float scale) {
  std::uint64_t z = (index + seed * 0x632be59bd9b4e019u) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return scale * (static_cast<float>(z >> 40) * 0x1p-23f - 1.0f);
}

class Stream {
 public:
  explicit Stream(std::int32_t device);
  ~Stream();
  Stream(Stream&& other) noexcept : native_(other.native_) { other.native_ = nullptr; }
  Stream& operator=(Stream&&) = delete;

  [[nodiscard]] tessera::Stream handle() const noexcept { return {native_}; }
  void synchronize() const;
  /// uniform_value() of every element, as bf16.
  void fill_uniform(void* bf16, std::int64_t count, std::uint64_t seed, float scale) const;
  /// Sets `bytes` bytes to `value`; copies from device to device.
  void fill(void* to, int value, std::size_t bytes) const;
  void copy(void* to, void const* from, std::size_t bytes) const;

 private:
  void* native_ = nullptr;
};

/// Holds what `body` enqueues on a stream, captured once and launched at will.
class Graph {
 public:
  Graph(Stream const& stream, std::function<void()> const& body);
  ~Graph();
  Graph(Graph&& other) noexcept : executable_(other.executable_) { other.executable_ = nullptr; }
  Graph& operator=(Graph&&) = delete;
  void launch(Stream const& stream) const;

 private:
  explicit Graph(void* executable) : executable_(executable) {}
  friend std::vector<struct KernelGraph> kernel_graphs(Stream const&, std::function<void()> const&);
  void* executable_ = nullptr;
};

/// One kernel of what `body` enqueues, as a graph of its own: to time it apart.
struct KernelGraph {
  std::string name;  ///< of the function, with its namespaces and template arguments
  Graph graph;
};
/// All kernels of what `body` enqueues, in order.
std::vector<KernelGraph> kernel_graphs(Stream const& stream, std::function<void()> const& body);

/// A moment in a stream.
class Event {
 public:
  Event();
  ~Event();
  Event(Event&& other) noexcept : native_(other.native_) { other.native_ = nullptr; }
  Event& operator=(Event&&) = delete;
  void record(Stream const& stream) const;
  /// Milliseconds from `start` to this one; both must have happened.
  [[nodiscard]] float since(Event const& start) const;

 private:
  void* native_ = nullptr;
};

/// Time and mean SM clock of what a stream does between two calls; read when that is over.
class Stopwatch {
 public:
  explicit Stopwatch(std::int32_t device);
  void start(Stream const& stream) const;
  void stop(Stream const& stream) const;
  [[nodiscard]] float ms() const { return stop_.since(start_); }
  /// 0: not known, as the two readings came from SMs whose clocks count apart.
  [[nodiscard]] float mhz() const;

 private:
  Event start_, stop_, end_;
  Memory stamps_;  // cycles of an SM
};

/// Holds streams, of any devices, until the host lets them go: what is enqueued behind it begins everywhere within two
/// microseconds, without the time that the host takes to enqueue it. Shut again once open. A stream goes on by itself
/// after about ten seconds.
class Gate {
 public:
  Gate();
  ~Gate();
  Gate(Gate const&) = delete;
  Gate& operator=(Gate const&) = delete;
  /// Enqueues the wait for the `opening`-th open(), counted from 1.
  void hold(Stream const& stream, std::uint32_t opening) const;
  /// One thread calls it.
  void open() noexcept;

 private:
  std::uint32_t volatile* opened_ = nullptr;  // pinned
};

/// Holds what a results file says about a device.
struct Facts {
  std::string name, driver;
  std::size_t memory_bytes = 0, l2_bytes = 0;
};
Facts facts(std::int32_t device);
std::size_t free_bytes();

}  // namespace tessera::device
